"""A row says whether a story went as it must; a gate with a hole is found by the story about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation import appraise, verify
from glasshouse.attestation.roots.tpm import endorsement, tpm_evidence, tpm_quote
from glasshouse.broker.decide.decisions import ApiAnswer
from glasshouse.broker.decide.key_release import ReleaseGate
from glasshouse.broker.decide.releases import make_release, write_release
from glasshouse.errors import Code, InternalError
from glasshouse.handshake import records
from glasshouse.tamper.attacks import (
    ATTACKS,
    CONTROL,
    GROUP_ATTACKS,
    GROUP_CONTROL,
    GROUP_RELEASES,
    HARDWARE,
    HARDWARE_CONTROL,
    Attack,
    AttackResult,
    play,
)
from glasshouse.tamper.stage import Owner
from glasshouse.tamper.tpm_stage import StagedTpm, TpmMaker
from simulators.local_broker import LocalBroker

REFUSED = AttackResult(
    attack=replace(ATTACKS[1], check="6", expected=Code.MANIFEST_MISMATCH),
    actual_check="6",
    actual=Code.MANIFEST_MISMATCH,
    released=False,
    counter_before=0,
    counter_after=0,
)
RELEASED = replace(REFUSED, attack=CONTROL, actual_check="", actual=None, released=True, counter_after=1)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    with LocalBroker(tmp_path) as broker:
        yield Owner(broker)


def story(name: str) -> Attack:
    [found] = [one for one in (*ATTACKS, CONTROL) if one.name == name]
    return found


def test_a_row_holds_only_when_everything_is_as_it_must() -> None:
    assert REFUSED.held
    assert RELEASED.held
    for wrong in (
        replace(REFUSED, actual=Code.STATE_MISMATCH),
        replace(REFUSED, actual_check="7"),
        replace(REFUSED, counter_after=1),
        replace(REFUSED, released=True),
        replace(REFUSED, actual=None, actual_check="", released=True, counter_after=1),
        replace(RELEASED, counter_after=0),
        replace(RELEASED, counter_after=2),
        replace(RELEASED, released=False),
    ):
        assert not wrong.held
    assert REFUSED.to_json()["held"] is True


def test_there_are_nine_stories_of_nine_checks_and_one_control() -> None:
    assert len(ATTACKS) == 9
    assert len({one.expected for one in ATTACKS}) == 9
    assert len({one.check for one in ATTACKS}) == 9
    assert CONTROL.expected is None


@pytest.mark.parametrize("one", [*ATTACKS, CONTROL], ids=lambda one: one.name)
def test_every_story_holds_against_a_sound_gate(owner: Owner, one: Attack) -> None:
    assert play(owner, one).held


@pytest.mark.parametrize("one", [*GROUP_ATTACKS, GROUP_CONTROL], ids=lambda one: one.name)
def test_every_story_of_a_group_holds_against_a_sound_gate(owner: Owner, one: Attack) -> None:
    assert play(owner.another(releases=GROUP_RELEASES), one).held


def test_a_gate_that_releases_before_all_are_there_is_found_out(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(
        groups: ReleaseGate,
        connection: Any,
        standing: Any,
        launch: Any,
        challenge: Any,
        appraisal: Any,
        _message: bytes,
        now_us: int,
    ) -> Any:
        """As if the launch had no group."""
        alone, memory = replace(launch, group=None), groups.memory
        made = make_release(groups.broker, connection, standing, alone, challenge, appraisal, memory, now_us)
        write_release(groups.broker, connection, standing, made, now_us)
        return ApiAnswer(body=made.body)

    monkeypatch.setattr(ReleaseGate, "_accept", at_once)
    several = owner.another(releases=GROUP_RELEASES)
    with pytest.raises(InternalError):
        play(several, next(one for one in GROUP_ATTACKS if one.expected is Code.RANK_REFUSED))


def test_a_gate_that_does_not_end_a_group_for_one_refusal_is_found_out(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReleaseGate, "_group_refused", lambda *_: None)
    several = owner.another(releases=GROUP_RELEASES)
    row = play(several, GROUP_ATTACKS[0])
    assert not row.held


def test_a_gate_that_lets_two_machines_be_one_is_found_out(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ReleaseGate,
        "_check_13",
        lambda _self, _connection, _standing, _launch, appraisal: appraisal.claims.hpke_public[:32],
    )
    row = play(owner.another(releases=GROUP_RELEASES), GROUP_ATTACKS[-1])
    assert not row.held


@pytest.mark.parametrize(
    ("name", "module", "check"),
    [
        ("composite hash mismatch", verify, "check_9_composite"),
        ("manifest hash mismatch", appraise, "check_6_manifest"),
        ("container id mismatch", appraise, "check_7_container"),
        ("stale timestamp", appraise, "check_5_time"),
        ("anti-debug disabled", appraise, "check_11_hardening"),
        ("runtime state spoofed", appraise, "check_10_state"),
        ("anti-debug profile downgrade", appraise, "check_11_hardening"),
        ("JWT claim mismatch", records, "check_same"),
    ],
)
def test_a_gate_that_lost_a_check_is_found_out_by_the_story_about_it(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, name: str, module: object, check: str
) -> None:
    def nothing(*_arguments: object, **_named: object) -> None: ...

    monkeypatch.setattr(module, check, nothing)
    row = play(owner, story(name))
    assert not row.held
    assert row.released
    assert row.counter_after == 1


@pytest.fixture
def machines(owner: Owner) -> Owner:
    """An owner whose policy demands a TPM."""
    return owner.another(releases=1, tpm=StagedTpm(maker=TpmMaker(), boot=b"an image"))


@pytest.mark.parametrize("one", [*HARDWARE, HARDWARE_CONTROL], ids=lambda one: one.name)
def test_every_story_of_hardware_holds_against_a_sound_gate(machines: Owner, one: Attack) -> None:
    assert play(machines, one).held


@pytest.mark.parametrize(
    ("name", "module", "check"),
    [
        ("another machine's", tpm_evidence, "_check_named"),
        ("another kernel", tpm_quote, "check_listed"),
        ("another maker", endorsement, "check_endorsement"),
        ("not activated", tpm_evidence, "_check_activation"),
    ],
)
def test_a_gate_that_lost_a_check_of_hardware_is_found_out(
    machines: Owner, monkeypatch: pytest.MonkeyPatch, name: str, module: object, check: str
) -> None:
    monkeypatch.setattr(module, check, lambda *_arguments, **_named: 2**53 - 1)
    [attack] = [one for one in HARDWARE if one.name == f"hardware: {name}"]
    row = play(machines, attack)
    assert not row.held
    assert row.released


def test_a_gate_that_forgets_its_challenges_is_found_out(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "glasshouse.broker.decide.key_release.ReleaseGate._replayed",
        lambda gate, connection, row, digest, now_us: gate._decided(connection, row, b"{}", digest, now_us),
    )
    assert not play(owner, story("nonce replay")).held
