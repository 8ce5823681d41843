"""A runtime that was placed elsewhere, as its owner sees it: its files, here, as far as they have come, and its end.

Laws: a connection that is lost is opened again, for as long as it takes, and loses and doubles nothing; the end is
returned when all that the run left is here; what a place sends is bounded by what its run may leave.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import blake3

from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.providers.place.base import Placed
from glasshouse.providers.place.kept_files import KeptFiles
from glasshouse.providers.place.place_channel import ANSWER_S, PlaceChannel
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.runs import numbered

T = TypeVar("T")

_LOOK_MS = 20_000
# What is asked for before the first of it has come. Calls of the runtime to its gate go before pieces, but not before
# what lies in the network already.
_AHEAD = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 2.0
# Without a byte that is new there, or an answer, what was begun is given up.
_PATIENCE_S = 600.0
_START_S = 60.0
_PIECE_BYTES = 1 << 20


def digest_of(path: Path) -> str:
    """Return the BLAKE3 of a file, hexadecimal, by which a place keeps it; of 1 GiB it takes a third of a second."""
    digest, buffer = blake3.blake3(), bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while found := file.readinto(buffer):
            digest.update(memoryview(buffer)[:found])
    return digest.hexdigest()


class RemotePlaced(Placed):
    """One run at a place; see `Placed`.

    Args:
        open_channel: connects to the place.
        run: the run's id, 32 hexadecimal digits.
        path_of: where a file of the run is kept here; its folder need not exist.
        max_bytes: the most that its sealed files may have together.
        relayed: whether its keeper carries its calls to a gate, and not this connection.
        leave: takes a connection that is good when it is no longer used; it is closed otherwise.
    """

    def __init__(
        self,
        open_channel: Callable[[], PlaceChannel],
        run: str,
        path_of: Callable[[str], Path],
        *,
        max_bytes: int = 1 << 44,
        relayed: bool = False,
        leave: Callable[[PlaceChannel], None] = PlaceChannel.close,
    ) -> None:
        self._open, self._run, self._relayed, self._leave = open_channel, run, relayed, leave
        self._files = KeptFiles(path_of, max_bytes)
        self.problem = ""
        self._channel: PlaceChannel | None = None
        self._opening: PlaceChannel | None = None
        self._gate: str | None = None
        self._retry_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._asked: str | None = None
        self._preparing: int | None = None
        # When the next answer has to be here: a line may be dead without a sign.
        self._due_s = float("inf")
        # Sealed files that are here whole, from the first; the place names only later ones.
        self._whole = {"outputs": 0, "log": 0}
        self._forget()

    def connect(self) -> str:
        """Connect, serve the runtime's calls from here on, and return the `broker_url` for its launch file."""
        channel, self._opening = self._opening or self._open(), None
        self.close()
        self._forget()
        try:
            (gate,) = channel.ask("prepare", self._run, self._relayed)
            self._check_gate(gate)
        except GlasshouseError:
            channel.close()
            raise
        self._channel = channel
        self._preparing = None
        return str(gate)

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

        damaged = False
        while True:
            try:
                self._insisted(
                    lambda channel: channel.put(package, digest, progress), until_s=lambda: moved_s + _PATIENCE_S
                )
            except GlasshouseError as error:
                if error.code is not Code.UPLOAD_DAMAGED or damaged:
                    raise
                damaged, furthest = True, 0  # what was there before has rotted, and is gone
            else:
                return digest

    def start(self, order: Order, launch: bytes, *, check: Callable[[], None] = lambda: None) -> int:
        members = self._run, order.package, len(launch), order.max_seconds, order.ranks, order.peers, order.relay

        def start(channel: PlaceChannel) -> int:
            (pid,) = channel.answer(channel.post("start", *members, data=launch), within_s=_START_S)
            return int(pid)

        deadline_s = time.monotonic() + _PATIENCE_S
        return self._insisted(start, until_s=lambda: deadline_s, check=check)

    def wait(self, timeout_s: float) -> int | None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = None
            try:
                ended = self._step(max(0.0, deadline_s - time.monotonic()))
            except GlasshouseError as error:
                self._lost(error.message)
            except OSError as error:
                self._lost(f"what the run left cannot be kept here: {error.strerror}")
            if ended is not None or time.monotonic() >= deadline_s:
                return ended

    def interrupt(self) -> None:
        self._asked = self._asked or "interrupt"

    def kill(self) -> None:
        self._asked = "kill"

    def stop(self) -> None:
        self._connected().ask("stop", self._run, "interrupt")

    def remove(self, package: str | None = None) -> None:
        """Remove what is left at the place of a run that has ended, once what came is on the disk here."""
        self._files.sync()
        if self._channel is None:
            self.connect()
        self._connected().ask("remove", self._run, package)

    def close(self) -> None:
        for channel in (self._channel, self._opening):
            if channel is not None:
                (PlaceChannel.close if channel.busy else self._leave)(channel)
        self._channel = self._opening = None

    def _connected(self) -> PlaceChannel:
        if self._channel is None:
            raise PeerError(Code.PLACE_UNREACHABLE, "the place is not connected at this moment")
        return self._channel

    def _check_gate(self, gate: str) -> None:
        if self._gate not in (None, gate):
            why = "the place takes the runtime's calls elsewhere than before, where they do not come"
            hint = "let every login of that machine have the same folder for temporary files"
            raise PeerError(Code.PLACE_UNREACHABLE, why, hint=hint)
        self._gate = gate

    def _insisted(
        self,
        act: Callable[[PlaceChannel], T],
        *,
        until_s: Callable[[], float],
        check: Callable[[], None] = lambda: None,
    ) -> T:
        """Do something over a line that may break, or that another connection holds up."""
        while True:
            check()
            try:
                if self._channel is None:
                    self.connect()
                return act(self._connected())
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
            self._preparing = self._channel.post("prepare", self._run, self._relayed)
            self._due_s = time.monotonic() + ANSWER_S
        channel = self._connected()
        if time.monotonic() > self._due_s:
            raise PeerError(Code.PLACE_UNREACHABLE, "the place does not answer")
        if self._preparing is not None:
            channel.pump(timeout_s)
            if channel.answered(self._preparing):
                self._check_gate(*channel.answer(self._preparing))
                self._preparing = None
            return None
        if self._asked is not None:
            how, self._asked = self._asked, None
            try:
                channel.ask("stop", self._run, how)
            except PeerError:
                self._asked = how
                raise
        if self._look is None and self._ended is None and not (self._more and self._files.lacking):
            self._look_again(channel)
        self._read_on(channel)
        if self._ended is not None and not self._reads:
            return self._ended
        channel.pump(timeout_s)
        while self._reads and channel.answered(self._reads[0][0]):
            number, name, start = self._reads.pop(0)
            (count,) = channel.answer(number)
            self._files.take(name, start, channel.data(number), count)
            self._well()
        if self._look is not None and channel.answered(self._look):
            self._news(*channel.answer(self._look))
            self._look = None
            self._well()
        return None

    def _look_again(self, channel: PlaceChannel) -> None:
        for folder in self._whole:
            while self._files.path_of(numbered(folder, self._whole[folder])).exists():
                self._whole[folder] += 1
        self._look = channel.post("look", self._run, self._serial, _LOOK_MS, *self._whole.values())
        self._due_s = time.monotonic() + _LOOK_MS / 1000 + ANSWER_S

    def _well(self) -> None:
        self.problem, self._pause_s = "", _FIRST_PAUSE_S
        self._due_s = time.monotonic() + _LOOK_MS / 1000 + ANSWER_S

    def _news(self, ended: int | None, files: dict[str, int], more: bool, serial: int) -> None:
        over = ended is not None
        self._files.named(files, over=over, whole=over and not more)
        # Where it did not name all, the end is returned when the rest is here too.
        self._more, self._serial, self._ended = more, serial, None if more else ended

    def _read_on(self, channel: PlaceChannel) -> None:
        asked = {(name, start) for _, name, start in self._reads}
        for name, start, most in self._files.missing():
            if len(self._reads) >= _AHEAD:
                return
            if (name, start) not in asked:
                number = channel.post("read", self._run, name, start, most, expect=most)
                self._reads.append((number, name, start))
