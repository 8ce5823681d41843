"""The collateral pack of a home: `glasshouse collateral fetch` writes it; runs above `software` hand it to the gate.

Law: the file holds the old pack or the new one, whole, at every moment (`write_private`). A pack is not trusted: what
uses an item judges it by its maker's signature and the dates inside it.
"""

from __future__ import annotations

from glasshouse.attestation.roots.collateral import MAX_PACK_BYTES, Pack
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import Home, is_there, private_folder, read_bounded, write_private

_FETCH = "glasshouse collateral fetch"


def kept_pack(home: Home) -> Pack | None:
    """Return the pack that was fetched last; None where none was.

    Raises:
        UsageError: `collateral-invalid` for a damaged file, `file-missing` for one that cannot be read, `too-large`.
    """
    if not is_there(home.collateral):
        return None
    data = read_bounded(home.collateral, max_bytes=MAX_PACK_BYTES, what="collateral pack")
    try:
        return Pack.parse(data)
    except FormatError as error:
        why = f"the collateral pack {home.collateral} is damaged: {error.message}"
        raise UsageError(Code.COLLATERAL_INVALID, why, hint=f"fetch it again: {_FETCH}") from None


def needed_pack(home: Home) -> Pack:
    """Return the pack that was fetched last; raises `UsageError`: also `collateral-missing` where none was."""
    pack = kept_pack(home)
    if pack is None:
        why = f"no collateral pack in {home.path}: the gate appraises hardware evidence by one"
        raise UsageError(Code.COLLATERAL_MISSING, why, hint=f"fetch it: {_FETCH} POLICY.toml")
    return pack


def keep_pack(home: Home, pack: Pack) -> None:
    """Put a pack in place of the last; raises `UsageError`, and the last one stays."""
    private_folder(home.path)
    write_private(home.collateral, pack.encode())
