"""A package appears under its final name when it is whole, or not at all: a full disk, an interrupt, a lying source."""

from __future__ import annotations

import io
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from glasshouse.errors import Code, GlasshouseError, PackageError, UsageError
from glasshouse.jobs.owner.home import write_private
from glasshouse.package.write import Source
from simulators.package_world import seal, unlock


def sealing(files: dict[str, bytes]) -> Callable[[BinaryIO], None]:
    def content(out: BinaryIO) -> None:
        seal(files, out=out)

    return content


def test_a_disk_that_the_kernel_says_is_full_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stops the writer where a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        with pytest.raises(UsageError) as refusal:
            write_private(tmp_path / "job.sealed", sealing({"large": bytes(1 << 16)}), replace=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert refusal.value.code is Code.DISK_FULL
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> BinaryIO:
        raise KeyboardInterrupt

    def content(out: BinaryIO) -> None:
        seal(out=out, sources=[Source(path="x", bytes=1, open=interrupted)])

    with pytest.raises(KeyboardInterrupt):
        write_private(tmp_path / "job.sealed", content, replace=False)
    assert not list(tmp_path.iterdir())


def test_a_source_that_grew_leaves_the_old_package_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "job.sealed"
    write_private(target, sealing({"x": b"old"}), replace=False)
    old = target.read_bytes()

    def content(out: BinaryIO) -> None:
        seal(out=out, sources=[Source(path="x", bytes=3, open=lambda: io.BytesIO(b"longer"))])

    with pytest.raises(PackageError) as refusal:
        write_private(target, content, replace=True)
    assert refusal.value.code is Code.SOURCE_CHANGED
    assert target.read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["job.sealed"]
    unlock(old)


def test_a_package_on_disk_is_private_and_whole(tmp_path: Path) -> None:
    target = tmp_path / "job.sealed"
    write_private(target, sealing({"x": bytes(300_000)}), replace=False)
    assert target.stat().st_mode & 0o777 == 0o600
    with target.open("rb") as stream:
        unlock(stream.read())
    with pytest.raises(GlasshouseError):
        write_private(target, sealing({}), replace=False)
