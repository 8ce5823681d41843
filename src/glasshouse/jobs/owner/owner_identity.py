"""The owner's identity: a signing key and a sealing key, published together under one fingerprint.

The private file holds both keys as canonical JSON; with a passphrase it is encrypted under scrypt
(RFC 7914) and AES-256-GCM, and the public half is authenticated with it. Exports have the same form and
always a passphrase. A new key is a new identity: nothing here rotates one in place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import is_there, read_bounded, write_private
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import (
    HPKE_PRIVATE_BYTES,
    HPKE_PUBLIC_BYTES,
    RecipientKey,
    SigningKey,
    check_recipient,
    lengths_prefixed,
    sha256,
)
from glasshouse.wire.record import LEFT_OUT, Record, integer, octets, text

MIN_PASSPHRASE_CHARS = 8
_MAX_BYTES = 16384
_PRIVATE_KIND = "glasshouse-owner-private"
# 64 MiB and about a quarter of a second: a guess costs an attacker the same.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 16, 8, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerPublic(Record, name="owner", max_bytes=_MAX_BYTES, constants={"kind": "glasshouse-owner", "version": 1}):
    """An owner's public keys under one fingerprint: `owner.pub`; raises `FormatError` for a fingerprint of other keys.

    Law: ``OwnerPublic.parse(o.encode()) == o``.
    """

    signing: Annotated[bytes, octets(32)]  # Ed25519
    sealing: Annotated[bytes, octets(HPKE_PUBLIC_BYTES)]  # HPKE
    # SHA-256 over both keys, hex in groups of four for people to compare; left to be computed.
    fingerprint: Annotated[str, text(64, re.compile(r".+", re.DOTALL))] = ""

    def __post_init__(self) -> None:
        check_recipient(self.sealing)
        digest = sha256(lengths_prefixed(b"glasshouse owner v1", self.signing, self.sealing))[:20].hex()
        fingerprint = "-".join(digest[place : place + 4] for place in range(0, len(digest), 4))
        if self.fingerprint not in ("", fingerprint):
            raise FormatError(Code.OWNER_UNKNOWN, "an owner file whose fingerprint belongs to other keys")
        object.__setattr__(self, "fingerprint", fingerprint)

    def encode(self) -> bytes:
        return Record.encode(self) + b"\n"

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview, **apart: Any) -> OwnerPublic:
        return cls.from_json(decode(bytes(data).removesuffix(b"\n"), max_bytes=_MAX_BYTES))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lock(Record, name="identity.lock", constants={"kdf": "scrypt", "p": _SCRYPT_P, "r": _SCRYPT_R}):
    """The private keys under a passphrase."""

    # The cost is bounded before it is paid: scrypt takes 128·n·r bytes, and a hostile file must not take all memory.
    n: Annotated[int, integer(1 << 14, 1 << 18)]
    nonce: Annotated[bytes, octets(12)]
    salt: Annotated[bytes, octets(16)]
    sealed: Annotated[bytes, octets(max_length=_MAX_BYTES)]

    def __post_init__(self) -> None:
        if self.n & (self.n - 1):
            raise FormatError(Code.SCHEMA, "identity.lock.n is not a power of two")

    def open(self, passphrase: str | None, owner: OwnerPublic) -> bytes:
        if passphrase is None:
            raise UsageError(
                Code.IDENTITY,
                "this identity is protected by a passphrase",
                hint="type it when asked, or name a file with --passphrase-file",
            )
        key = AESGCM(_stretch(passphrase, self.salt, self.n))
        try:
            return key.decrypt(self.nonce, self.sealed, encode(owner.to_json()))
        except InvalidTag:
            raise UsageError(Code.IDENTITY, "the passphrase is wrong, or the identity file was changed") from None


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class _Secret(Record, name="secret", max_bytes=_MAX_BYTES):
    sealing: Annotated[bytes, octets(HPKE_PRIVATE_BYTES)]
    signing: Annotated[bytes, octets(32)]


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class _PrivateFile(Record, name="identity", max_bytes=_MAX_BYTES, constants={"kind": _PRIVATE_KIND, "version": 1}):
    owner: OwnerPublic
    secret: Annotated[bytes | None, octets(), LEFT_OUT] = None
    lock: Annotated[_Lock | None, LEFT_OUT] = None

    def __post_init__(self) -> None:
        if (self.secret is None) == (self.lock is None):
            raise FormatError(Code.SCHEMA, "identity has not one of secret and lock")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Identity:
    """An owner's private keys, decrypted."""

    signing: SigningKey  # signs manifests and delegations
    sealing: RecipientKey  # opens outputs, logs and the key store

    @classmethod
    def generate(cls) -> Identity:
        """Return a new identity."""
        return cls(signing=SigningKey.generate(), sealing=RecipientKey.generate())

    @property
    def public(self) -> OwnerPublic:
        """The public keys."""
        return OwnerPublic(signing=self.signing.public, sealing=self.sealing.public)

    def encode(self, passphrase: str | None) -> bytes:
        """Return the private file's bytes, encrypted under a passphrase; raises `UsageError` for a short one."""
        secret = _Secret(sealing=self.sealing.private(), signing=self.signing.seed()).encode()
        if passphrase is None:
            return _PrivateFile(owner=self.public, secret=secret).encode() + b"\n"
        if len(passphrase) < MIN_PASSPHRASE_CHARS:
            raise UsageError(
                Code.IDENTITY, f"a passphrase of fewer than {MIN_PASSPHRASE_CHARS} characters protects nothing"
            )
        salt, nonce = os.urandom(16), os.urandom(12)
        key = AESGCM(_stretch(passphrase, salt, _SCRYPT_N))
        sealed = key.encrypt(nonce, secret, encode(self.public.to_json()))
        lock = _Lock(n=_SCRYPT_N, nonce=nonce, salt=salt, sealed=sealed)
        return _PrivateFile(owner=self.public, lock=lock).encode() + b"\n"

    @classmethod
    def parse(cls, data: bytes, passphrase: str | None) -> Identity:
        """Inverse of `encode`; raises `UsageError`: `identity` for a missing or wrong passphrase, or a damaged file."""
        try:
            file = _parse(data)
            opened = file.lock.open(passphrase, file.owner) if file.lock else file.secret or b""
            secret = _Secret.parse(opened)
        except FormatError as error:
            raise UsageError(Code.IDENTITY, f"not a usable identity file: {error.message}") from None
        found = cls(signing=SigningKey(secret.signing), sealing=RecipientKey(secret.sealing))
        if found.public != file.owner:
            raise UsageError(Code.IDENTITY, "an identity file whose private keys do not belong to its public ones")
        return found

    def save(self, *, private: Path, public: Path, passphrase: str | None) -> None:
        """Write both files; raises `UsageError` when one is there."""
        if is_there(private) or is_there(public):
            raise UsageError(
                Code.IDENTITY,
                f"an identity is there already: {private.parent}",
                hint="a new identity cannot open what was sealed to the old one; choose another --home",
            )
        write_private(private, self.encode(passphrase), replace=False)
        write_private(public, self.public.encode(), replace=False)

    def __repr__(self) -> str:
        return f"Identity({self.public.fingerprint})"


def read_public(path: Path) -> OwnerPublic:
    """Return the owner of an `owner.pub` file; raises `UsageError`: `file-missing`, or `identity` for another file."""
    try:
        return OwnerPublic.parse(read_bounded(path, max_bytes=_MAX_BYTES, what="owner file"))
    except FormatError as error:
        raise UsageError(Code.IDENTITY, f"{path} is not an owner file: {error.message}") from None


def read_private(path: Path) -> bytes:
    """Return an `owner.key` file's bytes; raises `UsageError`: `file-missing`, or `identity` if others may open it."""
    return read_bounded(path, max_bytes=_MAX_BYTES, what="identity", private=True)


def is_encrypted(data: bytes) -> bool:
    """Return whether a private file or export asks for a passphrase; raises `UsageError`."""
    try:
        return _parse(data).lock is not None
    except FormatError as error:
        raise UsageError(Code.IDENTITY, f"not a usable identity file: {error.message}") from None


def unlock(path: Path, passphrase: str | Callable[[], str] | None = None) -> Identity:
    """Return the identity of a private file; `passphrase` is called only for an encrypted one. Raises `UsageError`."""
    data = read_private(path)
    if not is_encrypted(data):
        return Identity.parse(data, None)
    return Identity.parse(data, passphrase() if callable(passphrase) else passphrase)


def _parse(data: bytes) -> _PrivateFile:
    return _PrivateFile.parse(data.rstrip(b"\n"))


def _stretch(passphrase: str, salt: bytes, cost: int) -> bytes:
    try:
        return Scrypt(salt=salt, length=32, n=cost, r=_SCRYPT_R, p=_SCRYPT_P).derive(passphrase.encode())
    except MemoryError:
        megabytes = 128 * cost * _SCRYPT_R >> 20
        raise UsageError(
            Code.IDENTITY, f"a passphrase takes {megabytes} MiB of memory to check, and they are not free here"
        ) from None
