"""Verification as attack stories: every link of the chain is broken once, and the break has its own name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from glasshouse.attestation.claims import Claims, Gpu
from glasshouse.errors import Code, ExitCode, GlasshouseError, VerificationError
from glasshouse.evidence.log import EventLog
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES, RECEIPT_TYPE, Receipt
from glasshouse.jobs.verify.receipt_chain import _check_times
from glasshouse.jobs.verify.verdict import Status, verify_bundle
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.states import Outcome, State
from simulators.bundle_stories import SECOND_US, STORIES, Story
from simulators.world import START_US, Run, World, envelope, with_log


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def run(world: World) -> Run:
    return world.run()


def head_lines(run: Run) -> list[bytes]:
    return [head.encode() + b"\n" for head in run.heads]


def refusal(data: bytes, owner: bytes) -> Code:
    with pytest.raises(GlasshouseError) as caught:
        verify_bundle(data, owner=owner)
    return caught.value.code


# ---- what is told of an honest run


def test_an_honest_run_is_good_and_says_at_which_level(world: World, run: Run) -> None:
    verdict = verify_bundle(run.data, owner=world.owner.public)
    assert (verdict.status, verdict.outcome, verdict.exit_code) == (Status.GOOD, Outcome.COMPLETED, ExitCode.DONE)
    assert "assurance software" in verdict.sentence
    assert verdict.to_json()["attestation"] == "warning"


def test_genuine_is_not_said_to_be_true(world: World) -> None:
    """An owner with a broker of their own signs a run that never was: it is genuine, and says whose word it is."""
    made_up = World(now_us=START_US)

    def grand(receipt: Receipt) -> Receipt:
        assert receipt.work is not None
        return replace(receipt, work=replace(receipt.work, done=1_000_000), trainable=7 * 10**9)

    bundle = made_up.run(change=grand).data
    verdict = verify_bundle(bundle, owner=made_up.owner.public)
    assert verdict.status is Status.GOOD
    assert "to others it is the owner's word" in verdict.sentence
    assert "an owner can sign a run that never happened" in verdict.sentence
    assert verdict.to_json()["proves"] in verdict.sentence


def test_a_verdict_shows_dates_devices_work_loss_and_probes(world: World, run: Run) -> None:
    class Rich(World):
        def claims(self, **changes: Any) -> Claims:
            gpu = Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85 * 10**9, driver="570.1", uuid="GPU-1")
            return super().claims(**{"gpus": (gpu,), **changes})

    rich = Rich()
    facts = verify_bundle(rich.run().data, owner=rich.owner.public).facts
    assert facts["dates"].startswith("2026-09-21 14:13:20 UTC to 2026-09-21 14:13:22 UTC by the runtime's clock; ")
    assert facts["GPUs"] == "NVIDIA H100 80GB HBM3 (85 GB) by the runtime's word"
    assert facts["work"] == "5 steps in 0.01 s; ended by: steps"
    assert facts["loss"] == "0.8 → 0.4"
    assert facts["probes"].split(", ") == [
        *("agent-memory clean", "gpu-memory clean", "shared-memory clean", "swap unverifiable", "workspace clean")
    ]
    plain = verify_bundle(run.data, owner=world.owner.public)
    assert plain.facts["GPUs"] == "none"
    told = plain.to_json()
    assert (told["started_us"], told["finished_us"]) == (run.receipt.started_us, run.receipt.finished_us)
    links = dict(plain.links)
    assert "issued 2026-09-21" in str(links["launch token"])
    assert "2026-09-21" in str(links["receipt's countersignature"])


def test_what_could_not_be_searched_is_said_in_the_verdict(world: World, run: Run) -> None:
    verdict = verify_bundle(run.data, owner=world.owner.public)
    assert verdict.status is Status.GOOD
    assert verdict.doubts == ("what the probes swap search could not be searched",)
    assert verdict.doubts[0] in verdict.sentence


def test_work_that_its_own_progress_does_not_show_is_said(world: World) -> None:
    def more(receipt: Receipt) -> Receipt:
        assert receipt.work is not None
        return replace(receipt, work=replace(receipt.work, done=1_000_000, elapsed_us=10**12))

    run = World().run(change=more)
    alone = verify_bundle(run.data, owner=world.owner.public)
    assert "longer than the run lasted" in alone.doubts[1]
    beside = with_log(alone, run.lines)
    assert "of 1000000 steps the log's progress shows 5" in beside.sentence
    assert "longer than the run lasted" in beside.sentence


def test_a_log_of_other_times_than_its_receipt_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime dates its receipt as it likes, and wrote the log long before."""
    hour_us = 3600 * SECOND_US
    for earlier_us, doubts in ((0, False), (60 * SECOND_US, False), (hour_us, True)):

        def log(*, clock_us: Callable[[], int], earlier_us: int = earlier_us, **options: Any) -> EventLog:
            return EventLog(clock_us=lambda: clock_us() - earlier_us, **options)

        monkeypatch.setattr("simulators.world.EventLog", log)
        world = World()
        run = world.run()
        verdict = with_log(verify_bundle(run.data, owner=world.owner.public), run.lines)
        assert ("the log is not of the time that the receipt names" in verdict.sentence) == doubts
        assert any("not of the time" in doubt for doubt in verdict.doubts) == doubts


def test_a_run_of_the_future_is_refused(world: World, run: Run) -> None:
    hour_us = 3600 * 1_000_000
    assert verify_bundle(run.data, owner=world.owner.public, now_us=START_US).status is Status.GOOD
    with pytest.raises(VerificationError, match="in the future") as caught:
        verify_bundle(run.data, owner=world.owner.public, now_us=START_US - hour_us)
    assert caught.value.code is Code.CHAIN_RECEIPT


def test_a_run_that_ended_before_its_key_was_released_is_refused(world: World, run: Run) -> None:
    chain = verify_bundle(run.data, owner=world.owner.public).chain
    assert chain.ear is not None
    later = replace(chain, ear=replace(chain.ear, issued_s=chain.ear.issued_s + 3600))
    for at_us in (chain.closed_us, chain.closed_us + 10**12):
        with pytest.raises(VerificationError, match="earlier than the key was released"):
            _check_times(later, at_us)


@pytest.mark.parametrize(
    ("outcome", "code", "reach", "exit_code"),
    [
        (Outcome.FAILED, Code.WORKER_KILLED, State.RUNNING, ExitCode.RUN_FAILED),
        (Outcome.REFUSED, Code.KEY_COMMITMENT, State.RELEASED, ExitCode.REFUSED),
        (Outcome.INTERRUPTED, Code.INTERRUPTED, State.OPENED, ExitCode.INTERRUPTED),
        (Outcome.RESIDUE, Code.RESIDUE_FOUND, State.SEALED, ExitCode.RESIDUE),
    ],
)
def test_a_run_that_did_not_complete_is_authentic_and_not_good(
    world: World, outcome: Outcome, code: Code, reach: State, exit_code: ExitCode
) -> None:
    run = World().run(outcome=outcome, code=code, reach=reach)
    verdict = verify_bundle(run.data, owner=world.owner.public)
    assert (verdict.status, verdict.outcome, verdict.exit_code) == (Status.NOT_COMPLETED, outcome, exit_code)
    assert "assurance software" in verdict.sentence
    assert code.value in verdict.sentence
    assert with_log(verdict, run.lines, head_lines(run)).log


def test_without_the_brokers_last_word_a_run_is_incomplete(world: World) -> None:
    verdict = verify_bundle(World().run(broker_away=True).data, owner=world.owner.public)
    assert (verdict.status, verdict.exit_code) == (Status.INCOMPLETE, ExitCode.INCOMPLETE)
    assert verdict.chain.missing == ("head_countersignature", "countersignature")
    assert "assurance software" in verdict.sentence


@pytest.mark.parametrize(("evidence_made", "reach"), [(True, State.MEASURED), (False, State.CREATED)])
def test_a_run_refused_at_the_gate_is_incomplete_and_unattested(
    world: World, evidence_made: bool, reach: State
) -> None:
    run = World().run(
        attested=False, evidence_made=evidence_made, reach=reach, outcome=Outcome.REFUSED, code=Code.ASSURANCE_TOO_LOW
    )
    verdict = verify_bundle(run.data, owner=world.owner.public)
    assert (verdict.status, verdict.outcome) == (Status.INCOMPLETE, Outcome.REFUSED)
    assert "unattested" in verdict.sentence
    assert "software" not in verdict.sentence
    assert with_log(verdict, run.lines).log


def test_no_verdict_is_told_without_its_level(world: World, run: Run) -> None:
    for bundle in (run.data, World().run(broker_away=True).data):
        verdict = verify_bundle(bundle, owner=world.owner.public)
        assert verdict.assurance in verdict.sentence
        assert verdict.to_json()["assurance"] == verdict.assurance


def test_the_links_are_told_one_by_one_and_a_missing_one_is_named(world: World, run: Run) -> None:
    whole = dict(verify_bundle(run.data, owner=world.owner.public).links)
    assert all(whole.values())
    assert whole["attestation result"] == "warning, assurance software"
    away = dict(verify_bundle(World().run(broker_away=True).data, owner=world.owner.public).links)
    assert [name for name, says in away.items() if says is None] == [
        "head's countersignature",
        "receipt's countersignature",
    ]


# ---- one alteration per link


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.told)
def test_a_broken_link_is_refused_under_its_own_name(world: World, run: Run, story: Story) -> None:
    assert refusal(story.forge(world, run), world.owner.public) is story.code


def test_every_link_has_a_story() -> None:
    links = {code for code in Code if code.name.startswith("CHAIN_")}
    links -= {Code.CHAIN_INCOMPLETE, Code.CHAIN_MISSING}
    assert {story.code for story in STORIES} == links


def test_a_token_that_had_expired_when_the_key_was_released(world: World) -> None:
    late = World()
    late.token = lambda **changes: World.token(late, **{"expires_s": START_US // SECOND_US, **changes})
    assert refusal(late.run().data, world.owner.public) is Code.CHAIN_TOKEN


# ---- absence never means yes


@pytest.mark.parametrize("part", ["delegation", "token", "head", "receipt"])
def test_a_bundle_is_no_bundle_without_these(world: World, run: Run, part: str) -> None:
    whole: Any = decode(run.data, max_bytes=MAX_BUNDLE_BYTES)
    assert refusal(encode({**whole, part: None}), world.owner.public) is Code.SCHEMA


@pytest.mark.parametrize("part", ["manifest", "evidence", "ear", "countersignature"])
def test_a_bundle_that_lost_a_part_is_never_good(world: World, run: Run, part: str) -> None:
    whole: Any = decode(run.data, max_bytes=MAX_BUNDLE_BYTES)
    data = encode({**whole, part: None})
    if part == "countersignature":
        assert verify_bundle(data, owner=world.owner.public).status is Status.INCOMPLETE
    else:
        assert refusal(data, world.owner.public) in (Code.CHAIN_EAR, Code.CHAIN_HEAD)
    without = encode({name: value for name, value in whole.items() if name != part})
    assert refusal(without, world.owner.public) is Code.SCHEMA


def test_a_runtime_that_hides_its_attestation_gains_nothing(world: World) -> None:
    """It left something behind, and now tells of a refusal, signed by every key it has."""
    run = World().run(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND)
    clean = tuple(World().probes(Outcome.COMPLETED))
    story = replace(
        run.receipt,
        ear_sha256=None,
        assurance=None,
        outcome=Outcome.REFUSED,
        code=Code.MEASUREMENT_UNKNOWN,
        zeroization=clean,
        outputs=(),  # with these it would contradict itself: nothing is released to who was refused
        work=None,
    )
    receipt = envelope(story.sign(world.evidence_key, world.launch_key))
    data = run.with_parts(ear=None, receipt=receipt, head=envelope(run.final_head), countersignature=None)
    verdict = verify_bundle(data, owner=world.owner.public)
    assert (verdict.status, verdict.exit_code) == (Status.INCOMPLETE, ExitCode.INCOMPLETE)
    # Its own log, whose head it cannot sign away, says otherwise.
    with pytest.raises(VerificationError) as caught:
        with_log(verdict, run.lines)
    assert caught.value.code is Code.LOG_INVALID
    # Nor does a countersigned head go with a run that nobody attested.
    kept = run.with_parts(ear=None, receipt=receipt, countersignature=None)
    assert refusal(kept, world.owner.public) is Code.CHAIN_HEAD


def test_a_completed_run_cannot_do_without_attestation(world: World, run: Run) -> None:
    statement: Any = decode(run.bundle.receipt.payload, max_bytes=1 << 20)
    statement["predicate"].update(ear_sha256=None, assurance=None)
    receipt = dsse.sign(RECEIPT_TYPE, encode(statement), [world.evidence_key, world.launch_key])
    data = run.with_parts(ear=None, receipt=receipt, head=envelope(run.final_head), countersignature=None)
    assert refusal(data, world.owner.public) is Code.CHAIN_RECEIPT


def test_an_unattested_receipt_needs_the_launch_key(world: World) -> None:
    refused = World().run(
        attested=False, evidence_made=False, reach=State.CREATED, outcome=Outcome.REFUSED, code=Code.HARDENING_MISSING
    )
    lone = dsse.sign(RECEIPT_TYPE, refused.bundle.receipt.payload, [world.evidence_key])
    assert refusal(refused.with_parts(receipt=lone), world.owner.public) is Code.CHAIN_RECEIPT


# ---- another owner, and damage anywhere


def test_a_wholly_sound_bundle_by_another_owner(world: World) -> None:
    other = World("rival").run()
    assert verify_bundle(other.data, owner=World("rival").owner.public).status is Status.GOOD
    assert refusal(other.data, world.owner.public) is Code.OWNER_UNKNOWN
    refused = World("rival").run(
        attested=False, evidence_made=False, reach=State.CREATED, outcome=Outcome.REFUSED, code=Code.HARDENING_MISSING
    )
    assert refusal(refused.with_parts(manifest=None), world.owner.public) is Code.OWNER_UNKNOWN


def test_another_owners_run_under_this_owners_delegation_or_manifest(world: World, run: Run) -> None:
    other = World("rival").run()
    grafted = other.with_parts(delegation=run.bundle.delegation)
    assert refusal(grafted, world.owner.public) is Code.CHAIN_MANIFEST
    grafted = other.with_parts(manifest=run.bundle.manifest)
    assert refusal(grafted, world.owner.public) is Code.CHAIN_DELEGATION
    grafted = other.with_parts(manifest=run.bundle.manifest, delegation=run.bundle.delegation)
    assert refusal(grafted, world.owner.public) is Code.CHAIN_TOKEN


def test_a_flip_at_every_hundredth_byte(world: World, run: Run) -> None:
    codes: set[Code] = set()
    for at in range(0, len(run.data), 100):
        damaged = bytearray(run.data)
        damaged[at] ^= 1
        codes.add(refusal(bytes(damaged), world.owner.public))
    assert {Code.CHAIN_MANIFEST, Code.CHAIN_EVIDENCE, Code.CHAIN_RECEIPT} <= codes


def test_a_cut_at_any_place(world: World, run: Run) -> None:
    for end in range(0, len(run.data), 500):
        assert refusal(run.data[:end], world.owner.public) in (Code.SCHEMA, Code.NOT_CANONICAL)


def test_any_two_parts_exchanged(world: World, run: Run) -> None:
    whole: Any = decode(run.data, max_bytes=MAX_BUNDLE_BYTES)
    parts = sorted(set(whole) - {"kind"})
    for one in parts:
        for two in parts:
            if one < two:
                swapped = encode({**whole, one: whole[two], two: whole[one]})
                refusal(swapped, world.owner.public)


def test_random_damage_never_crashes(world: World, run: Run) -> None:
    rng = random.Random(7)
    for _ in range(300):
        damaged = bytearray(run.data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if bytes(damaged) != run.data:
            refusal(bytes(damaged), world.owner.public)


def test_a_bundle_that_is_too_large(world: World) -> None:
    assert refusal(b" " * (MAX_BUNDLE_BYTES + 1), world.owner.public) is Code.TOO_LARGE
