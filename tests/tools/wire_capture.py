"""Records every packet of a network namespace, and looks for plaintext in what was recorded."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

__all__ = ["WINDOW_BYTES", "blocks_found", "record"]

WINDOW_BYTES = 16
_ALL_PROTOCOLS = 3
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_BUFFER_BYTES = 256 << 20
_TABLE = np.uint64((1 << 24) - 1)


def record(path: Path, ready: Callable[[], None], stop: int) -> tuple[int, int]:
    """Write every packet on every interface of this namespace to `path` until `stop` can be read.

    Args:
        path: packets behind each other, link-layer headers and all.
        ready: called when recording has begun.
        stop: descriptor whose end means to stop, after what is still queued.

    Returns:
        packets recorded, and packets that the kernel had to drop.
    """
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as tap, path.open("wb") as out:
        for option in (socket.SO_RCVBUF, 33):  # 33: SO_RCVBUFFORCE, beyond the system's limit where we may
            with contextlib.suppress(OSError):
                tap.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        tap.setblocking(False)
        ready()
        buffer, stopping, packets = bytearray(1 << 18), False, 0
        while True:
            readable, _, _ = select.select([tap] if stopping else [tap, stop], [], [], 0.2 if stopping else None)
            stopping = stopping or stop in readable
            if tap in readable:
                size = tap.recv_into(buffer)
                out.write(memoryview(buffer)[:size])
                packets += 1
            elif stopping:
                break
        counted, dropped = struct.unpack("II", tap.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
        return max(packets, counted - dropped), dropped


def blocks_found(plaintexts: Iterable[bytes], captured: Iterable[bytes]) -> int:
    """Return how many different blocks of `WINDOW_BYTES` of the plaintexts occur anywhere in what was captured.

    A block begins at any multiple of four bytes of a plaintext, as tensors' elements do, and is found at any byte of
    the capture. Blocks of fewer than eight different bytes, such as zeros, are in every packet and are left out.
    """
    known = _blocks(plaintexts)
    if not len(known):
        raise ValueError("nothing to look for")
    # Most of what is captured begins no block: a look into a table says so, before anything is compared.
    begins = np.zeros(1 << 24, bool)
    begins[known[:, 0] & _TABLE] = True
    wanted = np.unique(_mixed(known[:, 0], known[:, 1]))
    found = np.zeros(len(wanted), bool)
    for data in captured:
        for offset in range(8 if len(data) >= WINDOW_BYTES else 0):
            words = np.frombuffer(data, "<u8", count=(len(data) - offset) // 8, offset=offset)
            places = np.flatnonzero(begins[words[:-1] & _TABLE])
            found |= np.isin(wanted, _mixed(words[places], words[places + 1]))
    return int(found.sum())


def _mixed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return one word for the two of each block; for different blocks it is the same with a chance of about 2^-64."""
    return first * np.uint64(0x9E3779B97F4A7C15) ^ (second * np.uint64(0xC2B2AE3D27D4EB4F) + (first >> np.uint64(32)))


def _blocks(plaintexts: Iterable[bytes]) -> np.ndarray:
    """Return the blocks as rows of two 64-bit words."""
    rows = [np.empty((0, 2), "<u8")]
    for plaintext in {*plaintexts}:
        for offset in range(0, min(WINDOW_BYTES, max(0, len(plaintext) - WINDOW_BYTES + 1)), 4):
            count = (len(plaintext) - offset) // WINDOW_BYTES
            blocks = np.frombuffer(plaintext, np.uint8, count * WINDOW_BYTES, offset).reshape(count, WINDOW_BYTES)
            ordered = np.sort(blocks, axis=1)
            varied = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) >= 8
            rows.append(blocks[varied].copy().view("<u8"))
    return np.concatenate(rows)
