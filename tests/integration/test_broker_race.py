"""Two broker processes over one database: one nonce, one budget, one log."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.http_api import LineRequest, verify_chain
from glasshouse.errors import Code
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner, clock_us
from simulators.reporting import Reporter, release_to


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BrokerProcess]]:
    directory = tmp_path_factory.mktemp("brokers")
    # Started at the same moment on an empty directory: they must agree on one key file and one key.
    with ThreadPoolExecutor(2) as pool:
        sockets = [str(directory / "sockets" / name) for name in "ab"]
        started = list(pool.map(lambda socket: BrokerProcess(directory, "--owner-socket", socket), sockets))
    yield started
    for broker in started:
        assert broker.stop() == 0


def everywhere(brokers: list[BrokerProcess], actor: Actor) -> list[Actor]:
    return [replace(actor, url=broker.runtime_url) for broker in brokers]


def test_processes_that_start_together_are_one_broker(brokers: list[BrokerProcess]) -> None:
    assert brokers[0].broker_public == brokers[1].broker_public
    assert brokers[0].runtime_url != brokers[1].runtime_url


def test_of_one_challenge_answered_at_both_exactly_one_answer_counts(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0], releases=10)
    with ThreadPoolExecutor(4) as pool:
        for number in range(10):
            actor = Actor.enter(owner)
            evidence = actor.sign(actor.claims(actor.challenge()))
            replies = list(pool.map(lambda a, e=evidence: a.send(e), everywhere(brokers, actor) * 2))
            assert sorted(reply.status for reply in replies) == [200, 409, 409, 409]
            codes = {reply.problem().code for reply in replies if reply.status != 200}
            assert codes == {Code.NONCE_REPLAYED}
            assert owner.releases() == number + 1
    verify_chain(owner.client().audit())


def test_a_budget_holds_between_runtimes_that_arrive_together(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0], releases=3)
    launches = [owner.launch() for _ in range(8)]
    actors = [Actor.enter(owner, launch, url=brokers[number % 2].runtime_url) for number, launch in enumerate(launches)]
    messages = [actor.sign(actor.claims(actor.challenge())) for actor in actors]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda pair: pair[0].send(pair[1]), zip(actors, messages, strict=True)))
    assert sorted(reply.status for reply in replies) == [200] * 3 + [403] * 5
    refused = {reply.problem().code for reply in replies if reply.status != 200}
    assert refused == {Code.RELEASE_BUDGET}
    assert owner.releases() == 3
    verify_chain(owner.client().audit())


def test_of_machines_that_come_for_one_leg_at_both_one_is_released_to(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0], releases=10)
    delegation = Delegation.from_envelope(owner.delegation, owner.signing.public)
    keeps = replace(delegation, uses=frozenset(Use), store_public=bytes(32), serial_us=clock_us())
    owner.client().put_delegation(keeps.sign(owner.signing), owner.signing.public)
    first = owner.launch(line=LineRequest())
    line = first.claims().line
    assert line is not None
    launches = [first, *(owner.launch(line=LineRequest(id=line.id)) for _ in range(5))]
    actors = [Actor.enter(owner, launch, url=brokers[number % 2].runtime_url) for number, launch in enumerate(launches)]
    messages = [actor.sign(actor.claims(actor.challenge())) for actor in actors]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda pair: pair[0].send(pair[1]), zip(actors, messages, strict=True)))
    assert sorted(reply.status for reply in replies) == [200] + [403] * 5
    assert {reply.problem().code for reply in replies if reply.status != 200} == {Code.LINE_FORKED}
    [winner] = [actor.launch.run_id for actor, reply in zip(actors, replies, strict=True) if reply.status == 200]
    view = brokers[1].client().line(line.id)
    assert (view.leg, view.run_ids) == (1, (winner,))
    assert owner.releases() == 1
    verify_chain(owner.client().audit())


def test_one_runtime_asking_everywhere_at_once_is_counted_once(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0], releases=3)
    copies = everywhere(brokers, Actor.enter(owner)) * 2
    messages = [copy.sign(copy.claims(copy.challenge())) for copy in copies]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda pair: pair[0].send(pair[1]), zip(copies, messages, strict=True)))
    assert [reply.status for reply in replies] == [200] * 4
    assert owner.releases() == 1
    assert brokers[1].client().deployment(owner.deployment)["answers"] == 4


def test_the_same_request_at_both_is_one_challenge(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0])
    actor = Actor.enter(owner)
    asking = challenge_request(actor.launch)
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda a: a.post("/v1/challenge", asking).content(), everywhere(brokers, actor) * 2))
    assert len(set(replies)) == 1


def test_two_histories_told_at_the_same_moment_become_one(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0])
    actor = Actor.enter(owner)
    release_to(actor)
    here, there = everywhere(brokers, actor)
    one, other = Reporter(here), Reporter(there)
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda reporter: reporter.send(reporter.submission()), [one, other]))
    assert sorted(reply.status for reply in replies) == [200, 409]


def test_a_revocation_at_one_is_known_to_the_other_at_once(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0])
    actor = replace(Actor.enter(owner), url=brokers[1].runtime_url)
    evidence = actor.sign(actor.claims(actor.challenge()))
    owner.client().revoke(owner.manifest.package_id)
    assert actor.send(evidence).problem().code is Code.PACKAGE_REVOKED


def machines(owner: Owner, brokers: list[BrokerProcess], number: int) -> list[tuple[Actor, Challenge, bytes]]:
    """Machines of one group that ask at different brokers, each with evidence in hand."""
    found = []
    for machine, launch in enumerate(owner.group(number)):
        actor = Actor.enter(owner, launch, url=brokers[machine % 2].runtime_url)
        challenge = actor.challenge()
        found.append((actor, challenge, actor.sign(actor.claims(challenge))))
    return found


def test_machines_of_a_group_that_come_together_are_released_to_once_and_all(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0], releases=12)
    for number in range(1, 4):
        group = machines(owner, brokers, 4)
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda one: one[0].send(one[2]), group))
        assert sorted(reply.status for reply in replies) == [200, 202, 202, 202], "one of them was the last"
        keys = [actor.open(actor.ask(ch, ev).content(), ch, ev) for actor, ch, ev in group]
        assert keys == [owner.package_key] * 4
        assert owner.releases() == 4 * number
    verify_chain(owner.client().audit())


def test_a_refusal_and_the_last_machine_at_the_same_moment_leave_all_or_none(brokers: list[BrokerProcess]) -> None:
    owner = Owner(brokers[0], releases=20)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(8):
            before = owner.releases()
            first, second, third = machines(owner, brokers, 3)
            bad = first[0].sign(replace(first[0].claims(first[1]), measurement=bytes(32)))
            sent = [(first[0], bad), (second[0], second[2]), (third[0], third[2])]
            replies = list(pool.map(lambda pair: pair[0].send(pair[1]), sent))
            assert replies[0].problem().code is Code.MEASUREMENT_UNKNOWN
            asked = [actor.ask(ch, ev) for actor, ch, ev in (second, third)]
            codes = {reply.problem().code for reply in (*replies[1:], *asked) if reply.status >= 400}
            assert codes <= {Code.RANK_REFUSED, Code.NONCE_UNKNOWN}
            assert Code.RANK_REFUSED in codes
            assert owner.releases() == before


def test_a_group_that_is_revoked_as_its_last_machine_comes_is_released_whole_or_not(
    brokers: list[BrokerProcess],
) -> None:
    for _ in range(5):
        owner = Owner(brokers[0], releases=2)
        first, second = machines(owner, brokers, 2)
        assert first[0].send(first[2]).status == 202
        with ThreadPoolExecutor(2) as pool:
            last = pool.submit(second[0].send, second[2])
            revoked = pool.submit(brokers[1].client().revoke, owner.manifest.package_id)
        revoked.result()
        assert owner.releases() == (2 if last.result().status == 200 else 0)
        assert first[0].ask(first[1], first[2]).problem().code is Code.PACKAGE_REVOKED
