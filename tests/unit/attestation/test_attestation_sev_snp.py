"""A report of SEV-SNP counts for what the owner listed, of this chip and firmware, and for one run."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256, SHA384

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised, EarStatus
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import EMPTY, Item, Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.sev_snp.amd_keys import PINNED
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import SevSnpBlob
from glasshouse.attestation.roots.sev_snp.sev_snp_evidence import appraise, appraise_report
from glasshouse.attestation.roots.sev_snp.sev_snp_policy import SevSnpPolicy
from glasshouse.errors import Code, FormatError
from simulators.snp_machine import CHIP, CLOUD, MEASUREMENT, SnpMachine

NOW = datetime(2026, 3, 1, tzinfo=UTC)
BOUND = Bound(composite=b"\xc0" * 32, gpus_sha256=b"\x99" * 32)
MIGRATION, DEBUG, CXL, SINGLE_SOCKET, SMT = (1 << bit for bit in (18, 19, 21, 20, 16))
GUEST = 1 << 17 | 1 << 8 | 55
ID_KEY, AUTHOR_KEY = b"\x1d" * 48, b"\xa0" * 48
LATER = {"bootloader": 1, "fmc": 2, "microcode": 9, "snp": 4, "tee": 1}
MILAN = {"bootloader": 4, "microcode": 219, "snp": 24, "tee": 0}


def judged(
    machine: SnpMachine | None = None,
    *,
    at: datetime = NOW,
    policy: dict[str, Any] | None = None,
    pack: Pack | None = None,
    certificate: bytes | None = None,
    **report: Any,
) -> Appraised:
    """What a gate that pins this machine's keys finds."""
    machine = machine or SnpMachine(now=NOW)
    return appraise_report(
        machine.report(BOUND.report_data, **report),
        machine.certificate if certificate is None else certificate,
        report_data=BOUND.report_data,
        now_us=int(at.timestamp() * 1_000_000),
        collateral=machine.pack() if pack is None else pack,
        policy=machine.policy(**policy or {}),
        roots=machine.roots,
    )


@pytest.mark.parametrize(
    ("machine", "policy", "report"),
    [
        ({"product": "Milan", "firmware": MILAN}, {}, {"version": 3}),
        ({"product": "Milan", "firmware": MILAN}, {"chips": [CHIP.hex()]}, {"version": 4}),
        ({}, {"mitigations": 2}, {"launch_mitigations": 3, "current_mitigations": 6}),
        ({}, {"requires": ["single-socket"], "least_abi": "1.55"}, {"guest_policy": GUEST | SINGLE_SOCKET}),
        ({}, {"smt": True, "vmpl": 2, "least_firmware": "1.55.40"}, {"guest_policy": GUEST | SMT, "vmpl": 2}),
        ({}, {"measurements": None, "id_keys": [ID_KEY.hex()]}, {"id_key": ID_KEY}),
        ({}, {"least_guest_svn": 7}, {"guest_svn": 7}),
        ({}, {"measurements": None, "author_keys": [AUTHOR_KEY.hex()]}, {"author_key": AUTHOR_KEY, "signer": 1}),
        ({}, {"host_data": ["dd" * 32]}, {"host_data": b"\xdd" * 32}),
        ({"product": "Turin", "firmware": LATER, "chip": b"\x77" * 8}, {}, {}),
        ({"is_vlek": True}, {"csps": [CLOUD]}, {}),
        ({"certified": {"chip": b"\x04\x40" + CHIP, "product": "Genoa"}}, {}, {}),
    ],
    ids=["milan", "version-4", "mitigations", "demands", "beneath-a-supervisor", "id-key", "guest-svn", "author-key",
         "host-data", "turin", "vlek", "certificate-of-a-later-form"],
)  # fmt: skip
def test_machines_that_an_owner_may_trust(
    machine: dict[str, Any], policy: dict[str, Any], report: dict[str, Any]
) -> None:
    made = SnpMachine(now=NOW, **machine)
    found = judged(made, policy=policy, **report)
    assert found.status is EarStatus.AFFIRMING
    assert found.claims["product"] == made.product
    assert found.claims["tcb"] == made.firmware
    assert NOW.timestamp() < found.not_after_us / 1_000_000 <= (NOW + timedelta(days=300)).timestamp()


LOW = SnpMachine(now=NOW).tcb(bootloader=10, tee=0, snp=22, microcode=84)


@pytest.mark.parametrize(
    ("code", "report", "policy"),
    [
        # A report of an older form names no processor; a newer one may say what is not read.
        (Code.SNP_REPORT, {"version": 2, "family": 0, "model": 0}, {}),
        (Code.SNP_REPORT, {"version": 6}, {}),
        (Code.SNP_REPORT, {"algorithm": 0}, {}),
        (Code.SNP_REPORT, {"guest_policy": GUEST & ~(1 << 17)}, {}),
        (Code.SNP_REPORT, {"guest_policy": GUEST | 1 << 26}, {}),
        (Code.SNP_REPORT, {"platform": 1 << 5 | 1 << 6}, {}),
        (Code.SNP_REPORT, {"signer": 2}, {}),  # the host masks the chip's key
        (Code.SNP_REPORT, {"signer": 7 << 2}, {}),
        (Code.SNP_REPORT, {"version": 4, "launch_mitigations": 1}, {}),
        (Code.SNP_REPORT, {"launch": b"\x0a\0\x01\0\0\0\x17\x54"}, {}),
        # The report claims another signer, another processor or another chip than the certificate.
        (Code.HARDWARE_CERTIFICATE, {"signer": 4}, {}),
        (Code.SNP_PRODUCT, {"model": 0x01}, {}),
        (Code.SNP_PRODUCT, {"family": 0x1A}, {}),
        (Code.SNP_PRODUCT, {"model": 0x50}, {}),
        (Code.SNP_PRODUCT, {}, {"tcb": {"Milan": MILAN}}),
        (Code.SNP_CHIP, {"chip": bytes(64)}, {}),
        (Code.SNP_CHIP, {"chip": b"\x02" * 64}, {}),
        (Code.SNP_CHIP, {}, {"chips": ["02" * 64]}),
        # The guest was launched to allow what takes its memory from it.
        (Code.HARDWARE_DEBUG, {"guest_policy": GUEST | DEBUG}, {}),
        (Code.SNP_POLICY, {"guest_policy": GUEST | MIGRATION}, {}),
        (Code.SNP_POLICY, {"guest_policy": GUEST | CXL}, {}),
        (Code.SNP_POLICY, {"guest_policy": GUEST | SMT}, {}),
        (Code.SNP_POLICY, {}, {"requires": ["single-socket"]}),
        (Code.SNP_POLICY, {}, {"least_abi": "1.56"}),
        (Code.SNP_VMPL, {"vmpl": 1}, {}),  # asked for by a driver or a container, beneath the system
        (Code.SNP_VMPL, {}, {"vmpl": 1}),
        # The firmware is old, was old when it measured the guest, or can be made old again.
        (Code.HARDWARE_CERTIFICATE, {"reported": LOW}, {}),
        (Code.HARDWARE_TCB, {"committed": LOW}, {}),
        (Code.HARDWARE_TCB, {"current": LOW}, {}),
        (Code.HARDWARE_TCB, {"launch": LOW}, {}),
        (Code.HARDWARE_TCB, {}, {"least_firmware": "1.56.0"}),
        (Code.HARDWARE_TCB, {"guest_svn": 6}, {"least_guest_svn": 7}),
        (Code.HARDWARE_TCB, {"platform": 0}, {}),  # BadRAM
        (Code.HARDWARE_TCB, {"launch_mitigations": 1, "current_mitigations": 3}, {"mitigations": 2}),
        # Something else was launched.
        (Code.REFERENCE_VALUE, {"measurement": b"\x5f" * 48}, {}),
        (Code.REFERENCE_VALUE, {}, {"host_data": ["dd" * 32]}),
        (Code.REFERENCE_VALUE, {}, {"id_keys": [ID_KEY.hex()]}),
        (Code.REFERENCE_VALUE, {"author_key": AUTHOR_KEY}, {"author_keys": [AUTHOR_KEY.hex()]}),
    ],
)
def test_reports_that_are_refused(code: Code, report: dict[str, Any], policy: dict[str, Any]) -> None:
    with pytest.raises(CheckFailedError) as refused:
        judged(policy=policy, **report)
    assert refused.value.code is code


PSS = padding.MGF1(SHA384())


@pytest.mark.parametrize(
    "certified",
    [
        {"subject": "SEV-VLEK"},
        {"subject": "ARK-Genoa"},
        {"role": "ark"},
        {"role": "asvk"},
        {"starts": NOW + timedelta(days=1)},
        {"ends": NOW - timedelta(hours=1)},
        {"key": ec.generate_private_key(ec.SECP256R1())},
        {"structure": 2},
        {"padding": padding.PSS(padding.MGF1(SHA256()), salt_length=48)},
        {"padding": padding.PSS(PSS, salt_length=32)},
        {"padding": padding.PKCS1v15()},
        {"chip": b""},
        {"chip": b"\x01" * 63},
        {"cloud": CLOUD},
        {"firmware": {"bootloader": 10, "tee": 0, "snp": 23}},
        {"firmware": {"bootloader": 10, "tee": 0, "snp": 23, "microcode": 256}},
        {"firmware": {"bootloader": 10, "tee": 0, "snp": 23, "microcode": 84, "fmc": 0}},
        {"firmware": {"bootloader": 10, "tee": 0, "snp": 24, "microcode": 84}},
        {"more": [((3, 4), b"\x02\x01\x01")]},
        {"more": [((6,), b"\x02\x01\x01")]},
        {"more": [((3, 4), b"\x02\x02\x00\x00")]},
        {"foreign": [x509.BasicConstraints(ca=True, path_length=None)]},
        {"product": b"\x0c\x05Genoa"},
    ],
)
def test_certificates_that_are_refused(certified: dict[str, Any]) -> None:
    """Genuine ones of another use among them, and such as a careless authority might sign."""
    with pytest.raises(CheckFailedError) as refused:
        judged(SnpMachine(now=NOW, certified=certified))
    assert refused.value.code is Code.HARDWARE_CERTIFICATE


def test_a_report_is_of_the_key_in_its_certificate() -> None:
    machine, other = SnpMachine(now=NOW), SnpMachine(now=NOW)
    with pytest.raises(CheckFailedError, match="did not sign"):
        judged(machine, certificate=other.certificate)


def test_a_certificate_has_one_form_to_its_end() -> None:
    """How many bits of a signature count is no part of what was signed; nor is what stands behind it."""
    machine = SnpMachine(now=NOW)
    good = machine.certificate
    at = len(good) - 257  # of the last element, which is the signature
    assert good[at] == 0
    for data in (good[:at] + b"\x01" + good[at + 1 :], good + b"\0", good[:-1], b"", b"\x30\x82" * 40):
        with pytest.raises(CheckFailedError) as refused:
            judged(machine, certificate=data)
        assert refused.value.code is Code.HARDWARE_CERTIFICATE


def test_a_key_of_a_cloud_counts_where_the_policy_lists_that_cloud() -> None:
    machine = SnpMachine(now=NOW, is_vlek=True)
    for policy in ({}, {"csps": ["CN=another"]}):
        with pytest.raises(CheckFailedError, match="cloud"):
            judged(machine, policy=policy)


def test_a_report_of_another_run_is_refused() -> None:
    machine = SnpMachine(now=NOW)
    with pytest.raises(CheckFailedError) as refused:
        appraise_report(
            machine.report(Bound(composite=BOUND.composite).report_data),  # the same run without its GPUs' evidence
            machine.certificate,
            report_data=BOUND.report_data,
            now_us=int(NOW.timestamp() * 1_000_000),
            collateral=machine.pack(),
            policy=machine.policy(),
            roots=machine.roots,
        )
    assert refused.value.code is Code.HARDWARE_BINDING


def test_a_revoked_issuer_and_a_list_that_is_not_current_are_refused() -> None:
    for revoked in (0x20001, 1):  # the ASK; the certificate itself
        with pytest.raises(CheckFailedError) as refused:
            judged(SnpMachine(now=NOW, revoked=[7, revoked]))
        assert refused.value.code is Code.HARDWARE_REVOKED
    machine = SnpMachine(now=NOW)
    signed = machine.pack().items[0].data
    name = "amd/crl/Genoa"
    with pytest.raises(CheckFailedError, match="complete list"):  # some bits of the signature that are said to be none
        judged(machine, pack=Pack(items=(Item(name=name, data=signed[:-257] + b"\x01" + signed[-256:]),)))
    cases = {
        Code.COLLATERAL_MISSING: (EMPTY, NOW),
        Code.COLLATERAL_EXPIRED: (machine.pack(), NOW + timedelta(days=265)),
        Code.COLLATERAL_INVALID: (Pack(items=(Item(name=name, data=signed[:-1] + bytes([signed[-1] ^ 1])),)), NOW),
    }
    for code, (pack, at) in cases.items():
        with pytest.raises(CheckFailedError) as refused:
            judged(machine, pack=pack, at=at)
        assert refused.value.code is code
    with pytest.raises(CheckFailedError, match="complete list"):
        judged(machine, pack=Pack(items=(Item(name=name, data=b"\x30\x03\x02\x01\x00"),)))


def test_a_list_that_is_not_of_all_or_is_too_large_is_refused() -> None:
    """Of a critical extension the rest of the list may hang; a pack has room for more than a list ever had."""
    machine = SnpMachine(now=NOW)
    narrowed = x509.IssuingDistributionPoint(None, None, True, False, None, False, False)
    for pack in (machine.pack(narrowed), SnpMachine(now=NOW, revoked=range(2**150, 2**150 + 1800)).pack()):
        with pytest.raises(CheckFailedError, match="complete list") as refused:
            judged(machine, pack=pack)
        assert refused.value.code is Code.COLLATERAL_INVALID


def test_the_keys_that_only_tests_trust_are_not_pinned() -> None:
    machine = SnpMachine(now=NOW)
    blob = SevSnpBlob(certificate=machine.certificate, report=machine.report(BOUND.report_data)).encode()
    policy = HardwarePolicy(sev_snp=machine.policy())
    with pytest.raises(CheckFailedError) as refused:
        appraise(blob, bound=BOUND, now_us=int(NOW.timestamp() * 1_000_000), collateral=machine.pack(), policy=policy)
    assert refused.value.code is Code.HARDWARE_CERTIFICATE
    with pytest.raises(CheckFailedError) as refused:
        appraise(blob, bound=BOUND, now_us=0, collateral=EMPTY, policy=HardwarePolicy())
    assert refused.value.code is Code.CHAIN_MISSING
    with pytest.raises(CheckFailedError) as refused:
        appraise(blob + b" ", bound=BOUND, now_us=0, collateral=EMPTY, policy=policy)
    assert refused.value.code is Code.HARDWARE_MALFORMED


def test_a_policy_leads_to_what_was_launched() -> None:
    """The host chooses HOST_DATA, and zeros stand where no key signed."""
    tcb = {"Genoa": {"bootloader": 0, "tee": 0, "snp": 0, "microcode": 0}}
    measured = {"measurements": [MEASUREMENT.hex()], "tcb": tcb}
    for value in ({"tcb": tcb, "chain": "launch"}, {"tcb": tcb, "chain": "launch", "host_data": ["dd" * 32]}, measured):
        with pytest.raises(FormatError) as refused:
            SevSnpPolicy.from_json(value)
        assert refused.value.code is Code.CHAIN_MISSING
    with pytest.raises(FormatError) as refused:
        SevSnpPolicy.from_json({**measured, "chain": "launch", "id_keys": ["00" * 48]})
    assert refused.value.code is Code.POLICY_IMPOSSIBLE
    with pytest.raises(FormatError):
        SevSnpPolicy.from_json({**measured, "chain": "launch", "tcb": {}})
    assert SevSnpPolicy.from_json({**measured, "chain": "launch"}).needed == ("amd/crl/Genoa",)


def test_the_pinned_keys_are_those_that_amd_publishes() -> None:
    folder = Path(
        os.environ.get("GLASSHOUSE_TEST_DATA", "/nonexistent"), "hardware/snp/google__go-sev-guest/verify/trust"
    )
    files = sorted(folder.glob("*.pem"))
    if not files:
        pytest.skip("this machine does not have hardware/snp (GLASSHOUSE_TEST_DATA)")
    published = {}
    for file in files:
        issued, root = x509.load_pem_x509_certificates(file.read_bytes())
        issued.verify_directly_issued_by(root)
        root.verify_directly_issued_by(root)
        for one in (issued, root):
            published[one.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value] = one
    pinned = [authority for product in PINNED for authority in (product.ark, product.ask, product.asvk)]
    assert {authority.name for authority in pinned} == published.keys()
    for authority in pinned:
        one = published[authority.name]
        key = one.public_key()
        assert isinstance(key, RSAPublicKey)
        assert authority.key.public_numbers() == key.public_numbers()
        assert authority.serial == one.serial_number
        assert authority.ends_s == one.not_valid_after_utc.timestamp()
