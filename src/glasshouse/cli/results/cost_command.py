"""`glasshouse cost RUN`: what a run cost, which part of that was not training, and what protection added."""

from __future__ import annotations

import time
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import HomeOptions, Run, option
from glasshouse.cli.show.costs import cost_facts
from glasshouse.cli.show.output import verdict_words
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.rented_machine import statement_of
from glasshouse.jobs.results.run_cost import cost_of, slowdown_of
from glasshouse.jobs.supervise.control import concluded, look
from glasshouse.jobs.verify.verify_named import Verified, measurement_in, verify_measured

_MOST_PER_HOUR = 100_000


def command(
    run: Run = "latest",
    measurement: Annotated[
        Path | None, option("--measurement DIR", "Of `glasshouse bench`, verified first: by how much it slows a step.")
    ] = None,
    owner: Annotated[str | None, option("--owner NAME|FILE", "Of the measurement; by default whose it is.")] = None,
    usd_per_hour: Annotated[
        str | None, option("--usd-per-hour X", "What an hour of a machine of your own costs.")
    ] = None,
    *,
    options: HomeOptions,
) -> None:
    """Print a run's cost, part by part."""
    output, home, now_us = options.output, options.own_home, time.time_ns() // 1000
    price = None if usd_per_hour is None else _price(usd_per_hour)
    found = look(RunFolder.find(home, run), home, deep=False)
    record = found.record
    slowdown, warning, measured = None, "", None
    if measurement is not None:
        verified = _measured(measurement, home, owner)
        slowdown, trust = slowdown_of(verified.verdict.to_json()), verified.trust
        warning = trust.warning
        measured = {"path": str(measurement), "owner": trust.owner.fingerprint, "owner_trust": trust.to_json()}
        measured |= {"verdict": verified.verdict.sentence}
    ended = concluded(found.folder, home, record) if record.phase is Phase.ENDED else None
    receipt, verdict = (None, None) if ended is None else (ended.receipt, ended.verdict)
    statement = statement_of(home, found.folder, now_us)
    cost = cost_of(statement, receipt, now_us=now_us, placed_us=record.placed_us, usd_per_hour=price, slowdown=slowdown)
    result = {"run_id": record.run_id, "place": record.place, "workload": record.workload, "rental": statement}
    output.result(result | {"receipt": verdict, "cost": cost.to_json(), "measurement": measured})
    output.say(f"Run {record.run_id[:8]} · {record.name} · {record.workload} on {record.place}", style="bold")
    facts: dict[str, object] = {**cost_facts(statement, cost, workload=record.workload)}
    if slowdown is None:
        facts["slowdown"] = "not known: --measurement DIR names a measurement of `glasshouse bench`"
    if record.group is not None and record.group.machines > 1:
        facts["machines"] = f"all of this is of machine 0 alone, of {record.group.machines}"
    level = None if receipt is None or receipt.assurance is None else receipt.assurance.value
    facts["receipt"] = "none yet: the run goes on" if ended is None else verdict_words(verdict, level)
    output.facts(facts)
    if warning:
        output.say(warning, style="bold yellow")


def _price(text: str) -> Decimal:
    try:
        price = Decimal(text)
    except InvalidOperation:
        price = Decimal("NaN")
    if not price.is_finite() or not 0 <= price <= _MOST_PER_HOUR:
        raise UsageError(Code.USAGE, f"--usd-per-hour takes US dollars, such as 0.45, not {text[:40]!r}")
    return price


def _measured(path: Path, home: Home, owner: str | None) -> Verified:
    folder = measurement_in(path)
    if folder is None:
        hint = "name the folder with the statement.json that glasshouse bench overhead wrote"
        raise UsageError(Code.FILE_MISSING, f"{path} holds no measurement", hint=hint)
    return verify_measured(folder, home, owner=owner)
