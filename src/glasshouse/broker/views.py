"""What the owner may look at: the broker, a deployment's counters, what a run reported, the audit log."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, RowMapping, func, select

from glasshouse import __version__
from glasshouse.broker import audit, store
from glasshouse.broker.database import Database
from glasshouse.broker.http import Answer
from glasshouse.broker.schema import challenges, deployments, launches, releases
from glasshouse.errors import Code, UsageError
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.fields import b64encode
from glasshouse.wire.states import Outcome

__all__ = ["Views"]

_SECOND_US = 1_000_000


class Views:
    """Looks, and changes nothing.

    Args:
        database: where everything is kept.
        broker_public: the broker's key.
        clock_us: microseconds since the epoch.
    """

    def __init__(self, database: Database, broker_public: bytes, clock_us: Callable[[], int]) -> None:
        self._database = database
        self._public = broker_public
        self._clock_us = clock_us

    def broker(self, _body: bytes, _parameters: Mapping[str, str]) -> Answer:
        """Who this broker is."""
        return Answer.of({"broker_public": b64encode(self._public), "version": __version__})

    def deployment(self, _body: bytes, parameters: Mapping[str, str]) -> Answer:
        """Counters and standing of one deployment; raises `UsageError`, `deployment-unknown`."""
        deployment, now_us = parameters["deployment"], self._clock_us()

        def look(connection: Connection) -> dict[str, Json]:
            record = store.deployment_record(connection, deployment)
            if record is None:
                raise UsageError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such deployment")
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

    def run(self, _body: bytes, parameters: Mapping[str, str]) -> Answer:
        """What a run's runtime last reported; raises `UsageError`, `run-unknown`."""
        run_id, now_us = parameters["run_id"], self._clock_us()

        def look(connection: Connection) -> dict[str, Json]:
            query = select(launches).where(launches.c.run_id == run_id)
            launch = connection.execute(query).mappings().one_or_none()
            record = None if launch is None else store.deployment_record(connection, launch["deployment"])
            if launch is None or record is None:
                raise UsageError(Code.RUN_UNKNOWN, "this broker launched no such run")
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
                "package_id": record.package_id,
                "releases": len(found),
                "run_id": run_id,
            }
            return facts | self._reported(found[0] if found else None, record.policy.lease_s, now_us)

        return Answer.of(self._database.read(look))

    def audit(self, _body: bytes, parameters: Mapping[str, str]) -> Answer:
        """The audit log from a record on; raises `UsageError` for a number that is none."""
        after = parameters.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 15):
            raise UsageError(Code.USAGE, "after is not the number of a record")
        return Answer.of({"records": self._database.read(lambda connection: audit.read(connection, int(after)))})

    def _reported(self, row: RowMapping | None, lease_s: int, now_us: int) -> dict[str, Json]:
        """What the last runtime of a run said; one that is silent for longer than its lease is `lost`."""
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
