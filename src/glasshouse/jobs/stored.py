"""Takes what a run left from the gate that stored it, where its machine does not give it any more.

Laws: nothing of it comes into the run's folder before log, heads and receipt hold together by the owner's key, as
those that a machine gives have to; a sealed file comes only with the digest that the receipt or that log names; what
has come is what `fetch` and `verify` look at, as if the machine had given it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from glasshouse.broker.client import OwnerClient
from glasshouse.errors import Code, PackageError, UsageError, VerificationError
from glasshouse.jobs.files import is_there, private_folder, write_private
from glasshouse.jobs.gates import gate_named
from glasshouse.jobs.home import Home
from glasshouse.jobs.identity import read_public
from glasshouse.jobs.rundir import RunFolder
from glasshouse.jobs.verify import of_run, sealed_files, verify_file, verify_sealed_in
from glasshouse.providers.local import LocalPlace
from glasshouse.providers.runs import is_name
from glasshouse.wire.signing import SigningKey

__all__ = ["forget_stored", "take_stored"]

_CLOSING = ("events.log", "heads.log", "receipt.json")
_STAGING = "from-gate"
_MAX_CLOSING_BYTES = 1 << 33


def take_stored(home: Home, folder: RunFolder, owner: SigningKey, *, verified: Callable[[], None]) -> bool:
    """Bring what the machines of a run left into its folder, from its gate, where no receipt is there yet.

    Args:
        home, folder: the run's.
        owner: asks the gate.
        verified: called when all was found to hold, before any of it comes into the folder.

    Returns:
        Whether every machine's is here now; False, and nothing changed, where the gate does not have one's receipt.

    Raises:
        PeerError, RefusedError: the gate cannot be reached, or refuses.
        FormatError, PackageError, VerificationError: what the gate gave does not hold; nothing of it was taken.
        UsageError: no gate of that name, or no room.
    """
    record = folder.load()
    if record.gate is None:
        return False
    client = gate_named(home, record.gate).client(owner)
    missing = [one for one in folder.machines() if not is_there(one.receipt)]
    there = [client.stored(one.run_id) for one in missing]
    if not all(set(_CLOSING) <= set(files) for files in there):
        return False
    public = read_public(home.owner_public)
    try:
        for one, files in zip(missing, there, strict=True):
            shutil.rmtree(one.path / _STAGING, ignore_errors=True)
            _bring(client, one, files, one.path / _STAGING, owner=public.signing)
        verified()
        for one in missing:
            _move(one.path / _STAGING, one.out)
    finally:
        for one in missing:
            shutil.rmtree(one.path / _STAGING, ignore_errors=True)
    return True


def forget_stored(home: Home, folder: RunFolder, owner: SigningKey) -> None:
    """Have the gate of a run elsewhere store nothing any more of what one of its machines left, which is here.

    Raises:
        GlasshouseError: as `OwnerClient`: a gate that is away keeps it until it forgets by itself.
    """
    record = folder.load()
    if record.gate is None or record.place == LocalPlace.name:
        return
    client = gate_named(home, record.gate).client(owner)
    if client.stores():
        client.forget_stored(folder.run_id)


def _bring(
    client: OwnerClient, folder: RunFolder, files: dict[str, tuple[int, bytes]], staging: Path, *, owner: bytes
) -> None:
    """Put what the gate has into a folder of its own, and verify it there: the small files first."""
    for sub in ("", "outputs", "log"):
        private_folder(staging / sub)
    for name in _CLOSING:
        _download(client, folder.run_id, name, files[name], staging / name)
    verdict = of_run(verify_file(staging / "receipt.json", owner=owner, whole=True), folder.run_id)
    outputs, segments = sealed_files(verdict)
    for name, size, sha256 in (*outputs, *segments):
        if name not in files:
            raise UsageError(
                Code.FILE_MISSING,
                f"the gate has the run's receipt and not its {name}: the machine has not sent it, or there was no room",
                hint="nothing was taken; ask again later, or bring the machine back: glasshouse attach",
            )
        if files[name] != (size, sha256):
            raise PackageError(Code.OUTPUT_TAMPERED, f"the gate does not have {name} as receipt and log name it")
        _download(client, folder.run_id, name, (size, sha256), staging / name)
    verify_sealed_in(verdict, staging, expected=True)


def _download(client: OwnerClient, run_id: str, name: str, told: tuple[int, bytes], target: Path) -> None:
    """Write a stored file; raises `PackageError` for one that is not what the gate said."""
    size, sha256 = told
    if not is_name(name) or (name in _CLOSING and size > _MAX_CLOSING_BYTES):
        raise VerificationError(Code.LOG_INVALID, f"the gate stores {name[:64]!r} of {size} bytes, which no run leaves")

    def content(out: BinaryIO) -> None:
        digest, at = hashlib.sha256(), 0
        while at < size:
            piece = client.stored_piece(run_id, sha256, at)
            if not piece or at + len(piece) > size:
                break
            out.write(piece)
            digest.update(piece)
            at += len(piece)
        if at != size or digest.digest() != sha256:
            raise PackageError(Code.OUTPUT_TAMPERED, f"what the gate gave for {name} is not what it said that it has")

    write_private(target, content)


def _move(staging: Path, out: Path) -> None:
    """Let what was verified take the place of what a machine may have given in part; the receipt last."""
    try:
        for sub in ("outputs", "log"):
            folder = private_folder(out / sub)
            for path in sorted((staging / sub).iterdir()):
                path.replace(folder / path.name)
        for name in _CLOSING:
            (staging / name).replace(out / name)
    except OSError as error:
        raise UsageError(Code.USAGE, f"what the gate gave cannot be put into {out}: {error.strerror}") from None
