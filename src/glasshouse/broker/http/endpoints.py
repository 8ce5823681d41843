"""Bounded HTTP: how requests are received, authenticated, read, passed to the deciding thread and answered.

Laws: a body is counted while it arrives, whatever length its header gives; a slow client is cut off; every answer
closes its connection, so that one connection is one bounded piece of work; an answer to an error is a problem document
and no more; an enrolled owner's request is authenticated before its body is read, and taken once, also across restarts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

from sqlalchemy import Connection, bindparam, insert, select, update
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from glasshouse.attestation.detached import LENGTH_BYTES, readable
from glasshouse.broker.decide.decisions import JSON_TYPE, ApiAnswer, Decision, Effect, Rest
from glasshouse.broker.http.connections import address_of
from glasshouse.broker.http.intake import Intake, Pace
from glasshouse.broker.http.rests import BODY_TIMEOUT_S
from glasshouse.broker.http_api import MAX_BODY_BYTES, PROBLEM_TYPE, Problem
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import owners as enrolled
from glasshouse.broker.store.scope import EVERYTHING, Scope
from glasshouse.errors import Code, FormatError, RefusedError, UsageError
from glasshouse.handshake.owner_api import OwnerRequest, authenticate, check_body, check_serial
from glasshouse.wire.crypto import key_id

_LAST = select(enrolled.c.serial_us).where(enrolled.c.owner == bindparam("named"))
_TAKE = update(enrolled).where(enrolled.c.owner == bindparam("named")).values(serial_us=bindparam("new_us"))
_CLOSE = {"connection": "close", "cache-control": "no-store"}


Handler: TypeAlias = Callable[[bytes, Mapping[str, str], Scope], ApiAnswer]
Reader: TypeAlias = Callable[[bytes], Decision | Rest]
Work: TypeAlias = Callable[[Request, bytes, Mapping[str, str]], Awaitable[ApiAnswer]]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


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


class OwnerCall(NamedTuple):
    """One call of an owner's: a row of the table in spec/owner-api.md.

    Its handler takes the whole body, the path and query parameters and the caller's scope; what it raises becomes a
    problem.
    """

    method: str
    path: str
    handler: Handler
    is_paged: bool = False  # whether its query may have the parameter `after`
    body_bytes: int = MAX_BODY_BYTES


def bare_app() -> Starlette:
    """Return an application without a single route of its own: no documentation, schema or health page."""
    app = Starlette(exception_handlers={HTTPException: _no_such_route})
    app.router.redirect_slashes = False
    return app


def add_route(app: Starlette, call: OwnerCall, *, executor: Executor) -> None:
    """Answer an owner's call by running its handler in `executor`, for the broker's own user."""

    async def work(_request: Request, body: bytes, parameters: Mapping[str, str]) -> ApiAnswer:
        return await _run(executor, partial(call.handler, body, parameters, EVERYTHING))

    route = Route(call.path, _endpoint(work, body_bytes=call.body_bytes, is_paged=call.is_paged), methods=[call.method])
    route.methods = {call.method}  # without the HEAD that comes with GET
    app.router.routes.append(route)


def add_signed_route(app: Starlette, call: OwnerCall, *, executor: Executor, admission: Admission) -> None:
    """Answer a call of enrolled owners, each within their own scope; another is refused before its body is read."""

    def answer(request: Request, body: bytes, parameters: Mapping[str, str]) -> ApiAnswer:
        return call.handler(body, parameters, admission.take(request.state.signed, body))

    async def work(request: Request, body: bytes, parameters: Mapping[str, str]) -> ApiAnswer:
        with admission.waiting(request.state.signed):
            return await _run(executor, partial(answer, request, body, parameters))

    def admit(request: Request) -> None:
        request.state.signed = admission.authenticate(request)

    endpoint = _endpoint(work, body_bytes=call.body_bytes, is_paged=call.is_paged, admit=admit)
    app.add_route(call.path, endpoint, methods=[call.method])


def add_open_route(app: Starlette, path: str, look: Callable[[], ApiAnswer]) -> None:
    """Answer GET on `path` without authentication; for content that costs nothing to make."""

    async def work(_request: Request, _body: bytes, _parameters: Mapping[str, str]) -> ApiAnswer:
        return look()

    app.add_route(path, _endpoint(work, body_bytes=0), methods=["GET"])


def add_message_route(
    app: Starlette,
    path: str,
    reader: Reader,
    *,
    body_bytes: int,
    alone_bytes: int | None = None,
    executor: Executor,
    intake: Intake,
    pace: Pace,
) -> None:
    """Answer POST on `path` without authentication: `reader` reads the message in the intake, `executor` decides.

    Args:
        reader: takes the whole body, or the first of its two parts, and returns what is to be decided, or read before
            that. It raises, which becomes a problem, for whatever is not authentic: that never reaches `executor`.
        alone_bytes: limit of a body of one part; that of both by default.
    """

    async def work(request: Request, body: bytes, _parameters: Mapping[str, str]) -> ApiAnswer:
        address = address_of(request.client.host if request.client else None)

        def effect(found: Decision | Rest) -> Effect:
            return Effect.NOTHING if isinstance(found, Rest) else pace.effect(found, address)

        with intake.request(address):
            found = await intake.read(partial(reader, body), address=address, size=len(body), effect=effect)
            if isinstance(found, Decision):
                return await _run(executor, found.decide)
            found.check(int(request.headers.get("content-length", "0")) - len(body))
            with intake.rests.place(request.state.rest, address=address, of=found.of, size=found.size) as place:
                rest = await _read_rest(request)
                place.whole()
                decision = await intake.read(partial(found.read, rest), address=address, size=len(rest), effect=effect)
                place.signed()
                await intake.ahead(decision)
                return await _run(executor, decision.decide)

    app.add_route(path, _endpoint(work, body_bytes=body_bytes, alone_bytes=alone_bytes), methods=["POST"])


async def _run(executor: Executor, call: Callable[[], ApiAnswer]) -> ApiAnswer:
    return await asyncio.get_running_loop().run_in_executor(executor, call)


def _endpoint(
    work: Work,
    *,
    body_bytes: int = MAX_BODY_BYTES,
    alone_bytes: int | None = None,
    is_paged: bool = False,
    admit: Callable[[Request], None] = lambda _request: None,
) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            admit(request)
            parameters = _parameters(request, is_paged)
            body = await _read_body(request, body_bytes, body_bytes if alone_bytes is None else alone_bytes)
            answer = await work(request, body, parameters)
        except ClientDisconnect:
            answer = ApiAnswer.refusal(FormatError(Code.MESSAGE_INVALID, "the client went away"))
        except Exception as error:  # of a defect the answer has its code and no detail
            answer = ApiAnswer.refusal(error)
        return _response(answer)

    return endpoint


def _parameters(request: Request, is_paged: bool) -> dict[str, str]:
    query: dict[str, str] = {}
    if is_paged:
        query = dict(request.query_params)
        if len(query) != len(request.query_params.multi_items()) or not query.keys() <= {"after"}:
            raise UsageError(Code.USAGE, "query parameters that are repeated or unknown")
    elif request.scope["query_string"]:  # not looked into
        raise UsageError(Code.USAGE, "a query where none is meant")
    return {**query, **{name: str(value) for name, value in request.path_params.items()}}


async def _read_body(request: Request, most: int, alone: int) -> bytes:
    declared = request.headers.get("content-length")
    length = int(declared[:20]) if declared is not None and declared.isascii() and declared.isdigit() else 0
    if length > most:
        raise FormatError(Code.MESSAGE_TOO_LARGE, f"a body of more than {most} bytes")
    body = bytearray()
    async with _in_time():
        async for chunk in request.stream():
            body += chunk
            end = readable(body[:LENGTH_BYTES])
            if end is None and max(length, len(body)) > alone:
                raise FormatError(Code.MESSAGE_TOO_LARGE, f"a body of more than {alone} bytes")
            if end is not None and end <= len(body):
                del body[end:]
                break  # no more of it is passed on before this part was found authentic
    # Beyond tidiness: a web page cannot make a browser send this type here without a preflight request.
    if body and request.headers.get("content-type") != JSON_TYPE:
        raise FormatError(Code.MESSAGE_INVALID, f"a body that is not {JSON_TYPE}")
    return bytes(body)


async def _read_rest(request: Request) -> bytes:
    """Read what is behind the first part of a body."""
    request.state.rest.read_on()
    rest = bytearray()
    async with _in_time():
        async for chunk in request.stream():
            rest += chunk
    return bytes(rest)


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            yield
    except TimeoutError:
        raise FormatError(Code.MESSAGE_INVALID, "the body did not arrive in time") from None


def _response(answer: ApiAnswer) -> Response:
    media_type = answer.media_type if answer.status < 400 else PROBLEM_TYPE
    return Response(answer.body, status_code=answer.status, media_type=media_type, headers=_CLOSE)


async def _no_such_route(_request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    problem = Problem(code=Code.USAGE, status=status, detail="no such resource, or not by this method")
    response = _response(ApiAnswer(body=problem.encode(), status=status))
    response.headers.update(headers or {})  # which methods there are
    return response
