"""Where the secret comes from: a provider, or an agent at a socket; what is refused, and where it never goes."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from glasshouse.collectives import secret
from glasshouse.collectives.secret import group_secret, provide, withdraw
from glasshouse.collectives.transport import dial
from glasshouse.errors import Code, CollectiveError
from glasshouse.wire import ranks
from glasshouse.wire.frames import Decoder, data_header
from tools.forked import in_child

SECRET, TOKEN = b"the secret of a group, 32 bytes.", "ab" * 32


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (ranks.SOCKET, ranks.SECRET_TOKEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(secret, "AGENT_TIMEOUT_S", 5.0)
    withdraw()
    yield
    withdraw()
    secret._keeper.forked = False


@contextmanager
def agent(path: Path, answer: Callable[[ranks.Request], bytes]) -> Iterator[list[ranks.Request]]:
    """An agent that answers one request with whatever bytes the test wants."""
    asked: list[ranks.Request] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            decoder = Decoder()
            while data := connection.recv(4096):
                for _, value in decoder.feed(data):
                    asked.append(ranks.Request.from_json(value))  # type: ignore[arg-type]
                    with suppress(ConnectionError):  # who has heard enough hangs up
                        for piece in (answered := answer(asked[-1]))[:9], answered[9:]:
                            connection.sendall(piece)
                    return

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(5)
        thread = threading.Thread(target=serve)
        thread.start()
        yield asked
        thread.join()


def invited(monkeypatch: pytest.MonkeyPatch, path: Path, token: str = TOKEN) -> None:
    monkeypatch.setenv(ranks.SOCKET, str(path))
    monkeypatch.setenv(ranks.SECRET_TOKEN, token)


def refused(words: str) -> CollectiveError:
    with pytest.raises(CollectiveError, match=words) as caught:
        group_secret()
    assert caught.value.code is Code.GROUP_SECRET
    assert TOKEN not in str(caught.value)
    assert SECRET.decode() not in str(caught.value)
    return caught.value


def test_a_program_provides_the_secret_itself() -> None:
    provide(SECRET)
    assert group_secret() == SECRET
    copy = group_secret()
    copy[:] = bytes(len(copy))
    assert group_secret() == SECRET, "what a caller zeroes is its own copy"


def test_a_secret_that_was_wiped_is_none() -> None:
    with pytest.raises(CollectiveError, match="zeros alone") as caught:
        provide(bytes(32))
    assert caught.value.code is Code.GROUP_SECRET


def test_a_provider_is_asked_once_and_when_it_is_needed() -> None:
    asked = []

    def fetch() -> bytes:
        asked.append(True)
        return SECRET

    provide(fetch)
    assert not asked
    assert group_secret() == group_secret() == SECRET
    assert asked == [True]


def test_what_is_no_secret_is_refused() -> None:
    for wrong in (b"short", b"x" * 33, b""):
        with pytest.raises(CollectiveError, match=f"32 bytes, and not bytes of length {len(wrong)}") as caught:
            provide(wrong)
        assert "glasshouse run --ranks N" in "".join(traceback.format_exception(caught.value)), (
            "also where a script ends"
        )
    provide(lambda: "not even bytes, but thirty-two ch")  # type: ignore[arg-type,return-value]
    refused("32 bytes")


def test_without_anybody_who_gives_it_the_error_says_what_to_do() -> None:
    error = refused("was not given")
    assert "glasshouse run JOB.toml --ranks" in error.hint or "--ranks" in error.hint
    assert "provide()" in error.hint


def test_the_agent_gives_it_once_and_the_token_leaves_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invited(monkeypatch, tmp_path / "s")
    with agent(tmp_path / "s", lambda _: ranks.give_secret(SECRET)) as asked:
        assert group_secret() == SECRET
    assert [(request.kind, request.token.hex()) for request in asked] == [("group-secret", TOKEN)]
    assert ranks.SECRET_TOKEN not in os.environ
    assert group_secret() == SECRET, "kept for the groups that follow"


def test_a_providers_secret_goes_before_the_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invited(monkeypatch, tmp_path / "nobody")
    provide(SECRET)
    assert group_secret() == SECRET
    assert os.environ[ranks.SECRET_TOKEN] == TOKEN


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ranks.refuse(Code.GROUP_SECRET), "does not give it"),
        (b"", "closed without an answer"),
        (ranks.give_secret(SECRET)[:20], "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "does not answer as an agent"),
        (data_header(32) + SECRET, "does not answer as an agent"),
        (ranks.Request(kind="join", token=SECRET).frame(), "does not answer as an agent"),
        (b"\x00\x00\xff\xff\x01" + b"x" * 60000, "closed without an answer"),
    ],
    ids=["refused", "silent", "cut", "stranger", "data", "other-type", "endless"],
)
def test_an_answer_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, words: str
) -> None:
    invited(monkeypatch, tmp_path / "s")
    with agent(tmp_path / "s", lambda _: answer):
        refused(words)
    assert ranks.SECRET_TOKEN not in os.environ, "a token that was shown is spent"
    refused("not set")


def test_an_agent_that_is_away_or_does_not_answer_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invited(monkeypatch, tmp_path / "nothing")
    refused("gave no secret")
    monkeypatch.setattr(secret, "AGENT_TIMEOUT_S", 0.05)
    invited(monkeypatch, tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        refused("did not answer in time")


def test_a_token_that_is_none_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invited(monkeypatch, tmp_path / "s", token="not a token")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        refused("does not hold a token")


def test_another_user_at_the_socket_never_sees_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux takes the credentials of who called listen(): here a user who waits where the agent should."""
    invited(monkeypatch, tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        monkeypatch.setattr(dial, "_CREDENTIALS", _Credentials(uid=4712))
        refused("user 4712 listens")
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(10) == b""


class _Credentials:
    """What the kernel says of a peer that is `uid`."""

    size = 12

    def __init__(self, *, uid: int) -> None:
        self._uid = uid

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        assert len(data) == self.size
        return 1, self._uid, 1


def test_a_forked_child_has_no_secret_and_is_told_why() -> None:
    provide(SECRET)
    assert in_child(lambda: refused("forked").code) is Code.GROUP_SECRET
    assert group_secret() == SECRET


def test_a_child_that_is_forked_while_the_secret_is_fetched_does_not_hang() -> None:
    fetching, go = threading.Event(), threading.Event()

    def fetch() -> bytes:
        fetching.set()
        go.wait(5)
        return SECRET

    provide(fetch)
    thread = threading.Thread(target=group_secret)
    thread.start()
    fetching.wait(5)
    try:
        assert in_child(lambda: refused("forked").code) is Code.GROUP_SECRET
    finally:
        go.set()
        thread.join()


def test_what_was_withdrawn_is_gone() -> None:
    provide(SECRET)
    kept = secret._keeper.secret
    withdraw()
    assert len(kept) == 32
    assert not any(kept), "zeroed, not only forgotten"
    refused("was not given")
