# ruff: noqa: N803 - compile-time constants are written in capitals
"""The ChaCha20 block function for kernels (RFC 8439, 2.3): one lane makes one block of 64 bytes.

Laws: words are uint32 and little-endian; only additions, exclusive ors and rotations by constants, so that neither time
nor addresses depend on key or data.
"""

from __future__ import annotations

import triton.language as tl

from glasshouse.collectives.kernels.jit import jit


@jit
def _quarter(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tuple:
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@jit
def _double_round(x: tl.tuple) -> tl.tuple:
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = x
    x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
    x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
    x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
    x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
    x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
    x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
    x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
    x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@jit
def block(key: tl.tuple, counter: tl.tensor, UNROLLED: tl.constexpr) -> tl.tuple:
    """Return the sixteen words of key stream at `counter`; UNROLLED is fast, and a thousand instructions long."""
    k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2 = key
    zero = counter - counter
    x = (
        zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574,
        zero + k0, zero + k1, zero + k2, zero + k3, zero + k4, zero + k5, zero + k6, zero + k7,
        counter, zero + n0, zero + n1, zero + n2,
    )  # fmt: skip
    if UNROLLED:
        for _ in tl.static_range(10):
            x = _double_round(x)
    else:
        for _ in range(10):
            x = _double_round(x)
    return (
        x[0] + 0x61707865, x[1] + 0x3320646E, x[2] + 0x79622D32, x[3] + 0x6B206574,
        x[4] + k0, x[5] + k1, x[6] + k2, x[7] + k3,
        x[8] + k4, x[9] + k5, x[10] + k6, x[11] + k7,
        x[12] + counter, x[13] + n0, x[14] + n1, x[15] + n2,
    )  # fmt: skip


@jit
def load_key(keys: tl.tensor, message: tl.tensor, STRIDE: tl.constexpr) -> tl.tuple:
    """Return key (8 words) and nonce (3 words) of a message."""
    row = keys + message.to(tl.int64) * STRIDE
    return (
        tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3),
        tl.load(row + 4), tl.load(row + 5), tl.load(row + 6), tl.load(row + 7),
        tl.load(row + 8), tl.load(row + 9), tl.load(row + 10),
    )  # fmt: skip
