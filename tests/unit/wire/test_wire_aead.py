"""STREAM under attack: chunks changed, cut, repeated, reordered, spliced; and nothing left in the destination."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, PackageError
from glasshouse.wire.crypto import MAX_CHUNKS, TAG_BYTES, ChunkCipher, Suite, zero

KEY, OTHER_KEY, PREFIX, DATA = b"k" * 32, b"o" * 32, b"prefix7", b"header"
CHUNKS = [b"first chunk.....", b"second chunk....", b"third"]


def cipher(suite: Suite, *, key: bytes = KEY, prefix: bytes = PREFIX, data: bytes = DATA) -> ChunkCipher:
    return ChunkCipher(suite=suite, key=key, prefix=prefix, associated_data=data)


def sealed_stream(suite: Suite, chunks: list[bytes] = CHUNKS, **options: bytes) -> list[bytes]:
    found = []
    sealer = cipher(suite, **options)
    for index, chunk in enumerate(chunks):
        out = bytearray(len(chunk) + TAG_BYTES)
        assert sealer.seal_into(index, last=index == len(chunks) - 1, plaintext=chunk, out=out) == len(out)
        found.append(bytes(out))
    return found


def open_stream(suite: Suite, sealed: list[bytes], **options: bytes) -> list[bytes]:
    opener = cipher(suite, **options)
    found = []
    for index, chunk in enumerate(sealed):
        out = bytearray(b"\xaa" * (len(chunk) - TAG_BYTES))
        try:
            opener.open_into(index, last=index == len(sealed) - 1, sealed=chunk, out=out)
        except PackageError as error:
            if any(out):
                raise AssertionError("unverified plaintext was left in the destination") from error
            raise
        found.append(bytes(out))
    return found


def refused(suite: Suite, sealed: list[bytes], **options: bytes) -> None:
    with pytest.raises(PackageError) as caught:
        open_stream(suite, sealed, **options)
    assert caught.value.code is Code.PACKAGE_TAMPERED


@pytest.fixture(params=list(Suite), ids=str)
def suite(request: pytest.FixtureRequest) -> Suite:
    found: Suite = request.param
    return found


def test_what_was_sealed_opens(suite: Suite) -> None:
    sealed = sealed_stream(suite)
    assert open_stream(suite, sealed) == CHUNKS
    assert all(chunk not in b"".join(sealed) for chunk in CHUNKS)


def test_an_empty_stream_is_one_empty_last_chunk(suite: Suite) -> None:
    sealed = sealed_stream(suite, [b""])
    assert len(sealed[0]) == TAG_BYTES
    assert open_stream(suite, sealed) == [b""]


def test_a_stream_that_was_cut_short(suite: Suite) -> None:
    sealed = sealed_stream(suite)
    refused(suite, sealed[:-1])
    refused(suite, sealed[:1])


def test_a_stream_that_goes_on_after_its_end(suite: Suite) -> None:
    sealed = sealed_stream(suite)
    refused(suite, [*sealed, sealed[-1]])
    refused(suite, [*sealed, sealed_stream(suite, [b""])[0]])


def test_chunks_reordered_repeated_or_dropped(suite: Suite) -> None:
    one, two, three = sealed_stream(suite)
    for wrong in ([two, one, three], [one, one, three], [one, three], [two, three], [three, two, one]):
        refused(suite, wrong)


def test_chunks_of_another_stream_under_the_same_key(suite: Suite) -> None:
    sealed = sealed_stream(suite)
    other = sealed_stream(suite, [b"other chunk.....", *CHUNKS[1:]], prefix=b"PREFIX7")
    refused(suite, [sealed[0], other[1], sealed[2]])
    refused(suite, sealed, prefix=b"PREFIX7")
    refused(suite, sealed, data=b"another header")
    refused(suite, sealed, data=b"")


def test_another_key_or_another_suite(suite: Suite) -> None:
    sealed = sealed_stream(suite)
    refused(suite, sealed, key=OTHER_KEY)
    refused(next(other for other in Suite if other is not suite), sealed)


def test_every_flipped_bit_is_seen_and_leaves_nothing_behind(suite: Suite) -> None:
    sealed = sealed_stream(suite)
    for bit in range(len(sealed[0]) * 8):
        changed = bytearray(sealed[0])
        changed[bit // 8] ^= 1 << bit % 8
        refused(suite, [bytes(changed), *sealed[1:]])


def test_a_bit_moved_between_chunks(suite: Suite) -> None:
    one, two, three = sealed_stream(suite)
    refused(suite, [one + two[:1], two[1:], three])
    refused(suite, [one[:-1], one[-1:] + two, three])


def test_the_destination_is_any_writable_buffer(suite: Suite) -> None:
    sealed = sealed_stream(suite)[0]
    block = bytearray(100)
    window = memoryview(block)[10 : 10 + len(CHUNKS[0])]
    cipher(suite).open_into(0, last=False, sealed=memoryview(sealed), out=window)
    assert bytes(block[10 : 10 + len(CHUNKS[0])]) == CHUNKS[0]
    assert not any(block[:10])


def test_the_last_possible_chunk_and_the_one_after(suite: Suite) -> None:
    out = bytearray(1 + TAG_BYTES)
    cipher(suite).seal_into(MAX_CHUNKS, last=True, plaintext=b"x", out=out)
    for index in (MAX_CHUNKS + 1, -1):
        with pytest.raises(ValueError, match="out of range"):
            cipher(suite).seal_into(index, last=True, plaintext=b"x", out=out)


@pytest.mark.parametrize(("key", "prefix"), [(b"k" * 31, PREFIX), (b"k" * 16, PREFIX), (KEY, b""), (KEY, b"p" * 12)])
def test_keys_and_prefixes_have_one_length(key: bytes, prefix: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        cipher(Suite.AES_256_GCM, key=key, prefix=prefix)


def test_zero_wipes_any_view() -> None:
    block = bytearray(b"secret" * 10)
    zero(memoryview(block)[6:12])
    assert block == b"secret" + bytes(6) + b"secret" * 8
    zero(block)
    assert not any(block)
