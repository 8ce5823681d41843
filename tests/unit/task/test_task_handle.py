"""A script's view of its job: progress that costs nothing, outputs that leave once, nothing that runs code."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.task import Task
from glasshouse.task import handle as handle_module
from glasshouse.task.inputs import FolderInputs
from tools.recorder import Recorder


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Loss:
    """A number on a device: looking at it is expensive, so it counts the looks."""

    def __init__(self, value: float) -> None:
        self.value, self.looks = value, 0

    def __float__(self) -> float:
        self.looks += 1
        return self.value


@pytest.fixture
def channel() -> Recorder:
    return Recorder()


@pytest.fixture
def task(tmp_path: Path, channel: Recorder) -> Task:
    (tmp_path / "in" / "folder").mkdir(parents=True)
    (tmp_path / "in" / "folder" / "a.txt").write_bytes(b"first line\nsecond line\n")
    (tmp_path / "in" / "b.bin").write_bytes(bytes(range(256)))
    return Task(
        params={"x": 1}, inputs=FolderInputs(tmp_path / "in"), channel=channel, workspace=tmp_path / "workspace"
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(handle_module, "time", clock)
    return clock


def test_inputs_are_read_by_name(task: Task) -> None:
    assert task.inputs == ("b.bin", "folder/a.txt")
    assert task.size("b.bin") == 256
    with task.open("folder/a.txt") as lines:
        assert list(lines) == [b"first line\n", b"second line\n"]
    buffer = bytearray(10)
    assert task.read_into("b.bin", buffer, 250) == 6
    assert buffer == bytes(range(250, 256)) + bytes(4)


def test_an_unknown_input_is_named_in_the_error(task: Task) -> None:
    for ask in (task.size, task.open):
        with pytest.raises(UsageError, match="nowhere"):
            ask("nowhere")


def test_inputs_lie_as_files_in_the_workspace_for_code_that_wants_paths(task: Task) -> None:
    folder = task.input_dir
    assert (folder / "folder" / "a.txt").read_bytes() == b"first line\nsecond line\n"
    assert folder.is_relative_to(task.workspace)
    assert task.input_dir == folder


def test_an_input_in_the_output_folder_would_come_back_as_an_output_and_is_refused(
    tmp_path: Path, channel: Recorder
) -> None:
    (tmp_path / "in" / "outputs").mkdir(parents=True)
    (tmp_path / "in" / "outputs" / "x").write_bytes(b"secret")
    task = Task(params={}, inputs=FolderInputs(tmp_path / "in"), channel=channel, workspace=tmp_path / "w")
    with pytest.raises(UsageError) as refused:
        _ = task.input_dir
    assert refused.value.code is Code.JOB_INVALID


def test_progress_is_passed_on_once_a_second(task: Task, channel: Recorder, clock: Clock) -> None:
    task.progress(0, 1000)
    for step in range(1, 31):
        clock.now += 0.1
        task.progress(step, 1000)
    said = [message["done"] for message in channel.messages]
    assert said[0] == 0
    assert 3 <= len(said) <= 5
    assert [message["elapsed_us"] for message in channel.messages] == sorted(m["elapsed_us"] for m in channel.messages)


def test_a_loss_on_a_device_is_looked_at_only_when_it_is_passed_on(task: Task, channel: Recorder, clock: Clock) -> None:
    losses = [Loss(2.0 / step) for step in range(1, 101)]
    for step, loss in enumerate(losses, start=1):
        clock.now += 0.001
        task.progress(step, 1000, loss)
    assert sum(loss.looks for loss in losses) == 1
    assert channel.messages[0]["loss"] == "2"


def test_the_call_that_reaches_the_total_is_passed_on_exactly_once(task: Task, channel: Recorder, clock: Clock) -> None:
    task.progress(0, 3)
    for step in (1, 2, 3):
        task.progress(step, 3, 0.5)
    task.progress(3, 3, 0.5)
    task.close()
    assert [message["done"] for message in channel.messages] == [0, 1, 3]


def test_what_was_said_last_is_passed_on_at_the_end(task: Task, channel: Recorder, clock: Clock) -> None:
    task.progress(0)
    task.progress(1, loss=3.0)
    task.progress(2, loss=2.5)
    task.close()
    assert channel.messages[-1]["done"] == 2
    assert task.last_report[:4] == (2, "step", "3", "2.5")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_finite_number_travels_as_none(task: Task, channel: Recorder, bad: float) -> None:
    task.progress(1, loss=bad)
    assert channel.messages[0]["loss"] is None


@pytest.mark.parametrize(("done", "unit"), [(-1, "step"), (2**53, "step"), (1, "furlong")])
def test_progress_refuses_what_the_log_cannot_hold(task: Task, done: int, unit: str) -> None:
    with pytest.raises(UsageError):
        task.progress(done, unit=unit)


def test_outputs_leave_with_their_class_and_kind(task: Task, channel: Recorder) -> None:
    with task.save("notes.txt") as out:
        out.write(b"hello ")
        out.write(b"world")
    task.save_bytes("model.safetensors", b"w" * 10)
    task.checkpoint("checkpoints/1.safetensors", b"c")
    assert channel.outputs["notes.txt"] == b"hello world"
    assert [(m["class"], m["kind"]) for m in channel.messages] == [
        ("file", "output"),
        ("weights", "output"),
        ("weights", "checkpoint"),
    ]
    assert not any(path.is_file() for path in task.workspace.rglob("*"))


def test_an_output_whose_writing_failed_does_not_leave(task: Task, channel: Recorder) -> None:
    def write_half() -> None:
        with task.save("half.txt") as out:
            out.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert channel.outputs == {}


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../b", "a//b", "./a", "", "a\x00b", "a\\b", "x" * 129])
def test_an_output_name_that_is_no_plain_relative_path_is_refused(task: Task, name: str) -> None:
    with pytest.raises(RunError) as refused:
        task.save_bytes(name, b"")
    assert refused.value.code is Code.OUTPUT_REFUSED


def test_an_output_cannot_be_replaced(task: Task) -> None:
    task.save_bytes("a", b"1")
    with pytest.raises(RunError, match="already"):
        task.save_bytes("a", b"2")


def torch_archive() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    return out.getvalue()


PICKLES = {
    "model.pt": b"anything",
    "model.bin": b"anything",
    "hidden.dat": pickle.dumps({"a": 1}),
    "renamed.safetensors": torch_archive(),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_is_refused_by_name_or_by_content(task: Task, channel: Recorder, name: str) -> None:
    with pytest.raises(RunError) as refused:
        task.save_bytes(name, PICKLES[name])
    assert refused.value.code is Code.OUTPUT_REFUSED
    assert channel.outputs == {}


def test_an_ordinary_archive_is_no_pickle(task: Task, channel: Recorder) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("plot.png", b"x")
    task.save_bytes("plots.zip", out.getvalue())
    assert channel.outputs["plots.zip"] == out.getvalue()


@pytest.mark.parametrize("name", PICKLES)
def test_the_job_file_may_allow_pickles(tmp_path: Path, channel: Recorder, name: str) -> None:
    task = Task(params={"allow_pickle": True}, inputs=FolderInputs(tmp_path), channel=channel, workspace=tmp_path / "w")
    task.save_bytes(name, PICKLES[name])
    assert channel.outputs[name] == PICKLES[name]


def test_the_output_folder_comes_back_at_the_end_and_one_refusal_loses_nothing(task: Task, channel: Recorder) -> None:
    (task.output_dir / "sub").mkdir()
    (task.output_dir / "a.json").write_bytes(b"{}")
    (task.output_dir / "m.pt").write_bytes(b"")
    (task.output_dir / "sub" / "z.txt").write_bytes(b"z")
    (task.output_dir / "link").symlink_to("/etc/hostname")
    with pytest.raises(RunError, match=r"m\.pt"):
        task.close()
    assert channel.outputs == {"a.json": b"{}", "sub/z.txt": b"z"}


def test_all_pickles_are_named_with_the_remedy(task: Task, channel: Recorder) -> None:
    (task.output_dir / "a.pt").write_bytes(b"")
    (task.output_dir / "b.json").write_bytes(b"{}")
    (task.output_dir / "c.dat").write_bytes(pickle.dumps([1]))
    with pytest.raises(RunError) as refused:
        task.close()
    assert refused.value.code is Code.OUTPUT_REFUSED
    assert refused.value.message.endswith(": 'a.pt', 'c.dat'")
    assert "safetensors" in refused.value.hint
    assert "allow_pickle = true" in refused.value.hint
    assert channel.outputs == {"b.json": b"{}"}


def test_a_receipt_holds_so_many_outputs_and_no_more(task: Task, channel: Recorder) -> None:
    for number in range(257):
        (task.output_dir / f"{number:03}").write_bytes(b"")
    with pytest.raises(RunError) as refused:
        task.close()
    assert refused.value.code is Code.OUTPUT_REFUSED
    assert len(channel.outputs) == 256


def test_should_stop_says_what_the_owner_asked(task: Task, channel: Recorder) -> None:
    assert not task.asks_to_stop
    assert task.should_stop() is False
    channel.stopping = True
    assert task.should_stop() is True
    assert task.asks_to_stop


def test_deterministic_is_what_the_job_says(tmp_path: Path, channel: Recorder) -> None:
    for value, expected in ((True, True), (False, False), ("yes", False)):
        task = Task(params={"deterministic": value}, inputs=FolderInputs(tmp_path), channel=channel, workspace=tmp_path)
        assert task.deterministic is expected


def test_the_scratch_copy_of_an_output_has_no_name(task: Task) -> None:
    with task.save("a.txt") as out:
        out.write(b"secret")
        out.flush()
        assert os.fstat(out.fileno()).st_nlink == 0
