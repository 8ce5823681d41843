"""`glasshouse fetch RUN -o DIR`: decrypts the outputs that the run's verified receipt names.

Sealed files that the run's folder lacks come from the gate that stored them, if there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import (
    Force,
    HomeOption,
    Json,
    Machine,
    PassphraseFd,
    PassphraseFile,
    Run,
    locate,
    of_machine,
    unlock,
)
from glasshouse.cli.output import Output, printable
from glasshouse.cli.renting import return_left
from glasshouse.cli.words import bytes_text, verdict_words
from glasshouse.errors import Code, GlasshouseError, PeerError, UsageError

if TYPE_CHECKING:
    from glasshouse.jobs.control import Look
    from glasshouse.jobs.home import Home
    from glasshouse.wire.signing import SigningKey

__all__ = ["command"]


def command(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to put them.")],
    force: Force = False,
    hidden: Annotated[bool, typer.Option("--hidden", help="Also outputs with a name like .ssh/x or .envrc.")] = False,
    from_gate: Annotated[
        bool, typer.Option("--from-gate", help="Wait no more for the machine: take what the run's gate stored.")
    ] = False,
    machine: Machine = 0,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    import contextlib

    from glasshouse.jobs.collect import fetch, require_receipt
    from glasshouse.jobs.control import concluded, look, require_ended
    from glasshouse.jobs.finish import INVALID
    from glasshouse.jobs.rundir import RunFolder
    from glasshouse.jobs.stored import forget_stored

    output, place = Output(as_json), locate(home)
    found = look(RunFolder.find(place, run), place)
    identity, taken = None, False
    if _is_lacking(found, place, asked=from_gate):
        identity = unlock(place, passphrase_file, passphrase_fd)
        if taken := _take(output, found, place, identity.signing, asked=from_gate):
            output.say("Taken from the run's gate, and not from its machine.")
            found = look(found.folder, place)
    require_ended(found)
    folder, conclusion = of_machine(found.folder, machine), concluded(found.folder, place, found.record)
    if machine and conclusion.verdict != INVALID:
        conclusion = conclusion.machines[machine]
    receipt = require_receipt(conclusion)
    identity = identity or unlock(place, passphrase_file, passphrase_fd)
    fetched = fetch(folder, receipt, sealing=identity.sealing, out=out, force=force, hidden=hidden)
    with contextlib.suppress(GlasshouseError):  # otherwise what it stores of the run expires
        forget_stored(place, folder, identity.signing)
    if taken:
        return_left(output, place, found.folder)
    level = receipt.assurance.value if receipt.assurance else None
    output.result(
        {
            "run_id": found.record.run_id,
            "folder": str(out),
            "assurance": level,
            "verdict": conclusion.verdict,
            "outputs": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "path": None if one.path is None else str(one.path),
                    "sha256": one.sha256.hex(),
                    "bytes": one.plain_bytes,
                }
                for one in fetched
            ],
        }
    )
    if not fetched:
        output.say("The run has no outputs.")
    left_out = [printable(one.name, keep="") for one in fetched if one.path is None]
    for one in fetched:
        if one.path is not None:
            path = printable(str(one.path), keep="")
            output.say(f"{path}  {bytes_text(one.plain_bytes)}  sha256 {one.sha256.hex()}")
    if left_out:
        output.warn(
            f"not written, because a part of the name begins with a dot: {', '.join(left_out)}; "
            "look at the names, then fetch them with --hidden"
        )
    output.facts({"receipt": verdict_words(conclusion.verdict, level)})


def _is_lacking(found: Look, home: Home, *, asked: bool) -> bool:
    """Return whether the run's folder lacks files that only its gate may have, or that `--from-gate` is for."""
    from glasshouse.jobs.identity import read_public
    from glasshouse.jobs.rundir import Phase
    from glasshouse.jobs.stored import is_whole

    if not asked and (found.record.gate is None or found.doing not in (Phase.ENDED, "unattended")):
        return False
    owner = read_public(home.owner_public).signing
    return not all(is_whole(one, owner) for one in found.folder.machines())


def _take(output: Output, found: Look, home: Home, owner: SigningKey, *, asked: bool) -> bool:
    """Take from the run's gate what is lacking; without `--from-gate` a gate that does not give it is only noted."""
    from glasshouse.jobs.control import take
    from glasshouse.jobs.files import is_there

    had_receipts = all(is_there(one.receipt) for one in found.folder.machines())
    try:
        taken = take(found.folder, home, owner)
    except GlasshouseError as error:
        if asked or not (had_receipts or isinstance(error, PeerError)):
            raise
        output.warn(f"files of the run are missing here, and its gate did not give them: {error.message}")
        return False
    if asked and not taken:
        raise UsageError(
            Code.FILE_MISSING,
            f"no gate stores what is missing here of run {found.folder.run_id[:8]}",
            hint="a gate stores what runs on other machines leave if it was started with --store, until it is fetched; "
            "without a receipt nothing is taken",
        )
    return taken
