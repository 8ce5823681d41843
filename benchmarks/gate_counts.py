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

from glasshouse.broker import audit
from glasshouse.errors import VerificationError
from glasshouse.wire.canonical import decode

__all__ = ["Counts", "Kept", "compare"]

MAX_RECORD_BYTES = 8 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The releases in a broker's database.

    Attributes:
        releases: (deployment, run, digest of the HPKE key) of every row.
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
            rows = connection.execute("SELECT deployment, run_id, hpke_sha256 FROM releases").fetchall()
            counters = connection.execute("SELECT id, releases FROM deployments").fetchall()
            audited = connection.execute("SELECT record FROM audit ORDER BY sequence").fetchall()
        records = [decode(row[0], max_bytes=MAX_RECORD_BYTES) for row in audited]
        facts = [record["facts"] for record in records if isinstance(record, dict) and record.get("event") == "release"]
        try:
            audit.verify_chain(records)
            holds = True
        except VerificationError:
            holds = False
        return cls(
            releases=[(deployment, run_id, digest.hex()) for deployment, run_id, digest in rows],
            counters=dict(counters),
            audited=[
                (str(fact["deployment"]), str(fact["run_id"]))
                for fact in facts
                if isinstance(fact, dict) and fact.get("counted") == 1
            ],
            chain_holds=holds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What the comparison found.

    Attributes:
        held: releases that a runtime opened.
        released: releases in the database.
        lost: held by a runtime, and not in the database.
        unheld: in the database, and opened by no runtime.
        doubled: one run or one key more than once, held or in the database.
        miscounted: deployments whose counter, audit records and rows are not one number.
        over_budget: deployments that released more than their budget, or are in no budget at all.
        broken: 1 where the audit log's chain does not hold.
    """

    held: int
    released: int
    lost: int
    unheld: int
    doubled: int
    miscounted: int
    over_budget: int
    broken: int

    @property
    def wrong(self) -> int:
        """Return how many things are not as they must be."""
        return self.lost + self.unheld + self.doubled + self.miscounted + self.over_budget + self.broken


def compare(held: Sequence[tuple[str, str]], kept: Kept, budgets: Mapping[str, int]) -> Counts:
    """Compare what runtimes hold with what the broker kept.

    Args:
        held: (run, digest of the HPKE key) of every release that a runtime opened.
        kept: the broker's database.
        budgets: of every deployment.
    """
    rows, holding = Counter((run_id, digest) for _, run_id, digest in kept.releases), Counter(held)
    by_deployment = Counter(deployment for deployment, _, _ in kept.releases)
    audited = Counter(deployment for deployment, _ in kept.audited)
    to_be_unique = (
        [run_id for run_id, _ in held],
        [digest for _, digest in held],
        [run_id for _, run_id, _ in kept.releases],
        [digest for _, _, digest in kept.releases],
        [run_id for _, run_id in kept.audited],
    )
    return Counts(
        held=len(held),
        released=len(kept.releases),
        lost=(holding - rows).total(),
        unheld=(rows - holding).total(),
        doubled=sum(len(values) - len(set(values)) for values in to_be_unique),
        miscounted=sum(
            not kept.counters.get(name, 0) == by_deployment[name] == audited[name]
            for name in {*kept.counters, *by_deployment, *audited}
        ),
        over_budget=sum(by_deployment[name] > budgets.get(name, 0) for name in by_deployment),
        broken=0 if kept.chain_holds else 1,
    )
