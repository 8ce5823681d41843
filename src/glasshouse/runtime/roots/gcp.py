"""Collects the evidence of kind `gcp`: a token of Google's, for which the launcher of Confidential Space asks.

Source: spec/hardware-evidence.md, section 7.6; google/go-tpm-tools, launcher/teeserver.
"""

from __future__ import annotations

import json
from pathlib import Path

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.gcp.gcp_blob import MAX_TOKEN_BYTES, is_token
from glasshouse.attestation.roots.kinds import GCP_AUDIENCE, KINDS
from glasshouse.runtime.roots.collectors import unavailable, why_of
from glasshouse.runtime.roots.unix_http import ask


class GcpCollector:
    """Asks the launcher for a token; Google's service makes it, of what the launcher shows it.

    Args:
        launcher: path of its socket.
    """

    kind = "gcp"

    def __init__(self, launcher: str = KINDS["gcp"].offered_by[0]) -> None:
        self._launcher = Path(launcher)

    def look(self) -> str:
        """Say what is missing."""
        if self._launcher.is_socket():
            return ""
        return f"this is no container of Confidential Space: its launcher's socket {self._launcher} is not here"

    def prepare(self) -> None:
        """Nothing is opened before it is used."""

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """Return the blob; raises `PlatformError`."""
        del credential
        wanted = {"audience": GCP_AUDIENCE, "nonces": [bound.gcp_nonce], "token_type": "PKI"}
        try:
            # Room for the head of the answer.
            token = ask(self._launcher, "/v1/token", json.dumps(wanted).encode(), max_bytes=2 * MAX_TOKEN_BYTES)
        except OSError as error:
            why = why_of(error) if error.errno else "no answer in time"
            raise unavailable(f"the launcher of Confidential Space does not answer: {why}") from None
        except ValueError:
            token = b""
        if not is_token(token):
            raise unavailable(
                "the launcher of Confidential Space gave no token: the machine's service account needs the role "
                "roles/confidentialcomputing.workloadUser, and the machine a way to Google's service"
            )
        return token

    def close(self) -> None:
        """Nothing stays open."""
