"""The way to a place on another machine: the system's `ssh`, as its user has set it up.

Jump hosts, agents, hardware keys and known hosts are those of the user's own configuration; nothing of SSH is used but
one command and its standard streams. Secrecy and authenticity of a run never rest on it (spec/place.md).
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.providers.channel import Channel
from glasshouse.providers.keeper import LOG
from glasshouse.providers.placed import RemotePlaced
from glasshouse.providers.runs import RUN
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields

__all__ = ["SshHost", "SshPlace"]

_URL = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?/?"
)
_ADDRESS = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
# A line that is dead is noticed within the product of both.
_ALIVE_S, _ALIVE_TIMES = 5, 3
_CONNECT_S = 10
_EXAMINE_S = 120.0
# Evidence that is further off is refused, after everything was sent.
_CLOCK_S = 45
_SPARE_BYTES = 128 << 20
_LOG_BYTES = 512 << 20
# No job may name more (spec/sealed-package.md, section 8).
_MOST_BYTES = 1 << 44


@dataclass(frozen=True, kw_only=True, slots=True)
class SshHost:
    """A machine that is reached by `ssh`.

    Attributes:
        host: its name or address, or a name of the user's configuration.
        user, port: None for what the configuration says.
        options: further arguments of `ssh`, before the host.
    """

    host: str
    user: str | None = None
    port: int | None = None
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, url: str) -> SshHost:
        """Read ``ssh://[user@]host[:port]``.

        Raises:
            UsageError: `usage`.
        """
        match = _URL.fullmatch(url)
        port = None if match is None or match["port"] is None else int(match["port"])
        if match is None or (port is not None and not 0 < port < 65536):
            raise UsageError(Code.USAGE, f"not a machine's address: {url}", hint="it looks like ssh://user@host:22")
        return cls(host=match["host"].strip("[]"), user=match["user"], port=port)

    def command(self, remote: Sequence[str], *, connect_s: int) -> list[str]:
        """Return the command that runs `remote` there; what is added to its end goes to `remote`.

        Args:
            remote: a command and its arguments.
            connect_s: how long to wait for the machine to answer at all.
        """
        return [
            *("ssh", "-T", "-x", "-a"),
            # Asked for a password or a passphrase nobody would see it.
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}"),
            # Of the user's configuration, what is for people who log in.
            *("-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no"),
            *("-o", f"ServerAliveInterval={_ALIVE_S}", "-o", f"ServerAliveCountMax={_ALIVE_TIMES}"),
            *self.options,
            *(() if self.port is None else ("-p", str(self.port))),
            *(() if self.user is None else ("-l", self.user)),
            self.host,
            " ".join(map(_quoted, remote)),
        ]


def _quoted(word: str) -> str:
    """Quote a word for the shell there, and let it find its user's home."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


class SshPlace:
    """A machine that is reached by `ssh`, and has Glasshouse installed.

    Args:
        name: as its owner calls it.
        host: the machine.
        serve: the command there, which serves the place.
        connect: returns a socket that is connected to the gate, for the calls of runtimes.
        address: where the other machines of a group reach it; None for where ssh does.
    """

    container_source = "minted"

    def __init__(
        self,
        name: str,
        host: SshHost,
        serve: Sequence[str],
        *,
        connect: Callable[[], socket.socket],
        address: str | None = None,
    ) -> None:
        self.name = name
        self._address = address
        self._command = host.command(serve, connect_s=_CONNECT_S)
        self._connect = connect

    def addresses(self, machines: int) -> tuple[str, ...]:
        """Return what the machine says is free there; raises `PeerError`, `PlatformError`."""
        with contextlib.closing(self._channel()) as channel:
            answer = channel.ask("addresses", count=machines, host=self._address)
            found = answer.texts("addresses", max_items=machines)
        if len(found) != machines or not all(_ADDRESS.fullmatch(address) for address in found):
            raise PeerError(Code.SCHEMA, f"{self.name} answered with what is no address of a machine")
        return tuple(found)

    def check(self, package_bytes: int = 0) -> None:
        """Connect once, and see that the machine can take a run and that its clock is right."""
        with contextlib.closing(self._channel()) as channel:
            told = channel.ask("hello")
            clock_us, free, system = told.integer("clock_us"), told.integer("free_bytes"), told.text("system")
        if system != "Linux":
            raise PlatformError(Code.PLATFORM, f"{self.name} is no Linux machine, which a runtime needs")
        off_s = clock_us // 1_000_000 - round(time.time())
        if abs(off_s) > _CLOCK_S:
            raise PlatformError(
                Code.PLATFORM,
                f"the clock of {self.name} is {abs(off_s)} s {'ahead of' if off_s > 0 else 'behind'} this one",
                hint="set the one that is wrong: timedatectl set-ntp true",
            )
        if free < package_bytes + _SPARE_BYTES:
            raise PlatformError(
                Code.DISK_FULL,
                f"{self.name} has {free >> 20} MiB of room, and the package needs {package_bytes >> 20} MiB and some",
                hint="make room there, or name another folder: glasshouse machine add --folder",
            )

    def runs(self) -> set[str]:
        """Return the ids of all runs that the machine has something of; raises `PeerError`, `PlatformError`."""
        found: set[str] = set()
        with contextlib.closing(self._channel()) as channel:
            after = ""
            while listed := channel.ask("runs", after=after).items("runs", max_items=256):
                names = [Fields(one, "run").text("run", pattern=RUN) for one in listed]
                if min(names) <= after:
                    raise PeerError(Code.SCHEMA, f"{self.name} lists its runs again and again")
                found, after = found | set(names), max(names)
        return found

    def examine(self) -> list[Json]:
        """Return what the machine offers, as findings of `doctor`; raises `PeerError`, `PlatformError`."""
        with contextlib.closing(self._channel()) as channel:
            return channel.ask("examine", within_s=_EXAMINE_S).items("findings", max_items=128)

    def run(self, folder: Path, *, max_bytes: int | None = None) -> RemotePlaced:
        # Sealed outputs are a little longer than what they hold; a log fills its share and no more.
        most = (_MOST_BYTES if max_bytes is None else max_bytes) * 1001 // 1000 + _LOG_BYTES
        return RemotePlaced(self._channel, folder.name, partial(_kept, folder), max_bytes=most)

    def _channel(self) -> Channel:
        return Channel(self._command, connect=self._connect)


def _kept(folder: Path, name: str) -> Path:
    return folder / LOG if name == LOG else folder / "out" / name
