"""One arm alone, in every slot: how long its steps are, and whether both arms make the same weights.

Law: nothing that is found here enters an estimate.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.wire.canonical import Json
from glasshouse.workloads.measurement.slots import ALONE, Plan
from glasshouse_bench.artifact import Ended
from glasshouse_bench.beside import Calibration, Parity
from glasshouse_bench.harness.arms import Left, Worker
from glasshouse_bench.harness.machine import clock
from glasshouse_bench.harness.session import lifecycle_of, read
from glasshouse_bench.harness.stage import Stage
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.records import Record

__all__ = ["BETWEEN", "PARITY_STEPS", "calibrated", "parity"]

RAW_S = 10.0
PARITY_STEPS = 20
# The deviation of a session's contrast that no length of it takes away: 1.4 to 2.3 % for two processes started afresh.
BETWEEN = 0.018
_PATIENCE_S = 1800.0  # a model of seven thousand million parameters is made, or read, before the first step
_MOST_STEPS = 65_536
_HINTS = {
    Code.DURATION_EXCEEDED: "its deployment allows no session: give the job a longer max_duration under [policy]",
    Code.LEASE_LOST: "its broker was not reached for a whole lease: give the job a longer lease under [policy]",
}
_TARGETS = {"mlp": "epochs", "lora": "max_steps"}


def calibrated(stage: Stage, stop: Stop, *, device: bool, look: Callable[[], None] = lambda: None) -> Calibration:
    """Time the steps of both arms, one after the other.

    Args:
        device: whether the steps run on a GPU.
        look: called about twenty times a second while an arm runs.

    Raises:
        UsageError: the job takes no step.
        RunError: it does not run, or `interrupted`.
    """
    raw, raw_start_us = _run(stage, stage.raw, stop, stage.subject.timed(RAW_S), look)
    protected, start_us = _run(stage, stage.protected, stop, stage.subject.timed(RAW_S), look)
    return Calibration(
        raw_ns=_steps(raw),
        protected_ns=_steps(protected),
        start_us=max(raw_start_us, start_us),
        between_ppm=round(BETWEEN * 1e6),
        device=device,
        lifecycle=lifecycle_of(raw, protected),
        deployment=protected.arm.deployment,
    )


def parity(stage: Stage, stop: Stop) -> Parity | None:
    """Train both arms for the same number of steps, and return whether their weights are equal.

    Returns:
        None for a job that need not be equal (it is not deterministic) or has no such target or no weights.
    """
    target, params = _TARGETS.get(stage.subject.job.workload), stage.subject.job.params
    if target is None or params.get("deterministic") is not True:
        return None
    raw, _ = _run(stage, stage.raw, stop, {target: PARITY_STEPS})
    protected, _ = _run(stage, stage.protected, stop, {target: PARITY_STEPS})
    if not raw.weights or not protected.weights or protected.arm.deployment is None:
        return None
    # A bare digest of weights that follow from a seed could be confirmed by anyone.
    key = secrets.token_bytes(32)
    return Parity(
        steps=PARITY_STEPS,
        raw=_committed(key, raw.weights),
        protected=_committed(key, protected.weights),
        deployment=protected.arm.deployment,
    )


def _run(
    stage: Stage,
    make: Callable[..., Worker],
    stop: Stop,
    targets: Mapping[str, Json],
    look: Callable[[], None] = lambda: None,
) -> tuple[Left, int]:
    """Run one arm to its target; return what it left, and the microseconds to its first step.

    A job without a target is asked to end after thrice the time of a calibration.
    """
    began_ns = clock().monotonic_ns
    alone = Plan(seed=bytes(32), arm=ALONE, slot_ns=1_000_000, steps=64, uncounted=1, warmup_steps=0, end_ns=2**61)
    worker = make(alone, **targets)
    try:
        worker.start()
        stops_s = time.monotonic() + (_PATIENCE_S if targets else 3 * RAW_S)
        while worker.alive and not stop.asked and time.monotonic() < stops_s:
            look()
            time.sleep(0.05)
        if worker.alive:
            worker.stop()
        left = worker.left(Ended.INTERRUPTED if stop.asked else Ended.COMPLETED)
    finally:
        worker.close()
    if stop.asked:
        raise RunError(Code.INTERRUPTED, "the measurement was interrupted while an arm ran alone")
    return left, (int(_record(left).steps.begin[0]) - began_ns) // 1000


def _record(left: Left) -> Record:
    record = read(left)
    if record is None or (left.arm.code is not None and left.arm.code is not Code.INTERRUPTED):
        code = left.arm.code or Code.WORKER_FAILED
        raise RunError(code, f"the job does not run: {left.reason or 'it left no record'}", hint=_HINTS.get(code, ""))
    if not len(record.steps.begin):
        raise UsageError(
            Code.USAGE,
            "the job took no step",
            hint="no optimizer of PyTorch stepped: call task.progress once a step, from the thread that trains",
        )
    return record


def _steps(left: Left) -> tuple[int, ...]:
    steps = _record(left).steps
    lengths = steps.end - steps.begin
    warm = lengths[max(3, len(lengths) // 10) :] if len(lengths) > 30 else lengths
    return tuple(int(one) for one in warm[:_MOST_STEPS])


def _committed(key: bytes, weights: Mapping[str, bytes]) -> bytes:
    together = hashlib.sha256(b"".join(weights[name] for name in sorted(weights))).digest()
    return hmac.digest(key, together, "sha256")
