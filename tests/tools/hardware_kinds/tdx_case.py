"""Public quotes of TDX: `evidence` is one, also in hexadecimal, and `collateral` Intel's lists as dcap-qvl has them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.tdx import tdx_evidence
from glasshouse.wire.canonical import b64encode, encode
from simulators.tdx_machine import PADDING
from tools.hardware_cases import HardwareCase


def appraise_public(case: HardwareCase, files: Mapping[str, bytes], pack: Pack) -> Appraised:
    """Appraise the file; what the case is bound to is the quote's report data."""
    del pack
    quote = files["evidence"]
    if case.paths["evidence"].endswith((".hex", ".txt")):
        quote = bytes.fromhex(quote.decode().removeprefix("0x"))
    if quote.startswith(b"\x04\x00"):
        # These fill their buffer, which the collector cuts off; a file that is cut there is another file.
        quote = quote.removesuffix(PADDING) if quote.endswith(PADDING) else b""
    return tdx_evidence.appraise_blob(
        encode({"quote": b64encode(quote)}),
        case.bound or bytes(64),
        now_us=case.now_us,
        collateral=pack_of(files["collateral"]),
        policy=case.policy,
        root_sha256=tdx_evidence.INTEL_ROOT_SHA256,
    )


def pack_of(collateral: bytes) -> Pack:
    """Return a pack of what was fetched for one quote."""
    found = json.loads(collateral)
    fmspc = json.loads(found["tcb_info"])["fmspc"].upper()
    items = {
        "intel/pck-crl/platform": bytes.fromhex(found["pck_crl"]),
        "intel/qe-identity": _signed("enclaveIdentity", found["qe_identity"], found["qe_identity_signature"]),
        "intel/qe-identity/chain": found["qe_identity_issuer_chain"].encode(),
        "intel/root-crl": bytes.fromhex(found["root_ca_crl"]),
        f"intel/tcb/{fmspc}": _signed("tcbInfo", found["tcb_info"], found["tcb_info_signature"]),
        f"intel/tcb/{fmspc}/chain": found["tcb_info_issuer_chain"].encode(),
    }
    return Pack(items=tuple(Item(name=name, data=data) for name, data in sorted(items.items())))


def _signed(member: str, text: str, signature: str) -> bytes:
    return f'{{"{member}":{text},"signature":"{signature}"}}'.encode()
