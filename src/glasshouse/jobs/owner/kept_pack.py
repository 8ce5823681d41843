"""The collateral pack of a home: `glasshouse collateral fetch` writes it; runs above `software` hand it to the gate.

Law: the file holds the old pack or the new one, whole, at every moment (`write_private`). A pack is not trusted: what
uses an item judges it by its maker's signature and the dates inside it.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from glasshouse.attestation.roots.collateral import MAX_PACK_BYTES, Pack
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import Home, is_there, private_folder, read_bounded, write_private

_FETCH = "glasshouse collateral fetch"
THE_POLICY = "the file that the job's policy.hardware names"
_MOST_GIVEN = 16  # of 2 MiB at most
_DIGEST = re.compile(r"[0-9a-f]{64}")


def kept_pack(home: Home) -> Pack | None:
    """Return the pack that was fetched last; None where none was.

    Raises:
        UsageError: `collateral-invalid` for a damaged file, `file-missing` for one that cannot be read, `too-large`.
    """
    return _read(home.collateral) if is_there(home.collateral) else None


def needed_pack(home: Home) -> Pack:
    """Return the pack that was fetched last; raises `UsageError`: also `collateral-missing` where none was."""
    pack = kept_pack(home)
    if pack is None:
        why = f"no collateral pack in {home.path}: the gate appraises hardware evidence by one"
        raise UsageError(Code.COLLATERAL_MISSING, why, hint=f"fetch it: {_FETCH} with {THE_POLICY}")
    return pack


def keep_pack(home: Home, pack: Pack) -> None:
    """Put a pack in place of the last; raises `UsageError`, and the last one stays."""
    private_folder(home.path)
    write_private(home.collateral, pack.encode())


def note_given(home: Home, pack: Pack) -> None:
    """Keep a pack that a gate is about to be given, and the last ones before it.

    A gate appraises by the last that it has of an owner, so that a run's result may name another launch's.
    """
    write_private(private_folder(home.packs) / f"{pack.sha256.hex()}.json", pack.encode())
    with contextlib.suppress(OSError):  # another process removes them too
        given = sorted(home.packs.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for old in given[:-_MOST_GIVEN]:
            old.unlink(missing_ok=True)


def given_pack(home: Home, sha256: object) -> Pack | None:
    """Return the pack of a digest in hexadecimal that a gate was given; None where there is none.

    Args:
        sha256: as a machine wrote it, which may be anything.
    """
    if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
        return None
    try:
        pack = _read(home.packs / f"{sha256}.json")
    except UsageError:
        return None
    return pack if pack.sha256.hex() == sha256 else None


def _read(path: Path) -> Pack:
    data = read_bounded(path, max_bytes=MAX_PACK_BYTES, what="collateral pack")
    try:
        return Pack.parse(data)
    except FormatError as error:
        why = f"the collateral pack {path} is damaged: {error.message}"
        raise UsageError(
            Code.COLLATERAL_INVALID, why, hint=f"fetch it again: {_FETCH} --only with {THE_POLICY}"
        ) from None
