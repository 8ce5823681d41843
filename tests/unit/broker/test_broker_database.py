"""Transactions: all or nothing, first writer first, again when overtaken."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Select, insert, select, text
from sqlalchemy.dialects.sqlite import dialect

from glasshouse.broker.decide import group_release
from glasshouse.broker.store.database import Database, OvertakenError
from glasshouse.broker.store.database_schema import delegations
from glasshouse.errors import InternalError, PeerError


@pytest.fixture
def database(tmp_path: Path) -> Database:
    made = Database(f"sqlite:///{tmp_path / 'db'}", busy_timeout_s=0.2)
    made.create_tables()
    return made


def put(connection: Connection, owner: bytes) -> None:
    values = {"owner": owner, "envelope": b"e", "not_before_us": 0, "not_after_us": 1}
    connection.execute(insert(delegations).values(**values))


def owners(database: Database) -> list[bytes]:
    return database.read(lambda connection: list(connection.execute(select(delegations.c.owner)).scalars()))


def test_what_a_transaction_wrote_is_there_for_others_once_it_returned(database: Database, tmp_path: Path) -> None:
    database.write(lambda connection: put(connection, b"a"))
    other = Database(f"sqlite:///{tmp_path / 'db'}")
    assert owners(other) == [b"a"]
    other.close()
    database.close()


def test_a_transaction_that_fails_leaves_nothing(database: Database) -> None:
    def fails(connection: Connection) -> None:
        put(connection, b"a")
        raise LookupError

    with pytest.raises(LookupError):
        database.write(fails)
    assert owners(database) == []
    database.close()


def test_an_overtaken_transaction_is_run_again_from_its_beginning(database: Database) -> None:
    tries: list[bytes] = []

    def overtaken_once(connection: Connection) -> bytes:
        tries.append(b"x")
        put(connection, b"a")
        if len(tries) == 1:
            raise OvertakenError
        return b"done"

    assert database.write(overtaken_once) == b"done"
    assert len(tries) == 2
    assert owners(database) == [b"a"]
    database.close()


def test_a_transaction_that_is_always_overtaken_gives_up(database: Database) -> None:
    database.write(lambda connection: put(connection, b"a"))
    with pytest.raises(InternalError, match="overtaken"):
        database.write(lambda connection: put(connection, b"a"))  # the unique constraint refuses it every time
    assert owners(database) == [b"a"]
    database.close()


def test_a_writer_that_does_not_let_go_makes_others_say_so(database: Database, tmp_path: Path) -> None:
    other = Database(f"sqlite:///{tmp_path / 'db'}")

    def hold(_connection: Connection) -> None:
        with pytest.raises(PeerError, match="busy"):
            database.write(lambda connection: put(connection, b"a"))
        assert owners(database) == [], "readers do not wait for writers"

    other.write(hold)
    database.write(lambda connection: put(connection, b"b"))
    assert owners(other) == [b"b"]
    other.close()
    database.close()


def test_commits_are_synced_and_deleted_content_is_overwritten(database: Database) -> None:
    def pragma(name: str) -> object:
        return database.read(lambda connection: connection.execute(text(f"PRAGMA {name}")).scalar_one())

    assert pragma("journal_mode") == "wal"
    assert pragma("synchronous") == 2  # FULL
    assert pragma("secure_delete") == 1
    assert pragma("foreign_keys") == 1
    database.close()


def test_a_file_that_is_no_database_is_reported_as_unusable(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"this is not a database at all" * 100)
    broken = Database(f"sqlite:///{tmp_path / 'db'}")
    with pytest.raises(PeerError):
        broken.create_tables()
    broken.close()


def looked_through(folder: Path, statement: Select[Any]) -> list[str]:
    """Return the steps of a query in which a whole table is read."""
    compiled = statement.compile(dialect=dialect())
    assert len(compiled.params) == 1, "one parameter, which `?` stands for"
    with closing(sqlite3.connect(folder / "db")) as connection:  # a new one: a kept plan is not made again
        steps = [row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {compiled}", (b"",))]
    return [step for step in steps if step.startswith("SCAN")]


def test_a_release_request_of_a_stranger_is_looked_up_and_not_looked_for(database: Database, tmp_path: Path) -> None:
    """It joins before its signature is checked: each launch that a broker ever had made it a little dearer."""
    assert looked_through(tmp_path, group_release._ASKED) == []
    database.write(lambda connection: connection.execute(text("DROP INDEX members_nonce")))
    assert looked_through(tmp_path, group_release._ASKED), "as with a database of an older broker"
    database.create_tables()
    assert looked_through(tmp_path, group_release._ASKED) == []
    database.close()
