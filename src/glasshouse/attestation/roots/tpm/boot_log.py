"""The firmware's event log, replayed: which values of a TPM's registers it comes to.

Law: nothing of an event counts but its digest; whether that was extended follows from its type, and a log that is wrong
about it comes to other values. Source: TCG PC Client Platform Firmware Profile, section 10.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from glasshouse.attestation.roots.refusing import require
from glasshouse.errors import Code, FormatError

_NO_ACTION, _SHA256 = 3, 0x000B
_SIZES = {0x0004: 20, _SHA256: 32, 0x000C: 48, 0x000D: 64, 0x0012: 32}  # of digests: SHA-1, SHA-2, SM3
_LOCALITY = b"StartupLocality\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class BootLog:
    """What a log says was extended."""

    locality: int  # that the TPM was started from
    events: tuple[tuple[int, bytes], ...]  # register and digest of the bank sha256, in their order

    @classmethod
    def read(cls, log: bytes) -> BootLog:
        """Read a log; raises `FormatError` where it is not read to its last byte."""
        events: list[tuple[int, bytes]] = []
        locality = 0
        try:
            banks, at = _banks(log)
            while at < len(log):
                register, kind, count = struct.unpack_from("<III", log, at)
                require(count <= len(banks), "an event of other banks than its log's")
                at += 12
                digests: dict[int, bytes] = {}
                for _ in range(count):
                    (algorithm,) = struct.unpack_from("<H", log, at)
                    digests[algorithm] = log[at + 2 : at + 2 + _SIZES[algorithm]]
                    at += 2 + _SIZES[algorithm]
                (length,) = struct.unpack_from("<I", log, at)
                data = log[at + 4 : at + 4 + length]
                at += 4 + length
                if kind == _NO_ACTION:
                    locality = data[-1] if data.startswith(_LOCALITY) else locality
                    continue
                is_extended = register <= 23 and digests.keys() == banks
                require(is_extended, "an event of no register, or of other banks than its log's")
                events.append((register, digests[_SHA256]))
        except (struct.error, KeyError):
            raise FormatError(Code.SCHEMA, "an event log that is cut short or not of the crypto-agile form") from None
        require(at == len(log), "an event log that is cut short")
        return cls(locality=locality, events=tuple(events))

    def replay(self) -> dict[int, bytes]:
        """Return the value of each register that it extends."""
        values = {0: bytes(31) + bytes([self.locality])}
        for register, digest in self.events:
            values[register] = hashlib.sha256(values.get(register, bytes(32)) + digest).digest()
        return values


def _banks(log: bytes) -> tuple[set[int], int]:
    """Read the first event, which is in the older form; return the algorithms of the digests, and where it ends."""
    register, kind, digest, size, signature, count = struct.unpack_from("<II20sI16s8xI", log)
    pairs = [struct.unpack_from("<HH", log, 60 + 4 * each) for each in range(min(count, len(_SIZES) + 1))]
    (more,) = struct.unpack_from("<B", log, 60 + 4 * len(pairs))  # what the vendor adds
    banks, end = {algorithm for algorithm, _ in pairs}, 61 + 4 * len(pairs) + more
    found = (register, kind, digest, signature, 32 + size)
    is_agile = found == (0, _NO_ACTION, bytes(20), b"Spec ID Event03\0", end)
    require(is_agile, "an event log that is not of the crypto-agile form")
    is_read = _SHA256 in banks and len(banks) == len(pairs) and all(_SIZES[one] == size for one, size in pairs)
    require(is_read, "an event log without the bank sha256, or with one twice or of another size")
    return banks, end
