"""A server that does nothing, for comparison: ``python -m glasshouse.bench.broker.idle``.

The broker's own listener, its bounded HTTP and its deciding thread, with handlers that answer at once. It prints its
URL and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor

from fastapi import FastAPI

from glasshouse.bench.broker.bare import ANSWERS, REQUESTS
from glasshouse.broker.http import Answer, Limits, add_route, bare_app
from glasshouse.broker.listen import Server, bind_tcp

__all__ = ["main"]


def main() -> int:
    """Serve until standard input ends."""
    listener, url = bind_tcp("127.0.0.1", 0)
    with listener, ThreadPoolExecutor(max_workers=1) as executor:
        asyncio.run(_serve(Server(_app(executor)), listener, url))
    return 0


def _app(executor: Executor) -> FastAPI:
    app = bare_app()
    for (path, _), size in zip(REQUESTS, ANSWERS, strict=True):
        add_route(app, "POST", path, _Nothing(size), limits=Limits(), executor=executor)
    return app


class _Nothing:
    """Answers with so many bytes, whatever is asked."""

    def __init__(self, size: int) -> None:
        self._answer = Answer(body=b"[" + b" " * (size - 2) + b"]")

    def __call__(self, _body: bytes, _parameters: Mapping[str, str]) -> Answer:
        return self._answer


async def _serve(server: Server, listener: socket.socket, url: str) -> None:
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), server.stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.001)
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()
    await serving


if __name__ == "__main__":
    sys.exit(main())
