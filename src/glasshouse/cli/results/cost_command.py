"""`glasshouse cost RUN`: what a run cost, which part of that was not training, and what protection added."""

from __future__ import annotations

import time
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, Run, locate
from glasshouse.cli.show.costs import cost_facts
from glasshouse.cli.show.output import Output
from glasshouse.cli.show.words import verdict_words
from glasshouse.errors import Code, UsageError

if TYPE_CHECKING:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.verify.verify_named import Verified

__all__ = ["command"]

_MOST_PER_HOUR = 100_000


def command(
    run: Run = "latest",
    measurement: Annotated[
        Path | None,
        typer.Option(
            "--measurement", metavar="DIR", help="Of `glasshouse bench`, verified first: by how much it slows a step."
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="NAME|FILE", help="Of the measurement; by default whose it is.")
    ] = None,
    usd_per_hour: Annotated[
        str | None, typer.Option("--usd-per-hour", metavar="X", help="What an hour of a machine of your own costs.")
    ] = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.rundir import Phase, RunFolder
    from glasshouse.jobs.places.rented_machine import statement_of
    from glasshouse.jobs.results.run_cost import cost_of, slowdown_of
    from glasshouse.jobs.supervise.control import concluded, look

    output, place, now_us = Output(as_json), locate(home), time.time_ns() // 1000
    price = None if usd_per_hour is None else _price(usd_per_hour)
    found = look(RunFolder.find(place, run), place, deep=False)
    record = found.record
    slowdown, warning, told = None, "", None
    if measurement is not None:
        verified = _measured(measurement, place, owner)
        verdict, trust = verified.verdict, verified.trust
        slowdown, warning = slowdown_of(verdict.to_json()), trust.warning
        told = {"path": str(measurement), "owner": trust.owner.fingerprint, "owner_trust": trust.to_json()}
        told |= {"verdict": verdict.sentence}
    ended = concluded(found.folder, place, record) if record.phase is Phase.ENDED else None
    statement = statement_of(place, found.folder, now_us)
    cost = cost_of(
        statement,
        None if ended is None else ended.receipt,
        now_us=now_us,
        placed_us=record.placed_us,
        usd_per_hour=price,
        slowdown=slowdown,
    )
    result = {"run_id": record.run_id, "place": record.place, "workload": record.workload, "rental": statement}
    verdict_of_run = None if ended is None else ended.verdict
    output.result(result | {"receipt": verdict_of_run, "cost": cost.to_json(), "measurement": told})
    output.say(f"Run {record.run_id[:8]} · {record.name} · {record.workload} on {record.place}", style="bold")
    facts: dict[str, object] = {**cost_facts(statement, cost, workload=record.workload)}
    if slowdown is None:
        facts["slowdown"] = "not known: --measurement DIR names a measurement of `glasshouse bench`"
    if record.group is not None and record.group.machines > 1:
        facts["machines"] = f"all of this is of machine 0 alone, of {record.group.machines}"
    level = None if ended is None or ended.receipt is None else ended.receipt.assurance
    words = "none yet: the run goes on" if ended is None else verdict_words(ended.verdict, level and level.value)
    output.facts(facts | {"receipt": words})
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


def _measured(path: Path, place: Home, owner: str | None) -> Verified:
    from glasshouse.jobs.verify.verify_named import measurement_in, verify_measured

    folder = measurement_in(path)
    if folder is None:
        raise UsageError(
            Code.FILE_MISSING,
            f"{path} holds no measurement",
            hint="name the folder with the statement.json that glasshouse bench overhead wrote",
        )
    return verify_measured(folder, place, owner=owner)
