"""Ranks that inherit their connection: real processes at the other ends, and what none of them gets."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.runtime.kernel import REAL
from glasshouse.task.channel import AgentLink
from glasshouse.wire import frames
from glasshouse.workloads.distributed import rank_pairs, rank_server
from simulators.rank_places import JOINED, PATIENCE_S, SECRET, PairPlace
from tools.forked import in_child
from tools.sandboxed import is_gone
from tools.waiting import wait_for


@pytest.fixture
def place(tmp_path: Path) -> Iterator[PairPlace]:
    place = PairPlace(tmp_path)
    with place.server:
        yield place
    place.close()


# joining


def test_a_rank_is_handed_what_the_job_has_over_what_it_inherited(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.write_bytes(b"sealed bytes")
    descriptor = os.open(package, os.O_RDONLY)
    place = PairPlace(tmp_path, descriptors=(descriptor,))
    code = """
print(channel.rank, channel.inherited, channel.joined["bytes"], os.read(channel.take_descriptors(1)[0], 20))
print([name for name in os.environ if name.startswith(("GLASSHOUSE_GROUP", "GLASSHOUSE_RANK"))])
print(os.get_inheritable(channel._link._socket.fileno()))
"""
    with place.server:
        assert place.say(JOINED.replace("channel.listen", "0 and channel.listen") + code, rank=3) == [
            "3 True 7 b'sealed bytes'", "[]", "False"
        ]  # fmt: skip
    os.close(descriptor)
    place.close()


@pytest.mark.parametrize(("closing", "expected"), [("close_to_others()\n", ["0"]), ("", ["refused"])])
def test_a_rank_that_others_could_read_is_handed_nothing(tmp_path: Path, closing: str, expected: list[str]) -> None:
    code = JOINED.replace("close_to_others()\n", closing).replace(
        "channel = RankChannel()", "try: channel = RankChannel()\nexcept GlasshouseError: sys.exit('refused')"
    )

    def story() -> list[str]:
        REAL.drop_capabilities()  # as in the sandbox: with CAP_SYS_PTRACE every process can be read
        place = PairPlace(tmp_path, closed=True)
        with place.server:
            return place.say(code + "print(channel.rank)")

    assert in_child(story) == expected


def test_the_secret_is_given_once_in_the_life_of_a_rank(place: PairPlace) -> None:
    code = "print(channel.group_secret().hex()); print(said(channel.group_secret))"
    assert place.say(JOINED + code, rank=1) == [SECRET.hex(), "CollectiveError"]
    assert place.say(JOINED + code, rank=1)[0] == "Traceback (most recent call last):"  # the same start still
    place.server.begin()
    assert place.say(JOINED + code, rank=1) == [SECRET.hex(), "CollectiveError"]


def test_what_an_earlier_start_left_behind_is_given_nothing(place: PairPlace) -> None:
    """A process that a rank forked keeps its end: it is shut when all begin again, and no second secret goes there."""
    code = """
channel.group_secret()
door, name = channel.open_door()
if os.fork():
    os._exit(0)
from glasshouse.wire import frames
print("forked", flush=True)
sys.stdin.readline()
def asked_raw(message):
    try:
        channel._link._socket.sendall(frames.control(message))
        return channel._link._socket.recv(1 << 16)
    except OSError as error:
        return type(error).__name__
print(asked_raw({"id": 901, "type": "group-secret"}))
"""
    left = place.start(JOINED + code)
    assert left.stdout is not None
    assert left.stdout.readline() == "forked\n"
    place.server.begin()
    assert left.communicate("go\n", timeout=PATIENCE_S)[0] == "BrokenPipeError\n"
    assert place.say(JOINED + "print(channel.group_secret().hex())") == [SECRET.hex()], "and a new rank is given it"


def test_what_an_earlier_start_had_said_before_its_end_was_shut_is_not_carried_out(place: PairPlace) -> None:
    own, theirs = socket.socketpair()
    with theirs, own:
        link = AgentLink(own)
        place.server.begin()
        for message in (
            {"id": 1, "type": "group-secret"},
            {"id": 2, "type": "door"},
            {"code": "worker-killed", "type": "failed", "words": ""},
        ):
            with pytest.raises(EOFError):
                place.server._take(0, link, message, 0)
    assert place.server.failures == []
    assert place.say(JOINED + "print(channel.group_secret().hex())") == [SECRET.hex()]


def test_a_rank_that_joins_when_all_have_begun_again_is_handed_nothing(place: PairPlace) -> None:
    late = place.start("import sys; sys.stdin.readline()\n" + JOINED)
    place.server.begin()
    assert "RunError" in late.communicate("go\n", timeout=PATIENCE_S)[0]


@pytest.mark.parametrize(
    "first",
    [
        frames.control({"token": "00" * 32, "type": "join"}),
        frames.control({"type": "group-secret"}),
        b"\x00\x00\x00\x01\x07x",
        b"",
    ],
    ids=["a token", "another word", "no frame", "nothing"],
)
def test_what_is_no_join_ends_the_connection(place: PairPlace, first: bytes) -> None:
    own, theirs = socket.socketpair()
    with theirs:
        place.server.connect(0, os.getpid(), own)
        theirs.sendall(first)
        theirs.shutdown(socket.SHUT_WR)
        assert theirs.recv(100) == b""


def test_who_is_no_child_is_handed_nothing(place: PairPlace) -> None:
    own, theirs = socket.socketpair()
    with theirs:
        place.server.connect(0, os.getppid(), own)
        theirs.sendall(frames.control({"type": "join"}))
        assert b"rank-refused" in theirs.recv(100)
        assert theirs.recv(100) == b""


# doors


def test_a_rank_calls_another_by_the_name_of_its_door_and_nobody_else_is_reached(place: PairPlace) -> None:
    listening = place.start(
        JOINED + "door, name = channel.open_door(); print(name, flush=True)\n"
        "one = taken(door); print(one.family.name, one.recv(5)); one.sendall(b'heard'); one.close(); input()",
        rank=0,
    )
    assert listening.stdout is not None
    name = listening.stdout.readline().strip()
    code = f"""
one = channel.call({name!r}, 5)
one.sendall(b"hello"); print(one.recv(5), one.recv(5), one.getpeername())
print(said(lambda: channel.call("0" * 32, 5)))
"""
    assert place.say(JOINED + code, rank=1) == ["b'heard' b'' ", "ConnectionRefusedError"]
    assert listening.stdout.readline().strip() == "AF_UNIX b'hello'"
    listening.communicate("\n", timeout=PATIENCE_S)
    assert place.say(JOINED + f"print(said(lambda: channel.call({name!r}, 5)))", rank=1) == ["ConnectionRefusedError"]


def test_doors_that_are_shut_are_forgotten_and_a_full_one_takes_no_more(place: PairPlace) -> None:
    code = """
for _ in range(1500):
    channel.open_door()[0].close()
door, name = channel.open_door()
calls = 0
while said(lambda: channel.call(name, 5)) != "ConnectionRefusedError":
    calls += 1
print(calls > 10)
"""
    assert place.say(JOINED + code) == ["True"]
    assert len(place.server._doors) <= 2


NONSENSE = [
    {"type": "store", "id": 1, "keys": ["k"], "what": "sell"},
    {"type": "store", "id": 1, "keys": ["k"], "what": "set", "value": "not base64!"},
    {"type": "store", "id": 1, "keys": ["k"], "what": "set", "value": "YQ", "more": 1},
    {"type": "store", "id": 1, "keys": ["k"] * 17, "what": "check"},
    {"type": "store", "id": 1, "keys": ["k" * 1025], "what": "check"},
    {"type": "store", "id": 1, "keys": ["a", "b"], "what": "get"},
    {"type": "store", "id": 1, "keys": ["k"], "what": "add", "amount": "1"},
    {"type": "door", "id": 1, "name": "0" * 32},
    {"type": "call", "id": 1, "name": "0" * 33},
    {"type": "call", "id": 1, "name": None},
    {"type": "group-secret", "id": 1, "token": "00" * 32},
    {"type": "group-secret"},
    {"type": "dial", "id": 1, "machine": 1, "port": 65536},
]


def test_a_rank_that_says_what_no_rank_says_is_let_go_of_and_the_others_go_on(place: PairPlace) -> None:
    other = place.start(JOINED + "print('joined', flush=True); print(asked('get', 'end'))", rank=1)
    assert other.stdout is not None
    assert other.stdout.readline() == "joined\n"
    for message in NONSENSE:
        code = f"channel._link.send({message!r}); time.sleep(20); print('still there')"
        process = place.start(JOINED + code)
        assert process.communicate(timeout=PATIENCE_S)[0] == "", message
        assert process.returncode == 1, "the end of its channel is the end of a rank"
    assert place.say(JOINED + "asked('set', 'end', value='YQ')") == []
    assert other.communicate(timeout=PATIENCE_S)[0] == "{'value': 'YQ'}\n"


def test_a_rank_at_its_own_limit_of_descriptors_ends_with_a_word(place: PairPlace) -> None:
    code = """
import resource
limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    while True: os.dup(0)
except OSError: pass
print(said(channel.open_door))
"""
    assert place.say(JOINED + code) == [
        "glasshouse: rank 0: descriptors were lost: this process has as many open as it may"
    ]


def test_a_rank_that_does_not_read_its_answers_keeps_no_other_waiting(
    place: PairPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_server, "_TAKING_S", 1)
    deaf = """
for number in range(901, 1001):
    channel._link.send({"type": "store", "id": number, "keys": ["word"], "what": "get"})
print("asked", flush=True)
time.sleep(60)
"""
    first = place.start(JOINED.replace("channel.listen", "0 and channel.listen") + deaf, rank=1)
    assert first.stdout is not None
    assert first.stdout.readline() == "asked\n"
    code = """
print(list(asked("set", "word", value="YWFh" * 5_000)))
print(said(lambda: asked("count", limit_s=20)))
"""
    assert place.say(JOINED + code) == ["['value']", "{'count': 1}"]


def test_the_end_of_the_job_reaches_every_rank_also_where_one_does_not_read(
    place: PairPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_server, "_TAKING_S", 1)
    deaf = """
channel._link.send({"type": "store", "id": 900, "keys": ["word"], "value": "YWFh" * 5_000, "what": "set"})
for number in range(901, 1001):
    channel._link.send({"type": "store", "id": number, "keys": ["word"], "what": "get"})
print("asked", flush=True)
time.sleep(60)
"""
    first = place.start(JOINED.replace("channel.listen", "0 and channel.listen") + deaf)
    second = place.start(JOINED + "print('on', flush=True); time.sleep(60)", rank=1)
    assert first.stdout is not None
    assert second.stdout is not None
    assert (first.stdout.readline(), second.stdout.readline()) == ("asked\n", "on\n")
    ending = threading.Thread(target=place.server.stop, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
    assert second.stdout.readline() == "stop\n"


def test_a_worker_with_no_descriptor_left_says_so_and_lets_no_rank_go(
    place: PairPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = place.start(JOINED + "print('on', flush=True); sys.stdin.readline(); print(said(channel.open_door));"
                          "print(said(lambda: channel.call('none', 5))); print(asked('count'))")  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"

    def none_left() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socketpair", none_left)
    assert process.communicate("go\n", timeout=PATIENCE_S)[0].splitlines() == [
        "ConnectionRefusedError", "ConnectionRefusedError", "{'count': 0}"
    ]  # fmt: skip


# starting and ending them


def launched(place: PairPlace, code: str, count: int, *, max_restarts: int = 0) -> dict[int, int]:
    command = [sys.executable, "-I", "-c", JOINED + code]
    return dict(rank_pairs.launch(place.server, command, count, max_restarts=max_restarts))


def test_each_rank_finds_the_variables_of_torchrun(place: PairPlace, tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    code = f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(repr([os.environ[n] for n in {names!r}]))"
    assert launched(place, code, 3) == {}
    for rank in range(3):
        words = [str(rank), str(rank), "3", "3", "0", "127.0.0.1", "29500"]
        assert (tmp_path / str(rank)).read_text() == repr(words)


def test_a_rank_that_fails_ends_the_others_also_one_that_does_not_want_to(
    place: PairPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pairs, "_ENDING_S", 0.5)
    code = f"""
import pathlib, signal
if channel.rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(tmp_path)!r}, "pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
while len(list(pathlib.Path({str(tmp_path)!r}).glob("pid-*"))) < 3:
    time.sleep(0.01)
if channel.rank == 1:
    sys.exit(7)
time.sleep(60)
"""
    assert launched(place, code, 3) == {1: 7}
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 3
    wait_for(lambda: all(map(is_gone, pids)))


def test_all_begin_again_as_often_as_they_may(place: PairPlace, tmp_path: Path) -> None:
    code = f"""
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
assert asked("add", "starts", amount=1)["count"] <= 2
open({str(tmp_path)!r} + "/" + os.environ["RANK"] + "-" + count, "w").close()
asked("wait", "never", limit_s=60) if count == "0" and channel.rank == 0 else None
os.kill(os.getpid(), 9) if count == "0" else None
"""
    assert launched(place, code, 2, max_restarts=3) == {}
    assert {path.name for path in tmp_path.iterdir()} >= {"1-0", "0-1", "1-1"}
    assert launched(place, "sys.exit(5)", 1, max_restarts=1) == {0: 5}


def test_a_rank_inherits_one_descriptor_and_no_rank_anothers(place: PairPlace, tmp_path: Path) -> None:
    code = f"""
import stat
found = [number for number in range(3, 100) if os.path.lexists(f"/proc/self/fd/{{number}}")]
sockets = [number for number in found if stat.S_ISSOCK(os.fstat(number).st_mode)]
open({str(tmp_path)!r} + "/" + os.environ["RANK"], "w").write(str(len(sockets)))
"""
    assert launched(place, code, 2) == {}
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["1", "1"]
