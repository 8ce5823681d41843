"""How much of a gate one enrolled owner may have: what one takes, no other lacks (spec/owner-api.md section 8).

Laws: counted and kept in one transaction; the broker's own user, who has the disk anyway, is not bounded.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select, update

from glasshouse.broker.store.database_schema import live, packages, spent
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, RefusedError

_DAY_US = 24 * 3600 * 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What one owner may have here at most; each method raises `RefusedError` (`owner-quota`) beyond it."""

    packages: int = 1024  # whose keys are kept and not revoked
    deployments: int = 256  # whose policies are not over
    # Deployments, launches, groups, delegations and lost legs, each, by the gate's day: they leave records for good.
    per_day: int = 1000
    in_flight: int = 8  # requests that wait for their answer

    def check_package(self, connection: Connection, scope: Scope) -> None:
        """Refuse one package more than an owner may have."""
        if scope.owner is not None:
            mine = packages.c.owner == scope.owner, packages.c.revoked_us.is_(None)
            count = connection.execute(select(func.count()).select_from(packages).where(*mine)).scalar_one()
            _refuse_beyond(count, self.packages, "package keys that are not revoked", "revoke some")

    def take_deployment(
        self, connection: Connection, scope: Scope, deployment: str, *, not_after_us: int, now_us: int
    ) -> None:
        """Count a deployment until its policy is over."""
        if scope.owner is not None:
            mine = live.c.owner == scope.owner
            connection.execute(delete(live).where(mine, live.c.not_after_us <= now_us))
            count = connection.execute(select(func.count()).select_from(live).where(mine)).scalar_one()
            _refuse_beyond(count, self.deployments, "deployments that are not over", "wait for the first to end")
            connection.execute(insert(live).values(deployment=deployment, owner=scope.owner, not_after_us=not_after_us))

    def spend(self, connection: Connection, scope: Scope, what: str, now_us: int) -> None:
        """Count one of what an owner makes on a day."""
        if scope.owner is None:
            return
        day, mine = now_us // _DAY_US, (spent.c.owner == scope.owner, spent.c.what == what)
        row = connection.execute(select(spent.c.day, spent.c.made).where(*mine)).one_or_none()
        count = row.made if row is not None and row.day == day else 0
        _refuse_beyond(count, self.per_day, f"{what}s of today", "come again tomorrow")
        if row is None:
            connection.execute(insert(spent).values(owner=scope.owner, what=what, day=day, made=1))
        else:
            connection.execute(update(spent).where(*mine).values(day=day, made=count + 1))


def _refuse_beyond(count: int, most: int, what: str, mend: str) -> None:
    if count >= most:
        raise RefusedError(Code.OWNER_QUOTA, f"this owner has {count} {what} here, and may have no more: {mend}")
