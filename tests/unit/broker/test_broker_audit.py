"""The audit log: a chain that shows what was changed, removed or moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.broker.http_api import verify_chain
from glasshouse.broker.store import audit_log
from glasshouse.broker.store.database import Database
from glasshouse.errors import VerificationError
from glasshouse.wire.canonical import Json


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path / 'db'}")
    made.create_tables()
    yield made
    made.close()


def written(database: Database, count: int) -> list[Json]:
    for number in range(count):
        database.write(lambda connection, n=number: audit_log.append(connection, "release", n, run_id=f"r{n}"))
    return database.read(lambda connection: audit_log.read(connection, 0))


def test_records_follow_each_other(database: Database) -> None:
    records = written(database, 5)
    assert len(records) == 5
    last = verify_chain(records)
    assert verify_chain(records[3:], previous=verify_chain(records[:3]), sequence=3) == last


def test_a_page_begins_after_the_record_that_was_asked_for(database: Database) -> None:
    written(database, 4)
    page = database.read(lambda connection: audit_log.read(connection, 2))
    assert [record["sequence"] for record in page if isinstance(record, dict)] == [3, 4]


@pytest.mark.parametrize("attack", ["change", "remove", "swap", "repeat", "renumber"])
def test_whatever_is_done_to_the_log_breaks_it(database: Database, attack: str) -> None:
    records = written(database, 5)
    second = records[1]
    assert isinstance(second, dict)
    if attack == "change":
        records[1] = {**second, "facts": {"run_id": "another"}}
    elif attack == "remove":
        del records[1]
    elif attack == "swap":
        records[1], records[2] = records[2], records[1]
    elif attack == "repeat":
        records.insert(1, second)
    else:
        records[1] = {**second, "sequence": 7}
    with pytest.raises(VerificationError, match="broken at record"):
        verify_chain(records)
