"""A provider's interface on the loopback, over real sockets: what is asked and answered is kept and counted."""

from __future__ import annotations

import abc
import http.server
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulators.api_description import Description

__all__ = ["Exchange", "FakeApi", "Reply", "Troubles", "problem", "quick"]


def quick(provider: Any, clock: Any) -> Any:
    """Return a provider that waits by moving a clock on."""
    provider.api.sleep, provider.api.jitter, provider.clock = clock.sleep, lambda: 0.5, clock
    return provider


@dataclass(frozen=True)
class Reply:
    """An answer: 0 for none at all; `value` is JSON, or text."""

    status: int
    value: Any
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    call: str = ""


@dataclass(frozen=True)
class Exchange:
    """One request and its answer, and when."""

    method: str
    target: str
    body: Any
    reply: Reply
    at: float


@dataclass
class Troubles:
    """What goes wrong at any provider, from when it is set; what counts down is for so many requests.

    Attributes:
        no_capacity: nothing is to be had.
        vanishes: what is offered is rented by someone else before it is taken.
        lose_creates: so many machines are made, and the connection ends without an answer.
        listed_after_s: what is made is shown only so long after.
        stale_s: listings are as they were so long ago.
        lies: so many deletions are answered as done, and are not.
        never_boots, no_sshd, loops: of what is made from then on; loops as of `RentedHost`.
        dearer: what every price of an offer is multiplied by.
        dearer_once_made: what the price of a machine is, beside that of its offer, from then on.
        ahead_s: by how much the provider's clock is ahead, by which it writes times.
        other_version: the interface is another one.
    """

    no_capacity: bool = False
    vanishes: bool = False
    lose_creates: int = 0
    listed_after_s: float = 0.0
    stale_s: float = 0.0
    lies: int = 0
    never_boots: bool = False
    no_sshd: bool = False
    loops: float | None = None
    dearer: float = 1.0
    dearer_once_made: float = 1.0
    ahead_s: float = 0.0
    other_version: bool = False


class FakeApi(abc.ABC):
    """What answers, and what it was asked.

    Args:
        folder: where its machines have their disks.
        description: what requests are held to; others are refused.
        clock: seconds; what delays, prices and limits are counted by.
        stream_s: how long a stream stays open; the real ones do not end.
    """

    def __init__(
        self,
        folder: Path,
        *,
        description: Description | None = None,
        clock: Callable[[], float] = time.monotonic,
        stream_s: float = 30.0,
    ) -> None:
        self.url, self.key = "", f"key_{secrets.token_hex(28)}"
        self._folder, self._description = folder, description
        self.exchanges: list[Exchange] = []
        self.clock, self.stream_s = clock, stream_s
        self.closing = threading.Event()
        self.lock = threading.RLock()

    @property
    @abc.abstractmethod
    def made(self) -> Sequence[Any]:
        """All machines that there ever were; of each its `host`, and when it was destroyed in `gone_at`."""

    @abc.abstractmethod
    def answer(self, method: str, target: str, body: Any, authorization: str) -> Reply:
        """Return what a request is answered with."""

    def unreadable(self, method: str, target: str) -> Reply:
        """Return what a request is answered with whose body is no JSON."""
        return problem(422, "the body is no JSON", call=f"{method} {target}")

    def left(self) -> list[Any]:
        """Return what costs money now."""
        with self.lock:
            return [one for one in self.made if one.gone_at is None]

    def dies(self, one: Any) -> None:
        """End a machine, as when its host fails; it stays in the account."""
        assert one.host is not None
        one.host.die()

    def destroy(self, one: Any) -> None:
        """Take a machine out of the account, and end it."""
        with self.lock:
            if one.gone_at is not None:
                return
            one.gone_at = self.clock()
        if one.host is not None:
            one.host.destroy()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer as long as the block lasts."""
        handler = type("Handler", (_Handler,), {"fake": self})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.closing.set()
            for one in self.made:
                self.destroy(one)
            server.shutdown()
            server.server_close()
            thread.join()

    def record(self, method: str, target: str, body: Any, reply: Reply) -> None:
        with self.lock:
            self.exchanges.append(Exchange(method, target, body, reply, self.clock()))

    def requests(self) -> Counter[str]:
        """Return how often each call was made."""
        return Counter(exchange.reply.call for exchange in self.exchanges)

    def polled_s(self) -> float | None:
        """Return the least time between two equal requests that read; None without any."""
        last: dict[str, float] = {}
        apart = []
        for exchange in self.exchanges:
            if exchange.method == "GET":
                if exchange.target in last:
                    apart.append(exchange.at - last[exchange.target])
                last[exchange.target] = exchange.at
        return min(apart, default=None)

    def faults(self, description: Description) -> list[str]:
        """Return where an exchange was not as a description has it; one that was not answered has no answer."""
        found = []
        for each in self.exchanges:
            reply = each.reply
            faults = description.request_faults(each.method, each.target, each.body)
            if reply.status:
                kind = "" if reply.value is None else reply.kind
                faults += description.response_faults(each.method, each.target, reply.status, kind, reply.value)
            found += [f"{reply.call} ({reply.status}): {fault}" for fault in faults]
        return found


def problem(
    status: int, detail: str, *, call: str = "", headers: dict[str, str] | None = None, errors: list[str] | None = None
) -> Reply:
    """Return a refusal in the form of RFC 9457."""
    value: dict[str, Any] = {"title": http.HTTPStatus(status).phrase, "status": status, "detail": detail}
    if errors is not None:
        value["errors"] = errors
    return Reply(status, value, kind="application/problem+json", headers=headers or {}, call=call)


class _Handler(http.server.BaseHTTPRequestHandler):
    fake: FakeApi

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        sent = self.rfile.read(length)
        try:
            body = json.loads(sent) if sent else None
            reply = self.fake.answer(self.command, self.path, body, self.headers.get("Authorization", ""))
        except ValueError:
            reply = self.fake.unreadable(self.command, self.path)
            body = None
        self.fake.record(self.command, self.path, body, reply)
        with suppress(OSError):  # who asked may be gone: a pod that ends itself
            self._write(reply)

    def _write(self, reply: Reply) -> None:
        if reply.status == 0:
            return
        value = reply.value
        content = b"" if value is None else (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(reply.status)
        for name, text in reply.headers.items():
            self.send_header(name, text)
        if value is not None:
            self.send_header("Content-Type", reply.kind)
        if reply.kind != "text/event-stream":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        if reply.kind == "text/event-stream":
            self.wfile.flush()
            self.fake.closing.wait(self.fake.stream_s)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


for _method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"):
    setattr(_Handler, f"do_{_method}", _Handler._serve)
