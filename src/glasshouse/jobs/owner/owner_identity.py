"""The owner's identity: a signing key and a sealing key, published together under one fingerprint.

The private file holds both keys as canonical JSON; with a passphrase it is encrypted under scrypt
(RFC 7914) and AES-256-GCM, and the public half is authenticated with it. Exports have the same form and
always a passphrase. A new key is a new identity: nothing here rotates one in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.files import is_there, read_bounded, write_private
from glasshouse.wire.canonical import Json, decode, encode
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.hpke import PRIVATE_BYTES, PUBLIC_BYTES, RecipientKey, check_public
from glasshouse.wire.kdf import lengths_prefixed, sha256
from glasshouse.wire.signing import SigningKey

__all__ = ["MIN_PASSPHRASE_CHARS", "Identity", "OwnerPublic", "is_encrypted", "read_private", "read_public", "unlock"]

MIN_PASSPHRASE_CHARS = 8
_MAX_BYTES = 16384
_PUBLIC_KIND = "glasshouse-owner"
_PRIVATE_KIND = "glasshouse-owner-private"
# 64 MiB and about a quarter of a second: a guess costs an attacker the same.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 16, 8, 1
# What a file may ask for: scrypt takes 128·n·r bytes, here 16 to 256 MiB.
_SCRYPT_LEAST_N, _SCRYPT_MOST_N = 1 << 14, 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerPublic:
    """What everyone may know of an owner: `owner.pub`.

    Law: ``OwnerPublic.parse(o.encode()) == o``.

    Attributes:
        signing: Ed25519 public key, 32 bytes.
        sealing: HPKE public key, 1216 bytes.
    """

    signing: bytes
    sealing: bytes

    @property
    def fingerprint(self) -> str:
        """The identity's one name: SHA-256 over both keys, hex in groups of four for people to compare."""
        digest = sha256(lengths_prefixed(b"glasshouse owner v1", self.signing, self.sealing))[:20].hex()
        return "-".join(digest[place : place + 4] for place in range(0, len(digest), 4))

    def to_json(self) -> dict[str, Json]:
        return {
            "fingerprint": self.fingerprint,
            "kind": _PUBLIC_KIND,
            "sealing": b64encode(self.sealing),
            "signing": b64encode(self.signing),
            "version": 1,
        }

    def encode(self) -> bytes:
        return encode(self.to_json()) + b"\n"

    @classmethod
    def parse(cls, data: bytes) -> OwnerPublic:
        """Inverse of `encode`.

        Raises:
            FormatError: `schema-invalid`, `not-canonical`; or `owner-mismatch` when the fingerprint is of
                other keys.
        """
        return cls.from_json(decode(data.removesuffix(b"\n"), max_bytes=_MAX_BYTES))

    @classmethod
    def from_json(cls, value: Json) -> OwnerPublic:
        """Inverse of `to_json`; raises as `parse` does."""
        fields = Fields(value, "owner")
        fields.choice("kind", [_PUBLIC_KIND])
        fields.integer("version", low=1, high=1)
        owner = cls(signing=fields.octets("signing", length=32), sealing=fields.octets("sealing", length=PUBLIC_BYTES))
        check_public(owner.sealing)
        if fields.text("fingerprint", max_chars=64) != owner.fingerprint:
            raise FormatError(Code.OWNER_UNKNOWN, "an owner file whose fingerprint belongs to other keys")
        fields.end()
        return owner


class Identity:
    """An owner's private keys, decrypted.

    Args:
        signing: signs manifests and delegations.
        sealing: opens outputs, logs and the key store.
    """

    __slots__ = ("sealing", "signing")

    def __init__(self, *, signing: SigningKey, sealing: RecipientKey) -> None:
        self.signing = signing
        self.sealing = sealing

    @classmethod
    def generate(cls) -> Identity:
        return cls(signing=SigningKey.generate(), sealing=RecipientKey.generate())

    @property
    def public(self) -> OwnerPublic:
        return OwnerPublic(signing=self.signing.public, sealing=self.sealing.public)

    def encode(self, passphrase: str | None) -> bytes:
        """Return the private file's bytes, encrypted when there is a passphrase.

        Raises:
            UsageError: `identity` for a passphrase that is too short.
        """
        public = self.public.to_json()
        secret = encode({"sealing": b64encode(self.sealing.private()), "signing": b64encode(self.signing.seed())})
        if passphrase is None:
            return encode({"kind": _PRIVATE_KIND, "owner": public, "secret": b64encode(secret), "version": 1}) + b"\n"
        if len(passphrase) < MIN_PASSPHRASE_CHARS:
            raise UsageError(
                Code.IDENTITY, f"a passphrase of fewer than {MIN_PASSPHRASE_CHARS} characters protects nothing"
            )
        salt, nonce = os.urandom(16), os.urandom(12)
        sealed = AESGCM(_stretch(passphrase, salt, _SCRYPT_N)).encrypt(nonce, secret, encode(public))
        lock: dict[str, Json] = {
            "kdf": "scrypt",
            "n": _SCRYPT_N,
            "nonce": b64encode(nonce),
            "p": _SCRYPT_P,
            "r": _SCRYPT_R,
            "salt": b64encode(salt),
            "sealed": b64encode(sealed),
        }
        return encode({"kind": _PRIVATE_KIND, "lock": lock, "owner": public, "version": 1}) + b"\n"

    @classmethod
    def parse(cls, data: bytes, passphrase: str | None) -> Identity:
        """Inverse of `encode`.

        Raises:
            UsageError: `identity` when the passphrase is missing or wrong, or the file is damaged.
        """
        try:
            public, fields = _open_frame(data)
            secret = _unlock(fields, public, passphrase) if fields.has("lock") else fields.octets("secret")
            fields.end()
            keys = Fields(decode(secret, max_bytes=_MAX_BYTES), "secret")
            found = cls(
                signing=SigningKey(keys.octets("signing", length=32)),
                sealing=RecipientKey(keys.octets("sealing", length=PRIVATE_BYTES)),
            )
            keys.end()
        except FormatError as error:
            raise UsageError(Code.IDENTITY, f"not a usable identity file: {error.message}") from None
        if found.public != public:
            raise UsageError(Code.IDENTITY, "an identity file whose private keys do not belong to its public ones")
        return found

    def save(self, *, private: Path, public: Path, passphrase: str | None, replace: bool = False) -> None:
        """Write both files; raises `UsageError` when one is there and must not be replaced."""
        if not replace and (is_there(private) or is_there(public)):
            raise UsageError(
                Code.IDENTITY,
                f"an identity is there already: {private.parent}",
                hint="a new identity cannot open what was sealed to the old one; choose another --home",
            )
        write_private(private, self.encode(passphrase), replace=replace)
        write_private(public, self.public.encode(), replace=replace)

    def __repr__(self) -> str:
        return f"Identity({self.public.fingerprint})"


def read_public(path: Path) -> OwnerPublic:
    """Return the owner of an `owner.pub` file.

    Raises:
        UsageError: `file-missing`, or `identity` when it is not one.
    """
    try:
        return OwnerPublic.parse(read_bounded(path, max_bytes=_MAX_BYTES, what="owner file"))
    except FormatError as error:
        raise UsageError(Code.IDENTITY, f"{path} is not an owner file: {error.message}") from None


def read_private(path: Path) -> bytes:
    """Return the bytes of an `owner.key` file that its owner alone may open.

    Raises:
        UsageError: `file-missing`, or `identity` when others may read or change it, encrypted or not.
    """
    return read_bounded(path, max_bytes=_MAX_BYTES, what="identity", private=True)


def is_encrypted(data: bytes) -> bool:
    """Return whether a private file or export asks for a passphrase; raises `UsageError`."""
    try:
        return _open_frame(data)[1].has("lock")
    except FormatError as error:
        raise UsageError(Code.IDENTITY, f"not a usable identity file: {error.message}") from None


def unlock(path: Path, passphrase: str | Callable[[], str] | None = None) -> Identity:
    """Return the identity of a private file.

    Args:
        path: of the file.
        passphrase: text, or what returns it; called only for an identity that has one.

    Raises:
        UsageError: `identity`, `file-missing`.
    """
    data = read_private(path)
    if not is_encrypted(data):
        return Identity.parse(data, None)
    return Identity.parse(data, passphrase() if callable(passphrase) else passphrase)


def _open_frame(data: bytes) -> tuple[OwnerPublic, Fields]:
    fields = Fields(decode(data.rstrip(b"\n"), max_bytes=_MAX_BYTES), "identity")
    fields.choice("kind", [_PRIVATE_KIND])
    fields.integer("version", low=1, high=1)
    return OwnerPublic.from_json(fields.any("owner")), fields


def _unlock(fields: Fields, public: OwnerPublic, passphrase: str | None) -> bytes:
    lock = fields.child("lock")
    lock.choice("kdf", ["scrypt"])
    # The cost is bounded before it is paid: a hostile file must not take all memory.
    cost = lock.integer("n", low=_SCRYPT_LEAST_N, high=_SCRYPT_MOST_N)
    lock.integer("r", low=_SCRYPT_R, high=_SCRYPT_R)
    lock.integer("p", low=_SCRYPT_P, high=_SCRYPT_P)
    salt, nonce = lock.octets("salt", length=16), lock.octets("nonce", length=12)
    sealed = lock.octets("sealed", max_length=_MAX_BYTES)
    lock.end()
    if cost & (cost - 1):
        raise FormatError(Code.SCHEMA, "identity.lock.n is not a power of two")
    if passphrase is None:
        raise UsageError(
            Code.IDENTITY,
            "this identity is protected by a passphrase",
            hint="type it when asked, or name a file with --passphrase-file",
        )
    try:
        return AESGCM(_stretch(passphrase, salt, cost)).decrypt(nonce, sealed, encode(public.to_json()))
    except InvalidTag:
        raise UsageError(Code.IDENTITY, "the passphrase is wrong, or the identity file was changed") from None


def _stretch(passphrase: str, salt: bytes, cost: int) -> bytes:
    try:
        return Scrypt(salt=salt, length=32, n=cost, r=_SCRYPT_R, p=_SCRYPT_P).derive(passphrase.encode())
    except MemoryError:
        megabytes = 128 * cost * _SCRYPT_R >> 20
        raise UsageError(
            Code.IDENTITY, f"a passphrase takes {megabytes} MiB of memory to check, and they are not free here"
        ) from None
