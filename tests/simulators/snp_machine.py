"""Machines of SEV-SNP whose keys only tests trust: reports, certificates, AMD's list, the kernel's report folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.sev_snp.amd_keys import Authority, Product
from glasshouse.attestation.roots.sev_snp.sev_snp_policy import SevSnpPolicy

MEASUREMENT = b"\x5e" * 48
CHIP = bytes(range(1, 65))
CLOUD = "CN=cc-tests"
_VCEK = "63da758de6644564adc5f4b93be8accd"
_ROLES = ("ark", "ask", "asvk")
_PSS = padding.PSS(padding.MGF1(SHA384()), salt_length=48)
_PARTS = {"bootloader": (3, 1), "tee": (3, 2), "snp": (3, 3), "microcode": (3, 8), "fmc": (3, 9)}
_PLACES = {
    "Turin": {"fmc": 0, "bootloader": 1, "tee": 2, "snp": 3, "microcode": 7},
    "Genoa": {"bootloader": 0, "tee": 1, "snp": 6, "microcode": 7},
}
_MODELS = {"Milan": (0x19, 0x01), "Genoa": (0x19, 0x11), "Turin": (0x1A, 0x02)}
_FIELDS = {
    "version": (0x00, 4),
    "guest_svn": (0x04, 4),
    "guest_policy": (0x08, 8),
    "vmpl": (0x30, 4),
    "algorithm": (0x34, 4),
    "current": (0x38, 8),
    "platform": (0x40, 8),
    "signer": (0x48, 4),
    "measurement": (0x90, 48),
    "host_data": (0xC0, 32),
    "id_key": (0xE0, 48),
    "author_key": (0x110, 48),
    "reported": (0x180, 8),
    "family": (0x188, 1),
    "model": (0x189, 1),
    "chip": (0x1A0, 64),
    "committed": (0x1E0, 8),
    "committed_version": (0x1EC, 3),  # build, minor, major
    "launch": (0x1F0, 8),
    "launch_mitigations": (0x1F8, 8),
    "current_mitigations": (0x200, 8),
}


@cache
def _authority_key(role: str) -> rsa.RSAPrivateKey:
    """One for all machines of a process: they take long to make."""
    del role
    return rsa.generate_private_key(65537, 2048)


@dataclass(kw_only=True)
class SnpMachine:
    """A machine, and those who certified its chip.

    Args:
        now: when its certificates and the list are good.
        firmware: security version of each part.
        revoked: serial numbers on the list.
    """

    now: datetime
    product: str = "Genoa"
    firmware: dict[str, int] = field(default_factory=lambda: {"bootloader": 10, "tee": 0, "snp": 23, "microcode": 84})
    chip: bytes = CHIP
    revoked: Sequence[int] = ()
    is_vlek: bool = False
    certified: dict[str, Any] = field(default_factory=dict)  # of the certificate, where it is not as the machine is

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.certificate = self._certificate()

    @property
    def roots(self) -> tuple[Product, ...]:
        """The keys that a test's gate pins for this machine."""
        ends_s = int((self.now + timedelta(days=3000)).timestamp())
        named = zip(_ROLES, (f"ARK-{self.product}", f"SEV-{self.product}", f"SEV-VLEK-{self.product}"), strict=True)
        authorities = {
            role: Authority(
                name=name, serial=at, ends_s=ends_s, modulus=_authority_key(role).public_key().public_numbers().n
            )
            for at, (role, name) in enumerate(named, 0x20000)
        }
        return (Product(name=self.product, **authorities),)

    def policy(self, **members: Any) -> SevSnpPolicy:
        """Return a policy that takes this machine as it is."""
        floor = {**self.firmware}
        value = {"chain": "launch", "measurements": [MEASUREMENT.hex()], "tcb": {self.product: floor}, **members}
        return SevSnpPolicy.from_json({name: one for name, one in value.items() if one is not None})

    def pack(self, *extensions: x509.ExtensionType) -> Pack:
        """Return AMD's list of this product, with critical extensions."""
        builder = x509.CertificateRevocationListBuilder(
            _name(f"ARK-{self.product}"), self.now - timedelta(days=100), self.now + timedelta(days=265)
        )
        for serial in self.revoked:
            revoked = x509.RevokedCertificateBuilder(serial, self.now - timedelta(days=101))
            builder = builder.add_revoked_certificate(revoked.build())
        for each in extensions:
            builder = builder.add_extension(each, critical=True)
        made = builder.sign(_authority_key("ark"), SHA384(), rsa_padding=_PSS)
        return Pack(items=(Item(name=f"amd/crl/{self.product}", data=made.public_bytes(Encoding.DER)),))

    def report(self, report_data: bytes, **changed: Any) -> bytes:
        """Return a report about this machine.

        Args:
            changed: fields in the place of its own (`_FIELDS`), numbers or bytes.
        """
        tcb = self.tcb(**self.firmware)
        family, model = _MODELS[self.product]
        shown: dict[str, Any] = {
            "version": 5,
            "guest_policy": 1 << 17 | 1 << 8 | 55,
            "algorithm": 1,
            "platform": 1 << 5,
            "signer": 4 if self.is_vlek else 0,
            "measurement": MEASUREMENT,
            "family": family,
            "model": model,
            "chip": bytes(64) if self.is_vlek else self.chip.ljust(64, b"\0"),
            "committed_version": bytes((40, 55, 1)),
            "current": tcb,
            "reported": tcb,
            "committed": tcb,
            "launch": tcb,
            **changed,
        }
        data = bytearray(0x2A0)
        data[0x50:0x90] = report_data
        for name, value in shown.items():
            at, length = _FIELDS[name]
            data[at : at + length] = value.to_bytes(length, "little") if isinstance(value, int) else value
        assert len(data) == 0x2A0
        r, s = decode_dss_signature(self.key.sign(bytes(data), ec.ECDSA(SHA384())))
        return bytes(data) + (r.to_bytes(72, "little") + s.to_bytes(72, "little")).ljust(512, b"\0")

    def tcb(self, **firmware: int) -> bytes:
        """Return security versions as a report has them."""
        raw = bytearray(8)
        for part, at in _PLACES["Turin" if self.product == "Turin" else "Genoa"].items():
            raw[at] = firmware.get(part, 0)
        return bytes(raw)

    def table(self) -> bytes:
        """Return the certificate as the host's table has it, behind another."""
        other = b"\x30\x82another"
        at = 3 * 24
        rows = [(bytes(range(16)), other), (bytes.fromhex(_VCEK), self.certificate)]
        table = b""
        for guid, data in rows:
            table += guid + at.to_bytes(4, "little") + len(data).to_bytes(4, "little")
            at += len(data)
        return table.ljust(3 * 24, b"\0") + b"".join(data for _, data in rows)

    def _certificate(self) -> bytes:
        kind, role, issuer = ("VLEK", "asvk", "SEV-VLEK-") if self.is_vlek else ("VCEK", "ask", "SEV-")
        shown: dict[str, Any] = {
            "subject": f"SEV-{kind}",
            "issuer": f"{issuer}{self.product}",
            "role": role,
            "starts": self.now - timedelta(days=1),
            "ends": self.now + timedelta(days=365),
            "product": self.product if self.product == "Turin" else f"{self.product}-B1",
            "key": self.key,
            "structure": int(self.product == "Turin"),
            "chip": b"" if self.is_vlek else self.chip,
            "cloud": CLOUD if self.is_vlek else "",
            "firmware": self.firmware,
            "padding": _PSS,
            **self.certified,
        }
        builder = x509.CertificateBuilder(
            _name(shown["issuer"]),
            _name(shown["subject"]),
            shown["key"].public_key(),
            1,
            shown["starts"],
            shown["ends"],
        )
        extensions: list[tuple[tuple[int, ...], bytes]] = [
            ((1,), _number(shown["structure"])),
            ((2,), shown["product"] if isinstance(shown["product"], bytes) else _text(shown["product"])),
            *[(_PARTS[part], _number(version)) for part, version in shown["firmware"].items()],
        ]
        extensions += [((4,), shown["chip"])] if shown["chip"] else []
        extensions += [((5,), _text(shown["cloud"]))] if shown["cloud"] else []
        extensions += shown.get("more", [])
        for oid, value in extensions:
            name = x509.ObjectIdentifier(".".join(map(str, (1, 3, 6, 1, 4, 1, 3704, 1, *oid))))
            builder = builder.add_extension(x509.UnrecognizedExtension(name, value), critical=False)
        for each in shown.get("foreign", []):
            builder = builder.add_extension(each, critical=False)
        signer = _authority_key(shown["role"])
        return builder.sign(signer, SHA384(), rsa_padding=shown["padding"]).public_bytes(Encoding.DER)


@contextmanager
def report_folder(machine: SnpMachine, folder: Path, entry: str, *, table: bytes | None = None) -> Iterator[None]:
    """Keep an entry of the kernel's report folder as long as the block lasts: a report for what is written there.

    Args:
        table: what the host gives beside it; by default the machine's certificate.
    """
    place = folder / entry
    place.mkdir(parents=True)
    (place / "provider").write_text("sev_guest\n")
    (place / "privlevel_floor").write_text("0\n")
    (place / "privlevel").touch()
    (place / "generation").write_text("0\n")
    (place / "inblob").touch()
    (place / "auxblob").write_bytes(machine.table() if table is None else table)
    os.mkfifo(place / "outblob")
    is_over = threading.Event()

    def answer() -> None:
        written = 0
        while True:
            with (place / "outblob").open("wb", buffering=0) as file:  # waits for who reads
                if is_over.is_set():
                    return
                os.mkfifo(place / "next")  # who reads this one to its end does not hold up another, nor read from it
                (place / "next").replace(place / "outblob")
                written += 1
                (place / "generation").write_text(f"{written}\n")
                file.write(machine.report((place / "inblob").read_bytes()))

    kernel = threading.Thread(target=answer)
    kernel.start()
    try:
        yield
    finally:
        is_over.set()
        os.close(os.open(place / "outblob", os.O_RDONLY))
        kernel.join()


def _name(common: str) -> x509.Name:
    known = (
        (x509.NameOID.ORGANIZATIONAL_UNIT_NAME, "Engineering"),
        (x509.NameOID.COUNTRY_NAME, "US"),
        (x509.NameOID.LOCALITY_NAME, "Santa Clara"),
        (x509.NameOID.STATE_OR_PROVINCE_NAME, "CA"),
        (x509.NameOID.ORGANIZATION_NAME, "Advanced Micro Devices"),
        (x509.NameOID.COMMON_NAME, common),
    )
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in known])


def _number(value: int) -> bytes:
    raw = value.to_bytes(1 + value // 128, "big")
    return bytes((2, len(raw))) + raw


def _text(value: str) -> bytes:
    return bytes((0x16, len(value))) + value.encode()
