"""Rows to records and back: what the gate's decisions are made of."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, RowMapping, delete, func, insert, select, update

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker import schema
from glasshouse.broker.keys import KeyFile, Purpose
from glasshouse.errors import Code, RefusedError, UsageError, VerificationError
from glasshouse.evidence.heads import CountersignedHead
from glasshouse.handshake.broker_side import DeploymentRecord, LaunchRecord
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.package.manifest import parse_signed
from glasshouse.wire.signing import SigningKey, key_id

__all__ = [
    "Attested",
    "attested",
    "delegated",
    "deployment_record",
    "has_broker_key",
    "launch_record",
    "lock_deployment",
    "open_broker_key",
    "package_key",
    "package_key_name",
    "put_delegation",
    "sweep",
]


def has_broker_key(connection: Connection) -> bool:
    """Return whether this database has a broker in it."""
    return connection.execute(select(func.count()).select_from(schema.broker)).scalar_one() > 0


def open_broker_key(connection: Connection, key_file: KeyFile) -> SigningKey:
    """Return the broker's signing key, made on the first start.

    Raises:
        UsageError: `usage` when the key file belongs to another database or the database to another version.
    """
    row = connection.execute(select(schema.broker)).mappings().one_or_none()
    if row is None:
        key = SigningKey.generate()
        wrapped = key_file.wrap(Purpose.SIGNING_KEY, key.key_id, key.seed())
        values = {"id": 1, "version": schema.SCHEMA_VERSION, "public": key.public, "wrapped_seed": wrapped}
        connection.execute(insert(schema.broker).values(**values))
        return key
    if row["version"] != schema.SCHEMA_VERSION:
        raise UsageError(Code.USAGE, f"a broker's database of version {row['version']}, not {schema.SCHEMA_VERSION}")
    return SigningKey(key_file.unwrap(Purpose.SIGNING_KEY, key_id(row["public"]), row["wrapped_seed"]))


def package_key_name(package_id: str, manifest_sha256: bytes) -> str:
    """Return what a wrapped package key is bound to: the package and its content."""
    return f"{package_id}:{manifest_sha256.hex()}"


def package_key(connection: Connection, record: DeploymentRecord, key_file: KeyFile) -> bytes:
    """Return the package key of a deployment, unwrapped."""
    query = select(schema.packages.c.wrapped_key).where(schema.packages.c.package_id == record.package_id)
    name = package_key_name(record.package_id, record.manifest_sha256)
    return key_file.unwrap(Purpose.PACKAGE_KEY, name, connection.execute(query).scalar_one())


def deployment_record(connection: Connection, deployment: str) -> DeploymentRecord | None:
    """Return a deployment's record, with what its package's owner signed: manifest and current delegation."""
    row = (
        connection.execute(
            select(schema.deployments.c.policy, schema.packages, schema.delegations.c.envelope.label("delegation"))
            .join(schema.packages, schema.packages.c.package_id == schema.deployments.c.package_id)
            .outerjoin(schema.delegations, schema.delegations.c.owner == schema.packages.c.owner)
            .where(schema.deployments.c.id == deployment)
        )
        .mappings()
        .one_or_none()
    )
    if row is None:
        return None
    manifest = parse_signed(row["envelope"], row["owner"])
    return DeploymentRecord(
        deployment=deployment,
        package_id=manifest.package_id,
        manifest_sha256=manifest.sha256,
        key_commitment=manifest.key_commitment,
        floor=manifest.floor,
        policy=DeploymentPolicy.parse(row["policy"]),
        revoked=row["revoked_us"] is not None,
        delegation=row["delegation"] and Delegation.parse(row["delegation"], owner_public=row["owner"]),
    )


def launch_record(connection: Connection, jti: str) -> LaunchRecord | None:
    """Return the record of one launch by its token's id."""
    table = schema.launches
    row = connection.execute(select(table).where(table.c.jti == jti)).mappings().one_or_none()
    if row is None:
        return None
    return LaunchRecord(
        jti=row["jti"],
        deployment=row["deployment"],
        run_id=row["run_id"],
        container_id=row["container_id"],
        container_source=ContainerSource(row["container_source"]),
        launch_public=row["launch_public"],
        expires_us=row["expires_us"],
    )


def lock_deployment(connection: Connection, deployment: str) -> int:
    """Take the deployment's row until the transaction ends, and return its release counter.

    An update, because every database makes a second one of the same row wait.
    """
    table = schema.deployments
    here = table.c.id == deployment
    connection.execute(update(table).where(here).values(decisions=table.c.decisions + 1))
    return int(connection.execute(select(table.c.releases).where(here)).scalar_one())


def put_delegation(connection: Connection, owner: bytes, envelope: bytes, delegation: Delegation) -> None:
    """Keep an owner's delegation in place of the one before."""
    table = schema.delegations
    connection.execute(delete(table).where(table.c.owner == owner))
    connection.execute(
        insert(table).values(
            owner=owner,
            envelope=envelope,
            not_before_us=delegation.not_before_us,
            not_after_us=delegation.not_after_us,
        )
    )


def delegated(connection: Connection, package_id: str, use: Use, *, broker_public: bytes, now_us: int) -> bytes:
    """Return the current delegation of a package's owner, which covers this use by this broker now.

    Raises:
        VerificationError: `delegation-invalid` when there is none, or none that does.
    """
    row = connection.execute(
        select(schema.delegations.c.envelope, schema.delegations.c.owner)
        .join(schema.packages, schema.packages.c.owner == schema.delegations.c.owner)
        .where(schema.packages.c.package_id == package_id)
    ).one_or_none()
    if row is None:
        raise VerificationError(Code.CHAIN_DELEGATION, "the package's owner has not delegated anything to this broker")
    delegation = Delegation.parse(row.envelope, owner_public=row.owner)
    delegation.check(use, broker_public=broker_public, at_us=now_us)
    return bytes(row.envelope)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attested:
    """A runtime that a release was made for, found by its run and its evidence key.

    Attributes:
        row: its row in `releases`.
        package_id: what it was given the key of.
        head: the last head that was countersigned for it, or None.
    """

    row: RowMapping
    package_id: str
    head: CountersignedHead | None


def attested(connection: Connection, run_id: str, signer: str, *, broker_public: bytes) -> Attested:
    """Find the attested runtime whose evidence key is called `signer`.

    Raises:
        RefusedError: `run-unknown`.
    """
    rows = connection.execute(
        select(schema.releases, schema.deployments.c.package_id)
        .join(schema.deployments, schema.deployments.c.id == schema.releases.c.deployment)
        .where(schema.releases.c.run_id == run_id)
    ).mappings()
    for row in rows:
        if key_id(row["evidence_public"]) == signer:
            head = row["head"] and CountersignedHead.parse(
                row["head"], broker_public=broker_public, evidence_public=row["evidence_public"]
            )
            return Attested(row=row, package_id=row["package_id"], head=head or None)
    raise RefusedError(Code.RUN_UNKNOWN, "no runtime with this key was attested for this run")


def sweep(connection: Connection, now_us: int) -> int:
    """Forget challenges whose token can no longer pass; return how many."""
    table = schema.challenges
    return connection.execute(delete(table).where(table.c.keep_until_us <= now_us)).rowcount
