"""HPKE (RFC 9180) in its one suite: X-Wing (ML-KEM-768 + X25519), HKDF-SHA-256, AES-256-GCM.

Private keys serialise as ML-KEM seed (64 bytes) ‖ X25519 private key (32 bytes); public keys as
ML-KEM-768 encapsulation key (1184) ‖ X25519 public key (32), the order of draft-connolly-cfrg-xwing-kem.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)

from glasshouse.errors import Code, FormatError
from glasshouse.wire.kdf import sha256

SUITE_ID = "HPKE-0x647a-0x0001-0x0002"
PUBLIC_BYTES = 1184 + 32
PRIVATE_BYTES = 64 + 32
ENCAPSULATION_BYTES = 1088 + 32
OVERHEAD_BYTES = ENCAPSULATION_BYTES + 16

_FIELD = 2**255 - 19
# The u coordinates of X25519 that every private key takes to zero (RFC 7748 section 6.1).
_ORDER_8 = (
    0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
    0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
)
_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, *_ORDER_8})

_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def recipient_id(public: bytes) -> str:
    """Return the name of a public HPKE key: the first 16 bytes of its SHA-256, in hex."""
    return sha256(public)[:16].hex()


def check_public(public: bytes) -> None:
    """Check that something can be sealed to a raw public key, and that these bytes are its only encoding.

    X25519 ignores the highest bit and takes numbers beyond the field, so that one key would have several names.

    Raises:
        FormatError: `schema-invalid`.
    """
    if len(public) != PUBLIC_BYTES:
        raise FormatError(Code.SCHEMA, "an HPKE public key that is not 1216 bytes")
    point = int.from_bytes(public[1184:], "little")
    if point >= _FIELD:
        raise FormatError(Code.SCHEMA, "an HPKE public key whose X25519 half is not in its one encoding")
    if point in _SMALL_ORDER:
        raise FormatError(Code.SCHEMA, "an HPKE public key that nothing can be sealed to")
    try:
        MLKEM768PublicKey.from_public_bytes(public[:1184])  # refuses coefficients beyond the modulus (FIPS 203, 7.2)
    except ValueError:
        raise FormatError(Code.SCHEMA, "an HPKE public key whose ML-KEM half is none") from None


class RecipientKey:
    """A private HPKE key, from its 96 bytes: ML-KEM-768 seed ‖ X25519 private key."""

    __slots__ = ("_mlkem", "_private", "_x25519", "public")

    def __init__(self, private: bytes | bytearray | memoryview) -> None:
        if len(private) != PRIVATE_BYTES:
            raise ValueError("an HPKE private key is 96 bytes")
        view = memoryview(private)
        self._mlkem = MLKEM768PrivateKey.from_seed_bytes(bytes(view[:64]))
        self._x25519 = X25519PrivateKey.from_private_bytes(view[64:])
        self._private = MLKEM768X25519PrivateKey(self._mlkem, self._x25519)
        self.public: bytes = self._mlkem.public_key().public_bytes_raw() + self._x25519.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> RecipientKey:
        """Return a new key."""
        seed = MLKEM768PrivateKey.generate().private_bytes_raw()
        return cls(seed + X25519PrivateKey.generate().private_bytes_raw())

    def private(self) -> bytes:
        """Return the private key, 96 bytes: for the owner's key store only."""
        return self._mlkem.private_bytes_raw() + self._x25519.private_bytes_raw()

    def open(self, sealed: bytes, *, info: bytes) -> bytes:
        """Open what `seal` made for this key under the same `info`.

        Raises:
            FormatError: `signature-invalid` when it was not sealed for this key and `info`.
        """
        try:
            return _SUITE.decrypt(sealed, self._private, info)
        except (InvalidTag, ValueError):
            raise FormatError(Code.SIGNATURE, "an HPKE message for another key or context") from None

    def __repr__(self) -> str:
        return f"RecipientKey({recipient_id(self.public)})"


def seal(plaintext: bytes | bytearray | memoryview, *, recipient: bytes, info: bytes) -> bytes:
    """Seal to a raw public key: encapsulation (1120 bytes) ‖ ciphertext.

    Raises:
        FormatError: `schema-invalid` when `recipient` is not a public key, see `check_public`.
    """
    check_public(recipient)
    public = MLKEM768X25519PublicKey(
        MLKEM768PublicKey.from_public_bytes(recipient[:1184]), X25519PublicKey.from_public_bytes(recipient[1184:])
    )
    return _SUITE.encrypt(plaintext, public, info)
