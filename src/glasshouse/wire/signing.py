"""Ed25519 keys as raw bytes, and their fingerprints."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from glasshouse.errors import Code, FormatError
from glasshouse.wire.kdf import sha256

SIGNATURE_BYTES = 64

_FIELD = 2**255 - 19
# The y coordinates of the eight points of small order: under such a key anyone can sign (nearly) anything.
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})


def key_id(public: bytes) -> str:
    """Return the name of a public signing key: the first 16 bytes of its SHA-256, in hex."""
    return sha256(public)[:16].hex()


class SigningKey:
    """An Ed25519 private key, from its 32 bytes (RFC 8032)."""

    __slots__ = ("_private", "public")

    def __init__(self, seed: bytes | bytearray | memoryview) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public: bytes = self._private.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def key_id(self) -> str:
        """See `key_id`."""
        return key_id(self.public)

    def seed(self) -> bytes:
        """Return the private key, 32 bytes: for the owner's key store only."""
        return self._private.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes."""
        return self._private.sign(message)

    def __repr__(self) -> str:
        return f"SigningKey({self.key_id})"


def verify(public: bytes, signature: bytes, message: bytes) -> None:
    """Check an Ed25519 signature.

    Raises:
        FormatError: `signature-invalid`, also for a key of small order, which has no single owner.
    """
    if (int.from_bytes(public, "little") & (2**255 - 1)) % _FIELD in _SMALL_ORDER:
        raise FormatError(Code.SIGNATURE, "a signature under a key with which anyone can sign")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise FormatError(Code.SIGNATURE, "a signature that does not belong to this content and key") from None
