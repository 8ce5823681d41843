"""One engine, and transactions that take the write lock first and are durable when they return."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from glasshouse.broker import schema
from glasshouse.errors import Code, InternalError, PeerError

__all__ = ["Database", "OvertakenError"]

_ATTEMPTS = 5

Result = TypeVar("Result")


class OvertakenError(Exception):
    """Another transaction changed what this one had read: run it again."""


class Database:
    """Where the broker keeps what it must not forget.

    Args:
        url: an SQLAlchemy URL; an SQLite file by default, shared by any number of broker processes.
        busy_timeout_s: how long to wait for another process that writes.
    """

    def __init__(self, url: URL | str, *, busy_timeout_s: float = 5.0) -> None:
        self._engine = _engine(url, busy_timeout_s)

    def create_tables(self) -> None:
        """Make the tables that are missing.

        Raises:
            PeerError: `broker-unreachable` when the database cannot be opened or written.
        """
        self.write(lambda connection: schema.metadata.create_all(connection))

    def write(self, decide: Callable[[Connection], Result]) -> Result:
        """Run `decide` in one transaction and return its result once that is committed.

        A transaction that another one overtook (a unique constraint, a deadlock) is run again from its
        beginning: `decide` reads everything it relies on itself.

        Raises:
            PeerError: `broker-unreachable` when the database stays locked; nothing was written then.
            InternalError: the transaction was overtaken every time.
        """
        for _ in range(_ATTEMPTS):
            try:
                with self._engine.begin() as connection:
                    return decide(connection)
            except (IntegrityError, OvertakenError):
                continue
            except SQLAlchemyError as error:
                raise PeerError(Code.BROKER_UNREACHABLE, "the broker's database is busy or away; try again") from error
        raise InternalError(Code.INTERNAL, "a transaction was overtaken every time it was tried")

    def read(self, look: Callable[[Connection], Result]) -> Result:
        """Run `look`, which changes nothing.

        Raises:
            PeerError: `broker-unreachable`.
        """
        try:
            with self._engine.connect().execution_options(glasshouse_read=True) as connection:
                return look(connection)
        except SQLAlchemyError as error:
            raise PeerError(Code.BROKER_UNREACHABLE, "the broker's database is busy or away; try again") from error

    def close(self) -> None:
        self._engine.dispose()


def _engine(url: URL | str, busy_timeout_s: float) -> Engine:
    engine = create_engine(url, pool_size=2, max_overflow=2, pool_timeout=busy_timeout_s)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", partial(_prepare_sqlite, busy_timeout_s))
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(busy_timeout_s: float, connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # the driver opens no transaction of its own
    connection.execute(f"PRAGMA busy_timeout = {int(busy_timeout_s * 1000)}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")  # in WAL mode: every commit is synced before it returns
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA cache_size = -1024")


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that reads first and writes later fails with SQLITE_BUSY_SNAPSHOT when
    # another process wrote in between, without waiting: writers take the lock at once.
    reading = connection.get_execution_options().get("glasshouse_read", False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
