"""A real broker that kills itself, as by a lost machine, at one moment of one request.

Usage: dying_broker.py PATH WHEN [options of ``python -m glasshouse.broker.serving``]

WHEN is ``arrival`` (the body was read), ``uncommitted`` (decided, the transaction is open) or
``committed`` (the transaction is on disk, the answer has not left).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from glasshouse.broker import serving
from glasshouse.broker.decide.decisions import ApiAnswer, Decision
from glasshouse.broker.http.endpoints import add_message_route
from glasshouse.broker.store.database import Database

_armed = False


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(path: str, when: str) -> None:
    def dying(app: Any, route: str, reader: Callable[[bytes], Decision], **rest: Any) -> None:
        def read(body: bytes) -> Decision:
            if when == "arrival":
                die()
            decision = reader(body)

            def decide() -> ApiAnswer:
                global _armed
                _armed = True
                return decision.decide()

            return replace(decision, decide=decide)

        add_message_route(app, route, read if route == path else reader, **rest)

    def write(self: Database, decide: Callable[..., Any]) -> Any:
        def decided(connection: Any) -> Any:
            result = decide(connection)
            if _armed and when == "uncommitted" and isinstance(result, ApiAnswer):
                die()
            return result

        return really_write(self, decided)

    @contextmanager
    def together(self: Database) -> Iterator[Any]:
        with really_together(self) as shared:
            yield shared
        if _armed:
            die()

    really_write, really_together = Database.write, Database.together
    Database.together = together  # type: ignore[method-assign]
    serving.add_message_route = dying  # type: ignore[assignment]
    Database.write = write  # type: ignore[method-assign]


if __name__ == "__main__":
    arm(sys.argv[1], sys.argv[2])
    del sys.argv[1:3]
    sys.exit(serving.main())
