"""`glasshouse doctor`: what this machine offers, which assurance it can reach, and what its host could still see."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from glasshouse.cli.options import Json
from glasshouse.cli.output import Output
from glasshouse.errors import Code, PlatformError

if TYPE_CHECKING:
    from glasshouse.runtime.doctor import Finding

__all__ = ["command"]

_MARKS = {"good": ("✓", "green"), "weaker": ("!", "yellow"), "missing": ("✗", "bold red"), "note": ("·", "dim")}
_HOST_SEES = "host-sees-"


def command(as_json: Json = False) -> None:
    if not sys.platform.startswith("linux"):
        raise PlatformError(
            Code.PLATFORM,
            "runtimes need Linux; this machine can seal, serve as broker, verify and fetch",
            hint="run doctor on the machine that shall train",
        )
    from glasshouse.runtime.doctor import examine

    output, found = Output(as_json), examine()
    by_name = {finding.feature: finding.value for finding in found}
    output.result(
        {
            "assurance": by_name.get("assurance"),
            "profile": by_name.get("profile"),
            "findings": [finding.to_json() for finding in found],
        }
    )
    if not output.as_json:
        _say(output, found)


def _say(output: Output, found: list[Finding]) -> None:
    output.say("This machine", style="bold")
    _table(output, [finding for finding in found if not finding.feature.startswith(_HOST_SEES)])
    output.say("")
    output.say("What its host could see or do all the same, at the assurance it can reach", style="bold")
    for finding in found:
        if finding.feature.startswith(_HOST_SEES):
            output.say(f"  {finding.feature.removeprefix(_HOST_SEES)}: {finding.consequence}")


def _table(output: Output, found: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        mark, style = _MARKS[finding.standing.value]
        table.add_row(Text(mark, style=style), finding.feature, finding.value, Text(finding.consequence, style="dim"))
    output.console.print(table)
