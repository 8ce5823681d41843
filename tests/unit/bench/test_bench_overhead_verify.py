"""A measurement as attack stories: what a stranger can change, and what the owner themselves can, is told apart.

Every story is played twice: by somebody without the owner's key, and by the owner, who computes and signs again
whatever the files still allow. What is left to the owner is listed, and is no more than section 13 of
spec/overhead-artifact.md says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glasshouse.bench.overhead.artifact import Measurement
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.parity import Same
from glasshouse.bench.overhead.statement import write_statement
from glasshouse.bench.overhead.verdict import Lack, MeasurementVerdict
from glasshouse.bench.overhead.verify import verify_measurement
from glasshouse.errors import Code, ExitCode, VerificationError
from glasshouse.evidence.receipt import Receipt
from glasshouse.jobs.verdict import Status
from glasshouse.wire.canonical import encode
from glasshouse.wire.group import Group
from glasshouse.wire.states import Outcome, State
from simulators.measurement import (
    FACTS,
    OWNER,
    SessionRun,
    edit_lines,
    edit_statement,
    reseal,
    small_design,
    write,
    write_part,
)
from simulators.measurement_stories import ATTACKS, Attack, drop_session, refusal, said, sign_as_it_is, verified
from simulators.simulate import World as Machine
from simulators.simulate import run_world
from simulators.world import START_US, World

INTERLEAVED = Path("interleaved")


pytestmark = pytest.mark.usefixtures("few_resamples")


def links(verdict: MeasurementVerdict) -> dict[str, str]:
    return {link.name: link.says for link in verdict.links}


def failing(verdict: MeasurementVerdict) -> list[str]:
    """What speaks against it, but that these machines were measured without a warm-up."""
    return [link.name for link in verdict.links if not link.holds and link.name != "steady state"]


# ---- what is told of an honest measurement


def test_an_honest_measurement_is_good_and_says_at_which_level_and_by_whose_word(honest: Path) -> None:
    verdict = verified(honest)
    assert (verdict.status, verdict.exit_code, verdict.lacks) == (Status.GOOD, ExitCode.DONE, ())
    assert "assurance software; the times are the owner's word" in verdict.sentence
    assert "overhead, +2." in verdict.sentence
    assert failing(verdict) == []
    assert links(verdict)["interleaved"] == "12 of 12 blocks count; 3 of 3 sessions completed"
    assert links(verdict)["receipts"] == "5 of them, lowest assurance software"
    json.dumps(verdict.to_json())


def test_reading_it_gives_the_numbers_that_were_signed(honest: Path) -> None:
    measurement = Measurement.load(honest)
    assert measurement == verified(honest).measurement
    assert measurement.facts == FACTS
    assert measurement.assurance == "software"
    part = measurement.part(Mode.INTERLEAVED)
    assert part is not None
    assert part.jobs is not None
    assert [cost.duration_s for cost in part.jobs] == [900, 3600, 86400]
    assert part.parity.word is Same.SAME
    assert encode(part.to_json()) == (honest / "interleaved/analysis.json").read_bytes()


def test_the_owner_may_keep_a_report_beside_it(folder: Path) -> None:
    (folder / "report.html").write_text("<html>")
    (folder / "figures").mkdir()
    assert verified(folder).status is Status.GOOD


def test_signing_again_changes_nothing(folder: Path) -> None:
    before = (folder / "statement.json").read_bytes()
    write_statement(folder, FACTS, owner=OWNER)
    assert (folder / "statement.json").read_bytes() == before


# ---- a word stands only on a null run and on receipts


@pytest.mark.parametrize(
    ("changes", "lack", "says"),
    [
        ({"modes": [Mode.INTERLEAVED]}, Lack.NULL, "it lacks a null run"),
        ({"null_overhead": 0.05}, Lack.NULL_ZERO, "its null run does not hold 0"),
        ({"sessions": 1, "blocks": 1}, Lack.NULL_INTERVAL, "too few blocks for an interval"),
    ],
)
def test_a_word_without_a_null_run_that_holds_zero_does_not_stand(
    tmp_path: Path, changes: dict[str, Any], lack: Lack, says: str
) -> None:
    write(tmp_path / "out", phases=0, **changes)
    verdict = verified(tmp_path / "out")
    assert (verdict.status, verdict.exit_code) == (Status.INCOMPLETE, ExitCode.INCOMPLETE)
    assert verdict.lacks == (lack,)
    assert says in verdict.sentence
    assert "does not stand" in verdict.sentence
    assert failing(verdict) == ["null holds 0"]


def test_sessions_that_never_came_to_rest_are_told(honest: Path) -> None:
    verdict = verified(honest)
    assert links(verdict)["steady state"].startswith("interleaved: 3 of 3 sessions never came to rest")


def test_what_a_run_pays_once_is_more_than_what_its_receipt_accounts_for(honest: Path) -> None:
    """The receipts account for a tenth of what lies between the two starts; F has all of it."""
    verdict = verified(honest)
    said = links(verdict)["once a run, interleaved"]
    assert re.fullmatch(r"F 1\.1[0-9]* s, of it lifecycle by the receipts 0\.2[0-9]+ s", said), said
    part = verdict.measurement.part(Mode.INTERLEAVED)
    assert part is not None
    assert part.lifecycle is not None
    assert part.lifecycle.start_s == pytest.approx(0.9, abs=0.001)
    assert part.jobs is not None
    assert part.analysis.result is not None
    assert part.jobs[0].extra_s == pytest.approx(part.lifecycle.seconds + 900 * part.analysis.result.slowdown)
    null = verdict.measurement.part(Mode.NULL)
    assert null is not None
    assert null.lifecycle is None, "nothing is protected there"


def test_a_null_run_that_holds_zero_because_it_is_coarse_is_told_for_what_it_is(tmp_path: Path) -> None:
    folder, rng = tmp_path / "out", np.random.default_rng(7)
    write(folder, modes=[Mode.INTERLEAVED], phases=0)
    design = small_design(Mode.NULL, sessions=2, blocks=1)
    write_part(folder / "null", design, run_world(Machine(overhead=0.03, noise=0.03), design, rng))
    write_statement(folder, FACTS, owner=OWNER)
    verdict = verified(folder)
    assert verdict.status is Status.GOOD
    room = re.search(r"its null run leaves room for a bias of ([0-9]+) %", verdict.sentence)
    assert room is not None
    assert int(room[1]) > 3, "the bias that is there"


def test_a_null_run_of_other_slices_supports_no_word(tmp_path: Path) -> None:
    folder, rng = tmp_path / "out", np.random.default_rng(7)
    write(folder, modes=[Mode.INTERLEAVED], phases=0)
    design = replace(small_design(Mode.NULL), slice_steps=7)
    write_part(folder / "null", design, run_world(Machine(noise=0.004), design, rng))
    write_statement(folder, FACTS, owner=OWNER)
    verdict = verified(folder)
    assert (verdict.lacks, verdict.exit_code) == ((Lack.NULL_DESIGN,), ExitCode.INCOMPLETE)
    assert failing(verdict) == ["null like it"]


def test_runs_of_two_packages_do_not_make_one_measurement(tmp_path: Path) -> None:
    def run(world: SessionRun, told: Callable[[Receipt], Receipt]) -> bytes:
        return (_OtherPackage(session=world.session) if world.session.endswith("1") else world).run(change=told).data

    with pytest.raises(VerificationError, match="different packages"):
        write(tmp_path / "out", phases=0, run=run)


class _OtherPackage(SessionRun):
    """The owner's run of another job."""

    def digest(self, label: str) -> bytes:
        return super().digest(f"another {label}" if label == "index" else label)


def test_a_null_run_alone_is_good_and_protects_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out", modes=[Mode.NULL], phases=0)
    verdict = verified(tmp_path / "out")
    assert (verdict.status, verdict.assurance) == (Status.GOOD, "none")
    assert "raw against raw" in verdict.sentence


def test_sequential_legs_alone_claim_no_word(tmp_path: Path) -> None:
    write(tmp_path / "out", modes=[Mode.SEQUENTIAL], phases=0)
    assert "no word is claimed" in verified(tmp_path / "out").sentence


def test_a_planted_overhead_is_said_in_the_sentence(tmp_path: Path) -> None:
    write(tmp_path / "out", facts=replace(FACTS, planted_ppm=20_000), phases=0)
    assert "20000 ppm planted on purpose" in verified(tmp_path / "out").sentence


def test_runs_that_the_broker_did_not_close_make_it_incomplete(tmp_path: Path) -> None:
    write(tmp_path / "out", phases=0, run=lambda world, told: world.run(change=told, broker_away=True).data)
    verdict = verified(tmp_path / "out")
    assert verdict.lacks == (Lack.RECEIPTS,)
    assert verdict.backings[0].unbacked == (0, 1, 2)


def test_a_session_without_a_receipt_makes_it_incomplete(folder: Path) -> None:
    def forget(notes: list[dict[str, Any]]) -> None:
        notes[1] |= {"bundle_sha256": None, "lifecycle_us": None, "imports_us": None}

    edit_lines(folder / "interleaved/sessions.jsonl", forget)
    (folder / "interleaved/receipts/0001.json").unlink()
    write_statement(folder, FACTS, owner=OWNER)
    verdict = verified(folder)
    assert (verdict.exit_code, verdict.lacks) == (ExitCode.INCOMPLETE, (Lack.RECEIPTS,))
    assert verdict.to_json()["unbacked_sessions"] == {"interleaved": [1], "null": [], "sequential": []}
    assert verdict.assurance == "unattested", "the others' level is not that of all that was timed"


def test_a_run_that_left_something_behind_does_not_pass_for_a_complete_session(tmp_path: Path) -> None:
    def residue(world: SessionRun, told: Any) -> bytes:
        return world.run(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND, reach=State.SEALED, change=told).data

    with pytest.raises(VerificationError, match="tells of another end"):
        write(tmp_path / "out", phases=0, run=residue)


def test_an_ordinary_run_cannot_stand_behind_slices(tmp_path: Path) -> None:
    """Its receipt says that it trained in one go: it never rested while another process was timed."""

    def ordinary(world: SessionRun, told: Any) -> bytes:
        def unpaced(receipt: Receipt) -> Receipt:
            told_so = told(receipt)
            return replace(told_so, work=replace(told_so.work, stop_reason="steps"))

        return world.run(change=unpaced).data

    with pytest.raises(VerificationError, match="never rested between slices"):
        write(tmp_path / "out", phases=0, run=ordinary)


def test_a_machine_of_a_group_cannot_stand_behind_slices_of_one_process(tmp_path: Path) -> None:
    def of_a_group(world: SessionRun, told: Callable[[Receipt], Receipt]) -> bytes:
        alone = world.token_claims
        place = Group(id=bytes(32), machines=2, machine=1, ranks=4)
        world.token_claims = lambda **changes: alone(**{"group": place, **changes})  # type: ignore[method-assign]
        return world.run(change=told).data

    with pytest.raises(VerificationError, match="group of ranks") as caught:
        write(tmp_path / "m", run=of_a_group, phases=0)
    assert caught.value.code is Code.ARTIFACT_INVALID


def test_different_weights_are_said_to_be_different(tmp_path: Path) -> None:
    write(tmp_path / "out", phases=0, same_weights=False)
    verdict = verified(tmp_path / "out")
    assert verdict.measurement.parts[0].parity.word is Same.DIFFERENT
    assert "interleaved: different" in links(verdict)["work parity"]
    assert failing(verdict) == ["work parity"]


def test_parity_is_not_claimed_where_the_digests_differ(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(folder, phases=0, same_weights=False)
    said("parity is claimed", lambda part: part["parity"].update(word="same")).forge(folder, folder)
    sign_as_it_is(folder)
    assert "parity.word is not what the slices give" in refusal(folder).message


def test_parity_is_not_made_by_editing_the_protected_run(tmp_path: Path) -> None:
    """The raw run's digest put in the place of the protected run's, and everything computed and signed again."""
    folder = tmp_path / "out"
    write(folder, phases=0, same_weights=False)
    edit_lines(folder / "interleaved/sessions.jsonl", lambda found: [one.update(protected=one["raw"]) for one in found])
    reseal(folder)
    assert "tells of other work" in refusal(folder).message


def test_a_machine_does_not_sign_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glasshouse.bench.overhead.statement.host_canaries", lambda: ["brightlab-node-7"])
    facts = replace(FACTS, workload={**FACTS.workload, "name": "on brightlab-node-7"})
    with pytest.raises(VerificationError) as caught:
        write_statement(folder, facts, owner=OWNER)
    assert caught.value.code is Code.ARTIFACT_CANARY


# ---- attacks


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.told)
def test_nobody_without_the_key_changes_anything(folder: Path, rival: Path, attack: Attack) -> None:
    attack.forge(folder, rival)
    assert refusal(folder).code in (Code.ARTIFACT_INVALID, Code.OWNER_UNKNOWN)


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if not attack.left_to_the_owner], ids=lambda attack: attack.told
)
def test_the_owner_who_signs_again_is_found_out(folder: Path, rival: Path, attack: Attack) -> None:
    attack.forge(folder, rival)
    attack.sign(folder)
    assert refusal(folder).code in (Code.ARTIFACT_INVALID, Code.OWNER_UNKNOWN)


@pytest.mark.parametrize(
    "attack", [attack for attack in ATTACKS if attack.left_to_the_owner], ids=lambda attack: attack.told
)
def test_what_is_left_to_the_owner_is_their_word(folder: Path, rival: Path, attack: Attack) -> None:
    """The counterpart of section 13: nothing but the owner's signature stands behind these."""
    attack.forge(folder, rival)
    reseal(folder)
    assert "the times are the owner's word" in verified(folder).sentence


@pytest.mark.parametrize("member", ["attempts", "claim", "jobs", "lifecycle", "parity", "result", "sequential"])
def test_what_the_statement_repeats_is_what_the_analysis_says(folder: Path, member: str) -> None:
    def borrow(statement: dict[str, Any]) -> None:
        statement["parts"][0][member] = statement["parts"][2 if member in ("attempts", "sequential") else 1][member]

    if member == "parity":
        edit_statement(folder, lambda statement: statement["parts"][0]["parity"].update(word="different"), key=OWNER)
    else:
        edit_statement(folder, borrow, key=OWNER)
    assert f"statement.parts[0].{member}" in refusal(folder).message


def test_a_last_session_that_is_left_out_is_missing_from_the_counts(folder: Path, rival: Path) -> None:
    drop_session(2)(folder, rival)
    reseal(folder)
    assert links(verified(folder))["interleaved"] == "8 of 8 blocks count; 2 of 3 sessions completed"


@pytest.mark.parametrize(
    "changes",
    [
        {"planted_ppm": 5000},
        {"assurance": "gpu-tee"},
        {"assurance": None},
        {"limits": []},
        {"null_result": None},
        {"phases": None},
        {"parts": []},
        {"kind": "https://glasshouse.dev/overhead/v2"},
        {"note": "trust me"},
        {"system": {**FACTS.system, "host": "brightlab-node-7"}},
        {"workload": {**FACTS.workload, "name": "/home/ana/secret"}},
        {"workload": {**FACTS.workload, "kind": "mlp"}},
        {"created_us": START_US - 86_400_000_000},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_the_statement_says_is_compared_or_bounded(folder: Path, changes: dict[str, Any]) -> None:
    edit_statement(folder, lambda statement: statement.update(changes))
    assert refusal(folder).code is Code.ARTIFACT_INVALID
    edit_statement(folder, lambda _: None, key=OWNER)
    if "planted_ppm" in changes:
        # Nothing but their own word could contradict an owner who hides, or invents, what was planted.
        assert "planted" in verified(folder).sentence
    else:
        assert refusal(folder).code is Code.ARTIFACT_INVALID


def test_a_measurement_of_the_future_is_refused(honest: Path) -> None:
    made_us = FACTS.created_us
    assert verify_measurement(honest, owner=OWNER.public, now_us=made_us).status is Status.GOOD
    with pytest.raises(VerificationError, match="in the future") as caught:
        verify_measurement(honest, owner=OWNER.public, now_us=made_us - 3600 * 1_000_000)
    assert caught.value.code is Code.ARTIFACT_INVALID


def test_a_member_of_the_statement_that_is_missing(folder: Path) -> None:
    for name in ("assurance", "limits", "null_result", "phases", "planted_ppm", "system"):
        before = (folder / "statement.json").read_bytes()
        edit_statement(folder, lambda statement, name=name: statement.pop(name), key=OWNER)
        assert refusal(folder).code is Code.ARTIFACT_INVALID
        (folder / "statement.json").write_bytes(before)


def test_the_statement_of_another_owner(honest: Path, folder: Path) -> None:
    stranger = World("stranger").owner
    assert refusal(honest, stranger.public).code is Code.OWNER_UNKNOWN
    edit_statement(folder, lambda _: None, key=stranger)
    assert refusal(folder).code is Code.OWNER_UNKNOWN
    # A thief who puts their own name under it cannot make the runs their own.
    assert refusal(folder, stranger.public).code is Code.OWNER_UNKNOWN


def test_a_thief_cannot_sign_the_owners_runs(folder: Path) -> None:
    with pytest.raises(VerificationError) as caught:
        write_statement(folder, FACTS, owner=World("stranger").owner)
    assert caught.value.code is Code.OWNER_UNKNOWN


def test_an_artifact_of_a_run_is_no_statement(folder: Path) -> None:
    path = folder / "statement.json"
    value = json.loads(path.read_bytes())
    value["payloadType"] = "application/vnd.glasshouse.artifact+json"
    path.write_bytes(encode(value))
    assert refusal(folder).code is Code.ARTIFACT_INVALID
