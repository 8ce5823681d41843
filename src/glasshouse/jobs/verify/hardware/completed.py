"""Puts into a run's bundle what its owner has and the runtime had not: the policy and the collateral.

Law: a bundle that is none, or of another run, stays as the machine left it, for verification to refuse.
"""

from __future__ import annotations

from dataclasses import replace

from glasshouse.errors import FormatError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES
from glasshouse.jobs.define.run_hardware import RunHardware
from glasshouse.jobs.owner.home import Home, is_file, read_bounded, write_private
from glasshouse.jobs.owner.kept_pack import given_pack
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.wire import jwt
from glasshouse.wire.canonical import Json


def complete_bundle(folder: RunFolder, home: Home | None = None) -> None:
    """Complete the receipt in the folder of a run above `software`; raises `UsageError`.

    Args:
        home: where packs of other launches are kept, of which the gate may have had one by then.
    """
    known = RunHardware.load(folder)
    if known is None or not is_file(folder.receipt) or folder.receipt.is_symlink():
        return
    try:
        bundle = Bundle.parse(read_bounded(folder.receipt, max_bytes=MAX_BUNDLE_BYTES, what="receipt"))
        named = _named_pack(bundle)
    except FormatError:
        return
    if bundle.hardware is None:
        return
    pack = known.collateral
    if home is not None and (pack is None or pack.sha256.hex() != named):
        pack = given_pack(home, named)
    collateral = None if pack is None or pack.sha256.hex() != named else pack.encode()
    # Whatever the machine wrote there: the digests of both stand in what the broker signed.
    whole = replace(bundle.hardware, collateral=collateral, policy=known.policy.to_json())
    if whole != bundle.hardware:
        write_private(folder.receipt, replace(bundle, hardware=whole).encode())


def _named_pack(bundle: Bundle) -> Json:
    """Return the digest of the pack that the attestation result names, by its own word; raises `FormatError`."""
    if bundle.ear is None:
        return None
    claims = jwt.parse(bundle.ear).claims.get("glasshouse")
    return claims.get("collateral_sha256") if isinstance(claims, dict) else None
