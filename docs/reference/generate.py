"""Writes cli.md from the commands themselves, and job.md from the declarations that validate a job file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from glasshouse.cli.app import command_line
from glasshouse.jobs.define.jobfile import FIELDS
from glasshouse.jobs.define.jobschema import BEYOND, default_of
from glasshouse.wire.policy import WORKLOADS
from glasshouse.workloads.job_keys import REQUIRED, Field, Rule, declared
from glasshouse.workloads.registry import MODULES, load

HEAD = """# The command line

Written by `python docs/reference/generate.py`; a test holds it to what `--help` says.

Exit codes: 0 done, 1 internal error, 2 usage, 3 refused by the gate, 4 the run failed, 5 verification failed,
6 residue found, 7 a peer cannot be reached, 8 authentic but incomplete, 130 interrupted.

`run` exits with how its run ended. `verify` of a receipt exits with 0 when it is good, with the run's own code (3, 4,
6 or 130) when it is authentic and whole and the run did not complete, with 8 when nothing contradicts it but a part is
missing (of a run that the gate refused, the attestation result always is), and with 5 when anything does not hold. Of a
measurement (a folder with `statement.json`) it computes every number again, and exits with 0, with 8 when its word does
not stand because a null run that holds 0, or a receipt, is missing, or with 5.
"""


def render() -> str:
    """Return the page."""
    root = command_line()
    for name in root.list_commands(None):
        root.load(name)
    return HEAD + "".join(_pages(root, ("glasshouse",)))


def _pages(command: object, words: tuple[str, ...]) -> Iterator[str]:
    commands = getattr(command, "commands", {})
    if not commands:
        yield _page(command, words)
    for name in commands:
        yield from _pages(commands[name], (*words, name))


def _page(command: object, words: tuple[str, ...]) -> str:
    lines = [f"\n## `{' '.join(words)}`\n", f"{(command.help or '').strip()}\n"]  # type: ignore[attr-defined]
    arguments, options = [], []
    for parameter in command.params:  # type: ignore[attr-defined]
        if parameter.param_type_name == "argument":
            name = _cell(parameter.metavar or parameter.name.upper())
            arguments.append(f"| `{name}` | {_cell(getattr(parameter, 'help', ''))} |")
        elif parameter.name != "help" and not parameter.hidden:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            options.append(f"| {names} | {_cell(parameter.help)} |")
    if arguments:
        lines.append("| argument | meaning |\n|---|---|\n" + "\n".join(arguments) + "\n")
    if options:
        lines.append("| option | meaning |\n|---|---|\n" + "\n".join(options) + "\n")
    return "\n".join(lines)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


JOB_HEAD = """# The job file

Written by `python docs/reference/generate.py` from the declarations that validate a job file; a test holds it to them.
`glasshouse new [WORKLOADS]` writes one to begin with, and `glasshouse schema` prints its JSON Schema for editors.

A job file is TOML. What it does not know, it refuses, and every error names the key, says what it may be and shows what
was there. A whole number is written without a point.
"""


def render_job() -> str:
    """Return the page of the job file."""
    parts = [JOB_HEAD.replace("WORKLOADS", "|".join(WORKLOADS)), "\n## Top level\n\n", _fields(FIELDS)]
    for kind in MODULES:
        params = load(kind).Params
        parts += [f"\n## `[params]` of `{kind}`\n\n", _fields(declared(params)), *_rules(params.RULES)]
    for field in FIELDS:
        if field.kind.fields:
            parts += [f"\n## `[{field.name}]`\n\n{field.meaning}\n\n", _fields(field.kind.fields)]
    parts += ["\n## What the schema cannot tell\n\n", *(f"- {what}\n" for what in BEYOND)]
    return "".join(parts)


def _fields(fields: Sequence[Field]) -> str:
    rows = [
        f"| `{field.name}` | {_cell(field.meaning)} | {_cell(field.kind.allowed)} | {_default(field)} |\n"
        for field in fields
    ]
    return "| key | meaning | may be | without it |\n|---|---|---|---|\n" + "".join(rows)


def _default(field: Field) -> str:
    if field.default is REQUIRED:
        return "**must be there**"
    default = default_of(field)
    return "" if default is None or default == {} else f"`{_cell(json.dumps(default))}`"


def _rules(rules: Sequence[Rule]) -> Iterator[str]:
    if rules:
        yield "\n" + " ".join(rule.words for rule in rules) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "cli.md").write_text(render())
    (Path(__file__).parent / "job.md").write_text(render_job())
