"""The broker's key file, and the wrapping of every secret that the database keeps.

Laws: the database alone opens nothing. A secret is wrapped by AES-256-GCM under a key derived from the key file for its
purpose, and its associated data names its record, so that two wrapped secrets cannot change places. The key file is a
regular file of this user's with mode 0600; anything looser is refused, never mended silently.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from enum import StrEnum
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.wire.canonical import b64decode, b64encode
from glasshouse.wire.crypto import derive, lengths_prefixed

_PREFIX = "glasshouse-broker-key-v1 "
_KEY_BYTES = 32
_NONCE_BYTES = 12
_MAX_FILE_BYTES = 256
_LABEL = b"glasshouse broker wrapping v1"


class Purpose(StrEnum):
    """What a wrapped secret is; each purpose has its own derived key."""

    PACKAGE_KEY = "package-key"
    SIGNING_KEY = "signing-key"
    ACTIVATION = "tpm-activation"


class KeyFile:
    """The key under which the broker's secrets rest.

    Law: ``unwrap(p, n, wrap(p, n, s)) == s``; another purpose, name or key file opens nothing.
    """

    __slots__ = ("_ciphers",)

    def __init__(self, key: bytes) -> None:
        if len(key) != _KEY_BYTES:
            raise ValueError("a wrapping key is 32 bytes")
        self._ciphers = {purpose: AESGCM(derive(key, _LABEL, purpose.encode())) for purpose in Purpose}

    @classmethod
    def open(cls, path: Path) -> KeyFile:
        """Read a key file.

        Raises:
            UsageError: `file-missing`, or `usage` when it is not a regular file of ours with mode 0600.
        """
        try:
            text = read_private_file(path, max_bytes=_MAX_FILE_BYTES, what="broker's key file").decode("ascii")
            if not text.startswith(_PREFIX):
                raise FormatError(Code.SCHEMA, "no prefix")
            return cls(b64decode(text.removeprefix(_PREFIX).removesuffix("\n")))
        except (ValueError, FormatError):
            raise UsageError(Code.USAGE, f"{path} is not a broker's key file") from None

    @classmethod
    def open_or_create(cls, path: Path) -> KeyFile:
        """Read a key file, making it first where there is none; safe against a second process doing the same."""
        try:
            return cls.open(path)
        except UsageError as error:
            if error.code is not Code.FILE_MISSING:
                raise
        write_private_file(path, f"{_PREFIX}{b64encode(secrets.token_bytes(_KEY_BYTES))}\n".encode())
        return cls.open(path)

    def wrap(self, purpose: Purpose, name: str, secret: bytes) -> bytes:
        """Return `secret` sealed for one purpose and one record: nonce (12 bytes) ‖ ciphertext."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._ciphers[purpose].encrypt(nonce, secret, _bound_to(purpose, name))

    def unwrap(self, purpose: Purpose, name: str, wrapped: bytes) -> bytes:
        """Inverse of `wrap`.

        Raises:
            UsageError: `usage` when it was wrapped for another record or under another key file.
        """
        nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
        try:
            return self._ciphers[purpose].decrypt(nonce, sealed, _bound_to(purpose, name))
        except (InvalidTag, ValueError):
            raise UsageError(
                Code.USAGE,
                f"the broker's key file does not open its {purpose}: it belongs to another database",
                hint="put back the key file that this database was made with",
            ) from None

    def __repr__(self) -> str:
        return "KeyFile(...)"


def private_directory(path: Path, *, what: str) -> None:
    """Make `path` with mode 0700, or check that it is this user's, and closed to others.

    Raises:
        UsageError: `usage`, with the mend in its hint.
    """
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise UsageError(Code.USAGE, f"the {what} {path} cannot be made: {error.strerror}") from None
    found = path.stat(follow_symlinks=True)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise UsageError(Code.USAGE, f"the {what} {path} is not a directory of this user")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            Code.USAGE,
            f"the {what} {path} has mode {stat.S_IMODE(found.st_mode):04o}; others could enter it",
            hint=f"chmod 700 {path}",
        )


def read_private_file(path: Path, *, max_bytes: int, what: str) -> bytes:
    """Return what a file holds that none but this user may read.

    Raises:
        UsageError: `file-missing`, or `usage` when it is not a regular file of ours with mode 0600.
    """
    try:
        # Not blocking: a pipe in this place would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(Code.FILE_MISSING, f"the {what} {path} is missing", hint="restore it from a backup") from None
    except OSError as error:
        raise UsageError(Code.USAGE, f"the {what} {path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise UsageError(Code.USAGE, f"the {what} {path} is not a regular file of this user")
        if stat.S_IMODE(found.st_mode) & 0o177:
            raise UsageError(
                Code.USAGE,
                f"the {what} {path} has mode {stat.S_IMODE(found.st_mode):04o}, not 0600",
                hint=f"if no other user can have read it: chmod 600 {path}",
            )
        return os.read(descriptor, max_bytes)
    finally:
        os.close(descriptor)


def write_private_file(path: Path, content: bytes) -> None:
    """Make a file of mode 0600, unless a second process was faster: then its own stays.

    It is complete under a private name first: no reader sees half of it.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        sync_directory(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def _bound_to(purpose: Purpose, name: str) -> bytes:
    return lengths_prefixed(_LABEL, purpose.encode(), name.encode())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
