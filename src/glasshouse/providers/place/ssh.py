"""The way to a place on another machine: the system's `ssh`, as its user has set it up.

Jump hosts, agents, hardware keys and known hosts are those of the user's own configuration; nothing of SSH is used but
one command and its standard streams. Secrecy and authenticity of a run never rest on it (spec/place.md).
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.providers.place.base import Way
from glasshouse.providers.place.bundled import install
from glasshouse.providers.place.place_channel import Channel
from glasshouse.providers.place.placed import RemotePlaced
from glasshouse.providers.serve.keeper import LOG
from glasshouse.providers.serve.runs import RUN
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields

__all__ = ["SshHost", "SshPlace", "file_option"]

T = TypeVar("T")

_URL = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?/?"
)
_ADDRESS = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
# A line that is dead is noticed within the product of both.
_ALIVE_S, _ALIVE_TIMES = 5, 3
_CONNECT_S = 10
# When a line was lost: what was sent while it was down is sent again by the network at growing distances.
_AGAIN_S = 3
_PYTHON = re.compile(r"3\.(1[1-9]|[2-9][0-9])\.[0-9]")
# What is not asked for within that time may be a line that nothing was heard of, and is opened anew.
_KEPT_S = 20.0
_EXAMINE_S = 120.0
_MEASURE_S = 90.0
# Evidence that is further off is refused, after everything was sent.
_CLOCK_S = 45
_SPARE_BYTES = 128 << 20
# For all pages of a list together, over a line that is slow.
_LIST_S = 60.0
_MOST_RUNS = 1 << 14
_VALUE_CHARS = 64
_LOG_BYTES = 512 << 20
# No job may name more (spec/sealed-package.md, section 8).
_MOST_BYTES = 1 << 44


@dataclass(frozen=True, kw_only=True, slots=True)
class _Most:
    """What a machine's list may have.

    Attributes:
        name_chars: of one name.
        chars: of all names, with `_VALUE_CHARS` for what stands beside each.
        within_s: how long all of it may take.
    """

    name_chars: int
    chars: int
    within_s: float


_INSTALLED = _Most(name_chars=128, chars=1 << 20, within_s=_LIST_S)
# The first page comes when everything is measured.
_FILES = _Most(name_chars=4096, chars=8 << 20, within_s=_MEASURE_S + _LIST_S)


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

    def command(self, remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
        """Return the command that runs `remote` there; what is added to its end goes to `remote`.

        Args:
            remote: a command and its arguments.
            connect_s: how long to wait for the machine to answer at all.
            alone: over a connection of its own, also where the user's configuration shares one.
        """
        return [
            *("ssh", "-T", "-x", "-a"),
            # Asked for a password or a passphrase nobody would see it.
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}"),
            # Of the user's configuration, what is for people who log in.
            *("-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no"),
            *("-o", f"ServerAliveInterval={_ALIVE_S}", "-o", f"ServerAliveCountMax={_ALIVE_TIMES}"),
            *(("-o", "ControlPath=none") if alone else ()),
            *self.options,
            *(() if self.port is None else ("-p", str(self.port))),
            *(() if self.user is None else ("-l", self.user)),
            self.host,
            " ".join(map(_quoted, remote)),
        ]


def file_option(name: str, path: Path) -> str:
    """Return an option of ssh that names a file, for ``-o``: a line of its configuration, in which ``%`` is special.

    Raises:
        UsageError: `usage`: a path that not every version of ssh can be given.
    """
    text = str(path)
    if any(mark in text for mark in ('"', "\\", "${")) or any(ord(char) < 32 for char in text):
        raise UsageError(
            Code.USAGE,
            f"ssh cannot be given a file in {text!a}: a double quote, a backslash, ${{ or a line's end is in its path",
            hint="name a home without these: --home or GLASSHOUSE_HOME",
        )
    return f'{name}="{text.replace("%", "%%")}"'


def _quoted(word: str) -> str:
    """Quote a word for the shell there, and let it find its user's home."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


class SshPlace:
    """A machine that is reached by a command, and has Glasshouse installed or is sent a bundle of it.

    A shared connection of the user's (``ControlMaster``) saves logins, and hangs with its line for as long as its own
    settings say: after a failure every second try goes past it.

    Args:
        name: as its owner calls it.
        host: the way to it: an `SshHost`, or another.
        python: the interpreter there that has Glasshouse, or that a bundle is unpacked for.
        folder: where the place is kept there.
        connect: returns a socket that is connected to the gate, for the calls of runtimes.
        address: where the other machines of a group reach it; None for what it says itself.
        bundle: a file that is had there before anything else; None where Glasshouse is installed there.
    """

    container_source = "minted"

    def __init__(
        self,
        name: str,
        host: Way,
        python: str,
        folder: str,
        *,
        connect: Callable[[], socket.socket],
        address: str | None = None,
        bundle: Path | None = None,
    ) -> None:
        self.name = name
        self._address, self._host, self._connect = address, host, connect
        self._python, self._folder = python, folder
        # Not sent yet; several threads of this process may want it at once.
        self._bundle, self._sending = bundle, threading.Lock()
        self._last: Channel | None = None
        self._kept: tuple[float, Channel] | None = None
        self._failed = 0

    def addresses(self, machines: int) -> tuple[str, ...]:
        """Return what the machine says is free there; raises `PeerError`, `PlatformError`."""
        answer = self._ask(lambda channel: channel.ask("addresses", count=machines, host=self._address))
        found = answer.texts("addresses", max_items=machines)
        if len(found) != machines or not all(_ADDRESS.fullmatch(address) for address in found):
            raise PeerError(Code.SCHEMA, f"{self.name} answered with what is no address of a machine")
        return tuple(found)

    def check(self, package_bytes: int = 0) -> None:
        """Connect, and see that the machine can take a run and that its clock is right; the line is kept for a while.

        Raises:
            PeerError, PlatformError: it cannot be reached, or lacks what every run needs.
        """
        told = self._ask(lambda channel: channel.ask("hello"))
        system, python, clock_us = told.text("system"), told.text("python", max_chars=64), told.integer("clock_us")
        free, memory = told.integer("free_bytes"), told.integer("memory_bytes")
        if system != "Linux":
            raise PlatformError(Code.PLATFORM, f"{self.name} is no Linux machine, which a runtime needs")
        if not _PYTHON.match(python):
            raise PlatformError(
                Code.PLATFORM,
                f"{self.name} has Python {_plain(python)}, and Glasshouse needs 3.11 or newer",
                hint="install Glasshouse there for another one, and name that: glasshouse machine add --python",
            )
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
        if memory < package_bytes:
            raise PlatformError(
                Code.PLATFORM,
                f"{self.name} has {memory >> 20} MiB of memory, in which a run's inputs lie, and the package has "
                f"{package_bytes >> 20} MiB",
                hint="take a machine with more memory, or seal less",
            )

    def installed(self) -> dict[str, str]:
        """Return what is installed there; raises `PeerError`, `PlatformError`."""

        def ask(channel: Channel) -> dict[str, str]:
            found: dict[str, str] = {}
            for told in self._pages(channel, "installed", "versions", _INSTALLED):
                found |= {name: _plain(str(version)) for name, version in told.items()}
            return found

        return self._ask(ask)

    def _pages(self, channel: Channel, ask: str, member: str, most: _Most) -> Iterator[dict[str, Json]]:
        """Yield what the machine lists by name, page after page; raises `PeerError` for more than it may have."""
        until_s, after, kept = time.monotonic() + most.within_s, "", 0
        while page := channel.ask(ask, within_s=max(0.0, until_s - time.monotonic()), after=after).any(member):
            if not isinstance(page, dict) or min(page) <= after:
                raise PeerError(Code.SCHEMA, f"{self.name} lists its {member} otherwise than a place does")
            kept += sum(len(name) + _VALUE_CHARS for name in page)
            if kept > most.chars or max(map(len, page)) > most.name_chars:
                raise PeerError(Code.TOO_LARGE, f"{self.name} lists more {member} than a machine has")
            yield page
            after = max(page)

    def runs(self) -> dict[str, bool]:
        """Return the ids of all runs that the machine has something of, and whether each goes on.

        Raises:
            PeerError, PlatformError: as every question.
        """

        def ask(channel: Channel) -> dict[str, bool]:
            found: dict[str, bool] = {}
            until_s = time.monotonic() + _LIST_S
            while listed := channel.ask(
                "runs", within_s=max(0.0, until_s - time.monotonic()), after=max(found, default="")
            ).items("runs", max_items=256):
                told = [Fields(one, "run") for one in listed]
                runs = {one.text("run", pattern=RUN): one.null("ended") for one in told}
                if min(runs) <= max(found, default=""):
                    raise PeerError(Code.SCHEMA, f"{self.name} lists its runs again and again")
                found |= runs
                if len(found) > _MOST_RUNS:
                    raise PeerError(Code.TOO_LARGE, f"{self.name} lists more runs than a machine has")
            return found

        return self._ask(ask)

    def examine(self) -> list[Json]:
        """Return what the machine offers, as findings of `doctor`; raises `PeerError`, `PlatformError`."""
        answer = self._ask(lambda channel: channel.ask("examine", within_s=_EXAMINE_S))
        return answer.items("findings", max_items=128)

    def close(self) -> None:
        """End the connection that was kept, if one was."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def measurement(self) -> Json:
        """Return the parts of what the machine's installation measures to, by its word; raises as `examine`."""

        def ask(channel: Channel) -> Json:
            told: Json = channel.ask("measure", within_s=_MEASURE_S, after=None).any("measurement")
            return told

        return self._ask(ask)

    def measured_files(self) -> dict[str, bytes]:
        """Return the files behind it, by the machine's word: part/name → SHA-256; raises as `examine`."""
        found: dict[str, bytes] = {}
        with contextlib.closing(self._channel()) as channel:
            for page in self._pages(channel, "measure", "files", _FILES):
                fields = Fields(page, "files")
                found |= {name: fields.digest(name) for name in page}
        return found

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> RemotePlaced:
        # Sealed outputs are a little longer than what they hold; a log fills its share and no more.
        most = (_MOST_BYTES if max_bytes is None else max_bytes) * 1001 // 1000 + _LOG_BYTES
        return RemotePlaced(
            self._channel, folder.name, partial(_kept, folder), max_bytes=most, relayed=relayed, leave=self._keep
        )

    def _ask(self, act: Callable[[Channel], T]) -> T:
        """Ask a few questions, and keep the connection for what comes next."""
        kept, channel = self._kept, self._channel()
        try:
            found = act(channel)
        except BaseException as error:
            channel.close()
            # What ended while nobody used it says nothing; silence may be a shared connection's, and is gone past once.
            stale = kept is not None and kept[1] is channel
            if isinstance(error, PeerError) and (stale or (channel.silent and self._failed == 0)):
                return self._ask(act)
            raise
        self._keep(channel)
        return found

    def _keep(self, channel: Channel) -> None:
        self.close()
        self._kept = time.monotonic(), channel

    def _channel(self) -> Channel:
        """Return the connection that was kept, or another one; it is the caller's."""
        kept, self._kept = self._kept, None
        if kept is not None and time.monotonic() - kept[0] < _KEPT_S:
            return kept[1]
        if kept is not None:
            kept[1].close()
        with self._sending:
            if self._bundle is not None:
                way = partial(self._host.command, connect_s=_CONNECT_S)
                self._python = install(way, self.name, self._bundle, python=self._python, folder=self._folder)
                self._bundle = None
        self._failed = self._failed + 1 if self._last is not None and self._last.lost else 0
        # Both ways are tried quickly first, and then with patience.
        connect_s = _AGAIN_S if self._failed % 4 in (1, 2) else _CONNECT_S
        serve = (self._python, "-I", "-B", "-m", "glasshouse.providers.serve", self._folder)
        command = self._host.command(serve, connect_s=connect_s, alone=self._failed % 2 == 1)
        self._last = Channel(command, connect=self._connect)
        return self._last


def _plain(text: str) -> str:
    """Return another machine's word for a sentence here."""
    return text[:64] if text.isprintable() else "?"


def _kept(folder: Path, name: str) -> Path:
    return folder / LOG if name == LOG else folder / "out" / name
