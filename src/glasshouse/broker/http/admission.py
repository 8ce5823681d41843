"""Lets requests of enrolled owners in.

Law: a request is authenticated before its body is read, and taken once, also across restarts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sqlalchemy import Connection, bindparam, insert, select, update
from starlette.requests import Request

from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import owners as enrolled
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, RefusedError
from glasshouse.handshake.owner_api import OwnerRequest, authenticate, check_body, check_serial
from glasshouse.wire.crypto import key_id

_LAST = select(enrolled.c.serial_us).where(enrolled.c.owner == bindparam("named"))
_TAKE = update(enrolled).where(enrolled.c.owner == bindparam("named")).values(serial_us=bindparam("new_us"))


class Admission:
    """Authenticates and counts requests of enrolled owners.

    Args:
        in_flight: how many requests of one owner may wait for their answer.
    """

    def __init__(self, broker: BrokerState, owners: tuple[bytes, ...], *, in_flight: int) -> None:
        self._broker = broker
        self._owners: Mapping[str, bytes] = {key_id(owner): owner for owner in owners}
        self._most_in_flight = in_flight
        self._in_flight: Counter[bytes] = Counter()

    @contextmanager
    def waiting(self, request: OwnerRequest) -> Iterator[None]:
        """Count a request from when it is whole until it is answered; from the loop's thread only.

        Raises:
            RefusedError: `owner-quota` when too many of its owner's wait: those of others come first.
        """
        if self._in_flight[request.owner] >= self._most_in_flight:
            raise RefusedError(
                Code.OWNER_QUOTA,
                f"{self._most_in_flight} requests of this owner wait for their answers: repeat it when one has come",
            )
        self._in_flight[request.owner] += 1
        try:
            yield
        finally:
            self._in_flight[request.owner] -= 1

    def authenticate(self, request: Request) -> OwnerRequest:
        """Judge a request by its head alone; raises `RefusedError`."""
        named = request.headers.getlist("authorization")
        query = request.scope["query_string"]
        target = request.scope["raw_path"] + (b"?" + query if query else b"")
        return authenticate(
            named[0] if len(named) == 1 else None,
            owners=self._owners,
            gate_public=self._broker.public,
            method=request.method,
            target=target.decode("latin-1"),
            now_us=self._broker.clock_us(),
        )

    def take(self, request: OwnerRequest, body: bytes) -> Scope:
        """Take an authenticated request, with its whole body, once; on the deciding thread.

        Raises:
            RefusedError: `owner-request-invalid` for another body, `owner-request-stale` for one that was taken before.
        """
        check_body(request, body)

        def decide(connection: Connection) -> None:
            last_us = connection.execute(_LAST, {"named": request.owner}).scalar_one_or_none()
            check_serial(request, last_us or 0)
            if last_us is None:
                connection.execute(insert(enrolled).values(owner=request.owner, serial_us=request.serial_us))
            else:
                connection.execute(_TAKE, {"named": request.owner, "new_us": request.serial_us})

        self._broker.database.write(decide)
        return Scope(owner=request.owner)
