"""One engine, and transactions that take the write lock first and are durable when they return.

Within `Database.together`, decisions share one commit, each behind a savepoint of its own: one that fails leaves
nothing and takes nothing of the others away.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from glasshouse.broker.store.database_schema import metadata
from glasshouse.broker.store.key_file import KeyFile
from glasshouse.errors import Code, InternalError, PeerError
from glasshouse.wire.crypto import SigningKey

_ATTEMPTS = 5

Result = TypeVar("Result")


class OvertakenError(Exception):
    """Another transaction changed what this one had read: run it again."""


class Database:
    """The broker's durable state.

    Args:
        url: an SQLAlchemy URL; an SQLite file by default, shared by any number of broker processes.
        busy_timeout_s: how long to wait for another process that writes.
    """

    def __init__(self, url: URL | str, *, busy_timeout_s: float = 5.0) -> None:
        self._engine = create_engine(url, pool_size=2, max_overflow=2, pool_timeout=busy_timeout_s)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", lambda connection, _: _prepare_sqlite(connection, busy_timeout_s))
        self._here = threading.local()

    def create_tables(self) -> None:
        """Make the tables and indexes that are missing.

        Raises:
            PeerError: `broker-unreachable` when the database cannot be opened or written.
        """

        def create(connection: Connection) -> None:
            metadata.create_all(connection)
            for table in metadata.tables.values():
                for index in table.indexes:
                    index.create(connection, checkfirst=True)  # one that a table of an older broker has not

        self.write(create)

    def write(self, decide: Callable[[Connection], Result]) -> Result:
        """Run `decide` in one transaction and return its result once that is committed.

        A transaction that another one overtook (a unique constraint, a deadlock) is run again from its beginning:
        `decide` reads everything it relies on itself.

        Raises:
            PeerError: `broker-unreachable` when the database stays locked; nothing was written then.
            InternalError: the transaction was overtaken every time.
        """
        shared: Shared | None = getattr(self._here, "shared", None)
        for _ in range(_ATTEMPTS):
            try:
                if shared is not None:
                    return shared.write(decide)
                with self.together() as alone:
                    return alone.write(decide)
            except (IntegrityError, OvertakenError):
                continue
            except SQLAlchemyError as error:
                raise _away() from error
        raise InternalError(Code.INTERNAL, "a transaction was overtaken every time it was tried")

    @contextmanager
    def together(self) -> Iterator[Shared]:
        """Let everything that this thread writes in the block be one transaction, committed when the block ends.

        Nothing that `write` returns in the block is durable before that: it must not be sent before.

        Raises:
            PeerError: `broker-unreachable` when the commit failed; nothing of the block was written then.
        """
        shared = self._here.shared = Shared(self._engine)
        try:
            yield shared
        except BaseException:
            shared.drop()
            raise
        finally:
            self._here.shared = None
        shared.commit()

    def read(self, look: Callable[[Connection], Result]) -> Result:
        """Run `look`, which changes nothing; raises `PeerError`, `broker-unreachable`."""
        try:
            with self._engine.connect() as connection:
                _begin(connection, reading=True)
                return look(connection)
        except SQLAlchemyError as error:
            raise _away() from error

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


class Shared:
    """One transaction for several decisions.

    Attributes:
        writes: how many decisions are in it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._broken = False
        self.writes = 0

    def write(self, decide: Callable[[Connection], Result]) -> Result:
        """Run `decide` behind a savepoint; what it wrote is taken back when it raises.

        The transaction begins, and takes the write lock, with the first decision that writes.
        """
        if self._broken:
            raise _away()
        if self._connection is None:
            return self._first(decide)
        self._savepoint("SAVEPOINT")
        try:
            result = decide(self._connection)
        except BaseException as error:
            if isinstance(error, SQLAlchemyError) and not isinstance(error, IntegrityError):
                self.drop()  # a full or broken disk may have ended the whole transaction, with the decisions before
            else:
                self._savepoint("ROLLBACK TO SAVEPOINT")
            raise
        self._savepoint("RELEASE SAVEPOINT")
        self.writes += 1
        return result

    def _savepoint(self, what: str) -> None:
        """Set, go back to or let go of the savepoint; where that fails, no decision of the transaction stands."""
        if self._connection is None:
            raise _away()
        try:
            self._connection.exec_driver_sql(f"{what} decision")
        except SQLAlchemyError:
            self.drop()
            raise

    def _first(self, decide: Callable[[Connection], Result]) -> Result:
        connection = self._engine.connect()
        try:
            _begin(connection)
            result = decide(connection)
        except BaseException:
            connection.close()  # which takes back whatever was written
            raise
        self._connection = connection
        self.writes += 1
        return result

    def commit(self) -> None:
        """Make all of it durable; raises `PeerError` when nothing of it is."""
        connection, self._connection = self._connection, None
        if connection is None:
            if self._broken and self.writes:
                raise _away()
            return
        try:
            connection.commit()
        except SQLAlchemyError as error:
            raise _away() from error
        finally:
            connection.close()

    def drop(self) -> None:
        """Take back all of it."""
        connection, self._connection = self._connection, None
        self._broken = True
        if connection is not None:
            connection.close()


def _away() -> PeerError:
    return PeerError(Code.BROKER_UNREACHABLE, "the broker's database is busy or away; try again")


def _prepare_sqlite(connection: sqlite3.Connection, busy_timeout_s: float) -> None:
    connection.isolation_level = None  # the driver opens no transaction of its own
    for pragma in (
        f"busy_timeout = {int(busy_timeout_s * 1000)}",
        "journal_mode = WAL",
        "synchronous = FULL",  # in WAL mode: every commit is synced before it returns
        "foreign_keys = ON",
        "trusted_schema = OFF",
        "secure_delete = ON",
        "cache_size = -1024",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection, *, reading: bool = False) -> None:
    # Not by a listener: an engine with listeners calls them before and after every statement.
    connection.begin()
    if connection.dialect.name == "sqlite":
        # A deferred transaction that reads first and writes later fails with SQLITE_BUSY_SNAPSHOT when another process
        # wrote in between, without waiting: writers take the lock at once.
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerState:
    """An opened broker: its database, the key file that opens it, its signing key, and microseconds since the epoch."""

    database: Database
    key_file: KeyFile
    key: SigningKey
    clock_us: Callable[[], int]

    @property
    def public(self) -> bytes:
        """The public signing key."""
        return self.key.public
