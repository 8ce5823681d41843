"""The conversation with a worker: every step in its turn, and why one ended that said nothing."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, RunError
from glasshouse.package.limits import OutputLimits
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.keys.sealing import Outputs, Sealing
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.worker import worker_session
from glasshouse.runtime.worker.worker_messages import Progress
from glasshouse.runtime.worker.worker_session import Stage, WorkerSession
from glasshouse.wire import frames
from glasshouse.wire.crypto import RecipientKey, sha256
from simulators.line_keeper_bench import LegBench

FINISHED: dict[str, Any] = {
    "type": "finished",
    "work": {"unit": "step", "done": 1, "elapsed_us": 1, "stop_reason": "steps"},
    "loss": None,
    "trainable": None,
    "digests": {},
}


EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


class FakeWorker:
    """A process that does nothing, and the worker's end of the link, on which the test speaks for it."""

    def __init__(self, link: socket.socket, theirs: socket.socket) -> None:
        self.link = link
        self.pidfd = -1
        self.held = False
        self._reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = b"\xff"
            try:
                faulthandler.disable()
                os.close(self._writer)
                theirs.close()
                code = os.read(self._reader, 1)
            finally:
                os._exit(code[0] if code else 0)

    def confirm(self, _report: object) -> None:
        self.pidfd = os.pidfd_open(self.pid)

    def exit(self, code: int) -> None:
        os.write(self._writer, bytes([code]))

    def poll(self) -> int | None:
        if self.held:
            return None
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for descriptor in (self._reader, self._writer, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        # It may be called twice, and the numbers may be another's by then.
        self._reader = self._writer = self.pidfd = -1


class Talk:
    """A session, and the words of its worker."""

    def __init__(self, folder: Path) -> None:
        ours, self.theirs = socket.socketpair()
        self.loop, self.worker = Loop(), FakeWorker(ours, self.theirs)
        self.progress: list[Progress] = []
        self.outputs: list[str] = []
        self.heard: list[Stage | Progress] = []
        self.session = WorkerSession(
            self.worker,  # type: ignore[arg-type]
            self.loop,
            on_stage=self.heard.append,
            on_progress=lambda progress: (self.progress.append(progress), self.heard.append(progress)),
            on_output=lambda header, _sealed: self.outputs.append(header.name),
            sealing=contextlib.nullcontext,
        )
        sealing = Sealing(
            recipients=(RecipientKey.generate().public,), run_id=secrets.token_hex(16), manifest_sha256=bytes(32)
        )
        self.out = OutDir(str(folder / "out"))
        self.sealed = Outputs(self.out, sealing, OutputLimits())

    def say(self, *messages: dict[str, Any] | bytes) -> None:
        for message in messages:
            data = frames.data_header(len(message)) + message if isinstance(message, bytes) else frames.control(message)
            self.theirs.sendall(data)
            self.loop.step(0)

    def until(self, stage: Stage) -> None:
        """Bring the worker to a stage."""
        words: list[tuple[Stage, dict[str, Any]]] = [
            (Stage.CONFIRMED, {"type": "sandbox"}),
            (Stage.READY, {"type": "ready", "pid": 1}),
            (Stage.IMPORTED, {"type": "imported", "us": 5}),
            (Stage.OPENED, {"type": "opened"}),
            (Stage.RUNNING, {"type": "running"}),
            (Stage.FINISHED, FINISHED),
        ]
        for reached, message in words:
            if reached > stage:
                return
            if reached is Stage.OPENED:
                self.session.give(0, 4096, 0, self.sealed)
            self.say(message)
        assert self.session.stage is stage

    def close(self) -> None:
        self.session.end()
        self.theirs.close()


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    talk = Talk(tmp_path)
    yield talk
    talk.close()


def progress(done: int) -> dict[str, Any]:
    return {"type": "progress", "done": done, "total": 9, "unit": "step", "loss": "0.5", "elapsed_us": done}


def test_a_worker_goes_from_step_to_step(talk: Talk) -> None:
    talk.until(Stage.FINISHED)
    assert talk.session.imports_us == 5
    assert talk.session.finished is not None
    talk.worker.exit(0)
    talk.session.wait_for_end(within_s=5)


def test_what_a_worker_says_in_one_breath_is_heard_in_its_order(talk: Talk) -> None:
    talk.until(Stage.IMPORTED)
    talk.session.give(0, 4096, 0, talk.sealed)
    words = [{"type": "opened"}, {"type": "running"}, progress(1), FINISHED]
    talk.theirs.sendall(b"".join(map(frames.control, words)))
    talk.session.reach(Stage.OPENED, within_s=20)
    assert talk.session.stage is Stage.FINISHED, "it was a single read"
    assert talk.heard[:2] == [Stage.OPENED, Stage.RUNNING]
    assert [heard.done for heard in talk.heard[2:] if isinstance(heard, Progress)] == [1]


def test_a_worker_that_takes_too_long_has_failed(talk: Talk) -> None:
    with pytest.raises(RunError) as caught:
        talk.session.reach(Stage.READY, within_s=0.05)
    assert caught.value.code is Code.WORKER_FAILED


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (Stage.STARTED, {"type": "ready", "pid": 1}),
        (Stage.CONFIRMED, {"type": "sandbox"}),
        (Stage.READY, {"type": "opened"}),
        (Stage.IMPORTED, {"type": "running"}),
        (Stage.IMPORTED, {"type": "opened"}),
        (Stage.OPENED, progress(1)),
        (Stage.OPENED, FINISHED),
        (Stage.RUNNING, {"type": "running"}),
        (Stage.RUNNING, {"type": "output-end", "sha256": "00" * 32}),
        (Stage.RUNNING, b"plaintext that nobody announced"),
        (Stage.READY, b"plaintext before there is a grant"),
        (Stage.FINISHED, progress(1)),
        (Stage.RUNNING, {"type": "part", "previous": None, "rank": 0, "seq": 1, "step": 1}),
        (Stage.RUNNING, {"type": "checkpoint", "others": [], "seq": 1, "step": 1}),
        (Stage.RUNNING, {"type": "pace-parked", "done": 0}),
        (Stage.RUNNING, {"type": "pace-slice"}),
        (Stage.FINISHED, FINISHED),
    ],
)
def test_a_word_out_of_its_turn_ends_the_run(talk: Talk, stage: Stage, message: dict[str, Any] | bytes) -> None:
    talk.until(stage)
    with pytest.raises(RunError) as caught:
        talk.say(message)
    assert caught.value.code is Code.WORKER_FAILED


def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second last half of one."""
    monkeypatch.setattr(worker_session, "PROGRESS_INTERVAL_S", 0.5001)
    monkeypatch.setattr(worker_session, "PROGRESS_US", 500_000)


def test_progress_is_told_once_a_second_and_no_sooner_for_an_output_or_the_end(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    quickly(monkeypatch)
    talk.until(Stage.RUNNING)
    talk.say(*(progress(done) for done in range(1, 6)))
    assert [one.done for one in talk.progress] == [1]
    talk.loop.sleep(0.6)
    assert [one.done for one in talk.progress] == [1, 5]
    talk.say(progress(6))
    talk.say({"type": "output", "name": "a", "kind": "output", "class": "file", "bytes": 0})
    talk.say({"type": "output-end", "sha256": EMPTY_SHA256}, progress(7), FINISHED)
    assert talk.session.stage is Stage.FINISHED
    assert [one.done for one in talk.progress] == [1, 5], "what came within the second is left out"
    talk.loop.sleep(0.6)
    assert [one.done for one in talk.progress] == [1, 5], "and does not come after the end of the work"


def test_the_work_is_no_less_than_was_reported_and_no_longer_than_it_lasted(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    talk.say(progress(5), FINISHED | {"work": FINISHED["work"] | {"done": 2, "elapsed_us": 2**50}})
    assert talk.session.finished is not None
    assert talk.session.finished.work.done == 5
    assert talk.session.finished.work.elapsed_us < 60_000_000


def test_outputs_are_taken_while_it_works(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    header = {"type": "output", "name": "a", "kind": "output", "class": "file", "bytes": 6}
    talk.say(header, b"abc", b"def", {"type": "output-end", "sha256": sha256(b"abcdef").hex()})
    assert talk.outputs == ["a"]


def test_a_worker_cannot_finish_in_the_middle_of_an_output(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    talk.say({"type": "output", "name": "a", "kind": "output", "class": "file", "bytes": 6})
    with pytest.raises(RunError):
        talk.say(FINISHED)


def test_parts_of_a_checkpoint_come_between_outputs_and_progress_between_their_frames(
    talk: Talk, tmp_path: Path
) -> None:
    leg = LegBench(tmp_path / "leg")
    talk.until(Stage.IMPORTED)
    talk.session.give(0, 4096, 0, talk.sealed, parts=leg.intake)
    part = bytes(4096)
    talk.say({"type": "opened"}, {"type": "running"})
    talk.say({"type": "part", "previous": None, "rank": 0, "seq": 1, "step": 1}, part[:4000])
    talk.say(progress(1), part[4000:])
    talk.say({"type": "part-end", "bytes": 4096})
    talk.say({"type": "checkpoint", "others": [], "seq": 1, "step": 1})
    talk.say(OUTPUT, b"abc", {"type": "output-end", "sha256": sha256(b"abc").hex()})
    assert [one.done for one in talk.progress] == [1]
    assert talk.outputs == ["a"]
    talk.theirs.recv(1 << 16)  # the grant: a read ends where descriptors come
    ((_, kept),) = frames.Decoder().feed(talk.theirs.recv(1 << 16))
    assert isinstance(kept, dict)
    assert (kept["type"], kept["rank"]) == ("part-kept", 0)
    leg.settle()
    assert len(leg.gate.tickets) == 1


OUTPUT = {"type": "output", "name": "a", "kind": "output", "class": "file", "bytes": 3}


@pytest.mark.parametrize("message", [FINISHED, OUTPUT], ids=["its end", "an output"])
def test_nothing_else_may_come_within_a_part(talk: Talk, tmp_path: Path, message: dict[str, Any]) -> None:
    leg = LegBench(tmp_path / "leg")
    talk.until(Stage.IMPORTED)
    talk.session.give(0, 4096, 0, talk.sealed, parts=leg.intake)
    talk.say({"type": "opened"}, {"type": "running"})
    talk.say({"type": "part", "previous": None, "rank": 0, "seq": 1, "step": 1})
    with pytest.raises(RunError) as caught:
        talk.say(message)
    assert caught.value.code is Code.WORKER_FAILED


def test_a_worker_that_gives_up_says_why(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    with pytest.raises(RunError) as caught:
        talk.say({"type": "failed", "code": "nonfinite-loss"})
    assert caught.value.code is Code.NONFINITE_LOSS


def ended(talk: Talk) -> Code:
    with pytest.raises(RunError) as caught:
        talk.loop.run_until(lambda: False, within_s=5)
    return caught.value.code


def test_an_end_without_a_word_has_failed(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    talk.worker.exit(0)
    assert ended(talk) is Code.WORKER_FAILED


def test_a_crash_has_failed(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    # Not SIGSEGV: a compiler that other tests load handles that one, and writes down where every thread stands first.
    os.kill(talk.worker.pid, signal.SIGVTALRM)
    assert ended(talk) is Code.WORKER_FAILED


def test_a_kill_from_outside_is_called_that(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    os.kill(talk.worker.pid, signal.SIGKILL)
    assert ended(talk) is Code.WORKER_KILLED


def test_a_kill_for_want_of_memory_is_called_that(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    talk.until(Stage.RUNNING)
    before = worker_session.oom_kills()
    monkeypatch.setattr(worker_session, "oom_kills", lambda: before + 1)
    os.kill(talk.worker.pid, signal.SIGKILL)
    assert ended(talk) is Code.OUT_OF_MEMORY


def test_a_rank_that_the_kernel_ended_for_want_of_memory_is_called_that(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker sees only that a rank is gone; what the kernel counts, the agent sees."""
    talk.until(Stage.RUNNING)
    before = worker_session.oom_kills()
    monkeypatch.setattr(worker_session, "oom_kills", lambda: before + 1)
    with pytest.raises(RunError) as caught:
        talk.say({"type": "failed", "code": "rank-lost"})
    assert caught.value.code is Code.OUT_OF_MEMORY


@pytest.mark.parametrize("code", [Code.COLLECTIVE_TAMPERED, Code.RANK_LOST, Code.GROUP_SECRET])
def test_a_worker_of_several_ranks_may_give_a_collectives_reason(talk: Talk, code: Code) -> None:
    talk.until(Stage.RUNNING)
    with pytest.raises(RunError) as caught:
        talk.say({"type": "failed", "code": code.value})
    assert caught.value.code is code


def test_one_that_ended_and_cannot_be_reaped_was_killed_under_somebodys_eyes(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    talk.worker.held = True
    talk.worker.exit(0)
    assert ended(talk) is Code.WORKER_KILLED


def test_last_words_are_heard_before_an_end_is_judged(talk: Talk) -> None:
    talk.until(Stage.RUNNING)
    talk.theirs.sendall(frames.control({"type": "failed", "code": "script-failed"}))
    talk.worker.exit(1)
    os.waitid(os.P_PID, talk.worker.pid, os.WEXITED | os.WNOWAIT)
    assert ended(talk) is Code.SCRIPT_FAILED


def test_an_exit_code_after_finishing_is_still_a_failure(talk: Talk) -> None:
    talk.until(Stage.FINISHED)
    talk.worker.exit(3)
    assert ended(talk) is Code.WORKER_FAILED


def test_a_link_that_closes_before_the_sandbox_spoke(talk: Talk) -> None:
    talk.theirs.close()
    assert ended(talk) is Code.WORKER_FAILED
