"""What a worker may say, and what the agent does with a worker that says something else."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.errors import Code, RunError
from glasshouse.evidence.receipt import Work
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.worker import worker_messages
from glasshouse.runtime.worker.worker_messages import (
    Failed,
    Finished,
    Losses,
    Message,
    Opened,
    OutputBegins,
    OutputEnds,
    Progress,
    Ready,
    Sandbox,
    WorkerLink,
    parse,
)
from glasshouse.wire import frames

FINISHED: dict[str, Any] = {
    "type": "finished",
    "work": {"unit": "step", "done": 3, "elapsed_us": 7, "stop_reason": "steps"},
    "loss": {"first": "1.5", "final": "0.25"},
    "trainable": 270336,
    "digests": {"adapter": "ab" * 32},
}


class Ends:
    """Both ends of the socket."""

    def __init__(self) -> None:
        ours, self.worker = socket.socketpair()
        self.loop = Loop()
        self.messages: list[Message] = []
        self.data: list[bytes] = []
        self.closed = False
        self.link = WorkerLink(
            ours,
            self.loop,
            on_message=self.messages.append,
            on_data=lambda view: self.data.append(bytes(view)),
            on_closed=self._close,
        )

    def _close(self) -> None:
        self.closed = True

    def settle(self) -> None:
        self.loop.sleep(0.02)

    def say(self, data: bytes) -> None:
        self.worker.sendall(data)
        self.settle()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.link.close()
    ends.worker.close()


def test_messages_and_data_arrive_in_order_however_they_are_cut(ends: Ends) -> None:
    payload = os.urandom(3000)
    stream = frames.control({"type": "opened"}) + frames.data_header(3000) + payload
    stream += frames.control({"type": "output-end", "sha256": "00" * 32})
    for at in range(0, len(stream), 7):
        ends.worker.sendall(stream[at : at + 7])
        ends.loop.step(0)
    ends.settle()
    assert ends.messages == [Opened(), OutputEnds(sha256=bytes(32))]
    assert ends.data == [payload]


def test_plaintext_is_gone_from_the_link_when_it_is_closed(ends: Ends) -> None:
    canary = os.urandom(64)
    ends.say(frames.data_header(64) + canary)
    assert ends.data == [canary]
    ends.link.close()
    assert not any(ends.link._payload)


def test_the_workers_end_closes(ends: Ends) -> None:
    ends.worker.sendall(frames.control({"type": "ready", "pid": 7}))
    ends.worker.close()
    ends.settle()
    assert ends.messages == [Ready(pid=7)]
    assert ends.closed


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x00\x01\x07x",
        b"\x00\x00\x00\x00\x01",
        (1 << 21).to_bytes(4, "big") + b"\x02",
        (1 << 19).to_bytes(4, "big") + b"\x01",
        b"\x00\x00\x00\x03\x01{ }",
        frames.control([1]),
        frames.control({"type": "released"}),
        frames.control({"type": "ready"}),
        frames.control({"type": "ready", "pid": 1, "more": 1}),
    ],
)
def test_a_worker_that_says_something_else_has_failed(ends: Ends, said: bytes) -> None:
    with pytest.raises(RunError) as caught:
        ends.say(said)
    assert caught.value.code is Code.WORKER_FAILED


def test_descriptors_reach_the_worker(ends: Ends) -> None:
    read, write = os.pipe()
    ends.link.send({"type": "grant", "bytes": 4096}, [write])
    data, descriptors, _, _ = socket.recv_fds(ends.worker, 4096, 4)
    assert data == frames.control({"type": "grant", "bytes": 4096})
    os.write(descriptors[0], b"x")
    assert os.read(read, 1) == b"x"
    for descriptor in (read, write, *descriptors):
        os.close(descriptor)


def test_a_worker_that_does_not_read_cannot_make_the_agent_wait(ends: Ends) -> None:
    def talk() -> None:
        for _ in range(10_000):
            ends.link.send({"type": "stop"})

    with pytest.raises(RunError) as caught:
        talk()
    assert caught.value.code is Code.WORKER_KILLED


@pytest.mark.parametrize("gone", [False, True], ids=["while it lives", "once it is gone"])
def test_a_worker_whose_bytes_take_long_to_receive_keeps_nothing_else_waiting(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """A descriptor comes with each byte, and is the agent's to close: here each receive takes a second."""
    passed_s = itertools.count()
    monkeypatch.setattr(worker_messages, "time", SimpleNamespace(monotonic=lambda: float(next(passed_s))))
    ends.worker.sendall(100 * frames.control({"type": "opened"}))
    heard: list[int] = []
    ends.loop.after(0, lambda: heard.append(len(ends.messages)))
    if gone:
        ends.link.drain()
    ends.loop.step()
    assert len(heard) == 1
    assert heard[0] < 5
    if not gone:
        for _ in range(1000):
            ends.loop.step(0.0)
        assert len(ends.messages) == 100


def test_a_finished_worker_says_what_it_did() -> None:
    assert parse(FINISHED) == Finished(
        work=Work(unit="step", done=3, elapsed_us=7, stop_reason="steps"),
        loss=Losses(first="1.5", final="0.25"),
        trainable=270336,
        digests={"adapter": bytes.fromhex("ab" * 32)},
    )
    assert parse({**FINISHED, "loss": None, "trainable": None, "digests": {}}).loss is None  # type: ignore[union-attr]


def test_progress_and_outputs() -> None:
    assert parse(
        {"type": "progress", "done": 1, "total": None, "unit": "epoch", "loss": "1e-05", "elapsed_us": 2}
    ) == Progress(done=1, total=None, unit="epoch", loss="1e-05", elapsed_us=2)
    assert parse(
        {"type": "output", "name": "checkpoints/1.safetensors", "kind": "checkpoint", "class": "weights", "bytes": 0}
    ) == OutputBegins(name="checkpoints/1.safetensors", kind="checkpoint", content="weights", size=0)


def test_the_sandbox_report_is_for_others_to_judge() -> None:
    report = {"type": "sandbox", "landlock": 4}
    assert parse(report) == Sandbox(report=report)


@pytest.mark.parametrize("code", ["package-revoked", "residue-found", "lease-lost", "no-such-code"])
def test_a_worker_cannot_speak_for_the_gate_or_the_agent(code: str) -> None:
    assert parse({"type": "failed", "code": code}) == Failed(code=Code.WORKER_FAILED)


@pytest.mark.parametrize("code", ["nonfinite-loss", "checkpoint-refused", "checkpoint-tampered"])
def test_a_worker_may_say_why_it_failed(code: str) -> None:
    assert parse({"type": "failed", "code": code}) == Failed(code=Code(code))


@pytest.mark.parametrize(
    "change",
    [
        {"work": {**FINISHED["work"], "stop_reason": "A path /home/alice"}},
        {"work": {**FINISHED["work"], "stop_reason": "paced"}},  # no reason of any run
        {"work": {**FINISHED["work"], "unit": "patients"}},
        {"loss": {"first": "nan", "final": "0"}},
        {"loss": {"first": "1", "final": None}},
        {"digests": {"alice@example.org": "00" * 32}},
        {"digests": {f"d{i}": "00" * 32 for i in range(65)}},
        {"trainable": -1},
    ],
)
def test_free_text_and_nonsense_do_not_reach_the_evidence(change: dict[str, Any]) -> None:
    with pytest.raises(RunError):
        parse({**FINISHED, **change})


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../b", "a//b", "nul\x00", "line\n", "x" * 129, "a\\b"])
def test_output_names_that_would_leave_their_folder(name: str) -> None:
    with pytest.raises(RunError):
        parse({"type": "output", "name": name, "kind": "output", "class": "file", "bytes": 1})


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """Give a connection whose closing waits until its peer has read all that it sent; the peer reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        peer = listener.accept()[0]
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.send(bytes(1 << 20)):
            continue
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
    with peer:
        yield connection


@pytest.mark.parametrize("read", [True, False], ids=["received", "unread"])
def test_a_connection_of_the_workers_that_lingers_does_not_keep_the_agent(
    monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """Ranks have TCP: one that was handed over kept the agent from its lease, its duration and its signals."""
    monkeypatch.setattr(worker_messages, "refuse_descriptors", lambda _connection: None)  # as before Linux 6.16
    ends = Ends()
    ready = frames.control({"type": "ready", "pid": 7})
    with contextlib.ExitStack() as peers:
        for _ in range(3):
            connection = peers.enter_context(lingering())
            socket.send_fds(ends.worker, [ready], [connection.fileno()])
            connection.close()
        if read:
            while not ends.messages:
                ends.loop.step(1.0)
        ends.link.close()
        ends.worker.close()


def test_where_the_kernel_can_it_refuses_descriptors_beside_what_the_worker_sends(ends: Ends) -> None:
    """From Linux 6.16 on; before, they are closed under a timer."""
    read, write = os.pipe()
    try:
        refused = ends.worker.getsockopt(socket.SOL_SOCKET, 83) == 1  # not set on this end: the kernel has it
    except OSError:
        refused = False
    for descriptor in (read, write):
        with pytest.raises(PermissionError) if refused else contextlib.nullcontext():
            socket.send_fds(ends.worker, [frames.control({"type": "ready", "pid": 7})], [descriptor])
        os.close(descriptor)
    ends.settle()
    assert len(ends.messages) == (0 if refused else 2)
