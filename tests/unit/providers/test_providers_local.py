"""Placing a run here: the launch file goes by standard input, and nothing secret anywhere else."""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import Code, PlatformError
from glasshouse.providers.base import Request
from glasshouse.providers.local import LocalProvider

LAUNCH = b'{"launch_seed":"a very secret seed"}' + bytes(range(256)) * 40

PLAYED = """#!{python}
import json, os, signal, sys, time
data = sys.stdin.buffer.read()
told = {{"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd(), "stdin": data.hex(),
        "session": os.getsid(0) == os.getpid(), "umask": os.umask(0), "descriptors": os.listdir("/proc/self/fd")}}
open({told!r}, "w").write(json.dumps(told))
print("a word for the log")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
time.sleep({seconds})
sys.exit({code})
"""


def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, code: int = 0, seconds: float = 0.0) -> Request:
    """Put a program that says how it was called in the runtime's place."""
    program = tmp_path / "python"
    program.write_text(PLAYED.format(python=sys.executable, told=str(tmp_path / "told"), code=code, seconds=seconds))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    (tmp_path / "empty").mkdir()
    return Request(
        launch=LAUNCH,
        package=tmp_path / "job.sealed",
        out=tmp_path / "out",
        scratch=tmp_path / "empty",
        log=tmp_path / "runtime.log",
        max_seconds=60,
    )


def test_machines_of_a_group_get_a_free_port_each_and_are_told_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = LocalProvider()
    peers = provider.addresses(3)
    assert len(set(peers)) == 3
    assert all(peer.startswith("127.0.0.1:") for peer in peers)
    request = replace(play(tmp_path, monkeypatch), ranks=2, peers=peers)
    assert provider.place(request).wait(30) == 0
    told = wait_for(tmp_path / "told")
    words = told["argv"]
    assert isinstance(words, list)
    assert words[words.index("--ranks") + 1] == "2"
    assert words[words.index("--peers") + 1] == ",".join(peers)


def wait_for(path: Path) -> dict[str, object]:
    for _ in range(500):
        if path.exists() and path.stat().st_size:
            return json.loads(path.read_text())
        os.sched_yield()
        import time

        time.sleep(0.01)
    raise AssertionError("the runtime was not started")


def test_only_standard_input_carries_the_launch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "in the environment")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    placement = LocalProvider().place(play(tmp_path, monkeypatch))
    assert placement.wait(10) == 0
    told = wait_for(tmp_path / "told")
    assert told["stdin"] == LAUNCH.hex()
    assert told["argv"] == [
        *("-I", "-B", "-X", f"pycache_prefix={tmp_path / 'empty'}", "-m", "glasshouse.runtime"),
        *("--package", str(tmp_path / "job.sealed"), "--out", str(tmp_path / "out"), "--max-seconds", "60"),
    ]
    environment = told["environment"]
    assert isinstance(environment, dict)
    assert set(environment) - {"LC_CTYPE"} <= {"CUDA_VISIBLE_DEVICES", "LANG", "PATH", "TZ"}
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert (told["cwd"], told["session"], told["umask"]) == ("/", True, 0o077)
    assert len(told["descriptors"]) <= 4, "nothing of ours is inherited"  # type: ignore[arg-type]


def test_the_runtimes_words_go_to_a_private_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = LocalProvider().place(play(tmp_path, monkeypatch))
    assert placement.wait(10) == 0
    log = tmp_path / "runtime.log"
    assert log.read_text() == "a word for the log\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_waiting_gives_the_exit_code_and_interrupting_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = LocalProvider().place(play(tmp_path, monkeypatch, seconds=30))
    wait_for(tmp_path / "told")
    assert placement.wait(0.2) is None
    placement.interrupt()
    assert placement.wait(10) == 130


def test_killing_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = LocalProvider().place(play(tmp_path, monkeypatch, seconds=30))
    placement.kill()
    assert placement.wait(10) == -9


def test_a_runtime_that_ends_before_it_reads_is_no_crash_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = play(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    placement = LocalProvider().place(request)
    assert placement.wait(10) == 1


def test_what_cannot_be_started_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = play(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(PlatformError) as refused:
        LocalProvider().place(request)
    assert refused.value.code is Code.PLATFORM
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PlatformError, match="Linux"):
        LocalProvider().place(request)


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = play(tmp_path, monkeypatch)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "runtime.log").symlink_to(tmp_path / "victim")
    with pytest.raises(PlatformError):
        LocalProvider().place(request)
    assert (tmp_path / "victim").read_text() == "mine"
