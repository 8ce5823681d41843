"""The live view of a run: each lifecycle step with its time as it passes, then the training's progress.

Steps that are done are printed once and stay; only one line is alive. While it trains that line is drawn not more
than twice a second, and without an event only when the clock on it shows another second: a view must not cost the
training anything. Where there is no terminal every step is a plain line.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from glasshouse.cli.show.output import printable
from glasshouse.cli.show.words import bytes_text, clock
from glasshouse.errors import Code
from glasshouse.evidence.events import Event, EventType
from glasshouse.jobs.owner.durations import format_s
from glasshouse.wire.states import Outcome, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from glasshouse.jobs.supervise.follow import Seen

__all__ = ["View"]

_NAME_CHARS = 11
_ECHO_CHARS = 6
_REDRAW_S = 0.5
_PLAIN_PROGRESS_S = 10.0
# What is under way after a state was entered, for the living line.
_NEXT = {
    State.CREATED: "hardening the processes",
    State.HARDENED: "measuring the runtime",
    State.MEASURED: "asking the broker",
    State.ATTESTED: "waiting for the key",
    State.RELEASED: "the worker loads its frameworks",
    State.OPENED: "starting the training",
    State.RUNNING: "training",
    State.SEALED: "zeroizing",
    State.ZEROIZING: "wiping keys and looking for residue",
}
# The runtime looks at its processes again once the worker has imported what it trains with: that import is the
# workload's own, not a part of the package's opening.
_LOADED = "observed-again"
_OPENING = "opening the package"
# What the log needs and people do not.
_QUIET = frozenset({"alive", _LOADED})
_SPIN_S = 0.1
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_GOOD, _BAD, _SOFT = "green", "red", "yellow"


class View:
    """Shows one run.

    Args:
        console: where.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._assurance, self._profile, self._machines = "", "", 1
        self._cost: Callable[[], str] | None = None
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._previous_us: int | None = None
        self._plain_s = time.monotonic()
        self._heard_s = time.monotonic()
        self._shown_clock = ""
        self._loaded = False
        self._stopping = 0
        self._away: set[int] = set()
        self._sending: tuple[float, int] | None = None
        self._group_broke = False

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):  # a closed terminal, which says nothing of the run
                self._live.stop()
            self._live = None

    def expect(self, *, assurance: str, profile: str, machines: int = 1, cost: Callable[[], str] | None = None) -> None:
        """Say what the run's policy demands: it is named with the release and the hardening; and who is waited for.

        Args:
            assurance, profile: of the policy.
            machines: how many.
            cost: returns what a rented machine has cost until now; None for a machine that is not rented.
        """
        self._assurance, self._profile, self._machines, self._cost = assurance, profile, machines, cost

    def done(self, name: str, detail: str, seconds: float | None, style: str = _GOOD) -> None:
        """Print a step that is done."""
        detail = printable(detail)
        mark = {_GOOD: "✓", _BAD: "✗"}.get(style, "!")
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(width=3)
        line.add_column(width=_NAME_CHARS, no_wrap=True)
        line.add_column(ratio=1, overflow="fold")
        line.add_column(justify="right", no_wrap=True, width=14)
        line.add_row(
            Text(f"  {mark}", style=style),
            Text(name, style="bold"),
            Text(detail, style="dim" if style == _GOOD else style),
            Text("" if seconds is None else format_s(seconds), style="cyan"),
        )
        if self._console.is_terminal:
            self._console.print(line)
        else:
            took = "" if seconds is None else f"  ({format_s(seconds)})"
            self._console.print(Text(f"{mark} {name:<{_NAME_CHARS}}{detail}{took}"), soft_wrap=True)

    def sending(self, sent: int, size: int) -> None:
        """Show how much of the package is at the machine where the run will be."""
        now = time.monotonic()
        if self._sending is None:
            self._sending = now, sent  # what was there before this command is no speed of its own
        since_s, before = self._sending
        if sent == size:
            self._sending = None
            self.done("sent", f"{bytes_text(size)} to the machine, sealed", now - since_s)
        elif self._live is not None and now - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now
            rate = (sent - before) / max(now - since_s, _REDRAW_S)
            left = f" · ETA {clock((size - sent) / rate)}" if rate else ""
            done = f"{bytes_text(sent)} of {bytes_text(size)} · {bytes_text(round(rate))}/s{left}"
            self._live.update(Text(f"  · sending {done}", style="dim"), refresh=True)

    def event(self, event: Event, seen: Seen) -> None:
        """Show what happened."""
        self._heard_s = time.monotonic()
        if event.type is EventType.TRANSITION:
            self._transition(event, seen, self._passed(event))
        elif event.type is EventType.START:
            self._previous_us = event.time_us
        elif event.type is EventType.NOTICE:
            self._notice(event)
        elif event.type is EventType.PROGRESS and self._live is None:
            self._plain_progress(seen)
        self._draw(seen, force=event.type is EventType.TRANSITION)

    def tick(self, seen: Seen) -> None:
        """Keep the living line alive while no event comes: frameworks that load, a script that reports nothing."""
        if self._live is None:
            return
        if seen.state is State.RELEASED:
            self._draw(seen, force=time.monotonic() - self._drawn_s >= _SPIN_S)
        elif seen.state is State.RUNNING and not _reported(seen) and self._clock(seen) != self._shown_clock:
            self._draw(seen, force=False)

    def _passed(self, event: Event) -> float | None:
        """Return the seconds since the row before, which this event ends."""
        since, self._previous_us = self._previous_us, event.time_us
        return None if since is None else (event.time_us - since) / 1e6

    def _notice(self, event: Event) -> None:
        code = str(event.body["code"])
        if code == _LOADED and not self._loaded:
            self._loaded = True
            self.done("loaded", "frameworks loaded by the worker", self._passed(event))
        elif code not in _QUIET:
            self.done("notice", code.replace("-", " "), None, _SOFT)

    def _clock(self, seen: Seen) -> str:
        """Return how long it has trained: by the runtime's clock up to its last event, and by ours since then."""
        begun_us = seen.entered_us.get(State.RUNNING, seen.last_us)
        return clock(int((seen.last_us - begun_us) / 1e6 + time.monotonic() - self._heard_s))

    def stopping(self, times: int) -> None:
        """Say that the run was asked to stop, and that it is being zeroized."""
        if self._stopping == 0:
            self.done("stopping", "asked to stop: the worker ends, keys are wiped, memory is searched", None, _SOFT)
        if times > 1 and self._away:
            self.done("stopping", "it is asked as soon as it is found; a third Ctrl-C leaves it to itself", None, _SOFT)
        elif times > 1:
            self.done("stopping", "still zeroizing; it ends by itself, asking again is not faster", None, _SOFT)
        self._stopping = times

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        """Say that a machine of the run's group has ended; what machine 0 came to, its own events say."""
        if machine and completed:
            self.done("machine", f"{machine} completed", None)
        elif machine:
            self.done(
                "machine", f"{machine} ended: " + ("without a word" if code is None else self._why(code)), None, _BAD
            )
        self._group_broke |= not completed

    def away(self, machine: int, problem: str) -> None:
        """Say that a machine cannot be followed at this moment, and once more when it can."""
        which = "" if self._machines == 1 else f"machine {machine}: "
        if problem:
            self._away.add(machine)
            self.done("away", f"{which}{problem}; it goes on there, and is looked for until it is found", None, _SOFT)
        else:
            self._away.discard(machine)
            self.done("back", f"{which}followed again; nothing is lost", None)

    def _why(self, code: Code) -> str:
        """Return why something ended; whom we stop for another machine's sake was not interrupted by its owner."""
        if code is Code.INTERRUPTED and self._group_broke and not self._stopping:
            return "stopped, because another machine of its group had ended"
        return _WHY.get(code.value, code.value)

    def _transition(self, event: Event, seen: Seen, seconds: float | None) -> None:
        match event.state:
            case State.HARDENED:
                self.done("hardened", self._hardening(seen), seconds)
            case State.MEASURED:
                self.done("measured", "files of runtime, interpreter and ciphers", seconds)
            case State.ATTESTED:
                whole = "" if self._machines == 1 else f", as that of all {self._machines} machines"
                self.done("attested", f"evidence accepted by the broker{whole}", seconds)
            case State.RELEASED:
                self.done("released", f"key released at assurance {self._assurance}", seconds)
            case State.OPENED:
                self.done("opened", "commitment, index and signature hold", seconds)
            case State.RUNNING:
                self.done("started", "the worker has its inputs", seconds)
            case State.SEALED:
                self.done("trained", self._trained(seen), seconds)
            case State.ZEROIZING:
                if seen.code is not None:
                    self.done("ended", self._why(seen.code), seconds, _BAD)
                else:
                    self.done(
                        "sealed", f"{_count(seen.outputs, 'output')}, {_count(seen.segments, 'log segment')}", seconds
                    )
            case State.ZEROIZED:
                self._zeroized(seen, seconds)

    def _hardening(self, seen: Seen) -> str:
        results = list(seen.checks.values())
        words = [f"{self._profile}: {_count(results.count('passed'), 'check')} passed"]
        words += [f"{results.count(kind)} {kind}" for kind in ("unavailable", "failed") if kind in results]
        return ", ".join(words) if results else self._profile

    def _trained(self, seen: Seen) -> str:
        work = seen.work
        if work is None or not work.done:
            return "it reported no steps"
        loss = f", loss {_short(work.loss)}" if work.loss else ""
        if work.total is not None and work.done < work.total:
            # What came within a second of the report before is in the receipt alone.
            return f"last reported at {work.done} of {_count(work.total, work.unit)}{loss}"
        return _count(work.done, work.unit) + loss

    def _zeroized(self, seen: Seen, seconds: float | None) -> None:
        results = list(seen.probes.values())
        words = f"{results.count('clean')} of {_count(len(results), 'probe')} clean"
        if "unverifiable" in results:
            words += f", {results.count('unverifiable')} unverifiable"
        if seen.outcome is Outcome.RESIDUE:
            words += f", {results.count('found')} FOUND SOMETHING"
        self.done("zeroized", words, seconds, _BAD if seen.outcome is Outcome.RESIDUE else _GOOD)

    def _draw(self, seen: Seen, *, force: bool) -> None:
        now = time.monotonic()
        if self._live is None or (not force and now - self._drawn_s < _REDRAW_S):
            return
        self._drawn_s = now
        if seen.state is State.RUNNING:
            self._live.update(self._progress(seen), refresh=True)
        elif seen.state is State.RELEASED:
            turn = _SPINNER[int(now / _SPIN_S) % len(_SPINNER)]
            doing = _OPENING if self._loaded else _NEXT[seen.state]
            self._live.update(Text(f"  {turn} {doing} …", style="dim"), refresh=True)
        elif seen.state in _NEXT:
            several = seen.state is State.MEASURED and self._machines > 1
            doing = f"waiting until all {self._machines} machines are accepted" if several else _NEXT[seen.state]
            self._live.update(Text(f"  · {doing} …", style="dim"), refresh=True)
        else:
            self._live.update(Text(""), refresh=True)

    def _progress(self, seen: Seen) -> Table:
        work = seen.work if _reported(seen) else None
        figures = _figures(seen)
        if work is None:
            self._shown_clock = self._clock(seen)
            figures = [f"{self._shown_clock} elapsed"]
        if self._cost is not None:
            figures.append(self._cost())
        # Narrower than the terminal: what it echoes, such as ^C, must not wrap and push the line up.
        line = Table.grid(padding=(0, 1), expand=True)
        line.width = self._console.width - _ECHO_CHARS
        line.add_column(width=3)
        line.add_column(width=_NAME_CHARS, no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        total, done = (None, 0) if work is None else (work.total, work.done)
        bar = ProgressBar(total=total, completed=done, pulse=total is None, animation_time=0.0)
        line.add_row(Text("  ▸", style="cyan"), Text("training", style="bold"), bar, Text(" · ".join(figures)))
        return line

    def _plain_progress(self, seen: Seen) -> None:
        now = time.monotonic()
        if _reported(seen) and now - self._plain_s >= _PLAIN_PROGRESS_S:
            self._plain_s = now
            figures = _figures(seen) + ([] if self._cost is None else [self._cost()])
            self._console.print(Text(f"  training    {' · '.join(figures)}"), soft_wrap=True)


_WHY = {
    "interrupted": "interrupted by its owner",
    "worker-killed": "the worker was killed",
    "out-of-memory": "the worker ran out of memory",
    "nonfinite-loss": "the loss was no finite number",
    "debugger-attached": "a debugger attached",
    "lease-lost": "no contact with the broker for the length of its lease",
    "duration-exceeded": "the longest duration of the policy was reached",
    "hardening-missing": "this machine lacks checks that the policy's profile demands",
    "rank-refused": "another machine of its group was refused or is missing",
    "rank-lost": "one of its ranks is gone; which: glasshouse logs",
    "collective-mismatch": "its ranks did different things at one place; which: glasshouse logs",
    "collective-tampered": "what went from rank to rank was changed on the way",
    "collective-timeout": "a rank waited too long for another; which: glasshouse logs",
    "collective-unsealed": "the script asked for communication that is not sealed; its words: glasshouse logs",
    "group-mismatch": "its ranks do not agree on their group; their words: glasshouse logs",
    "output-refused": "an output was refused; which: glasshouse logs",
    "script-failed": "the script failed; its words: glasshouse logs",
}


def _reported(seen: Seen) -> bool:
    """Return whether the training has said how far it is; a script need not."""
    return seen.work is not None and (seen.work.done > 0 or seen.work.total is not None)


def _figures(seen: Seen) -> list[str]:
    work = seen.work
    if work is None:
        return []
    unit = f"{work.unit}s"
    figures = [f"{work.done}/{work.total} {unit}" if work.total is not None else f"{work.done} {unit}"]
    if (rate := seen.rate_per_s) is not None:
        figures.append(f"{rate:.3g}/s" if rate < 1000 else f"{rate:.0f}/s")
    if work.loss is not None:
        figures.append(f"loss {_short(work.loss)}")
    if (remaining := seen.remaining_s) is not None:
        figures.append(f"ETA {clock(remaining)}")
    return figures


def _short(loss: str) -> str:
    return f"{float(loss):.4g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
