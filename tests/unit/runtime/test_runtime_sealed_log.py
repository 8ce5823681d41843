"""What leaves the agent for the disk: sealed, whole, and within limits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.package.limits import OutputLimits
from glasshouse.package.outputs import SealedOutput, open_output
from glasshouse.runtime.keys import sealed_log
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.keys.sealed_log import SEGMENT_BYTES, SealedLog
from glasshouse.runtime.keys.sealing import Outputs, Sealing
from glasshouse.runtime.loop import Loop
from glasshouse.wire.crypto import RecipientKey

OWNER = RecipientKey.generate()


class Desk:
    """A folder and to whom it is sealed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "out"
        self.out = OutDir(str(self.folder))
        self.sealing = Sealing(
            recipients=(OWNER.public,), run_id=secrets.token_hex(16), manifest_sha256=secrets.token_bytes(32)
        )

    def opened(self, path: Path) -> tuple[str, bytes]:
        plain = io.BytesIO()
        with path.open("rb", buffering=0) as stream:
            found = open_output(stream, OWNER, run_id=self.sealing.run_id, manifest_sha256=self.sealing.manifest_sha256)
            found.copy_to(plain)
        return found.name, plain.getvalue()

    def files(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).iterdir())


class Printing:
    """A worker that prints, and the log that takes it."""

    def __init__(self, desk: Desk) -> None:
        self.loop, self.desk = Loop(), desk
        self.segments: list[SealedOutput] = []
        out, err = os.pipe(), os.pipe()
        self.writers = [out[1], err[1]]
        self.log = SealedLog(
            (out[0], err[0]), self.loop, out=desk.out, sealing=desk.sealing, sealed=self.segments.append
        )

    def text(self) -> bytes:
        return b"".join(self.desk.opened(path)[1] for path in self.desk.files("log"))

    def end(self) -> None:
        for writer in self.writers:
            os.close(writer)
        self.writers.clear()

    def close(self) -> None:
        self.end()
        self.log.close()
        self.log.memory.close()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def printing(desk: Desk) -> Iterator[Printing]:
    printing = Printing(desk)
    yield printing
    printing.close()


def begins(name: str, size: int) -> dict[str, Any]:
    return {"name": name, "kind": "output", "size": size}


def test_what_is_printed_is_sealed_and_nothing_of_it_stays(printing: Printing) -> None:
    os.write(printing.writers[0], b"a name: Jane Doe\n")
    os.write(printing.writers[1], b"Traceback: Jane Doe\n")
    printing.end()
    printing.log.finish()
    assert sorted(printing.text().splitlines()) == [b"Traceback: Jane Doe", b"a name: Jane Doe"]
    assert printing.log.memory.is_zero()
    assert [segment.sequence for segment in printing.segments] == [0]
    sealed = printing.desk.files("log")[0]
    assert hashlib.sha256(sealed.read_bytes()).digest() == printing.segments[0].sealed_sha256
    assert b"Jane" not in sealed.read_bytes()


def test_a_segment_is_closed_when_it_is_full(printing: Printing) -> None:
    text, written = os.urandom(SEGMENT_BYTES + 1000), 0
    while written < len(text):
        written += os.write(printing.writers[0], text[written : written + 4096])
        printing.loop.step(0)
    printing.log.finish()
    assert printing.text() == text
    assert len(printing.segments) == 2


def test_a_segment_is_closed_when_it_is_old_enough_to_be_waited_for(
    printing: Printing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(printing.log, "_wait_s", 0.02)
    os.write(printing.writers[0], b"one\n")
    assert printing.loop.run_until(lambda: len(printing.segments) == 1, within_s=20)
    os.write(printing.writers[0], b"two\n")
    assert printing.loop.run_until(lambda: len(printing.segments) == 2, within_s=20)
    assert [printing.desk.opened(path)[1] for path in printing.desk.files("log")] == [b"one\n", b"two\n"]


def test_a_quiet_worker_makes_no_segment(printing: Printing) -> None:
    printing.log.finish()
    assert printing.desk.files("log") == []


def test_a_worker_that_prints_without_end_fills_its_share_and_is_not_held_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_log, "TOTAL_BYTES", 10_000)
    printing = Printing(desk)
    for _ in range(100):
        os.write(printing.writers[0], b"x" * 1000)
        printing.loop.step(0)
    printing.log.finish()
    assert printing.text() == b"x" * 10_000 + b"\n[the log is full: what follows was not kept]\n"
    printing.close()


def test_outputs_are_sealed_as_they_come(desk: Desk) -> None:
    outputs, data = Outputs(desk.out, desk.sealing, OutputLimits()), os.urandom(100_000)
    outputs.begin(**begins("adapter/model.safetensors", len(data)))
    assert outputs.in_progress
    for at in range(0, len(data), 7777):
        outputs.data(memoryview(data)[at : at + 7777])
    sealed = outputs.end(hashlib.sha256(data).digest())
    outputs.begin(**begins("empty", 0))
    outputs.end(hashlib.sha256(b"").digest())
    assert [path.name for path in desk.files("outputs")] == ["0000.sealed", "0001.sealed"]
    assert desk.opened(desk.files("outputs")[0]) == ("adapter/model.safetensors", data)
    assert sealed.sha256 == hashlib.sha256(data).digest()
    assert desk.files("outputs")[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("sent", [b"", b"12", b"1234"], ids=["nothing", "less", "more"])
def test_an_output_of_another_length_than_announced_has_failed(desk: Desk, sent: bytes) -> None:
    outputs = Outputs(desk.out, desk.sealing, OutputLimits())
    outputs.begin(**begins("x", 3))

    def send() -> None:
        outputs.data(memoryview(sent))
        outputs.end(hashlib.sha256(sent).digest())

    with pytest.raises(RunError) as caught:
        send()
    assert caught.value.code is Code.WORKER_FAILED
    outputs.discard()
    assert desk.files("outputs") == []


def test_an_output_that_arrived_otherwise_has_failed(desk: Desk) -> None:
    outputs = Outputs(desk.out, desk.sealing, OutputLimits())
    outputs.begin(**begins("x", 1))
    outputs.data(memoryview(b"1"))
    with pytest.raises(RunError) as caught:
        outputs.end(bytes(32))
    assert caught.value.code is Code.WORKER_FAILED


def test_outputs_out_of_turn_are_refused(desk: Desk) -> None:
    outputs = Outputs(desk.out, desk.sealing, OutputLimits())
    for act in (lambda: outputs.data(memoryview(b"x")), lambda: outputs.end(bytes(32))):
        with pytest.raises(RunError):
            act()
    outputs.begin(**begins("x", 1))
    with pytest.raises(RunError):
        outputs.begin(**begins("y", 1))
    outputs.discard()


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [(OutputLimits(count=2), (1, 1, 1)), (OutputLimits(bytes=10), (6, 4, 1)), (OutputLimits(bytes=10), (11,))],
    ids=["one too many", "one byte too many", "one that is too large"],
)
def test_a_job_returns_no_more_than_its_owner_allowed_whatever_the_worker_sends(
    desk: Desk, limits: OutputLimits, sizes: tuple[int, ...]
) -> None:
    outputs = Outputs(desk.out, desk.sealing, limits)
    for number, size in enumerate(sizes[:-1]):
        outputs.begin(**begins(f"output-{number}", size))
        outputs.data(memoryview(bytes(size)))
        outputs.end(hashlib.sha256(bytes(size)).digest())
    with pytest.raises(RunError, match="max_output") as caught:
        outputs.begin(**begins("last", sizes[-1]))
    assert caught.value.code is Code.OUTPUT_REFUSED
    assert len(desk.files("outputs")) == len(sizes) - 1


@pytest.fixture
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_disk_without_room_ends_the_output_and_leaves_no_half_file(desk: Desk) -> None:
    outputs = Outputs(desk.out, desk.sealing, OutputLimits())
    outputs.begin(**begins("x", 4 << 20))

    def send() -> None:
        for _ in range(4):
            outputs.data(memoryview(bytes(1 << 20)))

    with pytest.raises(RunError) as caught:
        send()
    assert caught.value.code is Code.DISK_FULL
    assert desk.files("outputs") == []


@pytest.mark.usefixtures("small_files")
def test_a_log_without_room_ends_with_a_whole_line(desk: Desk) -> None:
    line = b"x" * 1000 + b"\n"

    def write() -> None:
        for _ in range(3000):
            desk.out.event(line)

    with pytest.raises(RunError) as caught:
        write()
    assert caught.value.code is Code.DISK_FULL
    written = (desk.folder / "events.log").read_bytes()
    assert written.endswith(b"\n")
    assert len(written) % len(line) == 0


def test_the_receipt_appears_whole_and_the_reserve_goes(desk: Desk) -> None:
    assert (desk.folder / ".reserve").stat().st_size >= 1 << 18
    desk.out.give_reserve()
    desk.out.receipt(b"{}")
    assert (desk.folder / "receipt.json").read_bytes() == b"{}"
    assert not (desk.folder / ".reserve").exists()
    assert not list(desk.folder.glob("*.partial"))


def test_a_folder_with_a_run_in_it_is_not_used_again(desk: Desk) -> None:
    with pytest.raises(UsageError):
        OutDir(str(desk.folder))


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError):
        OutDir(str(tmp_path / "file" / "out"))


def test_a_writer_that_never_stops_does_not_keep_the_runtime_at_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what a worker that said that it finished had started; neither lease nor signals were heard meanwhile."""
    monkeypatch.setattr(sealed_log, "_DRAIN_S", 0.2)
    monkeypatch.setattr(sealed_log, "_READS_PER_TURN", 1)
    printing = Printing(Desk(tmp_path))
    full = bytes(1 << 20)

    def endless(descriptor: int, target: list[memoryview]) -> int:
        """Read from a pipe that is filled faster than it is read."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full, or closed when its time was over
            os.write(printing.writers[0], full)
        return read(descriptor, target)

    read = os.readv
    monkeypatch.setattr(os, "readv", endless)
    os.set_blocking(printing.writers[0], False)
    printing.log.finish()
    assert printing.segments
    assert not printing.log._open
