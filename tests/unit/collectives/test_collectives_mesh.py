"""How ranks meet: strangers cost little, and a rank that does not fit is told why at once."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.transport import dial, endpoint, mesh
from glasshouse.errors import Code, CollectiveError
from simulators.engine_ranks import SECRET, connect, ended


def close(one: mesh.Mesh) -> None:
    for link in (*one.collective, *one.p2p):
        link.close()


def met(store: Any, rank: int, size: int, **options: Any) -> list[int]:
    one = connect(store, rank, size, **options)
    try:
        assert {link.lane for link in one.collective} <= {Lane.COLLECTIVE}
        assert sorted(link.peer for link in one.p2p) == sorted(link.peer for link in one.collective)
        return [link.peer for link in one.collective]
    finally:
        close(one)


def test_eight_ranks_are_each_connected_to_every_other_beginning_with_the_next() -> None:
    store = dist.HashStore()
    for end in (ends := ended(8, lambda rank: met(store, rank, 8))):
        assert end.error is None
    assert [end.value for end in ends] == [[(rank + step) % 8 for step in range(1, 8)] for rank in range(8)]


def test_a_group_of_one_has_nobody_to_meet() -> None:
    assert met(dist.HashStore(), 0, 1) == []


def failures(size: int, **different: dict[int, Any]) -> list[CollectiveError]:
    """Return how each rank's meeting failed where one option differs between them."""
    store = dist.HashStore()

    def story(rank: int) -> Any:
        return met(store, rank, size, **{name: values[rank] for name, values in different.items()})

    errors = [end.error for end in ended(size, story)]
    assert all(isinstance(error, CollectiveError) for error in errors)
    return [error for error in errors if isinstance(error, CollectiveError)]


def test_ranks_with_different_secrets_are_both_told_so() -> None:
    for error in failures(2, secret={0: SECRET, 1: bytes(32)}):
        assert error.code is Code.GROUP_MISMATCH
        assert "another group secret" in error.message


def test_one_rank_with_another_secret_ends_the_meeting_of_all() -> None:
    # A rank that comes when the others have given up finds nobody, and waits for them to the end of its time.
    secrets = {rank: bytes(32) if rank == 2 else SECRET for rank in range(4)}
    errors = failures(4, secret=secrets, timeout_s=dict.fromkeys(range(4), 4.0))
    assert Code.GROUP_MISMATCH in {error.code for error in errors}
    assert {error.code for error in errors} <= {Code.GROUP_MISMATCH, Code.RANK_LOST, Code.COLLECTIVE_TIMEOUT}


def test_ranks_of_different_groups_are_told_so() -> None:
    assert {error.code for error in failures(2, group={0: "here", 1: "there"})} == {Code.GROUP_MISMATCH}


def test_a_rank_is_told_so_while_it_waits_for_another_one() -> None:
    store = dist.HashStore()

    def story(rank: int) -> Any:
        return None if rank == 1 else met(store, rank, 3, group="there" if rank == 2 else "here", timeout_s=20)

    # Rank 1 never comes, and nobody waits for it: a timeout would be the wrong reason.
    for end in (ended(3, story)[rank] for rank in (0, 2)):
        assert isinstance(end.error, CollectiveError)
        assert end.error.code is Code.GROUP_MISMATCH


def test_a_rank_that_was_restarted_alone_finds_nobody_and_says_who_is_missing() -> None:
    store = dist.HashStore()
    assert all(end.error is None for end in ended(2, lambda rank: met(store, rank, 2)))
    with pytest.raises(CollectiveError, match="rank 0 did not come") as caught:
        met(store, 1, 2, incarnation=1 << 32, timeout_s=2)
    assert caught.value.code is Code.COLLECTIVE_TIMEOUT


def test_a_rank_that_does_not_come_is_named_by_the_one_that_listens() -> None:
    with pytest.raises(CollectiveError, match="rank 1 and rank 2 did not come"):
        met(dist.HashStore(), 0, 3, timeout_s=2)


def listening(store: Any, rank: int) -> tuple[str, int]:
    store.wait([f"glasshouse/0/{rank}"])
    host, port, _ = store.get(f"glasshouse/0/{rank}").decode().split()
    return host, int(port)


def test_strangers_are_dropped_and_the_ranks_meet_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_STRANGER_S", 0.5)
    store = dist.HashStore()
    with contextlib.ExitStack() as strangers:

        def story(rank: int) -> Any:
            if rank == 1:
                address = listening(store, 0)
                for handshake in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(200), bytes(128)) * 20:
                    stranger = strangers.enter_context(socket.create_connection(address))
                    with contextlib.suppress(OSError):
                        stranger.sendall(handshake)
                time.sleep(0.7)
            return met(store, rank, 2)

        assert [end.value for end in ended(2, story)] == [[1], [0]]


def test_who_says_nothing_is_let_go_of_while_the_ranks_still_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_STRANGER_S", 0.5)
    store = dist.HashStore()
    thread = threading.Thread(target=ended, args=(1, lambda rank: met(store, rank, 2, timeout_s=8)), daemon=True)
    thread.start()
    with socket.create_connection(listening(store, 0), timeout=5) as stranger:
        assert stranger.recv(1) == b""
        assert thread.is_alive(), "rank 0 goes on waiting for rank 1"
    met(store, 1, 2)
    thread.join(10)


def test_a_rank_that_others_keep_waiting_is_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 has connected to rank 0 and waits for the address of rank 1, which comes late."""
    monkeypatch.setattr(mesh, "_STRANGER_S", 0.5)
    for dialler in (None, dial.Direct(local=False)):
        store = dist.HashStore()

        def story(rank: int, store: Any = store, dialler: Any = dialler) -> Any:
            time.sleep(2.0 if rank == 1 else 0)
            return met(store, rank, 3, dialler=dialler)

        assert [end.value for end in ended(3, story)] == [[1, 2], [2, 0], [0, 1]]


def test_strangers_who_hold_every_place_that_there_is_keep_no_rank_out() -> None:
    store = dist.HashStore()
    with contextlib.ExitStack() as strangers:

        def story(rank: int) -> Any:
            if rank == 1:
                address = listening(store, 0)
                for _ in range(100):
                    strangers.enter_context(socket.create_connection(address))
            return met(store, rank, 2)

        assert [end.value for end in ended(2, story)] == [[1], [0]]


def test_a_stranger_in_a_ranks_place_is_told_from_a_rank() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n" + bytes(200))
                connection.recv(1024)

        thread = threading.Thread(target=serve)
        thread.start()
        store.set("glasshouse/0/0", f"127.0.0.1 {listener.getsockname()[1]}")
        with pytest.raises(CollectiveError, match="no rank of a sealed group") as caught:
            met(store, 1, 2, timeout_s=20)
        assert caught.value.code is Code.COLLECTIVE_TAMPERED
        thread.join(20)


@pytest.mark.parametrize(
    "said", ["nowhere", "127.0.0.1 0", "127.0.0.1 99999", "127.0.0.1 x", "\xff 1", ". . .", "x" * 400]
)
def test_a_store_that_lies_about_an_address_is_caught(said: str) -> None:
    store = dist.HashStore()
    store.set("glasshouse/0/0", said)
    with pytest.raises(CollectiveError, match="no valid address of rank 0") as caught:
        met(store, 1, 2, timeout_s=20)
    assert caught.value.code is Code.COLLECTIVE_TAMPERED


def test_an_address_from_the_environment_is_published_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = dist.HashStore()
    monkeypatch.setenv(endpoint.ADDRESS_VARIABLE, f"127.0.0.1:{port}")

    def story(rank: int) -> Any:
        if rank == 1:
            store.get("glasshouse/0/0")  # when rank 0 has left it, the variable is for rank 0 alone
            monkeypatch.delenv(endpoint.ADDRESS_VARIABLE)
        return met(store, rank, 2)

    assert all(end.error is None for end in ended(2, story))
    assert store.get("glasshouse/0/0").decode().split()[:2] == ["127.0.0.1", str(port)]
    monkeypatch.setenv(endpoint.ADDRESS_VARIABLE, "127.0.0.1")
    assert all(end.error is None for end in ended(2, lambda rank: met(store, rank, 2, incarnation=1)))


@pytest.mark.parametrize(
    "own",
    ["127.0.0.1:port", "no such host", "x" * 70, "127.0.0.1:99999", "127.0.0.1:" + "9" * 25, "[::1", "[::1]x", ":1"],
)
def test_a_rank_with_an_own_address_that_is_none_says_where_it_comes_from(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.ADDRESS_VARIABLE, own)
    with pytest.raises(CollectiveError, match="this rank cannot listen at") as raised:
        met(dist.HashStore(), 0, 2)
    assert raised.value.code is Code.COLLECTIVE_ABORTED
    assert endpoint.ADDRESS_VARIABLE in raised.value.hint


def test_a_port_that_is_taken_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv(endpoint.ADDRESS_VARIABLE, f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(CollectiveError, match=r"cannot listen at .*: Address already in use"):
            met(dist.HashStore(), 0, 2)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host", ("host", 0)),
        ("host:80", ("host", 80)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)),
        ("[fe80::2]:4000", ("fe80::2", 4000)),
    ],
)
def test_addresses_are_hosts_with_or_without_a_port(address: str, parts: tuple[str, int]) -> None:
    assert endpoint.split(address) == parts


class Gone(dist.HashStore):
    """A store whose keeper dies when somebody looks for an address."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("connection reset by peer")


def test_a_store_that_dies_is_no_rank_that_is_late() -> None:
    with pytest.raises(CollectiveError, match="the job's store is gone") as raised:
        met(Gone(), 1, 2, timeout_s=60)
    assert (raised.value.code, raised.value.rank) == (Code.RANK_LOST, None)


class Asked(dist.HashStore):
    """A store that counts how often it is asked."""

    times = 0

    def check(self, keys: list[str]) -> bool:
        self.times += 1
        return bool(super().check(keys))


def test_strangers_who_come_and_go_make_a_waiting_rank_ask_the_store_no_more_often() -> None:
    store, over = Asked(), threading.Event()

    def knock() -> None:
        address = listening(store, 1)
        while not over.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(address).close()
            time.sleep(0.005)  # a port is not free again for a minute

    stranger = threading.Thread(target=knock)
    stranger.start()
    try:
        with pytest.raises(CollectiveError, match="rank 0 did not come"):
            met(store, 1, 2, timeout_s=2)
    finally:
        over.set()
        stranger.join(20)
    assert 2 <= store.times <= 20


class Full(dial.Direct):
    """A process that may open no more files."""

    def dial(self, host: str, port: int, timeout_s: float) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_process_that_may_open_no_more_files_does_not_wait_for_a_rank_that_is_there() -> None:
    store = dist.HashStore()
    store.set("glasshouse/0/0", "127.0.0.1 9")
    with pytest.raises(CollectiveError, match="may open no more files") as raised:
        met(store, 1, 2, dialler=Full(local=False), timeout_s=60)
    assert raised.value.code is Code.COLLECTIVE_ABORTED


def test_a_name_server_that_never_answers_takes_no_more_than_the_meetings_time(monkeypatch: pytest.MonkeyPatch) -> None:
    store, over = dist.HashStore(), threading.Event()
    store.set("glasshouse/0/0", "rank0.example 4000")

    def asked(host: str, *rest: Any, **named: Any) -> Any:
        return over.wait(60) if host == "rank0.example" else found(host, *rest, **named)

    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    try:
        assert endpoint.own_address(SimpleNamespace(host="rank0.example", port=1), 0.05) == "127.0.0.1"
        with pytest.raises(CollectiveError, match="rank 0 did not come") as raised:
            met(store, 1, 2, timeout_s=2)
    finally:
        over.set()
    assert raised.value.code is Code.COLLECTIVE_TIMEOUT


def test_addresses_come_from_the_way_to_the_stores_host() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", store.port, 1, is_master=False, wait_for_workers=False)
    behind = [dist.PrefixStore("a", dist.PrefixStore("b", each)) for each in (store, other)]
    assert endpoint.own_address(behind[0], 10) == "127.0.0.1"
    assert endpoint.own_address(dist.HashStore(), 10) == "127.0.0.1"
    assert [end.value for end in ended(2, lambda rank: met(behind[rank], rank, 2))] == [[1], [0]]
