"""Evidence that was recorded on the way and never arrived, posted later by whoever recorded it."""

from __future__ import annotations

import sys
from dataclasses import replace
from http.client import HTTPConnection

import pytest

from glasshouse.broker.decide.challenges import ChallengeIssuer, GateLimits
from glasshouse.broker.decide.decisions import Effect
from glasshouse.broker.decide.group_release import ReleaseRequests
from glasshouse.broker.decide.key_release import ReleaseGate
from glasshouse.broker.http.intake import Pace, Shares
from glasshouse.errors import Code
from glasshouse.handshake.messages import ReleaseMessage
from glasshouse.handshake.runtime_side import challenge_request, release_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import jwt
from glasshouse.wire.crypto import RecipientKey
from simulators.gate_machines import Machine, group_id, pending
from simulators.local_broker import LocalBroker

HONEST = "192.0.2.1"
LIFETIME_S = GateLimits().challenge_lifetime_us / 1_000_000


def accepted_later(broker: LocalBroker, owner: Owner, **earlier: object) -> tuple[Machine, Machine, Actor]:
    """A machine whose first evidence was held back and whose second was accepted, 30 s later, and one that comes."""
    first, last = (Actor.enter(owner, launch) for launch in owner.group(2))
    held = Machine.enter(replace(first, **earlier))  # type: ignore[arg-type]
    broker.advance(30)
    waiting = Machine.enter(first)
    pending(waiting.attest())
    return held, waiting, last


def wrongly_measured(machine: Machine) -> bytes:
    claims, now_us = machine.actor.claims(machine.challenge), machine.challenge.issued_us
    return machine.actor.sign(replace(claims, measurement=bytes(32), issued_us=now_us, started_us=now_us))


def test_it_does_not_take_the_place_of_what_a_machine_was_accepted_with_since(
    broker: LocalBroker, owner: Owner
) -> None:
    held, waiting, last = accepted_later(broker, owner)
    before = pending(waiting.ask())
    assert pending(held.attest()) == before, "one machine, and its deadline stays"
    assert pending(waiting.ask()) == before
    assert held.ask().problem().code is Code.NONCE_UNKNOWN
    machine = Machine.enter(last)
    assert machine.key(machine.attest()) == waiting.key(waiting.ask()) == owner.package_key
    assert owner.releases() == 2


def test_it_refuses_no_group_once_its_challenge_has_expired(broker: LocalBroker, owner: Owner) -> None:
    held, waiting, last = accepted_later(broker, owner)
    broker.advance(LIFETIME_S - 29)
    machine = Machine.enter(last)
    assert held.attest().problem().code is Code.NONCE_EXPIRED
    assert machine.key(machine.attest()) == waiting.key(waiting.ask()) == owner.package_key


def test_a_machine_that_came_too_late_with_its_evidence_may_come_again(broker: LocalBroker, owner: Owner) -> None:
    """Before it was accepted with any: late is not wrong."""
    late, first = (Machine.enter(Actor.enter(owner, launch)) for launch in owner.group(2))
    broker.advance(LIFETIME_S + 1)
    pending((first := first.again()).attest())
    assert late.attest().problem().code is Code.NONCE_EXPIRED
    again = late.again()
    assert again.key(again.attest()) == first.key(first.ask()) == owner.package_key


def test_what_would_be_refused_refuses_nothing_when_it_is_older(broker: LocalBroker, owner: Owner) -> None:
    """A first start of this machine with other keys, of which nothing arrived."""
    held, waiting, last = accepted_later(broker, owner, hpke=RecipientKey.generate())
    pending(held.attest())
    spoofed = Machine.enter(held.actor)
    wrong = wrongly_measured(spoofed)
    pending((waiting := waiting.again()).attest())
    assert held.actor.send(wrong).problem().code is Code.MEASUREMENT_UNKNOWN
    machine = Machine.enter(last)
    assert machine.key(machine.attest()) == waiting.key(waiting.ask()) == owner.package_key


def test_what_is_newer_and_wrong_refuses_the_group(broker: LocalBroker, owner: Owner) -> None:
    _, waiting, last = accepted_later(broker, owner)
    newer = waiting.again()
    assert newer.actor.send(wrongly_measured(newer)).problem().code is Code.MEASUREMENT_UNKNOWN
    problem = Machine.enter(last).attest().problem()
    assert (problem.code, problem.actual) == (Code.RANK_REFUSED, "machine 0: measurement-unknown")
    assert owner.client().group(group_id(waiting))["state"] == "refused"


def test_which_is_later_does_not_hang_on_a_clock_that_was_set_back(broker: LocalBroker, owner: Owner) -> None:
    """A challenge is dated after all of its launch before it: else the newest evidence would pass for old."""
    launches = owner.group(2)
    broker.advance(40)
    machines = [Machine.enter(Actor.enter(owner, launches[0]))]
    for step_s in (-20, -15, 0):
        pending(machines[-1].attest())
        broker.advance(step_s)
        machines.append(machines[-1].again())
    dates = [machine.challenge.issued_us for machine in machines]
    assert dates == sorted(set(dates))
    waiting, last = machines[-1], Machine.enter(Actor.enter(owner, launches[1]))
    pending(waiting.attest())
    assert last.key(last.attest()) == waiting.key(waiting.ask()) == owner.package_key
    issued_s = jwt.parse(ReleaseMessage.parse(waiting.ask().content()).ear).claims["iat"]
    assert issued_s >= dates[-1] // 1_000_000


def test_it_gives_its_sender_none_of_the_room_that_is_kept_for_runs(broker: LocalBroker, owner: Owner) -> None:
    """Neither the first time that it is played again, nor where it never arrived and its challenge is over."""
    gate = ReleaseGate(broker.opened)
    first, late = (Machine.enter(Actor.enter(owner)) for _ in range(2))
    assert gate.evidence(first.evidence).effect is Effect.CREDIT
    first.attest().content()
    assert gate.evidence(first.evidence).effect is Effect.CHARGE
    broker.advance(LIFETIME_S + 1)
    assert gate.evidence(late.evidence).effect is Effect.CHARGE
    assert late.attest().problem().code is Code.NONCE_EXPIRED


def test_a_machine_that_waits_for_its_group_may_ask_once_a_second_and_costs_its_address_nothing(
    broker: LocalBroker, owner: Owner
) -> None:
    """Sixty-four of them behind one address were taken for strangers after twenty seconds."""
    requests = ReleaseRequests(broker.opened)
    first, last = (Machine.enter(Actor.enter(owner, launch)) for launch in owner.group(2))
    pending(first.attest())
    asking = release_request(first.challenge, first.evidence, evidence_key=first.actor.evidence)
    pace = Pace(broker.clock_us)

    def effect(address: str = HONEST) -> Effect:
        return pace.effect(requests.ask(asking), address)

    for _ in range(30):
        broker.advance(1)
        assert effect() is Effect.NOTHING
        assert Effect.CHARGE in [effect("192.0.2.2") for _ in range(5)], "a recording of it that is played faster"
    assert {effect() for _ in range(10)} == {Effect.NOTHING, Effect.CHARGE}
    assert effect() is Effect.CHARGE
    last.attest().content()
    broker.advance(3)
    assert first.key(first.ask()) == owner.package_key
    assert effect() is Effect.NOTHING


@pytest.mark.skipif(sys.platform != "linux", reason="where a machine has one loopback address")
def test_what_others_play_again_is_charged_to_them(
    broker: LocalBroker, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[str] = []
    monkeypatch.setattr(Shares, "charge", lambda _shares, address, _seconds: charged.append(address))
    first = Machine.enter(Actor.enter(owner, owner.group(2)[0]))
    pending(first.attest())
    asking = release_request(first.challenge, first.evidence, evidence_key=first.actor.evidence)
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    for _ in range(20):
        connection = HTTPConnection(host, int(port), timeout=10, source_address=("127.0.0.2", 0))
        connection.request("POST", "/v1/release", asking, {"content-type": "application/json"})
        assert connection.getresponse().status == 202
        connection.close()
    pending(first.ask())
    assert set(charged) == {"127.0.0.2"}


def test_recordings_of_many_machines_whose_groups_were_decided_are_charged_to_who_plays_them(
    broker: LocalBroker, owner: Owner
) -> None:
    """Three hundred of them, one a second of each, from one address kept a broker busy and were never charged."""
    requests = ReleaseRequests(broker.opened)
    first, last = (Machine.enter(Actor.enter(owner, launch)) for launch in owner.group(2))
    pending(first.attest())
    last.attest().content()
    asking = [release_request(one.challenge, one.evidence, evidence_key=one.actor.evidence) for one in (first, last)]
    pace = Pace(broker.clock_us)
    played: list[Effect] = []
    for _ in range(50):
        broker.advance(1)
        played += [pace.effect(requests.ask(request), "192.0.2.2") for request in asking]
    assert played[:6] == [Effect.NOTHING] * 6, "a machine whose answer was lost asks again"
    assert set(played[6:]) == {Effect.CHARGE}
    assert pace.effect(requests.ask(asking[0]), HONEST) is Effect.NOTHING, "the machine's own address is another's"
    assert first.key(first.ask()) == owner.package_key, "and what is charged is answered still"


def test_who_finds_a_group_over_has_shown_no_sign_of_life(broker: LocalBroker, owner: Owner) -> None:
    """A recording of what a machine asked while it waited, played again just after the deadline."""
    requests = ReleaseRequests(broker.opened)
    first = Machine.enter(Actor.enter(owner, owner.group(2)[0]))
    pending(first.attest())
    asking = release_request(first.challenge, first.evidence, evidence_key=first.actor.evidence)
    broker.advance(LIFETIME_S + 1)
    pace = Pace(broker.clock_us)
    played = [pace.effect(requests.ask(asking), "192.0.2.2") for _ in range(5)]
    assert played[0] is Effect.NOTHING
    assert played[-1] is Effect.CHARGE
    assert Effect.CREDIT not in played
    assert first.ask().problem().code is Code.RANK_REFUSED


def test_a_launch_that_is_told_to_come_again_costs_its_address_nothing_if_it_does_not_hurry(
    broker: LocalBroker, owner: Owner
) -> None:
    """It has a challenge, asks for another, and its deployment has sixteen open."""
    limits = GateLimits(outstanding=1)
    gate = ChallengeIssuer(broker.opened, limits)
    first, second = owner.group(2)
    for launch in (first, second):
        assert gate.challenge(challenge_request(launch)).decide().status == 200
    pace = Pace(broker.clock_us)
    for _ in range(5):
        broker.advance(1)
        decision = gate.challenge(challenge_request(second))
        assert pace.effect(decision, HONEST) is Effect.NOTHING
        assert decision.decide().status == 429
    hurried = [gate.challenge(challenge_request(second)) for _ in range(5)]
    assert hurried[-1].decide().status == 429
    assert [pace.effect(decision, HONEST) for decision in hurried][-1] is Effect.CHARGE
    assert pace.effect(hurried[-1], "192.0.2.2") is Effect.NOTHING
