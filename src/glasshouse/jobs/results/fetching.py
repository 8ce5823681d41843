"""Decrypts the outputs of a run; sealed files that its folder lacks come from the gate that stored them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glasshouse.errors import Code, GlasshouseError, PeerError, UsageError
from glasshouse.jobs.gates.known_gates import GateBroker
from glasshouse.jobs.owner.home import Home, is_there
from glasshouse.jobs.owner.owner_identity import Identity, read_public
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.rented_machine import RentalListener, return_left
from glasshouse.jobs.results import collect
from glasshouse.jobs.supervise.control import RunLook, concluded, end_supervisor, look, require_ended, settle
from glasshouse.jobs.supervise.line_watch import note_line
from glasshouse.jobs.verify.conclusion import INVALID
from glasshouse.jobs.verify.download import forget_stored, is_whole, take_stored
from glasshouse.wire.crypto import SigningKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Decrypted outputs.

    Attributes:
        run_id: of which run.
        folder: where they are.
        outputs: each output; one that was left out, for a name with a part that begins with a dot, has no path.
        verdict: on the run's receipt.
        assurance: the level of the run; None where it never attested.
        from_gate: whether files came from the run's gate, because they were missing here.
    """

    run_id: str
    folder: Path
    outputs: tuple[collect.RunOutput, ...]
    verdict: str
    assurance: str | None
    from_gate: bool


def fetch_run(
    run: RunFolder,
    out: Path,
    *,
    home: Home,
    unlock: Callable[[], Identity],
    listener: RentalListener,
    replace: bool = False,
    hidden: bool = False,
    machine: int = 0,
    from_gate: bool = False,
) -> Fetched:
    """Decrypt a run's outputs, or those of one `machine` of it, into a folder.

    Args:
        unlock: returns the owner's identity; called once, when it is needed.
        listener: called with what comes from the gate, and with a machine that is given back.
        from_gate: wait no more for the run's machine, and take what its gate stored.

    Raises:
        VerificationError: there is no receipt that verifies.
        UsageError: it has not ended, there is no such machine, or a file exists already.
        PackageError: a sealed output is not as the receipt names it.
        PeerError: the gate cannot be reached.
        VerificationError: `line-forked`: it counted two checkpoints as one number of the run's line.
    """
    found = look(run, home)
    identity, taken = None, False
    if _is_lacking(found, home, asked=from_gate):
        identity = unlock()
        if taken := _take(listener, found, home, identity.signing, asked=from_gate):
            listener.step("taken from the run's gate, and not from its machine")
            found = look(found.folder, home)
    require_ended(found)
    folder, conclusion = found.folder.machine(machine), concluded(found.folder, home, found.record)
    if machine and conclusion.verdict != INVALID:
        conclusion = conclusion.machines[machine]
    receipt = collect.require_receipt(conclusion)
    identity = identity or unlock()
    outputs = collect.fetch(folder, receipt, sealing=identity.sealing, out=out, force=replace, hidden=hidden)
    with contextlib.suppress(GlasshouseError):  # otherwise what it stores of the run expires
        forget_stored(home, folder, identity.signing)
    _note_line(found, home, identity.signing)
    if taken:
        return_left(listener, home, found.folder)
    return Fetched(
        run_id=found.record.run_id,
        folder=out,
        outputs=tuple(outputs),
        verdict=conclusion.verdict,
        assurance=receipt.assurance.value if receipt.assurance else None,
        from_gate=taken,
    )


def _note_line(found: RunLook, home: Home, owner: SigningKey) -> None:
    """Keep what a gate that stays shows of the run's line: a supervisor without the owner's key could not ask it."""
    if found.record.gate is not None:
        with contextlib.suppress(UsageError):  # one that has no name here any more
            note_line(found.folder, home, GateBroker(home, found.record.gate, owner))


def _is_lacking(found: RunLook, home: Home, *, asked: bool) -> bool:
    """Return whether the run's folder lacks files that only its gate may have, or that `from_gate` is for."""
    if not asked and (found.record.gate is None or found.doing not in (Phase.ENDED, "unattended")):
        return False
    owner = read_public(home.owner_public).signing
    return not all(is_whole(one, owner) for one in found.folder.machines())


def _take(listener: RentalListener, found: RunLook, home: Home, owner: SigningKey, *, asked: bool) -> bool:
    """Take from the run's gate what is lacking; where `asked` is false, a gate's failure is a warning."""
    had_receipts = all(is_there(one.receipt) for one in found.folder.machines())
    try:
        taken = take(found.folder, home, owner)
    except GlasshouseError as error:
        if asked or not (had_receipts or isinstance(error, PeerError)):
            raise
        listener.warn(f"files of the run are missing here, and its gate did not give them: {error.message}")
        return False
    if asked and not taken:
        raise UsageError(
            Code.FILE_MISSING,
            f"no gate stores what is missing here of run {found.folder.run_id[:8]}",
            hint="a gate stores what runs on other machines leave if it was started with --store, until it is fetched; "
            "without a receipt nothing is taken",
        )
    return taken


def take(folder: RunFolder, home: Home, owner: SigningKey) -> bool:
    """Take from a run's gate what its folder lacks, record its end anew if a receipt came; return if anything did.

    Raises `GlasshouseError` as `take_stored`, with nothing changed; `PlatformError` if its supervisor does not end.
    """
    had_receipts = all(is_there(one.receipt) for one in folder.machines())
    taken = take_stored(home, folder, owner, verified=lambda: end_supervisor(folder.load()))
    if taken and not (had_receipts and folder.load().phase is Phase.ENDED):
        settle(folder, home)
    return taken
