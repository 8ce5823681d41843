"""What stands beside the gate in a measurement, each in a process of its own, so that its cost is told apart.

``python -m benchmarks.gate_load strangers JSON`` troubles a broker's door; ``nothing`` is a server with the broker's
own listener, bounded HTTP and deciding thread whose handlers answer at once. Both print one line when they are ready,
and are killed by the script that started them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from glasshouse.broker.http import Answer, Limits, add_route, bare_app
from glasshouse.broker.listen import Server, bind_tcp

__all__ = ["ANSWERS", "REQUESTS", "hostile"]

# Bytes of the messages of an exchange: challenge request, challenge; evidence, release.
REQUESTS = {"/v1/challenge": 1800, "/v1/evidence": 6200}
ANSWERS = {"/v1/challenge": 200, "/v1/evidence": 3300}
HOSTILE_BYTES = 124_000
PIECE_EVERY_S = 0.005


async def nothing(listener: socket.socket, url: str) -> None:
    """Answer requests of an exchange's sizes with as many bytes as its answers have."""
    app = bare_app()
    with ThreadPoolExecutor(max_workers=1) as executor:
        for path, size in ANSWERS.items():
            answer = partial(_answer, Answer(body=b"[" + b" " * (size - 2) + b"]"))
            add_route(app, "POST", path, answer, limits=Limits(), executor=executor)
        server = Server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        _ready(url)
        await serving


def _answer(answer: Answer, _body: bytes, _parameters: Mapping[str, str]) -> Answer:
    return answer


def _ready(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def strangers(load: dict[str, Any]) -> None:
    """Hold idle connections and send hostile messages, bounded in number and time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    host, _, port = load["url"].removeprefix("http://").rpartition(":")
    where, addresses = (host, int(port)), itertools.cycle(load["addresses"])
    tasks: list[asyncio.Task[None]] = []
    if load.get("idle"):
        held: set[asyncio.Transport] = set()
        for _ in range(load["idle"]):
            await _idle(held, where, next(addresses), slow=load.get("slow", False))
        tasks.append(asyncio.create_task(_keep_idle(held, where, addresses, load)))
    if load.get("hostile_per_s"):
        tasks.append(asyncio.create_task(_keep_hostile(where, addresses, load)))
    _ready("ready")
    await asyncio.sleep(load["seconds"])


class _Held(asyncio.Protocol):
    def __init__(self, held: set[asyncio.Transport]) -> None:
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._held.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self._transport)


async def _idle(held: set[asyncio.Transport], where: tuple[str, int], source: str, *, slow: bool) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        transport, _ = await loop.create_connection(lambda: _Held(held), *where, local_addr=(source, 0))
        if slow:
            transport.write(_head("/v1/evidence", HOSTILE_BYTES) + b"{")


async def _keep_idle(
    held: set[asyncio.Transport], where: tuple[str, int], addresses: Iterator[str], load: dict[str, Any]
) -> None:
    loop = asyncio.get_running_loop()
    while True:
        until = loop.time() + 0.1
        for _ in range(load["new_per_s"] // 10):
            await _idle(held, where, next(addresses), slow=load.get("slow", False))
        while len(held) > 2 * load["idle"]:
            held.pop().abort()
        await asyncio.sleep(max(0, until - loop.time()))


async def _keep_hostile(where: tuple[str, int], addresses: Iterator[str], load: dict[str, Any]) -> None:
    loop, messages, per_s = asyncio.get_running_loop(), itertools.cycle(hostile()), load["hostile_per_s"]
    waiting: set[asyncio.Task[None]] = set()
    while True:
        until = loop.time() + 1 / per_s
        if len(waiting) < 4 * per_s:
            task = asyncio.create_task(_post(where, next(addresses), *next(messages), load.get("piece_bytes")))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        await asyncio.sleep(max(0, until - loop.time()))


async def _post(where: tuple[str, int], source: str, path: str, body: bytes, piece_bytes: int | None) -> None:
    message = _head(path, len(body)) + body
    size = piece_bytes or len(message)
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*where, local_addr=(source, 0))
        try:
            for start in range(0, len(message), size):
                if start:
                    await asyncio.sleep(PIECE_EVERY_S)
                writer.write(message[start : start + size])
            await asyncio.wait_for(reader.read(), 20)
        except (OSError, TimeoutError):
            pass
        finally:
            writer.close()


def _head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def hostile() -> list[tuple[str, bytes]]:
    """Return messages of 124 KB that cost a reader as much as such a message can, as far as is known."""
    room = HOSTILE_BYTES - 2
    bombs = [
        b"[" + b"0," * (room // 2 - 1) + b"0]",
        b"[" + b"{}," * (room // 3 - 1) + b"{}]",
        b"[" + b"[[[0]]]," * (room // 8 - 1) + b"0]",
        b"{" + b",".join(b'"%05d":0' % number for number in range(room // 10)) + b"}",
        b"[" * room,
        b'"' + b"\\u00e9" * (room // 6) + b'"',
        b'"' + "é".encode() * (room // 2) + b'"',
        b"9" * room,
    ]
    inner = room * 3 // 4 - 600
    deep = [_deep("\U0001f600", 1, inner, chains=66), _deep("k", 4, inner, chains=66), _deep("k", 4, inner, chains=33)]
    signature = base64.b64encode(bytes(64)).decode()
    wrapped = []
    for bomb in bombs[:4] + deep:
        value = {
            "payload": base64.b64encode(bomb[:inner]).decode(),
            "payloadType": "application/vnd.glasshouse.evidence+json",
            "signatures": [{"keyid": name * 32, "sig": signature} for name in "ab"],
        }
        wrapped.append(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
    return [("/v1/evidence", body) for body in (*bombs, *wrapped)]


def _deep(letter: str, letters: int, size: int, *, chains: int) -> bytes:
    """Return an array of so many chains of 14 objects, each the only member of another, with long names."""
    name = letter * letters * (size // (14 * chains) // 4 - 2)
    value: Any = 0
    for _ in range(14):
        value = {name: value}
    return json.dumps([value] * chains, ensure_ascii=False, separators=(",", ":")).encode()


def main() -> None:
    if sys.argv[1] == "strangers":
        asyncio.run(strangers(json.loads(sys.argv[2])))
        return
    listener, url = bind_tcp("127.0.0.1", 0)
    with listener:
        asyncio.run(nothing(listener, url))


if __name__ == "__main__":
    main()
