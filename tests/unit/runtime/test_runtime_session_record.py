"""What a worker started is found by its session, whatever became of it, and no other process is taken for it."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.verify.conclusion import survivors
from glasshouse.runtime.kernel import CLONE_NEWNS, MS_PRIVATE, MS_REC, PR_SET_DUMPABLE, REAL
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.run import probes, zeroize
from glasshouse.runtime.watchdog.session_record import NAME, Process, SessionRecord, members
from tools.forked import in_child
from tools.machine import needs_namespaces, needs_root
from tools.waiting import wait_for

# Starts a child, becomes another program by a thread, and says so.
BECOMES_ANOTHER = """
import os, sys, threading, time
if os.fork() == 0:
    time.sleep(60)
another = [sys.executable, "-c", "print(1, flush=True); input()"]
threading.Thread(target=os.execv, args=(sys.executable, another)).start()
time.sleep(60)
"""


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "print(0, flush=True); exec(input())"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        said(process)
        yield process
        for pid in members(process.pid):
            subprocess.run(["kill", "-9", str(pid)], check=False)


def said(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def tell(process: subprocess.Popen[bytes], code: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"exec({code!r})\n".encode())
    process.stdin.flush()


def test_a_process_that_became_another_program_is_still_of_its_session(
    leader: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    record = SessionRecord.of(leader.pid)
    (tmp_path / NAME).write_bytes(record.to_line())
    tell(leader, BECOMES_ANOTHER)
    assert said(leader) == b"1\n"
    child = next(pid for pid in members(leader.pid) if pid != leader.pid)
    assert record.survivors() == sorted([leader.pid, child])
    assert survivors(tmp_path / "empty", tmp_path, patience_s=0) == sorted([leader.pid, child])
    leader.kill()
    leader.wait()
    assert record.survivors() == [child], "and so is its child when it is gone"


def test_a_process_whose_first_thread_has_ended_is_no_zombie_as_long_as_another_lives(
    leader: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """It reads as one, and has no command line."""
    record = SessionRecord.of(leader.pid)
    (tmp_path / NAME).write_bytes(record.to_line())
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    tell(leader, f"{code}print(1, flush=True)\nctypes.CDLL(None).syscall(60, 0)")
    said(leader)
    place = Path(f"/proc/{leader.pid}")
    wait_for(lambda: (place / "cmdline").read_bytes() == b"")
    assert (place / "stat").read_bytes().rpartition(b") ")[2][:1] == b"Z"
    assert survivors(tmp_path / "empty", tmp_path, patience_s=0) == [leader.pid]
    assert ProcessName.of(leader.pid).alive
    assert probes._is_alive(REAL, leader.pid)
    leader.kill()
    wait_for(lambda: not members(leader.pid))
    assert not probes._is_alive(REAL, leader.pid)


def test_a_process_that_runs_and_cannot_be_read_is_not_taken_for_ended(
    leader: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SessionRecord.of(leader.pid)

    def refused(pid: int) -> Process:
        raise PermissionError(errno.EACCES, f"of {pid}")

    monkeypatch.setattr(Process, "of", refused)
    assert record.survivors() is None


def test_a_session_that_got_the_same_number_later_is_another(leader: subprocess.Popen[bytes]) -> None:
    record = SessionRecord.of(leader.pid)
    earlier = dataclasses.replace(record, started=record.started - 1)
    assert record.survivors() == [leader.pid]
    assert earlier.survivors() == []


def test_after_another_boot_nothing_is_left_and_in_another_namespace_nothing_is_seen(
    leader: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    record = SessionRecord.of(leader.pid)
    assert dataclasses.replace(record, boot="another").survivors() == []
    elsewhere = dataclasses.replace(record, namespace="pid:[1]")
    assert elsewhere.survivors() is None
    # A container may be shown a boot of its own.
    assert dataclasses.replace(elsewhere, boot="another").survivors() is None
    (tmp_path / NAME).write_bytes(elsewhere.to_line())
    assert survivors(tmp_path / "empty", tmp_path, patience_s=0) is None


def test_a_process_whose_beginning_was_not_seen_is_none_that_has_its_number_now(
    leader: subprocess.Popen[bytes],
) -> None:
    assert ProcessName.of(leader.pid).alive
    assert not ProcessName(pid=leader.pid, started=0).alive
    assert not ProcessName(pid=leader.pid, started=0).send(signal.SIGKILL)
    assert leader.poll() is None


NOBODY = 65534


@needs_root
@needs_namespaces
@pytest.mark.parametrize("hidepid", [1, 2])
def test_where_proc_hides_a_process_that_is_not_dumpable_nothing_is_said_to_be_gone(
    tmp_path: Path, hidepid: int
) -> None:
    """As the threat model advises to mount it: the agent's group sees all, another login of its user does not."""

    def act() -> list[object]:
        REAL.unshare(CLONE_NEWNS)
        REAL.mount("none", "/", None, MS_REC | MS_PRIVATE)
        REAL.mount("proc", "/proc", "proc", 0, f"hidepid={hidepid}")
        reader, writer = os.pipe()
        agent = os.fork()
        if agent == 0:
            os.setuid(NOBODY)
            os.setsid()
            REAL.prctl(PR_SET_DUMPABLE, 0)
            os.write(writer, b"x")
            time.sleep(60)
        os.read(reader, 1)
        record, name = SessionRecord.of(agent), ProcessName.of(agent)
        (tmp_path / NAME).write_bytes(record.to_line())

        unrecorded = tmp_path / "before it was recorded"

        def look() -> list[object]:
            left = [survivors(tmp_path / "empty", out, patience_s=0) for out in (tmp_path, unrecorded)]
            return [record.survivors(), name.alive, *left]

        hidden, shown = in_child(look, user=NOBODY), look()
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        return [hidden, shown == [[agent], True, [agent], []], look()]

    assert in_child(act) == [[None, True, None, None], True, [[], False, [], []]]


def test_where_a_machine_does_not_show_its_boot_or_namespace_nothing_is_said_to_be_gone(
    leader: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = SessionRecord.of(leader.pid)
    monkeypatch.setattr("glasshouse.runtime.watchdog.session_record._BOOT", "/proc/no-boot-id")
    unknown = SessionRecord.of(leader.pid)
    assert (unknown.survivors(), known.survivors()) == ([leader.pid], None)
    monkeypatch.setattr("glasshouse.runtime.watchdog.session_record._NAMESPACE", "/proc/no-namespace")
    assert SessionRecord.of(leader.pid).survivors() is None
    monkeypatch.undo()
    assert unknown.survivors() is None


def test_a_record_lies_in_the_runs_folder_until_the_worker_is_gone(
    leader: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    out, record = OutDir(str(tmp_path / "out")), SessionRecord.of(leader.pid)
    out.worker_gone()  # most runs have none
    out.worker(record)
    kept = tmp_path / "out" / NAME
    assert kept.stat().st_mode & 0o777 == 0o600
    assert SessionRecord.from_line(kept.read_bytes()) == record
    out.worker_gone()
    assert not kept.exists()


@pytest.mark.parametrize("lives", [False, True])
def test_a_record_stays_if_something_of_the_worker_does(
    leader: subprocess.Popen[bytes], tmp_path: Path, lives: bool
) -> None:
    out = OutDir(str(tmp_path / "out"))
    out.worker(SessionRecord.of(leader.pid))
    worker = SimpleNamespace(end=lambda: None, lives=lambda: lives)
    processes = SimpleNamespace(worker=worker, relay=None)
    run = SimpleNamespace(session=None, leg=None, collecting=None, processes=processes, sealed_log=None, out=out)
    zeroize._end_worker(run)  # type: ignore[arg-type]
    assert (tmp_path / "out" / NAME).exists() == lives


@pytest.mark.parametrize("line", [b"", b"1 2 boot", b"one 2 boot namespace", b"\xff 2 boot namespace", b"1" * 300])
def test_a_damaged_record_is_not_taken_for_none(tmp_path: Path, line: bytes) -> None:
    (tmp_path / NAME).write_bytes(line)
    assert survivors(tmp_path / "empty", tmp_path, patience_s=0) is None
    (tmp_path / NAME).unlink()
    assert survivors(tmp_path / "empty", tmp_path, patience_s=0) == []
