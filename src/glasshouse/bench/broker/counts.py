"""Is every release there once? The broker's database against what the runtimes hold.

Pure: rows and records in, findings out. Law: any release that is lost, doubled, held without a record or beyond a
budget is a finding; there is no tolerance.
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

_MAX_RECORD_BYTES = 8 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """What a broker's database says was released.

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
            records = [
                decode(row[0], max_bytes=_MAX_RECORD_BYTES)
                for row in connection.execute("SELECT record FROM audit ORDER BY sequence")
            ]
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
        unheld: in the database, and opened by nobody.
        doubled: one run or one key more than once, held or in the database.
        miscounted: deployments whose counter, audit records and rows are not one number.
        over_budget: deployments that released more than their budget, or are in no budget at all.
        chain_holds: whether the audit log is unbroken.
    """

    held: int
    released: int
    lost: int
    unheld: int
    doubled: int
    miscounted: int
    over_budget: int
    chain_holds: bool

    @property
    def wrong(self) -> int:
        """Return how many things are not as they must be."""
        found = self.lost + self.unheld + self.doubled + self.miscounted + self.over_budget
        return found + (0 if self.chain_holds else 1)


def compare(held: Sequence[tuple[str, str]], kept: Kept, budgets: Mapping[str, int]) -> Counts:
    """Compare what runtimes hold with what the broker kept.

    Args:
        held: (run, digest of the HPKE key) of every release that a runtime opened.
        kept: the broker's database.
        budgets: of every deployment.
    """
    rows = Counter((run_id, digest) for _, run_id, digest in kept.releases)
    holding = Counter(held)
    by_deployment = Counter(deployment for deployment, _, _ in kept.releases)
    audited = Counter(deployment for deployment, _ in kept.audited)
    deployments = {*kept.counters, *by_deployment, *audited}
    return Counts(
        held=len(held),
        released=len(kept.releases),
        lost=(holding - rows).total(),
        unheld=(rows - holding).total(),
        doubled=sum(
            _repeated(values)
            for values in (
                [run_id for run_id, _ in held],
                [digest for _, digest in held],
                [run_id for _, run_id, _ in kept.releases],
                [digest for _, _, digest in kept.releases],
                [run_id for _, run_id in kept.audited],
            )
        ),
        miscounted=sum(not kept.counters.get(name, 0) == by_deployment[name] == audited[name] for name in deployments),
        over_budget=sum(by_deployment[name] > budgets.get(name, 0) for name in deployments),
        chain_holds=kept.chain_holds,
    )


def _repeated(values: Sequence[str]) -> int:
    return len(values) - len(set(values))
