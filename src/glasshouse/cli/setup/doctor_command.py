"""`glasshouse doctor`: what this machine offers, which assurance it can reach, and what its host could still see."""

from __future__ import annotations

import sys
from typing import Annotated

from rich.table import Table
from rich.text import Text

from glasshouse.cli.options import HomeOptions, option
from glasshouse.cli.show.output import CommandOutput, printable
from glasshouse.errors import Code, PlatformError
from glasshouse.jobs.places import known_machines
from glasshouse.runtime.run.findings import Finding

_MARKS = {"good": ("✓", "green"), "weaker": ("!", "yellow"), "missing": ("✗", "bold red"), "note": ("·", "dim")}
_HOST_SEES = "host-sees-"


def command(
    on: Annotated[str, option("--on MACHINE", "Look at a machine: a name, or ssh://user@host.")] = "local",
    *,
    options: HomeOptions,
) -> None:
    """Print what was found on a machine."""
    output, found = options.output, _here() if on == "local" else known_machines.examine(options.any_home, on)
    by_name = {finding.feature: finding.value for finding in found}
    findings = [finding.to_json() for finding in found]
    output.result({"assurance": by_name.get("assurance"), "profile": by_name.get("profile"), "findings": findings})
    output.say("This machine" if on == "local" else on, style="bold")
    if not output.as_json:
        _print_table(output, [finding for finding in found if not finding.feature.startswith(_HOST_SEES)])
    output.say("")
    output.say("What its host could see or do all the same, at the assurance it can reach", style="bold")
    for finding in found:
        if finding.feature.startswith(_HOST_SEES):
            output.say(f"  {printable(finding.feature.removeprefix(_HOST_SEES))}: {printable(finding.consequence)}")


def _here() -> list[Finding]:
    if not sys.platform.startswith("linux"):
        why = "runtimes need Linux; this machine can seal, serve as broker, verify and fetch"
        hint = "look at the machine that shall train: glasshouse doctor --on MACHINE"
        raise PlatformError(Code.PLATFORM, why, hint=hint)
    from glasshouse.runtime.run.doctor import examine  # which cannot be imported elsewhere

    return examine()


def _print_table(output: CommandOutput, found: list[Finding]) -> None:
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
