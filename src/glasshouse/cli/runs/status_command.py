"""`glasshouse status [RUN]`: the runs, newest first, or one of them."""

from __future__ import annotations

import time
from typing import Annotated, Any

from rich.table import Table
from rich.text import Text

from glasshouse.cli.options import HomeOptions, argument, option, sealing_without_asking
from glasshouse.cli.show.ending import say_ended
from glasshouse.cli.show.output import CommandOutput, printable
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.results.line_account import line_account
from glasshouse.jobs.results.summary import rental_and_cost, summary
from glasshouse.jobs.supervise.control import RunLook, concluded, look, looks
from glasshouse.jobs.supervise.supervision import Ended

_GAP = 2
_JOB_CHARS = 8
# What a narrow terminal does without, in this order.
_GO_FIRST = ("receipt", "loss", "done", "began", "job")


def command(
    run: Annotated[str | None, argument("[RUN]", "Run id, beginning of one, or `latest`.")] = None,
    newest: Annotated[int | None, option("-n --newest N", "Only the newest N.", min=1)] = None,
    *,
    options: HomeOptions,
) -> int:
    """Print the table of the runs, or the summary of one."""
    output, home = options.output, options.own_home
    options.mention_old()
    if run is not None:
        _one(look(RunFolder.find(home, run), home), options)
        return ExitCode.DONE
    found = looks(home, newest=newest)
    output.result({"home": str(home.path), "runs": [_brief(one) for one in found]})
    if not output.as_json:
        _table(output, found)
    return ExitCode.DONE


def _one(found: RunLook, options: HomeOptions) -> None:
    output, home, folder, record = options.output, options.own_home, found.folder, found.record
    if record.phase is Phase.ENDED:
        ended = Ended(folder=folder, record=record, seen=found.seen, conclusion=concluded(folder, home, record))
        sealing, signing = sealing_without_asking(home), read_public(home.owner_public).signing
        say_ended(output, ended, sealing=sealing, owner_signing=signing, home=options.home)
        return
    rental, cost, unread = rental_and_cost(home, folder, record, None)
    if unread:
        output.warn(unread)
    line = line_account(home, record)
    output.result(summary(folder, record, found.seen, None, rental=rental, cost=cost, line=line) | _brief(found))
    if not output.as_json:
        _table(output, [found])
        for leg in line if len(line) > 1 else ():
            output.say(printable(leg.words))


def _brief(found: RunLook) -> dict[str, Any]:
    record, seen, work = found.record, found.seen, found.progress
    return {
        "run_id": record.run_id,
        "name": record.name,
        "workload": record.workload,
        "gate": record.gate,
        "leg": record.leg,
        "phase": found.doing,
        "state": seen.state.value if seen.state else None,
        "outcome": record.outcome,
        "code": record.code,
        "verdict": record.verdict,
        "machines": 1 if record.group is None else record.group.machines,
        "ranks": None if record.group is None else record.group.ranks,
        "progress": None if work is None else work | {"rate_per_s": seen.rate_per_s},
        "created_us": record.created_us,
        "ended_us": record.ended_us,
    }


def _table(output: CommandOutput, found: list[RunLook]) -> None:
    if not found:
        output.say("No runs yet: glasshouse run JOB.toml")
        return
    rows: list[dict[str, Text]] = []
    for one in found:
        work = one.progress
        done = "" if work is None else f"{work['done']}" + (f"/{work['total']}" if work["total"] else "")
        row: dict[str, str | Text] = {
            "run": one.record.run_id[:8],
            "job": printable(one.record.name, keep=""),
            "is": _doing(one),
            "done": "" if work is None or not work["done"] else f"{done} {work['unit']}s",
            "loss": "" if work is None or work["loss"] is None else f"{float(work['loss']):.4g}",
            "receipt": one.record.verdict or "",
            "began": _began(one.record.created_us / 1e6),
        }
        rows.append({name: Text(cell) if isinstance(cell, str) else cell for name, cell in row.items()})
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    for name, width in _fitted(rows, output.console.width).items():
        table.add_column(name, no_wrap=True, width=width, overflow="ellipsis")
    for cells in rows:
        table.add_row(*(cells[column.header] for column in table.columns if isinstance(column.header, str)))
    # A line that a narrow terminal breaks can still be read; a state that is cut off cannot.
    output.console.print(table, soft_wrap=False, crop=False)


def _fitted(rows: list[dict[str, Text]], room: int) -> dict[str, int]:
    """Return the columns that fit, and their widths; how a run stands is never cut, other things go first."""
    widths = {name: max(len(name), *(row[name].cell_len for row in rows)) for name in rows[0]}

    def excess() -> int:
        return sum(widths.values()) + _GAP * len(widths) - room

    if excess() > 0:
        widths["job"] = max(min(widths["job"], _JOB_CHARS), widths["job"] - excess())
    for name in _GO_FIRST:
        if excess() > 0:
            del widths[name]
    return widths


def _doing(found: RunLook) -> Text:
    outcome = found.record.outcome
    if outcome is None:
        state = found.seen.state.value if found.seen.state else found.doing
        return Text(state if found.doing != "unattended" else f"{state}, unattended", style="cyan")
    style = {"completed": "green", "interrupted": "yellow"}.get(outcome, "red")
    why = f" ({found.record.code})" if found.record.code not in (None, outcome) else ""
    return Text(outcome + why, style=style)


def _began(seconds: float) -> str:
    """Return the time of today's runs and the date of others."""
    then, now = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d", then)
