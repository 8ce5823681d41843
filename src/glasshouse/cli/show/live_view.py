"""The live view of a run: each lifecycle step with its time as it passes, then the training's progress.

Steps that are done are printed once and stay; only one line is redrawn. While it trains that line is drawn not more
than twice a second, and without an event only when the clock on it shows another second: a view must not cost the
training anything. Where there is no terminal every step is a plain line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Self

from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from glasshouse.cli.show.output import CommandOutput, bytes_text, clock, counted, left_out_words, printable
from glasshouse.cli.show.steps import StepPrinter
from glasshouse.errors import Code
from glasshouse.evidence.events import Event, EventType
from glasshouse.jobs.define.package_records import Sealed
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.owner.rundir import RunRecord
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.launching import Prepared
from glasshouse.wire.group import Group
from glasshouse.wire.states import Outcome, State

_NAME_CHARS = 11
_ECHO_CHARS = 6
_REDRAW_S = 0.5
_PLAIN_PROGRESS_S = 10.0
# What is under way after a state was entered, for the line that is redrawn.
_NEXT = {
    State.CREATED: "hardening the processes",
    State.HARDENED: "measuring the runtime",
    State.MEASURED: "asking the broker",
    State.ATTESTED: "waiting for the key",
    State.RELEASED: "the worker loads its frameworks",
    State.OPENED: "starting the training",
    State.SEALED: "zeroizing",
    State.ZEROIZING: "wiping keys and looking for residue",
}
# The runtime looks at its processes again once the worker has imported what it trains with: that import is the
# workload's own, not a part of the package's opening.
_LOADED = "observed-again"
# What the log needs and people do not.
_QUIET = frozenset({"alive", _LOADED})
_SPIN_S = 0.1
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_GOOD, _BAD, _SOFT = "green", "red", "yellow"


class RunView(StepPrinter):
    """Shows one run."""

    def __init__(self, output: CommandOutput, *, yes: bool = False) -> None:
        super().__init__(output, yes=yes)
        self._console = output.console
        self._assurance, self._profile, self._machines = "", "", 1
        self._cost: Callable[[], str] | None = None
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._previous_us: int | None = None
        self._plain_s = self._event_s = time.monotonic()
        self._shown_clock = ""
        self._loaded = False
        self._stopping = 0
        self._away: set[int] = set()
        self._sending: tuple[float, int] | None = None
        self._group_broke = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            with contextlib.suppress(OSError):  # a closed terminal is no fact about the run
                self._live.stop()
            self._live = None

    def showing(self) -> Self:
        return self

    def expect(self, record: RunRecord, cost: Callable[[], str] | None) -> None:
        """Take what the run's policy demands and how many machines it has; `cost` is that of a rented one until now."""
        self._assurance, self._profile, self._cost = record.assurance, record.profile, cost
        self._machines = 1 if record.group is None else record.group.machines

    def done(self, name: str, detail: str, seconds: float | None = None, style: str = _GOOD) -> None:
        """Print a step that is done."""
        detail, took = printable(detail), "" if seconds is None else format_s(seconds)
        mark = {_GOOD: "✓", _BAD: "✗"}.get(style, "!")
        if self._console.is_terminal:
            text = Text(detail, style="dim" if style == _GOOD else style)
            mark_text, name_text = Text(f"  {mark}", style=style), Text(name, style="bold")
            self._console.print(_line(mark_text, name_text, text, Text(took, style="cyan"), last_width=14))
        else:
            after = f"  ({took})" if took else ""
            self._console.print(Text(f"{mark} {name:<{_NAME_CHARS}}{detail}{after}"), soft_wrap=True)

    def sealed(self, sealed: Sealed) -> None:
        super().sealed(sealed)
        packed = f"{sealed.name}: {counted(sealed.files, 'file')}, {bytes_text(sealed.package_bytes)} sealed"
        self.done("packed", packed, sealed.seconds)
        if (words := left_out_words(sealed.left_out)) is not None:
            self.done("left out", words)

    def prepared(self, prepared: Prepared, seconds: float, cost: Callable[[], str] | None) -> None:
        record = prepared.record
        self.expect(record, cost)
        ranks = _in_ranks(record.group)
        leg = "" if record.leg in (None, 1) else f", leg {record.leg} of line {(record.line or '')[:8]}"
        self.done("prepared", f"run {record.run_id[:8]}{leg}; the broker has package and policy{ranks}", seconds)

    def sending(self, sent: int, size: int) -> None:
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
        self._event_s = time.monotonic()
        if event.type is EventType.TRANSITION:
            self._transition(event.state, seen, self._passed(event))
        elif event.type is EventType.START:
            self._previous_us = event.time_us
        elif event.type is EventType.NOTICE:
            self._notice(event)
        elif event.type is EventType.CHECKPOINT:
            size = bytes_text(int(str(event.body["bytes"])))
            self.done("checkpoint", f"{event.body['seq']} at step {event.body['step']}, {size} sealed, is counted")
        elif event.type is EventType.PROGRESS and self._live is None:
            self._plain_progress(seen)
        self._draw(seen, force=event.type is EventType.TRANSITION)

    def tick(self, seen: Seen) -> None:
        """Redraw while no event comes: frameworks load, or a script reports nothing."""
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
        return clock(int((seen.last_us - begun_us) / 1e6 + time.monotonic() - self._event_s))

    def stopping(self, times: int) -> None:
        if self._stopping == 0:
            self.done("stopping", "asked to stop: the worker ends, keys are wiped, memory is searched", None, _SOFT)
        if times > 1 and self._away:
            self.done("stopping", "it is asked as soon as it is found; a third Ctrl-C leaves it to itself", None, _SOFT)
        elif times > 1:
            self.done("stopping", "still zeroizing; it ends by itself, asking again is not faster", None, _SOFT)
        self._stopping = times

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        """Show that a machine of the run's group has ended; the end of machine 0 is shown by its own events."""
        if machine and completed:
            self.done("machine", f"{machine} completed")
        elif machine:
            why = "without a word" if code is None else self._why(code)
            self.done("machine", f"{machine} ended: {why}", None, _BAD)
        self._group_broke |= not completed

    def away(self, machine: int, problem: str) -> None:
        which = "" if self._machines == 1 else f"machine {machine}: "
        if problem:
            self._away.add(machine)
            self.done("away", f"{which}{problem}; it goes on there, and is looked for until it is found", None, _SOFT)
        else:
            self._away.discard(machine)
            self.done("back", f"{which}followed again; nothing is lost")

    def _why(self, code: Code) -> str:
        """Return why something ended; a run that is stopped for another machine's sake was not interrupted."""
        if code is Code.INTERRUPTED and self._group_broke and not self._stopping:
            return "stopped, because another machine of its group had ended"
        return _WHY.get(code.value, code.value)

    def _transition(self, state: State, seen: Seen, seconds: float | None) -> None:
        whole = "" if self._machines == 1 else f", as that of all {self._machines} machines"
        sealed = f"{counted(seen.outputs, 'output')}, {counted(seen.segments, 'log segment')}"
        ended = state is State.ZEROIZING and seen.code is not None
        steps = {
            State.HARDENED: ("hardened", self._hardening(seen)),
            State.MEASURED: ("measured", "files of runtime, interpreter and ciphers"),
            State.ATTESTED: ("attested", f"evidence accepted by the broker{whole}"),
            State.RELEASED: ("released", f"key released at assurance {self._assurance}"),
            State.OPENED: ("opened", "commitment, index and signature hold"),
            State.RUNNING: ("started", "the worker has its inputs"),
            State.SEALED: ("trained", _trained(seen)),
            State.ZEROIZING: ("sealed", sealed) if seen.code is None else ("ended", self._why(seen.code)),
            State.ZEROIZED: ("zeroized", _zeroized(seen)),
        }
        bad = ended or (state is State.ZEROIZED and seen.outcome is Outcome.RESIDUE)
        if state in steps:
            self.done(*steps[state], seconds, _BAD if bad else _GOOD)

    def _hardening(self, seen: Seen) -> str:
        results = list(seen.checks.values())
        words = [f"{self._profile}: {counted(results.count('passed'), 'check')} passed"]
        words += [f"{results.count(kind)} {kind}" for kind in ("unavailable", "failed") if kind in results]
        return ", ".join(words) if results else self._profile

    def _draw(self, seen: Seen, *, force: bool) -> None:
        now = time.monotonic()
        if self._live is None or (not force and now - self._drawn_s < _REDRAW_S):
            return
        self._drawn_s = now
        shown: RenderableType = Text("")
        if seen.state is State.RUNNING:
            shown = self._progress(seen)
        elif seen.state in _NEXT:
            mark, doing = "·", _NEXT[seen.state]
            if seen.state is State.RELEASED:
                mark, doing = (
                    _SPINNER[int(now / _SPIN_S) % len(_SPINNER)],
                    "opening the package" if self._loaded else doing,
                )
            elif seen.state is State.MEASURED and self._machines > 1:
                doing = f"waiting until all {self._machines} machines are accepted"
            shown = Text(f"  {mark} {doing} …", style="dim")
        self._live.update(shown, refresh=True)

    def _progress(self, seen: Seen) -> Table:
        work, figures = seen.work if _reported(seen) else None, self._figures(seen)
        total, done = (None, 0) if work is None else (work.total, work.done)
        bar = ProgressBar(total=total, completed=done, pulse=total is None, animation_time=0.0)
        line = _line(Text("  ▸", style="cyan"), Text("training", style="bold"), bar, Text(" · ".join(figures)))
        # Narrower than the terminal: what it echoes, such as ^C, must not wrap and push the line up.
        line.width = self._console.width - _ECHO_CHARS
        return line

    def _plain_progress(self, seen: Seen) -> None:
        now = time.monotonic()
        if _reported(seen) and now - self._plain_s >= _PLAIN_PROGRESS_S:
            self._plain_s = now
            self._console.print(Text(f"  training    {' · '.join(self._figures(seen))}"), soft_wrap=True)

    def _figures(self, seen: Seen) -> list[str]:
        work = seen.work
        if work is None or not _reported(seen):
            self._shown_clock = self._clock(seen)
            figures = [f"{self._shown_clock} elapsed"]
        else:
            figures = [f"{work.done}{'' if work.total is None else f'/{work.total}'} {work.unit}s"]
            if (rate := seen.rate_per_s) is not None:
                figures.append(f"{rate:.3g}/s" if rate < 1000 else f"{rate:.0f}/s")
            if work.loss is not None:
                figures.append(f"loss {float(work.loss):.4g}")
            if (remaining := seen.remaining_s) is not None:
                figures.append(f"ETA {clock(remaining)}")
        return figures if self._cost is None else [*figures, self._cost()]


_WHY = {
    "interrupted": "interrupted by its owner",
    "worker-killed": "the worker was killed",
    "out-of-memory": "the worker ran out of memory",
    "nonfinite-loss": "the loss was no finite number",
    "debugger-attached": "a debugger attached",
    "lease-lost": "no contact with the broker for the length of its lease",
    "duration-exceeded": "the longest duration of the policy was reached",
    "line-superseded": "another machine goes on with its training",
    "checkpoint-refused": "a checkpoint came too soon or was too large; its words: glasshouse logs",
    "checkpoint-tampered": "the checkpoint that it should go on from is not what was counted",
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


def _line(*cells: RenderableType, last_width: int | None = None) -> Table:
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(width=3)
    line.add_column(width=_NAME_CHARS, no_wrap=True)
    line.add_column(ratio=1, overflow="fold")
    line.add_column(justify="right", no_wrap=True, width=last_width)
    line.add_row(*cells)
    return line


def _in_ranks(group: Group | None) -> str:
    if group is None:
        return ""
    each = f"; {counted(group.ranks, 'rank')}"
    return each if group.machines == 1 else f"{each} on each of {group.machines} machines"


def _trained(seen: Seen) -> str:
    work = seen.work
    if work is None or not work.done:
        return "it reported no steps"
    loss = f", loss {float(work.loss):.4g}" if work.loss else ""
    if work.total is not None and work.done < work.total:
        # What came within a second of the report before is in the receipt alone.
        return f"last reported at {work.done} of {counted(work.total, work.unit)}{loss}"
    return counted(work.done, work.unit) + loss


def _zeroized(seen: Seen) -> str:
    results = list(seen.probes.values())
    words = f"{results.count('clean')} of {counted(len(results), 'probe')} clean"
    if "unverifiable" in results:
        words += f", {results.count('unverifiable')} unverifiable"
    return words + (f", {results.count('found')} FOUND SOMETHING" if seen.outcome is Outcome.RESIDUE else "")


def _reported(seen: Seen) -> bool:
    """Return whether the training has reported how far it is; a script need not."""
    return seen.work is not None and (seen.work.done > 0 or seen.work.total is not None)
