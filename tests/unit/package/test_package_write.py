"""Sealing: what goes in comes out, what changes meanwhile is refused, and a failure leaves nothing behind."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError, GlasshouseError, PackageError, UsageError
from glasshouse.package import write as writing
from glasshouse.package.content import open_stream, verify_content
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.package.write import Source, write
from glasshouse.wire.crypto import Suite
from simulators.package_world import (
    BACKUP,
    CHUNK,
    FILES,
    FLOOR,
    KEY,
    OWNER,
    PACKAGE_ID,
    RECIPIENT,
    fixed,
    reader,
    seal,
    source,
    unlock,
)


@pytest.mark.parametrize("suite", list(Suite))
def test_what_was_sealed_is_what_is_opened(suite: Suite) -> None:
    data, sealed = seal(suite=suite)
    package, index = unlock(data)
    assert package.envelope == sealed.envelope
    assert package.manifest == sealed.manifest == parse_signed(sealed.envelope, OWNER.public)
    assert index.job == {"epochs": 3}
    assert [entry.path for entry in index.assets] == sorted(FILES)
    for path, content in FILES.items():
        with reader(data, path) as asset:
            verify_content(asset)
            assert open_stream(asset).read() == content


def test_the_order_of_the_sources_does_not_show() -> None:
    assert seal(dict(reversed(FILES.items())))[0] == seal(FILES)[0]


def test_a_manifest_survives_its_encoding() -> None:
    _, sealed = seal()
    assert Manifest.parse(sealed.manifest.encode()) == sealed.manifest
    assert Manifest.from_json(sealed.manifest.to_json()) == sealed.manifest


def test_nothing_of_the_inside_shows_outside() -> None:
    data, _ = seal({"patients/list": b"the secret of Mrs. Miller" * 50}, job={"label": "oncology"})
    for secret in (b"patients", b"Miller", b"oncology"):
        assert secret not in data


def test_a_large_asset_goes_through_the_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_cores", lambda: 2)
    names: set[str] = set()
    real = writing._Pipeline._seal

    def watching(pipeline: Any, chunk: Any) -> None:
        names.add(threading.current_thread().name)
        real(pipeline, chunk)

    monkeypatch.setattr(writing._Pipeline, "_seal", watching)
    files = {"large": fixed("large", 5 * (1 << 17) + 11), "small": b"x", "second": fixed("second", 1 << 17)}
    data, _ = seal(files, chunk_bytes=1 << 17)
    assert names
    assert threading.main_thread().name not in names
    for path, content in files.items():
        assert open_stream(reader(data, path)).read() == content


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    total = sum(map(len, FILES.values()))
    write(
        io.BytesIO(),
        sources=[source(path, data) for path, data in FILES.items()],
        job={},
        workload="mlp",
        floor=FLOOR,
        owner=OWNER,
        owner_sealing=RECIPIENT.public,
        recipients=[RECIPIENT.public, BACKUP.public],
        package_key=KEY,
        package_id=PACKAGE_ID,
        chunk_bytes=CHUNK,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("real", [b"too short", b"this is longer than announced"])
def test_a_source_of_another_length_than_announced_is_refused(real: bytes) -> None:
    lying = Source(path="x", bytes=15, open=lambda: io.BytesIO(real))
    with pytest.raises(PackageError) as refusal:
        seal(sources=[lying])
    assert refusal.value.code is Code.SOURCE_CHANGED


@pytest.mark.parametrize("how", ["content", "append"])
def test_a_file_changed_while_it_is_sealed_is_refused(tmp_path: Path, how: str) -> None:
    victim = tmp_path / "data"
    victim.write_bytes(fixed("before", 4 * CHUNK))

    class Rewriting(io.FileIO):
        def readinto(self, buffer: Any, /) -> int:
            count = super().readinto(buffer)
            if how == "append":
                with victim.open("ab") as other:
                    other.write(b"more")
            else:
                victim.write_bytes(fixed("after", 4 * CHUNK))
            os.utime(victim, ns=(1, 1))
            return count or 0

    spoiled = Source(path="data", bytes=4 * CHUNK, open=lambda: Rewriting(victim, "rb"))
    with pytest.raises(PackageError) as refusal:
        seal(sources=[spoiled])
    assert refusal.value.code is Code.SOURCE_CHANGED


def test_a_source_that_cannot_be_read_is_the_inputs_fault() -> None:
    def gone() -> io.BytesIO:
        raise FileNotFoundError(2, "No such file or directory")

    class Broken(io.RawIOBase):
        def readinto(self, _: Any, /) -> int:
            raise OSError(5, "Input/output error")

    for opening in (gone, Broken):
        with pytest.raises(UsageError) as refusal:
            seal(sources=[Source(path="x", bytes=1, open=opening)])  # type: ignore[arg-type]
        assert refusal.value.code is Code.FILE_MISSING


HOSTILE = ["/etc/passwd", "../x", "a/../b", "", "a//b", "a/", ".", "a\\b", "a\x00b", "e\u0301", "a" * 256, "a\ud800"]


@pytest.mark.parametrize("path", HOSTILE, ids=ascii)
def test_a_hostile_path_is_refused_at_writing(path: str) -> None:
    with pytest.raises(PackageError) as refusal:
        seal({path: b""})
    assert refusal.value.code is Code.PACKAGE_PATH


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "A"), ("a", "a/b"), ("straße", "STRASSE")])
def test_paths_that_collide_are_refused_at_writing(paths: tuple[str, str]) -> None:
    with pytest.raises(PackageError) as refusal:
        seal(sources=[source(path, b"") for path in paths])
    assert refusal.value.code is Code.PACKAGE_PATH


def test_too_much_is_refused_before_anything_is_written() -> None:
    out = io.BytesIO()
    cases: list[tuple[list[Source], dict[str, Any]]] = [
        ([Source(path="x", bytes=1 << 51, open=io.BytesIO)], {}),
        ([Source(path=f"{number:06}", bytes=0, open=io.BytesIO) for number in range((1 << 14) + 1)], {}),
        ([], {"x": "y" * (1 << 22)}),
    ]
    for many, job in cases:
        with pytest.raises(PackageError) as refusal:
            seal(sources=many, job=job, out=out, chunk_bytes=1 << 20)
        assert refusal.value.code is Code.PACKAGE_LIMIT
    assert out.getvalue() == b""


def test_what_the_owner_cannot_mean_is_refused() -> None:
    cases: list[Callable[[], object]] = [
        lambda: seal(job={"rate": 0.1}),  # type: ignore[dict-item]
        lambda: seal(package_id="no hex"),
        lambda: seal(key=b"short"),
        lambda: seal(chunk_bytes=1000),
    ]
    for case in cases:
        with pytest.raises(GlasshouseError):
            case()


def test_a_recipient_whose_key_is_no_key_is_refused_before_the_training_not_after() -> None:
    with pytest.raises(FormatError) as refusal:
        write(
            io.BytesIO(),
            sources=[],
            job={},
            workload="mlp",
            floor=FLOOR,
            owner=OWNER,
            owner_sealing=RECIPIENT.public,
            recipients=[b"\xff" * 1216],
            package_key=KEY,
            package_id=PACKAGE_ID,
        )
    assert refusal.value.code is Code.SCHEMA


def test_the_plaintext_buffers_are_wiped_even_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    wiped: list[memoryview] = []
    real = writing.zero
    monkeypatch.setattr(writing, "zero", lambda view: (real(view), wiped.append(view)))
    lying = Source(path="x", bytes=3 * CHUNK, open=lambda: io.BytesIO(b"s" * (2 * CHUNK)))
    with pytest.raises(PackageError):
        seal(sources=[lying])
    assert len(wiped) == 4
    assert not any(any(view) for view in wiped)


class Full(io.BytesIO):
    """A file on a disk with room for a few chunks."""

    def write(self, data: Any, /) -> int:
        if self.tell() > 14 * CHUNK:
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("chunk_bytes", [CHUNK, 1 << 17])
def test_what_a_full_disk_kept_is_not_a_package(chunk_bytes: int) -> None:
    out = Full()
    with pytest.raises(OSError, match="No space left"):
        seal({"x": fixed("x", 5 << 17)}, out=out, chunk_bytes=chunk_bytes)
    assert out.getvalue()
    with pytest.raises(PackageError) as refusal:
        unlock(out.getvalue())
    assert refusal.value.code is Code.PACKAGE_MAGIC


def test_what_stood_in_the_file_before_is_gone() -> None:
    out = io.BytesIO(b"old" * 100_000)
    data, _ = seal(out=out)
    assert data == seal()[0]
