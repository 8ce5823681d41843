"""Where ranks meet their worker: real processes with real tokens, and others that should get nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code
from glasshouse.runtime.kernel import REAL
from glasshouse.wire import frames, ranks
from glasshouse.workloads.distributed import rank_server
from glasshouse.workloads.distributed.rank_messages import Report
from glasshouse.workloads.distributed.rank_server import RankServer
from simulators.rank_places import PATIENCE_S, SECRET, RankPlace
from tools.forked import in_child
from tools.sandboxed import is_gone
from tools.waiting import wait_for

# What a rank does before its script; `channel` is its end.
JOIN = """
import os, sys, time, io
from glasshouse.workloads.process.undumpable import close_to_others
from glasshouse.workloads.distributed.rank_channel import RankChannel
from glasshouse.errors import GlasshouseError
def said(action):
    try:
        return action()
    except GlasshouseError as error:
        return error.code.value, error.message
"""
JOINED = (
    JOIN
    + """
close_to_others()
channel = RankChannel()
channel.listen(lambda: print("stop", flush=True))
def save(name, data=b"plain", kind="output"):
    return channel.output({"name": name, "kind": kind}, io.BytesIO(data))
"""
)


class Place(RankPlace[RankServer]):
    """Ranks that have tokens."""

    def __init__(self, folder: Path, **given: Any) -> None:
        super().__init__(RankServer, folder, **given)

    def start(self, code: str, rank: int = 0, tokens: dict[str, str] | None = None) -> subprocess.Popen[str]:
        invited = self.server.issue_tokens(rank) if tokens is None else tokens
        return self.spawn(code, {ranks.SOCKET: self.server.path, "RANK": str(rank), **invited})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    with place.server:
        yield place
    place.close()


def ask(path: str, request: ranks.Request) -> Any:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(request.frame())
        answer = connection.recv(ranks.MAX_FRAME_BYTES)
    return next(iter(frames.Decoder().feed(answer)))[1] if answer else None


# joining


def test_a_rank_is_handed_what_the_job_has_and_its_tokens_leave_its_environment(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.write_bytes(b"sealed bytes")
    descriptor = os.open(package, os.O_RDONLY)
    place = Place(tmp_path, descriptors=(descriptor,))
    with place.server:
        code = """
descriptor = channel.take_descriptors(1)[0]
print(channel.rank, channel.joined["bytes"], os.read(descriptor, 20), "GLASSHOUSE_RANK_TOKEN" in os.environ)
from glasshouse.collectives.secret import group_secret
print(bytes(group_secret()).hex(), "GLASSHOUSE_GROUP_TOKEN" in os.environ)
"""
        lines = place.say(JOINED + code, rank=3)
    os.close(descriptor)
    assert lines == ["3 7 b'sealed bytes' False", f"{SECRET.hex()} False"]


def test_a_token_is_good_once_and_for_one_thing(place: Place) -> None:
    tokens = place.server.issue_tokens(0)
    join, secret = (bytes.fromhex(tokens[name]) for name in (ranks.JOIN_TOKEN, ranks.SECRET_TOKEN))
    refused = {"code": "rank-refused", "type": "refused"}
    assert ask(place.server.path, ranks.Request(kind="group-secret", token=join)) == refused
    assert ask(place.server.path, ranks.Request(kind="join", token=secret)) == refused
    assert ask(place.server.path, ranks.Request(kind="join", token=bytes(32))) == refused
    # None of these spent it; the rank that it was made for does.
    code = JOINED + "print(channel.rank); tokens = dict(os.environ)"
    assert place.start(code, tokens=tokens).communicate(timeout=PATIENCE_S)[0] == "0\n"
    assert "is given nothing" in place.start(JOINED, tokens=tokens).communicate(timeout=PATIENCE_S)[0]


def test_a_process_that_the_worker_did_not_start_gets_nothing_and_spends_the_token_it_stole(place: Place) -> None:
    tokens = place.server.issue_tokens(0)
    for kind, name in (("join", ranks.JOIN_TOKEN), ("group-secret", ranks.SECRET_TOKEN)):
        answer = ask(place.server.path, ranks.Request(kind=kind, token=bytes.fromhex(tokens[name])))
        assert answer == {"code": "rank-refused", "type": "refused"}
    # Whoever it was stolen from is told, instead of working beside the thief.
    assert "is given nothing" in place.start(JOINED, tokens=tokens).communicate(timeout=PATIENCE_S)[0]


def test_a_child_of_a_rank_is_not_a_rank(place: Place) -> None:
    code = """
import subprocess
inner = "from glasshouse.workloads.distributed.rank_channel import RankChannel; RankChannel()"
done = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True)
print("is given nothing" in done.stderr)
from glasshouse.collectives.secret import group_secret
done = subprocess.run(
    [sys.executable, "-c", "from glasshouse.collectives.secret import group_secret; group_secret()"],
    capture_output=True, text=True)
print("group-secret-missing" in done.stderr)
"""
    assert place.say(JOIN + code) == ["True", "True"]


CLOSED_STORY = {
    "closed": (JOINED + "print('joined')", "joined"),
    "open to others": (JOIN + "print(said(RankChannel)[0])", "rank-refused"),
}


@pytest.mark.parametrize("case", list(CLOSED_STORY))
def test_a_rank_that_others_could_read_is_handed_nothing(tmp_path: Path, case: str) -> None:
    code, expected = CLOSED_STORY[case]

    def story() -> list[str]:
        REAL.drop_capabilities()  # as in the sandbox: with CAP_SYS_PTRACE every process can be read
        place = Place(tmp_path, closed=True)
        with place.server:
            return place.say(code)

    assert in_child(story) == [expected]


def test_whoever_connects_and_says_nothing_does_not_keep_ranks_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_server, "_ASKING_S", 1.0)
    silent = []
    for _ in range(5):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place.server.path)
        silent.append(connection)
    silent[0].sendall(b"\xff" * 64)
    silent[1].sendall(frames.control({"type": "join"}))
    silent[2].sendall(bytes([0, 0, 1, 0, 1]) + b"{")
    assert place.say(JOINED + "print(channel.rank)") == ["0"]
    for connection in silent:
        connection.close()


def test_the_end_of_the_worker_is_the_end_of_a_rank(tmp_path: Path) -> None:
    def worker() -> int:
        place = Place(tmp_path)
        place.server.__enter__()
        process = place.start(JOINED + "print('at work', flush=True); time.sleep(60)")
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        return process.pid

    rank = in_child(worker)
    wait_for(lambda: is_gone(rank))


# speaking for the job


def test_rank_0_speaks_for_the_job_and_the_others_are_not_heard(place: Place) -> None:
    code = JOINED + (
        "channel.send({'type': 'progress', 'done': 4})\n"
        "from glasshouse.workloads.distributed.rank_messages import Report\n"
        "channel.send(Report(done=10 + channel.rank, elapsed_us=5, loss_first='2.5', trainable=7,"
        " stop_reason='steps', digests={'adapter': '00'}).to_json())\n"
    )
    for rank in (1, 0, 2):
        assert place.say(code, rank) == []
    place.server.settle()
    assert place.channel.messages == [{"type": "progress", "done": 4}]
    assert place.server.report == Report(
        done=10, elapsed_us=5, loss_first="2.5", trainable=7, stop_reason="steps", digests={"adapter": "00"}
    )


def test_rank_0_saves_outputs_of_any_kind_of_source(place: Place) -> None:
    code = """
import tempfile
print(save("a.txt", b"from memory"))
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 3_000_000); file.flush(); file.seek(0)
    channel.output({"name": "big", "kind": "checkpoint"}, file)
print(save("empty", b""))
"""
    lines = place.say(JOINED + code)
    assert place.channel.outputs == {"a.txt": b"from memory", "big": b"x" * 3_000_000, "empty": b""}
    assert lines == [hashlib.sha256(data).hexdigest() for data in (b"from memory", b"")]


def test_what_is_refused_is_refused_in_the_rank_with_its_reason(place: Place) -> None:
    with place.task.save("taken") as out:
        out.write(b"by the worker's own task")
    code = """
print(said(lambda: save("taken"))[0])
print(said(lambda: save("../escape"))[0])
print(said(lambda: save("model.pt", b"\\x80\\x04pickle"))[1])
print(said(lambda: save("good")) != "")
"""
    lines = place.say(JOINED + code)
    assert lines[:2] == ["output-refused"] * 2
    assert "pickle" in lines[2]
    assert sorted(place.channel.outputs) == ["good", "taken"]


def test_another_rank_saves_nothing_even_if_its_own_end_would_let_it(place: Place) -> None:
    code = """
print(said(lambda: save("mine")))
channel.rank = 0
print(said(lambda: save("mine")))
"""
    lines = place.say(JOINED + code, rank=1)
    assert "rank 1 may not save 'mine': only the first rank of a machine saves outputs" in lines[0]
    assert "output folder" not in lines[0]  # which is the hint
    assert lines[1] == "('output-refused', 'only the first rank of a machine saves outputs')"
    assert place.channel.outputs == {}


def test_a_rank_that_speaks_past_its_own_end_is_not_heard_either(place: Place) -> None:
    """The server itself tells ranks apart: a script may do with its end what it likes."""
    code = JOINED + (
        "channel._link.send({'type': 'progress', 'done': 4})\n"
        "from glasshouse.workloads.distributed.rank_messages import Report\n"
        "channel._link.send(Report(done=9, elapsed_us=5).to_json())\n"
        "channel._link.send({'type': 'finished'})\n"
    )
    place.say(code, rank=1)
    place.server.settle()
    assert place.channel.messages == []
    assert place.server.report == Report()


def test_a_peer_that_trickles_is_not_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_server, "_ASKING_S", 1.0)
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(place.server.path)
        slow.sendall(bytes([0, 0]))

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while True:
                    slow.sendall(b"\0")
                    time.sleep(0.1)

        thread = threading.Thread(target=trickle)
        thread.start()
        assert place.say(JOINED + "print(channel.rank)") == ["0"]
        thread.join(10)
        assert not thread.is_alive(), "it was closed"


def test_reasons_are_kept_in_the_order_in_which_they_came_and_forgotten_at_a_restart(place: Place) -> None:
    for rank, code in ((1, Code.COLLECTIVE_TAMPERED), (0, Code.RANK_LOST)):
        failed = {"type": "failed", "code": code.value, "words": f"what rank {rank} says"}
        place.say(JOINED + f"channel.send({failed!r})", rank)
        place.server.settle()
    first, second = (1, Code.COLLECTIVE_TAMPERED, "what rank 1 says"), (0, Code.RANK_LOST, "what rank 0 says")
    assert place.server.failures == [first, second]
    place.server.issue_tokens(1)
    assert place.server.failures == [second]


# the owner's stop


def test_a_stop_reaches_every_rank_also_one_that_joins_later(place: Place) -> None:
    code = JOINED + "print('ready', flush=True)\nwhile not channel.stopping: time.sleep(0.01)\ntime.sleep(0.2)"
    first = place.start(code, 0)
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    place.server.stop()
    late = place.start(code, 1)
    assert "stop" in first.communicate(timeout=PATIENCE_S)[0]
    assert "stop" in late.communicate(timeout=PATIENCE_S)[0]


def test_a_process_of_the_job_that_is_no_rank_may_not_speak_for_it(place: Place) -> None:
    code = """
pid = os.fork()
if pid == 0:
    try:
        channel.send({"type": "progress", "done": 1})
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    assert "only the process that Glasshouse started" in place.say(JOINED + code)[0]
    assert place.channel.messages == []


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "year"},
        {"done": -1},
        {"loss_first": "nan"},
        {"loss_first": 1},
        {"more": 1},
        {"done": None},
        {"digests": {"adapter": 1}},
    ],
)
def test_a_last_word_that_is_none_is_not_believed(change: dict[str, Any]) -> None:
    good = Report(done=1, elapsed_us=1, loss_final="1").to_json()
    assert Report.from_json(good).loss_final == "1"
    with pytest.raises(Exception, match="ended"):
        Report.from_json({**good, **change})


def test_the_meeting_place_is_closed_to_other_users_and_gone_at_the_end(place: Place) -> None:
    folder = Path(place.server.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    place.server.__exit__()
    assert not folder.exists()


def test_whether_ranks_must_be_closed_to_others_is_decided_by_each_leg() -> None:
    """A leg that forgot to say so would hand keys to a process that others may read."""
    with pytest.raises(TypeError, match="closed_to_others"):
        rank_server.Given(secret=SECRET, message={})  # type: ignore[call-arg]
