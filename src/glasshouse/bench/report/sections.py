"""The sections after the pictures: what stands beside the answer, and how to compute all of it again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from glasshouse.bench.overhead.artifact import Part
from glasshouse.bench.overhead.design import Design, Mode
from glasshouse.bench.overhead.interval import Interval, Mean
from glasshouse.bench.overhead.lifecycle import STEPS
from glasshouse.bench.overhead.parity import Same
from glasshouse.bench.overhead.sensitivity import Sensitivity
from glasshouse.bench.overhead.slices import tree
from glasshouse.bench.report.html import Cell, Markup, facts, plain, table, tag
from glasshouse.bench.report.numbers import between, count, duration, p_value, percent, seconds
from glasshouse.bench.report.resources import bound, resources
from glasshouse.bench.report.view import View
from glasshouse.bench.report.words import ENDINGS, RULES
from glasshouse.wire.canonical import Json

__all__ = ["SECTIONS"]

_PARTS = {Mode.INTERLEAVED: "Interleaved", Mode.NULL: "Null run", Mode.SEQUENTIAL: "Sequential"}
_STEPS = {
    "harden": "close off the process",
    "attest": "measure and attest",
    "release": "have the key released",
    "open": "open the package",
    "seal_outputs": "seal the outputs",
    "zeroize": "wipe and probe",
}
_NAMES = {
    "cpu": "CPU",
    "glasshouse": "Glasshouse",
    "gpu": "GPU",
    "logical_cpus": "logical CPUs",
    "memory_bytes": "memory",
    "python": "Python",
    "torch": "PyTorch",
}


def sensitivity(view: View) -> list[Markup]:
    """Other estimators over the same blocks."""
    found = [_sensitivity(part) for part in (view.interleaved, view.null) if part is not None]
    return [
        tag(
            "p",
            "The same blocks through other methods. None of these is the result; an answer that hangs on the choice "
            "would show here.",
        ),
        *(found or [tag("p", "Not measured: it needs interleaved blocks.")]),
    ]


def _sensitivity(part: Part) -> Markup:
    set_, result = part.analysis.sensitivity, part.analysis.result
    if set_ is None or result is None:
        return tag("p", f"{_PARTS[part.mode]}: no block counts.")
    rows: list[tuple[Cell, Cell, Cell]] = [
        (tag("b", "the result"), percent(result.slowdown), between(result.slowdown_interval())),
        *_estimators(set_),
        (
            f"randomisation test, {set_.randomisation.draws} schedules",
            f"{p_value(set_.randomisation.p)}",
            "whether these processes differ, for whatever cause",
        ),
    ]
    return table(("Method", "Slowdown", "95 % interval"), rows, caption=f"{_PARTS[part.mode]}: sensitivity set")


def _estimators(found: Sensitivity) -> Iterator[tuple[Cell, Cell, Cell]]:
    named: tuple[tuple[str, Mean | None], ...] = (
        ("plain means, nothing trimmed", found.untrimmed),
        ("least squares, block and position effects", found.ols_period),
        ("least squares, also what ran before", found.ols_carryover),
    )
    for name, mean in named:
        yield name, *_mean(mean)
    boot = found.bootstrap
    if boot is None:
        yield "block bootstrap", "cannot be computed", ""
    else:
        yield f"block bootstrap, {boot.resamples} resamples", "", between(_slow(boot.interval))
    yield "effect of the launch order (half the difference)", *_mean(found.launch)


def _mean(mean: Mean | None) -> tuple[str, str]:
    if mean is None:
        return "too few data for it", ""
    return percent(math.expm1(mean.value)), between(_slow(mean.interval(0.95)))


def _slow(interval: Interval) -> Interval:
    return Interval(low=math.expm1(interval.low), high=math.expm1(interval.high))


def direct(view: View) -> list[Markup]:
    """The hooks' own time."""
    found = None if view.interleaved is None else view.interleaved.analysis.direct
    if found is None:
        return [
            tag(
                "p",
                "Not measured: the time inside protection hooks was not kept for every protected slice that counts.",
            )
        ]
    said = {
        True: (
            "It disagrees with the interval of δ: something beside the hooks differed between the arms "
            "(contention, placement), or δ is biased. Believe neither alone."
        ),
        False: "It lies inside the interval of δ.",
        None: "There is no interval to compare it with.",
    }
    return [
        tag(
            "p",
            "The time that the protected worker spent inside protection hooks, summed. It sees costs far below what "
            "an interval can, and misses contention.",
        ),
        facts(
            [
                ("inside hooks", seconds(found.hooks_ns / 1e9)),
                ("protected slices that count", seconds(found.measured_ns / 1e9)),
                ("as slowdown", percent(found.slowdown, 4)),
                ("against δ", said[found.disagrees]),
            ]
        ),
    ]


def parity(view: View) -> list[Markup]:
    """Whether both arms trained the same weights."""
    if not view.measurement.parts:
        return [tag("p", "Not measured.")]
    rows = []
    for part in view.measurement.parts:
        sessions = part.parity.sessions
        numbers = tuple(str(sum(one is word for one in sessions)) for word in Same)
        rows.append((_PARTS[part.mode], *numbers))
    compared = any(one is not Same.NOT_COMPARABLE for part in view.measurement.parts for one in part.parity.sessions)
    return [
        tag(
            "p",
            "Both arms have to have done the same work. Compared are the SHA-256 digests of the trained weights "
            "after equally many steps.",
        ),
        table(
            ("Part", "Same weights", "Different", "Not comparable"), rows, caption="Process pairs by what they trained"
        ),
        tag(
            "p",
            "Not comparable: an arm did not end by itself, did another number of steps, or left no weights."
            + ("" if compared else " No pair could be compared, so this measurement does not show work parity."),
        ),
    ]


def lifecycle(view: View) -> list[Markup]:
    """The parts of F: the six of the receipts, and what else makes a protected run start later."""
    found = view.lifecycle
    if found is None or view.protected is None:
        return [
            tag(
                "p",
                "Not measured: no session has both arms' starts and a receipt of every step.",
            )
        ]
    notes = [note for note in view.protected.notes if note.lifecycle_us is not None]
    rows: list[tuple[Cell, ...]] = []
    for step in STEPS:
        times = [
            us / 1e6 for note in notes if note.lifecycle_us is not None and (us := note.lifecycle_us[step]) is not None
        ]
        spread = f"{seconds(min(times))} to {seconds(max(times))}" if len(times) > 1 else "one run"
        rows.append((_STEPS[step], seconds(found.steps_s[step]), spread))
    ends = (
        ""
        if found.interval is None
        else f"; 95 % interval {seconds(found.interval.low)} to {seconds(found.interval.high)}"
    )
    imports = [note.imports_us / 1e6 for note in notes if note.imports_us is not None]
    starts = [note.raw.start_ns / 1e9 for note in view.protected.notes if note.raw is not None]
    protected = [note.protected.start_ns / 1e9 for note in view.protected.notes if note.protected is not None]
    return [
        tag(
            "p",
            f"F = {seconds(found.seconds)}{ends}: the mean over {count(found.sessions, 'session')} of how much later "
            "the protected run was at its first step than the raw one, and of sealing its outputs and zeroizing. "
            f"{seconds(found.in_receipts_s)} of it are the steps below, by the receipts. The other "
            f"{seconds(found.start_s)} make it start later too: imports in the sandbox, the sandbox itself; that part, "
            "from the starts of both arms, is the owner's word.",
        ),
        table(("Step", "Median", "Fastest to slowest"), rows, caption="Lifecycle of the protected runs"),
        facts(
            [
                ("what else makes it start later, mean", seconds(found.start_s)),
                ("imports of the frameworks, protected", _median(imports)),
                ("launch to first step, raw", _median(starts)),
                ("launch to first step, protected", _median(protected)),
            ]
        ),
    ]


def _median(values: list[float]) -> str:
    if not values:
        return "not measured"
    return f"{seconds(sorted(values)[len(values) // 2])}, median of {len(values)}"


def attempts(view: View) -> list[Markup]:
    """Sessions, endings, and rules that could not be looked at."""
    found: list[Markup] = []
    for part in view.measurement.parts:
        counts = part.analysis.attempts
        endings = ", ".join(
            f"{number} × {ENDINGS.get(code, code.value)} ({code.value})" for code, number in counts.ended
        )
        blind = ", ".join(RULES[rule] for rule in counts.unobserved)
        unsteady = ", ".join(str(number) for number in part.analysis.unsteady)
        found += [
            tag("h3", _PARTS[part.mode]),
            facts(
                [
                    (
                        "sessions",
                        f"{counts.sessions_planned} planned, {counts.sessions_started} begun, "
                        f"{counts.sessions_completed} whole",
                    ),
                    ("broken off by", endings or "nothing"),
                    ("rules nobody could look at", blind or "none"),
                    ("sessions without a steady state", unsteady or "none"),
                    (
                        "largest CPU use of the waiting arm",
                        "not measured"
                        if part.analysis.parked is None
                        else percent(part.analysis.parked, sign=False) + " of a slice",
                    ),
                ]
            ),
        ]
    note = "A rule that nobody could look at did not pass: this machine has no means to see its cause."
    return [*(found or [tag("p", "No part was measured.")]), tag("p", note)]


def system(view: View) -> list[Markup]:
    return [
        facts(
            [
                (_NAMES.get(name, name.replace("_", " ")), _value(name, value))
                for name, value in view.measurement.system.items()
            ]
        )
    ]


def workload(view: View) -> list[Markup]:
    given = view.measurement.workload
    inner = given.get("facts")
    pairs = [(name, value) for name, value in given.items() if name != "facts"]
    pairs += list(inner.items()) if isinstance(inner, dict) else []
    return [
        facts([(_NAMES.get(name, plain(name).replace("_", " ")), _value(name, value)) for name, value in pairs]),
        tag("p", bound(view)),
    ]


def _value(name: str, value: Json) -> Cell:
    if value is None:
        return "none" if name == "gpu" else "not found out"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, dict):
        return ", ".join(f"{plain(key)} {_value(key, item)}" for key, item in sorted(value.items()))
    return tag("code", plain(value)) if name.endswith("_sha256") else plain(value)


def design(view: View) -> list[Markup]:
    """What was fixed before the first slice."""
    found: list[Markup] = []
    for part in view.measurement.parts:
        found += [tag("h3", _PARTS[part.mode]), facts(_design(part.design, part))]
    return found or [tag("p", "No part was measured.")]


def _design(of: Design, part: Part) -> list[tuple[str, Cell]]:
    shape = (
        f"{count(of.sessions, 'pair')} of legs of "
        + (duration((of.leg_ns or 0) / 1e9) if of.leg_ns else count(of.slice_steps or 0, "step"))
        if of.mode is Mode.SEQUENTIAL
        else (
            f"{count(of.sessions, 'session')} of {count(of.blocks_per_session, 'block')} of four slices of "
            f"{count(of.slice_steps or 0, 'step')}"
        )
    )
    return [
        ("plan", f"{of.level.value}: {shape}"),
        ("seed", tag("code", of.seed.hex())),
        ("digest of the design", tag("code", of.sha256.hex())),
        ("Merkle root of the slices", tag("code", tree(part.records).root().hex())),
        ("launch order", of.launch_order.value),
        ("margin", f"±{percent(of.margin, sign=False)} on the log ratio"),
        (
            "guard before a slice",
            f"{count(of.guard_steps, 'step')} and {seconds(of.guard_ns / 1e9)}" if of.guard_ns else "none",
        ),
        ("warm-up", _warmup(of)),
    ]


def _warmup(of: Design) -> str:
    least = duration(of.warmup.least_ns / 1e9)
    if of.mode is Mode.SEQUENTIAL:
        return f"at least {least} before each leg"
    return (
        f"at least {least}, until {of.warmup.window_blocks} blocks drift less than "
        f"{percent(of.warmup.drift_ppm / 1e6, 2, sign=False)} "
        f"without a step; cut and flagged after {duration(of.warmup.cap_ns / 1e9)}"
    )


def recompute(_: View) -> list[Markup]:
    steps = (
        "draws the schedule again from the seed, and refuses slices that are not in their place",
        "replays warm-ups and exclusions, and counts every attempt",
        "computes the numbers of the analysis from the slices, and compares",
        "checks the signed statement and the receipt of every protected run",
    )
    return [
        tag(
            "p",
            "Every number above follows from the files beside this page: ",
            tag("code", "design.json"),
            " and ",
            tag("code", "slices.jsonl"),
            " of each part, the notes and receipts of its sessions, and the phase slices. Do not believe this page; "
            "run:",
        ),
        tag("pre", tag("code", "glasshouse verify DIR")),
        tag("ul", *(tag("li", step) for step in steps)),
        tag("p", "This page and its pictures are not signed. The statement beside them is."),
    ]


def limits(view: View) -> list[Markup]:
    """What this cannot show (spec/overhead-artifact.md, the section of that name)."""
    quick = view.main is not None and view.main.analysis.result is not None and view.main.analysis.result.sessions == 1
    found = [
        "The seed could have been chosen among several after looking at results: whoever measures can measure again "
        "and publish the better run. The design's digest, given to someone else before the first slice, would close "
        "that.",
        "The times are those of this machine's clocks. Whoever controls the machine controls them; the signature "
        "says who vouches.",
        "The null run is raw against raw: rest, wake and relay of the protected arm are not in it, and a bias that "
        "they cause would not be seen there.",
        "One machine, one workload, one setting: another GPU or batch size has another cost.",
        "An arm that warms up for longer than the warm-up's window is seen at half its size there, because both "
        "arms are averaged.",
        "With one session, nothing beyond that process pair." + (" That is the case here." if quick else ""),
        "Published rows are others' figures, from other machines and single pairs. They stand beside ours for their "
        "spread, not as a ranking.",
    ]
    return [tag("ul", *(tag("li", words) for words in found))]


SECTIONS: tuple[tuple[str, str, Callable[[View], list[Markup]]], ...] = (
    ("sensitivity", "Sensitivity set", sensitivity),
    ("direct", "Direct accounting", direct),
    ("parity", "Work parity", parity),
    ("lifecycle", "Lifecycle", lifecycle),
    ("resources", "Resources by arm", resources),
    ("attempts-detail", "Attempts", attempts),
    ("system", "System", system),
    ("workload", "Workload", workload),
    ("design", "Design", design),
    ("recompute", "Compute it again", recompute),
    ("limits", "What this cannot show", limits),
)
