"""An opened broker: what every decision is made with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL

from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import Database
from glasshouse.broker.store.key_file import KeyFile, private_directory
from glasshouse.wire.signing import SigningKey

DATABASE_NAME = "broker.sqlite3"
_KEY_FILE_NAME = "broker.key"


def system_clock_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


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


def open_broker(data_dir: Path, *, clock_us: Callable[[], int] = system_clock_us) -> BrokerState:
    """Open the broker in `data_dir`, making it on the first start.

    Raises:
        UsageError: a directory or key file that others can read, a key file that is missing or another's.
        PeerError: `broker-unreachable` when the database cannot be opened.
    """
    private_directory(data_dir, what="broker's data directory")
    path, key_path = data_dir / DATABASE_NAME, data_dir / _KEY_FILE_NAME
    path.touch(mode=0o600)  # the database's files take their mode from the first
    database = Database(URL.create("sqlite", database=str(path)))
    try:
        database.create_tables()
        # A new key file could open nothing of a database that is there already.
        exists = database.read(recorded.has_broker_key)
        key_file = KeyFile.open(key_path) if exists else KeyFile.open_or_create(key_path)
        key = database.write(lambda connection: recorded.open_broker_key(connection, key_file))
        database.write(lambda connection: recorded.sweep(connection, clock_us()))
    except BaseException:
        database.close()
        raise
    return BrokerState(database=database, key_file=key_file, key=key, clock_us=clock_us)
