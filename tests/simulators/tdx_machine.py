"""Machines of TDX whose root of trust only tests trust: quotes, certificates, and lists as Intel signs them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.wire.crypto import sha256

FMSPC = "00A1B2C30000"
EVALUATION = 20
PADDING = bytes(70)  # a quote fills a buffer of its own length
_SGX = "1.2.840.113741.1.13.1"
_SVNS = (3, 3, 2, 2, 4, 1, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0)
_QE_SIGNER = bytes.fromhex("dc9e2a7c6f948f17474e34a7fc43ed030f7c1563f1babddf6340c82e0e54a8c5")
_DAY = timedelta(days=1)


@dataclass(kw_only=True)
class Registers:
    """What a quote says of its machine; the defaults are a good one's."""

    tee_tcb_svn: bytes = bytes([5, 1, 3]).ljust(16, b"\x00")
    mrseam: bytes = b"\x5b" * 48
    mrsignerseam: bytes = bytes(48)
    seam_attributes: bytes = bytes(8)
    attributes: bytes = (1 << 28).to_bytes(8, "little")
    xfam: bytes = bytes.fromhex("e702060000000000")
    mrtd: bytes = b"\xd0" * 48
    mrconfigid: bytes = bytes(48)
    mrowner: bytes = bytes(48)
    mrownerconfig: bytes = bytes(48)
    rtmr0: bytes = b"\xe0" * 48
    rtmr1: bytes = b"\xe1" * 48
    rtmr2: bytes = b"\xe2" * 48
    rtmr3: bytes = bytes(48)
    service_td: bytes = bytes(48)  # of version 5

    def image(self) -> dict[str, Any]:
        """Return them as a policy's image."""
        return {
            "mrtd": self.mrtd.hex(),
            "rtmr0": [self.rtmr0.hex()],
            "rtmr1": self.rtmr1.hex(),
            "rtmr2": self.rtmr2.hex(),
        }


@dataclass(kw_only=True)
class TdxMachine:
    """A machine, and whoever certified it.

    Args:
        now: when its certificates and lists are good.
    """

    now: datetime
    registers: Registers = field(default_factory=Registers)
    # Of the platform, in Intel's lists.
    status: str = "UpToDate"
    advisories: Sequence[str] = ()
    enclave_status: str = "UpToDate"
    list_extensions: Sequence[x509.ExtensionType] = ()  # critical ones, of its lists of revoked certificates
    revoked: Sequence[
        int
    ] = ()  # of `chain`: 0 for the processor's certificate, 1 for its issuer's; 2 for the signer of lists

    def __post_init__(self) -> None:
        self._root, self._issuer, self.pck, self._signer, self.attestation = (
            ec.generate_private_key(ec.SECP256R1()) for _ in range(5)
        )
        names = ("Intel SGX Root CA", "Intel SGX PCK Platform CA", "Intel SGX PCK Certificate")
        self._certified = (
            (names[2], self.pck, names[1], self._issuer),
            (names[1], self._issuer, names[0], self._root),
            (names[0], self._root, names[0], self._root),
        )
        root = self._certificate(*self._certified[2], is_authority=True)
        self.chain = [root, root, root]
        self.certify(1, is_authority=True)
        self.certify(0, is_authority=False)
        self.signers = [self._certificate("Intel SGX TCB Signing", self._signer, "Intel SGX Root CA", self._root), root]

    @property
    def root_sha256(self) -> bytes:
        """The pin of its root."""
        return sha256(self.chain[-1].public_bytes(Encoding.DER))

    def certify(self, place: int, *, is_authority: bool) -> None:
        """Make a certificate of its `chain` anew."""
        extension = b"" if place else _platform()
        self.chain[place] = self._certificate(*self._certified[place], is_authority=is_authority, extension=extension)

    def quote(self, report_data: bytes, *, version: int = 4, **changed: Any) -> bytes:
        """Return a quote without padding.

        Args:
            changed: the keys `pck` and `attestation`, or the bytes `authentication`, in the place of the machine's own.
        """
        shown = self.registers
        header = struct.pack("<HHI4x16s20x", version, 2, 0x81, bytes.fromhex("939a7233f79c4ca9940a0db3957f0607"))
        report = b"".join(value for name, value in vars(shown).items() if name != "service_td") + report_data
        assert len(report) == 584
        if version == 5:
            report = struct.pack("<HI", 3, 648) + report + shown.tee_tcb_svn + shown.service_td
        attestation = changed.get("attestation", self.attestation)
        key = self.attestation.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)[1:]
        authentication = changed.get("authentication", bytes(range(32)))
        enclave = struct.pack("<16sI28x16s32s32s32s96xHH60x", bytes(16), 0, b"\x15".ljust(16, b"\0"), b"\xe5" * 32,
                              bytes(32), _QE_SIGNER, 2, 6) + sha256(key + bytes(range(32))) + bytes(32)  # fmt: skip
        certificates = b"".join(one.public_bytes(Encoding.PEM) for one in self.chain) + b"\x00"
        inner = enclave + _signed(changed.get("pck", self.pck), enclave)
        inner += struct.pack("<H", 32) + authentication + struct.pack("<HI", 5, len(certificates)) + certificates
        behind = _signed(attestation, header + report) + key + struct.pack("<HI", 6, len(inner)) + inner
        return header + report + struct.pack("<I", len(behind)) + behind

    def pack(self, **changed: bytes) -> Pack:
        """Return the collateral of this machine's family.

        Args:
            changed: items in the place of those that are made here, by name.
        """
        tcb = {"sgxtcbcomponents": [{"svn": svn} for svn in _SVNS], "pcesvn": 11}
        tcb["tdxtcbcomponents"] = [{"svn": svn} for svn in (5, 0, 2, *[0] * 13)]
        level = {"tcb": tcb, "tcbDate": "2024-03-13T00:00:00Z", "tcbStatus": self.status}
        module = {"mrsigner": "00" * 48, "attributes": "00" * 8, "attributesMask": "FF" * 8}
        dates = {"issueDate": _date(self.now - _DAY), "nextUpdate": _date(self.now + 29 * _DAY)}
        info = {
            "id": "TDX",
            "version": 3,
            **dates,
            "fmspc": FMSPC,
            "pceId": "0000",
            "tcbType": 0,
            "tcbEvaluationDataNumber": EVALUATION,
            "tdxModule": module,
            "tdxModuleIdentities": [{"id": "TDX_01", **module, "tcbLevels": [_level(4)]}],
            "tcbLevels": [level | ({"advisoryIDs": list(self.advisories)} if self.advisories else {})],
        }
        enclave = {
            "id": "TD_QE",
            "version": 2,
            **dates,
            "tcbEvaluationDataNumber": EVALUATION,
            "miscselect": "00000000",
            "miscselectMask": "FFFFFFFF",
            "attributes": "11".ljust(32, "0"),
            "attributesMask": "FBFFFFFFFFFFFFFF".ljust(32, "0"),
            "mrsigner": _QE_SIGNER.hex().upper(),
            "isvprodid": 2,
            "tcbLevels": [_level(4, self.enclave_status)],
        }
        signers = b"".join(one.public_bytes(Encoding.PEM) for one in self.signers)
        items = {
            "intel/pck-crl/platform": self._list("Intel SGX PCK Platform CA", self._issuer, {0: self.chain[0]}),
            "intel/pck-crl/processor": self._list("Intel SGX PCK Processor CA", self._issuer, {}),
            "intel/qe-identity": self.signed_list("enclaveIdentity", enclave),
            "intel/qe-identity/chain": signers,
            "intel/root-crl": self._list("Intel SGX Root CA", self._root, {1: self.chain[1], 2: self.signers[0]}),
            f"intel/tcb/{FMSPC}": self.signed_list("tcbInfo", info),
            f"intel/tcb/{FMSPC}/chain": signers,
        }
        return Pack(items=tuple(Item(name=name, data=data) for name, data in sorted({**items, **changed}.items())))

    def signed_list(self, member: str, value: dict[str, Any]) -> bytes:
        """Return a list as Intel's service answers it."""
        text = json.dumps(value, separators=(",", ":")).encode()
        return b'{"%s":%s,"signature":"%s"}' % (member.encode(), text, _signed(self._signer, text).hex().encode())

    def _certificate(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: str,
        by: ec.EllipticCurvePrivateKey,
        *,
        is_authority: bool = False,
        extension: bytes = b"",
    ) -> x509.Certificate:
        start, end = self.now - 400 * _DAY, self.now + 3000 * _DAY
        builder = x509.CertificateBuilder(_name(issuer), _name(name), key.public_key(), len(name) + 7, start, end)
        constraints = x509.BasicConstraints(ca=is_authority, path_length=None)
        builder = builder.add_extension(constraints, critical=True).add_extension(_uses(is_authority), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        builder = builder.add_extension(_issued_by(by), critical=False)
        if extension:
            unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier(_SGX), extension)
            builder = builder.add_extension(unknown, critical=False)
        return builder.sign(by, SHA256())

    def _list(self, issuer: str, key: ec.EllipticCurvePrivateKey, places: dict[int, x509.Certificate]) -> bytes:
        start, end = self.now - _DAY, self.now + 29 * _DAY
        builder = x509.CertificateRevocationListBuilder(_name(issuer), start, end)
        builder = builder.add_extension(_issued_by(key), critical=False)
        builder = builder.add_extension(x509.CRLNumber(1), critical=False)
        for one in self.list_extensions:
            builder = builder.add_extension(one, critical=True)
        for one in (places[place] for place in self.revoked if place in places):
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder(one.serial_number, self.now - 2 * _DAY).build()
            )
        return builder.sign(key, SHA256()).public_bytes(Encoding.DER)


def _name(text: str) -> x509.Name:
    organization = x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "Tests of Glasshouse")
    return x509.Name([organization, x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _uses(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(not is_authority, False, False, False, False, is_authority, is_authority, False, False)


def _issued_by(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _signed(key: ec.EllipticCurvePrivateKey, message: bytes) -> bytes:
    r, s = decode_dss_signature(key.sign(message, ec.ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _date(when: datetime) -> str:
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _level(svn: int, status: str = "UpToDate") -> dict[str, Any]:
    return {"tcb": {"isvsvn": svn}, "tcbDate": "2024-03-13T00:00:00Z", "tcbStatus": status}


def _platform() -> bytes:
    """Return the extension of a PCK certificate: which platform, and its versions."""
    components = [(f"2.{at}", _der(2, bytes([svn]))) for at, svn in enumerate(_SVNS, 1)]
    components += [("2.17", _der(2, bytes([11]))), ("2.18", _der(4, bytes(_SVNS)))]
    members = [
        ("1", _der(4, b"\x77" * 16)),
        ("2", _der(0x30, b"".join(_member(*one) for one in components))),
        ("3", _der(4, bytes(2))),
        ("4", _der(4, bytes.fromhex(FMSPC))),
        ("5", _der(10, b"\x01")),
    ]
    return _der(0x30, b"".join(_member(*one) for one in members))


def _member(name: str, value: bytes) -> bytes:
    below = bytes(map(int, name.split(".")))
    return _der(0x30, _der(6, bytes.fromhex("2a864886f84d010d01") + below) + value)


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    length = bytes([size]) if size < 128 else b"\x81%c" % size if size < 256 else b"\x82" + size.to_bytes(2, "big")
    return bytes([tag]) + length + content
