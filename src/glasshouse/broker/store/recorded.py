"""Rows to records and back: what the gate's decisions are made of."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, RowMapping, bindparam, delete, insert, select, update

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.store.database_schema import (
    activations,
    challenges,
    delegations,
    deployments,
    groups,
    launches,
    legs,
    line_launches,
    lines,
    members,
    packages,
    releases,
    stopped,
)
from glasshouse.broker.store.key_file import KeyFile, Purpose
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, FormatError, RefusedError, UsageError, VerificationError
from glasshouse.evidence.heads import CountersignedHead
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.owner_api import SignedPolicy
from glasshouse.handshake.records import DeploymentRecord, GroupState, LaunchRecord
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.wire.crypto import key_id
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart

_REMEMBERED = 64

# Statements are built once: to build one costs as much as to run it.
_STANDING = (
    select(
        deployments.c.policy,
        deployments.c.releases,
        packages.c.package_id,
        packages.c.owner,
        packages.c.envelope,
        packages.c.wrapped_key,
        packages.c.revoked_us,
        delegations.c.envelope.label("delegation"),
    )
    .join(packages, packages.c.package_id == deployments.c.package_id)
    .outerjoin(delegations, delegations.c.owner == packages.c.owner)
    .where(deployments.c.id == bindparam("deployment"))
)
# Each query that finds a launch finds its group and leg with it; `as_launch` reads these columns.
_OF_LINE = tuple(line_launches.c[name] for name in ("line", "leg", "seq", "counted", "checkpoint", "rewind"))
LAUNCH_COLUMNS: tuple[Any, ...] = (
    launches,
    members.c.machine,
    groups.c.id.label("group_id"),
    groups.c.machines,
    groups.c.ranks,
    *(column.label(f"of_{column.name}") for column in _OF_LINE),
)
LAUNCH_SOURCE = (
    launches.outerjoin(members, members.c.jti == launches.c.jti)
    .outerjoin(groups, groups.c.id == members.c.group_id)
    .outerjoin(line_launches, line_launches.c.jti == launches.c.jti)
)
WAITING_SOURCE = LAUNCH_SOURCE.join(challenges, challenges.c.nonce == members.c.nonce)
_LAUNCH = select(*LAUNCH_COLUMNS).select_from(LAUNCH_SOURCE).where(launches.c.jti == bindparam("jti"))
_LOCK = (
    update(deployments).where(deployments.c.id == bindparam("deployment")).values(decisions=deployments.c.decisions + 1)
)
_DELEGATED = (
    select(delegations.c.envelope, delegations.c.owner)
    .join(packages, packages.c.owner == delegations.c.owner)
    .where(packages.c.package_id == bindparam("package_id"))
)
_ATTESTED = (
    select(releases, deployments.c.package_id, stopped.c.stopped_us, legs.c.leg, lines.c.leg.label("current_leg"))
    .join(deployments, deployments.c.id == releases.c.deployment)
    .outerjoin(stopped, stopped.c.package_id == deployments.c.package_id)
    .outerjoin(legs, legs.c.run_id == releases.c.run_id)
    .outerjoin(lines, lines.c.id == legs.c.line)
    .where(releases.c.run_id == bindparam("run_id"))
)
# A group whose deadline has passed is refused at the next request; nothing of it is appraised again.
_OVER = select(groups.c.id).where(groups.c.state == GroupState.OPEN.value, groups.c.deadline_us <= bindparam("now_us"))
_KEPT = members.c.evidence.is_not(None)
_SWEEP_WAITING = update(members).where(_KEPT, members.c.group_id.in_(_OVER)).values(evidence=None)
# The challenge of a machine that waits in an open group stays until that is decided, whatever became of its token.
_WAITED_WITH = (
    select(members.c.nonce)
    .join(groups, groups.c.id == members.c.group_id)
    .where(groups.c.state == GroupState.OPEN.value, members.c.nonce.is_not(None))
)
_SWEEP = delete(challenges).where(
    challenges.c.keep_until_us <= bindparam("now_us"),
    challenges.c.nonce.not_in(_WAITED_WITH),
)
_SWEEP_ACTIVATIONS = delete(activations).where(activations.c.nonce.not_in(select(challenges.c.nonce)))


def package_key_name(package_row: str, manifest_sha256: bytes) -> str:
    """Return what a wrapped package key is bound to: the package's row, which names its owner, and its content."""
    return f"{package_row}:{manifest_sha256.hex()}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentStanding:
    """How a deployment stands in the transaction that reads it."""

    record: DeploymentRecord  # what its owner recorded and signed
    owner: bytes  # the package's, their public signing key
    package_row: str  # what the database calls the package; see `Scope.row_of`
    released: int  # its release counter
    wrapped_key: bytes  # the package key at rest

    def package_key(self, key_file: KeyFile) -> bytes:
        """Return the package key, unwrapped."""
        name = package_key_name(self.package_row, self.record.manifest_sha256)
        return key_file.unwrap(Purpose.PACKAGE_KEY, name, self.wrapped_key)


def standing(connection: Connection, deployment: str, *, broker_public: bytes) -> DeploymentStanding | None:
    """Return how a deployment stands now, with what its package's owner signed: manifest and current delegation.

    Raises:
        FormatError: the database holds what the owner did not sign, or signed for another gate's key.
    """
    row = connection.execute(_STANDING, {"deployment": deployment}).one_or_none()
    if row is None:
        return None
    signed = _signed(row.envelope, row.owner, row.policy, deployment, row.package_id, broker_public)
    delegation = row.delegation and _delegation(row.delegation, row.owner)
    return DeploymentStanding(
        record=replace(signed, revoked=row.revoked_us is not None, delegation=delegation),
        owner=row.owner,
        package_row=row.package_id,
        released=row.releases,
        wrapped_key=row.wrapped_key,
    )


def standing_of(connection: Connection, deployment: str, scope: Scope, *, broker_public: bytes) -> DeploymentStanding:
    """Return how a deployment of this caller's stands.

    Raises:
        UsageError: `deployment-unknown`, in the same words for another owner's and for none.
    """
    found = standing(connection, deployment, broker_public=broker_public)
    if found is None or not scope.covers(found.owner):
        raise UsageError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such deployment")
    return found


# What follows from stored bytes alone is computed once for the same bytes: signatures and schemas. Whether it may still
# be acted on (revocation, validity, which delegation is the current one) is read and judged every time.
@lru_cache(maxsize=_REMEMBERED)
def _signed(
    envelope: bytes, owner: bytes, policy: bytes, deployment: str, package_row: str, broker_public: bytes
) -> DeploymentRecord:
    manifest = parse_signed(envelope, owner)
    if package_row == manifest.package_id:  # it came by the socket of the broker's own user
        deployed = DeploymentPolicy.parse(policy)
    else:
        deployed = checked_policy(SignedPolicy.parse_signed(policy, owner), manifest, broker_public)
    return DeploymentRecord(
        deployment=deployment,
        package_id=manifest.package_id,
        manifest_sha256=manifest.sha256,
        key_commitment=manifest.key_commitment,
        floor=manifest.floor,
        policy=deployed,
        revoked=False,
        delegation=None,
    )


def checked_policy(signed: SignedPolicy, manifest: Manifest, broker_public: bytes) -> DeploymentPolicy:
    """Return a policy that its owner signed for this gate and package.

    Raises:
        FormatError: `signature-invalid` for another gate or another package.
    """
    if (signed.broker_public, signed.manifest_sha256) != (broker_public, manifest.sha256):
        raise FormatError(Code.SIGNATURE, "a policy that was signed for another gate or another package")
    return signed.policy


@lru_cache(maxsize=_REMEMBERED)
def _delegation(envelope: bytes, owner: bytes) -> Delegation:
    return Delegation.parse_signed(envelope, owner)


def launch_record(connection: Connection, jti: str) -> LaunchRecord | None:
    """Return the record of one launch by its token's id."""
    row = connection.execute(_LAUNCH, {"jti": jti}).mappings().one_or_none()
    return None if row is None else as_launch(row)


def as_launch(row: RowMapping) -> LaunchRecord:
    """Return the launch in a row that holds `LAUNCH_COLUMNS`."""
    group = None
    if row["group_id"] is not None:
        group = Group(id=row["group_id"], machines=row["machines"], machine=row["machine"], ranks=row["ranks"])
    line = None
    if row["of_line"] is not None:
        begins = {column.name: row[f"of_{column.name}"] for column in _OF_LINE}
        line = LineStart(id=begins.pop("line"), **begins)
    recorded = {column.name: row[column.name] for column in launches.c}
    recorded["container_source"] = ContainerSource(row["container_source"])
    return LaunchRecord(**recorded, group=group, line=line)


def lock_deployment(connection: Connection, deployment: str) -> None:
    """Take the deployment's row until the transaction ends: every database makes a second update of it wait."""
    connection.execute(_LOCK, {"deployment": deployment})


def put_delegation(connection: Connection, owner: bytes, envelope: bytes, delegation: Delegation) -> Delegation | None:
    """Keep an owner's delegation in place of an older one; return the one that stays where it is not older."""
    table, before = delegations, None
    kept = connection.execute(select(table.c.envelope).where(table.c.owner == owner)).scalar_one_or_none()
    if kept is not None:
        with contextlib.suppress(FormatError):  # what the owner signed replaces what they did not
            before = _delegation(kept, owner)
    if before is not None and before.broker_public == delegation.broker_public and not delegation.replaces(before):
        return before
    connection.execute(delete(table).where(table.c.owner == owner))
    validity = {"not_before_us": delegation.not_before_us, "not_after_us": delegation.not_after_us}
    connection.execute(insert(table).values(owner=owner, envelope=envelope, **validity))
    return None


def delegated(connection: Connection, package_id: str, use: Use, *, broker_public: bytes, now_us: int) -> bytes:
    """Return the current delegation of a package's owner, which covers this use by this broker now.

    Raises:
        VerificationError: `delegation-invalid` when there is none, or none that does.
    """
    envelope, delegation = _current_delegation(connection, package_id)
    delegation.check(use, broker_public=broker_public, at_us=now_us)
    return envelope


def store_public(connection: Connection, package_id: str, *, broker_public: bytes, now_us: int) -> bytes | None:
    """Return the store key that a package's owner delegates to now; raises as `delegated`."""
    _, delegation = _current_delegation(connection, package_id)
    delegation.check(Use.STORE, broker_public=broker_public, at_us=now_us)
    return delegation.store_public


def _current_delegation(connection: Connection, package_id: str) -> tuple[bytes, Delegation]:
    row = connection.execute(_DELEGATED, {"package_id": package_id}).one_or_none()
    if row is None:
        raise VerificationError(Code.CHAIN_DELEGATION, "the package's owner has not delegated anything to this broker")
    return bytes(row.envelope), _delegation(row.envelope, row.owner)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttestedRuntime:
    """A runtime that a release was made for, found by its run and its evidence key."""

    row: RowMapping  # in `releases`
    package_id: str  # what it was given the key of, as `DeploymentStanding.package_row`
    head: CountersignedHead | None  # the last that was countersigned for it
    stopped: bool  # whether its owner had countersigning stopped
    superseded: bool  # whether a later leg of its line was released


def attested(connection: Connection, run_id: str, signer: str, *, broker_public: bytes) -> AttestedRuntime:
    """Find the attested runtime whose evidence key is called `signer`; raises `RefusedError`, `run-unknown`."""
    for row in connection.execute(_ATTESTED, {"run_id": run_id}).mappings():
        if key_id(row["evidence_public"]) == signer:
            return AttestedRuntime(
                row=row,
                package_id=row["package_id"],
                head=head_of(row, broker_public=broker_public),
                stopped=row["stopped_us"] is not None,
                superseded=row["leg"] != row["current_leg"],
            )
    raise RefusedError(Code.RUN_UNKNOWN, "no runtime with this key was attested for this run")


def head_of(row: RowMapping, *, broker_public: bytes) -> CountersignedHead | None:
    """Return the last head that was countersigned for the runtime of a row of `releases`."""
    if not row["head"]:
        return None
    return CountersignedHead.parse(row["head"], broker_public=broker_public, evidence_public=row["evidence_public"])


def sweep(connection: Connection, now_us: int) -> None:
    """Delete challenges whose token can no longer pass, and evidence that waits in vain."""
    connection.execute(_SWEEP_WAITING, {"now_us": now_us})
    if connection.execute(_SWEEP, {"now_us": now_us}).rowcount:
        connection.execute(_SWEEP_ACTIVATIONS)
