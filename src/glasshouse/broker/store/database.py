"""One engine, and transactions that take the write lock first and are durable when they return.

Within `Database.together`, decisions share one commit, each behind a savepoint of its own: one that fails leaves
nothing and takes nothing of the others away. `GroupCommit` is the one thread that decides so.
Laws: decisions are made one after the other; none is answered before the transaction that holds it is committed, and
where that fails, every decision in it is answered as not made. A commit is shared only by decisions that were waiting
already: no decision waits for others to come.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from glasshouse.broker.store.database_schema import metadata
from glasshouse.broker.store.key_file import KeyFile
from glasshouse.errors import Code, InternalError, PeerError
from glasshouse.wire.crypto import SigningKey

MOST_TOGETHER = 32
_ATTEMPTS = 5
_PATIENCE = 8  # at most a ninth of the time goes to commits while there is a queue

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


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


class GroupCommit(Executor):
    """An executor of one thread, whose calls share transactions of one database.

    While others wait for their turn, deciding goes on for a few times as long as the last commit took: so a fast disk
    hardly delays a decision, and a slow one is awaited once for several.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: SimpleQueue[_QueuedCall | None] = SimpleQueue()
        self._commit_s = 0.0
        self._thread = threading.Thread(target=self._work, name="decide")
        self._thread.start()

    def submit(
        self, fn: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Call `fn` when its turn comes; the future is done once what it wrote is durable."""
        future: Future[Result] = Future()
        self._waiting.put(_QueuedCall(future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Finish every call that was submitted before, then end the thread."""
        self._waiting.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None and self._together(first):
            pass

    def _together(self, first: _QueuedCall) -> bool:
        """Make `first` and others that wait, commit, and answer them all; return whether there is more to come."""
        call: _QueuedCall | None = first
        made: list[_QueuedCall] = []
        began_s = time.monotonic()
        try:
            with self._database.together() as shared:
                while call is not None:
                    call.make(shared)
                    made.append(call)
                    if len(made) == MOST_TOGETHER or time.monotonic() - began_s > _PATIENCE * self._commit_s:
                        break
                    try:
                        call = self._waiting.get_nowait()
                    except Empty:
                        break
                began_s = time.monotonic()
            self._commit_s = time.monotonic() - began_s
        except Exception as error:  # the commit failed: calls that wrote fail, calls that did not are answered
            for one in made:
                if one.wrote:
                    one.error = error
        for one in made:
            one.answer()
        return call is not None


@dataclass(slots=True)
class _QueuedCall:
    """A call, and the future that waits for it."""

    future: Future[Any]
    call: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    wrote: bool = False

    def make(self, shared: Shared) -> None:
        before = shared.writes
        if not self.future.set_running_or_notify_cancel():
            return  # cancelled before it began
        try:
            self.result = self.call()
        except BaseException as error:  # raised where the future is awaited, as by every executor
            self.error = error
        self.wrote = shared.writes > before

    def answer(self) -> None:
        if self.error is not None:
            self.future.set_exception(self.error)
        elif not self.future.cancelled():
            self.future.set_result(self.result)


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
