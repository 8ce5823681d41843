"""A measurement goes on for its owner and by its design; what differs is named before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.owner_identity import Identity, OwnerPublic
from glasshouse.wire.crypto import SigningKey
from glasshouse_bench.artifact import Part
from glasshouse_bench.design import Mode, Planted
from glasshouse_bench.harness.planning import Wish
from glasshouse_bench.harness.subject import builtin, commitment
from simulators.instant_bench import Bench
from simulators.sealed_design import MACHINE

WISH = Wish(modes=[Mode.INTERLEAVED, Mode.NULL], seconds=600, margin=0.01)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path / "mine", tmp_path, monkeypatch)


def refused(bench: Bench, wish: Wish = WISH, **more: Any) -> UsageError:
    """Go on, and return the refusal: nothing may have been calibrated or attempted before it."""
    before = sorted(bench.folder.rglob("*")), len(bench.calibrations), len(bench.sessions)
    with pytest.raises(UsageError) as caught:
        bench.measure(wish, **more)
    assert (sorted(bench.folder.rglob("*")), len(bench.calibrations), len(bench.sessions)) == before
    assert "another folder" in caught.value.hint
    return caught.value


def test_the_same_command_goes_on_with_the_next_session(bench: Bench) -> None:
    bench.measure(WISH)
    designs = [Part.open(bench.folder, mode).design for mode in WISH.modes]
    bench.measure(WISH)
    assert len(bench.calibrations) == 1
    assert len(set(bench.sessions)) == len(bench.sessions) == 6
    assert [Part.open(bench.folder, mode).design for mode in WISH.modes] == designs


def test_the_folder_names_its_owner_from_its_first_session_on(bench: Bench) -> None:
    bench.measure(WISH, sessions=1)
    assert OwnerPublic.parse((bench.folder / "owner.pub").read_bytes()) == bench.owner.public


def test_another_owner_does_not_go_on(bench: Bench) -> None:
    bench.measure(WISH)
    other = Identity.generate()
    error = refused(bench, identity=other)
    assert error.code is Code.OWNER_UNKNOWN
    assert bench.owner.public.fingerprint in error.message
    assert other.public.fingerprint in error.message
    assert "--home" in error.hint


def test_what_is_another_owners_and_no_measurement_is_left_as_it_is(bench: Bench) -> None:
    """Such as their home, whose `owner.pub` is the only one that they have."""
    theirs = Identity.generate()
    bench.folder.mkdir()
    (bench.folder / "owner.pub").write_bytes(theirs.public.encode())
    assert theirs.public.fingerprint in refused(bench).message
    assert OwnerPublic.parse((bench.folder / "owner.pub").read_bytes()) == theirs.public


def test_a_folder_that_names_no_owner_is_no_ones_to_go_on_with(bench: Bench) -> None:
    bench.measure(WISH)
    (bench.folder / "owner.pub").unlink()
    assert refused(bench).code is Code.OWNER_UNKNOWN


OTHERS: dict[str, tuple[Wish, str]] = {
    "mode": (replace(WISH, modes=[Mode.SEQUENTIAL]), "it is interleaved and null, and sequential was asked for"),
    "fewer modes": (replace(WISH, modes=[Mode.INTERLEAVED]), "interleaved was asked for"),
    "margin": (replace(WISH, margin=0.05), "--margin in millionths was 10000 and is 50000"),
    "time": (replace(WISH, seconds=3600), "--time in seconds was 600 and is 3600"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_was_asked_for_is_what_was_begun(bench: Bench, other: str) -> None:
    bench.measure(WISH)
    wish, why = OTHERS[other]
    assert why in refused(bench, wish).message


def test_a_cost_that_is_planted_is_the_one_that_was(bench: Bench) -> None:
    planted = Wish(modes=[Mode.NULL], seconds=600, margin=0.01, planted=Planted(step_ppm=20_000, bunched_ns=0))
    bench.measure(planted)
    assert "what is planted" in refused(bench, replace(planted, planted=None)).message


def test_another_machine_or_other_processors_are_named(bench: Bench) -> None:
    bench.measure(WISH)
    bench.machine = replace(MACHINE, kernel="Linux 6.9 x86_64", torch=None)
    error = refused(bench)
    assert "machine.kernel was Linux 6.1 x86_64 and is Linux 6.9 x86_64" in error.message
    assert "machine.torch was 2.5.0 and is none" in error.message
    assert "on the same machine" in error.hint
    bench.machine = MACHINE
    assert "the processors that both arms may use was 1 and is 0" in refused(bench, cpus=(0,)).message


CHANGES = {
    "a parameter": lambda job: job.write_text(job.read_text().replace("width = 16", "width = 32")),
    "a file": lambda job: (job.parent / "notes.txt").write_text("other data\n"),
    "one file more": lambda job: job.write_text(job.read_text().replace("[params]", '"b.txt" = "notes.txt"\n[params]')),
    "how it is sealed": lambda job: job.write_text(job.read_text() + "[package]\nchunk_bytes = 65536\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_parameters_or_files_are_another_job(bench: Bench, change: str) -> None:
    bench.measure(WISH)
    CHANGES[change](bench.job)
    assert "the parameters or files of the job are others" in refused(bench).message


def test_another_name_workload_and_threads_are_named(bench: Bench, tmp_path: Path) -> None:
    bench.measure(WISH)
    lora = builtin("lora", tmp_path)
    message = refused(bench, subject=replace(lora, job=replace(lora.job, name="theirs"))).message
    assert "the workload was mlp and is lora" in message
    assert "the job's name was mine and is theirs" in message


def test_a_design_without_a_commitment_does_not_go_on(bench: Bench) -> None:
    """Absence is no agreement: its parameters cannot be compared."""
    bench.measure(WISH, sessions=1)
    for mode in WISH.modes:
        part = Part.open(bench.folder, mode)
        bare = replace(part.design, workload=replace(part.design.workload, commitment=None))
        (part.folder / "design.json").write_bytes(bare.encode())
    assert "the parameters or files of the job are others" in refused(bench).message


def test_a_calibration_that_was_exchanged_is_seen(bench: Bench) -> None:
    bench.measure(WISH)
    path = bench.folder / "calibration.json"
    path.write_bytes(replace(bench.calibrations[0], start_us=1).encode())
    assert "calibration.json is not the one" in refused(bench).message


@pytest.mark.parametrize(
    ("code", "reason"),
    [(Code.DISK_FULL, "it broke"), (Code.WORKER_FAILED, "OSError: [Errno 28] No space left on device | the end")],
)
def test_an_arm_without_room_ends_the_measurement_and_not_one_session_after_the_other(
    bench: Bench, code: Code, reason: str
) -> None:
    bench.fails, bench.reason = code, reason
    with pytest.raises(UsageError, match="an arm of session 0 had no room: ") as full:
        bench.measure(WISH, sessions=9)
    assert (full.value.code, len(bench.sessions)) == (Code.DISK_FULL, 1)
    assert f"goes on with what is complete: -o {bench.folder}" in full.value.hint
    bench.fails, bench.reason = Code.WORKER_FAILED, "ValueError: a bad file"
    bench.measure(WISH, sessions=2)
    assert len(set(bench.sessions)) == 3, "the attempt that was lost counts, and is not repeated"


def test_a_harness_that_was_stopped_between_two_designs_seals_the_missing_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Part.begin

    def stopped(folder: Path, design: Any) -> Part:
        if design.mode is Mode.NULL:
            raise UsageError(Code.DISK_FULL, "no room")
        return begin(folder, design)

    monkeypatch.setattr(Part, "begin", stopped)
    with pytest.raises(UsageError, match="no room"):
        bench.measure(WISH)
    monkeypatch.setattr(Part, "begin", begin)
    sealed = Part.open(bench.folder, Mode.INTERLEAVED).design
    bench.measure(WISH)
    assert {mode for mode, _ in bench.sessions} == set(WISH.modes)
    assert Part.open(bench.folder, Mode.INTERLEAVED).design == sealed
    assert len(bench.calibrations) == 1


def test_a_time_that_was_too_short_for_the_job_can_be_asked_for_again(bench: Bench) -> None:
    """The hint names a longer time, and the folder has no design yet: it begins anew there, also for another owner."""
    with pytest.raises(UsageError, match="too short for this job"):
        bench.measure(replace(WISH, seconds=50))
    bench.measure(WISH, identity=Identity.generate())
    assert len(bench.calibrations) == 2
    assert len(bench.sessions) == 3


def test_what_a_design_has_of_its_job_can_be_compared_by_its_owner_alone(tmp_path: Path) -> None:
    job, seed = builtin("mlp", tmp_path).sha256, bytes(32)
    owner = SigningKey(bytes(31) + b"\1")
    found = commitment(owner, seed, job)
    assert found == commitment(SigningKey(owner.seed()), seed, job), "nothing has to be kept"
    others = [
        commitment(SigningKey.generate(), seed, job),
        commitment(owner, bytes(31) + b"\1", job),
        commitment(owner, seed, bytes(32)),
    ]
    assert len({found, job, *others}) == 5
