"""`glasshouse reference add|list|remove`: the installations that a job may name in `[policy] reference`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glasshouse.cli.named import list_and_remove
from glasshouse.cli.options import Force, HomeOption, Json
from glasshouse.cli.output import Output
from glasshouse.errors import Code, UsageError

if TYPE_CHECKING:
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.references import Files

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command(
    "add", help="Record an installation, file by file: this one, an image's, or that of a machine that you trust."
)
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    on: Annotated[
        str, typer.Option("--on", metavar="MACHINE", help="Believe a machine: a name, or ssh://user@host.")
    ] = "local",
    tree: Annotated[
        Path | None,
        typer.Option("--tree", metavar="DIR", help="Measure an unpacked container image; nothing of it is run."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", metavar="PATH", help="The image's interpreter; the first python3 of its usual PATH."),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="What an image without Glasshouse is brought."),
    ] = None,
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.attestation.measured import Measured
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.image import image_files
    from glasshouse.jobs.references import THIS, add_reference, differences, measured_at, reference

    if tree is None and (python is not None or bundle is not None):
        raise UsageError(Code.USAGE, "--python and --bundle belong to an image: name its folder with --tree")
    if tree is not None and on != "local":
        raise UsageError(Code.USAGE, "one of --on and --tree: a reference is of one installation")
    output, place = Output(as_json), Home.locate(home).require()
    files = measured_at(place, on) if tree is None else image_files(tree, python=python, bundle=bundle)
    add_reference(place, name, files, replace=force)
    measured = Measured.of(files)
    output.result({"name": name, "measurement": measured.sha256.hex(), "parts": measured.to_json()})
    output.facts({part: digest.hex() for part, digest in measured.parts().items()})
    output.say(f'{name} is recorded; a job accepts it with: [policy] reference = ["{name}"]')
    if on != "local":
        found = differences(files, reference(place, THIS))
        output.warn(
            f"this is what {on} says of itself, and whoever has it can say anything; it differs from this installation "
            f"in {len(found)} files: glasshouse measure --on {on} --diff this"
        )


def _known(home: Home) -> dict[str, dict[str, Any]]:
    from glasshouse.jobs.references import known_references

    return {name: _told(files) for name, files in known_references(home).items()}


def _forget(home: Home, name: str) -> dict[str, Any]:
    from glasshouse.jobs.references import remove_reference

    return _told(remove_reference(home, name))


def _told(files: Files) -> dict[str, Any]:
    from glasshouse.attestation.measured import Measured

    measured = Measured.of(files)
    return {"measurement": measured.sha256.hex(), "parts": measured.to_json()}


list_and_remove(
    group,
    "reference",
    _known,
    _forget,
    add="jobs accept this installation alone; glasshouse reference add NAME",
    then="jobs that name it are refused",
)
