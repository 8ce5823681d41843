"""A machine with a TPM, and the authority that certified it, made for the attacks: no gate but theirs names that.

Source: TCG TPM 2.0 Library, Part 1, 24 (what opens a credential), Part 2, 10.12 (what a quote is); as in
`attestation.roots.tpm`, from the other side.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.decrepit.ciphers.modes import CFB
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.binding import activation_mac
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.tpm.tpm_blob import TpmBlob
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS, TpmPolicy
from glasshouse.handshake.messages import TpmKeys
from glasshouse.wire.crypto import sha256

RESTRICTED = 1 << 16
_SIGNS_AT_HOME = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 18  # of this TPM, and signs what it is told
_EK_USE = x509.ObjectIdentifier("2.23.133.8.1")
_IMAGE = (0, 2, 4, 7, 8, 9)


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True, kw_only=True)
class TpmMaker:
    """An authority that certifies endorsement keys."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    name: str = field(default_factory=lambda: f"maker {secrets.token_hex(4)}")

    @property
    def root(self) -> bytes:
        """Its own certificate, DER."""
        return self._certificate("", self.key, is_authority=True)

    def endorsed(self, key: ec.EllipticCurvePrivateKey) -> bytes:
        """Return a certificate for an endorsement key, DER."""
        return self._certificate("a TPM", key, is_authority=False)

    def _certificate(self, name: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
        names = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)]) for one in (name or self.name, self.name)
        )
        subject, issuer = names
        now = datetime.now(UTC)
        usage = dict.fromkeys(
            ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "crl_sign"), False
        )
        built = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        built = built.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
        built = built.not_valid_after(now + timedelta(days=1))
        built = built.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        built = built.add_extension(
            x509.KeyUsage(
                **usage,
                key_agreement=not is_authority,
                key_cert_sign=is_authority,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        if not is_authority:
            built = built.add_extension(x509.ExtendedKeyUsage([_EK_USE]), critical=False)
        return built.sign(self.key, SHA256()).public_bytes(Encoding.DER)


@dataclass(frozen=True, kw_only=True)
class StagedTpm:
    """A TPM, and what its machine booted.

    Args:
        signs_at_home: its attestation key is an unrestricted one.
    """

    maker: TpmMaker
    boot: bytes  # what the registers follow from
    signs_at_home: bool = False
    endorsement: ec.EllipticCurvePrivateKey = field(default_factory=_key)
    attestation: ec.EllipticCurvePrivateKey = field(default_factory=_key)

    @property
    def registers(self) -> Mapping[int, bytes]:
        """The bank sha256."""
        return {register: sha256(self.boot + bytes([register])) for register in QUOTED_PCRS}

    @property
    def keys(self) -> TpmKeys:
        """What its challenge request names."""
        attributes = _SIGNS_AT_HOME | (0 if self.signs_at_home else RESTRICTED)
        point = self.attestation.public_key().public_numbers()
        public = struct.pack(">HHIHHHHHH", 0x23, 0x0B, attributes, 0, 0x10, 0x18, 0x0B, 0x03, 0x10)
        public += _sized(point.x.to_bytes(32, "big")) + _sized(point.y.to_bytes(32, "big"))
        return TpmKeys(ak=public, ek=self.maker.endorsed(self.endorsement))

    def accepted(self) -> HardwarePolicy:
        """Return a policy that takes TPMs of this maker in machines that booted the same."""
        values = {str(register): (self.registers[register],) for register in _IMAGE}
        return HardwarePolicy(tpm=TpmPolicy(chain="image", ek_roots=(self.maker.root,), pcrs=values))

    def activate(self, credential: bytes, keys: TpmKeys) -> bytes:
        """Return the secret in a credential for both keys of this TPM."""
        identity, encrypted = _parts(credential)
        mac, ciphertext = identity[2:34], identity[34:]
        party_u, own_y = _parts(encrypted)
        numbers = ec.EllipticCurvePublicNumbers(int.from_bytes(party_u), int.from_bytes(own_y), ec.SECP256R1())
        shared = self.endorsement.exchange(ec.ECDH(), numbers.public_key())
        party_v = self.endorsement.public_key().public_numbers().x.to_bytes(32, "big")
        seed = hashlib.sha256(b"\0\0\0\1" + shared + b"IDENTITY\0" + party_u + party_v).digest()
        name = b"\x00\x0b" + sha256(keys.ak)
        if not hmac.compare_digest(mac, hmac.digest(_kdfa(seed, b"INTEGRITY", b"", 256), ciphertext + name, "sha256")):
            raise ValueError("a credential for other keys")
        decryptor = Cipher(AES(_kdfa(seed, b"STORAGE", name, 128)), CFB(bytes(16))).decryptor()
        [secret] = _parts(decryptor.update(ciphertext) + decryptor.finalize())
        return secret

    def blob(self, composite: bytes, keys: TpmKeys, secret: bytes | None, *, quoted: bytes = b"") -> bytes:
        """Return evidence for a composite, as a runtime sends it; `quoted` is what the quote binds, if another."""
        values = tuple(self.registers[register] for register in QUOTED_PCRS)
        bits = sum(1 << register for register in QUOTED_PCRS).to_bytes(3, "little")
        quote = (
            struct.pack(">IH", 0xFF544347, 0x8018)
            + _sized(b"")
            + _sized(quoted or composite)
            + bytes(8 + 4 + 4 + 1 + 8)
        )
        quote += b"\0\0\0\1\0\x0b\3" + bits + _sized(sha256(b"".join(values)))
        numbers = decode_dss_signature(self.attestation.sign(quote, ec.ECDSA(SHA256())))
        signature = struct.pack(">HH", 0x18, 0x0B) + b"".join(_sized(each.to_bytes(32, "big")) for each in numbers)
        activation = None if secret is None else activation_mac(secret, composite)
        return TpmBlob(
            activation=activation, ak=keys.ak, ek=keys.ek, pcrs=values, quote=quote, signature=signature
        ).encode()


def _parts(data: bytes) -> Iterator[bytes]:
    while data:
        end = 2 + int.from_bytes(data[:2])
        yield data[2:end]
        data = data[end:]


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def _kdfa(key: bytes, label: bytes, context: bytes, bits: int) -> bytes:
    block = b"\0\0\0\1" + label + b"\0" + context + bits.to_bytes(4, "big")
    return hmac.digest(key, block, "sha256")[: bits // 8]
