"""What makes a TPM's policy, attestation key, endorsement and event log good, and each thing that they may lack."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.attestation.roots.tpm.endorsement import check_endorsement, endorsed_sha256
from glasshouse.attestation.roots.tpm.tpm_policy import TpmPolicy
from glasshouse.attestation.roots.tpm.tpm_quote import check_ak
from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import sha256
from tools.ek_authority import EK_USE, EkAuthority
from tools.hardware_cases import FOLDER
from tools.software_tpm import BOOT_LOG

NOW_US = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
ROOT = EkAuthority("the root")
FACTORY = EkAuthority("a factory", ROOT, path_length=0)
EK = ec.generate_private_key(ec.SECP256R1()).public_key()
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
AK = (FOLDER / "tpm" / "swtpm-ak.bin").read_bytes()
LOGS = json.loads((FOLDER / "tpm" / "boot-logs.json").read_bytes())
SHARED = Path(os.environ.get("GLASSHOUSE_TEST_DATA", "/nonexistent")) / "hardware" / "tpm"


def policy(*registers: int, root: bytes = ROOT.der) -> TpmPolicy:
    return TpmPolicy(chain="image", ek_roots=(root,), pcrs={str(one): (bytes(32),) for one in registers})


IMAGE = policy(0, 2, 4, 7, 8, 9)


@pytest.mark.parametrize("system", [(8, 9), (11, 12, 13), (9, 12), (8, 9, 11, 14)])
def test_a_policy_leads_from_the_firmware_to_the_command_line(system: tuple[int, ...]) -> None:
    made = policy(0, 2, 4, 7, *system)
    assert TpmPolicy.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("registers", "code"),
    [
        ((), Code.CHAIN_MISSING),
        ((0, 2, 4, 7), Code.CHAIN_MISSING),  # any kernel, by a boot loader that is known
        ((0, 2, 4, 7, 9), Code.CHAIN_MISSING),  # any command line
        ((0, 2, 4, 7, 11), Code.CHAIN_MISSING),  # a command line, or an extension of the initrd, beside the image
        ((0, 4, 7, 8, 9), Code.CHAIN_MISSING),  # code of a card's, before the boot loader
        ((0, 2, 7, 8, 9), Code.CHAIN_MISSING),
        ((0, 2, 4, 7, 8, 9, 10), Code.POLICY_IMPOSSIBLE),
        ((0, 2, 4, 7, 8, 9, 16), Code.POLICY_IMPOSSIBLE),
        ((0, 2, 4, 7, 8, 9, 23), Code.POLICY_IMPOSSIBLE),
        ((0, 2, 4, 7, 8, 9, 24), Code.POLICY_IMPOSSIBLE),
    ],
)
def test_a_policy_without_a_chain_or_with_what_all_can_write_is_none(registers: tuple[int, ...], code: Code) -> None:
    with pytest.raises(FormatError) as refused:
        policy(*registers)
    assert refused.value.code is code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"chain": ...}, Code.CHAIN_MISSING),
        ({"chain": "runtime"}, Code.SCHEMA),
        ({"ek_roots": ...}, Code.POLICY_IMPOSSIBLE),
        ({"ek_roots": ["MAAA"]}, Code.POLICY_IMPOSSIBLE),
        ({"aks": ["000b"]}, Code.SCHEMA),
        ({"pcrs": ...}, Code.SCHEMA),
    ],
)
def test_a_policy_names_a_chain_and_a_tpm(change: dict[str, object], code: Code) -> None:
    value = {key: one for key, one in (IMAGE.to_json() | change).items() if one is not ...}
    with pytest.raises(FormatError) as refused:
        TpmPolicy.from_json(value)
    assert refused.value.code is code


def test_an_attestation_key_has_exactly_the_attributes_of_one() -> None:
    assert check_ak(AK) == b"\x00\x0b" + sha256(AK)
    accepted = []
    for bit in range(32):
        attributes = int.from_bytes(AK[4:8], "big") ^ 1 << bit
        with contextlib.suppress(CheckFailedError):
            check_ak(AK[:4] + attributes.to_bytes(4, "big") + AK[8:])
            accepted.append(bit)
    assert accepted == [10]  # whether guesses at its authorization are counted


def _rsa_ak(modulus: bytes, *, bits: int = 2048, exponent: int = 0, scheme: int = 0x14) -> bytes:
    head = struct.pack(">HHI5HI", 0x01, 0x0B, 0x50072, 0, 0x10, scheme, 0x0B, bits, exponent)
    return head + len(modulus).to_bytes(2, "big") + modulus


@pytest.mark.parametrize(
    "public",
    [
        b"",
        AK[:-1],
        AK + b"\x00",
        b"\x00\x08" + AK[2:],  # a keyed hash
        AK[:2] + b"\x00\x04" + AK[4:],  # named by SHA-1
        AK[:8] + b"\x00\x20" + bytes(32) + AK[10:],  # with a policy
        AK[:-1] + bytes([AK[-1] ^ 1]),  # no point of the curve
        AK.replace(b"\x00\x18\x00\x0b\x00\x03", b"\x00\x18\x00\x0c\x00\x03"),  # SHA-384
        AK.replace(b"\x00\x18\x00\x0b\x00\x03", b"\x00\x18\x00\x0b\x00\x04"),  # P-384
        AK.replace(b"\x00\x18\x00\x0b\x00\x03", b"\x00\x10\x00\x0b\x00\x03"),  # of no scheme
        _rsa_ak(b"\x80" + bytes(255)),  # even
        _rsa_ak(b"\x7f" + b"\xff" * 255),
        _rsa_ak(b"\x80" + b"\xff" * 127, bits=1024),
        _rsa_ak(b"\xff" * 256, exponent=3),
        _rsa_ak(b"\xff" * 256, scheme=0x16),  # RSAPSS
    ],
)
def test_an_attestation_key_has_one_form_and_one_scheme(public: bytes) -> None:
    with pytest.raises(CheckFailedError) as refused:
        check_ak(public)
    assert (refused.value.code, refused.value.check) == (Code.TPM_KEY, "12")


def test_a_certificate_that_leads_to_the_root_ends_with_the_first_on_its_way() -> None:
    briefly = EkAuthority("a batch", ROOT, days=4000)
    for ek, days in ((ROOT.endorse(EK), 36500), (briefly.endorse(EK) + briefly.der, 4000)):
        end = datetime.fromtimestamp(check_endorsement(ek, policy=IMAGE, now_us=NOW_US) / 1_000_000, UTC)
        assert (end - datetime(2020, 1, 1, tzinfo=UTC)).days == days


def test_an_authority_between_may_be_the_one_that_the_policy_names() -> None:
    named = policy(0, 2, 4, 7, 8, 9, root=FACTORY.der)
    check_endorsement(FACTORY.endorse(EK), policy=named, now_us=NOW_US)
    with pytest.raises(CheckFailedError):
        check_endorsement(ROOT.endorse(EK), policy=named, now_us=NOW_US)


def test_a_key_is_known_again_whatever_form_its_certificate_has() -> None:
    """Who holds a certificate can write the second number of its ECDSA signature in another way."""
    certificate = FACTORY.endorse(EK)
    made = x509.load_der_x509_certificate(certificate)
    first, second = decode_dss_signature(made.signature)
    signature = encode_dss_signature(first, P256_ORDER - second)
    end = b"\x03" + bytes([len(signature) + 1, 0]) + signature
    body = certificate[4 : -len(made.signature) - 3] + end
    other = b"\x30\x82" + len(body).to_bytes(2, "big") + body
    check_endorsement(other + FACTORY.der, policy=IMAGE, now_us=NOW_US)
    assert endorsed_sha256(other + FACTORY.der) == endorsed_sha256(certificate) != endorsed_sha256(FACTORY.der)


def _extra() -> list[x509.ExtensionType]:
    return [x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), b"\x05\x00")]


_NAMESAKE = EkAuthority("the root")
_NO_AUTHORITY = EkAuthority("no authority", ROOT, is_authority=False)
_SIGNS_NONE = EkAuthority("an authority that signs lists alone", ROOT, signs_certificates=False)
_OVER = EkAuthority("whose time is over", ROOT, days=100)
_ODD = EkAuthority("an odd one", ROOT, more=_extra())
_DEEP = EkAuthority("too deep", FACTORY)
_OTHER_SIZE = rsa.generate_private_key(public_exponent=65537, key_size=3072).public_key()


@pytest.mark.parametrize(
    "ek",
    [
        lambda: b"",
        lambda: b"\x30\x82\x00",
        lambda: b"\x30\x82\x00\x04\x30\x82\x00\x00",
        lambda: ROOT.endorse(EK)[:-1],
        lambda: ROOT.endorse(EK) + b"\x00",
        lambda: ROOT.endorse(EK) + FACTORY.der,  # one that is on no way to the root
        lambda: FACTORY.endorse(EK),  # whose issuer is not there
        lambda: FACTORY.der + FACTORY.endorse(EK),
        lambda: _NAMESAKE.endorse(EK),  # of the root's name, and not its key
        lambda: ROOT.endorse(EK, use=None),  # of an authority that certifies other keys too
        lambda: ROOT.endorse(EK, use=x509.ExtendedKeyUsageOID.SERVER_AUTH),
        lambda: ROOT.endorse(EK, digital_signature=True),
        lambda: ROOT.endorse(EK, key_agreement=True, digital_signature=True),
        lambda: ROOT.endorse(EK, key_agreement=True, content_commitment=True),
        lambda: ROOT.endorse(EK, key_agreement=True, crl_sign=True),
        lambda: ROOT.endorse(EK, key_agreement=True, key_cert_sign=True),
        lambda: ROOT.endorse(EK, key_encipherment=True),  # a key on a curve agrees, and enciphers nothing
        lambda: ROOT.endorse(EK, more=(x509.BasicConstraints(ca=True, path_length=None),)),  # an authority's
        lambda: ROOT.endorse(EK, more=_extra()),
        lambda: ROOT.endorse(EK, days=100),
        lambda: ROOT.endorse(ec.generate_private_key(ec.SECP384R1()).public_key()),
        lambda: ROOT.endorse(_OTHER_SIZE),
        lambda: FACTORY.der,
        lambda: _NO_AUTHORITY.endorse(EK) + _NO_AUTHORITY.der,
        lambda: _SIGNS_NONE.endorse(EK) + _SIGNS_NONE.der,
        lambda: _OVER.endorse(EK) + _OVER.der,
        lambda: _ODD.endorse(EK) + _ODD.der,
        lambda: _DEEP.endorse(EK) + _DEEP.der + FACTORY.der,
        lambda: FACTORY.endorse(EK) + FACTORY.der * 4,
    ],
)
def test_a_certificate_that_is_one_thing_less_endorses_nothing(ek: Callable[[], bytes]) -> None:
    with pytest.raises(CheckFailedError) as refused:
        check_endorsement(ek(), policy=IMAGE, now_us=NOW_US)
    assert (refused.value.code, refused.value.check) == (Code.TPM_ENDORSEMENT, "12")
    check_endorsement(FACTORY.endorse(EK, use=EK_USE) + FACTORY.der, policy=IMAGE, now_us=NOW_US)  # as it should be


def test_no_more_than_four_certificates_are_read() -> None:
    with pytest.raises(CheckFailedError, match="not 1 to 4"):
        check_endorsement(FACTORY.endorse(EK) + FACTORY.der * 4, policy=IMAGE, now_us=NOW_US)


@pytest.mark.parametrize("name", sorted(LOGS))
def test_public_logs_come_to_the_values_that_others_recorded(name: str) -> None:
    path = SHARED / "google__go-tpm-tools" / "internal" / "test" / "eventlogs" / name
    if not path.is_file():
        pytest.skip("this machine does not have the shared logs (GLASSHOUSE_TEST_DATA)")
    values = BootLog.read(path.read_bytes()).replay()
    assert {str(register): value.hex() for register, value in values.items()} == LOGS[name]


def _log(*events: tuple[int, int, bytes, bytes], banks: bytes = b"\x01\x00\x00\x00\x0b\x00\x20\x00") -> bytes:
    """Write a log: of each event the register, the type, what it extends, and its data."""
    head = b"Spec ID Event03\x00" + bytes(4) + b"\x00\x02\x00\x02" + banks + b"\x00"
    log = struct.pack("<II20xI", 0, 3, len(head)) + head
    for register, kind, digest, data in events:
        log += struct.pack("<IIIH", register, kind, 1, 0x0B) + digest + len(data).to_bytes(4, "little") + data
    return log


def test_the_locality_that_a_tpm_started_from_is_in_its_first_register() -> None:
    locality = (0, 3, bytes(32), b"StartupLocality\x00\x03")
    event = (0, 8, sha256(b"firmware"), b"")
    replayed = BootLog.read(_log(locality, event)).replay()
    assert replayed == {0: sha256(bytes(31) + b"\x03" + sha256(b"firmware"))}


@pytest.mark.parametrize(
    "log",
    [
        b"",
        BOOT_LOG.read_bytes()[:-1],
        BOOT_LOG.read_bytes() + b"\x00",
        _log((24, 8, bytes(32), b"")),
        _log(banks=b"\x01\x00\x00\x00\x04\x00\x14\x00"),  # without the bank sha256
        _log(banks=b"\x01\x00\x00\x00\x0b\x00\x14\x00"),  # of a digest cut short
        _log(banks=b"\x02\x00\x00\x00\x0b\x00\x20\x00\x0b\x00\x20\x00"),
        _log(banks=b"\x01\x00\x00\x00\x0b\x00\x20\x00\x00"),
        _log(banks=b"\xff\xff\xff\xff\x0b\x00\x20\x00"),
        _log((0, 8, bytes(32), b""), banks=b"\x02\x00\x00\x00\x0b\x00\x20\x00\x04\x00\x14\x00"),  # in one of two
        _log().replace(b"Event03", b"Event02"),
        _log().replace(b"\x03\x00\x00\x00", b"\x08\x00\x00\x00", 1),  # an event that would be extended
        _log((0, 8, bytes(32), b"")).replace(b"\x01\x00\x00\x00\x0b\x00" + bytes(32), b"\x00\x00\x00\x00"),
        _log((0, 8, bytes(32) + b"\x0b\x00" + bytes(32), b"")).replace(  # two digests of one bank
            b"\x01\x00\x00\x00\x0b\x00" + bytes(32), b"\x02\x00\x00\x00\x0b\x00" + bytes(32)
        ),
        _log((0, 8, bytes(20), b"")).replace(b"\x0b\x00" + bytes(20), b"\x04\x00" + bytes(20)),  # of another bank
        _log((0, 8, bytes(32), b"")).replace(b"\x01\x00\x00\x00\x0b\x00" + bytes(32), b"\xff\xff\xff\xff"),
    ],
)
def test_a_log_that_is_not_read_to_its_last_byte_is_none(log: bytes) -> None:
    with pytest.raises(FormatError):
        BootLog.read(log)


@pytest.mark.parametrize(
    "path",
    [
        "google__go-tpm-tools/internal/test/eventlogs/debian-10.bin",  # of the older form, SHA-1 alone
        "google__go-tpm-tools/agent/testdata/cel.b64",  # of another form
        "keylime__keylime/test/data/create-mb-policy/binary_bios_measurements-bogus",
    ],
)
def test_public_logs_of_other_forms_are_refused(path: str) -> None:
    if not SHARED.is_dir():
        pytest.skip("this machine does not have the shared logs (GLASSHOUSE_TEST_DATA)")
    with pytest.raises(FormatError):
        BootLog.read((SHARED / path).read_bytes())
