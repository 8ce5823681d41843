"""Fetches a run's outputs: what the verified receipt names, and nothing else.

Anyone can encrypt to the owner's public key. So a sealed file counts only when its digest stands in the
receipt; one that the receipt does not name is refused, and so is a run whose receipt does not hold.
Names stand in no receipt: they are sealed with the output, and come from there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from glasshouse.errors import Code, PackageError, UsageError, VerificationError
from glasshouse.evidence.receipt import Receipt
from glasshouse.evidence.results import Output
from glasshouse.jobs.owner.files import is_there, open_regular, private_folder, write_private
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.package.outputs import OpenedOutput, open_output
from glasshouse.package.paths import check_path, check_paths, folded
from glasshouse.wire.hpke import RecipientKey
from glasshouse.wire.kdf import salted

__all__ = ["Opened", "fetch", "look_inside", "require_receipt"]

_FOLDER = "outputs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """An output as its owner sees it, checked against the receipt."""

    sequence: int  # its number in the receipt
    name: str  # as the workload called it
    kind: str  # `output` or `checkpoint`
    plain_bytes: int  # of the plaintext
    sha256: bytes
    salt: bytes  # with it the plaintext's digest compares with what the receipt commits to
    path: Path | None = None  # where it lies decrypted, once it was fetched


def require_receipt(conclusion: Conclusion) -> Receipt:
    """Return the verified receipt.

    Raises:
        VerificationError: there is none that holds.
    """
    if conclusion.receipt is None:
        raise VerificationError(
            conclusion.code or Code.CHAIN_INCOMPLETE,
            f"without a receipt that holds, no output can be told from a forged one: {conclusion.problem}",
        )
    return conclusion.receipt


def look_inside(folder: RunFolder, receipt: Receipt, *, sealing: RecipientKey) -> list[Opened]:
    """Open every output to nowhere and compare it with the receipt.

    Args:
        folder: the run's.
        receipt: verified.
        sealing: the owner's sealing key, or a backup recipient's.

    Raises:
        PackageError: `output-unnamed` for a sealed file that the receipt does not name, `output-tampered` for
            one that is missing or differs from it.
    """
    named = {Path(output.file_name).name for output in receipt.outputs}
    for path in _sealed_files(folder):
        if path.name not in named:
            raise PackageError(Code.OUTPUT_UNNAMED, f"{path.name} is not named by the receipt: refused, with the rest")
    found: list[Opened] = []
    for output in receipt.outputs:
        with _open_sealed(folder, output) as stream:
            opened = _opened(stream, output, receipt, sealing)
            with Path(os.devnull).open("wb") as nowhere:
                digest = _copied(opened, output, nowhere)
            if output.plain_hmac is not None and salted(opened.salt, digest) != output.plain_hmac:
                raise PackageError(
                    Code.OUTPUT_TAMPERED, f"output {output.sequence} has another digest than the receipt commits to"
                )
            found.append(
                Opened(
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
) -> list[Opened]:
    """Decrypt every output of a run into a folder.

    A name with a part that begins with a dot (`.ssh/config`, `.git/hooks/pre-commit`, `.envrc`) may change what other
    programs do there, and a script's dependency may have chosen it: such outputs are left out by default.

    Args:
        folder: the run's.
        receipt: verified.
        sealing: the owner's sealing key, or a backup recipient's.
        out: made if need be; folders that are made get mode 0700, files 0600.
        force: whether files that are there may be replaced.
        hidden: whether to write outputs whose names have a part that begins with a dot.

    Returns:
        every output; those that were left out have no path.

    Raises:
        PackageError: as `look_inside`, also when two outputs have one name; nothing is written then.
        UsageError: `usage` when a file is there already or cannot be written, or the file system takes two names for
            one; `disk-full`.
    """
    found = look_inside(folder, receipt, sealing=sealing)
    check_paths(sorted((one.name for one in found), key=str.encode), fold=False)
    targets = [out.joinpath(*one.name.split("/")) if hidden or not is_hidden(one.name) else None for one in found]
    for target in targets:
        if target is not None and not force and is_there(target):
            raise UsageError(Code.USAGE, f"{target} exists already", hint="--force replaces it")
    private_folder(out, close=False)  # one that was there is of the owner's own choice
    written: dict[str, Path] = {}
    for one, output, target in zip(found, receipt.outputs, targets, strict=True):
        if target is None:
            continue
        _make_folders(out, target)
        _refuse_same_file(target, written.setdefault(folded(one.name), target))
        _write(folder, output, receipt, sealing, target, expected=one.sha256, replace_it=force)
    return [replace(one, path=target) for one, target in zip(found, targets, strict=True)]


def is_hidden(name: str) -> bool:
    """Return whether a part of an output's name begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def _write(
    folder: RunFolder,
    output: Output,
    receipt: Receipt,
    sealing: RecipientKey,
    target: Path,
    *,
    expected: bytes,
    replace_it: bool,
) -> None:
    def content(out: BinaryIO) -> None:
        with _open_sealed(folder, output) as stream:
            if _copied(_opened(stream, output, receipt, sealing), output, out) != expected:
                raise PackageError(Code.OUTPUT_TAMPERED, f"output {output.sequence} changed while it was fetched")

    write_private(target, content, replace=replace_it)


def _sealed_files(folder: RunFolder) -> Iterator[Path]:
    outputs = folder.out / _FOLDER
    if outputs.is_dir():
        # A `.partial` is what a runtime that was killed had begun; it never was an output.
        yield from sorted(path for path in outputs.iterdir() if path.suffix != ".partial")


def _opened(stream: BinaryIO, output: Output, receipt: Receipt, sealing: RecipientKey) -> OpenedOutput:
    opened = open_output(stream, sealing, run_id=receipt.run_id, manifest_sha256=receipt.manifest_sha256)
    if (opened.sequence, opened.kind, opened.bytes) != (output.sequence, output.kind, output.plain_bytes):
        raise PackageError(Code.OUTPUT_TAMPERED, f"output {output.sequence} is not the one that the receipt names")
    return opened


def _copied(opened: OpenedOutput, output: Output, out: BinaryIO) -> bytes:
    """Decrypt an output and make sure that what was read is what the receipt names, whatever the file is by now."""
    digest = opened.copy_to(out)
    if opened.sealed_sha256 != output.sealed_sha256:
        raise PackageError(Code.OUTPUT_UNNAMED, f"output {output.sequence} was exchanged while it was read")
    return digest


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


def _refuse_same_file(target: Path, earlier: Path) -> None:
    """Refuse to write over what was just written, where the file system does not separate upper from lower case."""
    if target != earlier and is_there(target) and target.samefile(earlier):
        raise UsageError(
            Code.USAGE,
            f"{target} is one file with {earlier} here, and the run returned two",
            hint="fetch into a folder of a file system that separates upper from lower case",
        )


def _make_folders(out: Path, target: Path) -> None:
    """Make the folders between `out` and `target`, none of which may be a link."""
    current = out
    for part in target.relative_to(out).parts[:-1]:
        current = private_folder(current / part, close=False)
