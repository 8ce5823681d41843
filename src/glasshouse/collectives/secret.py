"""Where a rank gets the secret of its group: from its own program, or from the agent that started it.

Laws: asked for once and kept for later groups of the process; the agent's token leaves the environment before it is
used; the secret is dropped in forked children, and no error and no log quotes it.
Source: spec/sealed-collectives.md, section 9.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable

from glasshouse.collectives.protocol.group_keys import SECRET_BYTES, forget_in_children
from glasshouse.errors import Code, CollectiveError, FormatError
from glasshouse.wire import ranks
from glasshouse.wire.aead import zero
from glasshouse.wire.frames import CONTROL, Decoder

__all__ = ["AGENT_TIMEOUT_S", "group_secret", "provide", "withdraw"]

AGENT_TIMEOUT_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)
_HINT = (
    "start the script with `glasshouse run --ranks N`, or call glasshouse.collectives.secret.provide() with the same"
    " 32 secret bytes on every rank before init_process_group"
)


class _Keeper:
    """The process's one place for the secret and for who provides it."""

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
            message = f"a group secret is {SECRET_BYTES} bytes, and not {type(secret).__name__}{size}"
            raise CollectiveError(Code.GROUP_SECRET, message, hint=_HINT)
        if not any(secret):
            raise CollectiveError(Code.GROUP_SECRET, "a group secret of zeros alone is one that was wiped", hint=_HINT)
        self.secret = bytearray(secret)


_keeper = _Keeper()
forget_in_children(_keeper)


def provide(secret: bytes | bytearray | Callable[[], bytes | bytearray]) -> None:
    """Give this process the secret of its groups, or what returns it when the first group is made.

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
        CollectiveError: `group-secret-missing`, it is not given; the hint says what to do.
    """
    with _keeper.lock:
        if not _keeper.secret:
            if _keeper.provider is not None:
                _keeper.keep(_keeper.provider())
            elif path := os.environ.get(ranks.SOCKET):
                _keeper.keep(_from_agent(path, os.environ.pop(ranks.SECRET_TOKEN, "")))
            else:
                raise CollectiveError(Code.GROUP_SECRET, _nobody(), hint=_HINT)
        return bytearray(_keeper.secret)


def _nobody() -> str:
    if _keeper.forked:
        return "this process was forked from one that has a group secret, which does not go to children"
    return "this process was not given the secret of its group"


def _from_agent(path: str, token: str) -> bytes:
    if not token:
        raise CollectiveError(
            Code.GROUP_SECRET,
            f"{ranks.SECRET_TOKEN} is not set: a token is good for one process, and once",
            hint="only the rank that was started can join; its children cannot",
        )
    decoder = Decoder()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(AGENT_TIMEOUT_S)
            connection.connect(path)
            _check_credentials(connection)
            connection.sendall(ranks.ask_secret(token))
            received = 0
            while data := connection.recv(ranks.MAX_FRAME_BYTES - received):
                received += len(data)
                for kind, value in decoder.feed(data):
                    if kind != CONTROL or isinstance(value, bytearray):
                        raise FormatError(Code.SCHEMA, "not an answer")
                    return ranks.read_secret(value)
                if received >= ranks.MAX_FRAME_BYTES:
                    break
    except OSError as error:
        reason = "it did not answer in time" if isinstance(error, TimeoutError) else (error.strerror or "it is away")
        raise CollectiveError(Code.GROUP_SECRET, f"the agent at {ranks.SOCKET} gave no secret: {reason}") from None
    except FormatError:
        raise CollectiveError(
            Code.GROUP_SECRET, f"what listens at {ranks.SOCKET} does not answer as an agent"
        ) from None
    finally:
        decoder.wipe()
    raise CollectiveError(Code.GROUP_SECRET, f"what listens at {ranks.SOCKET} closed without an answer")


def _check_credentials(connection: socket.socket) -> None:
    """Refuse to show the token to another user's process that sits at the path."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise CollectiveError(Code.GROUP_SECRET, "this system does not say whose process listens at a socket")
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in (os.getuid(), 0):
        raise CollectiveError(Code.GROUP_SECRET, f"user {uid} listens at {ranks.SOCKET}, and not the agent")
