"""Machines with NVIDIA's GPUs and switches whose roots only tests trust: reports, certificates, manifests, OCSP."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import ocsp
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from lxml import etree

from glasshouse.attestation.claims import Gpu
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.nvidia import nvidia_evidence
from glasshouse.attestation.roots.nvidia.nvidia_blob import GpuMode, NvidiaBlob
from glasshouse.attestation.roots.nvidia.nvidia_certificates import ocsp_name
from glasshouse.attestation.roots.nvidia.nvidia_policy import NvidiaPolicy
from glasshouse.errors import Code
from glasshouse.wire.crypto import sha256

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
DRIVER, VBIOS, SWITCH_BIOS = "570.124.06", "96.00.CF.00.02", "96.10.6D.00.01"
DRIVER_MANIFEST = f"NV_GPU_DRIVER_GH100_{DRIVER}"
VBIOS_MANIFEST = "NV_GPU_VBIOS_G520_0280_895_9600CF0002"
SWITCH_MANIFEST = "NV_SWITCH_BIOS_5612_0002_890_96106D0001"
# Which measurements a manifest has, as NVIDIA's of Hopper have them.
ACTIVE = {
    DRIVER_MANIFEST: (7, *range(21, 41)),
    VBIOS_MANIFEST: (*range(7), *range(8, 13)),
    SWITCH_MANIFEST: (*range(7), 8, 10, 11, 14, *range(18, 27)),
}
VERSIONS = {DRIVER_MANIFEST: DRIVER, VBIOS_MANIFEST: VBIOS, SWITCH_MANIFEST: SWITCH_BIOS}
CRITICAL = x509.ObjectIdentifier("1.3.6.1.4.1.99999.1")
_DAY = timedelta(days=1)
_FOREVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_FWID_DER = bytes.fromhex("303d06096086480165030402020430")
_TCB_BYTES = 330  # before it, so that a certificate is as long as a real one
_SWID = "http://standards.iso.org/iso/19770/-2/2015/schema.xsd"
_DS = "http://www.w3.org/2000/09/xmldsig#"


@dataclass(kw_only=True)
class Authority:
    """A certificate, and the key that it is of."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP384R1()))
    certificate: x509.Certificate = field(init=False)
    responder: Authority | None = None  # answers for it, once made

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)


def named(common: str, serial: str = "") -> x509.Name:
    """Return a name as NVIDIA gives them."""
    parts = [(NameOID.COMMON_NAME, common), (NameOID.ORGANIZATION_NAME, "NVIDIA Corporation")]
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in (*parts, (NameOID.SERIAL_NUMBER, serial)) if text])


def certified(
    name: x509.Name,
    by: Authority | None,
    *,
    is_authority: bool = True,
    extensions: Sequence[x509.ExtensionType] = (),
    until: datetime = _FOREVER,
    curve: ec.EllipticCurve | None = None,
    algorithm: SHA256 | SHA384 | None = None,
) -> Authority:
    """Make a key and its certificate, by another or by itself."""
    made = Authority(name=name, key=ec.generate_private_key(curve or ec.SECP384R1()))
    issuer = by or made
    flags = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    builder = (
        x509.CertificateBuilder(subject_name=name, issuer_name=issuer.name, public_key=made.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2022, 1, 1, tzinfo=UTC))
        .not_valid_after(until)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority, **flags
            ),
            critical=True,
        )
    )
    if is_authority:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    for each in extensions:
        is_critical = isinstance(each, x509.ExtendedKeyUsage) or each.oid == CRITICAL
        builder = builder.add_extension(each, critical=is_critical)
    made.certificate = builder.sign(issuer.key, algorithm or SHA384())
    return made


@dataclass(kw_only=True)
class SimulatedDevice:
    """A GPU or switch: its chain, from its report's key on, and what is burnt into it."""

    chain: list[Authority]
    fwid: bytes
    pdi: bytes
    is_switch: bool

    @property
    def ders(self) -> list[bytes]:
        return [each.der for each in self.chain]

    def report(
        self,
        nonce: bytes,
        connected: Sequence[bytes],
        *,
        opaque: Mapping[int, bytes | None],
        blocks: Mapping[int, bytes],
    ) -> bytes:
        """Sign a report.

        Args:
            connected: numbers of what it is connected with.
            opaque, blocks: what stands there instead; None for nothing at all.
        """
        fields = _switch_fields(self.pdi, connected) if self.is_switch else _gpu_fields(self.fwid, connected)
        chosen = {name: value for name, value in {**fields, **opaque}.items() if value is not None}
        packed = b"".join(struct.pack("<HH", name, len(value)) + value for name, value in chosen.items())
        count = 31 if self.is_switch else 64
        right = (
            {**measured(SWITCH_MANIFEST)}
            if self.is_switch
            else {**measured(DRIVER_MANIFEST), **measured(VBIOS_MANIFEST)}
        )
        record = b"".join(
            struct.pack("<BBHBH", index + 1, 1, 51, 1, 48) + {**right, **blocks}.get(index, bytes(48))
            for index in range(count)
        )
        message = bytes.fromhex("11e001ff") + nonce + b"\0" + bytes.fromhex("11600000") + bytes([count])
        message += len(record).to_bytes(3, "little") + record + hashlib.sha256(nonce + self.pdi).digest()
        message += struct.pack("<H", len(packed)) + packed
        numbers = decode_dss_signature(self.chain[0].key.sign(message, ec.ECDSA(SHA384())))
        return message + b"".join(number.to_bytes(48, "big") for number in numbers)


def measured(manifest: str) -> dict[int, bytes]:
    """Return the measurements that a manifest has."""
    return {index: hashlib.sha384(f"{manifest} {index}".encode()).digest() for index in ACTIVE[manifest]}


def _gpu_fields(fwid: bytes, switches: Sequence[bytes]) -> dict[int, bytes]:
    links = [bytes(reversed(switches[link % len(switches)])) for link in range(18)] if switches else []
    return {
        6: bytes.fromhex("00cf009602000000"),
        15: b"895".ljust(9, b"\0"),
        17: b"G520\0",
        18: b"0280\0",
        3: DRIVER.encode() + b"\0",
        12: bytes(256),
        20: fwid,
        21: b"\xaa" if switches else b"\x55",
        **({22: b"".join(links)} if links else {}),
        34: b"\1\0",
        36: b"\2\0" if switches else b"\0\0",
    }


def _switch_fields(pdi: bytes, gpus: Sequence[bytes]) -> dict[int, bytes]:
    ports = b"".join(gpus).ljust(64, b"\0")[:64] + b"\xff" * 64
    return {6: SWITCH_BIOS.encode(), 22: pdi, 26: ports, 24: b"\0\0", 25: b"\1\0"}


class NvidiaMachine:
    """A machine of GPUs, and of switches between them, with who certified them and who vouches for their firmware."""

    def __init__(self, *, gpus: int = 1, switches: int = 0) -> None:
        self.device_root = certified(named("Test Device Identity CA"), None)
        self.manifest_root = certified(named("Test CoRIM signing Root CA"), None)
        self.family = certified(named("Test GH100 Identity"), self.device_root)
        self.provisioner = certified(named("Test GH100 Provisioner ICA 1"), self.family)
        self.signer_family = certified(named("Test Reference Value GH100 CA"), self.manifest_root)
        self.signer_issuer = certified(named("Test Reference Value L3 GH100 002"), self.signer_family)
        self.signer = self.made_signer()
        self.gpus = [self.made_device(f"gpu {number}") for number in range(gpus)]
        self.switches = [self.made_device(f"switch {number}", is_switch=True) for number in range(switches)]
        self.manifests = {
            name: signed_manifest(name, self.signing_chain) for name in ACTIVE if switches or "SWITCH" not in name
        }
        self.revoked: dict[bytes, x509.ReasonFlags] = {}

    @property
    def signing_chain(self) -> list[Authority]:
        return [self.signer, self.signer_issuer, self.signer_family, self.manifest_root]

    def made_signer(self, **terms: Any) -> Authority:
        """Make who signs manifests."""
        return certified(named("HCC RIM L4 Signer"), self.signer_issuer, is_authority=False, **terms)

    def made_device(self, seed: str, *, is_switch: bool = False, chip: str = "GH100") -> SimulatedDevice:
        """Make a device of this maker's; a switch has its own chip."""
        pdi, fwid = hashlib.sha256(seed.encode()).digest()[:8], hashlib.sha384(seed.encode()).digest()
        chip, serial = ("LS_10", "50") if is_switch else (chip, "41")
        device = certified(named(f"{chip} A01 GSP BROM", serial + pdi.hex().upper()), self.provisioner)
        tcb = x509.UnrecognizedExtension(x509.ObjectIdentifier("2.23.133.5.4.1"), bytes(_TCB_BYTES) + _FWID_DER + fwid)
        key = certified(named(f"{chip} A01 GSP FMC LF"), device, is_authority=False, extensions=[tcb])
        chain = [key, device, self.provisioner, self.family, self.device_root]
        return SimulatedDevice(chain=chain, fwid=fwid, pdi=pdi, is_switch=is_switch)

    @property
    def roots(self) -> dict[str, bytes]:
        """The pins of its roots."""
        return {
            "device_root_sha256": sha256(self.device_root.der),
            "manifest_root_sha256": sha256(self.manifest_root.der),
        }

    @property
    def mode(self) -> GpuMode:
        return GpuMode.PPCIE if self.switches else GpuMode.SPT

    def policy(self, **terms: Any) -> HardwarePolicy:
        """Return a policy that takes this machine, with some terms instead."""
        named_terms = {
            "device_ocsp": True,
            "gpus": len(self.gpus),
            "manifests": tuple(sorted(self.manifests)),
            "switches": len(self.switches),
        }
        return HardwarePolicy(nvidia=NvidiaPolicy(**{**named_terms, **terms}))

    def bound(self, composite: bytes = bytes(32), **terms: Any) -> Bound:
        """Return what its evidence has to be bound to."""
        gpu = Gpu(name="NVIDIA H100", memory_bytes=1, driver=DRIVER, uuid="GPU-1")
        return replace(Bound(composite=composite, gpus=(gpu,) * len(self.gpus)), **terms)

    def report(
        self,
        device: SimulatedDevice,
        nonce: bytes | None = None,
        *,
        connected: Sequence[bytes] | None = None,
        opaque: Mapping[int, bytes | None] | None = None,
        blocks: Mapping[int, bytes] | None = None,
    ) -> tuple[bytes, list[bytes]]:
        """Return a report of one device, and its certificates, with some of it as it should not be."""
        if connected is None:
            connected = [each.pdi for each in (self.gpus if device.is_switch else self.switches)]
        nonce = self.bound().gpu_nonce if nonce is None else nonce
        return device.report(nonce, connected, opaque=opaque or {}, blocks=blocks or {}), device.ders

    def blob(
        self,
        *,
        gpus: Iterable[tuple[bytes, list[bytes]]] | None = None,
        switches: Iterable[tuple[bytes, list[bytes]]] | None = None,
        mode: GpuMode | None = None,
        devtools: bool = False,
        nonce: bytes | None = None,
    ) -> bytes:
        """Return the blob, with some of it as it should not be."""
        return NvidiaBlob.of(
            devtools=devtools,
            mode=mode or self.mode,
            gpus=[self.report(each, nonce) for each in self.gpus] if gpus is None else gpus,
            switches=[self.report(each, nonce) for each in self.switches] if switches is None else switches,
        ).encode()

    def pack(self, *, without: str = "", instead: Mapping[str, bytes] | None = None) -> Pack:
        """Return the collateral by which it is appraised, with some of it as it should not be."""
        items = {f"nvidia/rim/{name}": data for name, data in self.manifests.items()}
        chains = [device.chain[1:] for device in (*self.gpus, *self.switches)]
        for chain in (*chains, self.signing_chain):
            for certificate, issuer in pairwise(chain):
                name = ocsp_name(certificate.der)
                if name not in items:
                    items[name] = self.answer(certificate, issuer)
        items |= instead or {}
        return Pack(items=tuple(Item(name=name, data=items[name]) for name in sorted(items) if name != without))

    def answer(
        self,
        about: Authority,
        issuer: Authority,
        *,
        responder: Authority | None = None,
        at: datetime = NOW - timedelta(hours=1),
        until: datetime | None = NOW + _DAY,
        beside: Sequence[Authority] = (),
    ) -> bytes:
        """Return what OCSP says of a certificate."""
        if responder is None and issuer.responder is None:
            uses = [x509.ExtendedKeyUsage([ExtendedKeyUsageOID.OCSP_SIGNING])]
            issuer.responder = certified(named("Test OCSP Responder"), issuer, is_authority=False, extensions=uses)
        responder = responder or issuer.responder
        assert responder is not None
        reason = self.revoked.get(about.der)
        return (
            ocsp.OCSPResponseBuilder()
            .add_response(
                cert=about.certificate,
                issuer=issuer.certificate,
                algorithm=SHA384(),
                cert_status=ocsp.OCSPCertStatus.REVOKED if reason else ocsp.OCSPCertStatus.GOOD,
                this_update=at,
                next_update=until,
                revocation_time=at if reason else None,
                revocation_reason=reason,
            )
            .responder_id(ocsp.OCSPResponderEncoding.HASH, responder.certificate)
            .certificates([each.certificate for each in (responder, *beside)])
            .sign(responder.key, SHA384())
            .public_bytes(Encoding.DER)
        )

    def appraise(
        self,
        blob: bytes | None = None,
        *,
        now: datetime = NOW,
        bound: Bound | None = None,
        pack: Pack | None = None,
        policy: HardwarePolicy | None = None,
    ) -> Appraised:
        """Appraise evidence of this machine, by its roots."""
        judging = nvidia_evidence.Judging(
            now_us=int(now.timestamp()) * 1_000_000,
            collateral=pack or self.pack(),
            policy=policy or self.policy(),
            **self.roots,
        )
        return nvidia_evidence.appraise_by(self.blob() if blob is None else blob, bound or self.bound(), judging)


def refused(machine: NvidiaMachine, code: Code, blob: bytes | None = None, **terms: Any) -> CheckFailedError:
    """Appraise, and see that it is refused by this code."""
    with pytest.raises(CheckFailedError) as error:
        machine.appraise(blob, **terms)
    assert (error.value.check, error.value.code) == ("12", code), error.value
    return error.value


def signed_manifest(
    name: str,
    chain: Sequence[Authority],
    *,
    version: str = "",
    about: tuple[str, str] | None = None,
    before: tuple[str, str] = ("", ""),
    method: tuple[str, str] = ("", ""),
    values: Mapping[int, Sequence[bytes]] | None = None,
    edit: tuple[bytes, bytes] = (b"", b""),
) -> bytes:
    """Return a manifest, signed as NVIDIA signs its own.

    Args:
        about: of which edition and chip it says that it is.
        before: text of it, and what stands there when it is signed.
        method: text of how it is signed, and what stands there, which is signed too.
        edit: bytes of it, and what stands there when it has been signed.
    """
    edition, chip = about or (("SWITCH", "LS10") if name == SWITCH_MANIFEST else ("GPU", "GH100"))
    right = values or {index: [value] for index, value in measured(name).items()}
    lines = []
    for index in range(64):
        here = right.get(index, [bytes(48)])
        hashes = " ".join(f'ns2:Hash{number}="{value.hex()}"' for number, value in enumerate(here))
        lines.append(
            f'<ns0:Resource type="Measurement" index="{index}" active="{index in right}" '
            f'alternatives="{len(here)}" {hashes} name="Measurement_{index}" size="48"/>'
        )
    document = (
        f'<SoftwareIdentity xmlns="{_SWID}" xmlns:ns0="{_SWID}" xmlns:ns2="http://www.w3.org/2001/04/xmlenc#sha384" '
        f'name="{chip}" tagId="{name}">\n    <ns0:Meta colloquialVersion="{version or VERSIONS[name]}" '
        f'edition="{edition}" product="{chip}"/>\n'
        f"    <ns0:Payload>\n        {chr(10).join(lines)}\n    </ns0:Payload>\n</SoftwareIdentity>"
    ).replace(*before)
    digest = hashlib.sha384(etree.tostring(etree.fromstring(document), method="c14n")).digest()
    c14n = 'Algorithm="http://www.w3.org/2006/12/xml-c14n11"'
    info = (
        f"<ds:SignedInfo><ds:CanonicalizationMethod {c14n}/>"
        '<ds:SignatureMethod Algorithm="http://www.w3.org/2001/04/xmldsig-more#ecdsa-sha384"/>'
        '<ds:Reference URI=""><ds:Transforms>'
        f'<ds:Transform Algorithm="{_DS}enveloped-signature"/><ds:Transform {c14n}/></ds:Transforms>'
        '<ds:DigestMethod Algorithm="http://www.w3.org/2001/04/xmldsig-more#sha384"/>'
        f"<ds:DigestValue>{base64.b64encode(digest).decode()}</ds:DigestValue></ds:Reference></ds:SignedInfo>"
    ).replace(*method)
    scope = f' xmlns="{_SWID}" xmlns:ds="{_DS}" xmlns:ns0="{_SWID}" xmlns:ns2="http://www.w3.org/2001/04/xmlenc#sha384"'
    signed = etree.tostring(
        etree.fromstring(info.replace("<ds:SignedInfo", f"<ds:SignedInfo{scope}", 1)), method="c14n"
    )
    numbers = decode_dss_signature(chain[0].key.sign(signed, ec.ECDSA(SHA384())))
    value = base64.b64encode(b"".join(number.to_bytes(48, "big") for number in numbers)).decode()
    keys = "".join(
        f"<ds:X509Certificate>{base64.encodebytes(each.der).decode()}</ds:X509Certificate>" for each in chain
    )
    signature = (
        f'<ds:Signature xmlns:ds="{_DS}">{info}<ds:SignatureValue>{value}</ds:SignatureValue>'
        f"<ds:KeyInfo><ds:X509Data>{keys}</ds:X509Data></ds:KeyInfo></ds:Signature></SoftwareIdentity>"
    )
    return document.replace("</SoftwareIdentity>", signature).encode().replace(*edit)


def accepted_forms(machine: NvidiaMachine, pack: Pack, step: int) -> list[tuple[str, int]]:
    """Return at which bytes, of every so manieth, its evidence may be changed or cut and is still accepted."""
    blob, bound, policy = machine.blob(), machine.bound(), machine.policy()
    assert machine.appraise(blob, pack=pack, bound=bound, policy=policy)

    def forms() -> Iterator[tuple[str, int, bytes]]:  # together they would be gigabytes
        yield "longer", len(blob), blob + b"\0"
        for at in range(0, len(blob), step):
            yield "flipped", at, blob[:at] + bytes([blob[at] ^ (1 << at % 8)]) + blob[at + 1 :]
            yield "cut", at, blob[:at]

    found = []
    for what, at, form in forms():
        with contextlib.suppress(CheckFailedError):
            machine.appraise(form, pack=pack, bound=bound, policy=policy)
            found.append((what, at))
    return found
