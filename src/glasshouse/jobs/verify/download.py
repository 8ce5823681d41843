"""Takes from a run's gate what the run left and its folder lacks: all of it, or sealed files that were lost here.

Laws: no file comes into the run's folder before log, heads and receipt hold together by the owner's key; a sealed file
comes only with the length and digest that the receipt or that log names; the receipt is read first, and bounds what is
read after it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.errors import Code, GlasshouseError, PackageError, UsageError, VerificationError
from glasshouse.evidence.events import MAX_EVENT_BYTES
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES
from glasshouse.evidence.log import VerifiedLog
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES, Receipt
from glasshouse.jobs.gates.known_gates import gate_named
from glasshouse.jobs.owner.home import Home, is_there, private_folder, read_bounded, write_private
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.verify.conclusion import read_receipt, verify_run
from glasshouse.jobs.verify.run_files import HEADS_NAME, LOG_NAME, sealed_files, verify_log_in
from glasshouse.jobs.verify.verdict import verify_bundle
from glasshouse.providers.place.local import LocalPlace
from glasshouse.providers.serve.runs import numbered
from glasshouse.wire.crypto import SigningKey

BUNDLE_NAME = "receipt.json"
_CLOSING = (BUNDLE_NAME, LOG_NAME, HEADS_NAME)
_LINE_BYTES = {LOG_NAME: MAX_EVENT_BYTES + 1, HEADS_NAME: MAX_COUNTERSIGNED_HEAD_BYTES + 1}  # of one event, at most
_STAGING = "from-gate"


def is_whole(folder: RunFolder, owner: bytes) -> bool:
    """Return whether a machine's folder has its receipt, log and heads, and a file for each that the receipt counts.

    Content is not looked at: `fetch` and `verify` do. A receipt that does not hold counts nothing, so nothing lacks.
    """
    if not _is_closed(folder):
        return False
    try:
        receipt = verify_bundle(read_receipt(folder), owner=owner).chain.receipt
    except GlasshouseError:
        return True
    names = [output.file_name for output in receipt.outputs]
    return all(is_there(folder.out / name) for name in (*names, *(numbered("log", n) for n in range(receipt.segments))))


def take_stored(home: Home, folder: RunFolder, owner: SigningKey, *, verified: Callable[[], None]) -> bool:
    """Bring from a run's gate what the folders of its machines lack.

    Where receipt, log and heads are here, the gate gives the sealed files that they name and the folder lacks, as many
    as it has. Where they are not, it gives everything or nothing.

    Args:
        verified: called once all that came holds, before any of it comes into the folder.

    Returns:
        Whether anything came; False, and nothing changed, where the gate has nothing that is lacking, or lacks a
        receipt that is lacking here.

    Raises:
        PeerError, RefusedError: the gate cannot be reached, or refuses.
        FormatError, PackageError, VerificationError: what the gate gave, or what is here, does not hold; nothing came.
        UsageError: no gate of that name, or no room.
    """
    record = folder.load()
    if record.gate is None:
        return False
    public = read_public(home.owner_public).signing
    lacking = [one for one in folder.machines() if not is_whole(one, public)]
    client = gate_named(home, record.gate).client(owner)
    there = [client.stored(one.run_id) for one in lacking]
    if not all(_is_closed(one) or set(_CLOSING) <= set(files) for one, files in zip(lacking, there, strict=True)):
        return False
    try:
        came = [_bring(client, one, files, owner=public) for one, files in zip(lacking, there, strict=True)]
        if not any(came):
            return False
        verified()
        for one in lacking:
            _move(one.path / _STAGING, one.out)
    finally:
        for one in lacking:
            shutil.rmtree(one.path / _STAGING, ignore_errors=True)
    return True


def forget_stored(home: Home, folder: RunFolder, owner: SigningKey) -> None:
    """Have a gate remove what a machine of a run elsewhere left, if all of it is here; raises as `OwnerClient`."""
    record = folder.load()
    if record.gate is None or record.place == LocalPlace.name:
        return
    if not is_whole(folder, read_public(home.owner_public).signing):
        return
    client = gate_named(home, record.gate).client(owner)
    if client.stores():
        client.forget_stored(folder.run_id)


def _is_closed(folder: RunFolder) -> bool:
    return all(is_there(folder.out / name) for name in _CLOSING)


def _bring(client: OwnerClient, folder: RunFolder, files: dict[str, tuple[int, bytes]], *, owner: bytes) -> bool:
    """Download into a folder of its own what a machine's folder lacks; return whether anything came."""
    staging = folder.path / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    for sub in ("", "outputs", "log"):
        private_folder(staging / sub)
    if _is_closed(folder):
        verdict = verify_run(folder, owner=owner)
        outputs, segments = sealed_files(verdict.chain.receipt, verdict.log)
        wanted = [
            (name, size, sha256)
            for name, size, sha256 in (*outputs, *segments)
            if not is_there(folder.out / name) and files.get(name) == (size, sha256)
        ]
    else:
        outputs, segments = sealed_files(*_bring_closing(client, folder.run_id, files, staging, owner=owner))
        wanted = [*outputs, *segments]
        for name, size, sha256 in wanted:
            if name not in files:
                raise UsageError(
                    Code.FILE_MISSING,
                    f"the gate has the run's receipt and not its {name}: the machine has not sent it, or had no room",
                    hint="nothing was taken; try again later, or bring the machine back: glasshouse attach",
                )
            if files[name] != (size, sha256):
                raise PackageError(Code.OUTPUT_TAMPERED, f"the gate does not have {name} as receipt and log name it")
    for name, size, sha256 in wanted:
        _download(client, folder.run_id, name, (size, sha256), staging / name)
    return bool(wanted) or is_there(staging / BUNDLE_NAME)


def _bring_closing(
    client: OwnerClient, run_id: str, files: dict[str, tuple[int, bytes]], staging: Path, *, owner: bytes
) -> tuple[Receipt, VerifiedLog | None]:
    """Download receipt, log and heads, each once the one before it bounds its length, and verify them."""

    def bring(name: str, *, most_bytes: int) -> None:
        if files[name][0] > most_bytes:
            raise VerificationError(
                Code.LOG_INVALID,
                f"the gate lists {name} with {files[name][0]} bytes, and the run left {most_bytes} at most",
                hint="nothing was taken: the gate stores something else; bring the machine back: glasshouse attach",
            )
        _download(client, run_id, name, files[name], staging / name)

    bring(BUNDLE_NAME, most_bytes=MAX_BUNDLE_BYTES)
    data = read_bounded(staging / BUNDLE_NAME, max_bytes=MAX_BUNDLE_BYTES, what="receipt")
    chain = verify_bundle(data, owner=owner, run_id=run_id).chain
    for name in (LOG_NAME, HEADS_NAME):
        bring(name, most_bytes=chain.receipt.log_size * _LINE_BYTES[name])
    return chain.receipt, verify_log_in(chain, staging)[0]


def _download(client: OwnerClient, run_id: str, name: str, listed: tuple[int, bytes], target: Path) -> None:
    """Write a stored file; raises `PackageError` for one that is not what the gate listed."""
    size, sha256 = listed

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
            raise PackageError(Code.OUTPUT_TAMPERED, f"what the gate gave for {name} is not the file that it lists")

    write_private(target, content)


def _move(staging: Path, out: Path) -> None:
    """Let what was verified take the place of what a machine may have given in part; the receipt last."""
    try:
        for sub in ("outputs", "log"):
            folder = private_folder(out / sub)
            for path in sorted((staging / sub).iterdir()):
                path.replace(folder / path.name)
        for name in reversed(_CLOSING):
            if is_there(staging / name):
                (staging / name).replace(out / name)
    except OSError as error:
        raise UsageError(Code.USAGE, f"what the gate gave cannot be put into {out}: {error.strerror}") from None
