"""A paced run, seen from the agent: who speaks when, what rests, and what ends it."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError, RunError, UsageError
from glasshouse.runtime import pacing as pacing_module
from glasshouse.runtime import sentinel, vigil, watch
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.pacing import Pacing
from glasshouse.runtime.sentinel import Sentinel
from glasshouse.runtime.vigil import Vigil
from glasshouse.wire import pacing
from glasshouse.wire.pacing import End, Go, Order, Parked, Slice
from tools.forked import in_child
from tools.machine import needs_filters

GO = Go(origin_ns=0, until=0, steps=1, least_ns=None, guard_ns=0, burn_ns=0, stamps=False)
PARKED: dict[str, Any] = dict(Parked(done=0).to_json())
SLICE: dict[str, Any] = dict(
    Slice(
        done_before=0, done_after=1, t0_ns=0, t1_ns=1, guard_steps=0, guard_ns=0, skew_ns=0, hooks_ns=0,
        loss_finite=True, steps=1, cpu_ns=1, device_bytes=None, wait_ppm=None, phases=None,
    ).to_json()
)  # fmt: skip


class Watch:
    """A sentinel that does what it is told, and writes it down."""

    def __init__(self, told: list[str]) -> None:
        self.told, self.answers = told, True

    def rest(self) -> bool:
        self.told.append("sentinel rests")
        return self.answers

    def wake(self) -> bool:
        self.told.append("sentinel looks")
        return self.answers


class Scene:
    """A pacing channel, and everything that the agent would do, written down in `told` as it happens."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.loop, self.watch, self.busy = Loop(), Watch(self.told), False
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(5)
        self.pacing = Pacing(
            theirs.detach(),
            self.loop,
            self.watch,  # type: ignore[arg-type]
            relay=lambda order: self.told.append(f"relayed {dict(order)['type']}"),  # type: ignore[arg-type, call-overload]
            busy=lambda: self.busy,
            first_rest=lambda: self.told.append("noted"),
            gone=lambda: self.told.append("gone"),
            unwatched=self._alarm,
        )

    def _alarm(self) -> None:
        raise RunError(Code.DEBUGGER, "nobody says that nobody is traced")

    def order(self, order: Order | bytes) -> None:
        self.ours.send(order if isinstance(order, bytes) else pacing.encode(order))
        self.loop.step(5)

    def heard(self) -> pacing.Report:
        return pacing.report(self.ours.recv(pacing.MAX_BYTES + 1))

    def close(self) -> None:
        self.pacing.close()
        self.ours.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_everything_rests_before_whoever_measures_hears_of_it(scene: Scene) -> None:
    scene.pacing.reported(PARKED)
    assert scene.told == ["noted", "sentinel rests"]
    assert scene.heard() == Parked(done=0)
    scene.order(GO)
    assert scene.told[2:] == ["sentinel looks", "relayed pace-go"], "it looks before the worker goes on"
    scene.pacing.reported(SLICE)
    scene.order(End(until=9))
    assert scene.told[4:] == ["sentinel rests", "sentinel looks", "relayed pace-end"], "it is noted once"
    assert isinstance(scene.heard(), Slice)
    assert scene.ours.recv(1) == b"", "nobody speaks any more"


def test_what_is_on_its_way_to_the_broker_arrives_before_the_rest(scene: Scene) -> None:
    scene.busy = True
    scene.pacing.reported(PARKED)
    scene.loop.sleep(0.02)
    assert scene.told == []
    scene.busy = False
    scene.loop.sleep(0.02)
    assert scene.told == ["noted", "sentinel rests"]


def test_a_broker_that_is_away_does_not_keep_a_run_from_resting(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing_module, "_SETTLE_S", 0.02)
    scene.busy = True
    scene.pacing.reported(PARKED)
    scene.loop.sleep(0.1)
    assert scene.told == ["noted", "sentinel rests"]


def test_time_stands_still_for_what_is_pausable_and_for_nothing_else(scene: Scene) -> None:
    scene.loop.after(0.05, lambda: scene.told.append("progress"), pausable=True)
    scene.loop.after(0.05, lambda: scene.told.append("lease"))
    scene.pacing.reported(PARKED)
    scene.loop.sleep(0.1)
    assert scene.told == ["noted", "sentinel rests", "lease"]
    scene.order(GO)
    assert scene.told[3:] == ["sentinel looks", "relayed pace-go"], "none gathered while it rested"
    scene.loop.sleep(0.1)
    assert scene.told[5:] == ["progress"]


@pytest.mark.parametrize(
    "story",
    [
        [SLICE],
        [PARKED, PARKED],
        [PARKED, SLICE],
        [PARKED, GO, PARKED],
        [PARKED, GO, SLICE, SLICE],
        [PARKED, End(until=1), SLICE],
        [PARKED, End(until=1), PARKED],
        [{"type": "pace-parked", "done": -1}],
        [{"type": "pace-parked", "done": 0, "patient": "Jane Doe"}],
        [PARKED, GO, SLICE | {"phases": {"Jane Doe": 1}}],
    ],
    ids=str,
)
def test_a_worker_that_speaks_out_of_turn_or_too_much_ends_the_run(scene: Scene, story: list[Any]) -> None:
    *before, last = story
    for word in before:
        scene.order(word) if isinstance(word, (Go, End)) else scene.pacing.reported(word)
    with pytest.raises(RunError) as caught:
        scene.pacing.reported(last)
    assert caught.value.code is Code.WORKER_FAILED
    assert "Jane" not in str(caught.value)


@pytest.mark.parametrize("story", [[GO], [PARKED, GO, GO], [PARKED, GO, End(until=1)]], ids=str)
def test_an_order_out_of_turn_ends_the_run(scene: Scene, story: list[Any]) -> None:
    *before, last = story
    for word in before:
        scene.order(word) if isinstance(word, Go) else scene.pacing.reported(word)
    relayed = [word for word in scene.told if word.startswith("relayed")]
    with pytest.raises(FormatError) as caught:
        scene.order(last)
    assert caught.value.code is Code.SCHEMA
    assert [word for word in scene.told if word.startswith("relayed")] == relayed


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"type":"grant"}', Code.SCHEMA),
        (b'{"type":"stop"}', Code.SCHEMA),
        (b'{"until":1,"type":"pace-end"}', Code.NOT_CANONICAL),
        (b"\xff", Code.SCHEMA),
        (b" " * (pacing.MAX_BYTES + 1), Code.TOO_LARGE),
        (b" " * 60_000, Code.TOO_LARGE),
    ],
)
def test_only_an_order_is_relayed(scene: Scene, data: bytes, code: Code) -> None:
    scene.pacing.reported(PARKED)
    with pytest.raises(FormatError) as caught:
        scene.order(data)
    assert caught.value.code is code
    assert not [word for word in scene.told if word.startswith("relayed")]


@pytest.mark.parametrize("resting", [True, False])
def test_when_whoever_measures_goes_away_everything_wakes_and_the_run_is_to_end(scene: Scene, resting: bool) -> None:
    scene.pacing.reported(PARKED)
    if not resting:
        scene.order(GO)
    scene.ours.close()
    scene.loop.step(5)
    assert scene.told[-2:] == ["sentinel looks", "gone"]
    scene.loop.after(0, lambda: scene.told.append("progress"), pausable=True)
    scene.loop.step(5)
    assert scene.told[-1] == "progress"


def test_one_that_is_gone_before_it_hears_that_the_worker_stands(scene: Scene) -> None:
    scene.ours.close()
    scene.pacing.reported(PARKED)
    assert scene.told[-1] == "gone"


def test_what_a_worker_said_before_it_heard_that_it_is_to_stop_is_let_pass(scene: Scene) -> None:
    scene.pacing.reported(PARKED)
    scene.order(GO)
    scene.pacing.close()
    scene.pacing.close()
    told = len(scene.told)
    scene.pacing.reported(SLICE)
    assert len(scene.told) == told


def test_a_run_that_is_ended_while_it_settles_does_not_rest(scene: Scene) -> None:
    scene.busy = True
    scene.pacing.reported(PARKED)
    scene.pacing.close()
    scene.loop.sleep(0.02)
    assert scene.told == ["sentinel looks"]


@pytest.mark.parametrize("resting", [True, False])
def test_a_worker_does_not_go_on_unwatched(scene: Scene, resting: bool) -> None:
    if resting:
        scene.pacing.reported(PARKED)
        scene.told.clear()
    scene.watch.answers = False
    with pytest.raises(RunError) as caught:
        scene.order(GO) if resting else scene.pacing.reported(PARKED)
    assert caught.value.code is Code.DEBUGGER
    assert not [word for word in scene.told if word.startswith("relayed")]


def test_a_channel_must_be_one() -> None:
    stream, pipe = socket.socketpair(), os.pipe()
    ends = [stream[0].detach(), stream[1].detach(), *pipe, 999]
    for descriptor in ends:
        with pytest.raises(UsageError, match="pace-fd"):
            Pacing(
                descriptor, Loop(), Watch([]),  # type: ignore[arg-type]
                relay=lambda _order: None, busy=lambda: False, first_rest=lambda: None, gone=lambda: None,
                unwatched=lambda: None,
            )  # fmt: skip
    for descriptor in pipe:
        os.close(descriptor)


# A real sentinel.


def looks(watcher: Sentinel, seconds: float) -> int:
    """Count how often it looks; every look that is finished moves its beat."""
    seen, deadline = set(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen.add(watcher._beat[:8])
        time.sleep(0.001)
    return len(seen) - 1


@needs_filters
def test_a_sentinel_that_rests_looks_seldom_and_after_waking_as_often_as_before() -> None:
    def act() -> dict[str, Any]:
        watcher = sentinel.start(period_s=0.05, rest_period_s=0.3)
        try:
            found: dict[str, Any] = {"before": looks(watcher, 1.0)}
            found["rests"] = watcher.rest() and watcher.rest()
            found["resting"] = looks(watcher, 1.0)
            found["clean"] = watcher.wake()
            found["woken"] = watcher.silent_s()
            found["after"] = looks(watcher, 1.0)
            return found
        finally:
            watcher.stop()

    found = in_child(act)
    assert found["rests"]
    assert found["clean"]
    assert 1 <= found["resting"] <= 4, "seldom, and not never"
    assert min(found["before"], found["after"]) > 2 * found["resting"]
    assert found["woken"] < 0.2, "it had looked when it answered"


@needs_filters
def test_a_rest_does_not_bring_the_next_look_forward() -> None:
    """What a run pays for its watch in a running second is the same however often it rests."""

    def act() -> int:
        watcher = sentinel.start(period_s=1.0, rest_period_s=600)
        try:
            woken = set()
            for _ in range(10):
                watcher.rest()
                watcher.wake()
                woken.add(watcher._beat[:8])
                time.sleep(0.01)
                woken.add(watcher._beat[:8])
            return len(woken)
        finally:
            watcher.stop()

    assert in_child(act) <= 11, "a look at each waking, and hardly one between"


@needs_filters
@pytest.mark.parametrize("stopped_s", [0.0, 0.8])
def test_a_sentinel_that_was_stopped_within_a_rest_and_goes_on_has_missed_too_much(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float
) -> None:
    """Whoever continues it just before the run wakes gains nothing: what it looks at then says nothing of before."""
    monkeypatch.setattr(watch, "LATE_S", 0.4)

    def act() -> list[bool]:
        watcher = sentinel.start(rest_period_s=0.1)
        try:
            found = [watcher.rest()]
            if stopped_s:
                os.kill(watcher.pid, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(watcher.pid, signal.SIGCONT)
            looks(watcher, 0.3)  # it has looked again when the run wakes
            found.append(watcher.wake())
            return [*found, watcher.rest(), watcher.wake()]
        finally:
            watcher.stop()

    assert in_child(act) == [True, not stopped_s, True, True]


@needs_filters
def test_a_vigil_over_a_sentinel_that_rests_raises_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil, "SILENT_S", 0.2)

    def act() -> list[str]:
        loop, told = Loop(), []
        watcher = sentinel.start(period_s=0.02, rest_period_s=600)
        try:
            Vigil(loop, watcher, lambda: told.append("gone"), every_s=0.02)
            loop.sleep(0.1)
            watcher.rest()
            loop.rest()
            loop.sleep(0.6)
            told.append("rested")
            watcher.wake()
            loop.wake()
            loop.sleep(0.3)
            told.append("ran")
            watcher.rest()  # one that rests while its run does not is soon noticed
            loop.run_until(lambda: told[-1] == "gone", within_s=10)
            return told
        finally:
            watcher.stop()

    assert in_child(act) == ["rested", "ran", "gone"]
