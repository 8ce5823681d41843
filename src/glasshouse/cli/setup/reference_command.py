"""`glasshouse reference add|list|remove|sign`: the installations that a job may name in `[policy] reference`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from glasshouse.attestation.measurements.measured import PARTS, Measured
from glasshouse.cli.options import Force, HomeOptions, OwnerOptions, argument, list_and_remove, option
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import write_private
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.references import known_references as known
from glasshouse.jobs.references.image import image_files

group = typer.Typer(no_args_is_help=True)


@group.command("add")
def add(
    name: Annotated[str, argument("NAME", "What to call it.")],
    on: Annotated[str, option("--on MACHINE", "Believe a machine: a name, or ssh://user@host.")] = "local",
    tree: Annotated[
        Path | None, option("--tree DIR", "Measure an unpacked container image; nothing of it is run.")
    ] = None,
    python: Annotated[
        str | None, option("--python PATH", "The image's interpreter; the first python3 of its usual PATH.")
    ] = None,
    bundle: Annotated[Path | None, option("--bundle FILE", "What an image without Glasshouse is brought.")] = None,
    release: Annotated[Path | None, option("--from FILE", "Take what was signed of a release: a part of one.")] = None,
    signed_by: Annotated[str | None, option("--signed-by KEY", "Whose signature that has to be, in hex.")] = None,
    force: Force = False,
    *,
    options: HomeOptions,
) -> None:
    """Record an installation, file by file: this one, an image's, or that of a machine that you trust."""
    if tree is None and (python is not None or bundle is not None):
        raise UsageError(Code.USAGE, "--python and --bundle belong to an image: name its folder with --tree")
    if (release is None) != (signed_by is None):
        raise UsageError(Code.USAGE, "--from and --signed-by go together: a release is believed by its signature alone")
    if sum((tree is not None, release is not None, on != "local")) > 1:
        raise UsageError(Code.USAGE, "one of --on, --tree and --from: a reference is of one installation")
    output, home = options.output, options.own_home
    if tree is not None:
        files = image_files(tree, python=python, bundle=bundle)
    elif release is not None and signed_by is not None:
        files = known.read_released(release, signed_by=signed_by).files
    else:
        files = known.measured_at(place_of(home, on))
    known.add_reference(home, name, files, replace=force)
    facts = _facts(files)
    output.result({"name": name, **facts})
    output.facts(facts["parts"])
    output.say(f'{name} is recorded; a job accepts it with: [policy] reference = ["{name}"]')
    if on != "local":
        found = known.differences(files, known.reference(home, known.THIS))
        output.warn(
            f"this is what {on} reports of itself, which its host can forge; it differs from this installation "
            f"in {len(found)} files: glasshouse measure --on {on} --diff this"
        )


def _facts(files: known.Files) -> dict[str, Any]:
    # Over all parts; of a release only some are there.
    whole = Measured.of(files).sha256.hex() if set(files) == set(PARTS) else None
    return {"measurement": whole, "parts": {part: digest.hex() for part, digest in known.parts_of(files).items()}}


list_and_remove(
    group,
    "reference",
    lambda home: {name: _facts(files) for name, files in known.known_references(home).items()},
    lambda home, name: _facts(known.remove_reference(home, name)),
    add="jobs accept this installation alone; glasshouse reference add NAME",
    then="jobs that name it are refused",
)


@group.command("sign")
def sign(
    bundle: Annotated[Path, argument("BUNDLE", "What `glasshouse runtime bundle` wrote.")],
    out: Annotated[Path, option("-o --out FILE", "The file to write.")],
    force: Force = False,
    *,
    options: OwnerOptions,
) -> None:
    """Sign what a bundle's files measure to, for those who run it: your release's reference."""
    output, released = options.output, known.Released.of_bundle(bundle)
    key = options.unlock().signing
    write_private(out, released.sign(key).encode(), replace=force)
    parts = _facts(released.files)["parts"]
    output.result({"file": str(out), "signed_by": key.public.hex(), "parts": parts})
    output.facts({**parts, "signed by": key.public.hex()})
    output.say(f"Publish that key where the file cannot replace it, for: reference add NAME --from {out.name}")
