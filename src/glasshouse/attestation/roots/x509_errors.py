"""What `cryptography` raises for certificates and lists that cannot be used: altered ones raise each of these."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.verification import VerificationError

X509_ERRORS: tuple[type[Exception], ...] = (
    InvalidSignature,
    TypeError,  # a signature by a key of another kind
    UnsupportedAlgorithm,
    ValueError,
    VerificationError,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""None but `ValueError` is one; an error of ours is none of them."""
