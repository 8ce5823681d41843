"""Decisions that share a commit: none is told before it is durable, none takes another one down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import OperationalError

from glasshouse.broker.store.database import Database, GroupCommit, OvertakenError, Shared
from glasshouse.broker.store.database_schema import delegations
from glasshouse.errors import Code, InternalError, PeerError, RefusedError


def put(connection: Connection, owner: bytes) -> bytes:
    values = {"owner": owner, "envelope": b"e", "not_before_us": 0, "not_after_us": 1}
    connection.execute(insert(delegations).values(**values))
    return owner


class Desk:
    """A database, its deciding thread, and calls that wait for each other."""

    def __init__(self, path: Path) -> None:
        self.database = Database(f"sqlite:///{path}", busy_timeout_s=0.2)
        self.database.create_tables()
        self.elsewhere = Database(f"sqlite:///{path}", busy_timeout_s=0.2)
        self.commits = GroupCommit(self.database)

    def together(self, *calls: Callable[[], object]) -> list[Future[object]]:
        """Submit calls that are all waiting by the time the first one is made, on a disk that is slow."""
        self.commits._commit_s = 10.0
        gate = threading.Event()
        first = self.commits.submit(gate.wait, 10)
        futures = [self.commits.submit(call) for call in calls]
        gate.set()
        assert first.result(10)
        return futures

    def write(self, owner: bytes) -> Callable[[], bytes]:
        return lambda: self.database.write(lambda connection: put(connection, owner))

    def owners(self) -> list[bytes]:
        """What a second process would see."""
        return self.elsewhere.read(lambda connection: sorted(connection.execute(select(delegations.c.owner)).scalars()))

    def close(self) -> None:
        self.commits.shutdown()
        self.database.close()
        self.elsewhere.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "db")
    yield made
    made.close()


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many decisions were in each commit."""
    found: list[int] = []
    commit = Shared.commit

    def counted(self: Shared) -> None:
        found.append(self.writes)
        commit(self)

    monkeypatch.setattr(Shared, "commit", counted)
    return found


def test_decisions_that_wait_share_one_commit(desk: Desk, commits: list[int]) -> None:
    futures = desk.together(*(desk.write(bytes([number])) for number in range(6)))
    assert [future.result(10) for future in futures] == [bytes([number]) for number in range(6)]
    assert commits == [6]
    assert len(desk.owners()) == 6


def test_nobody_is_told_and_nobody_sees_anything_before_the_commit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, reached, go_on = Shared.commit, threading.Event(), threading.Event()

    def slow(self: Shared) -> None:
        reached.set()
        assert go_on.wait(10)
        commit(self)

    monkeypatch.setattr(Shared, "commit", slow)
    gate = threading.Event()
    desk.commits._commit_s = 10.0
    desk.commits.submit(gate.wait, 10)
    futures = [desk.commits.submit(desk.write(owner)) for owner in (b"a", b"b")]
    gate.set()
    assert reached.wait(10)
    assert not any(future.done() for future in futures)
    assert desk.owners() == []
    go_on.set()
    assert [future.result(10) for future in futures] == [b"a", b"b"]
    assert desk.owners() == [b"a", b"b"]


def test_a_decision_that_fails_leaves_nothing_and_the_others_stand(desk: Desk) -> None:
    def refused(connection: Connection) -> None:
        put(connection, b"x")
        raise RefusedError(Code.RELEASE_BUDGET, "no")

    def refuse() -> None:
        desk.database.write(refused)

    first, bad, taken, last = desk.together(desk.write(b"a"), refuse, desk.write(b"a"), desk.write(b"b"))
    assert (first.result(10), last.result(10)) == (b"a", b"b")
    with pytest.raises(RefusedError):
        bad.result(10)
    with pytest.raises(InternalError, match="overtaken"):
        taken.result(10)  # what another decision of the same commit has is taken
    assert desk.owners() == [b"a", b"b"]


def test_the_first_decision_may_fail_too(desk: Desk) -> None:
    def fails() -> None:
        desk.database.write(lambda connection: (put(connection, b"x"), 1 / 0))

    bad, good = desk.together(fails, desk.write(b"a"))
    assert isinstance(bad.exception(10), ZeroDivisionError)
    assert good.result(10) == b"a"
    assert desk.owners() == [b"a"]


def test_an_overtaken_decision_is_run_again_within_the_same_commit(desk: Desk, commits: list[int]) -> None:
    tries: list[int] = []

    def overtaken_once(connection: Connection) -> bytes:
        put(connection, b"b")
        tries.append(1)
        if len(tries) == 1:
            raise OvertakenError
        return b"b"

    _, again = desk.together(desk.write(b"a"), lambda: desk.database.write(overtaken_once))
    assert (again.result(10), len(tries), commits) == (b"b", 2, [2])
    assert desk.owners() == [b"a", b"b"]


def test_a_commit_that_fails_is_told_to_all_who_wrote_and_to_nobody_else(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_connection: Connection) -> None:
        raise OperationalError("COMMIT", {}, Exception("disk I/O error"))

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "commit", fails)
        one, two, reader = desk.together(desk.write(b"a"), desk.write(b"b"), lambda: desk.owners())
        for future in (one, two):
            with pytest.raises(PeerError):
                future.result(10)
        assert reader.result(10) == []
    assert desk.owners() == []
    assert desk.commits.submit(desk.write(b"a")).result(10) == b"a", "the next one is not harmed"
    assert desk.owners() == [b"a"]


def test_a_disk_that_breaks_within_a_decision_undoes_those_before_it(desk: Desk) -> None:
    def broken(_connection: Connection) -> None:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    def breaks() -> None:
        desk.database.write(broken)

    futures = desk.together(desk.write(b"a"), breaks, desk.write(b"b"))
    for future in futures:
        with pytest.raises(PeerError):
            future.result(10)
    assert desk.owners() == []


def test_a_database_that_somebody_holds_refuses_each_decision_and_none_is_kept(desk: Desk) -> None:
    def hold(_connection: Connection) -> None:
        for future in desk.together(desk.write(b"a"), desk.write(b"b")):
            with pytest.raises(PeerError, match="busy"):
                future.result(10)

    desk.elsewhere.write(hold)
    assert desk.owners() == []
    assert desk.commits.submit(desk.write(b"c")).result(10) == b"c"


def test_who_went_away_before_their_turn_is_not_decided_about(desk: Desk) -> None:
    gate = threading.Event()
    desk.commits.submit(gate.wait, 10)
    gone, here = desk.commits.submit(desk.write(b"a")), desk.commits.submit(desk.write(b"b"))
    assert gone.cancel()
    gate.set()
    assert here.result(10) == b"b"
    assert desk.owners() == [b"b"]


def test_what_was_submitted_before_the_end_is_still_done(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "db")
    futures = [desk.commits.submit(desk.write(bytes([number]))) for number in range(40)]
    desk.commits.shutdown()
    assert all(future.done() for future in futures)
    assert len(desk.owners()) == 40
    desk.close()
