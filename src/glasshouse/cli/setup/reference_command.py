"""`glasshouse reference add|list|remove|sign`: the installations that a job may name in `[policy] reference`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glasshouse.cli.options import Force, HomeOption, Json, PassphraseFd, PassphraseFile, unlock
from glasshouse.cli.setup.named import list_and_remove
from glasshouse.cli.show.output import Output
from glasshouse.errors import Code, UsageError

if TYPE_CHECKING:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.references.known_references import Files

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
    release: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Take what was signed of a release: a part of one.")
    ] = None,
    signed_by: Annotated[
        str | None, typer.Option("--signed-by", metavar="KEY", help="Whose signature that has to be, in hex.")
    ] = None,
    force: Force = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.references.image import image_files
    from glasshouse.jobs.references.known_references import THIS, add_reference, differences, measured_at, reference
    from glasshouse.jobs.references.released import read_released

    if tree is None and (python is not None or bundle is not None):
        raise UsageError(Code.USAGE, "--python and --bundle belong to an image: name its folder with --tree")
    if (release is None) != (signed_by is None):
        raise UsageError(Code.USAGE, "--from and --signed-by go together: a release is believed by its signature alone")
    if sum((tree is not None, release is not None, on != "local")) > 1:
        raise UsageError(Code.USAGE, "one of --on, --tree and --from: a reference is of one installation")
    output, place = Output(as_json), Home.locate(home).require()
    if tree is not None:
        files = image_files(tree, python=python, bundle=bundle)
    elif release is not None and signed_by is not None:
        files = read_released(release, signed_by=signed_by).files
    else:
        files = measured_at(place, on)
    add_reference(place, name, files, replace=force)
    told = _told(files)
    output.result({"name": name, **told})
    output.facts(told["parts"])
    output.say(f'{name} is recorded; a job accepts it with: [policy] reference = ["{name}"]')
    if on != "local":
        found = differences(files, reference(place, THIS))
        output.warn(
            f"this is what {on} says of itself, and whoever has it can say anything; it differs from this installation "
            f"in {len(found)} files: glasshouse measure --on {on} --diff this"
        )


def _known(home: Home) -> dict[str, dict[str, Any]]:
    from glasshouse.jobs.references.known_references import known_references

    return {name: _told(files) for name, files in known_references(home).items()}


def _forget(home: Home, name: str) -> dict[str, Any]:
    from glasshouse.jobs.references.known_references import remove_reference

    return _told(remove_reference(home, name))


def _told(files: Files) -> dict[str, Any]:
    from glasshouse.attestation.measured import PARTS, Measured
    from glasshouse.jobs.references.known_references import parts_of

    # Over all parts; of a release only some are there.
    whole = Measured.of(files).sha256.hex() if set(files) == set(PARTS) else None
    return {"measurement": whole, "parts": {part: digest.hex() for part, digest in parts_of(files).items()}}


list_and_remove(
    group,
    "reference",
    _known,
    _forget,
    add="jobs accept this installation alone; glasshouse reference add NAME",
    then="jobs that name it are refused",
)


@group.command("sign", help="Sign what a bundle's files measure to, for those who run it: your release's reference.")
def sign(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="What `glasshouse runtime bundle` wrote.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The file to write.")],
    force: Force = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.owner.files import write_private
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.references.known_references import parts_of
    from glasshouse.jobs.references.released import Released

    output, released = Output(as_json), Released.of_bundle(bundle)
    key = unlock(Home.locate(home).require(), passphrase_file, passphrase_fd).signing
    write_private(out, released.sign(key).encode(), replace=force)
    parts = {part: digest.hex() for part, digest in parts_of(released.files).items()}
    output.result({"file": str(out), "signed_by": key.public.hex(), "parts": parts})
    output.facts({**parts, "signed by": key.public.hex()})
    output.say(f"Tell that key where it cannot be exchanged with the file, for: reference add NAME --from {out.name}")
