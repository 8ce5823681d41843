# ruff: noqa: N803 - compile-time constants are written in capitals
"""What ChaCha20-Poly1305 is made of in kernels (RFC 8439, 2.3 and 2.5), and `triton.jit` with a type.

What is decorated is written as Python and runs as Python only under the interpreter. One lane makes one block of 64
bytes of key stream; Poly1305 is arithmetic modulo 2^130 - 5 in tuples of five limbs of 26 bits.
Laws: no branch and no address depends on key or data. Words are uint32 and little-endian. Limbs are uint32 below
2^27 + 2^11; a sum of four products stays below 2^60. A limb of weight 2^130 is one of weight 5, which is why each
multiplier brings `5 × limb` along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import triton
import triton.language as tl

F = TypeVar("F", bound=Callable[..., Any])


def interpreted() -> bool:
    """Return whether kernels run as Python, in host memory (TRITON_INTERPRET=1): for tests."""
    return bool(triton.knobs.runtime.interpret)


def jit(function: F) -> F:
    """Make a function one that kernels call; it is inlined."""
    made = triton.jit(function)
    # Called as it is, an interpreted function patches Triton's language anew, which takes longer than the call.
    return cast(F, made.rewrite() if interpreted() else made)


def kernel(unspecialised: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a kernel, without variants by the values of some integers: each costs seconds of compiling."""
    return lambda function: triton.jit(function, do_not_specialize=list(unspecialised))


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


INTERPRETED = tl.constexpr(interpreted())


@jit
def clamped(words: tl.tuple) -> tl.tuple:
    """Return the multiplier r of a one-time key's first four words, in limbs."""
    t0, t1, t2, t3 = words
    return (
        t0 & 0x3FFFFFF,
        ((t0 >> 26) | (t1 << 6)) & 0x3FFFF03,
        ((t1 >> 20) | (t2 << 12)) & 0x3FFC0FF,
        ((t2 >> 14) | (t3 << 18)) & 0x3F03FFF,
        (t3 >> 8) & 0x00FFFFF,
    )


@jit
def limbs(words: tl.tuple, high: tl.constexpr) -> tl.tuple:
    """Return the 128 bits of four words in limbs; `high` is 0x1000000 for the bit 2^128 of a full block, else 0."""
    t0, t1, t2, t3 = words
    return (
        t0 & 0x3FFFFFF,
        ((t0 >> 26) | (t1 << 6)) & 0x3FFFFFF,
        ((t1 >> 20) | (t2 << 12)) & 0x3FFFFFF,
        ((t2 >> 14) | (t3 << 18)) & 0x3FFFFFF,
        (t3 >> 8) + high,
    )


@jit
def _add(total: tl.tensor, a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Return total + a · b in 64 bits."""
    if INTERPRETED:
        return total + a.to(tl.uint64) * b.to(tl.uint64)
    # Left to itself the compiler widens what does not change before a loop, forgets that the upper halves are zero, and
    # multiplies them too; and the assembler cuts chains of 64-bit sums into shorter ones that it adds up. Written with
    # a carry each step is one instruction, and a quarter fewer in all.
    return tl.inline_asm_elementwise(
        "{ .reg .u32 lo, hi; mov.b64 {lo, hi}, $3;"
        " mad.lo.cc.u32 lo, $1, $2, lo; madc.hi.u32 hi, $1, $2, hi; mov.b64 $0, {lo, hi}; }",
        "=l,r,r,l",
        [a, b, total],
        dtype=tl.uint64,
        is_pure=True,
        pack=1,
    )


@jit
def product(d: tl.tuple, a: tl.tuple, b: tl.tuple) -> tl.tuple:
    """Return d + a · b as five sums of 64 bits, not carried."""
    a0, a1, a2, a3, a4 = a
    b0, b1, b2, b3, b4 = b
    s1 = b1 * 5
    s2 = b2 * 5
    s3 = b3 * 5
    s4 = b4 * 5
    return (
        _add(_add(_add(_add(_add(d[0], a0, b0), a1, s4), a2, s3), a3, s2), a4, s1),
        _add(_add(_add(_add(_add(d[1], a0, b1), a1, b0), a2, s4), a3, s3), a4, s2),
        _add(_add(_add(_add(_add(d[2], a0, b2), a1, b1), a2, b0), a3, s4), a4, s3),
        _add(_add(_add(_add(_add(d[3], a0, b3), a1, b2), a2, b1), a3, b0), a4, s4),
        _add(_add(_add(_add(_add(d[4], a0, b4), a1, b3), a2, b2), a3, b1), a4, b0),
    )


@jit
def carried(sums: tl.tuple) -> tl.tuple:
    """Return limbs below 2^26, the second one below 2^26 + 2^11, of sums below 2^60."""
    d0, d1, d2, d3, d4 = sums
    d1 += d0 >> 26
    d2 += d1 >> 26
    d3 += d2 >> 26
    d4 += d3 >> 26
    low = (d0 & 0x3FFFFFF) + (d4 >> 26) * 5
    return (
        low.to(tl.uint32) & 0x3FFFFFF,
        (d1.to(tl.uint32) & 0x3FFFFFF) + (low >> 26).to(tl.uint32),
        d2.to(tl.uint32) & 0x3FFFFFF,
        d3.to(tl.uint32) & 0x3FFFFFF,
        d4.to(tl.uint32) & 0x3FFFFFF,
    )


@jit
def multiply(a: tl.tuple, b: tl.tuple) -> tl.tuple:
    """Return a · b in limbs."""
    z = ((a[0] ^ a[0]) & (b[0] ^ b[0])).to(tl.uint64)  # zero, of the shape that the product will have
    return carried(product((z, z, z, z, z), a, b))


@jit
def choose(condition: tl.tensor, yes: tl.tuple, no: tl.tuple) -> tl.tuple:
    """Return the limbs of one of two numbers in each lane, without a branch."""
    return (
        tl.where(condition, yes[0], no[0]),
        tl.where(condition, yes[1], no[1]),
        tl.where(condition, yes[2], no[2]),
        tl.where(condition, yes[3], no[3]),
        tl.where(condition, yes[4], no[4]),
    )


@jit
def tag_words(sums: tl.tuple, s: tl.tuple) -> tl.tuple:
    """Return the tag's four words: the sums modulo 2^130 - 5, plus the four words of s, modulo 2^128."""
    h0, h1, h2, h3, h4 = carried(sums)
    # Twice more, in 32 bits: then every limb is below 2^26.
    for _ in tl.static_range(2):
        h2 += h1 >> 26
        h1 &= 0x3FFFFFF
        h3 += h2 >> 26
        h2 &= 0x3FFFFFF
        h4 += h3 >> 26
        h3 &= 0x3FFFFFF
        h0 += (h4 >> 26) * 5
        h4 &= 0x3FFFFFF
        h1 += h0 >> 26
        h0 &= 0x3FFFFFF
    # h - p where h >= p, without a branch: g = h + 5 has the bit 2^130 just then.
    g0 = h0 + 5
    g1 = h1 + (g0 >> 26)
    g2 = h2 + (g1 >> 26)
    g3 = h3 + (g2 >> 26)
    g4 = h4 + (g3 >> 26)
    keep = (g4 >> 26) - 1  # all ones where h < p
    drop = keep ^ 0xFFFFFFFF
    h0 = (h0 & keep) | (g0 & 0x3FFFFFF & drop)
    h1 = (h1 & keep) | (g1 & 0x3FFFFFF & drop)
    h2 = (h2 & keep) | (g2 & 0x3FFFFFF & drop)
    h3 = (h3 & keep) | (g3 & 0x3FFFFFF & drop)
    h4 = (h4 & keep) | (g4 & 0x3FFFFFF & drop)
    w0 = (h0 | (h1 << 26)).to(tl.uint64) + s[0]
    w1 = ((h1 >> 6) | (h2 << 20)).to(tl.uint64) + s[1] + (w0 >> 32)
    w2 = ((h2 >> 12) | (h3 << 14)).to(tl.uint64) + s[2] + (w1 >> 32)
    w3 = ((h3 >> 18) | (h4 << 8)).to(tl.uint64) + s[3] + (w2 >> 32)
    return w0.to(tl.uint32), w1.to(tl.uint32), w2.to(tl.uint32), w3.to(tl.uint32)
