"""What a vendor gave is looked at before it is kept: public lists, manifests and responses, and forged ones."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.x509 import ocsp

from glasshouse.errors import Code
from glasshouse.jobs.collateral.item_makers import Makers
from glasshouse.jobs.collateral.nvidia_issuers import ISSUERS
from glasshouse.jobs.collateral.vendor_services import Certified, asked_about, signers

HERE = Path(__file__).resolve().parents[2] / "vectors" / "hardware"
INTEL = "hardware/tdx/Phala-Network__dcap-qvl/sample/tdx_quote_collateral.json"
DRIVER = "nvidia/rim/NV_GPU_DRIVER_GH100_550.90.07"


def at(year: int, month: int, day: int, hour: int = 0) -> int:
    return int(datetime(year, month, day, hour, tzinfo=UTC).timestamp()) * 1_000_000


def amd() -> tuple[dict[str, bytes], Certified, int]:
    found = {
        f"amd/crl/{name}": (HERE / "sev-snp" / f"crl-{name.lower()}.der").read_bytes() for name in ("Genoa", "Milan")
    }
    return found, {}, at(2025, 6, 1)


def intel() -> tuple[dict[str, bytes], Certified, int]:
    path = Path(os.environ.get("GLASSHOUSE_TEST_DATA", "/nonexistent")) / INTEL
    if not path.is_file():
        pytest.skip(f"this machine does not have {INTEL} (GLASSHOUSE_TEST_DATA)")
    pytest.importorskip("dcap_qvl")
    lists = json.loads(path.read_bytes())
    signed = {
        name: f'{{"{member}":{lists[text]},"signature":"{lists[f"{text}_signature"]}"}}'.encode()
        for name, member, text in (
            ("intel/tcb/B0C06F000000", "tcbInfo", "tcb_info"),
            ("intel/qe-identity", "enclaveIdentity", "qe_identity"),
        )
    }
    found = {
        **signed,
        "intel/tcb/B0C06F000000/chain": lists["tcb_info_issuer_chain"].encode(),
        "intel/qe-identity/chain": lists["qe_identity_issuer_chain"].encode(),
        "intel/root-crl": bytes.fromhex(lists["root_ca_crl"]),
    }
    return found, {}, at(2025, 6, 20)


def nvidia() -> tuple[dict[str, bytes], Certified, int]:
    pytest.importorskip("lxml")
    manifest = (HERE / "nvidia" / f"{DRIVER.rpartition('/')[2]}.xml").read_bytes()
    about = asked_about(signers(manifest))
    files = ("driver-signer", "signers-issuer", "signers-family")
    found = {name: (HERE / "nvidia" / f"ocsp-{file}.der").read_bytes() for name, file in zip(about, files, strict=True)}
    return {DRIVER: manifest, **found}, about, at(2025, 10, 25, 6)


@pytest.mark.parametrize("public", [amd, intel, nvidia])
def test_what_vendors_published_is_theirs(public: object) -> None:
    assert callable(public)
    found, certified, now_us = public()
    makers = Makers(found, certified, now_us=now_us)
    assert (makers.wrong, makers.unchecked) == ({}, set())


@pytest.mark.parametrize("public", [amd, intel, nvidia])
def test_of_each_item_a_changed_byte_is_found(public: object) -> None:
    assert callable(public)
    found, certified, now_us = public()
    for name, data in found.items():
        place = len(data) // 2
        forged = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        makers = Makers({**found, name: forged}, certified, now_us=now_us)
        assert makers.wrong.keys() & {name.removesuffix("/chain")} or name == "intel/root-crl", name
        assert {error.code for error in makers.wrong.values()} == {Code.COLLATERAL_INVALID}, name


def test_the_known_authorities_are_those_that_nvidia_answers_about() -> None:
    """NVIDIA's responses about the authorities that devices of today have are about those that are known here."""
    pytest.importorskip("lxml")
    files = [HERE / "nvidia" / f"ocsp-device-{name}.der" for name in ("provisioner", "family")]
    answers = {ocsp.load_der_ocsp_response(file.read_bytes()).serial_number: file.read_bytes() for file in files}
    known = {name: pair for name, pair in ISSUERS.items() if pair[0].serial_number in answers}
    assert len(known) == 2
    found = {name: answers[about.serial_number] for name, (about, _) in known.items()}
    assert Makers(found, dict(ISSUERS), now_us=at(2025, 8, 21, 12)).wrong == {}
    late = Makers(found, dict(ISSUERS), now_us=at(2025, 8, 22, 12)).wrong
    assert {error.code for error in late.values()} == {Code.COLLATERAL_EXPIRED}
