"""The firmware's event log, replayed: which values of a TPM's registers it comes to.

Law: nothing of an event counts but its digest; whether that was extended follows from its type, and a log that is wrong
about it comes to other values. Source: TCG PC Client Platform Firmware Profile, section 10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from glasshouse.errors import Code, FormatError

MAX_EVENTS = 4096
_NO_ACTION = 0x00000003
_ALG_SHA256 = 0x000B
_KNOWN = {0x0004: 20, _ALG_SHA256: 32, 0x000C: 48, 0x000D: 64, 0x0012: 32, 0x0027: 32, 0x0028: 48, 0x0029: 64}
_HEADER = b"Spec ID Event03\0"
_LOCALITY = b"StartupLocality\0"
_REGISTERS = 24
_BANKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BootLog:
    """What a log says was extended."""

    locality: int  # that the TPM was started from
    events: tuple[tuple[int, bytes], ...]  # register and digest of the bank sha256, in their order

    @classmethod
    def read(cls, log: bytes) -> BootLog:
        """Read a log; raises `FormatError` where it is not read to its last byte."""
        reader = _LittleEndian(log)
        sizes = _banks(reader)
        events: list[tuple[int, bytes]] = []
        locality, count = 0, 0
        while not reader.is_done:
            register, kind = reader.number(4), reader.number(4)
            digests = _digests(reader, sizes)
            data = reader.take(reader.number(4))
            count += 1
            if count > MAX_EVENTS:
                raise FormatError(Code.SCHEMA, f"an event log of more than {MAX_EVENTS} events")
            if kind != _NO_ACTION:
                if register >= _REGISTERS or len(digests) != len(sizes):
                    raise FormatError(Code.SCHEMA, "an event of no register, or without the digest of a bank")
                events.append((register, digests[_ALG_SHA256]))
            elif data.startswith(_LOCALITY):
                if register != 0 or any(at == 0 for at, _ in events) or len(data) != len(_LOCALITY) + 1:
                    raise FormatError(Code.SCHEMA, "a locality of startup that comes late or is of another register")
                locality = data[-1]
        return cls(locality=locality, events=tuple(events))

    def replay(self) -> dict[int, bytes]:
        """Return the value of each register that it extends."""
        values: dict[int, bytes] = {}
        for register, digest in self.events:
            before = values.get(register, bytes(31) + bytes([self.locality if register == 0 else 0]))
            values[register] = hashlib.sha256(before + digest).digest()
        return values


def _digests(reader: _LittleEndian, sizes: Mapping[int, int]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for _ in range(min(reader.number(4), _BANKS)):
        algorithm = reader.number(2)
        if algorithm not in sizes or algorithm in found:
            raise FormatError(Code.SCHEMA, "an event whose digest is of no bank of its log, or there twice")
        found[algorithm] = reader.take(sizes[algorithm])
    return found


def _banks(reader: _LittleEndian) -> dict[int, int]:
    """Read the first event, which is in the older form; return the size of each bank's digests."""
    if reader.take(28) != b"\0\0\0\0" + _NO_ACTION.to_bytes(4, "little") + bytes(20):
        raise FormatError(Code.SCHEMA, "an event log that is not of the crypto-agile form")
    size = reader.number(4)
    specification = _LittleEndian(reader.take(size))
    if specification.take(len(_HEADER)) != _HEADER:
        raise FormatError(Code.SCHEMA, "an event log that is not of the crypto-agile form")
    specification.take(8)  # class of the platform, version, size of addresses
    banks = [(specification.number(2), specification.number(2)) for _ in range(min(specification.number(4), _BANKS))]
    specification.take(specification.number(1))
    sizes = dict(banks)
    if not specification.is_done or len(sizes) != len(banks) or _ALG_SHA256 not in sizes:
        raise FormatError(Code.SCHEMA, "an event log without the bank sha256, or whose banks are not read")
    if any(_KNOWN.get(algorithm) != length for algorithm, length in banks):
        raise FormatError(Code.SCHEMA, "an event log with a bank of an unknown algorithm or size")
    return sizes


class _LittleEndian:
    """Takes little-endian fields; raises `FormatError` where the data ends early."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_done(self) -> bool:
        """Whether nothing is left."""
        return self._at == len(self._data)

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        self._at += length
        if self._at > len(self._data):
            raise FormatError(Code.SCHEMA, "an event log that is cut short")
        return self._data[self._at - length : self._at]

    def number(self, length: int) -> int:
        """Return an unsigned number of so many bytes."""
        return int.from_bytes(self.take(length), "little")
