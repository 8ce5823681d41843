"""Collects the evidence of kind `dstack`: a quote and the events of RTMR3, from the guest agent's socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.errors import FormatError
from glasshouse.runtime.roots.collectors import unavailable, why_of
from glasshouse.runtime.roots.tdx import without_padding
from glasshouse.runtime.roots.unix_http import ask
from glasshouse.wire.canonical import b64encode, encode

_MAX_BYTES = 2 * 1024 * 1024


class DstackCollector:
    """Asks dstack's agent for a quote; the compose file has to mount its socket.

    Args:
        sockets: paths, of which the first that is there is asked.
    """

    kind = "dstack"

    def __init__(self, sockets: tuple[str, ...] = KINDS["dstack"].offered_by) -> None:
        self._sockets = tuple(map(Path, sockets))

    def look(self) -> str:
        """Say what is missing."""
        if any(path.is_socket() for path in self._sockets):
            return ""
        return "dstack's socket is not here: the compose file has to mount /var/run/dstack.sock"

    def prepare(self) -> None:
        """Nothing is opened before it is used: the agent ends connections that wait."""

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """Return the blob; raises `PlatformError`."""
        del credential
        address = next((each for each in self._sockets if each.is_socket()), self._sockets[0])
        try:
            wanted = json.dumps({"report_data": bound.report_data.hex()}).encode()
            return blob_of(ask(address, "/GetQuote", wanted, max_bytes=_MAX_BYTES))
        except OSError as error:
            raise unavailable(
                f"dstack's agent does not answer: {why_of(error) if error.errno else 'no answer in time'}"
            ) from None
        except (ValueError, TypeError, LookupError, RecursionError, FormatError):
            raise unavailable("dstack's agent gave an answer of another form") from None

    def close(self) -> None:
        """Nothing stays open."""


def blob_of(answer: bytes) -> bytes:
    """Return the blob of an answer to GetQuote; raises `ValueError`, `TypeError`, `LookupError` or `FormatError`."""
    read = json.loads(answer)
    quote = without_padding(bytes.fromhex(read["quote"]))
    events = [_event(one) for one in json.loads(read["event_log"]) if one["imr"] == 3]
    return encode({"events": events, "quote": b64encode(quote)})


def _event(logged: dict[str, Any]) -> dict[str, Any]:
    """Return an event as the blob has it: its digest is made again from these, and from nothing else."""
    payload = b64encode(bytes.fromhex(logged["event_payload"]))
    return {"name": logged["event"], "payload": payload, "version": logged.get("version", 1)}
