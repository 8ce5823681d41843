"""Arithmetic modulo 2^130 - 5 for kernels (RFC 8439, 2.5), in tuples of five limbs of 26 bits.

Laws: limbs are uint32 below 2^27 + 2^11; a sum of four products stays below 2^60; no branch and no address depends on a
value. A limb of weight 2^130 is one of weight 5, which is why each multiplier brings `5 × limb` along.
"""

from __future__ import annotations

import triton.language as tl

from glasshouse.collectives.kernels.jit import interpreted, jit

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
