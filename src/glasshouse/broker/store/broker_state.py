"""Opens a broker's database and its keys, making them on the first start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection, insert, select
from sqlalchemy.engine import URL

from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import BrokerState, Database
from glasshouse.broker.store.database_schema import SCHEMA_VERSION, broker
from glasshouse.broker.store.key_file import KeyFile, Purpose, private_directory
from glasshouse.errors import Code, UsageError
from glasshouse.wire.crypto import SigningKey, key_id

DATABASE_NAME = "broker.sqlite3"
_KEY_FILE_NAME = "broker.key"


def system_clock_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


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
        exists = database.read(lambda connection: connection.execute(select(broker.c.id)).first())
        key_file = KeyFile.open(key_path) if exists else KeyFile.open_or_create(key_path)
        key = database.write(lambda connection: _signing_key(connection, key_file))
        database.write(lambda connection: recorded.sweep(connection, clock_us()))
    except BaseException:
        database.close()
        raise
    return BrokerState(database=database, key_file=key_file, key=key, clock_us=clock_us)


def _signing_key(connection: Connection, key_file: KeyFile) -> SigningKey:
    """Return the broker's signing key, made on the first start.

    Raises:
        UsageError: `usage` when the key file belongs to another database or the database to another version.
    """
    row = connection.execute(select(broker)).mappings().one_or_none()
    if row is None:
        key = SigningKey.generate()
        wrapped = key_file.wrap(Purpose.SIGNING_KEY, key.key_id, key.seed())
        values = {"id": 1, "version": SCHEMA_VERSION, "public": key.public, "wrapped_seed": wrapped}
        connection.execute(insert(broker).values(**values))
        return key
    if row["version"] != SCHEMA_VERSION:
        raise UsageError(Code.USAGE, f"a broker's database of version {row['version']}, not {SCHEMA_VERSION}")
    return SigningKey(key_file.unwrap(Purpose.SIGNING_KEY, key_id(row["public"]), row["wrapped_seed"]))
