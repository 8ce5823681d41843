"""How long a challenge lives and how many there are, also when a clock is set back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.broker.decide.challenges import ChallengeIssuer, GateLimits
from glasshouse.errors import Code, RefusedError
from glasshouse.evidence.heads import CountersignedHead
from glasshouse.handshake.launch import CLOCK_STEP_S
from glasshouse.handshake.messages import Challenge, ReleaseMessage
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import jwt
from glasshouse.wire.states import State
from simulators.local_broker import LocalBroker, exchange, refused
from simulators.reporting import Reporter

LIMITS = GateLimits(outstanding=3, outstanding_per_launch=2, per_launch=6)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path, limits=LIMITS) as running:
        yield running


@pytest.fixture
def owner(broker: LocalBroker) -> Owner:
    return Owner(broker)


def test_an_expired_challenge_is_consumed_too(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner)
    evidence = actor.sign(actor.claims(actor.challenge()))
    broker.advance(LIMITS.challenge_lifetime_us / 1e6 + 1)
    assert refused(actor, evidence) is Code.NONCE_EXPIRED
    assert refused(actor, evidence) is Code.NONCE_REPLAYED


def test_a_tombstone_lives_as_long_as_its_token_and_is_swept_then(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner, owner.launch(lifetime_s=200))
    evidence = actor.sign(actor.claims(actor.challenge()))
    assert actor.send(evidence).status == 200
    broker.advance(195)
    Actor.enter(owner).challenge()
    assert broker.count("challenges") == 2
    assert refused(actor, evidence) is Code.NONCE_REPLAYED
    broker.advance(6)
    Actor.enter(owner).challenge()
    assert broker.count("challenges") == 2, "the first one is gone"
    assert refused(actor, evidence) is Code.NONCE_UNKNOWN


def test_a_request_that_is_refused_does_not_keep_tombstones_alive(broker: LocalBroker, owner: Owner) -> None:
    """Otherwise one launch that asks too often would keep every challenge ever given in the database."""
    Actor.enter(owner, owner.launch(lifetime_s=200)).challenge()
    broker.advance(195)
    greedy = Actor.enter(owner)
    for _ in range(LIMITS.per_launch):
        greedy.send(greedy.sign(greedy.claims(greedy.challenge())))
    broker.advance(6)
    with pytest.raises(RefusedError):
        greedy.challenge()
    Actor.enter(owner).challenge()
    assert broker.count("challenges") == LIMITS.per_launch + 1, "the first one is gone, although a refusal came first"


def test_a_clock_that_is_set_back_a_little_costs_no_runtime_its_challenge(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner)
    asking = challenge_request(actor.launch)
    challenge = Challenge.parse(actor.post("/v1/challenge", asking).content())
    evidence = actor.sign(actor.claims(challenge))
    broker.advance(-0.5)
    assert Challenge.parse(actor.post("/v1/challenge", asking).content()) == challenge
    assert actor.open(actor.send(evidence).content(), challenge, evidence) == owner.package_key


@pytest.mark.parametrize("when", ["before it asks", "before it answers", "before it reports"])
def test_a_clock_that_steps_back_by_seconds_ends_no_launch_and_dates_nothing_backwards(
    broker: LocalBroker, owner: Owner, when: str
) -> None:
    actor = Actor.enter(owner)
    issued_us = actor.launch.claims().issued_s * 1_000_000
    broker.advance(-30 if when == "before it asks" else 0)
    challenge = actor.challenge()
    broker.advance(-30 if when == "before it answers" else 0)
    evidence = actor.sign(actor.claims(challenge))
    content = actor.send(evidence).content()
    assert actor.open(content, challenge, evidence) == owner.package_key
    released_us = jwt.parse(ReleaseMessage.parse(content).ear).claims["iat"] * 1_000_000
    broker.advance(-30 if when == "before it reports" else 0)
    reporter = Reporter(actor)
    reply = reporter.send(reporter.submission())
    head = CountersignedHead.parse(
        reply.content(), broker_public=broker.broker_public, evidence_public=actor.evidence.public
    )
    assert issued_us <= challenge.issued_us
    assert issued_us <= released_us <= head.time_us, "what a verifier of the receipt asks"


def test_a_clock_that_steps_back_dates_no_head_before_the_release_that_the_runtime_kept(
    broker: LocalBroker, owner: Owner
) -> None:
    """A runtime that lost its answer is released to again, later; its receipt tells of the later release."""
    actor = Actor.enter(owner)
    actor.send(actor.sign(actor.claims(actor.challenge()))).content()
    broker.advance(30)
    content = actor.send(actor.sign(actor.claims(actor.challenge()))).content()
    released_us = jwt.parse(ReleaseMessage.parse(content).ear).claims["iat"] * 1_000_000
    broker.advance(-30)
    reporter = Reporter(actor)
    head = CountersignedHead.parse(
        reporter.send(reporter.submission()).content(),
        broker_public=broker.broker_public,
        evidence_public=actor.evidence.public,
    )
    assert head.time_us >= released_us


def test_a_clock_that_steps_back_by_more_is_not_believed(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner)
    broker.advance(-CLOCK_STEP_S - 2)
    with pytest.raises(RefusedError) as caught:
        actor.challenge()
    assert caught.value.code is Code.TOKEN_EXPIRED


def test_a_challenge_does_not_outlive_its_token(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner, owner.launch(lifetime_s=10))
    evidence = actor.sign(actor.claims(actor.challenge()))
    broker.advance(11)
    assert refused(actor, evidence) is Code.NONCE_EXPIRED


def test_outstanding_challenges_are_capped_and_expiry_makes_room(broker: LocalBroker, owner: Owner) -> None:
    starting = [Actor.enter(owner) for _ in range(LIMITS.outstanding)]
    for actor in starting:
        actor.challenge()
    with pytest.raises(RefusedError) as caught:
        starting[0].challenge()
    assert caught.value.code is Code.TOO_MANY_CHALLENGES
    assert broker.count("challenges") == LIMITS.outstanding
    broker.advance(LIMITS.challenge_lifetime_us / 1e6 + 1)
    assert starting[0].post("/v1/challenge", challenge_request(starting[0].launch)).status == 200


def test_launches_that_hold_all_challenges_of_their_deployment_keep_no_other_one_out(owner: Owner) -> None:
    """Four that asked anew whenever one ended held all sixteen: every honest start of the deployment gave up."""
    hostile = [Actor.enter(owner) for _ in range(LIMITS.outstanding)]
    held = 0
    for _ in range(LIMITS.outstanding_per_launch):
        for actor in hostile:
            held += actor.post("/v1/challenge", challenge_request(actor.launch)).status == 200
    assert held == LIMITS.outstanding
    assert exchange(Actor.enter(owner)) == owner.package_key


def test_one_launch_cannot_hold_all_challenges_of_its_deployment(owner: Owner) -> None:
    assert GateLimits().outstanding_per_launch < GateLimits().outstanding
    greedy = Actor.enter(owner)
    for _ in range(LIMITS.outstanding_per_launch):
        challenge = greedy.challenge()
    with pytest.raises(RefusedError) as caught:
        greedy.challenge()
    assert caught.value.code is Code.TOO_MANY_CHALLENGES
    assert exchange(Actor.enter(owner)) == owner.package_key
    greedy.send(greedy.sign(greedy.claims(challenge)))
    greedy.challenge()


def test_a_request_without_room_is_refused_before_it_is_decided_on(broker: LocalBroker, owner: Owner) -> None:
    """Signed requests are free for who has a launch key, and what is recorded of them for who does not."""
    greedy = Actor.enter(owner)
    for _ in range(LIMITS.outstanding_per_launch):
        greedy.challenge()
    gate = ChallengeIssuer(broker.opened, LIMITS)
    with pytest.raises(RefusedError) as caught:
        gate.challenge(challenge_request(greedy.launch))
    assert caught.value.code is Code.TOO_MANY_CHALLENGES


def test_one_launch_cannot_fill_the_store(owner: Owner) -> None:
    actor = Actor.enter(owner)
    for _ in range(LIMITS.per_launch):
        actor.send(actor.sign(replace(actor.claims(actor.challenge()), state=State.CREATED)))
    with pytest.raises(RefusedError) as caught:
        actor.challenge()
    assert caught.value.code is Code.TOO_MANY_CHALLENGES
    Actor.enter(owner).challenge()
