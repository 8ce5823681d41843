"""The group secret of this process: from its own program, or from the agent that started it.

Laws: asked for once and kept for later groups of the process; the agent's token leaves the environment before it is
used; the secret is dropped in forked children, and no error and no log quotes it.
Source: spec/sealed-collectives.md, section 9.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from glasshouse.collectives.protocol.group_keys import SECRET_BYTES, forget_in_children
from glasshouse.collectives.transport.dial import user_of
from glasshouse.errors import Code, CollectiveError, FormatError
from glasshouse.wire import ranks
from glasshouse.wire.crypto import zero
from glasshouse.wire.frames import CONTROL, Decoder

AGENT_TIMEOUT_S = 30.0
_HINT = (
    "start the script with `glasshouse run --ranks N`, or call glasshouse.collectives.secret.provide() with the same"
    " 32 secret bytes on every rank before init_process_group"
)


class _Keeper:
    """The process's one place for the secret and for its provider."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.provider: Callable[[], bytes | bytearray] | None = None
        self.secret = bytearray()
        self.forked = False

    def forget(self) -> None:
        """Run in a forked child: the secret is another process's, and a thread that is not there may hold the lock."""
        self.lock = threading.Lock()
        self.forked = self.forked or bool(self.secret) or self.provider is not None
        self.drop()

    def drop(self) -> None:
        zero(self.secret)
        self.secret, self.provider = bytearray(), None

    def keep(self, secret: bytes | bytearray) -> None:
        if not isinstance(secret, bytes | bytearray) or len(secret) != SECRET_BYTES:
            size = f" of length {len(secret)}" if hasattr(secret, "__len__") else ""
            raise _missing(f"a group secret is {SECRET_BYTES} bytes, and not {type(secret).__name__}{size}")
        if not any(secret):
            raise _missing("a group secret of zeros alone is one that was wiped")
        self.secret = bytearray(secret)


_keeper = _Keeper()
forget_in_children(_keeper)


def provide(secret: bytes | bytearray | Callable[[], bytes | bytearray]) -> None:
    """Give this process the secret of its groups, or a function that returns it when the first group is made.

    For use without `glasshouse run`: every rank must be given the same 32 bytes, from a source of secrets, and not
    through its command line or environment.

    Raises:
        CollectiveError: `group-secret-missing`, not 32 bytes.
    """
    with _keeper.lock:
        _keeper.drop()
        if callable(secret):
            _keeper.provider = secret
        else:
            _keeper.keep(secret)


def withdraw() -> None:
    """Forget the secret and its provider; groups that exist keep their keys."""
    with _keeper.lock:
        _keeper.drop()


def group_secret() -> bytearray:
    """Return a copy of the secret, the caller's to zero; it is asked for when this process needs it first.

    Raises:
        CollectiveError: `group-secret-missing`, there is none.
    """
    with _keeper.lock:
        if not _keeper.secret:
            if _keeper.provider is not None:
                _keeper.keep(_keeper.provider())
            elif path := os.environ.get(ranks.SOCKET):
                _keeper.keep(_from_agent(path, os.environ.pop(ranks.SECRET_TOKEN, "")))
            elif _keeper.forked:
                raise _missing(
                    "this process was forked from one that has a group secret, which does not go to children"
                )
            else:
                raise _missing("this process was not given the secret of its group")
        return bytearray(_keeper.secret)


def _from_agent(path: str, token: str) -> bytes:
    if not token:
        raise _missing(
            f"{ranks.SECRET_TOKEN} is not set: a token is good for one process, and once",
            hint="only the rank that was started can join; its children cannot",
        )
    decoder = Decoder()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(AGENT_TIMEOUT_S)
            connection.connect(path)
            # The token is not shown to another user's process that sits at the path.
            if not hasattr(socket, "SO_PEERCRED"):
                raise _missing("this system does not name the process that listens at a socket", hint="")
            if (user := user_of(connection)) not in (os.getuid(), 0):
                raise _missing(f"user {user} listens at {ranks.SOCKET}, and not the agent", hint="")
            connection.sendall(ranks.ask_secret(token))
            received = 0
            while received < ranks.MAX_FRAME_BYTES and (data := connection.recv(ranks.MAX_FRAME_BYTES - received)):
                received += len(data)
                for kind, value in decoder.feed(data):
                    if kind != CONTROL or isinstance(value, bytearray):
                        raise FormatError(Code.SCHEMA, "not an answer")
                    return ranks.read_secret(value)
    except OSError as error:
        reason = "it did not answer in time" if isinstance(error, TimeoutError) else (error.strerror or "it is away")
        raise _missing(f"the agent at {ranks.SOCKET} gave no secret: {reason}", hint="") from None
    except FormatError:
        raise _missing(f"what listens at {ranks.SOCKET} does not answer as an agent", hint="") from None
    finally:
        decoder.wipe()
    raise _missing(f"what listens at {ranks.SOCKET} closed without an answer", hint="")


def _missing(message: str, *, hint: str = _HINT) -> CollectiveError:
    return CollectiveError(Code.GROUP_SECRET, message, hint=hint)
