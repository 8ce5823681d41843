"""The cryptography of every format: SHA-256, HKDF, chunked AEAD, HPKE and Ed25519, each in its one form.

Chunked AEAD is in the STREAM manner (Hoang, Reyhanitabar, Rogaway, Vizár 2015): chunk *i* of a stream is sealed under
nonce = prefix (7 bytes) ‖ i (4 bytes, big endian) ‖ last flag (1 byte). Removing, repeating, reordering or splicing
chunks, and cutting the stream short, all change a nonce and so fail authentication. A key and prefix seal one stream
once.

HPKE (RFC 9180) has one suite: X-Wing (ML-KEM-768 + X25519), HKDF-SHA-256, AES-256-GCM. Private keys serialise as
ML-KEM seed (64 bytes) ‖ X25519 private key (32 bytes); public keys as ML-KEM-768 encapsulation key (1184) ‖ X25519
public key (32), the order of draft-connolly-cfrg-xwing-kem.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from glasshouse.errors import Code, FormatError, PackageError

KEY_BYTES = 32
GROUP_SECRET_BYTES = 32  # of what the ranks of a group share
TAG_BYTES = 16
PREFIX_BYTES = 7
MAX_CHUNKS = 2**32 - 1
SIGNATURE_BYTES = 64
HPKE_SUITE = "HPKE-0x647a-0x0001-0x0002"
HPKE_PUBLIC_BYTES = 1184 + 32
HPKE_PRIVATE_BYTES = 64 + 32
HPKE_OVERHEAD_BYTES = 1088 + 32 + 16  # encapsulations and tag

_ZEROS = memoryview(bytes(1 << 16))
_HPKE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)

_FIELD = 2**255 - 19
# The y coordinates of the eight points of small order: under such a key anyone can sign (nearly) anything.
_ED25519_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_ED25519_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, _ED25519_ORDER_8, _FIELD - _ED25519_ORDER_8})
# The u coordinates of X25519 that every private key takes to zero (RFC 7748 section 6.1).
_X25519_ORDER_8 = (
    0x00B8495F16056286FDB1329CEB8D09DA6AC49FF1FAE35616AEB8413B7C7AEBE0,
    0x57119FD0DD4E22D8868E1C58C45C44045BEF839C55B1D0B1248C50A3BC959C5F,
)
_X25519_SMALL_ORDER = frozenset({0, 1, _FIELD - 1, *_X25519_ORDER_8})


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """Return the SHA-256 of `data`, 32 bytes."""
    return hashlib.sha256(data).digest()


def salted(salt: bytes | bytearray | memoryview, digest: bytes) -> bytes:
    """Return HMAC-SHA-256(salt, digest): it commits to the digest, and without the salt no guess can be compared."""
    return hmac.digest(salt, digest, "sha256")


def lengths_prefixed(*parts: bytes) -> bytes:
    """Concatenate parts, each behind its length as eight big-endian bytes: no other sequence gives the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def derive(key: bytes | bytearray | memoryview, *info: bytes) -> bytes:
    """Derive a key of 32 bytes with HKDF-SHA-256 (RFC 5869).

    Args:
        key: uniformly random input keying material.
        info: a label and what the key is bound to; length-prefixed before use.
    """
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=lengths_prefixed(*info)).derive(key)


class Suite(StrEnum):
    """The bulk ciphers of sealed packages and outputs."""

    AES_256_GCM = "AES-256-GCM"
    CHACHA20_POLY1305 = "ChaCha20-Poly1305"


def zero(buffer: bytearray | memoryview) -> None:
    """Overwrite a writable buffer with zero bytes, in steps: a second buffer as large might not be had."""
    view = memoryview(buffer).cast("B")
    for at in range(0, len(view), len(_ZEROS)):
        piece = view[at : at + len(_ZEROS)]
        piece[:] = _ZEROS[: len(piece)]


def chunk_nonce(prefix: bytes, index: int, *, last: bool) -> bytes:
    """Return the 12 bytes under which chunk `index` of a stream is sealed."""
    if not 0 <= index <= MAX_CHUNKS:
        raise ValueError("chunk index out of range")
    return prefix + index.to_bytes(4, "big") + (b"\x01" if last else b"\x00")


class ChunkCipher:
    """Seals and opens the chunks of one stream.

    Args:
        key: 32 bytes, used for this stream only.
        prefix: 7 bytes of nonce; constant zero is fine where the key is fresh.
    """

    __slots__ = ("_associated_data", "_cipher", "_prefix")

    def __init__(
        self, *, suite: Suite, key: bytes | bytearray | memoryview, prefix: bytes, associated_data: bytes
    ) -> None:
        if len(key) != KEY_BYTES or len(prefix) != PREFIX_BYTES:
            raise ValueError("a stream takes a key of 32 bytes and a prefix of 7")
        self._cipher = AESGCM(key) if suite is Suite.AES_256_GCM else ChaCha20Poly1305(key)
        self._prefix = prefix
        self._associated_data = associated_data

    def seal_into(
        self, index: int, *, last: bool, plaintext: bytes | bytearray | memoryview, out: bytearray | memoryview
    ) -> int:
        """Seal one chunk into `out`, which is exactly `TAG_BYTES` longer; return the bytes written."""
        nonce = chunk_nonce(self._prefix, index, last=last)
        return self._cipher.encrypt_into(nonce, plaintext, self._associated_data, out)

    def open_into(
        self, index: int, *, last: bool, sealed: bytes | bytearray | memoryview, out: bytearray | memoryview
    ) -> int:
        """Verify and open one chunk into `out`, which is exactly `TAG_BYTES` shorter.

        Raises:
            PackageError: `package-tampered`; `out` is zero then, where the library leaves unverified plaintext.
        """
        try:
            nonce = chunk_nonce(self._prefix, index, last=last)
            return self._cipher.decrypt_into(nonce, sealed, self._associated_data, out)
        except InvalidTag:
            zero(out)
            raise PackageError(
                Code.PACKAGE_TAMPERED, f"chunk {index} is not what was sealed: changed, moved, cut or of another key"
            ) from None


def key_id(public: bytes) -> str:
    """Return the name of a public key, Ed25519 or HPKE: the first 16 bytes of its SHA-256, in hex."""
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


def verify_signature(public: bytes, signature: bytes, message: bytes) -> None:
    """Check an Ed25519 signature.

    Raises:
        FormatError: `signature-invalid`, also for a key of small order, which has no single owner.
    """
    if (int.from_bytes(public, "little") & (2**255 - 1)) % _FIELD in _ED25519_SMALL_ORDER:
        raise FormatError(Code.SIGNATURE, "a signature under a key with which anyone can sign")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        raise FormatError(Code.SIGNATURE, "a signature that does not belong to this content and key") from None


def check_recipient(public: bytes) -> None:
    """Check that something can be sealed to a raw public key, and that these bytes are its only encoding.

    X25519 ignores the highest bit and takes numbers beyond the field, so that one key would have several names.

    Raises:
        FormatError: `schema-invalid`.
    """
    if len(public) != HPKE_PUBLIC_BYTES:
        raise FormatError(Code.SCHEMA, "an HPKE public key that is not 1216 bytes")
    point = int.from_bytes(public[1184:], "little")
    if point >= _FIELD:
        raise FormatError(Code.SCHEMA, "an HPKE public key whose X25519 half is not in its one encoding")
    if point in _X25519_SMALL_ORDER:
        raise FormatError(Code.SCHEMA, "an HPKE public key that nothing can be sealed to")
    try:
        MLKEM768PublicKey.from_public_bytes(public[:1184])  # refuses coefficients beyond the modulus (FIPS 203, 7.2)
    except ValueError:
        raise FormatError(Code.SCHEMA, "an HPKE public key whose ML-KEM half is none") from None


class RecipientKey:
    """A private HPKE key, from its 96 bytes: ML-KEM-768 seed ‖ X25519 private key."""

    __slots__ = ("_mlkem", "_private", "_x25519", "public")

    def __init__(self, private: bytes | bytearray | memoryview) -> None:
        if len(private) != HPKE_PRIVATE_BYTES:
            raise ValueError("an HPKE private key is 96 bytes")
        view = memoryview(private)
        self._mlkem = MLKEM768PrivateKey.from_seed_bytes(bytes(view[:64]))
        self._x25519 = X25519PrivateKey.from_private_bytes(view[64:])
        self._private = hpke.MLKEM768X25519PrivateKey(self._mlkem, self._x25519)
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
        """Open what `hpke_seal` made for this key under the same `info`.

        Raises:
            FormatError: `signature-invalid` when it was not sealed for this key and `info`.
        """
        try:
            return _HPKE.decrypt(sealed, self._private, info)
        except (InvalidTag, ValueError):
            raise FormatError(Code.SIGNATURE, "an HPKE message for another key or context") from None

    def __repr__(self) -> str:
        return f"RecipientKey({key_id(self.public)})"


def hpke_seal(plaintext: bytes | bytearray | memoryview, *, recipient: bytes, info: bytes) -> bytes:
    """Seal to a raw public key: encapsulation (1120 bytes) ‖ ciphertext.

    Raises:
        FormatError: `schema-invalid` when `recipient` is not a public key, see `check_recipient`.
    """
    check_recipient(recipient)
    public = hpke.MLKEM768X25519PublicKey(
        MLKEM768PublicKey.from_public_bytes(recipient[:1184]), X25519PublicKey.from_public_bytes(recipient[1184:])
    )
    return _HPKE.encrypt(plaintext, public, info)
