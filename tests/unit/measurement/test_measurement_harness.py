"""A harness starts two arms, waits, and writes down what came of it, whatever that was."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from glasshouse.errors import Code, RunError, UsageError
from glasshouse.jobs.define.jobfile import load
from glasshouse.jobs.owner.home import Home
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.policy import Assurance
from glasshouse_bench.artifact import Arm, Ended, Part
from glasshouse_bench.beside import Calibration
from glasshouse_bench.design import Design, Mode
from glasshouse_bench.harness import alone, arms, measure
from glasshouse_bench.harness import session as sessions
from glasshouse_bench.harness.arms import Left
from glasshouse_bench.harness.machine import Card, MemoryPeak, Sampler, clock, describe
from glasshouse_bench.harness.measure import _to_start_ns
from glasshouse_bench.harness.planning import Setting, Wish, plan, ready_ns, refuse_short
from glasshouse_bench.harness.session import run_session, warm_after_ns
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.harness.subject import builtin, owners
from simulators.sealed_design import MACHINE, design, note
from simulators.slot_clock import MS, SlotClock, train
from tools.waiting import wait_for

SHORT_NS = 300_000_000


class FakeArm:
    """An arm that ends by itself after a time, or when it is asked to, or not at all.

    Args:
        lasts_s: until it ends by itself.
        fails: with this code, when it starts or when it ends.
    """

    def __init__(
        self, lasts_s: float = 0.4, *, at_start: Code | None = None, code: Code | None = None, deaf: bool = False
    ) -> None:
        self._lasts_s, self._at_start, self._code, self._deaf = lasts_s, at_start, code, deaf
        self._over_s = 0.0
        self.asked = self.closed = 0
        self._spent = 0

    def start(self) -> None:
        if self._at_start is not None:
            raise RunError(self._at_start, "it does not start")
        self._over_s = time.monotonic() + self._lasts_s

    @property
    def alive(self) -> bool:
        return time.monotonic() < self._over_s

    def pinned(self) -> bool:
        return True

    def spent_ns(self) -> int | None:
        self._spent += 1_000
        return self._spent

    def stop(self) -> None:
        self.asked += 1
        if not self._deaf:
            self._over_s = 0.0

    def left(self, ended: Ended) -> Left:
        how = ended if self._code is None or ended is not Ended.COMPLETED else Ended.FAILED
        reason = "" if self._code is None else "it broke"
        return Left(arm=Arm(ended=how, code=self._code), record=b"steps", reason=reason)

    def close(self) -> None:
        self.closed += 1
        self._over_s = 0.0


@pytest.fixture
def part(tmp_path: Path) -> Part:
    return Part.begin(tmp_path, replace(design(sessions=3), length_ns=SHORT_NS))


def attempt(part: Part, raw: FakeArm, protected: FakeArm, stop: Stop | None = None) -> tuple[Arm, Arm, str]:
    with Stop() as mine:
        note, reason = run_session(
            part, part.attempted, lambda arm, _end: raw if arm == "R" else protected, ready_ns=10**8, stop=stop or mine
        )
    assert note == part.note(note.session)[0]
    return note.raw, note.protected, reason


def test_a_session_is_written_down_with_what_agent_and_watchdog_spent(part: Part) -> None:
    raw, protected, reason = attempt(part, FakeArm(), FakeArm())
    assert (raw.ended, protected.ended, reason) == (Ended.COMPLETED, Ended.COMPLETED, "")
    note, _ = part.note(0)
    assert note.background is not None
    assert note.background.spent_ns >= 1_000
    assert note.samples, "the machine was looked at once at least"


def test_when_one_arm_dies_the_other_is_ended_and_the_attempt_counts(part: Part) -> None:
    lives = FakeArm(lasts_s=60)
    slow = Part(part.folder, replace(part.design, length_ns=30 * 10**9))
    raw, protected, reason = attempt(slow, lives, FakeArm(lasts_s=0.1, code=Code.WORKER_KILLED))
    assert (raw.ended, protected.ended) == (Ended.KILLED, Ended.FAILED)
    assert protected.code is Code.WORKER_KILLED
    assert lives.asked == 1
    assert "it broke" in reason
    assert part.attempted == 1


def test_an_arm_that_does_not_start_is_written_down_and_the_other_is_ended(part: Part) -> None:
    lives = FakeArm(lasts_s=60)
    raw, protected, reason = attempt(part, lives, FakeArm(at_start=Code.POLICY_IMPOSSIBLE))
    assert (raw.ended, protected.ended) == (Ended.KILLED, Ended.NOT_STARTED)
    assert protected.code is Code.POLICY_IMPOSSIBLE
    assert "does not start" in reason
    assert lives.closed


def test_an_interrupt_ends_both_arms_and_is_kept(part: Part) -> None:
    with Stop() as stop:
        stop.ask()
        raw, protected, _ = attempt(part, FakeArm(lasts_s=60), FakeArm(lasts_s=60), stop)
    assert (raw.ended, protected.ended) == (Ended.INTERRUPTED, Ended.INTERRUPTED)


@pytest.mark.parametrize("interrupted", [True, False])
def test_the_record_of_an_arm_that_did_not_complete_is_not_kept(part: Part, interrupted: bool) -> None:
    """Its receipt shows a run that was stopped or failed: a verifier refuses the record of such a run's steps."""
    with Stop() as stop:
        if interrupted:
            stop.ask()
        lasts_s = 60 if interrupted else 0.4
        raw, protected, _ = attempt(part, FakeArm(lasts_s), FakeArm(lasts_s, code=Code.WORKER_FAILED), stop)
    assert protected.record_sha256 is None
    assert (raw.record_sha256 is None) is interrupted


def test_an_arm_that_goes_on_behind_its_schedule_is_ended(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "END_S", 0.2)
    monkeypatch.setattr(sessions, "LATE_NS", 0)
    deaf = FakeArm(lasts_s=60, deaf=True)
    raw, protected, _ = attempt(part, FakeArm(), deaf)
    assert raw.ended is Ended.COMPLETED
    assert protected.ended is Ended.KILLED
    assert (deaf.asked, deaf.closed > 1) == (1, True)


def test_whole_processes_run_one_after_the_other(tmp_path: Path) -> None:
    whole = replace(design(Mode.ALTERNATING, sessions=10), length_ns=SHORT_NS)
    part = Part.begin(tmp_path, whole)
    order: list[str] = []

    class Telling(FakeArm):
        def __init__(self, arm: str) -> None:
            super().__init__(0.1)
            self.arm = arm

        def start(self) -> None:
            order.append(self.arm)
            super().start()

    ends: list[int] = []

    def make(arm: str, end_ns: int) -> Telling:
        ends.append(end_ns - clock().monotonic_ns)
        return Telling(arm)

    with Stop() as stop:
        for number in range(2):
            run_session(part, number, make, ready_ns=10**8, stop=stop)
    assert order == [arm for number in range(2) for arm in ("RP" if whole.raw_first(number) else "PR")]
    each_ns = SHORT_NS + 100_000_000
    assert all(each_ns - 90_000_000 < left_ns <= each_ns for left_ns in ends), "a script ends by its own schedule"


def calibration(step_ms: float = 5.0, *, start_s: float = 3.0, device: bool = False) -> Calibration:
    steps = tuple(round(step_ms * 1e6 * (1 + (number % 7) / 100)) for number in range(200))
    return Calibration(
        raw_ns=steps, protected_ns=steps, start_us=round(start_s * 1e6), between_ppm=18_000, device=device
    )


def wish(seconds: float = 600.0, *modes: Mode) -> Wish:
    return Wish(modes=modes or (Mode.INTERLEAVED, Mode.NULL), seconds=seconds, margin=0.01)


def planned(tmp_path: Path, asked: Wish, found: Calibration) -> list[Design]:
    subject = builtin("mlp", tmp_path)
    owner = SigningKey(bytes(32))
    return plan(
        asked, found, Setting(subject=subject, subject_sha256=subject.sha256, owner=owner, cpus=(1,), machine=MACHINE)
    )


def test_ten_minutes_become_many_short_sessions_and_a_null_of_half_as_many(tmp_path: Path) -> None:
    main, null = planned(tmp_path, wish(), calibration())
    assert (main.mode, null.mode) == (Mode.INTERLEAVED, Mode.NULL)
    assert main.sessions > 30
    assert null.sessions == main.sessions // 2
    assert main.sessions * (6 + main.length_ns / 1e9) < 600
    assert (main.assurance, null.assurance) == (Assurance.SOFTWARE, None)
    assert main.seed != null.seed
    assert main.calibration_sha256 == calibration().sha256
    assert (main.margin_ppm, main.widening_ppm) == (10_000, 1_000_000)


def test_a_noisy_job_still_has_the_sessions_that_an_interval_needs(tmp_path: Path) -> None:
    noisy = replace(calibration(), raw_ns=tuple([4_000_000] * 190 + [400_000_000] * 10))
    main, _ = planned(tmp_path, wish(), noisy)
    assert main.sessions >= 20


@pytest.mark.parametrize("seconds", [0, 10, 41])
def test_a_time_in_which_nothing_has_room_is_refused_at_once(seconds: float) -> None:
    with pytest.raises(UsageError, match="too short"):
        refuse_short(wish(seconds))


def test_a_time_too_short_for_this_job_says_how_long_it_takes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="6 sessions of 34 s") as refused:
        planned(tmp_path, wish(120), calibration(start_s=20))
    assert refused.value.hint == "ask for --time 5m"


@pytest.mark.parametrize("start_us", [3_000_000, 3_000_001, 2_718_281])
def test_a_time_that_holds_one_pair_exactly_is_not_too_short(tmp_path: Path, start_us: int) -> None:
    [pair] = planned(tmp_path, wish(100, Mode.SEQUENTIAL), replace(calibration(), start_us=start_us))
    assert pair.sessions == 1


def test_steps_that_no_slot_can_hold_are_sent_to_whole_processes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no session holds") as refused:
        planned(tmp_path, wish(), calibration(2_000))
    assert "--mode alternating" in refused.value.hint
    [whole] = planned(tmp_path, wish(3_600, Mode.ALTERNATING), calibration(2_000))
    assert whole.sessions >= 10


@pytest.mark.parametrize(("mode", "seconds"), [(Mode.SEQUENTIAL, 60), (Mode.ALTERNATING, 420)])
def test_whole_processes_train_for_as_long_as_a_session_needs_to_count(
    tmp_path: Path, mode: Mode, seconds: float
) -> None:
    """Five seconds of each are not counted, and half of its time has to be."""
    [whole] = planned(tmp_path, wish(seconds, mode), calibration())
    assert whole.length_ns - 5 * 10**9 > whole.length_ns // 2
    with pytest.raises(UsageError, match="too short for this job"):
        planned(tmp_path, wish(seconds / 2.5, mode), calibration())


MINE = {
    "script": ('"train.py" = "train.py"', 'script = "train.py"\nmax_outputs = 2'),
    "mlp": ('"notes.txt" = "notes.txt"', "synthetic_rows = 64\nsynthetic_features = 4\nepochs = 3"),
    "lora": ('"train.jsonl" = "train.jsonl"', 'data = "train.jsonl"\nmodel = "config:qwen2-tiny"\nmax_steps = 7'),
}


def mine(folder: Path, workload: str, *, policy: str = "", params: str = "") -> Path:
    """Write a job of its owner's, with a target where the workload has one."""
    for name in ("train.py", "notes.txt", "train.jsonl"):
        (folder / name).write_text("")
    inputs, own = MINE[workload]
    path = folder / "job.toml"
    path.write_text(
        f'name = "mine"\nworkload = "{workload}"\n[inputs]\n{inputs}\n[params]\n{own}\n{params}\n'
        f'[policy]\nassurance = "software"\nprofile = "standard"\n{policy}\n'
    )
    return path


@pytest.mark.parametrize(("workload", "target"), [("mlp", "epochs"), ("lora", "max_steps"), ("mlp", "seconds")])
def test_your_own_job_loses_its_target_and_goes_on_until_its_schedule_ends(
    tmp_path: Path, workload: str, target: str
) -> None:
    path = mine(tmp_path, workload)
    if target == "seconds":
        path.write_text(path.read_text().replace("epochs = 3", "seconds = 2.5"))
    assert target in load(path).params
    subject = owners(path, workload, device="cpu")
    assert not {"epochs", "max_steps", "seconds"} & set(subject.job.params)
    assert subject.job.params["device"] == "cpu"
    plan = replace(design(), machine=MACHINE).plan(0, "R", end_ns=10**12)
    assert subject.planned(plan).params["slots"] == plan.to_json()
    assert subject.planned(plan, **{target: "2.0" if target == "seconds" else 5}).params[target]


def test_your_own_script_may_return_one_output_more(tmp_path: Path) -> None:
    path = mine(tmp_path, "script")
    subject = owners(path, "script")
    assert subject.job.params["max_outputs"] == 3
    with pytest.raises(UsageError, match="not mlp"):
        owners(path, "mlp")


def test_a_policy_for_shorter_runs_has_room_for_a_session(tmp_path: Path) -> None:
    """The owner's deployments of a measurement last a day at least; what the lease costs is measured as it is."""
    path = mine(tmp_path, "mlp", policy='max_duration = "5s"\nlease = "30s"')
    deployment = owners(path, "mlp").job.deployment
    assert (deployment.max_duration_s, deployment.lease_s, deployment.releases) == (24 * 3600, 30, 1)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (Code.LEASE_LOST, "give the job a longer lease under [policy]"),
        (Code.DURATION_EXCEEDED, "give the job a longer max_duration under [policy]"),
        (Code.WORKER_FAILED, ""),
    ],
)
def test_a_run_that_its_policy_ended_in_the_calibration_says_which_key_to_lengthen(code: Code, hint: str) -> None:
    with pytest.raises(RunError, match="the job does not run: it was ended") as refused:
        alone._record(Left(arm=Arm(ended=Ended.FAILED, code=code), reason="it was ended"))
    assert refused.value.code is code
    assert refused.value.hint.endswith(hint)
    assert bool(refused.value.hint) is bool(hint)


def test_a_lease_that_is_lost_in_a_session_is_a_lost_attempt_and_says_why(part: Part) -> None:
    raw, protected, reason = attempt(part, FakeArm(), FakeArm(code=Code.LEASE_LOST))
    assert (protected.ended, protected.code, reason) == (Ended.FAILED, Code.LEASE_LOST, "it broke")
    assert raw.ended is Ended.COMPLETED
    assert (part.attempted, protected.record_sha256) == (1, None)


def test_what_a_raw_worker_prints_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, _plain: object, *, log: IO[bytes], **_more: object) -> None:
            self.run_id = "run"
            self.worker = SimpleNamespace(pid=os.getpid(), terminate=lambda: None, wait=lambda _seconds: 0)
            log.write(b"a line of data\n")

        def close(self) -> None: ...

    monkeypatch.setattr(arms, "RawProcess", Process)
    home = Home(path=tmp_path / "home").make()
    raw = arms.RawArm(builtin("mlp", tmp_path).plain(design().plan(0, "R", end_ns=1)), home=home)
    before = os.umask(0)
    try:
        raw.start()
    finally:
        os.umask(before)
        raw.close()
    [log] = home.path.glob("raw-*.log")
    assert (stat.S_IMODE(log.stat().st_mode), log.read_bytes()) == (0o600, b"a line of data\n")


def test_a_worker_that_has_just_exited_is_not_counted_as_what_runs_beside_it() -> None:
    """It has no command line any more, and still all of its processor time, until it is waited for."""
    script = "import sys, time; sys.stdin.read()"
    worker = [sys.executable, "-c", script, "--workload"]
    with subprocess.Popen(worker, stdin=subprocess.PIPE) as process:
        wait_for(lambda: b"--workload" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        assert arms._is_worker(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        wait_for(lambda: not Path(f"/proc/{process.pid}/cmdline").read_bytes())
        assert arms.processor_ns(process.pid)
        assert arms._is_worker(process.pid)
    assert not arms._is_worker(os.getpid())


class FakeCard(Card):
    """A GPU of 24 GiB, of which an arm that runs takes some."""

    def __init__(self, *, silent: bool = False) -> None:
        super().__init__(None, None)
        self.taken_gib, self.silent = 1.0, silent

    def free_bytes(self) -> int | None:
        return None if self.silent else round((24 - self.taken_gib) * 2**30)

    def run(self, *, gib: float) -> MemoryPeak:
        """Return what was seen of an arm that took so much at its peak, and has ended."""
        seen = MemoryPeak(self)
        for taken in (0, gib, gib / 2, 0):
            self.taken_gib = 1 + taken
            seen.look()
        return seen


@pytest.mark.parametrize(("gib", "fits"), [(0.5, True), (10.5, True), (10.6, False), (20, False)])
def test_two_arms_fit_on_a_gpu_if_twice_the_peak_of_one_does(gib: float, fits: bool) -> None:
    assert FakeCard().run(gib=gib).fits_twice is fits


def test_arms_that_do_not_fit_at_once_are_sent_to_whole_processes() -> None:
    crowded = FakeCard().run(gib=12)
    with pytest.raises(UsageError, match=r"one arm alone takes 12\.0 GiB") as refused:
        measure._refuse_crowded(crowded, wish())
    assert "--mode alternating" in refused.value.hint
    measure._refuse_crowded(crowded, wish(600, Mode.ALTERNATING))
    measure._refuse_crowded(FakeCard().run(gib=2), wish())


def test_memory_that_cannot_be_looked_at_is_neither_enough_nor_too_little() -> None:
    assert FakeCard(silent=True).run(gib=20).fits_twice is None
    assert MemoryPeak(None).fits_twice is None


def test_the_machine_is_described_without_its_name() -> None:
    found = describe(None)
    assert found.cpus
    assert found.memory_bytes
    with Sampler(clock().monotonic_ns) as sampler:
        pass
    [sample] = sampler.samples
    assert sample.steal_ppm is None or 0 <= sample.steal_ppm <= 10**6


def test_a_session_gives_its_arms_the_time_to_start_and_to_warm_up_and_never_more_than_twice_the_start(
    tmp_path: Path,
) -> None:
    [slow, _] = planned(tmp_path, wish(), calibration(step_ms=25.0, start_s=9.0))
    # Twenty steps of warm-up, four a slot, in each second slot; a quarter more than an arm that starts alone; a second.
    assert (slow.warmup_steps, slow.steps + slow.uncounted) == (20, 4)
    assert ready_ns(slow, calibration(step_ms=25.0, start_s=9.0)) == 11_250_000_000 + 10 * slow.slot_ns + 10**9
    [quick, _] = planned(tmp_path, wish(), calibration(start_s=1.0))
    assert ready_ns(quick, calibration(start_s=1.0)) == 2 * 10**9
    [whole] = planned(tmp_path, wish(600, Mode.ALTERNATING), calibration())
    assert ready_ns(whole, calibration()) == 6 * 10**9


def test_a_later_arm_gives_the_next_sessions_more_time_but_one_long_stall_does_not(tmp_path: Path) -> None:
    part = Part.begin(tmp_path, design(sessions=3, length_ns=800_000_000))
    seconds, began = 10**9, note(0).began.monotonic_ns
    plans = [part.design.plan(0, arm, end_ns=began + 9 * seconds) for arm in "RP"]
    late = [train(plans[0], SlotClock(began + seconds), itertools.repeat(10 * MS)).record()]
    late.append(train(plans[1], SlotClock(began + 5 * seconds), itertools.repeat(10 * MS)).record())
    part.attempt(note(0))
    kept = part.keep(note(0), raw=late[0], protected=late[1])
    assert 6 * seconds < warm_after_ns(part, kept) < 8 * seconds
    part.attempt(note(1))
    assert warm_after_ns(part, part.keep(note(1), raw=late[0])) == 0, "an arm that left nothing shows nothing"
    found = calibration(start_s=2.0)
    expected = ready_ns(part.design, found)
    assert _to_start_ns(part.design, found, 0) == expected
    assert _to_start_ns(part.design, found, expected + 1) == expected + 1
    assert _to_start_ns(part.design, found, 60 * seconds) == 2 * expected
