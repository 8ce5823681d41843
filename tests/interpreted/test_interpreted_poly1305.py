"""Arithmetic modulo 2^130 - 5, lane by lane, against Python's integers: at random and where carries are longest."""

from __future__ import annotations

import random

import torch
import triton.language as tl

from glasshouse.collectives.kernels.rfc8439 import clamped, kernel, limbs, multiply, tag_words

P = 2**130 - 5
LANES = 64
ONES = 2**26 - 1
random.seed(1305)


@kernel(unspecialised=())
def times(a: tl.tensor, b: tl.tensor, out: tl.tensor, lanes: tl.constexpr) -> None:
    at = tl.arange(0, lanes)
    left = (
        tl.load(a + at), tl.load(a + lanes + at), tl.load(a + 2 * lanes + at), tl.load(a + 3 * lanes + at),
        tl.load(a + 4 * lanes + at),
    )  # fmt: skip
    right = (
        tl.load(b + at), tl.load(b + lanes + at), tl.load(b + 2 * lanes + at), tl.load(b + 3 * lanes + at),
        tl.load(b + 4 * lanes + at),
    )  # fmt: skip
    m0, m1, m2, m3, m4 = multiply(left, right)
    tl.store(out + at, m0)
    tl.store(out + lanes + at, m1)
    tl.store(out + 2 * lanes + at, m2)
    tl.store(out + 3 * lanes + at, m3)
    tl.store(out + 4 * lanes + at, m4)


@kernel(unspecialised=())
def ended(sums: tl.tensor, s: tl.tensor, out: tl.tensor, lanes: tl.constexpr) -> None:
    at = tl.arange(0, lanes)
    total = (
        tl.load(sums + at), tl.load(sums + lanes + at), tl.load(sums + 2 * lanes + at), tl.load(sums + 3 * lanes + at),
        tl.load(sums + 4 * lanes + at),
    )  # fmt: skip
    added = (tl.load(s + at), tl.load(s + lanes + at), tl.load(s + 2 * lanes + at), tl.load(s + 3 * lanes + at))
    w0, w1, w2, w3 = tag_words(total, added)
    tl.store(out + at, w0)
    tl.store(out + lanes + at, w1)
    tl.store(out + 2 * lanes + at, w2)
    tl.store(out + 3 * lanes + at, w3)


@kernel(unspecialised=())
def cut(words: tl.tensor, plain: tl.tensor, clamp: tl.tensor, lanes: tl.constexpr) -> None:
    at = tl.arange(0, lanes)
    t0, t1 = tl.load(words + at), tl.load(words + lanes + at)
    t2, t3 = tl.load(words + 2 * lanes + at), tl.load(words + 3 * lanes + at)
    a0, a1, a2, a3, a4 = limbs((t0, t1, t2, t3), 0)
    b0, b1, b2, b3, b4 = clamped((t0, t1, t2, t3))
    tl.store(plain + at, a0)
    tl.store(plain + lanes + at, a1)
    tl.store(plain + 2 * lanes + at, a2)
    tl.store(plain + 3 * lanes + at, a3)
    tl.store(plain + 4 * lanes + at, a4)
    tl.store(clamp + at, b0)
    tl.store(clamp + lanes + at, b1)
    tl.store(clamp + 2 * lanes + at, b2)
    tl.store(clamp + 3 * lanes + at, b3)
    tl.store(clamp + 4 * lanes + at, b4)


def column(values: list[list[int]], dtype: torch.dtype = torch.uint32) -> torch.Tensor:
    """Return one row a limb, one column a lane."""
    return torch.tensor([value for limb in zip(*values, strict=True) for value in limb], dtype=torch.int64).to(dtype)


def whole(flat: torch.Tensor, bits: int) -> list[int]:
    rows = flat.to(torch.int64).reshape(-1, LANES).tolist()
    return [sum(row[lane] << (bits * index) for index, row in enumerate(rows)) for lane in range(LANES)]


def number(parts: list[int], bits: int = 26) -> int:
    return sum(part << (bits * index) for index, part in enumerate(parts))


def test_a_product_is_the_product_even_of_the_largest_limbs() -> None:
    most = 2**27 + 2**11 - 1  # what `carried` and one addition leave at most
    edges = [[0] * 5, [1, 0, 0, 0, 0], [ONES] * 5, [most] * 5, [ONES - 4, ONES, ONES, ONES, ONES], [0, 0, 0, 0, ONES]]
    one = edges + [[random.randrange(2**27) for _ in range(5)] for _ in range(LANES - len(edges))]
    other = edges[::-1] + [[random.randrange(2**26) for _ in range(5)] for _ in range(LANES - len(edges))]
    one[10], other[10] = [most] * 5, [ONES] * 5
    out = torch.zeros(5 * LANES, dtype=torch.uint32)
    times[(1,)](column(one), column(other), out, LANES)
    assert [value % P for value in whole(out, 26)] == [
        number(a) * number(b) % P for a, b in zip(one, other, strict=True)
    ]
    assert int(out.to(torch.int64).max()) < 2**26 + 2**11


def test_the_end_is_reduced_fully_and_added_modulo_2_to_the_128() -> None:
    # p - 1, p, p + 1, 2^130 - 1, and sums as large as many lanes leave them
    edges = [[ONES - 5, *[ONES] * 4], [ONES - 4, *[ONES] * 4], [ONES - 3, *[ONES] * 4], [ONES] * 5, [0] * 5]
    edges += [[2**44] * 5, [ONES, ONES, ONES, ONES, 2**40 + ONES], [4, 0, 0, 0, 2**26]]
    sums = edges + [[random.randrange(2**40) for _ in range(5)] for _ in range(LANES - len(edges))]
    s = [[2**32 - 1] * 4 if lane % 3 == 0 else [random.randrange(2**32) for _ in range(4)] for lane in range(LANES)]
    out = torch.zeros(4 * LANES, dtype=torch.uint32)
    ended[(1,)](column(sums, torch.uint64), column(s), out, LANES)
    assert whole(out, 32) == [(number(h) % P + number(k, 32)) % 2**128 for h, k in zip(sums, s, strict=True)]


def test_words_become_limbs_and_r_is_clamped() -> None:
    words = [[0] * 4, [2**32 - 1] * 4, *[[random.randrange(2**32) for _ in range(4)] for _ in range(LANES - 2)]]
    plain, clamp = (torch.zeros(5 * LANES, dtype=torch.uint32) for _ in range(2))
    cut[(1,)](column(words), plain, clamp, LANES)
    assert whole(plain, 26) == [number(word, 32) for word in words]
    mask = 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF  # RFC 8439, 2.5.1
    assert whole(clamp, 26) == [number(word, 32) & mask for word in words]
