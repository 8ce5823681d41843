"""A run on several machines on the owner's side: told together, blamed rightly, verified as one group."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.errors import Code, ExitCode, PlatformError, UsageError, VerificationError
from glasshouse.evidence.events import Event
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.processes import Interrupts, ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.results.collect import require_receipt
from glasshouse.jobs.supervise import attach, control, supervision
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.verify.conclusion import (
    INVALID,
    NO_RECEIPT,
    conclude_again,
    conclude_run,
    record_end,
)
from glasshouse.jobs.verify.documents import verify_file
from glasshouse.jobs.verify.publish import make_artifact
from glasshouse.jobs.verify.run_files import check_group
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.jobs.verify.verify_named import GroupVerdict, verify_group
from glasshouse.providers.protocol.order import Order
from glasshouse.wire.states import Outcome
from simulators.group_world import MachineWorld, settle_group

NOBODY = ProcessName(pid=2**22 - 1, started=1)
REFUSED = {"outcome": Outcome.REFUSED, "attested": False, "reach": "measured"}
Step = Callable[[], int | None]


@dataclass
class Played:
    """A machine that plays a story: each step is done at one `wait`; an interrupt ends it as it says."""

    story: list[Step]
    on_interrupt: Step | None = None
    interrupts: int = 0
    killed: bool = False
    pid: int = NOBODY.pid
    problem: str = ""

    def wait(self, timeout_s: float) -> int | None:
        return self.story.pop(0)() if self.story else None

    def interrupt(self) -> None:
        self.interrupts += 1
        if self.on_interrupt is not None:
            self.story = [self.on_interrupt]

    def kill(self) -> None:
        self.killed = True
        self.story = [lambda: -9]

    def connect(self) -> None:
        pass

    def remove(self, package: str | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def upload(self, package: Path, _on_progress: object) -> str:
        return str(package)

    def start(self, order: Order, launch: bytes, *, check: Callable[[], None]) -> int:
        self.started = order, launch
        return self.pid


@dataclass
class Place:
    machines: list[Played]
    folders: list[Path] = field(default_factory=list)
    name: str = "played"
    container_source: str = "minted"

    def addresses(self, machines: int) -> tuple[str, ...]:
        return tuple(f"10.0.0.{machine}:4000" for machine in range(machines))

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> Played:
        self.folders.append(folder)
        return self.machines[len(self.folders) - 1]


@dataclass
class Watching:
    events: list[Event] = field(default_factory=list)
    ended: list[tuple[int, Code | None, bool]] = field(default_factory=list)
    stops: int = 0

    def away(self, machine: int, problem: str) -> None:
        pass

    def event(self, event: Event, seen: Seen) -> None:
        self.events.append(event)

    def tick(self, seen: Seen) -> None:
        pass

    def stopping(self, times: int) -> None:
        self.stops += 1

    def machine(self, machine: int, code: Code | None, *, completed: bool) -> None:
        self.ended.append((machine, code, completed))


class Client(OwnerClient):
    def __init__(self) -> None:
        self.told: list[tuple[bytes, int, Code]] = []

    def refuse_group(self, group_id: bytes, *, machine: int, code: Code) -> dict[str, object]:  # type: ignore[override]
        self.told.append((group_id, machine, code))
        return {}


class Gate(Embedded):
    """A broker that only remembers what it was told of groups."""

    def __init__(self, home: object) -> None:
        super().__init__(home)  # type: ignore[arg-type]
        self.asked = Client()

    @property
    def serving(self) -> object:  # type: ignore[override]
        return self

    def client(self) -> Client:
        return self.asked

    def give_back(self) -> bool:
        return True


@dataclass
class Run:
    """A run on several machines, and what was seen of it."""

    folder: RunFolder
    worlds: list[MachineWorld]
    folders: list[RunFolder]
    watcher: Watching = field(default_factory=Watching)

    @classmethod
    def settle(cls, root: Path, machines: int = 2) -> Run:
        return cls(*settle_group(root, machines))

    def tells(self, machine: int, exit_code: int = 0, **story: object) -> Step:
        """The step in which a machine ends with all its files."""

        def step() -> int:
            self.tell(machine, **story)
            return exit_code

        return step

    def tell(self, machine: int, **story: object) -> None:
        from glasshouse.wire.states import State

        reach = story.pop("reach", "sealed")
        run = self.worlds[machine].run(**{**story, "reach": State(str(reach))})  # type: ignore[arg-type]
        self.worlds[machine].tell(self.folders[machine], run)

    def supervise(self, *machines: Played, interrupts: Interrupts | None = None) -> supervision.Ended:
        self.place, self.broker = Place(list(machines)), Gate(self.worlds[0].home)
        return supervision.supervise(
            self.folder,
            b"launch 0",
            home=self.worlds[0].home,
            place=lambda _name: self.place,
            broker=self.broker,
            watcher=self.watcher,
            interrupts=interrupts or Interrupts(),
            others=[(folder, b"launch %d" % machine) for machine, folder in enumerate(self.folders[1:], start=1)],
        )

    def verify(self) -> GroupVerdict:
        owner = read_public(self.worlds[0].home.owner_public).signing
        first = verify_file(self.folder.receipt, owner=owner)
        assert isinstance(first, Verdict)
        return verify_group(self.folder, first, owner=owner)


def nothing(times: int) -> list[Step]:
    return [lambda: None for _ in range(times)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.settle(tmp_path)


def outcomes(run: Run) -> list[tuple[str | None, str | None]]:
    return [(record.outcome, record.code) for record in (folder.load() for folder in run.folders)]


def test_all_machines_complete_and_the_run_has(run: Run) -> None:
    ended = run.supervise(Played([*nothing(3), run.tells(0)]), Played([*nothing(1), run.tells(1)]))
    assert (ended.conclusion.outcome, ended.conclusion.exit_code) == (Outcome.COMPLETED, ExitCode.DONE)
    assert ended.conclusion.blamed is None
    orders, launches = zip(*(machine.started for machine in run.place.machines), strict=True)
    assert launches == (b"launch 0", b"launch 1")
    assert run.place.folders == [folder.path for folder in run.folders]
    assert [order.ranks for order in orders] == [2, 2]
    assert {order.peers for order in orders} == {("10.0.0.0:4000", "10.0.0.1:4000")}
    assert run.watcher.ended == [(1, None, True), (0, None, True)]
    assert {event.run_id for event in run.watcher.events if hasattr(event, "run_id")} <= {run.folder.run_id}
    assert run.verify().status is Status.GOOD
    assert run.broker.asked.told == []


def test_progress_is_that_of_machine_0(run: Run) -> None:
    ended = run.supervise(Played([run.tells(0)]), Played([run.tells(1)]))
    assert len(run.watcher.events) == len(run.folder.events.read_bytes().splitlines())
    assert ended.seen.work is not None
    assert run.folder.load().progress is not None


@pytest.mark.parametrize(("total", "shown"), [(72, 72), (3, None), (None, None)])
def test_a_run_that_has_ended_did_what_its_receipt_counts(run: Run, total: int | None, shown: int | None) -> None:
    # The last steps came within a second of the last report.
    conclusion = run.supervise(Played([run.tells(0)]), Played([run.tells(1)])).conclusion
    reported = {"unit": "step", "done": 1, "total": total, "elapsed_us": 9, "loss": "9.5"}
    assert conclusion.receipt is not None
    assert conclusion.receipt.work is not None
    assert conclusion.receipt.loss is not None
    record = record_end(run.folder, conclusion, reported)
    done, final = conclusion.receipt.work.done, conclusion.receipt.loss.final
    assert done > 3
    assert record.progress == reported | {"done": done, "total": shown, "loss": final}


def test_a_refused_machine_ends_the_job_everywhere_with_its_reason(run: Run) -> None:
    waiting = Played([*nothing(4), run.tells(0, 3, **REFUSED, code=Code.RANK_REFUSED)])
    refused = Played([*nothing(1), run.tells(1, 3, **REFUSED, code=Code.HARDENING_MISSING)])
    ended = run.supervise(waiting, refused)
    conclusion = ended.conclusion
    assert (conclusion.outcome, conclusion.code, conclusion.blamed) == (Outcome.REFUSED, Code.HARDENING_MISSING, 1)
    assert conclusion.exit_code is ExitCode.REFUSED
    group = run.worlds[1].group
    assert group is not None
    assert run.broker.asked.told == [(group.id, 1, Code.HARDENING_MISSING)], "those that wait are refused at once"
    assert run.watcher.ended == [(1, Code.HARDENING_MISSING, False), (0, Code.RANK_REFUSED, False)]
    assert outcomes(run) == [("refused", "hardening-missing"), ("refused", "hardening-missing")]
    assert run.folder.load().blamed == 1


def test_the_one_to_blame_is_found_whoever_ends_first(run: Run) -> None:
    """The gate refused machine 1; machine 0 asked a moment later and was gone first."""
    first = Played([run.tells(0, 3, **REFUSED, code=Code.RANK_REFUSED)])
    second = Played([*nothing(3), run.tells(1, 3, **REFUSED, code=Code.MEASUREMENT_UNKNOWN)])
    conclusion = run.supervise(first, second).conclusion
    assert (conclusion.code, conclusion.blamed) == (Code.MEASUREMENT_UNKNOWN, 1)
    assert run.broker.asked.told == [], "who was refused for another's sake is not the reason"


def test_a_machine_that_does_not_notice_is_asked_to_stop(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_GROUP_PATIENCE_S", 0.0)
    interrupted = run.tells(0, 130, outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED)
    training = Played(nothing(5), on_interrupt=interrupted)
    died = Played([run.tells(1, 4, outcome=Outcome.FAILED, code=Code.WORKER_KILLED)])
    conclusion = run.supervise(training, died).conclusion
    assert training.interrupts == 1
    assert not training.killed
    assert (conclusion.outcome, conclusion.code, conclusion.blamed) == (Outcome.FAILED, Code.WORKER_KILLED, 1)
    assert conclusion.exit_code is ExitCode.RUN_FAILED


def test_a_machine_that_neither_notices_nor_stops_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_GROUP_PATIENCE_S", 0.0)
    monkeypatch.setattr(supervision, "STOP_PATIENCE_S", 0.0)
    deaf = Played(nothing(8))
    conclusion = run.supervise(
        deaf, Played([run.tells(1, 4, outcome=Outcome.FAILED, code=Code.WORKER_KILLED)])
    ).conclusion
    assert deaf.killed
    assert (conclusion.blamed, conclusion.verdict) == (1, NO_RECEIPT)


def test_an_interrupt_reaches_every_machine(run: Run) -> None:
    interrupts = Interrupts()
    story = {"outcome": Outcome.INTERRUPTED, "code": Code.INTERRUPTED}
    machines = [Played(nothing(3), on_interrupt=run.tells(number, 130, **story)) for number in range(2)]
    machines[0].story.insert(0, interrupts)
    conclusion = run.supervise(*machines, interrupts=interrupts).conclusion
    assert [machine.interrupts for machine in machines] == [1, 1]
    assert run.watcher.stops == 1
    assert conclusion.exit_code is ExitCode.INTERRUPTED


def test_a_machine_that_cannot_be_placed_leaves_none_of_the_others_behind(run: Run) -> None:
    class Refusing(Played):
        def start(self, order: Order, launch: bytes, *, check: Callable[[], None]) -> int:
            raise PlatformError(Code.PLATFORM, "no second machine today")

    placed, second = Played([], on_interrupt=lambda: 130), Refusing([], on_interrupt=lambda: -9)
    place = Place([placed, second])
    with pytest.raises(PlatformError):
        supervision.supervise(
            run.folder,
            b"",
            home=run.worlds[0].home,
            place=lambda _name: place,
            broker=Gate(run.worlds[0].home),
            watcher=run.watcher,
            interrupts=Interrupts(),
            others=[(run.folders[1], b"")],
        )
    assert placed.interrupts == 1


def test_a_run_that_fails_before_it_is_placed_is_ended_on_every_machine(run: Run) -> None:
    broker = Gate(run.worlds[0].home)
    with pytest.raises(UsageError), supervision.settled(run.folder, broker):
        raise UsageError(Code.USAGE, "something")
    assert [folder.load().phase for folder in run.folders] == [Phase.ENDED, Phase.ENDED]


def test_a_second_look_tells_the_same_story(run: Run) -> None:
    first = Played([run.tells(0, 3, **REFUSED, code=Code.RANK_REFUSED)])
    ended = run.supervise(first, Played([*nothing(1), lambda: -9]))
    again = conclude_run(run.folder, run.folder.load(), owner_signing=run.worlds[0].owner.public)
    seen = [(one.outcome, one.code, one.blamed, one.verdict) for one in (ended.conclusion, again)]
    assert seen[0] == seen[1] == (Outcome.LOST, None, 1, NO_RECEIPT)


def test_a_run_whose_supervisor_died_is_settled_from_all_its_receipts(run: Run) -> None:
    for folder in run.folders:
        folder.update(phase=Phase.RUNNING, supervisor=NOBODY, agent=NOBODY)
    run.tell(0)
    run.tell(1, outcome=Outcome.FAILED, code=Code.WORKER_KILLED)
    found = control.look(run.folder, run.worlds[0].home)
    assert (found.record.outcome, found.record.code, found.record.blamed) == ("failed", "worker-killed", 1)
    assert found.record.exit_code == ExitCode.RUN_FAILED
    assert len(control.looks(run.worlds[0].home)) == 1, "the other machines are no runs of their own"


def test_a_run_goes_on_as_long_as_one_of_its_machines_does(run: Run) -> None:
    run.folder.update(phase=Phase.RUNNING, supervisor=NOBODY, agent=NOBODY)
    run.folders[1].update(phase=Phase.RUNNING, supervisor=NOBODY, agent=ProcessName.of())
    assert control.look(run.folder, run.worlds[0].home).doing == "unattended"
    assert run.folder.active()


def test_a_run_without_its_supervisor_is_stopped_on_every_machine(run: Run) -> None:
    agents = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in run.folders]
    try:
        for folder, agent in zip(run.folders, agents, strict=True):
            folder.update(phase=Phase.RUNNING, supervisor=NOBODY, agent=ProcessName.of(agent.pid))
        assert attach.stop(run.folder, run.worlds[0].home)
        assert [agent.wait(10) for agent in agents] == [-signal.SIGTERM] * 2
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert not attach.stop(run.folder, run.worlds[0].home)
    assert [folder.load().outcome for folder in run.folders] == ["lost", "lost"]


# Verification


def test_receipts_of_one_group_verify_together(run: Run) -> None:
    run.tell(0)
    run.tell(1)
    verdict = run.verify()
    assert (verdict.status, verdict.exit_code) == (Status.GOOD, ExitCode.DONE)
    assert "all 2 machines" in verdict.sentence
    assert "assurance software" in verdict.sentence
    value = json.loads(json.dumps(verdict.to_json()))
    assert [one["group"]["machine"] for one in value["machines"]] == [0, 1]


def test_one_machine_of_several_says_that_it_is_not_the_whole(run: Run) -> None:
    run.tell(0)
    alone = verify_file(run.folder.receipt, owner=run.worlds[0].owner.public)
    assert "It is one of 2 machines; the others have receipts of their own." in alone.sentence


def test_one_machine_of_several_is_no_artifact(run: Run) -> None:
    run.tell(0)
    with pytest.raises(UsageError) as caught:
        make_artifact(run.folder.receipt.read_bytes(), owner=run.worlds[0].owner, canaries=[])
    assert caught.value.code is Code.ARTIFACT_INVALID


def test_a_machine_without_a_receipt_leaves_the_run_incomplete(run: Run) -> None:
    run.tell(0)
    with pytest.raises(VerificationError) as caught:
        run.verify()
    assert caught.value.code is Code.CHAIN_INCOMPLETE


def test_a_machine_whose_folder_was_taken_away_is_missed(run: Run) -> None:
    run.tell(0)
    run.tell(1)
    shutil.rmtree(run.folder.path / "machines")
    with pytest.raises(VerificationError) as caught:
        run.verify()
    assert caught.value.code is Code.CHAIN_INCOMPLETE
    conclusion = conclude_run(run.folder, None, owner_signing=run.worlds[0].owner.public)
    assert (conclusion.verdict, conclusion.exit_code) == ("incomplete", ExitCode.INCOMPLETE)


def test_a_receipt_of_another_group_of_the_same_package_is_refused(run: Run, tmp_path: Path) -> None:
    """The host of machine 1 hands in a genuine receipt from an earlier run: everything in it is signed."""
    run.tell(0)
    earlier = Run(*settle_group(tmp_path / "earlier", name="earlier"))
    earlier.tell(1)
    shutil.copytree(earlier.folders[1].out, run.folders[1].out, dirs_exist_ok=True)
    with pytest.raises(VerificationError) as caught:
        run.verify()
    assert caught.value.code is Code.CHAIN_RECEIPT
    conclusion = conclude_run(run.folder, None, owner_signing=run.worlds[0].owner.public)
    assert (conclusion.verdict, conclusion.exit_code) == (INVALID, ExitCode.VERIFICATION_FAILED)
    with pytest.raises(VerificationError):
        require_receipt(conclusion)  # no output is fetched on such a word


def chains(*runs: tuple[Run, int]) -> list[object]:
    found = []
    for run, machine in runs:
        run.tell(machine)
        verdict = verify_file(run.folders[machine].receipt, owner=run.worlds[0].owner.public)
        assert isinstance(verdict, Verdict)
        found.append(verdict.chain)
    return found


def test_what_makes_receipts_one_group(run: Run, tmp_path: Path) -> None:
    earlier = Run(*settle_group(tmp_path / "earlier", name="earlier"))
    larger = Run(*settle_group(tmp_path / "larger", 3))
    zero, one = chains((run, 0), (run, 1))
    assert check_group([one, zero]).machine == 0  # type: ignore[list-item]
    for wrong, code in (
        ([zero, *chains((earlier, 1))], Code.GROUP_MISMATCH),
        ([zero, *chains((larger, 1))], Code.GROUP_MISMATCH),
        ([zero, one, one], Code.GROUP_MISMATCH),
        ([zero], Code.CHAIN_INCOMPLETE),
        ([one], Code.CHAIN_INCOMPLETE),
    ):
        with pytest.raises(VerificationError) as caught:
            check_group(wrong)  # type: ignore[arg-type]
        assert caught.value.code is code
    for changes in (
        {"group": None},
        {"deployment": "00" * 16},
        {"manifest_sha256": bytes(32)},
        {"policy_sha256": bytes(32)},
    ):
        other = replace(one, token=replace(one.token, **changes))  # type: ignore[attr-defined, type-var]
        with pytest.raises(VerificationError) as caught:
            check_group([zero, other])  # type: ignore[list-item]
        assert caught.value.code is Code.GROUP_MISMATCH


def test_a_record_from_before_there_were_groups_is_read(run: Run) -> None:
    path = run.folder.path / "run.json"
    value = json.loads(path.read_text())
    del value["group"], value["blamed"]
    path.write_text(json.dumps(value))
    record = run.folder.load()
    assert (record.group, record.blamed) == (None, None)
    path.write_text(json.dumps(value | {"group": {"id": "00"}}))
    with pytest.raises(UsageError):
        run.folder.load()


def test_a_second_look_at_one_machine_is_what_it_was(run: Run) -> None:
    run.tell(1)
    one = run.folders[1]
    assert conclude_again(one, one.load(), owner_signing=run.worlds[0].owner.public).verdict == "good"
