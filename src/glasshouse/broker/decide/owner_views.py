"""What the owner may read: the broker, a deployment's counters, what a run reported, the audit log."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, RowMapping, func, select, true

from glasshouse import __version__
from glasshouse.broker.http.endpoints import Answer
from glasshouse.broker.store import audit_log, database_schema, recorded
from glasshouse.broker.store.database import Database
from glasshouse.broker.store.database_schema import challenges, deployments, launches, releases
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, UsageError
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead
from glasshouse.handshake.audit_head import AuditHead
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.fields import b64encode
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import Outcome

__all__ = ["Views", "launch_of"]

_SECOND_US = 1_000_000


class Views:
    """Reads, and changes nothing.

    Args:
        database: where everything is kept.
        key: the broker's signing key: it signs heads of audit logs.
        clock_us: microseconds since the epoch.
        stores: whether it keeps what runs leave.
    """

    def __init__(
        self, database: Database, key: SigningKey, clock_us: Callable[[], int], *, stores: bool = False
    ) -> None:
        self._database = database
        self._key = key
        self._public = key.public
        self._clock_us = clock_us
        self._stores = stores

    def broker(self, _body: bytes, _parameters: Mapping[str, str], _scope: Scope) -> Answer:
        """Who this broker is."""
        return self.known()

    def known(self) -> Answer:
        """The broker's key and version, and whether it stores what runs leave; public."""
        value: dict[str, Json] = {"store": self._stores, "version": __version__}
        return Answer.of(value | {"broker_public": b64encode(self._public)})

    def deployment(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> Answer:
        """Counters and standing of one deployment; raises `UsageError`, `deployment-unknown`."""
        deployment, now_us = parameters["deployment"], self._clock_us()

        def look(connection: Connection) -> dict[str, Json]:
            record = recorded.standing_of(connection, deployment, scope, broker_public=self._key.public).record
            mine = challenges.c.deployment == deployment
            count = select(func.count()).select_from(challenges).where(mine)
            is_open = challenges.c.used_us.is_(None) & (challenges.c.expires_us > now_us)
            released = select(deployments.c.releases).where(deployments.c.id == deployment)
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
                "releases": int(connection.execute(released).scalar_one()),
                "revoked": record.revoked,
            }

        return Answer.of(self._database.read(look))

    def run(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> Answer:
        """What a run's runtime last reported; raises `UsageError`, `run-unknown`."""
        run_id, now_us = parameters["run_id"], self._clock_us()

        def look(connection: Connection) -> dict[str, Json]:
            launch, standing = launch_of(connection, run_id, scope, self._public)
            found = (
                connection.execute(
                    select(releases).where(releases.c.run_id == run_id).order_by(releases.c.released_us.desc())
                )
                .mappings()
                .all()
            )
            facts: dict[str, Json] = {
                "created_us": launch["created_us"],
                "deployment": launch["deployment"],
                "expires_us": launch["expires_us"],
                "package_id": standing.record.package_id,
                "releases": len(found),
                "run_id": run_id,
            }
            return facts | self._reported(found[0] if found else None, standing.record.policy.lease_s, now_us)

        return Answer.of(self._database.read(look))

    def audit(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> Answer:
        """The audit log from a record on, or an owner's own with its signed head; raises `UsageError` for no number."""
        after = parameters.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 15):
            raise UsageError(Code.USAGE, "after is not the number of a record")
        owner = scope.owner
        if owner is None:
            return Answer.of(
                {"records": self._database.read(lambda connection: audit_log.read(connection, int(after)))}
            )
        records, last, sha256 = self._database.read(
            lambda connection: audit_log.read_own(connection, owner, int(after))
        )
        head = AuditHead(owner=owner, records=last, sha256=sha256, time_us=self._clock_us()).sign(self._key)
        return Answer.of({"head": head.to_json(), "records": records})

    def metrics(self, _body: bytes, _parameters: Mapping[str, str], _scope: Scope) -> Answer:
        """How much there is of everything, as Prometheus reads it; for the broker's own user alone."""
        received = releases.c.receipt.is_not(None)

        def look(connection: Connection) -> list[tuple[str, int]]:
            return [
                (name, int(connection.execute(select(func.count()).select_from(table).where(which)).scalar_one()))
                for name, table, which in (
                    ("owners", database_schema.owners, true()),
                    ("deployments", deployments, true()),
                    ("launches", launches, true()),
                    ("releases", releases, true()),
                    ("receipts", releases, received),
                    ("runs_without_receipt", releases, ~received),
                    ("challenges", challenges, true()),
                    ("audit_records", database_schema.audit, true()),
                )
            ]

        lines = "".join(f"glasshouse_{name} {count}\n" for name, count in self._database.read(look))
        return Answer(body=lines.encode(), media_type="text/plain; version=0.0.4")

    def _reported(self, row: RowMapping | None, lease_s: int, now_us: int) -> dict[str, Json]:
        """What the last runtime of a run reported; one that is silent for longer than its lease is `lost`."""
        if row is None:
            nothing = dict.fromkeys(("head", "last_contact_us", "outcome", "receipt_sha256", "released_us", "state"))
            return {**nothing, "lost": False}
        head = row["head"] and CountersignedHead.parse(
            row["head"], broker_public=self._public, evidence_public=row["evidence_public"]
        )
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


def launch_of(
    connection: Connection, run_id: str, scope: Scope, broker_public: bytes
) -> tuple[RowMapping, recorded.Standing]:
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
