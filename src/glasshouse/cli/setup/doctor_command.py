"""`glasshouse doctor`: what this machine offers, which assurance it can reach, and what its host could still see."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import HomeOption, Json
from glasshouse.cli.show.output import Output, printable
from glasshouse.errors import Code, PlatformError

if TYPE_CHECKING:
    from glasshouse.runtime.run.findings import Finding

__all__ = ["command"]

_MARKS = {"good": ("✓", "green"), "weaker": ("!", "yellow"), "missing": ("✗", "bold red"), "note": ("·", "dim")}
_HOST_SEES = "host-sees-"


def command(
    on: Annotated[
        str, typer.Option("--on", metavar="MACHINE", help="Look at a machine: a name, or ssh://user@host.")
    ] = "local",
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    found = _here() if on == "local" else _there(on, home)
    output = Output(as_json)
    by_name = {finding.feature: finding.value for finding in found}
    output.result(
        {
            "assurance": by_name.get("assurance"),
            "profile": by_name.get("profile"),
            "findings": [finding.to_json() for finding in found],
        }
    )
    if not output.as_json:
        _say(output, found, "This machine" if on == "local" else on)


def _there(on: str, home: Path | None) -> list[Finding]:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.places.known_machines import examine

    return examine(Home.locate(home), on)


def _here() -> list[Finding]:
    if not sys.platform.startswith("linux"):
        raise PlatformError(
            Code.PLATFORM,
            "runtimes need Linux; this machine can seal, serve as broker, verify and fetch",
            hint="look at the machine that shall train: glasshouse doctor --on MACHINE",
        )
    from glasshouse.runtime.run.doctor import examine

    return examine()


def _say(output: Output, found: list[Finding], machine: str) -> None:
    output.say(machine, style="bold")
    _table(output, [finding for finding in found if not finding.feature.startswith(_HOST_SEES)])
    output.say("")
    output.say("What its host could see or do all the same, at the assurance it can reach", style="bold")
    for finding in found:
        if finding.feature.startswith(_HOST_SEES):
            output.say(f"  {printable(finding.feature.removeprefix(_HOST_SEES))}: {printable(finding.consequence)}")


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
        # Another machine's words are shown and not obeyed.
        words = [Text(printable(text, keep="")) for text in (finding.feature, finding.value, finding.consequence)]
        words[2].stylize("dim")
        table.add_row(Text(mark, style=style), *words)
    output.console.print(table)
