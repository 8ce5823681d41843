"""What the owner may read: the broker, a deployment's counters, what a run reported, the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, func, select, true

from glasshouse import __version__
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import audit, challenges, deployments, launches, owners, releases
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, UsageError
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES
from glasshouse.handshake.owner_api import AuditHead
from glasshouse.wire.canonical import Json, b64encode, decode
from glasshouse.wire.states import Outcome

_SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class OwnerViews:
    """Reads, and changes nothing."""

    broker: BrokerState
    stores: bool  # whether it keeps what runs leave
    store_public: bytes | None = None  # the key of its store of checkpoints; None where it keeps none

    def identity(self) -> ApiAnswer:
        """Return the broker's key and version, and what it stores; public."""
        value: dict[str, Json] = {"store": self.stores, "version": __version__}
        if self.store_public is not None:
            value["store_public"] = b64encode(self.store_public)
        return ApiAnswer.of(value | {"broker_public": b64encode(self.broker.public)})

    def deployment(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Return counters and standing of one deployment; raises `UsageError`, `deployment-unknown`."""
        deployment, now_us = parameters["deployment"], self.broker.clock_us()

        def look(connection: Connection) -> dict[str, Json]:
            standing = recorded.standing_of(connection, deployment, scope, broker_public=self.broker.public)
            record, mine = standing.record, challenges.c.deployment == deployment
            count = select(func.count()).select_from(challenges).where(mine)
            is_open = challenges.c.used_us.is_(None) & (challenges.c.expires_us > now_us)
            answers = select(func.coalesce(func.sum(releases.c.answers), 0)).where(releases.c.deployment == deployment)
            return {
                "answers": int(connection.execute(answers).scalar_one()),
                "challenges_outstanding": int(connection.execute(count.where(is_open)).scalar_one()),
                "challenges_used": int(connection.execute(count.where(challenges.c.used_us.is_not(None))).scalar_one()),
                "deployment": deployment,
                "manifest_sha256": record.manifest_sha256.hex(),
                "not_after_us": record.policy.not_after_us,
                "package_id": record.package_id,
                "policy_sha256": record.policy.sha256.hex(),
                "release_budget": record.policy.release_budget,
                "releases": standing.released,
                "revoked": record.revoked,
            }

        return ApiAnswer.of(self.broker.database.read(look))

    def run(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Return what a run's runtime last reported; raises `UsageError`, `run-unknown`."""
        run_id, now_us = parameters["run_id"], self.broker.clock_us()

        def look(connection: Connection) -> dict[str, Json]:
            launch, standing = launch_of(connection, run_id, scope, self.broker.public)
            query = select(releases).where(releases.c.run_id == run_id).order_by(releases.c.released_us.desc())
            found = connection.execute(query).mappings().all()
            facts: dict[str, Json] = {
                "created_us": launch["created_us"],
                "deployment": launch["deployment"],
                "expires_us": launch["expires_us"],
                "package_id": standing.record.package_id,
                "releases": len(found),
                "run_id": run_id,
            }
            return facts | self._reported(found[0] if found else None, standing.record.policy.lease_s, now_us)

        return ApiAnswer.of(self.broker.database.read(look))

    def _reported(self, row: RowMapping | None, lease_s: int, now_us: int) -> dict[str, Json]:
        """Return what the last runtime of a run reported; one that is silent for longer than its lease is `lost`."""
        if row is None:
            nothing = dict.fromkeys(("head", "last_contact_us", "outcome", "receipt_sha256", "released_us", "state"))
            return {**nothing, "lost": False}
        head = recorded.head_of(row, broker_public=self.broker.public)
        lost = row["receipt"] is None and now_us - row["contact_us"] > lease_s * _SECOND_US
        return {
            "head": decode(head.encode(), max_bytes=MAX_COUNTERSIGNED_HEAD_BYTES) if head else None,
            "last_contact_us": row["contact_us"],
            "lost": lost,
            "outcome": Outcome.LOST.value if lost else row["outcome"],
            "receipt_sha256": row["receipt_sha256"].hex() if row["receipt_sha256"] else None,
            "released_us": row["released_us"],
            "state": head.head.state.value if head else None,
        }

    def audit(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Return a page of the audit log, or of an owner's own with its signed head; raises `UsageError`."""
        start, owner, database = after(parameters, "of a record"), scope.owner, self.broker.database
        if owner is None:
            return ApiAnswer.of({"records": database.read(lambda connection: audit_log.read(connection, start))})
        records, last, sha256 = database.read(lambda connection: audit_log.read_own(connection, owner, start))
        head = AuditHead(owner=owner, records=last, sha256=sha256, time_us=self.broker.clock_us())
        return ApiAnswer.of({"head": head.sign(self.broker.key).to_json(), "records": records})

    def metrics(self, _body: bytes, _parameters: Mapping[str, str], _scope: Scope) -> ApiAnswer:
        """Return how much there is of everything, as Prometheus reads it; for the broker's own user alone."""
        received = releases.c.receipt.is_not(None)

        def look(connection: Connection) -> list[tuple[str, int]]:
            return [
                (name, int(connection.execute(select(func.count()).select_from(table).where(which)).scalar_one()))
                for name, table, which in (
                    ("owners", owners, true()),
                    ("deployments", deployments, true()),
                    ("launches", launches, true()),
                    ("releases", releases, true()),
                    ("receipts", releases, received),
                    ("runs_without_receipt", releases, ~received),
                    ("challenges", challenges, true()),
                    ("audit_records", audit, true()),
                )
            ]

        lines = "".join(f"glasshouse_{name} {count}\n" for name, count in self.broker.database.read(look))
        return ApiAnswer(body=lines.encode(), media_type="text/plain; version=0.0.4")


def after(parameters: Mapping[str, str], of: str) -> int:
    """Return the query parameter `after`, 0 where it is absent; raises `UsageError`, `usage` for what is no number."""
    text = parameters.get("after", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise UsageError(Code.USAGE, f"after is not a number {of}")
    return int(text)


def launch_of(
    connection: Connection, run_id: str, scope: Scope, broker_public: bytes
) -> tuple[RowMapping, recorded.DeploymentStanding]:
    """Return a run's launch and how its deployment stands.

    Raises:
        UsageError: `run-unknown`, in the same words for another owner's and for none.
    """
    launch = connection.execute(select(launches).where(launches.c.run_id == run_id)).mappings().one_or_none()
    standing = None
    if launch is not None:
        standing = recorded.standing(connection, launch["deployment"], broker_public=broker_public)
    if launch is None or standing is None or not scope.covers(standing.owner):
        raise UsageError(Code.RUN_UNKNOWN, "this broker launched no such run")
    return launch, standing
