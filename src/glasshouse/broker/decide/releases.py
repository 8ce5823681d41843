"""Check 13, and what a release leaves in the database: the counter, who was released to, and the audit record.

Law: nothing is written before everything that could still refuse has been looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, insert, select, update

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.broker.decide.lines.leg_release import LegRelease, check_15, line_facts, write_leg
from glasshouse.broker.store import audit_log
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import deployments, releases
from glasshouse.broker.store.line_rows import LineMemory
from glasshouse.broker.store.recorded import DeploymentStanding
from glasshouse.errors import Code
from glasshouse.handshake.broker_side import Appraisal, build_release, check_13_budget
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.records import LaunchRecord
from glasshouse.wire.crypto import lengths_prefixed, sha256
from glasshouse.wire.group import Group

# Statements are built once: to build one costs as much as to run it.
_KNOWN = select(releases.c.deployment, releases.c.keys_sha256, releases.c.evidence_public, releases.c.run_id).where(
    (releases.c.evidence_public == bindparam("evidence_public")) | (releases.c.run_id == bindparam("run_id"))
)
_RELEASE = insert(releases)
_RELEASE_AGAIN = (
    update(releases)
    .where(releases.c.deployment == bindparam("here"), releases.c.keys_sha256 == bindparam("key"))
    .values(answers=releases.c.answers + 1, contact_us=bindparam("now_us"), released_us=bindparam("now_us"))
)
_COUNT = (
    update(deployments)
    .where(deployments.c.id == bindparam("deployment"), deployments.c.releases < bindparam("budget"))
    .values(releases=deployments.c.releases + 1)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A release that was made, and not yet written down."""

    body: bytes  # the message
    appraisal: Appraisal  # what it answers
    keys_sha256: bytes  # of the key that it is sealed to, beside the evidence key that named it
    known: bool  # whether this runtime was released to before: a lost answer, which does not count
    launch: LaunchRecord
    leg: LegRelease | None  # None for a run of no line

    @property
    def counts(self) -> bool:
        """Whether it uses up one of the deployment's releases: later legs of a line are bounded by its own rules."""
        return not self.known and is_budgeted(self.launch)


def is_budgeted(launch: LaunchRecord) -> bool:
    """Return whether a launch's first release counts: it is of no line, or the first leg of one."""
    return launch.line is None or launch.line.leg == 1


def check_13(
    connection: Connection, standing: DeploymentStanding, launch: LaunchRecord, appraisal: Appraisal
) -> tuple[bytes, bool]:
    """Run check 13; return the digest of the runtime's keys, and whether it was released to before.

    Raises:
        CheckFailedError: `release-budget-exhausted`.
    """
    record, claims = standing.record, appraisal.claims
    # Of both: an HPKE key is read by all on the way and proves nothing to us; an evidence key signs.
    keys_sha256 = sha256(lengths_prefixed(claims.hpke_public, claims.evidence_public))
    mine = (record.deployment, keys_sha256, claims.evidence_public, claims.run_id)
    named = {"evidence_public": claims.evidence_public, "run_id": claims.run_id}
    found = [tuple(row) for row in connection.execute(_KNOWN, named)]
    # Otherwise one runtime's budget could carry the log of a second one, one log two runs, or one run two receipts.
    if found not in ([], [mine]):
        raise others_keys()
    is_released = bool(found)  # of a group that waits, none is: there is room for all of it, or for none
    more = 0 if not is_budgeted(launch) else 1 if launch.group is None else launch.group.machines
    check_13_budget(released_to=standing.released, known=is_released, policy=record.policy, more=more)
    return keys_sha256, bool(found)


def make_release(
    broker: BrokerState,
    connection: Connection,
    standing: DeploymentStanding,
    launch: LaunchRecord,
    challenge: Challenge,
    appraisal: Appraisal,
    memory: LineMemory,
    now_us: int,
) -> Release:
    """Return the release for evidence that passed checks 1 to 12, after checks 13 and 15; nothing is written."""
    keys_sha256, known = check_13(connection, standing, launch, appraisal)
    leg = check_15(connection, standing, launch, memory, again=known, broker_public=broker.public, now_us=now_us)
    body = build_release(
        appraisal,
        package_key=standing.package_key(broker.key_file),
        broker_key=broker.key,
        challenge=challenge,
        record=standing.record,
        now_us=now_us,
        line=None if leg is None else leg.start,
    )
    return Release(body=body, appraisal=appraisal, keys_sha256=keys_sha256, known=known, launch=launch, leg=leg)


def write_release(
    broker: BrokerState,
    connection: Connection,
    standing: DeploymentStanding,
    release: Release,
    now_us: int,
) -> None:
    """Count a release, record for which runtime it is, and audit it.

    Raises:
        CheckFailedError: `release-budget-exhausted`: another process was faster, where none can lock the row.
        OvertakenError: as `write_leg`.
    """
    claims, record = release.appraisal.claims, standing.record
    if release.known:
        here = {"here": record.deployment, "key": release.keys_sha256, "now_us": now_us}
        connection.execute(_RELEASE_AGAIN, here)
    else:
        budget = {"deployment": record.deployment, "budget": record.policy.release_budget}
        if release.counts and connection.execute(_COUNT, budget).rowcount != 1:
            raise CheckFailedError("13", Code.RELEASE_BUDGET, "the deployment's release budget is used up")
        values = {
            "deployment": record.deployment,
            "keys_sha256": release.keys_sha256,
            "evidence_public": claims.evidence_public,
            "run_id": claims.run_id,
            "released_us": now_us,
            "contact_us": now_us,
        }
        connection.execute(_RELEASE, values)
        if release.leg is not None:
            public, launch = claims.evidence_public, release.launch
            write_leg(broker, connection, standing, launch, release.leg, evidence_public=public, now_us=now_us)
    audit_log.append(
        connection,
        "release",
        now_us,
        assurance=claims.assurance.value,
        counted=int(release.counts),
        deployment=record.deployment,
        evidence_sha256=release.appraisal.evidence_sha256.hex(),
        hpke_sha256=sha256(claims.hpke_public).hex(),
        profile=claims.hardening.profile.value,
        run_id=claims.run_id,
        **group_facts(release.launch.group),
        **line_facts(release.launch.line),
    )


def group_facts(group: Group | None) -> dict[str, str | int]:
    """Return what an audit record has of a launch's group; nothing for an ordinary one."""
    return {} if group is None else {"group": group.id.hex(), "machine": group.machine}


def others_keys() -> CheckFailedError:
    """Return the refusal of a run or of keys that were attested before, with others beside them."""
    return CheckFailedError(
        "13", Code.RELEASE_BUDGET, "a run or keys that were attested before, with others beside them"
    )
