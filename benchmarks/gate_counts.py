"""Is every release there once? The broker's database against what the runtimes hold.

Law: any release that is lost, doubled, held without a record or beyond a budget is a finding; there is no tolerance.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glasshouse.broker.http_api import verify_chain
from glasshouse.errors import VerificationError
from glasshouse.wire.canonical import decode

__all__ = ["Kept", "compare"]

MAX_RECORD_BYTES = 8 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The releases in a broker's database.

    Attributes:
        releases: (deployment, run, digest of both keys) of every row.
        counters: each deployment's own release counter.
        audited: (deployment, run) of every release that the audit log counted.
        chain_holds: whether the audit log is unbroken.
    """

    releases: Sequence[tuple[str, str, str]]
    counters: Mapping[str, int]
    audited: Sequence[tuple[str, str]]
    chain_holds: bool

    @classmethod
    def read(cls, path: Path) -> Kept:
        """Read a database that no broker has open any more."""
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("SELECT deployment, run_id, lower(hex(hpke_sha256)) FROM releases").fetchall()
            counters = connection.execute("SELECT id, releases FROM deployments").fetchall()
            audited = connection.execute("SELECT record FROM audit ORDER BY sequence").fetchall()
        records: list[Any] = [decode(record, max_bytes=MAX_RECORD_BYTES) for (record,) in audited]
        facts = [record["facts"] for record in records if record["event"] == "release"]
        try:
            verify_chain(records)
            holds = True
        except VerificationError:
            holds = False
        return cls(
            releases=rows,
            counters=dict(counters),
            audited=[(fact["deployment"], fact["run_id"]) for fact in facts if fact.get("counted") == 1],
            chain_holds=holds,
        )


def compare(held: Sequence[tuple[str, str]], kept: Kept, budgets: Mapping[str, int]) -> dict[str, int]:
    """Return how many releases there are, and of each kind of mistake how many; none but the first two may be.

    Args:
        held: (run, digest of both keys) of every release that a runtime opened.
        kept: the broker's database.
        budgets: of every deployment.

    Returns:
        `held` and `released`; `lost`: held and not in the database; `unheld`: the reverse; `doubled`: one run or one
        key more than once; `miscounted`: deployments whose counter, audit records and rows are not one number;
        `over_budget`: deployments beyond theirs, or with none; `broken`: 1 where the audit log's chain does not hold.
    """
    rows, holding = Counter((run_id, digest) for _, run_id, digest in kept.releases), Counter(held)
    by_deployment = Counter(deployment for deployment, _, _ in kept.releases)
    audited = Counter(deployment for deployment, _ in kept.audited)
    to_be_unique = [
        *zip(*held, strict=True),
        *list(zip(*kept.releases, strict=True))[1:],
        [run for _, run in kept.audited],
    ]
    return {
        "held": len(held),
        "released": len(kept.releases),
        "lost": (holding - rows).total(),
        "unheld": (rows - holding).total(),
        "doubled": sum(len(values) - len(set(values)) for values in to_be_unique),
        "miscounted": sum(
            not kept.counters.get(name, 0) == by_deployment[name] == audited[name]
            for name in {*kept.counters, *by_deployment, *audited}
        ),
        "over_budget": sum(by_deployment[name] > budgets.get(name, 0) for name in by_deployment),
        "broken": 0 if kept.chain_holds else 1,
    }
