"""The runs of a place: their folders, files and processes (spec/place.md, sections 5 and 6).

Laws: a run is started once; its state is read from its folder and from the system each time, so that it is the same for
every connection; nothing is removed beneath a runtime.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve import keepers
from glasshouse.providers.serve.node import NODE

RUN = re.compile(r"[0-9a-f]{32}")
_PACKAGE, OUT = "package.sealed", "out"
MOST_FILES = 500
_POLL_S = 0.05
_SETTLED_S = 60.0
_NEVER = -1


def numbered(folder: str, number: int) -> str:
    """Return the name of a sealed file: the n-th of a folder."""
    return f"{folder}/{number:04d}.sealed"


def own_folder(path: Path) -> None:
    """Make a folder of this user's alone, or see that it is one; raises `PlatformError` where others may change it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        why = f"{path} is not this user's own folder, which no other may write to: name another one"
        raise PlatformError(Code.PLATFORM, why)


class Runs:
    """All runs of a place, in a folder of theirs, which is made if need be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        own_folder(folder)

    def __getitem__(self, run: str) -> Run:
        return Run(self._folder / run)

    def __iter__(self) -> Iterator[tuple[str, Run]]:
        for path in sorted(self._folder.iterdir()):
            if RUN.fullmatch(path.name):
                yield path.name, Run(path)


class Run:
    """One run, by its folder, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, order: Order, package: Path, launch: bytes, *, link: bool = True) -> int:
        """Start a runtime beneath a keeper of its own, and return its process id.

        Args:
            package: the file that was put here.
            launch: the launch file; goes to the runtime's standard input and nowhere else.
            link: whether the run keeps the package by a name of its own, so that its own may go.

        Raises:
            UsageError: `run-exists`: it was started with another package or options; `file-missing`.
            PlatformError: it cannot be started.
        """
        text = json.dumps(asdict(order))
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self._claim(text):
                return self._started_before(text)
            try:
                for name in (keepers.SCRATCH, OUT):
                    (self._folder / name).mkdir(mode=0o700, exist_ok=True)
                if link:
                    with contextlib.suppress(FileExistsError):
                        os.link(package, self._folder / _PACKAGE)
                    package = self._folder / _PACKAGE
                holder = self._folder.parents[1] / NODE
                return keepers.start_keeper(self._folder, self._command(order, package), launch, holder=holder)
            except BaseException:
                (self._folder / keepers.ORDER).unlink()  # nothing goes on: it may be tried again
                raise
        except FileNotFoundError:
            raise UsageError(Code.FILE_MISSING, "the package was not sent to this machine") from None
        except OSError as error:
            raise PlatformError(Code.PLATFORM, f"the runtime cannot be started there: {error.strerror}") from None

    def _claim(self, text: str) -> bool:
        """Leave the order; return whether this process did, and no other before it."""
        order = self._folder / keepers.ORDER
        try:
            descriptor = os.open(order, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
        except OSError:
            order.unlink()
            raise
        return True

    def _started_before(self, text: str) -> int:
        deadline_s = time.monotonic() + keepers.START_S
        while (keeper := self._keeper()) is None and self.started and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)  # another process starts it at this moment
        if keeper is None or (self._folder / keepers.ORDER).read_text() != text:
            why = "this machine was asked to start the run before, with something else or in vain"
            raise UsageError(Code.RUN_EXISTS, why)
        return keeper["runtime"]

    def _command(self, order: Order, package: Path) -> list[str]:
        return [
            sys.executable,
            *("-I", "-B", "-X", f"pycache_prefix={self._folder / keepers.SCRATCH}", "-m", "glasshouse.runtime"),
            *("--package", str(package), "--out", str(self._folder / OUT)),
            *("--max-seconds", str(order.max_seconds)),
            *(() if order.ranks is None else ("--ranks", str(order.ranks))),
            *(("--peers", ",".join(order.peers)) if order.peers else ()),
        ]

    @property
    def keeper(self) -> int | None:
        """The process that stays with the runtime; None before there is one."""
        keeper = self._keeper()
        return None if keeper is None else keeper["pid"]

    @property
    def package(self) -> str | None:
        """The digest of the file that it was started with, if it was."""
        try:
            return str(json.loads((self._folder / keepers.ORDER).read_text())["package"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def relayed(self) -> bool:
        """Whether its keeper carries its calls to a gate."""
        try:
            return keepers.relay_of(self._folder) is not None
        except (OSError, ValueError, AttributeError):
            return False

    def asked(self) -> None:
        """Note that its owner asks for what it left: `storing` waits with the machine's end."""
        with contextlib.suppress(OSError):
            os.utime(self._folder / keepers.ENDED)

    @property
    def started(self) -> bool:
        """Whether it was."""
        return (self._folder / keepers.ORDER).exists()

    @property
    def started_us(self) -> int:
        """When, by this machine's clock, in microseconds since 1970."""
        return (self._folder / keepers.ORDER).stat().st_mtime_ns // 1000

    def ended(self) -> int | None:
        """Return the runtime's exit code, negative for a signal; None while it goes on.

        It is -9 where none was written down and runtime and keeper are gone: both were killed, or the machine was
        started anew; and of a run that is not here: it was never started, or is removed.
        """
        if not self.started:
            return -signal.SIGKILL
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError):
                return int((self._folder / keepers.ENDED).read_text())
            keeper = self._keeper()
            if keeper is None:
                return None
            if self._lives(keeper, "pid", "started") or self._lives(keeper, "runtime", "runtime_started"):
                return None
            # Both are gone: the code was written between the two looks, or not at all.
        return -signal.SIGKILL

    def files(self, first: Mapping[str, int]) -> dict[str, int]:
        """Return what can be read: name → bytes; of each folder's sealed files `MOST_FILES`.

        Args:
            first: folder → number of the first sealed file that is named.
        """
        found = {}
        for name in ("events.log", "heads.log", "receipt.json", keepers.LOG):
            with contextlib.suppress(FileNotFoundError):
                found[name] = self._path(name).stat().st_size
        for folder, number in first.items():
            # They are written one after the other.
            with contextlib.suppress(FileNotFoundError):
                for name in (numbered(folder, one) for one in range(number, number + MOST_FILES)):
                    found[name] = self._path(name).stat().st_size
        return found

    def read(self, name: str, start: int, most: int) -> bytes:
        """Return bytes of a file, fewer than `most` at its end; raises `UsageError` `file-missing`."""
        try:
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            raise UsageError(Code.FILE_MISSING, f"the run has no {name}") from None
        try:
            return os.pread(descriptor, most, start)
        finally:
            os.close(descriptor)

    def stop(self, number: signal.Signals) -> None:
        """Send the runtime a signal; one that has ended is fine."""
        keeper = self._keeper()
        if keeper is None or not self._lives(keeper, "runtime", "runtime_started"):
            return
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(keeper["runtime"])
            try:
                # The number may have become another process's before it was opened, and not after.
                if self._lives(keeper, "runtime", "runtime_started"):
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)

    def remove(self) -> None:
        """Remove all that is here of a run, if anything is; raises `UsageError` where it has not ended."""
        is_new = self.started and time.time() - self.started_us / 1e6 < _SETTLED_S
        if self.started and self.ended() is None and (is_new or self._keeper() is not None):
            raise UsageError(Code.USAGE, "the run has not ended: stop it first")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder)

    def _path(self, name: str) -> Path:
        return self._folder / name if name == keepers.LOG else self._folder / OUT / name

    def _keeper(self) -> dict[str, int] | None:
        try:
            found = json.loads((self._folder / keepers.KEEPER).read_text())
            of_this_boot = found.pop("boot", "") in ("", keepers.boot())
            found = {name: int(value) for name, value in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        # Of an earlier one nothing is left, whichever process has its number now.
        return found if of_this_boot else found | {"started": _NEVER, "runtime_started": _NEVER}

    @staticmethod
    def _lives(keeper: dict[str, int], pid: str, started: str) -> bool:
        return keepers.started_ticks(keeper[pid]) == keeper[started]
