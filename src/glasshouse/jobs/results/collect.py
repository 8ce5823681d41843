"""Fetches a run's outputs: what the verified receipt names, and nothing else.

The sealing key is public: a sealed file counts only when its digest stands in the receipt. A file that the receipt does
not name is refused, and so is a run whose receipt does not verify. Names are sealed with the outputs, and stand in no
receipt.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from glasshouse.errors import Code, PackageError, UsageError, VerificationError
from glasshouse.evidence.receipt import Output, Receipt
from glasshouse.jobs.owner.home import is_there, open_regular, private_folder, write_private
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.package.outputs import OpenedOutput, open_output
from glasshouse.package.paths import check_path, check_paths, folded
from glasshouse.wire.crypto import RecipientKey, salted

_FOLDER = "outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOutput:
    """An output as its owner sees it, checked against the receipt."""

    sequence: int  # its number in the receipt
    name: str  # as the workload called it
    kind: str  # `output` or `checkpoint`
    plain_bytes: int  # of the plaintext
    sha256: bytes
    salt: bytes  # with it the plaintext's digest compares with what the receipt commits to
    path: Path | None = None  # where it lies decrypted, once it was fetched


def require_receipt(conclusion: Conclusion) -> Receipt:
    """Return the verified receipt; raises `VerificationError` without one."""
    if conclusion.receipt is None:
        why = f"without a receipt that holds, no output can be distinguished from a forged one: {conclusion.problem}"
        raise VerificationError(conclusion.code or Code.CHAIN_INCOMPLETE, why)
    return conclusion.receipt


def look_inside(folder: RunFolder, receipt: Receipt, *, sealing: RecipientKey) -> list[RunOutput]:
    """Decrypt every output to nowhere, by the key of the owner or a backup, and compare it with a verified receipt.

    Raises:
        PackageError: `output-unnamed` for a sealed file that the receipt does not name, `output-tampered` for
            one that is missing or differs from it.
    """
    named = {Path(output.file_name).name for output in receipt.outputs}
    outputs = folder.out / _FOLDER
    for path in sorted(outputs.iterdir()) if outputs.is_dir() else ():
        # A `.partial` was begun by a runtime that was killed; it never was an output.
        if path.name not in named and path.suffix != ".partial":
            raise PackageError(Code.OUTPUT_UNNAMED, f"{path.name} is not named by the receipt: refused, with the rest")
    found: list[RunOutput] = []
    for output in receipt.outputs:
        with Path(os.devnull).open("wb") as nowhere:
            opened, digest = _decrypt(folder, output, receipt, sealing, nowhere)
        if output.plain_hmac is not None and salted(opened.salt, digest) != output.plain_hmac:
            why = f"output {output.sequence} has another digest than the receipt commits to"
            raise PackageError(Code.OUTPUT_TAMPERED, why)
        found.append(
            RunOutput(
                sequence=output.sequence,
                name=check_path(opened.name),
                kind=output.kind,
                plain_bytes=opened.bytes,
                sha256=digest,
                salt=opened.salt,
            )
        )
    return found


def fetch(
    folder: RunFolder, receipt: Receipt, *, sealing: RecipientKey, out: Path, force: bool, hidden: bool = False
) -> list[RunOutput]:
    """Decrypt every output of a run into a folder, and return all of them; those that were left out have no path.

    A name with a part that begins with a dot (`.ssh/config`, `.git/hooks/pre-commit`, `.envrc`) may change what other
    programs do there, and a script's dependency may have chosen it: such outputs are left out unless `hidden`.

    Args:
        out: made if need be; new folders get mode 0700, files 0600.
        force: whether existing files may be replaced.

    Raises:
        PackageError: as `look_inside`, also when two outputs have one name; nothing is written then.
        UsageError: `usage` when a file exists already or cannot be written, or two names are one for the file system;
            `disk-full`.
    """
    found = look_inside(folder, receipt, sealing=sealing)
    check_paths(sorted((one.name for one in found), key=str.encode), fold=False)
    targets = [out.joinpath(*one.name.split("/")) if hidden or not is_hidden(one.name) else None for one in found]
    for target in targets:
        if target is not None and not force and is_there(target):
            raise UsageError(Code.USAGE, f"{target} exists already", hint="--force replaces it")
    private_folder(out, close=False)  # the mode of an existing one is the owner's choice
    written: dict[str, Path] = {}
    for one, output, target in zip(found, receipt.outputs, targets, strict=True):
        if target is None:
            continue
        current = out
        for part in target.relative_to(out).parts[:-1]:  # none of which may be a link
            current = private_folder(current / part, close=False)
        earlier = written.setdefault(folded(one.name), target)
        if target != earlier and is_there(target) and target.samefile(earlier):
            # The file system does not separate upper from lower case: nothing is written over what was just written.
            raise UsageError(
                Code.USAGE,
                f"{target} is one file with {earlier} here, and the run returned two",
                hint="fetch into a folder of a file system that separates upper from lower case",
            )
        content = partial(_decrypt_same, folder, output, receipt, sealing, one.sha256)
        write_private(target, content, replace=force)
    return [replace(one, path=target) for one, target in zip(found, targets, strict=True)]


def is_hidden(name: str) -> bool:
    """Return whether a part of an output's name begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def _decrypt_same(
    folder: RunFolder, output: Output, receipt: Receipt, sealing: RecipientKey, sha256: bytes, out: BinaryIO
) -> None:
    if _decrypt(folder, output, receipt, sealing, out)[1] != sha256:
        raise PackageError(Code.OUTPUT_TAMPERED, f"output {output.sequence} changed while it was fetched")


def _decrypt(
    folder: RunFolder, output: Output, receipt: Receipt, sealing: RecipientKey, out: BinaryIO
) -> tuple[OpenedOutput, bytes]:
    """Decrypt the output that the receipt names, and return it with its plaintext's digest."""
    with _open_sealed(folder, output) as stream:
        opened = open_output(stream, sealing, run_id=receipt.run_id, manifest_sha256=receipt.manifest_sha256)
        if (opened.sequence, opened.kind, opened.bytes) != (output.sequence, output.kind, output.plain_bytes):
            raise PackageError(Code.OUTPUT_TAMPERED, f"output {output.sequence} is not the one that the receipt names")
        digest = opened.copy_to(out)
    if opened.sealed_sha256 != output.sealed_sha256:  # of what was read, whatever the file is by now
        raise PackageError(Code.OUTPUT_UNNAMED, f"output {output.sequence} was exchanged while it was read")
    return opened, digest


def _open_sealed(folder: RunFolder, output: Output) -> BufferedReader:
    path = folder.out / output.file_name
    try:
        stream = open_regular(path)
    except OSError:
        raise PackageError(
            Code.OUTPUT_TAMPERED,
            f"output {output.sequence} is named by the receipt but not there",
            hint=f"if the run's gate stored it: glasshouse fetch {folder.run_id[:8]} -o DIR",
        ) from None
    same_size = os.fstat(stream.fileno()).st_size == output.sealed_bytes
    if not same_size or hashlib.file_digest(stream, "sha256").digest() != output.sealed_sha256:
        stream.close()
        raise PackageError(Code.OUTPUT_UNNAMED, f"{path.name} is not the file that the receipt names")
    stream.seek(0)
    return stream
