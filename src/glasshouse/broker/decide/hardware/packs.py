"""The owner's collateral pack, of which the gate keeps the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert

from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.http_api import CollateralRequest
from glasshouse.broker.store import audit_log
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import collateral
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, UsageError


@dataclass(frozen=True, slots=True)
class CollateralRequests:
    """Carries out the owner's requests about collateral."""

    broker: BrokerState
    quota: Quota

    def put_collateral(self, body: bytes, _parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Keep a pack in the place of the owner's last; answer with its digest.

        What is in it is judged when it is used, by its makers' signatures.

        Raises:
            FormatError: not a pack.
            RefusedError: `owner-quota`.
            UsageError: `package-owner-mismatch` for another owner than the caller.
        """
        request = CollateralRequest.parse(body)
        owner, data, now_us = request.owner, request.collateral.encode(), self.broker.clock_us()
        digest = request.collateral.sha256
        if not scope.covers(owner):
            raise UsageError(Code.PACKAGE_OWNER, "collateral of another owner than the caller")

        def decide(connection: Connection) -> None:
            self.quota.spend(connection, scope, "collateral pack", now_us)
            connection.execute(delete(collateral).where(collateral.c.owner == owner))
            connection.execute(insert(collateral).values(owner=owner, pack=data, sha256=digest, stored_us=now_us))
            facts: dict[str, str | int] = {"items": len(request.collateral.items), "owner": owner.hex()}
            audit_log.append(connection, "collateral", now_us, owner, collateral_sha256=digest.hex(), **facts)

        self.broker.database.write(decide)
        return ApiAnswer.of({"collateral_sha256": digest.hex()})
