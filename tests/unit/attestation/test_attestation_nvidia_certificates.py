"""NVIDIA's certificates and what OCSP says of them: what is not theirs, not good or not of this time is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import EarStatus
from glasshouse.attestation.roots.hardware_policy import MaxAges
from glasshouse.attestation.roots.nvidia import nvidia_evidence
from glasshouse.attestation.roots.nvidia.nvidia_certificates import ocsp_name, read_certificate
from glasshouse.errors import Code, FormatError
from simulators.nvidia_machine import CRITICAL, NOW, Authority, NvidiaMachine, certified, named, refused


@pytest.fixture(scope="module")
def machine() -> NvidiaMachine:
    """A machine with one GPU; tests leave it as it is."""
    return NvidiaMachine()


def test_a_certificate_of_another_root_is_refused(machine: NvidiaMachine) -> None:
    theirs = NvidiaMachine()
    refused(machine, Code.HARDWARE_CERTIFICATE, theirs.blob(), pack=theirs.pack())
    posing = [*theirs.gpus[0].ders[:4], machine.device_root.der]
    blob = machine.blob(gpus=[(theirs.report(theirs.gpus[0])[0], posing)])
    refused(machine, Code.HARDWARE_CERTIFICATE, blob, pack=theirs.pack())
    # Nor does evidence by a root that tests trust pass by the pinned ones.
    with pytest.raises(CheckFailedError, match="another root") as error:
        nvidia_evidence.appraise(
            machine.blob(),
            bound=machine.bound(),
            now_us=int(NOW.timestamp()) * 1_000_000,
            collateral=machine.pack(),
            policy=machine.policy(),
        )
    assert error.value.code is Code.HARDWARE_CERTIFICATE


def test_what_a_report_key_certified_is_no_device(machine: NvidiaMachine) -> None:
    """A key that is no authority issues the certificate of a key of the host's."""
    device = machine.gpus[0]
    forged = certified(named("GH100 A01 GSP FMC LF"), device.chain[0], is_authority=False)
    blob = machine.blob(gpus=[(machine.report(device)[0], [forged.der, device.ders[0], *device.ders[2:]])])
    refused(machine, Code.HARDWARE_CERTIFICATE, blob)
    authority = certified(named("GH100 A01 GSP FMC LF"), device.chain[1])
    blob = machine.blob(gpus=[(machine.report(device)[0], [authority.der, *device.ders[1:]])])
    refused(machine, Code.HARDWARE_CERTIFICATE, blob)


def test_a_key_that_is_no_authority_certifies_nothing_on_any_place(machine: NvidiaMachine) -> None:
    """Its own certificate is genuine, and so is the signature that it made."""
    device = certified(named("GH100 A01 GSP BROM", "41" + "00" * 8), machine.family)
    key = certified(named("GH100 A01 GSP FMC LF"), device, is_authority=False)
    forged = certified(named("GH100 A01 GSP FMC LF"), key, is_authority=False)
    chain = [each.der for each in (forged, key, device, machine.family, machine.device_root)]
    blob = machine.blob(gpus=[(machine.report(machine.gpus[0])[0], chain)])
    assert "may not issue" in refused(machine, Code.HARDWARE_CERTIFICATE, blob).message


@pytest.mark.parametrize("terms", [{"curve": ec.SECP256R1()}, {"algorithm": SHA256()}], ids=["curve", "hash"])
def test_a_certificate_of_another_form_is_refused(machine: NvidiaMachine, terms: dict[str, Any]) -> None:
    device = machine.gpus[0]
    leaf = certified(named("GH100 A01 GSP FMC LF"), device.chain[1], is_authority=False, **terms)
    blob = machine.blob(gpus=[(machine.report(device)[0], [leaf.der, *device.ders[1:]])])
    refused(machine, Code.HARDWARE_CERTIFICATE, blob)


def test_what_is_critical_and_unknown_is_refused(machine: NvidiaMachine) -> None:
    device = machine.gpus[0]
    known = next(each.value for each in device.chain[0].certificate.extensions if "2.23" in each.oid.dotted_string)
    extensions = [x509.UnrecognizedExtension(CRITICAL, b"0"), known]
    leaf = certified(named("GH100 A01 GSP FMC LF"), device.chain[1], is_authority=False, extensions=extensions)
    blob = machine.blob(gpus=[(machine.report(device)[0], [leaf.der, *device.ders[1:]])])
    assert "critical" in refused(machine, Code.HARDWARE_CERTIFICATE, blob).message


@pytest.mark.parametrize("reason", [x509.ReasonFlags.key_compromise, x509.ReasonFlags.certificate_hold], ids=str)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_revoked_certificate_is_refused(machine: NvidiaMachine, place: int, reason: x509.ReasonFlags) -> None:
    machine.revoked[machine.gpus[0].chain[place].der] = reason
    revoked = machine.pack()
    machine.revoked.clear()
    assert refused(machine, Code.HARDWARE_REVOKED, pack=revoked).actual == "revoked"


@pytest.mark.parametrize(
    ("at", "until", "code"),
    [
        (NOW - timedelta(days=2), NOW + timedelta(days=2), Code.COLLATERAL_EXPIRED),  # older than the policy's age
        (NOW - timedelta(hours=2), NOW - timedelta(hours=1), Code.COLLATERAL_EXPIRED),
        (NOW + timedelta(hours=1), NOW + timedelta(hours=2), Code.COLLATERAL_EXPIRED),
    ],
    ids=["old", "ended", "future"],
)
def test_an_answer_of_another_time_is_refused(
    machine: NvidiaMachine, at: datetime, until: datetime, code: Code
) -> None:
    device = machine.gpus[0].chain
    answer = machine.answer(device[2], device[3], at=at, until=until)
    found = refused(machine, code, pack=machine.pack(instead={ocsp_name(device[2].der): answer}))
    assert "the verifier's clock" in found.message
    assert found.actual == f"{NOW:%Y-%m-%dT%H:%M:%SZ}"


def test_an_older_answer_is_good_for_as_long_as_the_policy_says(machine: NvidiaMachine) -> None:
    ages = replace(machine.policy(), collateral=MaxAges(ocsp=60 * 60))
    assert machine.appraise(policy=replace(ages, collateral=MaxAges(ocsp=60 * 61))).status is EarStatus.AFFIRMING
    refused(machine, Code.COLLATERAL_EXPIRED, policy=ages)


def test_an_answer_by_a_stranger_or_about_another_is_refused(machine: NvidiaMachine) -> None:
    device = machine.gpus[0].chain
    name = ocsp_name(device[2].der)
    uses = [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING])]
    strangers = (
        certified(named("R"), machine.provisioner, is_authority=False, extensions=uses),  # another issuer's
        certified(named("R"), machine.family, is_authority=False),  # for another use
        certified(named("R"), machine.family, is_authority=False, extensions=uses, until=NOW - timedelta(days=1)),
    )
    answers = [machine.answer(device[2], device[3], responder=stranger) for stranger in strangers]
    about_another = machine.answer(device[3], machine.device_root)
    for answer in (answers[0], answers[1], about_another, answers[0] + b"\0", b""):
        refused(machine, Code.COLLATERAL_INVALID, pack=machine.pack(instead={name: answer}))
    refused(machine, Code.COLLATERAL_EXPIRED, pack=machine.pack(instead={name: answers[2]}))


def test_an_answer_about_another_device_of_the_same_maker_is_refused(machine: NvidiaMachine) -> None:
    """A host hands in what was said of a good device in the place of what was said of a revoked one."""
    mine, other = (each.chain[1] for each in (machine.gpus[0], machine.made_device("another")))
    for answer in (
        machine.answer(other, machine.provisioner),
        machine.answer(mine, machine.provisioner, until=None),
        machine.answer(mine, machine.provisioner, beside=[machine.family]),
    ):
        refused(machine, Code.COLLATERAL_INVALID, pack=machine.pack(instead={ocsp_name(mine.der): answer}))


def test_an_answer_has_one_form(machine: NvidiaMachine) -> None:
    """Of its status and of the name of its signature's algorithm, which no signature covers."""
    device = machine.gpus[0].chain
    answer, name = machine.answer(device[2], device[3]), ocsp_name(device[2].der)
    outer = answer.index(bytes.fromhex("2a8648ce3d040303"))  # the answer itself has no such name
    for at in (answer.index(bytes.fromhex("0a0100")) + 2, outer + 5):
        altered = answer[:at] + bytes([answer[at] ^ 0x10]) + answer[at + 1 :]
        refused(machine, Code.COLLATERAL_INVALID, pack=machine.pack(instead={name: altered}))


def test_a_certificate_that_is_as_large_as_a_pack_is_not_read(machine: NvidiaMachine) -> None:
    """Who answers has its certificate in the answer, which is read, and kept, before its signature is known to hold."""
    large = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.99999.2"), bytes(8192))
    answerer = certified(named("an answerer"), machine.gpus[0].chain[1], is_authority=False, extensions=[large])
    with pytest.raises(FormatError, match="too large"):
        read_certificate(answerer.der)


@pytest.mark.parametrize("place", range(4))
def test_a_certificate_has_one_form(machine: NvidiaMachine, place: int) -> None:
    """A bit of the signature's string that is said not to be used is covered by no signature."""
    ders = machine.gpus[0].ders
    signature = machine.gpus[0].chain[place].certificate.signature
    at = len(ders[place]) - len(signature) - 1
    ders[place] = ders[place][:at] + b"\1" + ders[place][at + 1 :]
    refused(machine, Code.HARDWARE_CERTIFICATE, machine.blob(gpus=[(machine.report(machine.gpus[0])[0], ders)]))


def _elements(content: bytes) -> list[tuple[int, bytes]]:
    """Split the content of an element of ASN.1 into its elements: tag and content of each."""
    found = []
    while content:
        at = 2 + (content[1] & 0x7F if content[1] & 0x80 else 0)
        end = at + (int.from_bytes(content[2:at], "big") if at > 2 else content[1])
        found.append((content[0], content[at:end]))
        content = content[end:]
    return found


def _element(tag: int, *parts: tuple[int, bytes] | bytes) -> bytes:
    content = b"".join(part if isinstance(part, bytes) else _element(*part) for part in parts)
    size = len(content).to_bytes(max(1, (len(content).bit_length() + 7) // 8), "big")
    return bytes([tag]) + (size if len(content) < 0x80 else bytes([0x80 | len(size)]) + size) + content


def _narrowed(answer: bytes, responder: Authority, *, is_critical: bool) -> bytes:
    """Return the answer with an extension about its one certificate, signed by its responder once more."""
    status, (_, wrapped) = _elements(_elements(answer)[0][1])
    kind, (_, basic) = _elements(_elements(wrapped)[0][1])
    (_, signed), algorithm, _, certificates = _elements(_elements(basic)[0][1])
    who, when, (_, responses) = _elements(signed)
    oid = bytes.fromhex("06082b06010401868d1f")
    extension = _element(0x30, oid, b"\1\1\xff" * is_critical, b"\4\2\5\0")
    single = _element(0x30, *_elements(_elements(responses)[0][1]), _element(0xA1, _element(0x30, extension)))
    again = _element(0x30, who, when, _element(0x30, single))
    signature = b"\0" + responder.key.sign(again, ec.ECDSA(SHA384()))
    whole = _element(0x30, again, algorithm, (3, signature), certificates)
    return _element(0x30, status, _element(0xA0, _element(0x30, kind, (4, whole))))


def test_an_answer_with_what_is_critical_about_its_certificate_is_refused(machine: NvidiaMachine) -> None:
    """It would narrow what is said, in a way that nobody here understands."""
    device = machine.gpus[0].chain
    answer, name = machine.answer(device[2], device[3]), ocsp_name(device[2].der)
    assert device[3].responder is not None
    narrowed, beside = (_narrowed(answer, device[3].responder, is_critical=which) for which in (True, False))
    assert len(list(ocsp.load_der_ocsp_response(narrowed).single_extensions)) == 1
    refused(machine, Code.COLLATERAL_INVALID, pack=machine.pack(instead={name: narrowed}))
    assert machine.appraise(pack=machine.pack(instead={name: beside})).status is EarStatus.AFFIRMING
