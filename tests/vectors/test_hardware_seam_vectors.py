"""The vectors of spec/hardware-evidence.md, read as data: bodies in two parts, bindings, levels, packs, policies."""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.detached import LENGTH_BYTES, check_blobs, check_length, envelope_of, readable
from glasshouse.attestation.evidence import Evidence
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.attestation.roots.binding import Bound, activation_mac
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.root_table import check_12_kinds
from glasshouse.attestation.verify import check_1_envelope, check_1_payload, check_4_signatures
from glasshouse.errors import GlasshouseError
from glasshouse.wire.canonical import b64decode
from glasshouse.wire.policy import Assurance
from simulators.key_release_world import World

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "hardware-evidence"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if len(CASES) < 80:
    raise RuntimeError(f"only {len(CASES)} vectors in {FOLDER}")


def body(given: dict[str, Any]) -> dict[str, Any]:
    """As a gate: the first part, its signatures, its payload; then, and only then, what is behind it."""
    whole = b64decode(given["body"])
    end = readable(whole[:LENGTH_BYTES])
    first, rest = whole[:end], whole[len(whole) if end is None else end :]
    envelope, in_parts = envelope_of(first)
    opened = check_1_envelope(envelope)
    launch_public = b64decode(given["launch_public"])
    check_4_signatures(opened.envelope, evidence_public=opened.evidence_public, launch_public=launch_public)
    signed = check_1_payload(opened)
    if not in_parts and not signed.evidence.hardware:
        return {"blobs": {}}
    check_length(signed.evidence, len(rest) if in_parts else None)
    blobs = check_blobs(signed.evidence, rest)
    named = {kind: hashlib.sha256(blob).hexdigest() for kind, blob in blobs.items()}
    return {"blobs": named, "evidence_sha256": signed.sha256.hex()}


def binding(given: dict[str, Any]) -> dict[str, Any]:
    bound = Bound(composite=bytes.fromhex(given["composite"]), gpus_sha256=bytes.fromhex(given["nvidia_sha256"]))
    return {
        "activation": activation_mac(bytes.fromhex(given["secret"]), bound.composite).hex(),
        "gcp_nonce": bound.gcp_nonce,
        "gpu_nonce": bound.gpu_nonce.hex(),
        "report_data": bound.report_data.hex(),
    }


def level(given: dict[str, Any]) -> dict[str, Any]:
    claims = World().claims(assurance=Assurance(given["level"]))
    hardware = tuple(Blob.of(kind, b"blob") for kind in given["kinds"])
    check_12_kinds(Evidence(claims=claims, composite=bytes(32), hardware=hardware))
    return {}


def pack(given: dict[str, Any]) -> dict[str, Any]:
    found = Pack.parse(given["pack"].encode())
    assert found.encode() == given["pack"].encode()
    return {"sha256": found.sha256.hex()}


def policy(given: dict[str, Any]) -> dict[str, Any]:
    found = HardwarePolicy.from_json(given["hardware"])
    kinds = found.wanted(Assurance(given["assurance"]))
    return {"kinds": list(kinds), "sha256": hashlib.sha256(found.encode()).hexdigest()}


READERS = {"binding": binding, "body": body, "level": level, "pack": pack, "policy": policy}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_as_the_vector_says(name: str) -> None:
    case = CASES[name]
    found: dict[str, Any] = {"code": None}
    try:
        found |= READERS[case["kind"]](case["input"])
    except GlasshouseError as error:
        found = {"code": error.code.value}
    assert found == case["expect"]


def test_bindings_follow_from_the_text_of_the_specification() -> None:
    """Lengths and labels of section 3, without the house's code."""

    def joined(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "big") + part for part in parts)

    for name in ("binding-plain", "binding-gpus"):
        given, expect = (
            {k: bytes.fromhex(v or "") for k, v in CASES[name][part].items()} for part in ("input", "expect")
        )
        composite, gpus = given["composite"], given["nvidia_sha256"]
        assert expect["gpu_nonce"] == hashlib.sha256(joined(b"glasshouse gpu nonce v1", composite)).digest()
        assert expect["gcp_nonce"] == hashlib.sha256(joined(b"glasshouse gcp nonce v1", composite)).digest()
        report = hashlib.sha512(joined(b"glasshouse report data v1", composite, gpus)).digest()
        assert expect["report_data"] == report
        opened = joined(b"glasshouse tpm activation v1", composite)
        assert expect["activation"] == hmac.digest(given["secret"], opened, "sha256")


def test_every_kind_has_a_case_that_passes_and_the_generator_writes_the_same_files_again() -> None:
    for kind in READERS:
        assert None in {case["expect"]["code"] for case in CASES.values() if case["kind"] == kind}
    path = ROOT / "spec" / "vectors" / "generate_hardware_evidence.py"
    spec = importlib.util.spec_from_file_location("generate_hardware_evidence", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.build() == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
