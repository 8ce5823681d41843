"""The worker's end of the socket: frames that cannot mix, and no life after the agent."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.task import channel
from glasshouse.task.channel import AgentLink, EventLines
from glasshouse.wire import frames


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, AgentLink]]:
    agent, worker = socket.socketpair()
    agent.settimeout(10)
    with agent, worker:
        yield agent, AgentLink(worker)


def header(name: str, size: int) -> dict[str, object]:
    return {"type": "output", "name": name, "kind": "output", "class": "file", "bytes": size}


def received(agent: socket.socket, *, until: str) -> list[tuple[int, object]]:
    decoder, found = frames.Decoder(), []
    while not any(kind == frames.CONTROL and value["type"] == until for kind, value in found):
        found += list(decoder.feed(agent.recv(1 << 16)))
    return found


def test_an_output_leaves_in_pieces_between_its_header_and_its_digest(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    data = os.urandom((1 << 20) * 2 + 17)
    sender = threading.Thread(target=link.output, args=(header("w", len(data)), io.BytesIO(data)))
    sender.start()
    found = received(agent, until="output-end")
    sender.join()
    pieces = [bytes(value) for kind, value in found if kind == frames.DATA]
    assert [len(piece) for piece in pieces] == [1 << 20, 1 << 20, 17]
    assert b"".join(pieces) == data
    assert found[0][1] == header("w", len(data))
    assert found[-1][1] == {"type": "output-end", "sha256": hashlib.sha256(data).hexdigest()}


def test_an_empty_output_has_no_piece(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    link.output(header("empty", 0), io.BytesIO())
    assert [kind for kind, _ in received(agent, until="output-end")] == [frames.CONTROL, frames.CONTROL]


def test_progress_from_another_thread_does_not_fall_into_an_output(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    data = bytes(3 << 20)
    threads = [
        threading.Thread(target=link.output, args=(header("w", len(data)), io.BytesIO(data))),
        # As many as the socket holds when the last of them come after the output, where nothing reads any more.
        threading.Thread(target=lambda: [link.send({"type": "progress", "done": n}) for n in range(50)]),
    ]
    for thread in threads:
        thread.start()
    found = received(agent, until="output-end")
    for thread in threads:
        thread.join()
    kinds = [kind for kind, _ in found]
    first, last = kinds.index(frames.DATA), len(kinds) - 1 - kinds[::-1].index(frames.DATA)
    assert set(kinds[first:last]) == {frames.DATA}


def test_an_output_that_shrinks_while_it_is_sent_is_an_error(ends: tuple[socket.socket, AgentLink]) -> None:
    _, link = ends
    with pytest.raises(FormatError) as broken:
        link.output(header("w", 10), io.BytesIO(b"123"))
    assert broken.value.code is Code.SOURCE_CHANGED


def test_descriptors_come_with_their_message(ends: tuple[socket.socket, AgentLink], tmp_path: Path) -> None:
    agent, link = ends
    (tmp_path / "x").write_bytes(b"content")
    with (tmp_path / "x").open("rb") as file:
        socket.send_fds(agent, [frames.control({"type": "grant", "bytes": 7})], [file.fileno(), file.fileno()])
    assert link.receive() == {"type": "grant", "bytes": 7}
    first, second = link.take_descriptors(2)
    assert os.pread(first, 7, 0) == os.pread(second, 7, 0) == b"content"
    os.close(first)
    os.close(second)


def test_a_grant_without_its_descriptors_is_refused(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    agent.sendall(frames.control({"type": "grant", "bytes": 7}))
    link.receive()
    with pytest.raises(FormatError):
        link.take_descriptors(2)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_descriptors_that_no_message_takes_are_closed(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    before = open_descriptors()
    for _ in range(20):
        socket.send_fds(agent, [frames.control({"type": "progress"})], [agent.fileno()] * 4)
        assert link.receive() == {"type": "progress"}
    assert open_descriptors() <= before + 4
    with pytest.raises(FormatError):
        link.take_descriptors(1)
    assert open_descriptors() == before


def test_descriptors_beside_a_message_that_does_not_end_are_bounded(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    before, whole = open_descriptors(), frames.control({"type": "progress"})
    for piece in (whole[:1], whole[1:2]):
        socket.send_fds(agent, [piece], [agent.fileno()] * 4)
    with pytest.raises(FormatError):
        link.receive()
    link.close()
    assert open_descriptors() == before - 1


def test_descriptors_come_with_the_second_of_two_messages(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    agent.sendall(frames.control({"type": "progress"}))
    grant = frames.control({"type": "grant", "bytes": 7})
    socket.send_fds(agent, [grant[:9]], [agent.fileno()])
    assert link.receive() == {"type": "progress"}
    agent.sendall(grant[9:])
    assert link.receive()["type"] == "grant"
    os.close(*link.take_descriptors(1))


@pytest.mark.parametrize(
    "sent", [b"\xff\xff\xff\xff\x01", b"\x00\x00\x00\x01\x02x", frames.control([]), b"\x00\x00\x00\x01\x01{"]
)
def test_what_is_no_message_is_refused(ends: tuple[socket.socket, AgentLink], sent: bytes) -> None:
    agent, link = ends
    agent.sendall(sent)
    with pytest.raises(FormatError):
        link.receive()


def test_the_agent_going_away_is_noticed(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    agent.close()
    with pytest.raises(EOFError):
        link.receive()


def test_stop_is_heard_once_while_the_job_works(ends: tuple[socket.socket, AgentLink]) -> None:
    agent, link = ends
    heard = threading.Semaphore(0)
    # The thread is not started through `listen`: it would end this very process with the fixture's socket.
    listener = threading.Thread(target=lambda: _until_eof(link, heard.release), daemon=True)
    listener.start()
    agent.sendall(frames.control({"type": "stop"}) * 2)
    assert heard.acquire(timeout=10)
    agent.shutdown(socket.SHUT_RDWR)
    listener.join(timeout=10)
    assert link.stopping
    assert not heard.acquire(blocking=False)


def _until_eof(link: AgentLink, on_stop: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "_END_PROCESS", lambda code: None)
        link._listen(on_stop)  # type: ignore[arg-type]


def test_a_worker_does_not_outlive_its_agent() -> None:
    agent, worker = socket.socketpair()
    code = (
        "import socket, sys, time; from glasshouse.task.channel import AgentLink\n"
        "AgentLink(socket.socket(fileno=int(sys.argv[1]))).listen(); print('on', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(worker.fileno())], pass_fds=[worker.fileno()], stdout=subprocess.PIPE
    ) as process:
        worker.close()
        assert process.stdout is not None
        assert process.stdout.readline() == b"on\n"
        agent.close()
        assert process.wait(timeout=10) == 1


def test_only_the_process_itself_may_speak(
    ends: tuple[socket.socket, AgentLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, link = ends
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError):
        link.send({"type": "progress"})


def test_the_raw_leg_writes_lines_and_files(tmp_path: Path) -> None:
    events = io.BytesIO()
    channel = EventLines(events, tmp_path)
    digest = channel.output(header("sub/a.txt", 3), io.BytesIO(b"abc"))
    assert (tmp_path / "sub" / "a.txt").read_bytes() == b"abc"
    assert digest == hashlib.sha256(b"abc").hexdigest()
    assert [line[:2] for line in events.getvalue().splitlines()] == [b'{"', b'{"']
