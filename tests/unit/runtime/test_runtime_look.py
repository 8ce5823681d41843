"""The look beneath what a worker is shown, by a process of its own: whatever disturbs it, it is no clean one."""

from __future__ import annotations

import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import glasshouse
from glasshouse.attestation.claims import CheckResult
from glasshouse.runtime.confine import shown_search
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.watchdog.session_record import Process
from glasshouse.runtime.worker import sandbox
from tools.forked import in_child
from tools.machine import needs_filters
from tools.sandboxed import children_of, run, specification
from tools.waiting import wait_for

pytestmark = needs_filters


def test_a_look_answers_with_what_it_found_and_is_gone(tmp_path: Path) -> None:
    (tmp_path / "owner.key").touch()
    look = shown_search.Look.start((str(tmp_path),))
    assert shown_search.answer(look.reader) == ([("state", f"{tmp_path}/owner.key")], True)
    assert look.end()
    assert look.end()
    assert look.reader == -1


def _killed(look: shown_search.Look) -> None:
    os.kill(look._pid, signal.SIGKILL)


def _stopped(look: shown_search.Look) -> None:
    os.kill(look._pid, signal.SIGSTOP)


@pytest.mark.parametrize("disturb", [_killed, _stopped], ids=["killed", "stopped"])
def test_a_look_that_is_disturbed_is_no_clean_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturb: Callable[[shown_search.Look], None]
) -> None:
    monkeypatch.setattr(shown_search, "search", lambda _paths: signal.pause())
    look = shown_search.Look.start((str(tmp_path),))
    disturb(look)
    assert shown_search.answer(look.reader, patience_s=0.2) == ([], False)
    assert look.end()


@pytest.mark.parametrize(
    "said",
    [b"", marshal.dumps(([], True))[:-1], marshal.dumps(([], 1)), marshal.dumps([]), marshal.dumps(True), b"\xff"],
    ids=["nothing", "cut short", "not yes", "too little", "no list", "no value"],
)
def test_an_answer_that_is_not_whole_is_no_clean_one(said: bytes) -> None:
    reader, writer = socket.socketpair()
    with reader:
        with writer:
            writer.sendall(said)
        assert shown_search.answer(reader.fileno()) == ([], False)


def test_a_search_that_breaks_off_is_no_clean_one_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def search(_paths: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shown_search, "search", search)
    look = shown_search.Look.start((str(tmp_path),))
    assert shown_search.answer(look.reader) == ([], False)
    look.end()
    assert capfd.readouterr() == ("", "")


def test_no_other_process_can_answer_in_a_looks_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(_paths: list[str]) -> tuple[list[tuple[str, str]], bool]:
        return [
            ("dumpable", str(REAL.prctl(3))),
            ("open", " ".join(path.name for path in Path("/proc/self/fd").iterdir())),
        ], True

    monkeypatch.setattr(shown_search, "search", search)
    look = shown_search.Look.start((str(tmp_path),))
    with pytest.raises(OSError, match="No such device"):
        os.open(f"/proc/self/fd/{look.reader}", os.O_WRONLY)
    found, whole = shown_search.answer(look.reader)
    look.end()
    assert whole
    assert found[0] == ("dumpable", "0")
    assert len(found[1][1].split()) == 2  # its end of the socket, and the listing itself


def test_a_look_ends_with_the_process_that_began_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def search(_paths: list[str]) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()

    def begin() -> None:
        shown_search.Look.start((str(tmp_path),))
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())

    monkeypatch.setattr(shown_search, "search", search)
    in_child(begin)

    def ended() -> bool:
        try:
            return not Process.of(int((tmp_path / "pid").read_text())).lives
        except OSError:
            return True

    wait_for(ended)


def test_of_a_worker_whose_look_was_killed_egress_is_not_called_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_search, "search", lambda _paths: os.kill(os.getpid(), signal.SIGKILL))
    ran = run("pass")
    assert ran.report.observed["egress-closed"] is CheckResult.UNAVAILABLE
    assert "shown-searched-in-part" in ran.report.notes


def test_of_a_worker_whose_look_cannot_be_ended_egress_is_not_called_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_search.Look, "end", lambda _look, **_: False)  # as one that is traced
    ran = run("pass")
    assert ran.report.observed["egress-closed"] is CheckResult.UNAVAILABLE
    assert "shown-searched-in-part" in ran.report.notes


def test_the_look_is_gone_once_the_worker_is_confirmed() -> None:
    ran = run("pass", after=lambda worker: {"init": worker.init_pid, "children": children_of(os.getpid())})
    assert ran.facts["children"] == [ran.facts["init"]]


def test_a_look_beneath_other_paths_than_are_shown_starts_nothing(tmp_path: Path) -> None:
    def story() -> list[int]:
        with pytest.raises(ValueError, match="other paths"):
            sandbox.start(specification("pass"), look=shown_search.Look.start((str(tmp_path),)))
        return children_of(os.getpid())

    assert in_child(story) == []


@pytest.mark.parametrize("module", ["__main__", "worker.launcher"])
def test_what_waits_for_nothing_imports_nothing_that_is_slow_to_compile(module: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(glasshouse.__file__).parents[1])!r})
import glasshouse.runtime.{module}
print(*sys.modules)
"""
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    slow = {"contextlib", "dataclasses", "enum", "json", "pathlib", "re", "signal", "socket", "typing"}
    assert slow.isdisjoint(ran.split())


def test_where_no_process_can_be_started_an_agent_prints_no_traceback() -> None:
    code = """
import errno, os, runpy
def refused():
    raise OSError(errno.EAGAIN, "secret")
os.fork = refused
runpy.run_module("glasshouse.runtime", run_name="__main__", alter_sys=True)
"""
    ran = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.startswith("glasshouse runtime: usage\n")
    assert "Traceback" not in ran.stderr + ran.stdout


def test_nothing_but_a_few_modules_of_ours_is_imported_before_the_look_begins() -> None:
    code = """
import runpy, sys
sys.modules["glasshouse.errors"] = None  # what comes after the look
try:
    runpy.run_module("glasshouse.runtime", run_name="__main__", alter_sys=True)
except ImportError:
    print(*[name for name, module in sys.modules.items() if name[:10] == "glasshouse" and module])
"""
    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    ours = {
        "",
        ".runtime",
        ".wire",
        ".wire.own_state",
        *(f".runtime.{name}" for name in ("confine", "kernel", "spawn", "syscalls", "worker")),
        ".runtime.confine.shown_search",
        ".runtime.worker.shown_paths",
    }
    assert set(said.split()) == {f"glasshouse{name}" for name in ours}
