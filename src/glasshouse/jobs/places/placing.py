"""Starts the runtimes of one run, each at its place, and leaves none running without a supervisor."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.providers.place.base import Place, Placed
from glasshouse.providers.place.local import LocalPlace
from glasshouse.providers.protocol.order import Order, RelayOrder

# A runtime that was asked to stop has a worker that takes seconds to end, and memory to search.
STOP_PATIENCE_S = 120.0
_KILL_S = 5.0


class LeftError(PeerError):
    """The owner gave up waiting for a machine that cannot be reached; the run may go on there."""

    def __init__(self, run_id: str, place: str) -> None:
        self._name = name = run_id[:8]
        super().__init__(
            Code.PLACE_UNREACHABLE,
            f"left to itself: {place} cannot be reached; whether the order to stop reached the run there is unknown",
            hint=f"glasshouse stop {name} asks it again, glasshouse attach {name} waits for it, and "
            f"glasshouse stop {name} --give-up waits no more",
        )

    def rented(self) -> LeftError:
        """Return this error for a machine that stays rented."""
        self.message += "; its rented machine is not given back, and costs money on"
        self.hint = "glasshouse sweep gives it back, and fetches what can be reached; "
        self.hint += f"glasshouse attach {self._name} waits for it"
        return self


class Placing:
    """The runtimes of a run's machines while the block lasts; `relays` are where their keepers relay calls, or None.

    A block that raises stops those that were started and waits for their ends; either way nothing is left at a place
    that can be reached. One that raises `LeftError` leaves them as they are.
    """

    def __init__(
        self, places: Sequence[Place], folders: Sequence[RunFolder], relays: Sequence[RelayOrder | None]
    ) -> None:
        self._places, self._folders, self._relays = places, folders, relays
        self.placed: list[Placed] = [  # handles of the runtimes
            place.run(folder.path, max_bytes=folder.load().max_output_bytes, relayed=relay is not None)
            for place, folder, relay in zip(places, folders, relays, strict=True)
        ]
        self._started: list[Placed] = []

    def __enter__(self) -> Placing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, LeftError):
            for placed in self._started:
                placed.interrupt()
            for placed in self._started:
                see_out(placed)
        for placed, folder in zip(self.placed, self._folders, strict=True):
            # What cannot be reached now is left to a sweep.
            if kind is None or not issubclass(kind, LeftError):
                with contextlib.suppress(GlasshouseError):
                    placed.remove(folder.load().sent)
            placed.close()

    def start(self, launches: Sequence[bytes], check: Callable[[], None]) -> None:
        """Start the runtimes of all machines, calling `check` between tries; raises as `Placed`."""
        peers = self._addresses() if len(self.placed) > 1 else ()
        for placed, folder, relay, launch in zip(self.placed, self._folders, self._relays, launches, strict=True):
            check()
            record = folder.load()
            package = record.sent or str(record.package)
            ranks = None if record.group is None else record.group.ranks
            order = Order(package=package, max_seconds=record.max_duration_s, ranks=ranks, peers=peers, relay=relay)
            here = record.place == LocalPlace.name
            if not here:
                # Recorded before the start: if this process is killed now, the place has to be looked at.
                now_us = time.time_ns() // 1000
                folder.update(phase=Phase.RUNNING, supervisor=ProcessName.of(), placed=True, placed_us=now_us)
            self._started.append(placed)  # perhaps: the answer may be what is lost
            pid = placed.start(order, launch, check=check)
            # The process of another machine has a number there, and none here.
            agent = ProcessName.of(pid) if here else None
            folder.update(phase=Phase.RUNNING, supervisor=ProcessName.of(), agent=agent)

    def take_over(self) -> None:
        """Supervise runtimes that were started before, and whose supervisor is gone."""
        self._started = list(self.placed)
        for folder in self._folders:
            folder.update(supervisor=ProcessName.of())

    def _addresses(self) -> tuple[str, ...]:
        """Return the address of each machine; those of one place are drawn at once, so that they differ."""
        number = Counter(place.name for place in self._places)
        drawn = {place.name: place for place in self._places}
        addresses = {name: iter(place.addresses(number[name])) for name, place in drawn.items()}
        return tuple(next(addresses[place.name]) for place in self._places)


def see_out(placed: Placed) -> bool:
    """Wait for a runtime that was asked to stop, else kill it; return whether it ended and what it left is here."""
    if placed.wait(STOP_PATIENCE_S) is not None:
        return True
    placed.kill()
    return placed.wait(_KILL_S) is not None
