"""An owner has a run go on: from where, of which package, and what keeps it from that before anything is rented."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, UsageError, VerificationError
from glasshouse.jobs.define.jobfile import parse
from glasshouse.jobs.define.package_records import PackageRecord
from glasshouse.jobs.define.seal_job import seal
from glasshouse.jobs.gates.line_notes import LineNotes, keep, known_legs
from glasshouse.jobs.lines import resuming
from glasshouse.jobs.lines.going_on import GoingOn, go_on
from glasshouse.jobs.lines.resuming import resume, run_through
from glasshouse.jobs.owner.home import Home, write_state
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise import line_watch
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.prepare import prepare
from glasshouse.jobs.supervise.run_request import Listener, RunRequest
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.group import Group
from glasshouse.wire.lines.statements import LegAbandoned, ResumeOrder
from glasshouse.wire.states import Outcome
from simulators.line_gate import LINE, NOW_S, LineGate, checkpoint

JOB = """
workload = "script"
[inputs]
"train.py" = "train.py"
[params]
script = "train.py"
[policy]
assurance = "software"
profile = "standard"
valid = "30d"
[checkpoints]
retries = 2
[machine]
most_per_hour = 0.9
most_usd = 3
image = "an/image:1"
"""
HOUR_US = 3600 * 1_000_000


class Owner:
    """An owner whose gate is played, with a run that was lost on this machine."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(path=folder / "home").make()
        self.identity = Identity.generate()
        self.identity.save(private=self.home.owner_private, public=self.home.owner_public, passphrase=None)
        (folder / "train.py").write_text("open('outputs/a', 'w')")
        self.job = parse(JOB.encode(), folder=folder, default_name="clinic")
        self.gate = LineGate(self.identity.signing.public, store=SigningKey.generate().public)
        package = seal(self.job, out=folder / "job.sealed", home=self.home, identity=self.identity).path
        self.run = RunFolder.create(self.home)
        prepare(
            package,
            home=self.home,
            identity=self.identity,
            folder=self.run,
            broker=self.gate,  # type: ignore[arg-type]
            machine=self.job.machine,
        )
        self.ends(self.run, "lost")
        self.gate.stands(contact_us=time.time_ns() // 1000)

    def ends(self, run: RunFolder, outcome: str, **more: Any) -> None:
        run.end(outcome=outcome, verdict="no-receipt", exit_code=4, **more)

    def plan(self, **how: Any) -> GoingOn:
        serving: Any = self.gate.ensure
        return go_on(self.run, home=self.home, identity=self.identity, serving=serving, **how)


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


def test_a_run_whose_processes_are_gone_goes_on_from_its_last_checkpoint(owner: Owner) -> None:
    owner.gate.ticket(1)
    owner.gate.ticket(2)
    going = owner.plan()
    line = going.later.line
    assert (line.id, line.leg, line.seq, line.checkpoint, line.rewind) == (LINE, 2, 2, checkpoint(2), False)
    assert line.order is not None
    order = ResumeOrder.from_envelope(line.order, owner.identity.signing.public)
    assert (order.leg, order.seq, order.digest, order.rewind) == (2, 2, checkpoint(2), False)
    assert [lost.leg for lost in owner.gate.lost] == [1], "nothing of it runs here any more"
    assert going.later.before.run_id == owner.run.run_id
    assert going.later.terms.machine == owner.job.machine
    assert "checkpoint 2, at step 100" in going.begins.words


def test_a_leg_that_left_its_receipts_is_not_called_lost(owner: Owner) -> None:
    owner.gate.ticket(1)
    owner.gate.stands(over="receipt")
    assert owner.plan(lost=True).later.line.leg == 2
    assert owner.gate.lost == []


def test_a_machine_that_may_go_on_is_waited_for_unless_its_owner_says_that_it_is_gone(owner: Owner) -> None:
    owner.run.update(place="lab")
    with pytest.raises(UsageError, match=r"leg 1 .* may go on") as caught:
        owner.plan()
    assert (caught.value.code, owner.gate.lost) == (Code.LINE_BUSY, [])
    assert "--lost" in caught.value.hint
    assert owner.plan(lost=True).later.line.leg == 2
    assert [lost.leg for lost in owner.gate.lost] == [1]


def test_a_machine_that_its_provider_took_back_is_known_to_be_gone(owner: Owner) -> None:
    owner.run.update(place=f"vast:{owner.run.run_id[:8]}")
    write_state(owner.run.rental, {"over": False})
    with pytest.raises(UsageError, match="may go on"):
        owner.plan()
    write_state(owner.run.rental, {"over": True})
    assert owner.plan().later.line.leg == 2


@pytest.mark.parametrize("one_rental", [True, False])
def test_a_group_is_gone_with_the_rentals_of_all_its_machines(owner: Owner, one_rental: bool) -> None:
    zero = f"slurm:{owner.run.run_id[:8]}"
    other = owner.run.add_machine()
    places = zero, f"{zero}.1" if one_rental else f"slurm:{other.run_id[:8]}"
    for machine, (folder, place) in enumerate(zip((owner.run, other), places, strict=True)):
        group = Group(id=bytes(32), machines=2, machine=machine, ranks=1)
        folder.save(replace(owner.run.load(), run_id=folder.run_id, group=group, place=place))
    write_state(owner.run.rental, {"over": True})
    if not one_rental:
        with pytest.raises(UsageError, match="may go on"):
            owner.plan()  # the other machine was never shown to be gone
        write_state(other.rental, {"over": True})
    assert owner.plan().later.line.leg == 2


def test_a_run_that_counted_no_checkpoint_begins_from_the_beginning_and_says_so(owner: Owner) -> None:
    going = owner.plan()
    assert (going.later.line.seq, going.later.line.checkpoint) == (0, None)
    assert "the beginning" in going.begins.words


def test_a_gate_that_forgot_a_checkpoint_is_shown_its_own_ticket_and_the_leg_that_it_forgot(owner: Owner) -> None:
    early = owner.gate.stands()
    owner.gate.ticket(1)
    newest = owner.gate.ticket(2)
    keep(owner.home, owner.gate.view, gate=owner.gate.public)  # type: ignore[arg-type]
    owner.gate.view = replace(early, leg=0, run_ids=())
    with pytest.raises(UsageError, match=r"leg 1 .* may go on"):
        owner.plan()  # by its ticket it was released; that its machine is gone shows nothing here but its run
    line = owner.plan(lost=True).later.line
    assert (line.seq, line.checkpoint) == (2, newest.digest)
    assert line.ticket is not None
    # What its tickets say that was released, the gate is told.
    assert (line.leg, [lost.leg for lost in owner.gate.lost]) == (2, [1])


def test_a_gate_that_counted_two_checkpoints_of_one_number_is_found_out(owner: Owner) -> None:
    owner.gate.ticket(1)
    owner.plan()
    owner.gate.ticket(1, fork=1)
    with pytest.raises(VerificationError, match="two checkpoints as number 1") as caught:
        owner.plan()
    assert caught.value.code is Code.LINE_FORKED
    assert len(LineNotes(owner.run).tickets()) == 2, "both are kept: they are the proof"


def test_what_a_gate_did_not_sign_is_not_kept(owner: Owner) -> None:
    owner.gate.ticket(1)
    other = SigningKey.generate()
    with pytest.raises(VerificationError, match="not what it signed"):
        keep(owner.home, owner.gate.view, gate=other.public)  # type: ignore[arg-type]
    assert LineNotes(owner.run).tickets() == []


def test_a_rewind_goes_back_by_the_owners_order(owner: Owner) -> None:
    for seq in (1, 2, 3):
        owner.gate.ticket(seq)
        keep(owner.home, owner.gate.view, gate=owner.gate.public)  # type: ignore[arg-type]
    line = owner.plan(rewind_to=2).later.line
    assert (line.seq, line.checkpoint, line.rewind) == (2, checkpoint(2), True)
    assert line.order is not None
    assert ResumeOrder.from_envelope(line.order, owner.identity.signing.public).rewind
    with pytest.raises(UsageError, match="goes on from anyway"):
        owner.plan(rewind_to=3)
    with pytest.raises(UsageError, match="no checkpoint 7") as caught:
        owner.plan(rewind_to=7)
    assert "checkpoint 2, at step 100" in caught.value.hint
    assert caught.value.code is Code.CHECKPOINT_STALE


@pytest.mark.parametrize("how", ["gone", "other", "revoked", "expired", "no-line", "goes-on"])
def test_what_cannot_go_on_is_refused_before_a_gate_is_asked(owner: Owner, how: str, tmp_path: Path) -> None:
    record, folder = owner.run.load(), owner.run
    package = PackageRecord.load(owner.home, record.package_id, workload="script")
    codes = {"gone": Code.FILE_MISSING, "other": Code.MANIFEST_MISMATCH, "revoked": Code.PACKAGE_REVOKED}
    codes |= {"expired": Code.DEPLOYMENT_EXPIRED, "no-line": Code.USAGE, "goes-on": Code.LINE_BUSY}
    how_us: dict[str, Any] = {}
    if how == "gone":
        record.package.unlink()
    elif how == "other":
        other = seal(owner.job, out=tmp_path / "other.sealed", home=owner.home, identity=owner.identity)
        record.package.unlink()
        other.path.rename(record.package)
    elif how == "revoked":
        replace(package, revoked=True).save(owner.home)
    elif how == "expired":
        how_us = {"now_us": time.time_ns() // 1000 + 31 * 24 * HOUR_US}
    elif how == "no-line":
        folder.update(line=None)
        folder.terms.unlink()
    else:
        folder.update(phase="running", place="lab", supervisor=None)
    serving: Any = pytest.fail
    with pytest.raises(GlasshouseError) as caught:
        go_on(folder, home=owner.home, identity=owner.identity, serving=serving, **how_us)
    assert caught.value.code is codes[how], caught.value
    assert caught.value.hint or how == "revoked"


def test_a_gate_that_lost_the_line_is_told_apart_from_one_that_refuses(owner: Owner) -> None:
    owner.gate.view = None
    with pytest.raises(UsageError, match="has no line") as caught:
        owner.plan()
    assert caught.value.code is Code.RUN_UNKNOWN


def test_a_machine_is_lost_when_its_gate_has_not_heard_of_it_for_its_lease(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_watch, "_ASK_S", 0.0)
    gate: Any = owner.gate
    silent = line_watch.silence(owner.run, owner.home, gate)
    assert not silent(), "its gate hears of it: only its owner does not"
    for over, leg, is_lost in (("lease", 1, True), ("lost", 1, False), ("lease", 2, False)):
        owner.gate.stands(over=over, leg=leg)
        assert silent() is is_lost
    record = PackageRecord.load(owner.home, owner.run.load().package_id, workload="script")
    replace(record, deployment=replace(record.deployment, retries=0)).save(owner.home)
    owner.gate.stands(over="lease", leg=1)
    assert not line_watch.silence(owner.run, owner.home, gate)(), "where none is replaced, it is waited for"


def test_a_gate_that_forgot_a_leg_says_so_of_it_and_that_is_kept(owner: Owner) -> None:
    said = LegAbandoned(
        deployment="d" * 32,
        evidence=(),
        leg=1,
        line=LINE,
        manifest_sha256=owner.gate.manifest.sha256,
        run_ids=(),
        seq=0,
        time_us=1,
        why="lost",
    )
    view = owner.gate.stands(abandoned=(owner.gate.signed(said),))
    keep(owner.home, view, gate=owner.gate.public)
    assert LineNotes(owner.run).abandoned == view.abandoned[0]


class Places(Listener):
    """Machines that lose runs, or do not exist: what `run_job` would do at each."""

    def __init__(self, owner: Owner, monkeypatch: pytest.MonkeyPatch, ends: list[Any]) -> None:
        self.owner, self.ends, self.asked = owner, ends, list[RunRequest]()
        self.said: list[str] = []
        monkeypatch.setattr(resuming, "run_job", self.run_job)
        monkeypatch.setattr(resuming, "broker_for", lambda *_of: owner.gate)

    def run_job(self, request: RunRequest, **_how: Any) -> Ended:
        self.asked.append(request)
        end = self.ends.pop(0)
        if isinstance(end, GlasshouseError):
            raise end
        if request.later is None:
            folder = self.owner.run
        else:
            folder = RunFolder.create(self.owner.home)
            first, line = self.owner.run.load(), request.later.line
            folder.save(
                replace(first, run_id=folder.run_id, leg=line.leg, before=first.run_id, created_us=NOW_S * 10**6)
            )
            request.later.terms.save(folder)
            self.owner.ends(folder, end.outcome.value)
            self.owner.gate.stands(leg=line.leg, over="", run_ids=(folder.run_id,))
        return Ended(folder=folder, record=folder.load(), seen=Seen(), conclusion=end, asked=end.problem == "asked")

    def leg(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def through(self, **how: Any) -> Any:
        request = RunRequest(what=self.owner.run.load().package, job=None, machine=self.owner.job.machine, **how)
        return run_through(request, home=self.owner.home, identity=self.owner.identity, listener=self)


LOST = Conclusion(outcome=Outcome.LOST, code=None, verdict="no-receipt")
DONE = Conclusion(outcome=Outcome.COMPLETED, code=None, verdict="good")
TAKEN = Conclusion(outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED, verdict="not-completed")


def test_a_lost_machine_is_replaced_by_the_next_place_and_it_is_said(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(owner, monkeypatch, [LOST, DONE])
    owner.gate.ticket(4)
    ended = places.through(on=("runpod",), spare=("vast",))
    assert ended.conclusion == DONE
    assert [one.on for one in places.asked] == [("runpod",), ("vast",)]
    assert places.asked[1].agreed, "within the caps that were agreed to"
    assert places.asked[1].later is not None
    assert (places.asked[1].later.line.leg, places.asked[1].later.line.seq) == (2, 4)
    assert "is lost; 1 more may be replaced; leg 2 goes on from checkpoint 4, at vast" in places.said[0]


def test_a_lost_machine_that_may_still_work_is_replaced_once_its_lease_is_over(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [UsageError(Code.LINE_BUSY, "leg 1 may go on")] * 2
    really = resuming.plan

    def plan(*run: Any, **how: Any) -> GoingOn:
        if busy:
            raise busy.pop()
        return really(*run, **how)

    places = Places(owner, monkeypatch, [LOST, DONE])
    monkeypatch.setattr(Places, "step", lambda self, text: self.said.append(text))
    monkeypatch.setattr(resuming, "plan", plan)
    monkeypatch.setattr(resuming, "_ASK_EVERY_S", 0.0)
    assert places.through(on=("lab",), spare=("den",)).conclusion == DONE
    assert ["waiting for its lease and a minute" in said for said in places.said] == [True, False]
    assert busy == []


def test_no_more_machines_are_replaced_than_the_job_allows(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(owner, monkeypatch, [LOST, TAKEN, LOST, DONE])
    ended = places.through(on=("local",))
    assert ended.conclusion == LOST
    assert [one.later and one.later.line.leg for one in places.asked] == [None, 2, 3]


@pytest.mark.parametrize(
    "end",
    [
        DONE,
        replace(TAKEN, problem="asked"),
        Conclusion(outcome=Outcome.FAILED, code=Code.SCRIPT_FAILED, verdict="not-completed"),
        Conclusion(outcome=Outcome.LOST, code=Code.CHAIN_RECEIPT, verdict="invalid"),
        Conclusion(outcome=Outcome.SUPERSEDED, code=Code.LINE_SUPERSEDED, verdict="not-completed"),
    ],
    ids=["completed", "stopped by its owner", "failed", "a false receipt", "superseded"],
)
def test_what_was_not_lost_is_not_replaced(owner: Owner, monkeypatch: pytest.MonkeyPatch, end: Conclusion) -> None:
    places = Places(owner, monkeypatch, [end])
    assert places.through(on=("local",)).conclusion == end
    assert places.said == []


def test_a_place_that_has_nothing_is_passed_over_and_one_that_cannot_be_replaced_says_how_to_go_on(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = UsageError(Code.NO_OFFER, "runpod offers no machine")
    places = Places(owner, monkeypatch, [none, LOST, none, UsageError(Code.NO_OFFER, "vast offers no machine")])
    with pytest.raises(UsageError, match="is lost, and not replaced: vast offers no machine") as caught:
        places.through(on=("runpod",), spare=("vast",))
    assert [one.on for one in places.asked] == [("runpod",), ("vast",), ("runpod",), ("vast",)]
    assert f"glasshouse resume {owner.run.run_id[:8]}" in caught.value.hint


def test_what_the_lost_machines_cost_is_gone_from_the_caps(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    from glasshouse.jobs.define.wanted import Caps
    from glasshouse.jobs.places.rental_journal import Attempt, Journal, Rental, Step
    from glasshouse.providers.rental.provider import Offer

    offer = Offer(id="7", gpu="A", gpus=1, memory_gb=1, disk_gb=1, region="", usd_per_hour=Decimal("0.8"))
    begun_us = time.time_ns() // 1000 - 2 * HOUR_US
    gone = Attempt(
        tag="t", nonce="n", offer=offer, asked_us=begun_us, step=Step.GONE, up_us=begun_us, gone_us=begun_us + HOUR_US
    )
    caps = Caps(usd=Decimal(3), seconds=4 * 3600, boot_s=900)
    rental = Rental(
        run_id=owner.run.run_id,
        provider="vast",
        created_us=begun_us,
        caps=caps,
        python="python3",
        keeper=None,
        attempts=(gone,),
    )
    Journal.create(owner.home, rental)
    owner.run.update(place=f"vast:{owner.run.run_id[:8]}")
    places = Places(owner, monkeypatch, [LOST, DONE])
    places.through(on=("vast",))
    machine = places.asked[1].machine
    assert machine is not None
    assert (machine.caps.usd, machine.caps.seconds) == (Decimal("2.2"), 3 * 3600)
    assert places.asked[1].lost == {("vast", "7")}


def test_an_owner_resumes_where_it_was_and_elsewhere(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.gate.ticket(2)
    places = Places(owner, monkeypatch, [replace(TAKEN, problem="asked"), DONE])
    how: dict[str, Any] = {"home": owner.home, "identity": owner.identity, "listener": places}
    resume(owner.run, **how)
    (request,) = places.asked
    assert (request.on, request.gate, request.agreed) == (("local",), None, False)
    assert request.what == owner.run.load().package
    assert request.job is None
    assert places.said == ["leg 2 goes on from checkpoint 2, at local"]
    # Of the first run's name the last leg is meant, and of what it is asked only the place may differ.
    owner.gate.stands(over="receipt")
    resume(owner.run, on="vast", **how)
    assert places.asked[1].later is not None
    assert (places.asked[1].on, places.asked[1].later.line.leg) == (("vast",), 3)
    assert [leg.number for leg in known_legs(owner.home, LINE.hex())] == [1, 2, 3]
    with pytest.raises(UsageError, match="has completed"):
        resume(owner.run, **how)
    assert json.loads(owner.run.terms.read_text())["machine"]["caps"]["usd"] == "3.0"
