"""The way to a node of a Slurm job, and the process that holds what is started there; Slurm itself is not needed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.providers.place.ways import SlurmNode, batch_script
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve import facts, node, server
from glasshouse.providers.serve.keepers import KEEPER, started_ticks
from glasshouse.providers.serve.node import NODE
from glasshouse.providers.serve.runs import Run
from tools.waiting import wait_for

RUNTIME = [sys.executable, "-c", "import sys, time; sys.stdin.read(); time.sleep(60)"]


def test_a_node_is_reached_by_one_step_that_holds_nothing_back() -> None:
    command = SlurmNode.parse("slurm:///4711/gpu-7").command(["python", "~/x"], connect_s=3)
    assert command[0] == "srun"
    assert {"--jobid=4711", "--nodelist=gpu-7", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered"} < set(command)
    assert command[-3:] == ["/tmp/glasshouse-4711-gpu-7", "python", str(Path("~/x").expanduser())]


def test_a_login_node_is_reached_as_its_user_does() -> None:
    way = SlurmNode.parse("slurm://me@login.example.org:2222/4711/gpu-7", options=("-F", "other"))
    command = way.command(["python"], connect_s=3, alone=True)
    assert command[0] == "ssh"
    assert command[-6:-1] == ["-p", "2222", "-l", "me", "login.example.org"]
    assert {"other", "ControlPath=none"} < set(command)
    assert shlex.split(command[-1])[0] == "srun"
    assert command[-1].endswith(" /tmp/glasshouse-4711-gpu-7 python")


@pytest.mark.parametrize(
    "url",
    [
        "slurm://login/gpu-7",
        "slurm:///0/gpu-7",
        "slurm:///1/-w",
        "slurm:///1/gpu 7",
        "slurm:///1/gpu[1-2]",
        "slurm://-oProxyCommand=x/1/gpu",
    ],
)
def test_what_is_no_node_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        SlurmNode.parse(url)


def test_the_batch_script_is_one_that_a_shell_reads_and_has_no_secret_and_no_other_s_words() -> None:
    script = batch_script(python="/opt/a b/python", folder="/scratch/it's")
    assert subprocess.run(["sh", "-n"], input=script.encode(), check=False).returncode == 0
    assert Path(node.__file__).read_text().rstrip() in script
    assert "--no-requeue" in script
    assert "'/opt/a b/python'" in script
    with pytest.raises(UsageError):
        batch_script(folder="scratch")


def test_the_program_in_the_batch_script_needs_nothing_but_an_old_python() -> None:
    source = Path(node.__file__).read_text()
    assert "glasshouse." not in source.replace("import glasshouse", "")
    compile(source, "node.py", "exec", dont_inherit=True)


@contextmanager
def holding(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run what a batch script runs on a node."""
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "here"}
    command = [sys.executable, "-I", "-B", "-c", Path(node.__file__).read_text(), "hold", str(folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"glasshouse-node here ")
        place = folder / "glasshouse-7-here"
        try:
            yield process, place
        finally:
            process.kill()


def started(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, int]:
    monkeypatch.setattr(Run, "_command", lambda *_: RUNTIME)
    (place / "runs").mkdir(mode=0o700, exist_ok=True)
    (place / "package").touch()
    run = Run(place / "runs" / ("ab" * 16))
    return run, run.start(Order(package="cd" * 32, max_seconds=60), place / "package", b"{}")


def test_a_keeper_is_the_child_of_what_holds_the_node_and_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(tmp_path) as (process, place):
        run, runtime = started(place, monkeypatch)
        keeper = json.loads((place / "runs" / ("ab" * 16) / KEEPER).read_text())
        children = Path(f"/proc/{keeper['pid']}/stat").read_text().rpartition(")")[2].split()
        assert int(children[1]) == process.pid
        assert keeper["runtime"] == runtime
        assert run.ended() is None
        process.terminate()
        wait_for(lambda: run.ended() is not None)
        assert started_ticks(runtime) is None
        # What the run left waits for its owner.
        assert process.poll() is None
        run.remove()
        assert process.wait(10) == 0
        assert not place.exists()


def test_an_end_that_was_asked_for_starts_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(tmp_path) as (process, place):
        kept = place / "runs" / ("ef" * 16)
        kept.mkdir(parents=True)
        (kept / "order.json").touch()
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURMD_NODENAME", "here")
        assert node.main(["end", str(tmp_path), "60"]) == 0
        with pytest.raises(PlatformError, match="is ending"):
            started(place, monkeypatch)
        assert process.poll() is None
        (tmp_path / "elsewhere").mkdir()
        (place / "sockets-elsewhere").symlink_to(tmp_path / "elsewhere")
        shutil.rmtree(kept)
        assert process.wait(10) == 0
        assert list(tmp_path.iterdir()) == []


def test_where_the_node_is_no_longer_held_nothing_is_started_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(tmp_path) as (process, place):
        process.kill()
        process.wait()
        with pytest.raises(PlatformError, match="cannot be started"):
            started(place, monkeypatch)
        assert not (place / "runs" / ("ab" * 16) / KEEPER).exists()


def test_what_is_sent_to_the_socket_ends_nothing_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holding(tmp_path) as (process, place):
        assert (place / NODE).stat().st_mode & 0o777 == 0o700 & ~0o77
        for said in (
            b"",
            b"\xff",
            b"[]",
            b"{}",
            b'{"keeper": 1}',
            b'{"keeper": ["x"]}',
            b'{"end": "soon"}',
            b"9" * 9999,
        ):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
                asking.connect(str(place / NODE))
                asking.send(said)
        _, runtime = started(place, monkeypatch)
        assert process.poll() is None
        os.kill(runtime, signal.SIGKILL)


def test_a_folder_that_is_there_is_not_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As when another user of the node made it first."""
    (tmp_path / "glasshouse-7-here").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SLURM_JOB_ID", "7")
        patched.setenv("SLURMD_NODENAME", "here")
        assert node.main(["hold", str(tmp_path)]) == 1
    assert "cannot be used: File exists" in capsys.readouterr().err


def test_a_place_ends_when_nothing_is_heard_of_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a line is not always told: a step outlives the `srun` that was killed."""
    monkeypatch.setattr(server, "_SILENT_S", 0.2)
    reader, held = os.pipe()
    told, writer = os.pipe()
    try:
        server.PlaceServer(tmp_path / "place", reader, writer).serve()
    finally:
        for descriptor in (reader, held, told, writer):
            os.close(descriptor)


def test_a_node_is_reached_by_the_name_that_slurm_gives_it_and_not_where_its_login_node_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5000 10.0.0.2 22")
    assert facts.reached_at() == "10.0.0.2"
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-7")
    assert facts.reached_at() == "gpu-7"


def test_a_refusal_names_its_code() -> None:
    with pytest.raises(UsageError) as refused:
        SlurmNode.parse("slurm://")
    assert refused.value.code is Code.USAGE
    assert "slurm://user@login/JOB/NODE" in refused.value.hint
