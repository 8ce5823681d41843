"""A broker's clock that is set back, and a delegation that changes: judged at no time before what it was used for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.broker.decide import group_release
from glasshouse.errors import Code
from glasshouse.evidence.heads import CountersignedHead
from glasshouse.handshake.delegation import Delegation
from glasshouse.handshake.messages import ReleaseMessage
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import jwt
from glasshouse.wire.states import State
from simulators.gate_machines import Machine, group, pending
from simulators.local_broker import LocalBroker
from simulators.reporting import Reporter, release_to


@pytest.fixture
def owner(broker: LocalBroker) -> Owner:
    """An owner who delegated this very moment."""
    made = Owner(broker, releases=3)
    delegate(made, not_before_us=broker.clock_us())
    return made


def delegate(owner: Owner, **changes: int) -> None:
    now = Delegation.from_envelope(owner.delegation, owner.signing.public)
    changed = replace(now, **changes).sign(owner.signing)  # type: ignore[arg-type]
    owner.client().put_delegation(changed, owner.signing.public)


def ended(actor: Actor) -> Reporter:
    """A released run whose last head was countersigned."""
    release_to(actor)
    reporter = Reporter(actor)
    reporter.end()
    reporter.send(reporter.submission()).content()
    return reporter


def test_a_launch_is_given_a_challenge_and_a_release(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner)
    broker.advance(-5)
    assert release_to(actor) == owner.package_key


def test_machines_that_wait_go_on_waiting_and_are_released_to(broker: LocalBroker, owner: Owner) -> None:
    first, last = group(owner, 2)
    waiting = pending(first.attest())
    broker.advance(-5)
    assert pending(first.ask()) == waiting
    assert last.key(last.attest()) == first.key(first.ask()) == owner.package_key


def test_a_receipt_is_countersigned(broker: LocalBroker, owner: Owner) -> None:
    reporter = ended(Actor.enter(owner))
    broker.advance(-5)
    reporter.actor.post("/v1/receipt", reporter.receipt()).content()


def test_a_delegation_that_ended_before_a_head_is_not_brought_back(broker: LocalBroker, owner: Owner) -> None:
    """The owner ends it; the date of a head or receipt would lie after that end."""
    actor = Actor.enter(owner)
    release_to(actor)
    reporter = Reporter(actor)
    broker.advance(40)
    reporter.send(reporter.submission()).content()
    now_us = broker.clock_us()
    broker.advance(-20)
    delegate(owner, not_after_us=now_us - 10_000_000)
    reporter.go_on(State.HARDENED)
    assert reporter.send(reporter.submission()).problem().code is Code.CHAIN_DELEGATION


def test_a_delegation_that_ended_before_the_last_head_countersigns_no_receipt(
    broker: LocalBroker, owner: Owner
) -> None:
    broker.advance(20)
    reporter = ended(Actor.enter(owner))
    now_us = broker.clock_us()
    broker.advance(-20)
    delegate(owner, not_after_us=now_us - 10_000_000)
    assert reporter.actor.post("/v1/receipt", reporter.receipt()).problem().code is Code.CHAIN_DELEGATION


def test_a_delegation_that_ended_before_the_decision_hands_out_no_release(broker: LocalBroker, owner: Owner) -> None:
    launches = owner.group(2)
    broker.advance(20)
    first, last = (Machine.enter(Actor.enter(owner, launch)) for launch in launches)
    pending(first.attest())
    last.attest().content()
    now_us = broker.clock_us()
    broker.advance(-20)
    delegate(owner, not_after_us=now_us - 10_000_000)
    assert first.ask().problem().code is Code.CHAIN_DELEGATION


def test_a_clock_that_steps_back_dates_no_machines_release_before_its_challenge(
    broker: LocalBroker, owner: Owner
) -> None:
    """The last machine of a group is released to with the others; its challenge may be dated before theirs."""
    launches = owner.group(2)
    broker.advance(20)
    first = Machine.enter(Actor.enter(owner, launches[0]))
    pending(first.attest())
    broker.advance(-40)
    last = Machine.enter(Actor.enter(owner, launches[1]))
    assert last.key(last.attest()) == owner.package_key
    for machine, reply in ((first, first.ask()), (last, last.ask())):
        released_s = jwt.parse(ReleaseMessage.parse(reply.content()).ear).claims["iat"]
        assert released_s >= machine.challenge.issued_us // 1_000_000
        reporter = Reporter(machine.actor)
        head = CountersignedHead.parse(
            reporter.send(reporter.submission()).content(),
            broker_public=broker.broker_public,
            evidence_public=machine.actor.evidence.public,
        )
        assert head.time_us >= released_s * 1_000_000


def test_a_delegation_that_is_renewed_while_a_machine_asks_refuses_no_group(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = group(owner, 2)
    pending(first.attest())
    check, asked = group_release.check_releasable, []

    def late(*arguments: Any, **others: Any) -> None:
        asked.append(None)
        if len(asked) == 1:
            raise CheckFailedError("2", Code.CHAIN_DELEGATION, "it was over when the machine asked")
        check(*arguments, **others)

    monkeypatch.setattr(group_release, "check_releasable", late)
    pending(first.ask())
    monkeypatch.setattr(group_release, "check_releasable", check)
    assert last.attest().status == 200
