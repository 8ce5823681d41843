"""Throughput, latency and what each arm used, and whether host or GPU is the bound."""

from __future__ import annotations

from glasshouse.bench.overhead.design import Arm
from glasshouse.bench.overhead.phases import ArmPhases, Bound
from glasshouse.bench.report.html import Markup, table, tag
from glasshouse.bench.report.numbers import between, percent, step_time
from glasshouse.bench.report.view import View

__all__ = ["bound", "resources"]

_NO = "not measured"
_REASONS = {
    "no-device": "the work runs on the CPU",
    "host-waits": "the host waits for the GPU",
    "device-waits": "the GPU waits for the host",
    "not-observed": "nobody could look",
}


def resources(view: View) -> list[Markup]:
    """Return throughput, latency and resource use by arm, from the phase blocks."""
    found = view.measurement.phases
    if found is None:
        return [
            tag("p", "Not measured: CPU, memory and energy are sampled in phase blocks, which this measurement lacks.")
        ]
    arms = [found.arms.get(arm) for arm in Arm]
    rows = [
        ("throughput, steps per second", *(_NO if of is None else f"{of.steps_per_s:,.4g}" for of in arms)),
        ("latency of a step", *(_NO if of is None else _time(of.step_ns) for of in arms)),
        ("latency with stamps", *(_NO if of is None else _time(of.stamped_step_ns) for of in arms)),
        ("what the stamps change", *(_NO if of is None else _stamps(of) for of in arms)),
        ("CPU, busy cores", *(_NO if of is None or of.cpu_share is None else f"{of.cpu_share:.2f}" for of in arms)),
        ("memory, largest", *(_NO if of is None else _size(of.rss_bytes) for of in arms)),
        ("GPU memory, largest", *(_NO if of is None else _size(of.device_bytes) for of in arms)),
        ("energy per step", *(_NO if of is None or of.energy_mj is None else f"{of.energy_mj:,.3g} mJ" for of in arms)),
    ]
    return [
        table(("Of the worker", "Raw", "Protected"), rows, caption="Resources by arm, from phase blocks"),
        tag("p", "These come from blocks of their own and carry no claim about δ."),
    ]


def bound(view: View) -> str:
    """Say what limits the workload's speed."""
    found = view.measurement.phases
    if found is None or found.bound is Bound.UNKNOWN:
        return "Whether the GPU or the host limits the speed: not measured."
    share = "" if found.waiting is None else f" ({percent(found.waiting, 1, sign=False)} of the time it waits)"
    name = {Bound.HOST: "host", Bound.GPU: "GPU"}[found.bound]
    return f"The {name} limits the speed: {_REASONS.get(found.reason, found.reason)}{share}."


def _time(value_ns: float | None) -> str:
    return _NO if value_ns is None else step_time(value_ns)


def _stamps(of: ArmPhases) -> str:
    if of.perturbation is None:
        return _NO
    ends = "" if of.perturbation_interval is None else f" ({between(of.perturbation_interval, 2)})"
    return percent(of.perturbation, 2) + ends


def _size(value: int | None) -> str:
    return _NO if value is None else f"{value / 2**20:,.0f} MiB"
