"""`glasshouse measure`: what an installation measures to, part by part, and in which files it is another."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json
from glasshouse.cli.show.output import Output, printable

__all__ = ["command"]


def command(
    on: Annotated[
        str, typer.Option("--on", metavar="MACHINE", help="By its own word, a machine: a name, or ssh://user@host.")
    ] = "local",
    diff: Annotated[
        str | None,
        typer.Option("--diff", metavar="NAME", help="List the files that differ from a reference, or from `this`."),
    ] = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.attestation.measured import Measured
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.references.known_references import differences, measured_at, reference

    output, place = Output(as_json), Home.locate(home)
    files = measured_at(place, on)
    measured = Measured.of(files)
    found = None if diff is None else differences(files, reference(place, diff))
    output.result(
        {
            "measurement": measured.sha256.hex(),
            "parts": measured.to_json(),
            "files": {part: len(files[part]) for part in files},
            "differences": None
            if found is None
            else [{"part": one.part, "name": one.name, "how": one.how} for one in found],
        }
    )
    parts = {part: f"{digest.hex()}  {len(files[part])} files" for part, digest in measured.parts().items()}
    output.facts(parts | {"together": measured.sha256.hex()})
    if found is not None:
        same = "is the same, file by file, as" if not found else f"differs in {len(found)} files from"
        output.say(f"It {same} {diff}.", style="bold")
        for one in found:
            output.say(f"  {one.part}  {one.how:7}  {printable(one.name, keep='')}")
