"""Bounded HTTP: how requests are received, read, passed to the deciding thread and answered.

Laws: a body is counted while it arrives, whatever length its header gives; a slow client
is cut off; every answer closes its connection, so that one connection is one bounded piece of
work; an answer to an error is a problem document and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from glasshouse.broker.api.problems import PROBLEM_TYPE, Problem
from glasshouse.broker.http.intake import PACE_US, Effect, Intake, Pace, address_of
from glasshouse.broker.store.scope import EVERYTHING, Admission, Scope
from glasshouse.errors import Code, FormatError, GlasshouseError, UsageError
from glasshouse.wire.canonical import Json, encode

__all__ = [
    "MAX_BODY_BYTES",
    "Answer",
    "Decision",
    "Limits",
    "add_message_route",
    "add_open_route",
    "add_route",
    "add_signed_route",
    "bare_app",
]

MAX_BODY_BYTES = 256 * 1024
BODY_TIMEOUT_S = 10.0
_JSON = "application/json"
_CLOSE = {"connection": "close", "cache-control": "no-store"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A response: a status and canonical JSON, or text of another content type."""

    body: bytes
    status: int = 200
    media_type: str = _JSON

    @classmethod
    def of(cls, value: Mapping[str, Json]) -> Answer:
        return cls(body=encode(value))

    @classmethod
    def refusal(cls, error: BaseException) -> Answer:
        problem = Problem.of(error)
        return cls(body=problem.encode(), status=problem.status)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What an authentic message leaves to be decided.

    Attributes:
        decide: answers it, on the deciding thread.
        effect: on the standing of its address; a message that was answered before is charged, for anyone on the way
            can play its recording again.
        repeats: of `Effect.NOTHING`: what is repeated, by a name of its own.
        every_us: how often, in microseconds.
    """

    decide: Callable[[], Answer]
    effect: Effect = Effect.CREDIT
    repeats: str = ""
    every_us: int = PACE_US

    def effect_on(self, address: str, pace: Pace) -> Effect:
        """Return the effect on an address: what it repeats faster than it should is charged to it, and to no other."""
        hurried = self.effect is Effect.NOTHING and not pace.kept(f"{self.repeats} {address}", self.every_us)
        return Effect.CHARGE if hurried else self.effect


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much a listener takes from one client.

    Attributes:
        body_bytes: the longest request body.
        parameters: names of query parameters that are passed on; others are refused.
    """

    body_bytes: int = MAX_BODY_BYTES
    parameters: frozenset[str] = field(default_factory=frozenset)


Handler: TypeAlias = Callable[[bytes, Mapping[str, str], Scope], Answer]
Reader: TypeAlias = "Callable[[bytes], Decision]"
Work: TypeAlias = Callable[[Request, bytes, Mapping[str, str]], Awaitable[Answer]]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


def bare_app() -> Starlette:
    """Return an application without a single route of its own: no documentation, schema or health page."""
    app = Starlette(exception_handlers={HTTPException: _no_such_route})
    app.router.redirect_slashes = False
    return app


def add_route(app: Starlette, method: str, path: str, handler: Handler, *, limits: Limits, executor: Executor) -> None:
    """Answer `method` on `path` by running `handler` in `executor`, for the broker's own user.

    Args:
        handler: takes the whole body, the path and query parameters and the caller's scope; what it raises becomes a
            problem.
    """

    async def work(_request: Request, body: bytes, parameters: Mapping[str, str]) -> Answer:
        call = partial(handler, body, parameters, EVERYTHING)
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    route = Route(path, _endpoint(work, limits), methods=[method])
    route.methods = {method}  # without the HEAD that comes with GET
    app.router.routes.append(route)


def add_signed_route(
    app: Starlette,
    method: str,
    path: str,
    handler: Handler,
    *,
    limits: Limits,
    executor: Executor,
    admission: Admission,
) -> None:
    """Answer `method` on `path` for enrolled owners, each within their own scope.

    Args:
        handler: as of `add_route`.
        admission: refuses what none of them signed, before its body is read.
    """

    def answer(request: Request, body: bytes, parameters: Mapping[str, str]) -> Answer:
        return handler(body, parameters, admission.take(request.state.signed, body))

    async def work(request: Request, body: bytes, parameters: Mapping[str, str]) -> Answer:
        call = partial(answer, request, body, parameters)
        with admission.waiting(request.state.signed):
            return await asyncio.get_running_loop().run_in_executor(executor, call)

    def admit(request: Request) -> None:
        request.state.signed = admission.authenticate(request)

    app.add_route(path, _endpoint(work, limits, admit), methods=[method])


def add_open_route(app: Starlette, path: str, look: Callable[[], Answer]) -> None:
    """Answer GET on `path` without authentication; for content that costs nothing to make."""

    async def work(_request: Request, _body: bytes, _parameters: Mapping[str, str]) -> Answer:
        return look()

    app.add_route(path, _endpoint(work, Limits(body_bytes=0)), methods=["GET"])


def add_message_route(
    app: Starlette, path: str, reader: Reader, *, limits: Limits, executor: Executor, intake: Intake, pace: Pace
) -> None:
    """Answer POST on `path` without authentication: `reader` reads the message in the intake, `executor` decides.

    Args:
        reader: takes the whole body and returns what is to be decided. It raises, which becomes a problem, for
            whatever is not authentic: that never reaches `executor`.
        pace: finds what is repeated too fast.
    """

    async def work(request: Request, body: bytes, _parameters: Mapping[str, str]) -> Answer:
        address = address_of(request.client.host if request.client else None)
        with intake.request(address):
            decision = await intake.read(
                partial(reader, body),
                address=address,
                size=len(body),
                effect=lambda found: found.effect_on(address, pace),
            )
            return await asyncio.get_running_loop().run_in_executor(executor, decision.decide)

    app.add_route(path, _endpoint(work, limits), methods=["POST"])


def _endpoint(work: Work, limits: Limits, admit: Callable[[Request], None] = lambda _request: None) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        try:
            admit(request)
            parameters = _parameters(request, limits)
            answer = await work(request, await _read_body(request, limits), parameters)
        except GlasshouseError as error:
            answer = Answer.refusal(error)
        except ClientDisconnect:
            answer = Answer.refusal(FormatError(Code.MESSAGE_INVALID, "the client went away"))
        except Exception as error:  # a defect: the answer has its code and no detail
            answer = Answer.refusal(error)
        return _response(answer)

    return endpoint


def _parameters(request: Request, limits: Limits) -> dict[str, str]:
    query: dict[str, str] = {}
    if limits.parameters:
        query = dict(request.query_params)
        if len(query) != len(request.query_params.multi_items()) or not query.keys() <= limits.parameters:
            raise UsageError(Code.USAGE, "query parameters that are repeated or unknown")
    elif request.scope["query_string"]:  # not looked into
        raise UsageError(Code.USAGE, "a query where none is meant")
    return {**query, **{name: str(value) for name, value in request.path_params.items()}}


async def _read_body(request: Request, limits: Limits) -> bytes:
    declared = request.headers.get("content-length")
    if declared is not None and declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise _too_large(limits)
    except TimeoutError:
        raise FormatError(Code.MESSAGE_INVALID, "the body did not arrive in time") from None
    # Beyond tidiness: a web page cannot make a browser send this type here without a preflight request.
    if body and request.headers.get("content-type") != _JSON:
        raise FormatError(Code.MESSAGE_INVALID, f"a body that is not {_JSON}")
    return bytes(body)


def _too_large(limits: Limits) -> FormatError:
    return FormatError(Code.MESSAGE_TOO_LARGE, f"a body of more than {limits.body_bytes} bytes")


def _response(answer: Answer) -> Response:
    media_type = answer.media_type if answer.status < 400 else PROBLEM_TYPE
    return Response(answer.body, status_code=answer.status, media_type=media_type, headers=_CLOSE)


async def _no_such_route(_request: Request, error: Exception) -> Response:
    status, headers = (error.status_code, error.headers) if isinstance(error, HTTPException) else (500, None)
    problem = Problem(code=Code.USAGE, status=status, detail="no such resource, or not by this method")
    response = _response(Answer(body=problem.encode(), status=status))
    response.headers.update(headers or {})  # which methods there are
    return response
