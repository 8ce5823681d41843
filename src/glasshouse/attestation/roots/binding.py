"""What each kind of hardware evidence has to carry, so that it is of this run and of no other.

Source: spec/hardware-evidence.md, section 3.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from glasshouse.attestation.claims import Gpu
from glasshouse.wire.crypto import lengths_prefixed, sha256

_GPU_LABEL = b"glasshouse gpu nonce v1"
_REPORT_LABEL = b"glasshouse report data v1"
_GCP_LABEL = b"glasshouse gcp nonce v1"
_ACTIVATION_LABEL = b"glasshouse tpm activation v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """What a piece of hardware evidence is compared with."""

    composite: bytes  # 32 bytes, over all claims
    gpus_sha256: bytes = b""  # SHA-256 of the blob `nvidia`; empty where there is none
    gpus: tuple[Gpu, ...] = ()  # that the claims say are in sight
    ak: bytes | None = None  # TPMT_PUBLIC that the challenge request named
    ek: bytes | None = None  # the endorsement key's certificates, as the challenge request named them
    secret: bytes | None = None  # 32 bytes, in the challenge's credential; None where there was none
    is_repeated: bool = False  # long after: activation is not repeated, for its secret is gone

    @property
    def gpu_nonce(self) -> bytes:
        """The nonce of each GPU's and switch's report, 32 bytes."""
        return sha256(lengths_prefixed(_GPU_LABEL, self.composite))

    @property
    def report_data(self) -> bytes:
        """The report data of a processor's report or quote, 64 bytes."""
        return hashlib.sha512(lengths_prefixed(_REPORT_LABEL, self.composite, self.gpus_sha256)).digest()

    @property
    def gcp_nonce(self) -> str:
        """The nonce of a token, 64 hexadecimal digits."""
        return sha256(lengths_prefixed(_GCP_LABEL, self.composite)).hex()


def activation_mac(secret: bytes, composite: bytes) -> bytes:
    """Return what shows that a TPM opened the challenge's credential for this composite, 32 bytes."""
    return hmac.digest(secret, lengths_prefixed(_ACTIVATION_LABEL, composite), "sha256")
