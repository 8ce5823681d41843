"""The messages of a channel: each member is declared once, for both ends (spec/place.md, sections 3 to 8)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.providers.protocol.order import RelayOrder, gate_address
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.frames import MAX_PAYLOAD_BYTES
from glasshouse.wire.record import (
    Record,
    choice,
    digest,
    digest_text,
    fixed,
    flag,
    integer,
    items,
    nullable,
    raw,
    table,
    text,
)

GREETING, VERSION = "glasshouse-place", 1
OWN_FOLDER = "-"  # the place's, in the user's own data folder
FIRST_CALL = 1 << 31
MAX_MACHINES = 64
MAX_MESSAGE_CHARS = 1000
MAX_RUNS = 256
_MAX_READ_BYTES = MAX_PAYLOAD_BYTES - 4  # behind the number of a stream
MAX_VERSIONS = 200  # each takes at most 262 bytes of a message of 64 KiB
FILE_NAME = re.compile(r"events\.log|heads\.log|receipt\.json|runtime\.log|(outputs|log)/[0-9]{4,6}\.sealed")
_ADDRESS = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


def _relay(value: Json, where: str) -> RelayOrder:
    url, certificate = _RELAY.read(value, where)
    try:
        gate_address(url)
    except UsageError as error:
        raise FormatError(Code.SCHEMA, error.message) from None
    return RelayOrder(url=url, certificate=certificate, store=True)


_RELAY = fixed(url=text(512), certificate=nullable(digest_text()))
_NUMBER, _CALL = integer(1, FIRST_CALL - 1), integer(FIRST_CALL, 2 * FIRST_CALL - 1)
_RUN, _PACKAGE = digest_text(16), digest_text()  # a file is named by its BLAKE3
_NAME = text(pattern=FILE_NAME)
_ADDRESSES = items(MAX_MACHINES, text(pattern=_ADDRESS))
_FINDING = fixed(
    consequence=text(4000), feature=text(64), standing=choice(("good", "missing", "note", "weaker")), value=text(1000)
)
_ENDED = nullable(integer(-64, 255))  # an exit code, negative for a signal; null: the run has not ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(Record, name="answer"):
    """What is known of a machine without a look, by its own word."""

    boot: Annotated[str, text()]  # changes when the machine is started
    clock_us: int
    free_bytes: int  # of the place's folder
    machine: Annotated[str, text()]
    memory_bytes: int
    python: Annotated[str, text(64)]
    release: Annotated[str, text()]  # of the kernel
    system: Annotated[str, text()]


class Ask(NamedTuple):
    """A request, without `ask` and `id`, and its answer; where no class is named, the tuples of their members."""

    request: Codec
    answer: Codec


def _ask(request: Mapping[str, Codec], answer: Mapping[str, Codec], **defaults: Json) -> Ask:
    return Ask(fixed(defaults, **request), fixed(**answer))


ASKS: dict[str, Ask] = {
    "hello": Ask(fixed(), Codec(Hello.from_json, Hello.to_json)),
    "examine": _ask({}, {"findings": items(128, _FINDING)}),
    "installed": _ask({"after": text(128)}, {"versions": table(MAX_VERSIONS, text(128), text(128))}),
    "measure": _ask(
        {"after": nullable(text(4096))}, {"files": table(4096, text(4096), digest()), "measurement": raw()}
    ),
    "addresses": _ask({"count": integer(1, MAX_MACHINES), "host": nullable(text(255))}, {"addresses": _ADDRESSES}),
    "has": _ask({"blake3": _PACKAGE, "bytes": integer()}, {"bytes": integer()}),
    "put": _ask({"blake3": _PACKAGE, "bytes": integer(), "from": integer()}, {}),
    "prepare": _ask({"run": _RUN, "relayed": flag()}, {"gate": text(512)}, relayed=False),
    "start": _ask(
        {
            "run": _RUN,
            "package": _PACKAGE,
            "launch_bytes": integer(1, 1 << 16),
            "max_seconds": integer(1),
            "ranks": nullable(integer()),
            "peers": _ADDRESSES,
            "relay": Codec(_relay, lambda relay: _RELAY.write((relay.url, relay.certificate))),
        },
        {"pid": integer()},
        relay=None,
    ),
    "look": _ask(
        {"run": _RUN, "since": integer(), "within_ms": integer(0, 60_000), "outputs": integer(), "log": integer()},
        {"ended": _ENDED, "files": table(1100, _NAME, integer()), "more": flag(), "serial": integer()},
    ),
    "read": _ask(
        {"run": _RUN, "name": _NAME, "from": integer(), "most": integer(1, _MAX_READ_BYTES)}, {"bytes": integer()}
    ),
    "stop": _ask({"run": _RUN, "how": choice(("interrupt", "kill"))}, {}),
    "runs": _ask(
        {"after": text(32)},
        {"runs": items(MAX_RUNS, fixed(ended=_ENDED, run=_RUN, started_us=integer()))},
    ),
    "remove": _ask({"run": _RUN, "package": nullable(_PACKAGE)}, {}),
}
_ASK = choice(ASKS)
# A message that is no request has one member that only its kind has.
_MESSAGES = {
    "ok": fixed(id=_NUMBER, ok=raw()),
    "code": fixed(id=integer(0, FIRST_CALL - 1), code=text(64), message=text(MAX_MESSAGE_CHARS)),
    "go": fixed(id=_NUMBER, go=flag()),
    "call": fixed(call=_CALL),
    "end": fixed(end=integer()),
    "drop": fixed(drop=integer()),
}


def message(kind: str, *members: Any) -> dict[str, Json]:
    """Return a message that is no request; the inverse of `read_message`."""
    written: dict[str, Json] = _MESSAGES[kind].write(members)  # type: ignore[assignment]  # an object
    return written


def read_request(value: dict[str, Json]) -> tuple[int, str, tuple[Any, ...]]:
    """Return a request's number, what it asks and its members; raises `FormatError`."""
    rest = dict(value)
    number: int = _NUMBER.read(rest.pop("id", None), "request.id")
    ask: str = _ASK.read(rest.pop("ask", None), "request.ask")
    return number, ask, ASKS[ask].request.read(rest, "request")


def read_message(value: dict[str, Json]) -> tuple[str, tuple[Any, ...]]:
    """Return a message's kind and members; raises `FormatError`."""
    kind = next((kind for kind in _MESSAGES if kind in value), "ok")
    found: tuple[Any, ...] = _MESSAGES[kind].read(value, "message")
    return kind, found
