"""`glasshouse tamper`: attacks and their controls, against a live broker over HTTP."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from glasshouse.cli.options import JsonOptions
from glasshouse.errors import ExitCode
from glasshouse.tamper.attacks import run_attacks


def command(*, options: JsonOptions) -> int:
    """Print each attack with the check that refused it."""
    output, rows = options.output, run_attacks()
    held = all(row.held for row in rows)
    output.result({"held": held, "stories": [row.to_json() for row in rows]})
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "story, and what was changed", "answer", "key", "releases"):
        table.add_column(name, no_wrap=name in ("answer", "key", "releases"))
    for row in rows:
        answer = row.actual.value if row.actual else "released"
        wanted = row.attack.expected.value if row.attack.expected else "released"
        table.add_row(
            Text("✓", style="green") if row.held else Text("✗", style="bold red"),
            Text.assemble(row.attack.name, "\n", (row.attack.changed, "dim")),
            Text(answer if row.held else f"{answer}\nexpected {wanted}"),
            "released" if row.released else "kept",
            f"{row.counter_before} → {row.counter_after}",
        )
    if not output.as_json:
        output.console.print(table)
    refused = sum(not row.released for row in rows)
    words = f"{refused} attacks refused by their own checks, the controls let through."
    output.say(words if held else "NOT AS IT MUST BE.", style="bold green" if held else "bold red")
    return ExitCode.DONE if held else ExitCode.VERIFICATION_FAILED
