"""`glasshouse reference add|list|remove`: the installations that a job may name in `[policy] reference`."""

from __future__ import annotations

from typing import Annotated

import typer

from glasshouse.cli.options import Force, HomeOption, Json
from glasshouse.cli.output import Output

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)


@group.command("add", help="Record an installation, file by file: this one, or that of a machine that you trust.")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call it.")],
    on: Annotated[
        str, typer.Option("--on", metavar="MACHINE", help="Believe a machine: a name, or ssh://user@host.")
    ] = "local",
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.attestation.measured import Measured
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.references import THIS, add_reference, differences, measured_at, reference

    output, place = Output(as_json), Home.locate(home).require()
    files = measured_at(place, on)
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


@group.command("list", help="What is recorded here.")
def show(home: HomeOption = None, as_json: Json = False) -> None:
    from glasshouse.attestation.measured import Measured
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.references import known_references

    output, known = Output(as_json), known_references(Home.locate(home))
    measured = {name: Measured.of(files) for name, files in known.items()}
    output.result(
        {
            "references": [
                {"name": name, "measurement": one.sha256.hex(), "parts": one.to_json()}
                for name, one in measured.items()
            ]
        }
    )
    output.facts({name: one.sha256.hex() for name, one in measured.items()})
    if not known:
        output.say("Nothing is recorded here, and jobs accept this installation alone: glasshouse reference add NAME")


@group.command("remove", help="Forget a recorded installation; jobs that name it are refused.")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name here.")],
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.references import remove_reference

    output = Output(as_json)
    remove_reference(Home.locate(home), name)
    output.result({"name": name})
    output.say(f"{name} is not recorded here any more.")
