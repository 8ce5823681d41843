"""The owner's requests: delegations, deployments, launches, revocation.

Laws: each call is within its caller's scope; what is another owner's is answered as what does not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from glasshouse.attestation.claims import ID_BYTES
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.groups import join_group
from glasshouse.broker.decide.lines.leg_launch import begin_leg, record_leg
from glasshouse.broker.decide.lines.leg_release import line_facts
from glasshouse.broker.decide.releases import group_facts
from glasshouse.broker.http_api import DelegationRequest, DeploymentRequest, LaunchRequest, RevocationRequest
from glasshouse.broker.store import audit_log, recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import deployments, launches, packages, stopped
from glasshouse.broker.store.key_file import Purpose
from glasshouse.broker.store.line_rows import NOTHING_KEPT, LineMemory
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, RefusedError, UsageError, VerificationError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import TokenClaims, issue_token
from glasshouse.handshake.owner_api import SignedPolicy
from glasshouse.package.layout import check_commitment
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.wire.canonical import Json
from glasshouse.wire.dsse import Envelope

_SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class OwnerRequests:
    """Carries out the owner's requests."""

    broker: BrokerState
    quota: Quota
    memory: LineMemory = NOTHING_KEPT

    def put_delegation(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Keep the owner's delegation to this broker, in place of an older one; answer with the serial of what is kept.

        Raises:
            FormatError: not a delegation, or not signed by the owner that is named.
            RefusedError: `owner-quota`.
            UsageError: `delegation-invalid` when it is to another broker, over, or another owner's than the caller.
        """
        request = DelegationRequest.parse(body)
        owner, envelope = request.owner, request.delegation
        delegation, now_us = Delegation.from_envelope(envelope, owner), self.broker.clock_us()
        if not scope.covers(owner):
            raise UsageError(Code.CHAIN_DELEGATION, "a delegation by another owner than the caller")
        if delegation.broker_public != self.broker.public or now_us >= delegation.not_after_us:
            raise UsageError(Code.CHAIN_DELEGATION, "a delegation to another broker key, or one that is over")

        def decide(connection: Connection) -> int:
            self.quota.spend(connection, scope, "delegation", now_us)
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

        return ApiAnswer.of({"serial_us": self.broker.database.write(decide)})

    def add_deployment(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Record a package, its key and the policy of one deployment.

        Raises:
            FormatError, PackageError: the manifest does not hold, or the key is not this package's.
            RefusedError: `policy-loosened`, `package-revoked` or `owner-quota`.
            UsageError: the policy is over, the package id is taken by other content, or the package is another
                owner's than the caller.
        """
        request = DeploymentRequest.parse(body)
        envelope = request.manifest.encode()
        manifest = parse_signed(envelope)
        if not scope.covers(manifest.owner_signing):
            raise UsageError(Code.PACKAGE_OWNER, "a package of another owner than the caller")
        policy, kept = self._policy(request.policy, manifest, scope)
        check_commitment(request.package_key, manifest.package_id, manifest.key_commitment)
        policy.tightens(manifest.floor)
        now_us, deployment = self.broker.clock_us(), secrets.token_hex(ID_BYTES)
        row_id = scope.row_of(manifest.package_id)
        if now_us >= policy.not_after_us:
            raise UsageError(Code.POLICY_IMPOSSIBLE, "a deployment that is over before it begins")

        def decide(connection: Connection) -> None:
            query = select(packages).where(packages.c.package_id == row_id)
            row = connection.execute(query).mappings().one_or_none()
            self.quota.spend(connection, scope, "deployment", now_us)
            if row is None:
                self.quota.check_package(connection, scope)
                name = recorded.package_key_name(row_id, manifest.sha256)
                values = {
                    "package_id": row_id,
                    "owner": manifest.owner_signing,
                    "manifest_sha256": manifest.sha256,
                    "envelope": envelope,
                    "wrapped_key": self.broker.key_file.wrap(Purpose.PACKAGE_KEY, name, request.package_key),
                }
                connection.execute(insert(packages).values(**values))
            elif row["manifest_sha256"] != manifest.sha256:
                raise UsageError(Code.USAGE, "this package id already stands for another manifest")
            elif row["revoked_us"] is not None:
                raise RefusedError(Code.PACKAGE_REVOKED, "the package's key was revoked")
            connection.execute(
                insert(deployments).values(id=deployment, package_id=row_id, policy=kept, created_us=now_us)
            )
            self.quota.take_deployment(connection, scope, deployment, not_after_us=policy.not_after_us, now_us=now_us)
            audit_log.append(
                connection,
                "deployment",
                now_us,
                deployment=deployment,
                manifest_sha256=manifest.sha256.hex(),
                package_id=manifest.package_id,
                policy_sha256=policy.sha256.hex(),
            )

        self.broker.database.write(decide)
        return ApiAnswer.of({"deployment": deployment})

    def _policy(self, value: Json, manifest: Manifest, scope: Scope) -> tuple[DeploymentPolicy, bytes]:
        """Return a deployment's policy, and how it is kept: over the network as its owner signed it for this gate."""
        if scope.owner is None:
            policy = DeploymentPolicy.from_json(value)
            return policy, policy.encode()
        envelope = Envelope.from_json(value)
        signed = SignedPolicy.from_envelope(envelope, scope.owner)
        return recorded.checked_policy(signed, manifest, self.broker.public), envelope.encode()

    def add_launch(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Record a launch and issue its token.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `deployment-unknown`, `delegation-invalid`, a run id that is taken, or a place in a group
                that is, or that does not exist.
            RefusedError: `package-revoked`, `deployment-expired` or `owner-quota`; of a leg, as `begin_leg`.
        """
        request, now_us, public = LaunchRequest.parse(body), self.broker.clock_us(), self.broker.public
        now_s = now_us // _SECOND_US

        def decide(connection: Connection) -> TokenClaims:
            found = recorded.standing_of(connection, request.deployment, scope, broker_public=public)
            record = found.record
            if record.revoked:
                raise RefusedError(Code.PACKAGE_REVOKED, "the package's key was revoked")
            if now_us >= record.policy.not_after_us:
                raise RefusedError(Code.DEPLOYMENT_EXPIRED, "the deployment is over")
            try:
                recorded.delegated(connection, found.package_row, Use.RELEASE, broker_public=public, now_us=now_us)
            except VerificationError as error:  # here the caller is the owner, who can mend it
                raise UsageError(error.code, error.message) from None
            if connection.execute(select(launches.c.jti).where(launches.c.run_id == request.run_id)).first():
                raise UsageError(Code.USAGE, "this run id was launched before")
            self.quota.spend(connection, scope, "launch", now_us)
            token = TokenClaims(
                jti=secrets.token_hex(ID_BYTES),
                deployment=request.deployment,
                run_id=request.run_id,
                package_id=record.package_id,
                manifest_sha256=record.manifest_sha256,
                floor_sha256=record.floor.sha256,
                policy_sha256=record.policy.sha256,
                container_id=request.container_id,
                container_source=request.container_source,
                launch_public=request.launch_public,
                issued_s=now_s,
                # Rounded up: a token lives to the end of the second in which its deployment ends, and
                # the deployment's own end is checked to the microsecond.
                expires_s=min(now_s + request.lifetime_s, -(-record.policy.not_after_us // _SECOND_US)),
                group=request.group,
                line=begin_leg(self.broker, connection, found, request, self.memory, now_us),
            )
            facts = {"deployment": token.deployment, "jti": token.jti, "run_id": token.run_id}
            values = {
                "container_id": token.container_id,
                "container_source": token.container_source.value,
                "launch_public": token.launch_public,
                "expires_us": token.expires_s * _SECOND_US,
                "created_us": now_us,
            }
            connection.execute(insert(launches).values(**facts, **values))
            if token.group is not None:
                join_group(connection, token.group, deployment=token.deployment, jti=token.jti)
            record_leg(connection, request, token.line, jti=token.jti, group=token.group)
            audit_log.append(
                connection, "launch", now_us, **facts, **group_facts(token.group), **line_facts(token.line)
            )
            return token

        token = self.broker.database.write(decide)
        return ApiAnswer.of({"expires_us": token.expires_s * _SECOND_US, "token": issue_token(self.broker.key, token)})

    def revoke(self, body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Release a package's key never again; what was released stays released.

        With `running`, heads of its runs are not countersigned any more either: their leases end them.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `deployment-unknown` when there is no such package.
        """
        running = RevocationRequest.parse(body).running
        package_id, now_us = parameters["package_id"], self.broker.clock_us()
        row_id = scope.row_of(package_id)

        def decide(connection: Connection) -> int:
            query = select(packages.c.revoked_us, packages.c.owner).where(packages.c.package_id == row_id)
            row = connection.execute(query).one_or_none()
            if row is None:
                raise UsageError(Code.DEPLOYMENT_UNKNOWN, "this broker has no such package")
            if row.revoked_us is None:
                connection.execute(update(packages).where(packages.c.package_id == row_id).values(revoked_us=now_us))
                audit_log.append(connection, "revocation", now_us, row.owner, package_id=package_id)
            ended = select(stopped.c.package_id).where(stopped.c.package_id == row_id)
            if running and connection.execute(ended).first() is None:
                connection.execute(insert(stopped).values(package_id=row_id, stopped_us=now_us))
                audit_log.append(connection, "revocation-of-runs", now_us, row.owner, package_id=package_id)
            return now_us if row.revoked_us is None else int(row.revoked_us)

        revoked_us = self.broker.database.write(decide)
        return ApiAnswer.of({"package_id": package_id, "revoked_us": revoked_us, "running": running})
