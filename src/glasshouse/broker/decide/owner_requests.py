"""The owner's side of the broker: delegations, deployments, launches, revocation.

Laws: each call is within its caller's scope; what is another owner's is answered as what does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from sqlalchemy import Connection, insert, select, update

from glasshouse.attestation.claims import ID_BYTES, ContainerSource
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.decide.group_requests import join_group
from glasshouse.broker.decide.releases import group_facts
from glasshouse.broker.http.endpoints import Answer
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import Database
from glasshouse.broker.store.database_schema import deployments, launches, packages, stopped
from glasshouse.broker.store.key_file import KeyFile, Purpose
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, FormatError, RefusedError, UsageError, VerificationError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.signed_policy import SignedPolicy
from glasshouse.handshake.tokens import TokenClaims, issue_token
from glasshouse.package.layout import check_commitment
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.wire.canonical import Json, decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields
from glasshouse.wire.group import Group
from glasshouse.wire.signing import SigningKey

__all__ = ["OwnerSide"]

MAX_BODY_BYTES = 256 * 1024
MAX_LAUNCH_LIFETIME_S = 7 * 24 * 3600
_SECOND_US = 1_000_000


class OwnerSide:
    """Carries out the owner's requests.

    Args:
        database: where everything is kept.
        key_file: wraps package keys.
        key: the broker's signing key.
        clock_us: microseconds since the epoch.
        quota: what each enrolled owner may have.
    """

    def __init__(
        self, database: Database, key_file: KeyFile, key: SigningKey, clock_us: Callable[[], int], quota: Quota
    ) -> None:
        self._database = database
        self._key_file = key_file
        self._key = key
        self._clock_us = clock_us
        self._quota = quota

    def put_delegation(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> Answer:
        """Keep the owner's delegation to this broker, in place of an older one; answer with the serial of what is kept.

        Raises:
            FormatError: not a delegation, or not signed by the owner that is named.
            RefusedError: `owner-quota`.
            UsageError: `delegation-invalid` when it is to another broker, over, or another owner's than the caller.
        """
        fields = Fields(decode(body, max_bytes=MAX_BODY_BYTES), "request")
        envelope, owner = Envelope.from_json(fields.any("delegation")), fields.octets("owner", length=32)
        fields.end()
        delegation, now_us = Delegation.from_envelope(envelope, owner_public=owner), self._clock_us()
        if not scope.covers(owner):
            raise UsageError(Code.CHAIN_DELEGATION, "a delegation by another owner than the caller")
        if delegation.broker_public != self._key.public or now_us >= delegation.not_after_us:
            raise UsageError(Code.CHAIN_DELEGATION, "a delegation to another broker key, or one that is over")

        def decide(connection: Connection) -> int:
            self._quota.spend(connection, scope, "delegation", now_us)
            stays = recorded.put_delegation(connection, owner, envelope.encode(), delegation)
            if stays is not None:
                return stays.serial_us
            audit_log.append(
                connection,
                "delegation",
                now_us,
                owner,
                not_after_us=delegation.not_after_us,
                owner=owner.hex(),
                serial_us=delegation.serial_us,
                uses=" ".join(sorted(delegation.uses)),
            )
            return delegation.serial_us

        return Answer.of({"serial_us": self._database.write(decide)})

    def add_deployment(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> Answer:
        """Record a package, its key and the policy of one deployment.

        Raises:
            FormatError, PackageError: the manifest does not hold, or the key is not this package's.
            RefusedError: `policy-loosened`, `package-revoked` or `owner-quota`.
            UsageError: the policy is over, the package id is taken by other content, or the package is another
                owner's than the caller.
        """
        fields = Fields(decode(body, max_bytes=MAX_BODY_BYTES), "request")
        envelope = Envelope.from_json(fields.any("manifest")).encode()
        package_key = fields.octets("package_key", length=32)
        said = fields.any("policy")
        fields.end()
        manifest = parse_signed(envelope)
        if not scope.covers(manifest.owner_signing):
            raise UsageError(Code.PACKAGE_OWNER, "a package of another owner than the caller")
        policy, kept = self._policy(said, manifest, scope)
        check_commitment(package_key, manifest.package_id, manifest.key_commitment)
        policy.tightens(manifest.floor)
        now_us, deployment, row_id = self._clock_us(), secrets.token_hex(ID_BYTES), scope.row_of(manifest.package_id)
        if now_us >= policy.not_after_us:
            raise UsageError(Code.POLICY_IMPOSSIBLE, "a deployment that is over before it begins")

        def decide(connection: Connection) -> None:
            query = select(packages).where(packages.c.package_id == row_id)
            row = connection.execute(query).mappings().one_or_none()
            self._quota.spend(connection, scope, "deployment", now_us)
            if row is None:
                self._quota.check_package(connection, scope)
                name = recorded.package_key_name(row_id, manifest.sha256)
                values = {
                    "package_id": row_id,
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
                insert(deployments).values(id=deployment, package_id=row_id, policy=kept, created_us=now_us)
            )
            self._quota.take_deployment(connection, scope, deployment, not_after_us=policy.not_after_us, now_us=now_us)
            audit_log.append(
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

    def _policy(self, said: Json, manifest: Manifest, scope: Scope) -> tuple[DeploymentPolicy, bytes]:
        """Return a deployment's policy, and how it is kept: over the network as its owner signed it for this gate."""
        if scope.owner is None:
            policy = DeploymentPolicy.from_json(said)
            return policy, policy.encode()
        envelope = Envelope.from_json(said)
        signed = SignedPolicy.from_envelope(envelope, scope.owner)
        if (signed.broker_public, signed.manifest_sha256) != (self._key.public, manifest.sha256):
            raise FormatError(Code.SIGNATURE, "a policy that was signed for another gate or another package")
        return signed.policy, envelope.encode()

    def add_launch(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> Answer:
        """Record a launch and issue its token.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `deployment-unknown`, `delegation-invalid`, a run id that is taken, or a place in a group
                that is, or that does not exist.
            RefusedError: `package-revoked`, `deployment-expired` or `owner-quota`.
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
            found = recorded.standing_of(connection, deployment, scope, broker_public=self._key.public)
            record = found.record
            if record.revoked:
                raise RefusedError(Code.PACKAGE_REVOKED, "the package's key was revoked")
            if now_us >= record.policy.not_after_us:
                raise RefusedError(Code.DEPLOYMENT_EXPIRED, "the deployment is over")
            try:
                recorded.delegated(
                    connection, found.package_row, Use.RELEASE, broker_public=self._key.public, now_us=now_us
                )
            except VerificationError as error:  # here the caller is the owner, who can mend it
                raise UsageError(error.code, error.message) from None
            if connection.execute(select(launches.c.jti).where(launches.c.run_id == run_id)).first():
                raise UsageError(Code.USAGE, "this run id was launched before")
            self._quota.spend(connection, scope, "launch", now_us)
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
            audit_log.append(connection, "launch", now_us, **facts, **group_facts(group))
            return token

        token = self._database.write(decide)
        return Answer.of({"expires_us": token.expires_s * _SECOND_US, "token": issue_token(self._key, token)})

    def revoke(self, body: bytes, parameters: Mapping[str, str], scope: Scope) -> Answer:
        """Release a package's key never again; what was released stays released.

        With `running`, heads of its runs are not countersigned any more either: their leases end them.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `deployment-unknown` when there is no such package.
        """
        fields = Fields(decode(body, max_bytes=MAX_BODY_BYTES), "request")
        running = fields.flag("running") if fields.has("running") else False
        fields.end()
        package_id, row_id, now_us = parameters["package_id"], scope.row_of(parameters["package_id"]), self._clock_us()

        def decide(connection: Connection) -> int:
            query = select(packages.c.revoked_us, packages.c.owner).where(packages.c.package_id == row_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                raise UsageError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such package")
            revoked_us = now_us if row.revoked_us is None else int(row.revoked_us)
            if row.revoked_us is None:
                connection.execute(update(packages).where(packages.c.package_id == row_id).values(revoked_us=now_us))
                audit_log.append(connection, "revocation", now_us, row.owner, package_id=package_id)
            ended = select(stopped.c.package_id).where(stopped.c.package_id == row_id)
            if running and connection.execute(ended).first() is None:
                connection.execute(insert(stopped).values(package_id=row_id, stopped_us=now_us))
                audit_log.append(connection, "revocation-of-runs", now_us, row.owner, package_id=package_id)
            return revoked_us

        return Answer.of({"package_id": package_id, "revoked_us": self._database.write(decide), "running": running})
