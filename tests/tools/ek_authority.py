"""Certificates of endorsement keys, and of authorities that are one thing less than they should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

__all__ = ["EK_USE", "EkAuthority"]

EK_USE = x509.ObjectIdentifier("2.23.133.8.1")
SINCE = datetime(2020, 1, 1, tzinfo=UTC)
_CENTURY = 36500


@dataclass(frozen=True)
class EkAuthority:
    """An authority; `issuer` is None for a root."""

    name: str
    issuer: EkAuthority | None = None
    is_authority: bool = True
    signs_certificates: bool = True
    path_length: int | None = None
    days: int = _CENTURY
    more: Sequence[x509.ExtensionType] = ()  # critical ones
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @cached_property
    def der(self) -> bytes:
        """Its certificate."""
        usage = _usage(key_cert_sign=self.signs_certificates, crl_sign=True)
        constraints = x509.BasicConstraints(ca=self.is_authority, path_length=self.path_length)
        extensions = [(constraints, True), (usage, True), *((one, True) for one in self.more)]
        return (self.issuer or self).issue(self.name, self.key.public_key(), extensions, days=self.days)

    def issue(
        self,
        name: str,
        key: CertificatePublicKeyTypes,
        extensions: Sequence[tuple[x509.ExtensionType, bool]],
        *,
        days: int = _CENTURY,
    ) -> bytes:
        """Return a certificate with these extensions, each with whether it is critical."""
        builder = x509.CertificateBuilder(
            issuer_name=_name(self.name),
            subject_name=_name(name),
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=SINCE,
            not_valid_after=SINCE + timedelta(days=days),
        )
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        return builder.sign(self.key, SHA256()).public_bytes(Encoding.DER)

    def endorse(
        self,
        key: CertificatePublicKeyTypes,
        *,
        use: x509.ObjectIdentifier | None = EK_USE,
        more: Sequence[x509.ExtensionType] = (),
        days: int = _CENTURY,
        **usage: bool,
    ) -> bytes:
        """Return an endorsement key's certificate."""
        is_ec = isinstance(key, ec.EllipticCurvePublicKey)
        usage = usage or {"key_agreement" if is_ec else "key_encipherment": True}
        extensions: list[tuple[x509.ExtensionType, bool]] = [(_usage(**usage), True), *((one, True) for one in more)]
        if use is not None:
            extensions.append((x509.ExtendedKeyUsage([use]), False))
        return self.issue("an endorsement key", key, extensions, days=days)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(**given: bool) -> x509.KeyUsage:
    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign"
    return x509.KeyUsage(
        **{name: given.get(name, False) for name in (*names.split(), "crl_sign", "encipher_only", "decipher_only")}
    )
