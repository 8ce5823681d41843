"""Opening: anywhere, any length, into any memory; and nothing at all of what a host has touched."""

from __future__ import annotations

import gzip
import io
import random
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glasshouse.errors import Code, GlasshouseError, PackageError
from glasshouse.package import streams
from glasshouse.package.content import find, granted_asset, open_stream, verify_content
from glasshouse.package.layout import HEADER_BYTES, Header
from glasshouse.package.read import Package
from glasshouse.package.streams import AssetReader, Positioned
from glasshouse.wire.crypto import Suite
from simulators.package_world import CHUNK, FILES, KEY, OWNER, STRANGER, fixed, reader, seal, unlock

RECORDS = FILES["data/records"]


def code_of(data: bytes, key: bytes = KEY) -> Code | None:
    """Return why a package is refused, or None when all of it opens."""
    try:
        package, index = unlock(data, key)
        for entry in index.assets:
            verify_content(package.asset(entry, key))
    except GlasshouseError as error:
        return error.code
    return None


@pytest.mark.parametrize("suite", list(Suite))
@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1), (0, CHUNK), (1, CHUNK), (CHUNK - 1, 2), (CHUNK, 2 * CHUNK), (5, 3 * CHUNK), (3 * CHUNK, 100), (3171, 1)],
)
def test_any_part_is_read_in_its_place(suite: Suite, offset: int, length: int) -> None:
    data, _ = seal(suite=suite)
    out = bytearray(b"\xee" * (length + 2))
    assert reader(data, "data/records").read_into(offset, memoryview(out)[1:-1]) == length
    assert out == b"\xee" + RECORDS[offset : offset + length] + b"\xee"


def test_the_end_of_an_asset_is_not_an_error() -> None:
    asset = reader(seal()[0], "data/records")
    out = bytearray(200)
    assert asset.read_into(len(RECORDS) - 50, out) == 50
    assert out == RECORDS[-50:] + bytes(150)
    assert asset.read_into(len(RECORDS), out) == 0
    assert asset.read_into(1 << 60, out) == 0
    with pytest.raises(ValueError, match="negative"):
        asset.read_into(-1, out)


def test_an_empty_asset_is_there_and_is_checked() -> None:
    data, _ = seal()
    with reader(data, "data/empty") as asset:
        verify_content(asset)
        assert asset.read_into(0, bytearray(5)) == 0
        assert open_stream(asset).read() == b""


def test_every_kind_of_memory_is_a_destination() -> None:
    numbers = np.arange(256, dtype="<f4")
    asset = reader(seal({"x": numbers.tobytes()})[0], "x")
    target = np.zeros((16, 16), dtype="<f4")
    assert asset.read_into(0, target) == 1024
    assert np.array_equal(target.ravel(), numbers)
    scalar = np.zeros((), dtype="<f4")
    assert asset.read_into(40, scalar) == 4
    assert scalar == 10
    words = array("I", bytes(64))
    assert asset.read_into(0, words) == 64
    assert words.tobytes() == numbers.tobytes()[:64]
    assert asset.read_into(0, np.zeros((0, 3))) == 0


def test_a_tensors_storage_is_a_destination() -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(1000, dtype=torch.float32).to(torch.bfloat16)
    data, _ = seal({"x": values.view(torch.uint8).numpy().tobytes()})
    target = torch.empty(1000, dtype=torch.bfloat16)
    assert reader(data, "x").read_into(0, target.view(torch.uint8).numpy()) == 2000
    assert torch.equal(target, values)


@pytest.mark.parametrize("target", [b"read-only", np.zeros((4, 4))[:, :2]], ids=["read-only", "not contiguous"])
def test_memory_that_cannot_be_filled_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="writable and contiguous"):
        reader(seal()[0], "weights").read_into(0, target)


def test_a_package_cut_anywhere_is_refused() -> None:
    data, _ = seal()
    for length in [*range(120), *range(120, len(data), 97), len(data) - 1]:
        expected = Code.PACKAGE_MAGIC if length < 8 else Code.PACKAGE_TRUNCATED
        assert code_of(data[:length]) is expected, length
    assert code_of(data + b"\x00") is Code.PACKAGE_TAMPERED


@pytest.mark.parametrize("suite", list(Suite))
def test_a_flipped_bit_anywhere_is_refused(suite: Suite) -> None:
    data, sealed = seal(suite=suite)
    front = HEADER_BYTES + len(sealed.envelope)
    choose = random.Random(7)
    places = [*range(HEADER_BYTES), *choose.sample(range(HEADER_BYTES, front), 60), *range(front, len(data), 41)]
    for at in places:
        spoiled = bytearray(data)
        spoiled[at] ^= 1 << choose.randrange(8)
        assert code_of(bytes(spoiled)) is not None, at


def test_a_wrong_key_never_reaches_a_cipher(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = seal()
    package = Package.open(io.BytesIO(data))

    def forbidden(**_: object) -> None:
        raise AssertionError("a cipher was made before the commitment was checked")

    monkeypatch.setattr("glasshouse.package.streams.bound_cipher", forbidden)
    for wrong in (fixed("wrong", 32), b"", KEY + b"\x00"):
        with pytest.raises(PackageError) as refusal:
            package.unlock(wrong)
        assert refusal.value.code is Code.KEY_COMMITMENT


def test_another_owners_package_is_refused_although_it_is_whole() -> None:
    theirs, _ = seal(owner=STRANGER)
    Package.open(io.BytesIO(theirs))
    with pytest.raises(PackageError) as refusal:
        Package.open(io.BytesIO(theirs), owner_signing=OWNER.public)
    assert refusal.value.code is Code.PACKAGE_OWNER


def test_no_length_is_believed_before_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = seal()
    asked: list[int] = []
    real = Positioned.read_exactly
    monkeypatch.setattr(
        Positioned, "read_exactly", lambda self, at, out: (asked.append(len(out)), real(self, at, out))[1]
    )
    for field in ((12, 4), (16, 4), (20, 8), (28, 8)):
        spoiled = bytearray(data)
        spoiled[field[0] : sum(field)] = b"\xff" * field[1]
        assert code_of(bytes(spoiled)) is Code.PACKAGE_LIMIT
    assert max(asked) == HEADER_BYTES


def test_when_a_late_chunk_is_bad_the_whole_destination_is_zero() -> None:
    data, _ = seal()
    _, index = unlock(data)
    entry = find(index.assets, "data/records")
    spoiled = bytearray(data)
    spoiled[entry.offset + 2 * (CHUNK + 16) + 3] ^= 1
    asset = reader(bytes(spoiled), "data/records")
    out = bytearray(b"\xaa" * (4 * CHUNK))
    with pytest.raises(PackageError) as refusal:
        asset.read_into(0, out)
    assert refusal.value.code is Code.PACKAGE_TAMPERED
    assert out[: len(RECORDS)] == bytes(len(RECORDS))
    part = bytearray(b"\xaa" * 20)
    with pytest.raises(PackageError):
        asset.read_into(2 * CHUNK + 5, part)
    assert part == bytes(20)
    assert asset.read_into(5, part) == 20  # the chunks that are whole stay readable
    assert part == RECORDS[5:25]


def test_a_file_cut_under_the_reader_is_truncated_and_leaves_zeros(tmp_path: Path) -> None:
    path = tmp_path / "job.sealed"
    path.write_bytes(seal()[0])
    with path.open("rb") as stream:
        package = Package.open(stream)
        index = package.unlock(KEY)
        asset = package.asset(find(index.assets, "data/records"), KEY)
        first = bytearray(10)
        asset.read_into(0, first)
        with path.open("r+b") as host:
            host.truncate(find(index.assets, "data/records").offset + CHUNK + 50)
        out = bytearray(b"\xaa" * len(RECORDS))
        with pytest.raises(PackageError) as refusal:
            asset.read_into(0, out)
        assert refusal.value.code is Code.PACKAGE_TRUNCATED
        assert not any(out)


def test_a_file_changed_under_the_reader_is_tampered(tmp_path: Path) -> None:
    path = tmp_path / "job.sealed"
    path.write_bytes(seal()[0])
    with path.open("rb") as stream:
        package = Package.open(stream)
        index = package.unlock(KEY)
        asset = package.asset(find(index.assets, "weights"), KEY)
        verify_content(asset)
        with path.open("r+b") as host:
            host.seek(find(index.assets, "weights").offset + 5)
            host.write(b"changed")
        with pytest.raises(PackageError) as refusal:
            verify_content(asset)
        assert refusal.value.code is Code.PACKAGE_TAMPERED


def test_small_reads_open_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asset = reader(seal()[0], "data/records")
    opened: list[int] = []
    real = asset._open
    monkeypatch.setattr(asset, "_open", lambda index, out: (opened.append(index), real(index, out))[1])
    found = b"".join(bytes(iter_part) for iter_part in parts(asset, 100))
    assert found == RECORDS
    assert opened == [0, 1, 2, 3]


def parts(asset: Any, length: int) -> Any:
    for offset in range(0, asset.size, length):
        out = bytearray(min(length, asset.size - offset))
        asset.read_into(offset, out)
        yield out


def test_closing_wipes_the_plaintext_that_the_reader_holds() -> None:
    asset = reader(seal()[0], "data/records")
    asset.read_into(3, bytearray(10))
    held = asset._scratch
    assert held is not None
    assert any(held)
    asset.close()
    assert not any(held)
    out = bytearray(10)
    asset.read_into(3, out)  # and a later read opens the chunk anew
    assert out == RECORDS[3:13]


def test_the_file_object_seeks_and_reads_like_a_file() -> None:
    with open_stream(reader(seal()[0], "data/records")) as stream:
        assert stream.seekable()
        assert stream.readable()
        assert stream.read(10) == RECORDS[:10]
        assert stream.seek(-5, io.SEEK_END) == len(RECORDS) - 5
        assert stream.read() == RECORDS[-5:]
        assert stream.seek(CHUNK - 3) == CHUNK - 3
        stream.seek(2, io.SEEK_CUR)
        assert stream.read(4) == RECORDS[CHUNK - 1 : CHUNK + 3]
        with pytest.raises(ValueError, match="no such position"):
            stream.raw.seek(-1)


def test_lines_are_read_across_chunks() -> None:
    lines = [f"record {number} {'x' * (number % 90)}\n" for number in range(500)]
    with open_stream(reader(seal({"x": "".join(lines).encode()})[0], "x")) as stream:
        assert list(io.TextIOWrapper(stream)) == lines


def test_a_digest_that_the_index_does_not_know_is_found_by_a_full_read() -> None:
    data, _ = seal()
    package, index = unlock(data)
    asset = package.asset(find(index.assets, "weights"), KEY)
    object.__setattr__(asset.asset.entry, "digest", bytes(32))
    for check in (lambda: verify_content(asset), lambda: verify_content(asset, io.BytesIO())):
        with pytest.raises(PackageError) as refusal:
            check()
        assert refusal.value.code is Code.ASSET_DIGEST


def test_several_threads_share_a_reader_and_a_file(tmp_path: Path) -> None:
    content = fixed("threads", 64 * CHUNK)
    path = tmp_path / "job.sealed"
    path.write_bytes(seal({"x": content})[0])
    wrong: list[int] = []

    def work(asset: Any, seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(200):
            offset, out = choose.randrange(len(content)), bytearray(choose.randrange(1, 3000))
            count = asset.read_into(offset, out)
            if out[:count] != content[offset : offset + len(out)]:
                wrong.append(offset)

    with path.open("rb") as stream:
        package = Package.open(stream)
        index = package.unlock(KEY)
        shared = package.asset(index.assets[0], KEY)
        own = [AssetReader(granted_asset(package.grant(KEY, index), Positioned(stream), "x")) for _ in range(2)]
        threads = [
            threading.Thread(target=work, args=(asset, seed)) for seed, asset in enumerate([shared, shared, *own])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_wrapper_whose_descriptor_is_of_other_bytes_is_read_through_the_wrapper(tmp_path: Path) -> None:
    path = tmp_path / "job.sealed.gz"
    with gzip.open(path, "wb") as out:
        out.write(seal()[0])
    with gzip.open(path, "rb") as stream:
        package = Package.open(stream)  # type: ignore[arg-type]
        index = package.unlock(KEY)
        verify_content(package.asset(find(index.assets, "data/records"), KEY))


def test_sealed_bytes_are_never_mapped(tmp_path: Path) -> None:
    """A map would let the host change a chunk between its authentication and its decryption."""
    path = tmp_path / "job.sealed"
    path.write_bytes(seal()[0])
    with path.open("rb") as stream:
        package = Package.open(stream)
        asset = package.asset(find(package.unlock(KEY).assets, "weights"), KEY)
        verify_content(asset)
        mapped = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
        assert str(path) not in mapped
    assert not hasattr(streams, "mmap")


def test_the_header_has_one_encoding() -> None:
    data, _ = seal()
    header = Header.parse(data)
    assert header.encode() == data[:HEADER_BYTES]
    assert header.total_bytes == len(data)
