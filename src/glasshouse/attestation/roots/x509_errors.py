"""What `cryptography` raises for certificates and lists that cannot be used: altered ones raise each of these."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.verification import VerificationError

X509_ERRORS: tuple[type[Exception], ...] = (
    CryptographyDeprecationWarning,  # a serial number that a later version refuses; where warnings are errors
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
