"""Writes spec/vectors/measurement/ again: schedules, records, sessions, estimates and their sensitivity.

Run: python spec/vectors/generate_measurement.py
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "measurement"
sys.path.insert(0, str(ROOT / "tests"))

from simulators.slot_clock import MS, SlotClock, plan, train  # noqa: E402 - found through the line above
from tools.artifact_stories import artifacts  # noqa: E402
from tools.measurement_cases import outcome  # noqa: E402

Case = tuple[str, dict[str, Any]]


def case(kind: str, description: str, **given: Any) -> dict[str, Any]:
    return {"description": description, "expect": outcome(kind, given), "input": given, "kind": kind}


def record(arm: str, lengths_ms: Iterator[int] | None = None, *, clock: SlotClock | None = None, **more: Any) -> str:
    """Two seconds of steps, of 10 ms unless other lengths are given."""
    lengths = (one * MS for one in lengths_ms or itertools.repeat(10))
    return train(plan(arm, end_ns=4_000 * MS, warmup_steps=6), clock or SlotClock(), lengths, **more).record().decode()


def whole(begin_ms: int, step_ms: int) -> str:
    """A worker that has the machine for itself for nine seconds."""
    alone = plan("A", end_ns=(begin_ms + 9_000) * MS, warmup_steps=6, slot_ns=150 * MS)
    return train(alone, SlotClock(begin_ms * MS), itertools.repeat(step_ms * MS)).record().decode()


def calibrations() -> Iterator[Case]:
    def steps(number: int, mean_ns: int, spread_ns: int) -> list[int]:
        return [mean_ns + (37 * k) % 41 * spread_ns // 40 for k in range(number)]

    short: dict[str, Any] = {
        "version": 1,
        "raw_ns": steps(41, 5_000_000, 700_001),
        "protected_ns": steps(30, 5_050_003, 1_200_000),
        "start_us": 3_200_500,
        "between_ppm": 18_000,
        "device": False,
        "lifecycle": None,
        "deployment": None,
    }
    long = {"raw_ns": steps(20, 61_000_001, 9), "protected_ns": steps(21, 60_000_000, 31_000_001)}
    for name, mode, asked_s, change in (
        ("short-steps", "interleaved", 600, {}),
        ("noise-within-sessions", "interleaved", 3_600, {"between_ppm": 2_000}),
        ("little-time", "null", 250, {}),
        ("steps-of-30-ms", "interleaved", 600, {"raw_ns": steps(40, 26_000_000, 4_000_000)}),
        ("long-steps", "interleaved", 3_600, {**long, "between_ppm": 900}),
        ("no-deviation-of-sessions", "interleaved", 3_600, {"between_ppm": 0}),
        ("gpu", "interleaved", 3_600, {**long, "device": True}),
        ("sequential", "sequential", 100, {}),
        ("alternating", "alternating", 3_600, {}),
        ("alternating-little-time", "alternating", 300, {}),
        ("too-few-steps", "interleaved", 600, {"raw_ns": steps(19, 5_000_000, 9)}),
        ("steps-that-no-slot-holds", "interleaved", 600, {"raw_ns": steps(40, 500_000_000, 9)}),
        ("no-step", "alternating", 600, {"protected_ns": []}),
    ):
        given = {"calibration": {**short, **change}, "mode": mode, "asked_s": asked_s}
        yield f"calibration-{name}", case("calibration", "the schedule that follows", **given)


def commitments() -> Iterator[Case]:
    job = {"chunk_bytes": 65536, "files": {"notes.txt": "5a" * 32}, "profile": "standard", "suite": "AES-256-GCM"}
    for name, params in (("narrow", {"width": 16}), ("wide", {"width": 32})):
        given = {"job": {**job, "params": params}, "key": bytes(range(32)).hex(), "seed": "11" * 32}
        yield f"commitment-{name}", case("commitment", "what a design has of its job", **given)


PHASES: dict[str, Any] = {
    "kind": "phases",
    "phases": [{"name": "forward", "ns": 60 * MS}, {"name": "hooks", "ns": 1}],
    "first": 113,
    "steps": 7,
}


def profiled(at: int = -1, **changed: Any) -> str:
    """A worker whose last seven steps of 10 ms were profiled."""
    return altered(lambda lines: lines.insert(len(lines) + at, PHASES | changed))


def schedules() -> Iterator[Case]:
    instants = ["0", "99999999", "100000000", "12345678901", "9007199254740993", str(2**62 - 1)]
    for name, given, first in (
        ("first-blocks", plan("P"), 0),
        ("raw", plan("R"), 0),
        ("alone", plan("A"), 0),
        ("late", plan("R", slot_ns=73_000_001), 10**9),
    ):
        given_plan = given.to_json()
        yield f"schedule-{name}", case("schedule", "whose slots are", plan=given_plan, first=first, instants=instants)
    for name, change in (
        ("another-arm", {"arm": "Q"}),
        ("slot-too-short", {"slot_ns": 999_999}),
        ("no-steps", {"steps": 0}),
        ("end-with-a-leading-zero", {"end_ns": "01"}),
        ("member-more", {"more": 1}),
    ):
        changed = {**plan("P").to_json(), **change}
        yield f"schedule-{name}", case("schedule", "a plan that is refused", plan=changed, first=0, instants=[])


def altered(change: Callable[[list[dict[str, Any]]], object]) -> str:
    lines = [json.loads(line) for line in record("R").splitlines()]
    change(lines)
    return "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines)


def records() -> Iterator[Case]:
    for name, text in (
        ("good", record("R")),
        ("alone", record("A")),
        ("overrun", record("P", itertools.chain([10] * 20, [170], itertools.repeat(10)))),
        ("of-a-worker-that-died", altered(lambda lines: lines.pop())),
        ("stopped", record("R", itertools.repeat(10, 30))),
        ("slot-left-out", altered(lambda lines: lines.pop(2))),
        ("slot-of-the-other-arm", altered(lambda lines: lines[-2].update(slot=lines[-2]["slot"] + 1))),
        ("step-made-shorter", altered(lambda lines: lines[2]["steps"][3].__setitem__(1, 35 * MS))),
        (
            "step-begun-after-its-slot",
            altered(lambda lines: lines[2].update(steps=[[0, 110 * MS], [110 * MS, 120 * MS]], losses=[None] * 2)),
        ),
        ("loss-too-few", altered(lambda lines: lines[2]["losses"].pop())),
        ("loss-no-decimal", altered(lambda lines: lines[2]["losses"].__setitem__(0, "NaN"))),
        ("on-after-its-end", altered(lambda lines: lines[-1].update(until_ns=str(4_001 * MS)))),
        ("not-canonical", record("R").replace('"kind":"steps"', '"kind": "steps"')),
        ("last-line-without-its-end", record("R")[:-1]),
        ("profiled", profiled()),
        ("profiled-before-its-last-slot", profiled(-2)),
        ("profiled-of-more-steps-than-it-has", profiled(steps=256)),
        ("profiled-longer-than-its-steps", profiled(phases=[{"name": "forward", "ns": 71 * MS}])),
        ("profiled-out-of-order", profiled(phases=PHASES["phases"][::-1])),
        ("profiled-phase-unknown", profiled(phases=[{"name": "thinking", "ns": 1}])),
    ):
        yield f"record-{name}", case("record", "one worker's steps", record=text)


def sessions() -> Iterator[Case]:
    def of(name: str, description: str, raw: str | None, protected: str | None, **more: Any) -> Case:
        given = {"raw": raw, "protected": protected, "length_ns": 3_000 * MS, "observed": {}, "throttled": False} | more
        return f"session-{name}", case("session", description, **given)

    raw, protected = record("R"), record("P", itertools.repeat(11))
    cold = itertools.cycle([15, 10, 10, 10, 10, 10])
    suspended = SlotClock()
    slept = record("R", clock=suspended, before=lambda step: suspended.suspend(9_000 * MS) if step == 60 else None)
    yield of("good", "protected steps take a tenth longer", raw, protected)
    yield of("cold-steps", "the first step of a slot takes longer and is not counted", record("R", cold), record("P"))
    overrun = record("R", itertools.chain([10] * 65, [140], itertools.repeat(10)))
    yield of("overrun", "a step overran: it counts, and what it overlapped is dropped", overrun, record("P"))
    yield of("suspended", "the machine slept: that block is excluded", slept, protected)
    yield of("steal", "a block that the machine's state excludes", raw, protected, observed={"5": "steal"})
    yield of("short", "too many blocks are excluded", raw, protected, observed={str(n): "steal" for n in range(8)})
    yield of("died", "an arm left no record", raw, None)
    yield of("throttled", "the machine held its clocks down", raw, protected, throttled=True)
    first, second = whole(0, 100), whole(9_000, 103)
    yield of("whole", "two whole processes, one after the other", first, second)
    yield of("whole-steal", "a block that the machine's state excludes", first, second, observed={"10": "steal"})
    yield of(
        "whole-short", "half of a process is excluded", first, second, observed={str(n): "steal" for n in range(20)}
    )
    yield of("whole-beside-slots", "a whole process and an arm", first, protected)
    yield of("nonfinite", "a loss is no number", record("R", loss=lambda step: math.nan), protected)
    yield of("unlike-losses", "the arms did different work", raw, record("P", loss=lambda step: 1.0))
    yield of(
        "no-steps",
        "a step is longer than a slot",
        record("R", itertools.repeat(120)),
        record("P", itertools.repeat(120)),
    )
    yield of("not-warm", "an arm began too late", raw, record("P", clock=SlotClock(now_ns=3_990 * MS)))
    yield of("two-raw", "two records of one arm", raw, raw)
    yield of("profiled", "a profiled worker's steps are of no session", profiled(), protected)


def estimates() -> Iterator[Case]:
    spread = [0.3, -1.1, 0.8, -0.2, 1.4, -0.9, -0.4, 0.6, 1.0, -1.5, 0.1, -0.1]
    common: dict[str, Any] = {"background": "0", "contention": [], "margin": "0.01", "null": False, "widening": "1"}
    for name, mean, scale, more in (
        ("equivalent", 0.001, 0.004, {}),
        ("equivalent-but-for-the-background", 0.001, 0.004, {"background": "0.012"}),
        ("overhead", 0.02, 0.01, {"background": "0.0018"}),
        ("inconclusive", 0.002, 0.05, {}),
        ("bias", -0.02, 0.01, {"background": "0.03"}),
        ("bias-of-a-null", 0.02, 0.01, {"null": True}),
        ("widened", 0.02, 0.01, {"widening": "1.25"}),
        ("contended", 0.008, 0.01, {"contention": ["0.006", "0.001"] * 6}),
        ("contended-raw", 0.001, 0.004, {"contention": ["-0.012", "0.001"] * 6}),
    ):
        values = [f"{mean + scale * one:.6f}" for one in spread]
        yield f"estimate-{name}", case("estimate", name.replace("-", " "), contrasts=values, **common | more)
    yield (
        "estimate-not-steady",
        case("estimate", "a trend", contrasts=[f"{0.0002 * k:.6f}" for k in range(-6, 6)], **common),
    )
    yield (
        "estimate-too-few-to-be-steady",
        case("estimate", "five sessions", contrasts=["0.0001", "0", "-0.0001", "0", "0"], **common),
    )
    yield "estimate-one", case("estimate", "one session has no interval", contrasts=["0.01"], **common)


def sensitivities() -> Iterator[Case]:
    seed = bytes(range(32)).hex()
    noise = [[100 + (7 * k) % 11, 100 + (5 * k) % 13, 10, 10, 120, 121, 12, 12] for k in range(30)]
    bunched = [[one[0], one[1] + (90 if k % 9 == 4 else 0), *one[2:]] for k, one in enumerate(noise)]
    empty = [[*noise[0][:1], 0, 10, 0, 0, 0, 12, 0], *noise[1:]]
    for name, blocks in (("noise", noise), ("bunched", bunched), ("block-without-an-arm", empty)):
        yield (
            f"sensitivity-{name}",
            case("sensitivity", name.replace("-", " "), sessions=[blocks, blocks[:17]], seed=seed),
        )
    long = [[100 + (7 * k) % 11, 101, 10, 10, 0, 0, 12, 12] for k in range(300)]
    yield "sensitivity-many-blocks", case("sensitivity", "more blocks than bits of a hash", sessions=[long], seed=seed)


def build() -> dict[str, bytes]:
    """Return every file of the folder by its name."""
    kinds = (calibrations, commitments, schedules, records, sessions, estimates, sensitivities, artifacts)
    found = itertools.chain.from_iterable(kind() for kind in kinds)
    return {f"{name}.json": json.dumps(one, indent=1, sort_keys=True).encode() + b"\n" for name, one in found}


if __name__ == "__main__":
    built = build()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for name, data in built.items():
        (FOLDER / name).write_bytes(data)
