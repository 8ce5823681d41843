# ruff: noqa: N803 - compile-time constants are written in capitals
"""The two kernels that seal or open many messages in two launches: `bulk`, and `finish` behind it on the same stream.

In `bulk` one lane makes one block of key stream, applies it, and folds the block of ciphertext into its own sum; a
program of LANES lanes walks over a segment of neighbouring blocks, `steps` of them for each lane. Slots are
right-aligned: where a message does not fill its segments, the first slots are empty, so that every lane multiplies by
the same powers of r. A program leaves one number behind, the value of its segment as a polynomial in r.

In `finish` one program ends one message: the last bytes (fewer than 64), then the tag. Every 16 bytes of associated
data, every segment, every 16 bytes of the tail and the block of lengths is multiplied by a known power of r; lanes do
that side by side, and the sum is the tag. When opening, the tag is compared in constant time; where it is another, the
whole output is zeroed before anything behind on the stream can see it.

Laws: addresses, masks and branches depend on lengths, positions and the verdict alone, never on key or data
(tests/unit/collectives/test_collectives_kernels_compiled.py follows every register of the compiled code). `finish`
wipes its row of the key table and the numbers that `bulk` left, from which r could be had.

A row of `messages` holds eight int64: the addresses of source, destination and tag, the length in bytes, the address
and the length of the associated data, the number of segments, and zero, where `finish` writes 1 if the tag is right. A
row of `keys` holds sixteen uint32: key (8), nonce (3), zeros.
"""

from __future__ import annotations

import triton.language as tl

from glasshouse.collectives.kernels.rfc8439 import (
    block,
    carried,
    choose,
    clamped,
    jit,
    kernel,
    limbs,
    load_key,
    multiply,
    product,
    tag_words,
)


@jit
def _load(base: tl.tensor, offsets: tl.tensor, valid: tl.tensor, UNIT: tl.constexpr) -> tl.tuple:
    """Load words at offsets in words; UNIT is the width in bytes to which the address is known to be aligned."""
    if UNIT == 1:
        at = base.to(tl.pointer_type(tl.uint8)) + offsets * 4
        word = tl.load(at, mask=valid, other=0).to(tl.uint32)
        for byte in tl.static_range(1, 4):
            word |= tl.load(at + byte, mask=valid, other=0).to(tl.uint32) << (8 * byte)
    else:
        at = base.to(tl.pointer_type(tl.uint32))
        if UNIT == 16:
            at = tl.multiple_of(at, 16)
        word = tl.load(at + offsets, mask=valid, other=0)
    return word


@jit
def _store(base: tl.tensor, offsets: tl.tensor, word: tl.tensor, valid: tl.tensor, UNIT: tl.constexpr) -> None:
    if UNIT == 1:
        at = base.to(tl.pointer_type(tl.uint8)) + offsets * 4
        for byte in tl.static_range(4):
            tl.store(at + byte, (word >> (8 * byte)).to(tl.uint8), mask=valid)
    else:
        at = base.to(tl.pointer_type(tl.uint32))
        if UNIT == 16:
            at = tl.multiple_of(at, 16)
        tl.store(at + offsets, word, mask=valid)


@jit
def _apart(tile: tl.tensor, LANES: tl.constexpr) -> tl.tuple:
    """Return the four columns of a [LANES, 4] tile; each lane holds its row, so nothing moves."""
    even, odd = tl.split(tl.reshape(tile, (LANES, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@jit
def _together(w: tl.tuple, LANES: tl.constexpr) -> tl.tensor:
    return tl.reshape(tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3])), (LANES, 4))


@jit
def _xor(x: tl.tuple, d: tl.tuple) -> tl.tuple:
    return x[0] ^ d[0], x[1] ^ d[1], x[2] ^ d[2], x[3] ^ d[3]


@kernel(unspecialised=("steps", "most_segments"))
def bulk(
    messages: tl.tensor, keys: tl.tensor, parts: tl.tensor, steps: tl.tensor, most_segments: tl.tensor,
    SEAL: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr, LANES_LOG2: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the key stream to the whole blocks of messages, and leave the value of each segment in `parts`."""
    message, segment = tl.program_id(0), tl.program_id(1)
    row = messages + message.to(tl.int64) * 8
    segments = tl.load(row + 6)
    if segment >= segments:
        return
    source, destination = tl.load(row), tl.load(row + 1)
    blocks = tl.load(row + 3) // 64
    # The number of lane 0's block in step 0; below zero where slots stand empty.
    first = blocks - (segments - segment) * steps * LANES
    key = load_key(keys, message, 16)
    r = clamped(block(key, key[0] - key[0], False)[0:4])
    p = multiply(r, r)  # r^2
    q = multiply(p, r)  # r^3
    # From one step of a lane to its next: r^(4 · LANES).
    j = multiply(p, p)
    for _ in range(LANES_LOG2):
        j = multiply(j, j)

    lane = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint32)
    a = (zero, zero, zero, zero, zero)
    column = tl.arange(0, 4)[None, :]
    step = tl.maximum(-first, 0) // LANES  # steps that are empty in every lane are passed over
    while step < steps:
        number = first + step * LANES + lane
        valid = number >= 0
        offsets = number[:, None] * 16 + column
        tile_valid = valid[:, None]
        d = _apart(_load(source, offsets, tile_valid, UNIT), LANES)
        e = _apart(_load(source, offsets + 4, tile_valid, UNIT), LANES)
        f = _apart(_load(source, offsets + 8, tile_valid, UNIT), LANES)
        g = _apart(_load(source, offsets + 12, tile_valid, UNIT), LANES)
        # Block 0 of the key stream is the one-time key. Narrow accesses take longer than a rolled loop does.
        x = block(key, (number + 1).to(tl.uint32), UNIT == 16)
        xd, xe, xf, xg = _xor(x[0:4], d), _xor(x[4:8], e), _xor(x[8:12], f), _xor(x[12:16], g)
        _store(destination, offsets, _together(xd, LANES), tile_valid, UNIT)
        _store(destination, offsets + 4, _together(xe, LANES), tile_valid, UNIT)
        _store(destination, offsets + 8, _together(xf, LANES), tile_valid, UNIT)
        _store(destination, offsets + 12, _together(xg, LANES), tile_valid, UNIT)
        if SEAL:  # what is authenticated is the ciphertext
            d, e, f, g = xd, xe, xf, xg
        # acc · r^(4 · LANES) + c0 · r^3 + c1 · r^2 + c2 · r + c3, carried once.
        z = (a[0] - a[0]).to(tl.uint64)
        s = product((z, z, z, z, z), a, j)
        s = product(s, limbs(d, 0x1000000), q)
        s = product(s, limbs(e, 0x1000000), p)
        s = product(s, limbs(f, 0x1000000), r)
        a, c = carried(s), limbs(g, 0x1000000)
        # An empty slot leaves the sum what it was: nothing.
        a = choose(
            valid,
            (a[0] + c[0], a[1] + c[1], a[2] + c[2], a[3] + c[3], a[4] + c[4]),
            (zero, zero, zero, zero, zero),
        )
        step += 1

    # Lane l's last block lies 4 · (LANES - 1 - l) blocks of 16 bytes before the segment's end.
    j = multiply(p, p)
    behind = (LANES - 1) - lane
    for bit in range(LANES_LOG2):
        a = choose(((behind >> bit) & 1) != 0, multiply(a, j), a)
        j = multiply(j, j)
    part = parts + (message.to(tl.int64) * most_segments + segment) * 5
    for limb in tl.static_range(5):
        tl.store(part + limb, tl.sum(a[limb].to(tl.uint64)))


@jit
def _word(
    stream: tl.tensor, source: tl.tensor, destination: tl.tensor, tail_at: tl.tensor, length: tl.tensor,
    is_tail: tl.tensor, associated: tl.tensor, heading_at: tl.tensor, associated_bytes: tl.tensor,
    SEAL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return four bytes of associated data or of the tail's ciphertext, and apply the key stream to the tail's.

    A lane has one or the other; beyond the end of either is zero.
    """
    word = stream - stream
    for byte in tl.static_range(4):
        in_tail = is_tail & (tail_at + byte < length)
        data = tl.load(source + tail_at + byte, mask=in_tail, other=0).to(tl.uint32)
        applied = data ^ ((stream >> (8 * byte)) & 0xFF)
        tl.store(destination + tail_at + byte, applied.to(tl.uint8), mask=in_tail)
        if SEAL:
            data = applied
        heading = tl.load(associated + heading_at + byte, mask=heading_at + byte < associated_bytes, other=0)
        word |= (heading.to(tl.uint32) | tl.where(in_tail, data, 0)) << (8 * byte)
    return word


@jit
def _select(tail: tl.tensor, y0: tl.tensor, y1: tl.tensor, y2: tl.tensor, y3: tl.tensor) -> tl.tensor:
    return tl.where(tail == 0, y0, tl.where(tail == 1, y1, tl.where(tail == 2, y2, y3)))


@jit
def _zero(destination: tl.tensor, length: tl.tensor, LANES: tl.constexpr) -> None:
    at = length - length
    while at < length:
        zeroed = at + tl.arange(0, 16 * LANES)
        tl.store(destination + zeroed, tl.zeros([16 * LANES], tl.uint8), mask=zeroed < length)
        at += 16 * LANES


@kernel(unspecialised=("steps", "most_segments", "bits"))
def finish(
    messages: tl.tensor, keys: tl.tensor, parts: tl.tensor, steps: tl.tensor, most_segments: tl.tensor,
    bits: tl.tensor, SEAL: tl.constexpr, BULK_LANES: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Apply the key stream to the tails of messages, and write or compare their tags."""
    message = tl.program_id(0)
    row = messages + message.to(tl.int64) * 8
    source = tl.load(row).to(tl.pointer_type(tl.uint8))
    destination = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    length = tl.load(row + 3)
    associated = tl.load(row + 4).to(tl.pointer_type(tl.uint8))
    associated_bytes = tl.load(row + 5)
    segments = tl.load(row + 6)
    tails = (length % 64 + 15) // 16
    headings = (associated_bytes + 15) // 16

    key = load_key(keys, message, 16)
    one_time = block(key, key[0] - key[0], False)
    r = clamped(one_time[0:4])
    y = block(key, (length // 64 + 1).to(tl.uint32), False)

    lane = tl.arange(0, LANES)
    zero = tl.zeros([LANES], tl.uint64)
    e = (zero, zero, zero, zero, zero)
    start = length - length
    while start < headings + segments + tails + 1:
        index = start + lane
        part = index - headings
        tail = part - segments
        is_part = (part >= 0) & (part < segments)
        is_tail = (tail >= 0) & (tail < tails)
        is_end = tail == tails

        at = (length // 64) * 64 + tail * 16
        s0, s1 = _select(tail, y[0], y[4], y[8], y[12]), _select(tail, y[1], y[5], y[9], y[13])
        s2, s3 = _select(tail, y[2], y[6], y[10], y[14]), _select(tail, y[3], y[7], y[11], y[15])
        head = index * 16
        z0 = _word(s0, source, destination, at, length, is_tail, associated, head, associated_bytes, SEAL)
        z1 = _word(s1, source, destination, at + 4, length, is_tail, associated, head + 4, associated_bytes, SEAL)
        z2 = _word(s2, source, destination, at + 8, length, is_tail, associated, head + 8, associated_bytes, SEAL)
        z3 = _word(s3, source, destination, at + 12, length, is_tail, associated, head + 12, associated_bytes, SEAL)
        z0 = tl.where(is_end, associated_bytes.to(tl.uint32), z0)
        z1 = tl.where(is_end, (associated_bytes >> 32).to(tl.uint32), z1)
        z2 = tl.where(is_end, length.to(tl.uint32), z2)
        z3 = tl.where(is_end, (length >> 32).to(tl.uint32), z3)
        c = limbs((z0, z1, z2, z3), 0)
        high = tl.where((part < 0) | is_tail | is_end, 0x1000000, 0).to(tl.uint32)
        left = parts + (message.to(tl.int64) * most_segments + part) * 5
        b = carried(
            (
                tl.load(left, mask=is_part, other=0) + c[0],
                tl.load(left + 1, mask=is_part, other=0) + c[1],
                tl.load(left + 2, mask=is_part, other=0) + c[2],
                tl.load(left + 3, mask=is_part, other=0) + c[3],
                tl.load(left + 4, mask=is_part, other=0) + (c[4] + high),
            )
        )
        for limb in tl.static_range(5):
            tl.store(left + limb, zero, mask=is_part)

        # The block of lengths is multiplied by r once, what lies before it more often.
        of_end = tl.where(is_tail | is_end, tails + 1 - tail, 0)
        of_part = tails + 2 + (segments - 1 - part) * steps * (4 * BULK_LANES)
        of_heading = (length + 15) // 16 + 1 + headings - index
        power = tl.where(part < 0, of_heading, tl.where(is_part, of_part, of_end))
        j = r
        bit = bits - bits
        while bit < bits:
            b = choose(((power >> bit) & 1) != 0, multiply(b, j), b)
            j = multiply(j, j)
            bit += 1
        e = (e[0] + b[0], e[1] + b[1], e[2] + b[2], e[3] + b[3], e[4] + b[4])
        start += LANES

    w = tag_words((tl.sum(e[0]), tl.sum(e[1]), tl.sum(e[2]), tl.sum(e[3]), tl.sum(e[4])), one_time[4:8])
    byte = tl.arange(0, 16)
    word = _select(byte // 4, w[0], w[1], w[2], w[3])
    computed = ((word >> ((byte % 4) * 8).to(tl.uint32)) & 0xFF).to(tl.uint8)
    tag = tl.load(row + 2).to(tl.pointer_type(tl.uint8)) + byte
    tl.debug_barrier()  # every warp has read the key, and stored its bytes of the tail
    tl.store(keys + message.to(tl.int64) * 16 + byte, tl.zeros([16], tl.uint32))
    if SEAL:
        tl.store(tag, computed)
    else:
        same = tl.sum((tl.load(tag) ^ computed).to(tl.int32)) == 0
        tl.store(row + 7, same.to(tl.int64))
        if not same:
            _zero(destination, length, LANES)
