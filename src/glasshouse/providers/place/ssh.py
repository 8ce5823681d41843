"""A place that is reached by a command: questions to it, and the runs there."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from glasshouse.errors import Code, PeerError, PlatformError
from glasshouse.providers.place.base import Place
from glasshouse.providers.place.bundled import install
from glasshouse.providers.place.place_channel import PlaceChannel
from glasshouse.providers.place.placed import RemotePlaced
from glasshouse.providers.place.ways import Way
from glasshouse.providers.protocol.messages import Hello
from glasshouse.providers.serve.keepers import LOG
from glasshouse.wire.canonical import Json

T = TypeVar("T")

_CONNECT_S = 10
# When a line was lost: what was sent while it was down is sent again by the network at growing distances.
_AGAIN_S = 3
_PYTHON = re.compile(r"3\.(1[1-9]|[2-9][0-9])\.[0-9]")
# What is not asked for within that time may be a line that went silent, and is opened anew.
_KEPT_S = 20.0
_EXAMINE_S = 120.0
_MEASURE_S = 90.0
# Evidence that is further off is refused, after everything was sent.
_CLOCK_S = 45
_SPARE_BYTES = 128 << 20
# For all pages of a list together, over a line that is slow.
_LIST_S = 60.0
_VALUE_CHARS = 64
_LOG_BYTES = 512 << 20
# No job may name more (spec/sealed-package.md, section 8).
_MOST_BYTES = 1 << 44


# Of all names of a list, with `_VALUE_CHARS` for what stands beside each.
_INSTALLED_CHARS, _RUNS_CHARS, _FILES_CHARS = 1 << 20, (1 << 14) * (32 + _VALUE_CHARS), 8 << 20


class SshPlace(Place):
    """A machine that is reached by a command, and has Glasshouse installed or is sent a bundle of it.

    A shared connection of the user's (``ControlMaster``) saves logins, and hangs with its line for as long as its own
    settings say: after a failure every second try goes past it.

    Args:
        name: as its owner calls it.
        host: the way to it: an `SshHost`, or another.
        python: the interpreter there that has Glasshouse, or that a bundle is unpacked for.
        folder: where the place is kept there.
        connect: returns a socket that is connected to the gate, for the calls of runtimes.
        address: where the other machines of a group reach it; None: the address to which the login came.
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
        self._last: PlaceChannel | None = None
        self._kept: tuple[float, PlaceChannel] | None = None
        self._failed = 0

    def addresses(self, machines: int) -> tuple[str, ...]:
        found: tuple[str, ...]
        (found,) = self._ask(lambda channel: channel.ask("addresses", machines, self._address))
        if len(found) != machines:
            raise PeerError(Code.SCHEMA, f"{self.name} answered with other addresses than it was asked for")
        return found

    def check(self, package_bytes: int = 0) -> None:
        """Connect, and see that the machine can take a run and that its clock is right; keep the line for a while."""
        found: Hello = self._ask(lambda channel: channel.ask("hello"))
        free, memory = found.free_bytes, found.memory_bytes
        if found.system != "Linux":
            raise PlatformError(Code.PLATFORM, f"{self.name} is no Linux machine, which a runtime needs")
        if not _PYTHON.match(found.python):
            why = f"{self.name} has Python {_plain(found.python)}, and Glasshouse needs 3.11 or newer"
            hint = "install Glasshouse there for another one, and name that: glasshouse machine add --python"
            raise PlatformError(Code.PLATFORM, why, hint=hint)
        off_s = found.clock_us // 1_000_000 - round(time.time())
        if abs(off_s) > _CLOCK_S:
            why = f"the clock of {self.name} is {abs(off_s)} s {'ahead of' if off_s > 0 else 'behind'} this one"
            hint = "set the one that is wrong: timedatectl set-ntp true"
            raise PlatformError(Code.PLATFORM, why, hint=hint)
        if free < package_bytes + _SPARE_BYTES:
            why = f"{self.name} has {free >> 20} MiB of room, and the package needs {package_bytes >> 20} MiB and some"
            hint = "make room there, or name another folder: glasshouse machine add --folder"
            raise PlatformError(Code.DISK_FULL, why, hint=hint)
        if memory < package_bytes:
            raise PlatformError(
                Code.PLATFORM,
                f"{self.name} has {memory >> 20} MiB of memory, in which a run's inputs lie, and the package has "
                f"{package_bytes >> 20} MiB",
                hint="take a machine with more memory, or seal less",
            )

    def installed(self) -> dict[str, str]:
        found = self._ask(lambda channel: self._pages(channel, "installed", "versions", _INSTALLED_CHARS))
        return {name: _plain(version) for name, version in found.items()}

    def runs(self) -> dict[str, bool]:
        """Return the ids of all runs that the machine has something of, and whether each goes on; raises as `check`."""
        return self._ask(lambda channel: self._pages(channel, "runs", "runs", _RUNS_CHARS))

    def _pages(
        self, channel: PlaceChannel, ask: str, what: str, most_chars: int, within_s: float = _LIST_S
    ) -> dict[str, Any]:
        """Return what the machine lists by name, page after page; raises `PeerError` for more than it may have."""
        found: dict[str, Any] = {}
        until_s, after = time.monotonic() + within_s, ""
        while page := channel.ask(ask, after, within_s=max(0.0, until_s - time.monotonic()))[0]:
            if not isinstance(page, dict):
                page = {run: ended is None for ended, run, _ in page}
            if min(page) <= after:
                raise PeerError(Code.SCHEMA, f"{self.name} lists its {what} again and again")
            found |= page
            if sum(len(name) + _VALUE_CHARS for name in found) > most_chars:
                raise PeerError(Code.TOO_LARGE, f"{self.name} lists more {what} than a machine has")
            after = max(page)
        return found

    def examine(self) -> tuple[tuple[str, str, str, str], ...]:
        """Return consequence, feature, standing and value of each finding of `doctor` there; raises as `check`."""
        found: tuple[tuple[str, str, str, str], ...]
        (found,) = self._ask(lambda channel: channel.ask("examine", within_s=_EXAMINE_S))
        return found

    def close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def measurement(self) -> Json:
        """Return the parts of what the machine's installation measures to, by its word; raises as `examine`."""
        measurement: Json
        _, measurement = self._ask(lambda channel: channel.ask("measure", None, within_s=_MEASURE_S))
        return measurement

    def measured_files(self) -> dict[str, bytes]:
        """Return the files behind it, by the machine's word: part/name → SHA-256; raises as `examine`."""
        with contextlib.closing(self._channel()) as channel:
            # The first page comes when everything is measured.
            return self._pages(channel, "measure", "files", _FILES_CHARS, within_s=_MEASURE_S + _LIST_S)

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> RemotePlaced:
        # Sealed outputs are a little longer than what they hold; a log fills its share and no more.
        most = (_MOST_BYTES if max_bytes is None else max_bytes) * 1001 // 1000 + _LOG_BYTES
        return RemotePlaced(
            self._channel, folder.name, partial(_kept, folder), max_bytes=most, relayed=relayed, leave=self._keep
        )

    def _ask(self, act: Callable[[PlaceChannel], T]) -> T:
        """Ask a few questions, and keep the connection for what comes next."""
        kept, channel = self._kept, self._channel()
        try:
            found = act(channel)
        except BaseException as error:
            channel.close()
            # A kept line may have ended unused; silence may be a shared connection's, and is gone past once.
            stale = kept is not None and kept[1] is channel
            if isinstance(error, PeerError) and (stale or (channel.silent and self._failed == 0)):
                return self._ask(act)
            raise
        self._keep(channel)
        return found

    def _keep(self, channel: PlaceChannel) -> None:
        self.close()
        self._kept = time.monotonic(), channel

    def _channel(self) -> PlaceChannel:
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
        self._last = PlaceChannel(command, connect=self._connect)
        return self._last


def _plain(text: str) -> str:
    """Return another machine's text for a sentence here."""
    return text[:64] if text.isprintable() else "?"


def _kept(folder: Path, name: str) -> Path:
    return folder / LOG if name == LOG else folder / "out" / name
