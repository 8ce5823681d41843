"""The owner's side of the broker: delegations, deployments, launches, revocation."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from sqlalchemy import Connection, insert, select, update

from glasshouse.attestation.claims import ID_BYTES, ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker import audit, store
from glasshouse.broker.database import Database
from glasshouse.broker.http import Answer
from glasshouse.broker.keys import KeyFile, Purpose
from glasshouse.broker.owners_groups import join_group
from glasshouse.broker.releases import group_facts
from glasshouse.broker.schema import deployments, launches, packages
from glasshouse.errors import Code, RefusedError, UsageError, VerificationError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.tokens import TokenClaims, issue_token
from glasshouse.package.layout import check_commitment
from glasshouse.package.manifest import parse_signed
from glasshouse.wire.canonical import decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields
from glasshouse.wire.group import Group
from glasshouse.wire.signing import SigningKey

__all__ = ["OwnerSide"]

MAX_BODY_BYTES = 256 * 1024
MAX_LAUNCH_LIFETIME_S = 7 * 24 * 3600
_SECOND_US = 1_000_000


class OwnerSide:
    """Does what the owner asks.

    Args:
        database: where everything is kept.
        key_file: wraps package keys.
        key: the broker's signing key.
        clock_us: microseconds since the epoch.
    """

    def __init__(self, database: Database, key_file: KeyFile, key: SigningKey, clock_us: Callable[[], int]) -> None:
        self._database = database
        self._key_file = key_file
        self._key = key
        self._clock_us = clock_us

    def put_delegation(self, body: bytes, _parameters: Mapping[str, str]) -> Answer:
        """Keep the owner's delegation to this broker, in place of an older one.

        Raises:
            FormatError: not a delegation, or not signed by the owner that is named.
            UsageError: `delegation-invalid` when it is to another broker, or over.
        """
        fields = Fields(decode(body, max_bytes=MAX_BODY_BYTES), "request")
        envelope, owner = Envelope.from_json(fields.any("delegation")), fields.octets("owner", length=32)
        fields.end()
        delegation, now_us = Delegation.from_envelope(envelope, owner_public=owner), self._clock_us()
        if delegation.broker_public != self._key.public or now_us >= delegation.not_after_us:
            raise UsageError(Code.CHAIN_DELEGATION, "a delegation to another broker key, or one that is over")

        def decide(connection: Connection) -> None:
            store.put_delegation(connection, owner, envelope.encode(), delegation)
            audit.append(
                connection,
                "delegation",
                now_us,
                not_after_us=delegation.not_after_us,
                owner=owner.hex(),
                uses=" ".join(sorted(delegation.uses)),
            )

        self._database.write(decide)
        return Answer.of({})

    def add_deployment(self, body: bytes, _parameters: Mapping[str, str]) -> Answer:
        """Record a package, its key and the policy of one deployment.

        Raises:
            FormatError, PackageError: the manifest does not hold, or the key is not this package's.
            RefusedError: `policy-loosened` or `package-revoked`.
            UsageError: the policy is over, or the package id is taken by other content.
        """
        fields = Fields(decode(body, max_bytes=MAX_BODY_BYTES), "request")
        envelope = Envelope.from_json(fields.any("manifest")).encode()
        package_key = fields.octets("package_key", length=32)
        policy = DeploymentPolicy.from_json(fields.any("policy"))
        fields.end()
        manifest = parse_signed(envelope)
        check_commitment(package_key, manifest.package_id, manifest.key_commitment)
        policy.tightens(manifest.floor)
        now_us, deployment = self._clock_us(), secrets.token_hex(ID_BYTES)
        if now_us >= policy.not_after_us:
            raise UsageError(Code.POLICY_IMPOSSIBLE, "a deployment that is over before it begins")

        def decide(connection: Connection) -> None:
            query = select(packages).where(packages.c.package_id == manifest.package_id)
            row = connection.execute(query).mappings().one_or_none()
            if row is None:
                name = store.package_key_name(manifest.package_id, manifest.sha256)
                values = {
                    "package_id": manifest.package_id,
                    "owner": manifest.owner_signing,
                    "manifest_sha256": manifest.sha256,
                    "envelope": envelope,
                    "wrapped_key": self._key_file.wrap(Purpose.PACKAGE_KEY, name, package_key),
                }
                connection.execute(insert(packages).values(**values))
            elif row["manifest_sha256"] != manifest.sha256:
                raise UsageError(Code.USAGE, "this package id already stands for another manifest")
            elif row["revoked_us"] is not None:
                raise RefusedError(Code.PACKAGE_REVOKED, "the package's key was revoked")
            connection.execute(
                insert(deployments).values(
                    id=deployment, package_id=manifest.package_id, policy=policy.encode(), created_us=now_us
                )
            )
            audit.append(
                connection,
                "deployment",
                now_us,
                deployment=deployment,
                manifest_sha256=manifest.sha256.hex(),
                package_id=manifest.package_id,
                policy_sha256=policy.sha256.hex(),
            )

        self._database.write(decide)
        return Answer.of({"deployment": deployment})

    def add_launch(self, body: bytes, _parameters: Mapping[str, str]) -> Answer:
        """Record a launch and issue its token.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `deployment-unknown`, `delegation-invalid`, a run id that is taken, or a place in a group
                that is, or that does not exist.
            RefusedError: `package-revoked` or `deployment-expired`.
        """
        fields = Fields(decode(body, max_bytes=MAX_BODY_BYTES), "request")
        container = fields.child("container")
        deployment = fields.digest("deployment", length=ID_BYTES).hex()
        run_id = fields.digest("run_id", length=ID_BYTES).hex()
        container_id = container.identifier("id")
        source = ContainerSource(container.choice("source", list(ContainerSource)))
        launch_public = fields.octets("launch_public", length=32)
        lifetime_s = fields.integer("lifetime_s", low=1, high=MAX_LAUNCH_LIFETIME_S)
        group = Group.from_json(fields.any("group")) if fields.has("group") else None
        container.end()
        fields.end()
        now_us = self._clock_us()
        now_s = now_us // _SECOND_US

        def decide(connection: Connection) -> TokenClaims:
            record = store.deployment_record(connection, deployment)
            if record is None:
                raise UsageError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such deployment")
            if record.revoked:
                raise RefusedError(Code.PACKAGE_REVOKED, "the package's key was revoked")
            if now_us >= record.policy.not_after_us:
                raise RefusedError(Code.DEPLOYMENT_EXPIRED, "the deployment is over")
            try:
                store.delegated(
                    connection, record.package_id, Use.RELEASE, broker_public=self._key.public, now_us=now_us
                )
            except VerificationError as error:  # here it is the owner who asks, and who can mend it
                raise UsageError(error.code, error.message) from None
            if connection.execute(select(launches.c.jti).where(launches.c.run_id == run_id)).first():
                raise UsageError(Code.USAGE, "this run id was launched before")
            token = TokenClaims(
                jti=secrets.token_hex(ID_BYTES),
                deployment=deployment,
                run_id=run_id,
                package_id=record.package_id,
                manifest_sha256=record.manifest_sha256,
                floor_sha256=record.floor.sha256,
                policy_sha256=record.policy.sha256,
                container_id=container_id,
                container_source=source,
                launch_public=launch_public,
                issued_s=now_s,
                # Rounded up: a token lives to the end of the second in which its deployment ends, and
                # the deployment's own end is checked to the microsecond.
                expires_s=min(now_s + lifetime_s, -(-record.policy.not_after_us // _SECOND_US)),
                group=group,
            )
            values = {
                "jti": token.jti,
                "run_id": run_id,
                "deployment": deployment,
                "container_id": container_id,
                "container_source": source.value,
                "launch_public": launch_public,
                "expires_us": token.expires_s * _SECOND_US,
                "created_us": now_us,
            }
            connection.execute(insert(launches).values(**values))
            if group is not None:
                join_group(connection, group, deployment=deployment, jti=token.jti)
            facts = {"deployment": deployment, "jti": token.jti, "run_id": run_id}
            audit.append(connection, "launch", now_us, **facts, **group_facts(group))
            return token

        token = self._database.write(decide)
        return Answer.of({"expires_us": token.expires_s * _SECOND_US, "token": issue_token(self._key, token)})

    def revoke(self, _body: bytes, parameters: Mapping[str, str]) -> Answer:
        """Release a package's key never again; what was released stays released.

        Raises:
            UsageError: `file-missing` when there is no such package.
        """
        package_id, now_us = parameters["package_id"], self._clock_us()

        def decide(connection: Connection) -> int:
            query = select(packages.c.revoked_us).where(packages.c.package_id == package_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                raise UsageError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such package")
            if row.revoked_us is not None:
                return int(row.revoked_us)
            connection.execute(update(packages).where(packages.c.package_id == package_id).values(revoked_us=now_us))
            audit.append(connection, "revocation", now_us, package_id=package_id)
            return now_us

        return Answer.of({"package_id": package_id, "revoked_us": self._database.write(decide)})
