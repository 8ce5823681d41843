"""The grant: the keys of a package's assets, and nothing that opens more."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from glasshouse.errors import Code, FormatError, GlasshouseError, PackageError
from glasshouse.package.content import granted_asset, open_stream, verify_content
from glasshouse.package.grant import LENGTH_BYTES, RESUME_PART_BYTES, Grant, Resume, ResumePart
from glasshouse.package.layout import asset_key
from glasshouse.package.streams import AssetReader, Positioned
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import Suite
from simulators.package_world import FILES, KEY, fixed, seal, unlock


def the_grant(suite: Suite = Suite.AES_256_GCM) -> tuple[bytes, Grant]:
    data, _ = seal(suite=suite)
    package, index = unlock(data)
    return data, package.grant(KEY, index)


@pytest.mark.parametrize("suite", list(Suite))
def test_the_worker_opens_every_asset_with_what_it_finds_in_secret_memory(suite: Suite) -> None:
    data, made = the_grant(suite)
    memory = bytearray(1 << 16)
    memory[: len(made.encode())] = made.encode()
    found = Grant.parse(memory)
    assert found == made
    for path, content in FILES.items():
        assert open_stream(AssetReader(granted_asset(found, Positioned(io.BytesIO(data)), path))).read() == content


def test_a_grant_holds_neither_the_package_key_nor_the_indexs() -> None:
    data, made = the_grant()
    package, _ = unlock(data)
    text = made.encode()
    index_key = asset_key(KEY, 0, package.manifest.suite, package.header_sha256)
    from glasshouse.wire.canonical import b64encode

    for secret in (KEY, index_key):
        assert b64encode(secret).encode() not in text
        assert secret not in made.keys
    assert b64encode(made.keys[0]).encode() in text


def test_ranks_find_the_secret_of_their_group_beside_the_keys() -> None:
    data, alone = the_grant()
    package, index = unlock(data)
    made = package.grant(KEY, index, group_secret=bytes(range(32)))
    assert Grant.parse(made.encode() + bytes(9)) == made
    assert made.group_secret == bytes(range(32))
    assert (alone.group_secret, b"group_secret" in alone.encode()) == (None, False)
    assert "group_secret" not in repr(made)


def test_a_leg_finds_the_keys_of_its_ranks_parts_beside_the_others() -> None:
    data, alone = the_grant()
    package, index = unlock(data)
    part = ResumePart(
        bytes=4096,
        chunk_bytes=1024,
        front_sha256=bytes(32),
        key=bytes(range(32)),
        offset=0,
        rank=0,
        suite=Suite.AES_256_GCM,
    )
    largest = replace(part, bytes=2**53 - 1, offset=2**53 - 1, rank=2**53 - 1, suite=Suite.CHACHA20_POLY1305)
    assert len(encode(largest.to_json())) < RESUME_PART_BYTES
    made = package.grant(KEY, index, resume=Resume(parts=(part,), seq=3, step=30))
    assert Grant.parse(made.encode() + bytes(9)) == made
    assert (alone.resume, b"resume" in alone.encode()) == (None, False)
    assert "key=" not in repr(made.resume)


def test_a_group_secret_of_another_length_is_refused() -> None:
    _, made = the_grant()
    with pytest.raises(FormatError):
        replace(made, group_secret=bytes(31))


def test_a_grant_shows_no_key_when_it_is_printed() -> None:
    _, made = the_grant()
    shown = repr(made)
    assert not any(key.hex() in shown or repr(key) in shown for key in made.keys)
    assert "records" not in shown


def test_an_asset_that_was_not_granted_does_not_open() -> None:
    data, made = the_grant()
    less = replace(made, assets=made.assets[:1], keys=made.keys[:1])
    with pytest.raises(PackageError) as refusal:
        granted_asset(less, Positioned(io.BytesIO(data)), "weights")
    assert refusal.value.code is Code.ASSET_UNKNOWN


def test_one_assets_key_does_not_open_another() -> None:
    data, made = the_grant()
    crossed = replace(made, keys=made.keys[::-1])
    with pytest.raises(PackageError) as refusal:
        verify_content(AssetReader(granted_asset(crossed, Positioned(io.BytesIO(data)), "weights")))
    assert refusal.value.code is Code.PACKAGE_TAMPERED


def test_what_is_not_a_grant_is_refused() -> None:
    _, made = the_grant()
    text = made.encode()
    body = text[LENGTH_BYTES:]
    cases = [
        b"",
        text[:-1],
        b"\xff" * 16,
        bytes(LENGTH_BYTES) + body,
        encoded({}),
        encoded([]),
        sized(body.replace(b'"id":1', b'"id":0')),
        sized(body.replace(b"weights", b"../weig")),
        sized(body.replace(b'"chunk_bytes":1024', b'"chunk_bytes":1023')),
        sized(body.replace(b'"job":{', b'"job": {')),
    ]
    for case in cases:
        with pytest.raises(GlasshouseError):
            Grant.parse(case)
    with pytest.raises(FormatError):
        replace(made, keys=made.keys[:-1])
    with pytest.raises(FormatError):
        replace(made, keys=(*made.keys[:-1], fixed("short", 31)))


def encoded(value: object) -> bytes:
    return sized(encode(value))  # type: ignore[arg-type]


def sized(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
