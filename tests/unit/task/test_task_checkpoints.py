"""Checkpoints of a script: what leaves under which permission, and what lies there again on another machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from glasshouse.errors import Code, RunError
from glasshouse.package.limits import CheckpointLimits
from glasshouse.task import lines
from glasshouse.task.lines import PartStream
from simulators.checkpoint_agent import CheckpointAgent, Line, kinds

TRAIN = b"""
import json, os, pathlib, sys
from glasshouse import task

job = task.current()
folder = pathlib.Path("scratch")
named = os.environ.get("GLASSHOUSE_RESUME")
done = json.loads(pathlib.Path(named, "state.json").read_text()) if named else []
assert (job.resume is None) == (named is None)
if named:
    assert job.resume.step == len(done) and str(job.resume.path) == named
    assert pathlib.Path("data.txt").read_text() == "changed"
for step in range(len(done) + 1, 5):
    done.append(step)
    (folder / "deep").mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(done))
    (folder / "deep" / "Weights.bin").write_bytes(bytes([step]) * 3_000_000)  # a pickle by its name: no output
    (folder / "deep" / "weights.bin").write_bytes(b"")  # another file on Linux
    pathlib.Path("data.txt").write_text("changed")
    assert job.save_checkpoint(["scratch", "data.txt"], step=step, wait=True)
pathlib.Path("outputs/done.json").write_text(json.dumps(done))
"""


def leg(line: Line, folder: Path, script: bytes = TRAIN, **given: object) -> CheckpointAgent:
    files = {"train.py": script, "data.txt": b"given"}
    return CheckpointAgent(line, "script", {"script": "train.py"}, files, folder, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    """A line whose first leg counted a checkpoint of each step."""
    line = Line()
    with leg(line, tmp_path_factory.mktemp("first")) as agent:
        ended = agent.run()
    assert ended.exit_code == 0, ended.log
    assert "and lost" not in ended.log, "what is in a checkpoint"
    assert json.loads(ended.outputs["done.json"]) == [1, 2, 3, 4]
    assert kinds(ended.messages).count("checkpoint") == 4
    assert list(ended.outputs) == ["done.json"]
    return line


def test_a_script_goes_on_where_its_checkpoint_was_saved(line: Line, tmp_path: Path) -> None:
    with leg(line, tmp_path, resume=2) as agent:
        ended = agent.run()
    assert ended.exit_code == 0, ended.log
    assert json.loads(ended.outputs["done.json"]) == [1, 2, 3, 4]
    assert [message["step"] for message in ended.messages if message["type"] == "checkpoint"] == [3, 4]


@pytest.mark.parametrize("place", [0, 1 << 20, -1], ids=["first", "middle", "padding"])
def test_a_store_that_changes_a_byte_ends_the_run_before_the_script_begins(
    line: Line, tmp_path: Path, place: int
) -> None:
    def damage(chunks: bytes) -> bytes:
        found = bytearray(chunks)
        found[place] ^= 1
        return bytes(found)

    with leg(line, tmp_path, resume=3, damage=damage) as agent:
        ended = agent.run()
    assert ended.one("failed")["code"] == "checkpoint-tampered"
    assert "running" not in ended.types()
    assert not ended.outputs


def test_what_would_not_be_whole_is_refused_and_the_script_is_told(tmp_path: Path) -> None:
    script = b"""
import os, pathlib
from glasshouse import task
from glasshouse.errors import GlasshouseError

job = task.current()
pathlib.Path("linked").mkdir()
os.symlink("/etc/passwd", "linked/passwd")
pathlib.Path("large").write_bytes(bytes(1 << 26))
for path in ("linked", "large", "absent", "/etc/passwd"):
    try:
        job.save_checkpoint(path, step=1)
    except GlasshouseError as error:
        print(path, error.code.value)
pathlib.Path("state").write_text("x")
print(job.save_checkpoint("state", step=1), job.save_checkpoint("state", step=2))
"""
    line = Line()
    with leg(line, tmp_path, script) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.permit = lambda **_: None  # type: ignore[method-assign]  # counted late
        agent.give_grant()
        CheckpointAgent.permit(agent)
        ended = agent.finish()
    assert ended.exit_code == 0, ended.log
    said = ended.log.split("\n")
    refused = ["checkpoint-refused"] * 3
    assert [text.split()[-1] for text in said[:4]] == [*refused, "usage"]
    assert "True False" in said
    assert list(line.counted) == [1]


def test_a_checkpoint_that_fails_on_its_way_is_not_counted_and_the_job_goes_on(tmp_path: Path) -> None:
    script = b"""
import pathlib
from glasshouse import task

job = task.current()
try:
    with job.checkpoints.begin(step=1, wait_s=9) as part:
        part.begin("state")
        part.write(bytes(1000))
        job.progress(1, 2)
        raise ValueError("on its way")
except ValueError:
    print(job.save_checkpoint("data.txt", step=2, wait=True))
pathlib.Path("outputs/kept").write_text("x")
"""
    line = Line()
    with leg(line, tmp_path, script) as agent:
        ended = agent.run()
    assert ended.exit_code == 0, ended.log
    assert "False" in ended.log
    assert [message["done"] for message in agent.between] == [1]
    assert kinds(ended.messages).count("part-end") == 1  # of a padded size
    assert not line.counted
    assert ended.outputs == {"kept": b"x"}


@pytest.mark.parametrize("checked", [True, False], ids=["at its beginning", "at its end alone"])
def test_files_that_no_part_can_have_hold_up_no_output(tmp_path: Path, *, checked: bool) -> None:
    script = b"""
import pathlib
from glasshouse import task
from glasshouse.errors import GlasshouseError

part = task.current().checkpoints.begin(step=1, wait_s=9)
try:
    with part:
        for name in ("a", "a/b"):
            if CHECKED:
                part.begin(name)
            else:
                part._writer.begin(name)
            part.write(bytes(1000))
except GlasshouseError as error:
    print(error.code.value)
pathlib.Path("outputs/kept").write_text("x")
"""
    line = Line()
    with leg(line, tmp_path, script.replace(b"CHECKED", str(checked).encode())) as agent:
        ended = agent.run()
    assert ended.exit_code == 0, ended.log
    assert "checkpoint-refused" in ended.log
    assert not line.counted
    assert kinds(ended.messages).count("part-end") == 1
    assert ended.outputs == {"kept": b"x"}


def test_a_part_refuses_a_file_too_many_before_it_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[bool] = []

    def begin_all(stream: PartStream, names: list[str]) -> None:
        for name in names:
            stream.begin(name)

    sink = SimpleNamespace(data=lambda _: None, end=lambda _size, *, whole: ends.append(whole))

    def part(size: int = 1 << 20) -> PartStream:
        return PartStream(sink, CheckpointLimits(bytes=size, every_s=10, most=1), ["s"])  # type: ignore[arg-type]

    for begun, why, stream in (
        (["s/1", "s/2", "s/3"], "files or more", part()),
        (["s", "s/1"], "within a file", part()),
        (["s/1", "s"], "within a file", part()),
        (["s/1", *(f"s/{number}" for number in range(2, 100))], "bytes that the job allows", part(4096)),
    ):
        monkeypatch.setattr(lines, "MAX_FILES", 1000 if len(begun) > 3 else 3)
        with stream:
            stream.begin(begun[0])
            with pytest.raises(RunError, match=why) as caught:
                begin_all(stream, begun[1:])
            assert caught.value.code is Code.CHECKPOINT_REFUSED
    monkeypatch.setattr(lines, "MAX_FILE_INDEX_BYTES", 300)
    with part() as stream, pytest.raises(RunError, match="too long paths"):
        stream.begin("x" * 250)
    assert ends == [True] * 5


def test_two_ranks_save_together_and_each_finds_what_is_its_own(tmp_path: Path) -> None:
    script = b"""
import os, pathlib
from glasshouse import task

job, rank = task.current(), os.environ["RANK"]
assert os.environ.get("GLASSHOUSE_RESUME", "").endswith("shared" if job.resume else "")
before = int(pathlib.Path(f"own/{rank}").read_text()) if job.resume else 0
for step in range(before + 1, 4):
    for name in ("shared", "own"):
        pathlib.Path(name).mkdir(exist_ok=True)
    pathlib.Path(f"shared/{rank}").write_bytes(os.urandom(1 << 20))
    pathlib.Path(f"own/{rank}").write_text(str(step))
    assert job.save_checkpoint(["shared", f"own/{rank}"], step=step, wait=True)
if rank == "0":
    job.progress(step, 3)
    try:
        job.save_checkpoint("shared/0", step=7)
    except Exception as error:
        print(error)
else:
    job.save_checkpoint("absent", step=7) if job.resume else job.save_checkpoint("own", step=8)
"""
    line = Line(ranks=2)
    with leg(line, tmp_path / "first", script, ranks=2) as agent:
        ended = agent.run()
    assert list(line.counted) == [1, 2, 3], ended.log
    assert "ranks save at different steps: [7, 8]" in ended.log
    first, second = (len(line.counted[2][rank]) for rank in (0, 1))
    assert first > 2 << 20 > 1 << 16 > second  # what both name is the first one's
    with leg(line, tmp_path / "second", script, ranks=2, resume=2) as agent:
        ended = agent.run()
    assert sorted(line.counted) == [1, 2, 3], ended.log
    assert "there is no file at 'absent'" in ended.log
    assert ended.one("failed")["code"] == "checkpoint-refused"
