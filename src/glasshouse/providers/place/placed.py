"""A runtime that was placed, as its owner sees it: its files, here, as far as they have come; whether it has ended.

Laws: a connection that is lost is opened again, for as long as it takes, and loses and doubles nothing; the end is told
when all that the run left is here; what a place sends is bounded by what its run may leave.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.providers.place.place_channel import ANSWER_S, Channel, digest_of
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.runs import is_name, numbered
from glasshouse.wire.canonical import Json
from glasshouse.wire.fields import Fields

__all__ = ["RemotePlaced"]

T = TypeVar("T")

_LOOK_MS = 20_000
# What is asked for before the first of it has come. Calls of the runtime to its gate go before pieces, but not before
# what lies in the network already.
_AHEAD, _PIECE_BYTES = 8, 256 << 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 2.0
# Without a byte that is new there, or an answer, what was begun is given up.
_PATIENCE_S = 600.0
_START_S = 60.0
_MAX_FILES = 1100
# Of one run, together: a sealed log that fills its share has fewer.
_MOST_FILES = 1 << 18
_RECEIPT = "receipt.json"
_GROWING = ("events.log", "heads.log", "runtime.log")
# Of files whose size no job names: an event log of ninety days at one event a second has less.
_MAX_BYTES = {"events.log": 1 << 33, "heads.log": 1 << 33, _RECEIPT: 1 << 24, "runtime.log": 1 << 28}


class RemotePlaced:
    """One run at a place.

    Args:
        open_channel: connects to the place.
        run: the run's id, 32 hexadecimal digits.
        path_of: where a file of the run is kept here; its folder need not exist.
        max_bytes: the most that its sealed files may have together.
        relayed: whether its keeper carries its calls to a gate, and not this connection.
        leave: takes a connection that is good when it is no longer used; it is closed otherwise.

    Attributes:
        problem: why it cannot be followed at this moment; empty while it can.
    """

    def __init__(
        self,
        open_channel: Callable[[], Channel],
        run: str,
        path_of: Callable[[str], Path],
        *,
        max_bytes: int = 1 << 44,
        relayed: bool = False,
        leave: Callable[[Channel], None] = Channel.close,
    ) -> None:
        self._relayed = {"relayed": True} if relayed else {}
        self._leave = leave
        self._open, self._run, self._path_of, self._max_bytes = open_channel, run, path_of, max_bytes
        self.problem = ""
        self._channel: Channel | None = None
        self._opening: Channel | None = None
        self._gate: str | None = None
        self._retry_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._asked: str | None = None
        self._preparing: int | None = None
        # When the next answer has to be here: a line may be dead, and nothing says so.
        self._due_s = float("inf")
        # Sealed files that are here whole, from the first; the place names only later ones.
        self._whole = {"outputs": 0, "log": 0}
        # What an earlier process took counts too: a place that is asked again and again may leave no more for it.
        self._there: dict[str, int] = dict(self._sealed_here())
        self._lacking: dict[str, None] = {}
        self._forget()

    @property
    def connected(self) -> bool:
        return self._channel is not None and self._preparing is None

    def connect(self) -> str:
        """Connect, serve the runtime's calls from here on, and return the `broker_url` for its launch file.

        Raises:
            PeerError, PlatformError: as `Channel`; `place-unreachable` where the runtime's calls would not come.
        """
        channel, self._opening = self._opening or self._open(), None
        self.close()
        self._forget()
        try:
            gate = self._prepared(channel.ask("prepare", run=self._run, **self._relayed))
        except GlasshouseError:
            channel.close()
            raise
        self._channel = channel
        self._preparing = None
        return gate

    def upload(self, package: Path, on_progress: Callable[[int, int], None]) -> str:
        """Send the sealed package, and return its digest; goes on where an earlier try ended."""
        if self._channel is None:
            self._opening = self._open()  # the login takes its time beside the hash
        digest = digest_of(package)
        furthest, moved_s = 0, time.monotonic()

        def progress(sent: int, size: int) -> None:
            nonlocal furthest, moved_s
            if sent > furthest:
                furthest, moved_s = sent, time.monotonic()
                self._pause_s = _FIRST_PAUSE_S
            on_progress(sent, size)

        def send() -> None:
            self._connected().put(package, digest, on_progress=progress)

        damaged = False
        while True:
            try:
                self._insisted(send, until_s=lambda: moved_s + _PATIENCE_S)
            except GlasshouseError as error:
                if error.code is not Code.UPLOAD_DAMAGED or damaged:
                    raise
                damaged, furthest = True, 0  # what was there before has rotted, and is gone
            else:
                return digest

    def start(self, order: Order, launch: bytes, *, check: Callable[[], None] = lambda: None) -> int:
        """Start the runtime and return its process id there.

        Args:
            order: with what.
            launch: the launch file.
            check: called between tries; may raise.

        Raises:
            UsageError, PlatformError: it cannot be started.
            PeerError: whether it was started is not known.
        """

        def start() -> int:
            channel, more = self._connected(), {}
            if order.relay is not None:
                more["relay"] = {"certificate": order.relay.certificate, "url": order.relay.url}
            number = channel.post(
                "start",
                run=self._run,
                package=order.package,
                launch_bytes=len(launch),
                max_seconds=order.max_seconds,
                ranks=order.ranks,
                peers=list(order.peers),
                **more,
            )
            channel.send(number, launch)
            return channel.answer(number, within_s=_START_S).integer("pid")

        deadline_s = time.monotonic() + _PATIENCE_S
        return self._insisted(start, until_s=lambda: deadline_s, check=check)

    def wait(self, timeout_s: float) -> int | None:
        """Take what is new for at most a time; return the exit code once the run has ended and all of it is here."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                ended = self._step(max(0.0, deadline_s - time.monotonic()))
            except GlasshouseError as error:
                self._lost(error.message)
                ended = None
            except OSError as error:
                self._lost(f"what the run left cannot be kept here: {error.strerror}")
                ended = None
            if ended is not None or time.monotonic() >= deadline_s:
                return ended

    def interrupt(self) -> None:
        """Ask the runtime to stop, zeroize and end: now, or when the place can be reached again."""
        self._asked = self._asked or "interrupt"

    def kill(self) -> None:
        """End it at once; as `interrupt`."""
        self._asked = "kill"

    def stop(self) -> None:
        """Ask the runtime to stop, and know that it was asked; raises `PeerError`."""
        self._connected().ask("stop", run=self._run, how="interrupt")

    def remove(self, package: str | None = None) -> None:
        """Remove what is left at the place of a run that has ended, once what came is on the disk here.

        Args:
            package: what `upload` returned, if it was sent.

        Raises:
            PeerError, UsageError: it cannot be, or has not ended.
        """
        for name in self._there:
            with contextlib.suppress(FileNotFoundError), self._path_of(name).open("rb") as file:
                os.fsync(file.fileno())
        if self._channel is None:
            self.connect()
        self._connected().ask("remove", run=self._run, package=package)

    def close(self) -> None:
        """Leave it to itself: it goes on."""
        for channel in (self._channel, self._opening):
            if channel is not None:
                (Channel.close if channel.busy else self._leave)(channel)
        self._channel = self._opening = None

    def _connected(self) -> Channel:
        if self._channel is None:
            raise PeerError(Code.PLACE_UNREACHABLE, "the place is not connected at this moment")
        return self._channel

    def _prepared(self, answer: Fields) -> str:
        gate = answer.text("gate", max_chars=512)
        if self._gate not in (None, gate):
            raise PeerError(
                Code.PLACE_UNREACHABLE,
                "the place takes the runtime's calls elsewhere than before, where they do not come",
                hint="let every login of that machine have the same folder for temporary files",
            )
        self._gate = gate
        return gate

    def _insisted(
        self, act: Callable[[], T], *, until_s: Callable[[], float], check: Callable[[], None] = lambda: None
    ) -> T:
        """Do something over a line that may break, or that another connection holds up."""
        while True:
            check()
            try:
                if self._channel is None:
                    self.connect()
                return act()
            except GlasshouseError as error:
                passing = isinstance(error, PeerError) and error.code is not Code.PLACE_OUTDATED
                if not (passing or error.code is Code.UPLOAD_BUSY) or time.monotonic() > until_s():
                    raise
                self._lost(error.message)
                time.sleep(max(0.0, self._retry_s - time.monotonic()))

    def _forget(self) -> None:
        self._look: int | None = None
        self._serial = 0
        self._ended: int | None = None
        self._reads: list[tuple[int, str, int]] = []
        # Whether the place has files that it did not name: it names them once those that it did are here.
        self._more = False

    def _lost(self, why: str) -> None:
        self.problem = why
        if self._channel is not None:
            self._channel.lost = True
        self.close()
        self._forget()
        self._retry_s = time.monotonic() + self._pause_s * random.uniform(0.7, 1.0)  # noqa: S311 - not for keys
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _step(self, timeout_s: float) -> int | None:
        if self._channel is None:
            wait_s = self._retry_s - time.monotonic()
            if wait_s > 0:
                time.sleep(min(wait_s, timeout_s))
                return None
            self._channel = self._open()
            self._preparing = self._channel.post("prepare", run=self._run, **self._relayed)
            self._due_s = time.monotonic() + ANSWER_S
        channel = self._connected()
        if time.monotonic() > self._due_s:
            raise PeerError(Code.PLACE_UNREACHABLE, "the place does not answer")
        if self._preparing is not None:
            channel.pump(timeout_s)
            if channel.answered(self._preparing):
                self._prepared(channel.answer(self._preparing))
                self._preparing = None
            return None
        if self._asked is not None:
            how, self._asked = self._asked, None
            try:
                channel.ask("stop", run=self._run, how=how)
            except PeerError:
                self._asked = how
                raise
        if self._look is None and self._ended is None and not (self._more and self._lacking):
            self._look_again(channel)
        self._read_on(channel)
        if self._ended is not None and not self._reads:
            return self._ended
        channel.pump(timeout_s)
        while self._reads and channel.answered(self._reads[0][0]):
            self._arrived(channel, *self._reads.pop(0))
            self._well()
        if self._look is not None and channel.answered(self._look):
            self._news(channel.answer(self._look))
            self._look = None
            self._well()
        return None

    def _look_again(self, channel: Channel) -> None:
        for folder in self._whole:
            while self._path_of(numbered(folder, self._whole[folder])).exists():
                self._whole[folder] += 1
        self._look = channel.post("look", run=self._run, since=self._serial, within_ms=_LOOK_MS, **self._whole)
        self._due_s = time.monotonic() + _LOOK_MS / 1000 + ANSWER_S

    def _well(self) -> None:
        self.problem, self._pause_s = "", _FIRST_PAUSE_S
        self._due_s = time.monotonic() + _LOOK_MS / 1000 + ANSWER_S

    def _news(self, answer: Fields) -> None:
        files = answer.any("files")
        if not isinstance(files, dict) or len(files) > _MAX_FILES or not all(map(is_name, files)):
            raise PeerError(Code.SCHEMA, "the place names files that no run has")
        over = not answer.null("ended")
        for name, size in files.items():
            self._there[name] = self._length(name, size, over=over)
        if len(self._there) > _MOST_FILES:
            raise PeerError(Code.SCHEMA, "the place names more files than a run leaves")
        if sum(size for name, size in self._there.items() if name not in _MAX_BYTES) > self._max_bytes:
            raise PeerError(Code.SCHEMA, "the place names more bytes than the run may leave")
        self._more = answer.flag("more")
        # The receipt comes last, when nothing is added any more: a run whose receipt is here is here whole.
        for name in sorted(files, key=_RECEIPT.__eq__):
            self._finish(name)
            if name == _RECEIPT and (self._more or not over):
                continue
            if name in _GROWING and self._there[name] == 0:
                os.close(self._opened(self._path_of(name)))  # an empty log says something that none at all does not
            if self._here(name) < self._there[name]:
                self._lacking[name] = None
        self._serial = answer.integer("serial")
        # Where it did not name all, the end is told when the rest is here too.
        self._ended = _exit_code(answer) if over and not self._more else None

    def _length(self, name: str, size: Json, *, over: bool) -> int:
        """Return how long a file is there, as the place says."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise PeerError(Code.SCHEMA, "the place names a file without a size")
        if size > _MAX_BYTES.get(name, self._max_bytes):
            raise PeerError(Code.SCHEMA, f"the place names more bytes of {name} than a run has")
        if size < self._there.get(name, 0):
            if not over:
                raise PeerError(Code.SCHEMA, "the place names a file that has shrunk")
            # A machine that was started anew lost what its disk did not have yet; what is here stays.
            size = max(size, self._here(name))
        return size

    def _finish(self, name: str) -> None:
        """Give a file its name that came whole before this process followed it."""
        partial = _partial(self._path_of(name))
        if name not in _GROWING and partial.exists() and partial.stat().st_size == self._there[name]:
            partial.rename(self._path_of(name))

    def _read_on(self, channel: Channel) -> None:
        for name, start in self._missing():
            if len(self._reads) >= _AHEAD:
                return
            most = min(_PIECE_BYTES, self._there[name] - start)
            asked: dict[str, Json] = {"run": self._run, "name": name, "from": start, "most": most}
            self._reads.append((channel.post("read", most, **asked), name, start))

    def _missing(self) -> Iterator[tuple[str, int]]:
        """Yield each piece that is not here and was not asked for."""
        asked = {(name, start) for _, name, start in self._reads}
        for name in list(self._lacking):
            have, size = self._here(name), self._there[name]
            if have == size:
                del self._lacking[name]
            for start in range(have, size, _PIECE_BYTES):
                if (name, start) not in asked:
                    yield name, start

    def _sealed_here(self) -> Iterator[tuple[str, int]]:
        """Yield each sealed file that is here, whole or in part, and its length."""
        for folder in self._whole:
            with contextlib.suppress(FileNotFoundError):
                for path in self._path_of(numbered(folder, 0)).parent.iterdir():
                    name = f"{folder}/{path.name.removesuffix('.partial')}"
                    if is_name(name):
                        yield name, self._here(name)

    def _here(self, name: str) -> int:
        for path in (self._path_of(name), _partial(self._path_of(name))):
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_size
        return 0

    @staticmethod
    def _opened(path: Path) -> int:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _arrived(self, channel: Channel, number: int, name: str, start: int) -> None:
        wanted, data = channel.answer(number).integer("bytes"), channel.data(number)
        path, size = self._path_of(name), self._there[name]
        if len(data) != wanted or not data or start + len(data) > size:
            raise PeerError(Code.SCHEMA, f"the place sent other bytes of {name} than it was asked for")
        descriptor = self._opened(path if name in _GROWING else _partial(path))
        try:
            # Pieces come in the order in which they were asked for.
            if os.fstat(descriptor).st_size != start:
                raise PeerError(Code.SCHEMA, f"the place sent a piece of {name} out of its turn")
            _write(descriptor, data, start)
        finally:
            os.close(descriptor)
        if start + len(data) == size:
            self._finish(name)
            self._lacking.pop(name, None)


def _write(descriptor: int, data: bytes, start: int) -> None:
    """Write all of it, or leave the file as long as it was."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.pwrite(descriptor, left, start + len(data) - len(left)) :]
    except OSError:
        os.ftruncate(descriptor, start)
        raise


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _exit_code(answer: Fields) -> int:
    code = answer.any("ended")
    if not isinstance(code, int) or isinstance(code, bool) or not -64 <= code <= 255:
        raise PeerError(Code.SCHEMA, "the place names an exit code that is none")
    return code
