"""Groups at the gate: all of their machines are released to, or none is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from glasshouse.broker.client.owner_client import Reply
from glasshouse.broker.decide import key_release
from glasshouse.broker.decide.challenges import GateLimits
from glasshouse.broker.decide.releases import Release, write_release
from glasshouse.broker.http_api import verify_chain
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.messages import ReleaseRequest
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.crypto import RecipientKey, SigningKey
from glasshouse.wire.states import State
from simulators.gate_machines import Machine, group, group_id, pending
from simulators.local_broker import LocalBroker

LIFETIME_S = GateLimits().challenge_lifetime_us / 1_000_000


def refused(reply: Reply) -> tuple[Code, str]:
    problem = reply.problem()
    return problem.code, problem.actual


def events(owner: Owner) -> list[object]:
    records = owner.client().audit()
    verify_chain(records)
    return [record["event"] for record in records if isinstance(record, dict)]


def test_nobody_is_released_to_before_the_last_machine_was_accepted_and_then_everybody_is(owner: Owner) -> None:
    machines = group(owner, 3)
    for number, machine in enumerate(machines[:2], start=1):
        waiting = pending(machine.attest())
        assert (waiting.accepted, waiting.machines) == (number, 3)
        assert waiting.deadline_us == machines[0].challenge.expires_us
        assert pending(machine.ask()) == waiting
    assert owner.releases() == 0
    assert machines[2].key(machines[2].attest()) == owner.package_key
    assert [machine.key(machine.ask()) for machine in machines] == [owner.package_key] * 3
    assert owner.releases() == 3
    assert owner.client().group(group_id(machines[0]))["state"] == "released"
    assert events(owner).count("accepted") == events(owner).count("release") == 3


def test_every_machine_gets_a_release_of_its_own_and_the_same_one_each_time(owner: Owner) -> None:
    machines = group(owner, 2)
    pending(machines[0].attest())
    machines[1].attest().content()
    first = machines[0].ask().content()
    assert machines[0].ask().content() == first, "sealed to a key whose only holder opens it once"
    assert machines[1].ask().content() != first
    with pytest.raises(FormatError):
        machines[1].actor.hpke.open(bytes(1168), info=b"")
    assert owner.client().deployment(owner.deployment)["answers"] == 2


def test_a_group_of_one_machine_waits_for_nobody(owner: Owner) -> None:
    [alone] = group(owner, 1)
    assert alone.key(alone.attest()) == owner.package_key


def test_one_refused_machine_refuses_all_and_they_are_told_which_and_why(owner: Owner) -> None:
    first, second, third = group(owner, 3)
    pending(first.attest())
    spoofed = replace(second.actor.claims(second.challenge), measurement=bytes(32))
    assert second.actor.send(second.actor.sign(spoofed)).problem().code is Code.MEASUREMENT_UNKNOWN
    blame = (Code.RANK_REFUSED, "machine 1: measurement-unknown")
    assert refused(first.ask()) == blame
    assert refused(third.attest()) == blame, "who comes afterwards, with nothing wrong about it"
    assert refused(second.again().attest()) == blame, "there is no second try for the one to blame"
    assert first.ask().problem().check == "14"
    assert owner.releases() == 0
    assert owner.client().group(group_id(first))["refused"] == {"code": "measurement-unknown", "machine": 1}
    assert events(owner).count("group-refusal") == 1


def test_a_machine_that_is_missing_at_the_deadline_refuses_all(broker: LocalBroker, owner: Owner) -> None:
    first, second, _missing = group(owner, 3)
    pending(first.attest())
    broker.advance(LIFETIME_S / 2)
    pending(second.attest())
    broker.advance(LIFETIME_S / 2 - 40)
    pending(second.ask())
    broker.advance(41)
    blame = (Code.RANK_REFUSED, "machine 2: rank-lost")
    assert refused(first.ask()) == refused(second.ask()) == blame
    assert owner.releases() == 0


def test_the_last_machine_comes_too_late(broker: LocalBroker, owner: Owner) -> None:
    first = Machine.enter(Actor.enter(owner, (launches := owner.group(2))[0]))
    pending(first.attest())
    broker.advance(LIFETIME_S + 1)
    late = Machine.enter(Actor.enter(owner, launches[1]))
    assert refused(late.attest()) == (Code.RANK_REFUSED, "machine 1: rank-lost")
    assert refused(first.ask()) == (Code.RANK_REFUSED, "machine 1: rank-lost")
    assert owner.releases() == 0


def test_a_lost_answer_costs_a_waiting_machine_nothing(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    again = first.again()
    assert pending(again.attest()).accepted == 1, "it is still one machine"
    assert refused(first.ask())[0] is Code.NONCE_UNKNOWN, "the new evidence has taken the place of the old"
    assert second.key(second.attest()) == owner.package_key
    assert again.key(again.ask()) == owner.package_key
    third = again.again()
    assert third.key(third.attest()) == owner.package_key, "and so it does when the release itself was lost"
    assert owner.releases() == 2


def test_a_machine_that_comes_back_with_other_keys_is_another_one(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    for changes in ({"hpke": RecipientKey.generate()}, {"evidence": SigningKey.generate()}):
        other = Machine.enter(replace(first.actor, **changes))  # type: ignore[arg-type]
        assert other.attest().problem().code in {Code.RELEASE_BUDGET, Code.RANK_REFUSED}
    assert refused(second.attest()) == (Code.RANK_REFUSED, "machine 0: release-budget-exhausted")
    assert owner.releases() == 0


def test_a_released_machine_cannot_take_the_release_to_other_keys(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    second.attest().content()
    for changes in ({"hpke": RecipientKey.generate()}, {"evidence": SigningKey.generate()}):
        other = Machine.enter(replace(first.actor, **changes))  # type: ignore[arg-type]
        assert other.attest().problem().code is Code.RELEASE_BUDGET
    assert first.key(first.ask()) == owner.package_key, "the true machine's release is not touched by that"
    assert owner.releases() == 2


def test_two_machines_cannot_be_one_runtime(owner: Owner) -> None:
    first, second = (Actor.enter(owner, launch) for launch in owner.group(2))
    pending(Machine.enter(first).attest())
    assert Machine.enter(replace(second, evidence=first.evidence)).attest().problem().code is Code.RELEASE_BUDGET
    assert owner.releases() == 0


def test_a_waiting_machines_key_that_others_name_as_theirs_refuses_no_group(broker: LocalBroker) -> None:
    """HPKE keys travel in the clear: a launch outside the group named one, and the group was refused for it."""
    owner = Owner(broker, releases=4)
    machines = group(owner, 2)
    read = machines[0].actor.hpke
    pending(machines[0].attest())
    outside, elsewhere = Actor.enter(owner), Actor.enter(owner, owner.group(2)[0])
    Machine.enter(replace(outside, hpke=read)).attest().content()
    pending(Machine.enter(replace(elsewhere, hpke=read)).attest())
    assert machines[1].key(machines[1].attest()) == owner.package_key
    assert machines[0].key(machines[0].ask()) == owner.package_key
    assert owner.releases() == 3, "each pair of keys counts"


def test_a_replayed_message_of_a_waiting_machine_changes_nothing(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    assert first.attest().problem().code is Code.NONCE_REPLAYED
    assert second.key(second.attest()) == owner.package_key
    assert first.attest().problem().code is Code.NONCE_REPLAYED
    assert first.key(first.ask()) == owner.package_key


def test_a_reader_who_posts_garbage_refuses_no_group(broker: LocalBroker, owner: Owner) -> None:
    first, second = group(owner, 2)
    stranger = replace(second.actor, launch=owner.launch(), evidence=SigningKey.generate())
    claims = replace(second.actor.claims(second.challenge), evidence_public=stranger.evidence.public)
    forged = stranger.sign(replace(claims, measurement=bytes(32)))
    for joined in (False, True):
        if joined:
            pending(first.attest())
        before = broker.everything()
        assert stranger.send(forged).problem().code is Code.EVIDENCE_SIGNATURE
        assert broker.everything() == before
    broker.advance(LIFETIME_S + 1)
    before = broker.everything()
    assert stranger.send(forged).problem().code is Code.EVIDENCE_SIGNATURE
    assert broker.everything() == before, "the deadline passed, and a stranger does not have that written down"
    broker.advance(-LIFETIME_S - 1)
    assert second.key(second.attest()) == owner.package_key
    assert first.key(first.ask()) == owner.package_key


def test_a_token_of_another_machine_or_another_group_is_refused_and_named(owner: Owner) -> None:
    """Both tokens are genuine and for the same launch key: who holds both chooses no place for itself."""
    key, client = SigningKey.generate(), owner.client()
    places = client.add_group(owner.deployment, machines=2, ranks=1)
    other_place = client.add_group(owner.deployment, machines=2, ranks=1)[0]
    here, there = (owner.launch(key=key, group=place) for place in places)
    elsewhere = owner.launch(key=key, group=other_place)
    for token in (there.token, elsewhere.token):
        actor = Actor.enter(owner, here)
        reply = actor.send(actor.sign(replace(actor.claims(actor.challenge()), token=token)))
        assert reply.problem().code in {Code.TOKEN_CLAIM, Code.RANK_REFUSED}
    assert client.group(places[0].id)["refused"] == {"code": "token-claim-mismatch", "machine": 0}
    assert client.group(other_place.id)["state"] == "open", "another group pays for nothing"


def test_a_machine_whose_token_ends_while_it_waits_is_the_one_that_is_blamed(broker: LocalBroker, owner: Owner) -> None:
    """Any challenge sweeps what is over; what a machine of an open group waits with is not."""
    places = owner.client().add_group(owner.deployment, machines=3, ranks=1)
    launches = [owner.launch(group=one, lifetime_s=60 if at == 1 else 600) for at, one in enumerate(places)]
    machines = [Machine.enter(Actor.enter(owner, one)) for one in launches[:2]]
    for one in machines:
        pending(one.attest())
    broker.advance(61)
    last = Machine.enter(Actor.enter(owner, launches[2]))
    assert refused(last.attest()) == (Code.RANK_REFUSED, "machine 1: token-expired")
    assert owner.client().group(group_id(last))["refused"] == {"code": "token-expired", "machine": 1}


def test_a_launch_from_before_the_clock_was_set_right_sweeps_nothing_of_others(broker: LocalBroker) -> None:
    """Its challenges are dated later than those before it; the broker swept, for everybody, as of that time."""
    owner = Owner(broker, releases=9)
    early = Actor.enter(owner.another(releases=9))
    broker.advance(900)
    assert early.post("/v1/challenge", challenge_request(early.launch)).status == 200
    broker.advance(-898)
    first, second = group(owner, 2)
    pending(first.attest())
    alone = Actor.enter(owner, owner.launch(lifetime_s=600))
    challenge = alone.challenge()
    broker.advance(2)
    assert early.post("/v1/challenge", challenge_request(early.launch)).status == 200
    assert second.key(second.attest()) == owner.package_key
    assert first.key(first.ask()) == owner.package_key
    evidence = alone.sign(alone.claims(challenge))
    assert alone.open(alone.send(evidence).content(), challenge, evidence) == owner.package_key


def test_the_owner_takes_the_key_back_while_machines_wait(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    owner.client().revoke(owner.manifest.package_id)
    assert first.ask().problem().code is Code.PACKAGE_REVOKED
    assert second.attest().problem().code is Code.PACKAGE_REVOKED
    assert owner.client().group(group_id(first))["refused"] == {"code": "package-revoked", "machine": 0}
    assert owner.releases() == 0


def test_the_owner_takes_the_key_back_after_the_decision(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    second.attest().content()
    owner.client().revoke(owner.manifest.package_id)
    assert first.ask().problem().code is Code.PACKAGE_REVOKED, "what was not handed out yet stays where it is"


def test_the_owner_narrows_the_delegation_while_machines_wait(broker: LocalBroker, owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    now_us = broker.clock_us()
    narrowed = Delegation(
        broker_public=broker.broker_public,
        uses=frozenset({Use.COUNTERSIGN}),
        not_before_us=now_us - 1_000_000,
        not_after_us=now_us + 3_600_000_000,
    ).sign(owner.signing)
    owner.client().put_delegation(narrowed, owner.signing.public)
    assert second.attest().problem().code is Code.CHAIN_DELEGATION
    assert first.ask().problem().code is Code.CHAIN_DELEGATION
    assert owner.releases() == 0


def test_a_waiting_machine_whose_token_expires_ends_the_group(broker: LocalBroker, owner: Owner) -> None:
    """Its stored evidence is appraised again when the last machine comes, and does not pass any more."""
    places = owner.client().add_group(owner.deployment, machines=3, ranks=1)
    lives = (600, 90, 600)
    launches = [owner.launch(group=place, lifetime_s=life) for place, life in zip(places, lives, strict=True)]
    first, short, last = (Machine.enter(Actor.enter(owner, launch)) for launch in launches)
    assert short.challenge.expires_us < first.challenge.expires_us, "a challenge ends with its token"
    pending(first.attest())
    pending(short.attest())
    broker.advance(95)
    assert refused(last.attest()) == (Code.RANK_REFUSED, "machine 1: token-expired")
    assert short.ask().problem().code is Code.TOKEN_EXPIRED
    assert refused(first.ask()) == (Code.RANK_REFUSED, "machine 1: token-expired")
    assert owner.releases() == 0


def test_the_owner_says_that_a_machine_has_ended(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    client, place = owner.client(), group_id(first)
    assert client.refuse_group(place, machine=1, code=Code.HARDENING_MISSING) == {"state": "refused"}
    assert refused(first.ask()) == (Code.RANK_REFUSED, "machine 1: hardening-missing")
    assert refused(second.attest()) == (Code.RANK_REFUSED, "machine 1: hardening-missing")
    with pytest.raises(UsageError):
        client.refuse_group(place, machine=2, code=Code.HARDENING_MISSING)


def test_what_was_released_stays_released_whatever_the_owner_says_of_a_machine(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    second.attest().content()
    assert owner.client().refuse_group(group_id(first), machine=1, code=Code.WORKER_FAILED) == {"state": "released"}
    assert first.key(first.ask()) == owner.package_key


def test_a_release_request_of_a_stranger_is_refused(owner: Owner) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    thief = replace(first.actor, evidence=SigningKey.generate())
    assert thief.ask(first.challenge, first.evidence).problem().code is Code.EVIDENCE_SIGNATURE
    assert first.actor.ask(second.challenge, first.evidence).problem().code is Code.NONCE_UNKNOWN
    assert first.actor.ask(first.challenge, b"other evidence").problem().code is Code.NONCE_UNKNOWN
    assert second.ask().problem().code is Code.NONCE_UNKNOWN, "it has not attested yet"
    request = ReleaseRequest(nonce=first.challenge.nonce, evidence_sha256=bytes(32)).sign(first.actor.evidence).encode()
    assert first.actor.post("/v1/release", request).problem().code is Code.NONCE_UNKNOWN
    assert first.actor.post("/v1/release", b"{}").problem().code is Code.MESSAGE_INVALID
    assert first.actor.post("/v1/release", first.evidence).problem().code is Code.MESSAGE_TOO_LARGE
    pending(first.ask())


def test_a_runtime_without_a_group_has_nothing_to_ask_for(owner: Owner) -> None:
    alone = Machine.enter(Actor.enter(owner))
    alone.attest().content()
    assert alone.ask().problem().code is Code.NONCE_UNKNOWN


def test_a_group_must_fit_into_the_budget_as_a_whole(owner: Owner) -> None:
    with pytest.raises(UsageError) as caught:
        owner.group(4)
    assert caught.value.code is Code.POLICY_IMPOSSIBLE
    first, second = group(owner, 2)
    others = group(owner, 2)
    pending(first.attest())
    second.attest().content()
    assert others[0].attest().problem().code is Code.RELEASE_BUDGET, "one is left, and two would be needed"
    assert owner.releases() == 2


def test_machines_that_may_not_talk_are_no_group(broker: LocalBroker) -> None:
    """What the owner signed for every run of the package, the deployment may have tightened."""
    silent = Owner(broker, releases=3, egress=())
    with pytest.raises(UsageError) as caught:
        silent.group(2)
    assert caught.value.code is Code.POLICY_IMPOSSIBLE
    [alone] = group(silent, 1)
    assert alone.key(alone.attest()) == silent.package_key


def test_a_place_in_a_group_is_launched_once_and_only_as_announced(owner: Owner) -> None:
    place, other = owner.client().add_group(owner.deployment, machines=2, ranks=4)
    owner.launch(group=place)
    for wrong in (
        place,
        replace(other, ranks=2),
        replace(other, machines=3),
        replace(other, id=bytes(32)),
    ):
        with pytest.raises(UsageError):
            owner.launch(group=wrong)
    stranger = Owner(owner._broker, releases=3)
    with pytest.raises(UsageError):
        stranger.launch(group=other)


def test_a_group_that_is_over_takes_no_launch(owner: Owner) -> None:
    place, other = owner.client().add_group(owner.deployment, machines=2, ranks=1)
    owner.client().refuse_group(place.id, machine=0, code=Code.INTERRUPTED)
    with pytest.raises(UsageError):
        owner.launch(group=other)


def test_the_evidence_of_who_waits_is_kept_no_longer_than_it_waits(broker: LocalBroker, owner: Owner) -> None:
    stored = "SELECT count(*) FROM members WHERE evidence IS NOT NULL"
    first, second = group(owner, 2)
    pending(first.attest())
    assert broker.rows(stored) == [(1,)]
    second.attest().content()
    assert broker.rows(stored) == [(0,)]


def test_evidence_that_waits_in_vain_is_swept(broker: LocalBroker, owner: Owner) -> None:
    stored = "SELECT count(*) FROM members WHERE evidence IS NOT NULL"
    first, _never = group(owner, 2)
    pending(first.attest())
    broker.advance(LIFETIME_S + 2)
    Actor.enter(owner).challenge()
    assert broker.rows(stored) == [(0,)]
    assert refused(first.ask()) == (Code.RANK_REFUSED, "machine 1: rank-lost")


@pytest.fixture
def defect(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Release]]:
    """A broker that fails between the first release of a group and the second."""
    written: list[Release] = []

    def failing(broker: Any, connection: Connection, standing: Any, release: Release, *more: Any) -> None:
        written.append(release)
        if len(written) == 2:
            raise ZeroDivisionError
        write_release(broker, connection, standing, release, *more)

    monkeypatch.setattr(key_release, "write_release", failing)
    yield written
    assert len(written) >= 2, "the defect was met"


def test_a_defect_between_two_releases_takes_both_back(owner: Owner, defect: list[Release]) -> None:
    """What a broker stores although it fails is the challenge's consumption, and never a part of a group."""
    first, second = group(owner, 2)
    pending(first.attest())
    assert second.attest().problem().code is Code.INTERNAL
    assert owner.releases() == 0
    assert pending(first.ask()).accepted == 1, "nor was the last machine accepted"
    assert (events(owner).count("accepted"), events(owner).count("release")) == (1, 0)
    again = second.again()
    assert again.key(again.attest()) == first.key(first.ask()) == owner.package_key
    assert owner.releases() == 2


def test_a_group_ends_although_its_last_machine_met_a_defect_and_stayed_away(
    broker: LocalBroker, owner: Owner, defect: list[Release]
) -> None:
    first, second = group(owner, 2)
    pending(first.attest())
    assert second.attest().problem().code is Code.INTERNAL
    broker.advance(LIFETIME_S + 1)
    assert refused(first.ask()) == (Code.RANK_REFUSED, "machine 1: rank-lost")
    assert refused(second.again().attest()) == (Code.RANK_REFUSED, "machine 1: rank-lost")


def test_an_announced_group_says_what_it_is(owner: Owner) -> None:
    places = owner.client().add_group(owner.deployment, machines=2, ranks=3)
    assert [place.first_rank for place in places] == [0, 3]
    assert {place.world_size for place in places} == {6}
    again = owner.client().add_group(owner.deployment, machines=2, ranks=3)
    assert again[0].id != places[0].id, "an id is never used twice"
    assert owner.client().group(places[0].id) == {
        "accepted": 0,
        "deadline_us": None,
        "deployment": owner.deployment,
        "launched": 0,
        "machines": 2,
        "ranks": 3,
        "refused": None,
        "state": "open",
    }
    for unknown in (bytes(32), b"short"):
        with pytest.raises(UsageError):
            owner.client().group(unknown)


def test_a_database_from_before_there_were_groups_gets_them(tmp_path: Path) -> None:
    with LocalBroker(tmp_path) as broker:
        broker.rows("SELECT 1")
    with sqlite3.connect(tmp_path / "data" / "broker.sqlite3") as connection:
        connection.execute("DROP TABLE members")
        connection.execute("DROP TABLE groups")
    with LocalBroker(tmp_path) as broker:
        owner = Owner(broker, releases=2)
        first, second = group(owner, 2)
        pending(first.attest())
        assert second.key(second.attest()) == owner.package_key


def test_a_token_says_its_group_and_an_ordinary_one_none(owner: Owner) -> None:
    assert owner.launch().claims().group is None
    place = owner.client().add_group(owner.deployment, machines=2, ranks=1)[1]
    assert owner.launch(group=place).claims().group == place


def test_a_machine_that_attested_in_another_state_ends_the_group(owner: Owner) -> None:
    first, second = group(owner, 2)
    early = replace(first.actor.claims(first.challenge), state=State.CREATED)
    assert first.actor.send(first.actor.sign(early)).problem().code is Code.STATE_MISMATCH
    assert refused(second.attest()) == (Code.RANK_REFUSED, "machine 0: state-mismatch")
