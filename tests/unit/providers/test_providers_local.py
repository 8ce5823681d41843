"""Placing a run here: the launch file goes by standard input, and nothing secret anywhere else."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.providers.place.local import LocalPlace, LocalPlaced
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.runs import Run
from tools.waiting import wait_for

PATIENCE_S = 60.0
LAUNCH = b'{"launch_seed":"a very secret seed"}' + bytes(range(256)) * 40

PLAYED = """#!{python}
import json, os, signal, sys, time
data = sys.stdin.buffer.read()
told = {{"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd(), "stdin": data.hex(),
        "session": os.getsid(0) == os.getpid(), "umask": os.umask(0), "descriptors": os.listdir("/proc/self/fd")}}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
open({told!r} + ".part", "w").write(json.dumps(told))
os.rename({told!r} + ".part", {told!r})
print("a word for the log")
time.sleep({seconds})
sys.exit({code})
"""


def play(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    code: int = 0,
    seconds: float = 0.0,
    program: str | None = None,
    **order: Any,
) -> LocalPlaced:
    """Start a program that says how it was called, in the runtime's place."""
    played = tmp_path / "python"
    played.write_text(PLAYED.format(python=sys.executable, told=str(tmp_path / "told"), code=code, seconds=seconds))
    played.chmod(0o700)
    real = Run._command
    monkeypatch.setattr(Run, "_command", lambda run, *order: [program or str(played), *real(run, *order)[1:]])
    (tmp_path / "package.sealed").touch()
    placed = LocalPlace().run(tmp_path)
    assert placed.connect() is None
    package = placed.upload(tmp_path / "package.sealed", lambda _sent, _size: None)
    placed.start(Order(package=package, max_seconds=60, **order), LAUNCH)
    return placed


def test_machines_of_a_group_get_a_free_port_each_and_are_told_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = LocalPlace().addresses(3)
    assert len(set(peers)) == 3
    assert all(peer.startswith("127.0.0.1:") for peer in peers)
    assert play(tmp_path, monkeypatch, ranks=2, peers=peers).wait(PATIENCE_S) == 0
    told = told_by(tmp_path / "told")
    words = told["argv"]
    assert isinstance(words, list)
    assert words[words.index("--ranks") + 1] == "2"
    assert words[words.index("--peers") + 1] == ",".join(peers)


def told_by(path: Path) -> dict[str, object]:
    wait_for(path.exists)
    return json.loads(path.read_text())


def test_only_standard_input_carries_the_launch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_OWNER", "in the environment")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    placement = play(tmp_path, monkeypatch)
    assert placement.wait(PATIENCE_S) == 0
    told = told_by(tmp_path / "told")
    assert told["stdin"] == LAUNCH.hex()
    assert told["argv"] == [
        *("-I", "-B", "-X", f"pycache_prefix={tmp_path / 'empty'}", "-m", "glasshouse.runtime"),
        *("--package", str(tmp_path / "package.sealed"), "--out", str(tmp_path / "out"), "--max-seconds", "60"),
    ]
    environment = told["environment"]
    assert isinstance(environment, dict)
    assert set(environment) - {"LC_CTYPE"} <= {"CUDA_VISIBLE_DEVICES", "LANG", "PATH", "TZ"}
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert (told["cwd"], told["session"], told["umask"]) == ("/", True, 0o077)
    assert len(told["descriptors"]) <= 4, "nothing of ours is inherited"  # type: ignore[arg-type]


def test_the_runtimes_words_go_to_a_private_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = play(tmp_path, monkeypatch)
    assert placement.wait(PATIENCE_S) == 0
    log = tmp_path / "runtime.log"
    assert log.read_text() == "a word for the log\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_waiting_gives_the_exit_code_and_interrupting_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = play(tmp_path, monkeypatch, seconds=300)
    wait_for((tmp_path / "told").exists)
    assert placement.wait(0.2) is None
    placement.interrupt()
    assert placement.wait(PATIENCE_S) == 130


def test_killing_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = play(tmp_path, monkeypatch, seconds=300)
    placement.kill()
    assert placement.wait(PATIENCE_S) == -9


def test_a_runtime_that_ends_before_it_reads_is_no_crash_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play(tmp_path, monkeypatch, program="/bin/false").wait(PATIENCE_S) == 1


def test_a_runtime_outlives_the_one_that_stays_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = play(tmp_path, monkeypatch, seconds=300)
    wait_for((tmp_path / "told").exists)
    keeper = Run(tmp_path).keeper
    assert keeper is not None
    os.kill(keeper, signal.SIGKILL)
    assert placement.wait(0.3) is None
    placement.kill()
    wait_for(lambda: placement.wait(0.1) == -signal.SIGKILL)  # it is looked for, with none left that tells


def test_a_signal_that_comes_before_the_runtime_expects_one_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stays with a runtime ignores signals; what it starts has them as they were."""
    program = tmp_path / "asleep"
    told = str(tmp_path / "told")
    program.write_text(f"#!{sys.executable}\nimport time\nopen({told!r}, 'w').write('1')\ntime.sleep(300)\n")
    program.chmod(0o700)
    placement = play(tmp_path, monkeypatch, program=str(program))
    wait_for((tmp_path / "told").exists)
    placement.interrupt()
    assert placement.wait(PATIENCE_S) == -signal.SIGTERM


def test_no_runtime_goes_on_of_which_nobody_could_write_down_that_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keeper.json.part").mkdir()  # as where a disk is full
    with pytest.raises(PlatformError, match="cannot be started"):
        play(tmp_path, monkeypatch)
    assert not (tmp_path / "told").exists()
    (tmp_path / "keeper.json.part").rmdir()
    monkeypatch.undo()
    assert play(tmp_path, monkeypatch).wait(PATIENCE_S) == 0


def test_a_run_is_started_once_however_often_that_is_asked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = play(tmp_path, monkeypatch, seconds=300)
    order = Order(package=str(tmp_path / "package.sealed"), max_seconds=60)
    first = json.loads((tmp_path / "keeper.json").read_text())
    kept = (tmp_path / "keeper.json").rename(tmp_path / "later")
    asked = threading.Thread(target=lambda: pids.append(placement.start(order, LAUNCH)))
    pids: list[int] = []
    asked.start()  # as when the line broke while it was being started
    kept.rename(tmp_path / "keeper.json")
    asked.join()
    assert pids == [first["runtime"]]
    with pytest.raises(UsageError) as other:
        placement.start(replace(order, max_seconds=5), LAUNCH)
    assert other.value.code is Code.RUN_EXISTS
    placement.kill()
    assert placement.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_run_here_needs_no_file_system_with_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_names: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    assert play(tmp_path, monkeypatch).wait(PATIENCE_S) == 0


def test_a_run_that_was_never_started_has_ended_for_whoever_asks(tmp_path: Path) -> None:
    assert Run(tmp_path / "nowhere").ended() == -signal.SIGKILL
    assert LocalPlaced(tmp_path).wait(0) == -signal.SIGKILL


def test_what_cannot_be_started_is_the_machines_fault_and_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlatformError) as refused:
        play(tmp_path, monkeypatch, program=str(tmp_path / "absent"))
    assert refused.value.code is Code.PLATFORM
    monkeypatch.undo()
    assert play(tmp_path, monkeypatch).wait(PATIENCE_S) == 0
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(PlatformError, match="Linux"):
        LocalPlace().check()


def test_a_log_that_is_a_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "runtime.log").symlink_to(tmp_path / "victim")
    with pytest.raises(PlatformError):
        play(tmp_path, monkeypatch)
    assert (tmp_path / "victim").read_text() == "mine"
