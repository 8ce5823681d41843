"""`glasshouse artifact RUN -o F`: a public account of a run, signed, in which no name or secret can stand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import Force, HomeOption, Json, PassphraseFd, PassphraseFile, Run, locate, unlock
from glasshouse.cli.output import Output
from glasshouse.errors import Code, UsageError

__all__ = ["command"]


def command(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to.")],
    number: Annotated[
        list[str] | None, typer.Option("--number", metavar="NAME=VALUE", help="A public result, as a decimal.")
    ] = None,
    force: Force = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.evidence.bundle import MAX_BUNDLE_BYTES
    from glasshouse.jobs.artifact import make_artifact
    from glasshouse.jobs.canaries import canaries_of
    from glasshouse.jobs.control import look, require_ended
    from glasshouse.jobs.files import read_bounded, write_private
    from glasshouse.jobs.rundir import RunFolder

    output, place = Output(as_json), locate(home)
    found = look(RunFolder.find(place, run), place)
    require_ended(found)
    identity = unlock(place, passphrase_file, passphrase_fd)
    bundle = read_bounded(found.folder.receipt, max_bytes=MAX_BUNDLE_BYTES, what="receipt")
    data = make_artifact(
        bundle,
        owner=identity.signing,
        canaries=canaries_of(found.folder, found.record, home=place, identity=identity),
        numbers=_numbers(number or []),
    )
    write_private(out, data, replace=force)
    output.result({"path": str(out), "run_id": found.record.run_id, "bytes": len(data)})
    output.say(f"The artifact is in {out}; anyone checks it with: glasshouse verify {out} --owner owner.pub")


def _numbers(given: list[str]) -> dict[str, str]:
    numbers: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name in numbers:
            raise UsageError(Code.USAGE, f"--number {text[:60]!r} is not NAME=VALUE, or is given twice")
        numbers[name] = value
    return numbers
