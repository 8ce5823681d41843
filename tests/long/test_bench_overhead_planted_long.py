"""The harness on trial: an overhead that was planted is found, and where there is none, none is.

``pytest -m long --junitxml=FILE`` keeps every interval as a property of its test.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glasshouse.bench.harness import machine
from glasshouse.bench.harness.engine import Engine, Pieces
from glasshouse.bench.harness.plan import calibrate
from glasshouse.bench.harness.stage import Stage
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.harness.subject import owners
from glasshouse.bench.overhead.analysis import Analysis, analyse
from glasshouse.bench.overhead.design import Arm, Design, Mode, Phase, WarmupRule
from glasshouse.bench.overhead.slices import Slice
from glasshouse.jobs.identity import Identity
from simulators.paced_arms import MemoryStore, Quiet

pytestmark = pytest.mark.long

# Two milliseconds a step, and a process that is there at once: what is tried here is the harness.
SCRIPT = """\
from glasshouse import task

job, step, x = task.current(), 0, 1
while not job.should_stop():
    for _ in range(15000):
        x = x * 1103515245 + 12345 & 0x7fffffff
    step += 1
    job.progress(step)
"""
JOB = """\
workload = "script"
[inputs]
"train.py" = "train.py"
[params]
script = "train.py"
[policy]
assurance = "software"
profile = "standard"
"""


class Trial:
    """Raw workers in both places, the second of them slowed down on purpose."""

    def __init__(self, stage: Stage, stop: Stop) -> None:
        self._stage, self._stop = stage, stop
        arm = stage.raw()
        try:
            self._step_ns = calibrate(arm).step_ns
        finally:
            arm.close()

    def run(self, number: int, planted: float, *, mode: Mode, sessions: int, blocks: int) -> tuple[Analysis, float]:
        """Return what was found, and the log ratio that is true of it."""
        design = Design(
            mode=mode,
            seed=hashlib.sha256(b"trial %d" % number).digest(),
            sessions=sessions,
            blocks_per_session=blocks,
            slice_steps=max(1, round(3e8 / self._step_ns)),
            warmup=WarmupRule(least_ns=2_000_000_000, cap_ns=15_000_000_000, window_blocks=5),
        )
        store, burn_ns = MemoryStore(), round(planted * self._step_ns)
        engine = Engine(
            Pieces(
                design=design,
                store=store,
                arms=lambda _arm: self._stage.raw(),
                look=lambda: machine.look(None),
                watch=Quiet(),
                stop=self._stop,
                guard_steps=math.ceil(3.5e8 / self._step_ns),
                burn_ns=burn_ns,
            )
        )
        for session in range(sessions):
            engine.session(session)
        raw = [
            one.duration_ns / one.steps
            for one in store.records
            if isinstance(one, Slice) and one.arm is Arm.RAW and one.phase is Phase.MEASURED
        ]
        # The same time is burnt in every step, however fast the machine was meanwhile.
        return analyse(design, store.records), math.log1p(burn_ns / statistics.median(raw))


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    folder: Path = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.toml").write_text(JOB)
    subject = owners(folder / "job.toml", "script")
    with Stop() as stop, Stage(lambda _folder: subject, identity=Identity.generate(), stop=stop) as stage:
        yield Trial(stage, stop)


@pytest.mark.parametrize("planted", [0.0, 0.005, 0.02])
def test_what_was_planted_is_found(
    trial: Trial, planted: float, record_property: Callable[[str, object], None]
) -> None:
    found, truth = trial.run(round(planted * 1000), planted, mode=Mode.INTERLEAVED, sessions=6, blocks=8)
    assert found.attempts.sessions_completed == 6
    assert found.result is not None
    record_property("planted", json.dumps({"truth": truth} | found.result.to_json()))
    # 99 %: a suite that fails one time in twenty is soon believed no more.
    interval = found.result.interval(0.99)
    assert interval is not None
    assert interval.holds(truth), f"{truth} is not in {interval}"


def test_where_nothing_differs_nothing_is_found(trial: Trial, record_property: Callable[[str, object], None]) -> None:
    missed = []
    for number in range(20):
        found, _ = trial.run(100 + number, 0.0, mode=Mode.NULL, sessions=3, blocks=3)
        assert found.result is not None
        record_property("null", json.dumps(found.result.to_json()))
        interval = found.result.interval()
        assert interval is not None
        if not interval.holds(0.0):
            missed.append(interval)
    assert len(missed) <= 2, missed
