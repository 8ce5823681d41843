"""What the gate decides, what it keeps of it, and what it never keeps."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.broker.decide import releases
from glasshouse.broker.decide.challenges import GateLimits
from glasshouse.broker.http_api import verify_chain
from glasshouse.broker.store import broker_state
from glasshouse.broker.store.database import Database
from glasshouse.errors import Code, RefusedError, UsageError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import RecipientKey, SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.policy import Profile
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


def test_good_evidence_gets_the_package_key_and_moves_the_counter(owner: Owner) -> None:
    assert exchange(Actor.enter(owner)) == owner.package_key
    assert owner.releases() == 1


def test_a_second_use_of_a_challenge_is_a_replay_after_a_release_and_after_a_refusal(owner: Owner) -> None:
    actor = Actor.enter(owner)
    challenge = actor.challenge()
    good = actor.sign(actor.claims(challenge))
    assert actor.send(good).status == 200
    assert refused(actor, good) is Code.NONCE_REPLAYED
    second = actor.challenge()
    bad = actor.sign(replace(actor.claims(second), state=State.CREATED))
    assert refused(actor, bad) is Code.STATE_MISMATCH
    assert refused(actor, bad) is Code.NONCE_REPLAYED
    assert refused(actor, actor.sign(actor.claims(second))) is Code.NONCE_REPLAYED


def garbage(actor: Actor, challenge: Challenge) -> list[bytes]:
    """What a reader of the exchange can make without a key of it: other signers, or genuine claims spoiled."""
    stranger = replace(actor, launch=actor.owner.launch(), evidence=SigningKey.generate())
    honest = actor.sign(actor.claims(challenge))
    envelope = Envelope.parse(honest, max_bytes=len(honest))
    spoiled = [
        replace(envelope, signatures=tuple((k, bytes(64) if k == name else v) for k, v in envelope.signatures))
        for name, _ in envelope.signatures
    ]
    other = replace(actor.claims(challenge), evidence_public=stranger.evidence.public, token="a.b.c")
    return [stranger.sign(other), *(one.encode() for one in spoiled)]


def test_a_reader_who_posts_garbage_for_every_nonce_changes_nothing(owner: Owner, broker: LocalBroker) -> None:
    actor = Actor.enter(owner)
    challenge = actor.challenge()
    forged = garbage(actor, challenge)
    before = broker.everything()
    for message in forged * 3:
        assert refused(actor, message) is Code.EVIDENCE_SIGNATURE
    assert broker.everything() == before
    evidence = actor.sign(actor.claims(challenge))
    assert actor.open(actor.send(evidence).content(), challenge, evidence) == owner.package_key
    before = broker.everything()
    for message in forged:
        assert refused(actor, message) is Code.EVIDENCE_SIGNATURE, "as before: nothing is learnt of what became of it"
    assert broker.everything() == before


def test_an_unknown_challenge_and_a_message_that_is_none_leave_no_trace(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner)
    now_us = broker.clock_us()
    made_up = Challenge(nonce=bytes(32), deployment=owner.deployment, issued_us=now_us, expires_us=now_us + 1)
    before = broker.rows("SELECT * FROM audit")
    assert refused(actor, actor.sign(actor.claims(made_up))) is Code.NONCE_UNKNOWN
    assert refused(actor, b"{}") is Code.MESSAGE_INVALID
    assert refused(actor, b"") is Code.MESSAGE_INVALID
    assert broker.rows("SELECT * FROM audit") == before
    assert broker.count("challenges") == 0


def test_nothing_is_stored_for_a_challenge_request_that_proves_nothing(broker: LocalBroker, owner: Owner) -> None:
    launch = owner.launch()
    stolen_token = replace(launch, launch_seed=SigningKey.generate().seed())
    before = broker.rows("SELECT * FROM audit")
    for message, code in (
        (challenge_request(stolen_token), Code.TOKEN_KEY),
        (challenge_request(launch).replace(b"payload", b"qayload"), Code.MESSAGE_INVALID),
        (b"[" * 30_000, Code.MESSAGE_INVALID),
    ):
        reply = Actor.enter(owner, launch).post("/v1/challenge", message)
        assert reply.problem().code is code
    assert broker.count("challenges") == 0
    assert broker.rows("SELECT * FROM audit") == before


def test_a_token_of_another_broker_gets_no_challenge(owner: Owner, tmp_path: Path) -> None:
    with LocalBroker(tmp_path / "other") as other:
        stranger = Actor.enter(owner, Owner(other).launch(), url=owner.launch().broker_url)
        with pytest.raises(RefusedError) as caught:
            stranger.challenge()
    assert caught.value.code is Code.TOKEN_SIGNATURE


def test_the_same_request_again_is_the_same_challenge_until_it_was_used(broker: LocalBroker, owner: Owner) -> None:
    actor = Actor.enter(owner)
    request = challenge_request(actor.launch)
    first = actor.post("/v1/challenge", request).content()
    assert actor.post("/v1/challenge", request).content() == first
    assert broker.count("challenges") == 1
    actor.send(actor.sign(actor.claims(Challenge.parse(first))))
    assert actor.post("/v1/challenge", request).problem().code is Code.NONCE_REPLAYED


def test_the_budget_counts_runtimes_and_not_answers(owner: Owner) -> None:
    actor = Actor.enter(owner)
    assert exchange(actor) == exchange(actor) == owner.package_key
    assert owner.releases() == 1
    assert owner.client().deployment(owner.deployment)["answers"] == 2
    second = Actor.enter(owner)
    assert refused(second, second.sign(second.claims(second.challenge()))) is Code.RELEASE_BUDGET
    assert exchange(actor) == owner.package_key
    assert owner.releases() == 1


def test_a_runtime_that_lost_its_answer_is_checked_in_full_again(owner: Owner) -> None:
    actor = Actor.enter(owner)
    exchange(actor)
    claims = actor.claims(actor.challenge())
    traced = {**claims.hardening.worker, "not-traced": CheckResult.FAILED}
    report = replace(claims.hardening, worker=traced)
    assert refused(actor, actor.sign(replace(claims, hardening=report))) is Code.ANTI_DEBUG_INCONSISTENT


@pytest.mark.parametrize("mixed", ["hpke", "evidence", "run"])
def test_the_keys_of_an_attested_runtime_do_not_mix_with_others(broker: LocalBroker, mixed: str) -> None:
    owner = Owner(broker, releases=5)
    actor = Actor.enter(owner)
    exchange(actor)
    changed = {
        "hpke": replace(actor, hpke=RecipientKey.generate()),
        "evidence": replace(actor, evidence=SigningKey.generate()),
        "run": replace(actor, launch=owner.launch()),
    }[mixed]
    assert refused(changed, changed.sign(changed.claims(changed.challenge()))) is Code.RELEASE_BUDGET
    assert owner.releases() == 1


def test_a_key_that_another_launch_named_first_is_still_its_runtimes_own(broker: LocalBroker) -> None:
    """Who read evidence on the way, and held it up, had its run refused for good by naming its HPKE key."""
    owner = Owner(broker, releases=2)
    honest, hostile = Actor.enter(owner), Actor.enter(owner)
    challenge = honest.challenge()
    evidence = honest.sign(honest.claims(challenge))
    hostile = replace(hostile, hpke=honest.hpke)
    hostile.send(hostile.sign(hostile.claims(hostile.challenge()))).content()
    assert honest.open(honest.send(evidence).content(), challenge, evidence) == owner.package_key
    assert exchange(honest) == owner.package_key, "a lost answer does not count"
    assert owner.releases() == 2
    third = replace(Actor.enter(owner), hpke=honest.hpke)
    assert refused(third, third.sign(third.claims(third.challenge()))) is Code.RELEASE_BUDGET


def test_a_revoked_package_is_released_no_more_not_even_to_an_open_challenge(owner: Owner) -> None:
    actor = Actor.enter(owner)
    exchange(actor)
    evidence = actor.sign(actor.claims(actor.challenge()))
    owner.client().revoke(owner.manifest.package_id)
    assert refused(actor, evidence) is Code.PACKAGE_REVOKED
    assert refused(actor, evidence) is Code.NONCE_REPLAYED
    with pytest.raises(RefusedError) as caught:
        actor.challenge()
    assert caught.value.code is Code.PACKAGE_REVOKED
    assert owner.client().deployment(owner.deployment)["revoked"] is True


NARROWED: dict[str, Any] = {"uses": frozenset({Use.COUNTERSIGN})}


def _ending(broker: LocalBroker) -> dict[str, Any]:
    return {"not_after_us": broker.clock_us() + 30_000_000}


def delegate_anew(owner: Owner, **changes: Any) -> None:
    now = Delegation.from_envelope(owner.delegation, owner.signing.public)
    owner.client().put_delegation(replace(now, **changes).sign(owner.signing), owner.signing.public)


@pytest.mark.parametrize("way", ["narrowed", "ended"])
def test_an_owner_who_takes_the_delegation_back_stops_releases_at_once(
    owner: Owner, broker: LocalBroker, way: str
) -> None:
    actor = Actor.enter(owner)
    exchange(actor)
    evidence = actor.sign(actor.claims(actor.challenge()))
    delegate_anew(owner, **(NARROWED if way == "narrowed" else _ending(broker)))
    broker.advance(31)
    reply = actor.send(evidence)
    assert (reply.status, reply.problem().code, reply.problem().check) == (403, Code.CHAIN_DELEGATION, "3")
    assert refused(actor, evidence) is Code.NONCE_REPLAYED
    with pytest.raises(RefusedError) as caught:
        actor.challenge()
    assert caught.value.code is Code.CHAIN_DELEGATION
    assert broker.rows("SELECT answers FROM releases") == [(1,)]
    with pytest.raises(UsageError) as mine:
        owner.launch()
    assert mine.value.code is Code.CHAIN_DELEGATION
    owner.client().put_delegation(owner.delegation, owner.signing.public)
    assert exchange(actor) == owner.package_key


def test_a_run_has_one_runtime_whatever_budget_is_left(broker: LocalBroker) -> None:
    owner = Owner(broker, releases=5)
    first = Actor.enter(owner)
    exchange(first)
    second = Actor.enter(owner, first.launch)
    assert refused(second, second.sign(second.claims(second.challenge()))) is Code.RELEASE_BUDGET
    assert exchange(first) == owner.package_key, "the first one may still have lost its answer"
    assert exchange(Actor.enter(owner)) == owner.package_key
    assert (owner.releases(), broker.count("releases")) == (2, 2)


def test_a_deployment_that_is_over_releases_no_more(broker: LocalBroker, owner: Owner) -> None:
    launch = owner.launch()
    broker.advance(3600)
    with pytest.raises(RefusedError) as caught:
        Actor.enter(owner, launch).challenge()
    assert caught.value.code in (Code.DEPLOYMENT_EXPIRED, Code.TOKEN_EXPIRED)


def test_a_defect_while_deciding_releases_nothing_and_still_consumes(
    owner: Owner, broker: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Actor.enter(owner)
    evidence = actor.sign(actor.claims(actor.challenge()))

    def broken(*_arguments: object, **_named: object) -> bytes:
        raise RuntimeError(f"the package key is {owner.package_key.hex()}")

    with monkeypatch.context() as patch:
        patch.setattr(releases, "build_release", broken)
        reply = actor.send(evidence)
    assert (reply.status, reply.problem().code) == (500, Code.INTERNAL)
    assert owner.package_key.hex().encode() not in reply.body
    assert refused(actor, evidence) is Code.NONCE_REPLAYED
    assert owner.releases() == 0
    assert exchange(actor) == owner.package_key


def test_a_database_that_somebody_holds_is_a_reason_to_try_again_and_consumes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_state, "Database", partial(Database, busy_timeout_s=0.1))
    with LocalBroker(tmp_path) as broker:
        actor = Actor.enter(Owner(broker))
        evidence = actor.sign(actor.claims(actor.challenge()))
        held = sqlite3.connect(broker.data / broker_state.DATABASE_NAME, isolation_level=None)
        held.execute("BEGIN IMMEDIATE")
        reply = actor.send(evidence)
        held.execute("ROLLBACK")
        held.close()
        assert (reply.status, reply.problem().code) == (503, Code.BROKER_UNREACHABLE)
        assert actor.send(evidence).status == 200


def test_what_was_recorded_and_is_played_again_takes_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording is authentic, and there is no end of it: each piece took its turn at the disk."""
    monkeypatch.setattr(broker_state, "Database", partial(Database, busy_timeout_s=0.1))
    with LocalBroker(tmp_path) as broker:
        actor = Actor.enter(Owner(broker))
        used, still_open = challenge_request(actor.launch), challenge_request(actor.launch)
        evidence = actor.sign(actor.claims(Challenge.parse(actor.post("/v1/challenge", used).content())))
        challenge = actor.post("/v1/challenge", still_open).content()
        assert actor.send(evidence).status == 200
        assert refused(actor, evidence) is Code.NONCE_REPLAYED
        reporter = Reporter(actor)
        first = reporter.submission()
        reporter.send(first)
        reporter.go_on(State.HARDENED)
        last = reporter.submission()
        countersigned = reporter.send(last).content()
        held = sqlite3.connect(broker.data / broker_state.DATABASE_NAME, isolation_level=None)
        held.execute("BEGIN IMMEDIATE")
        assert actor.post("/v1/challenge", used).problem().code is Code.NONCE_REPLAYED
        assert actor.post("/v1/challenge", still_open).content() == challenge
        assert refused(actor, evidence) is Code.NONCE_REPLAYED
        assert actor.post("/v1/heads", last).content() == countersigned
        assert actor.post("/v1/heads", first).problem().code is Code.HEAD_INCONSISTENT
        held.execute("ROLLBACK")
        held.close()


def test_evidence_with_any_byte_changed_is_refused_and_breaks_nothing(owner: Owner) -> None:
    actor = Actor.enter(owner)
    good = actor.sign(actor.claims(actor.challenge()))
    statuses = set()
    for position in range(0, len(good), 101):
        changed = bytearray(good)
        changed[position] ^= 1
        statuses.add(actor.send(bytes(changed)).status)
    assert statuses <= {400, 403, 409}
    assert owner.releases() == 0
    assert exchange(actor) == owner.package_key


def test_a_refusal_says_the_safe_part_of_expected_and_actual(owner: Owner) -> None:
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    patched = replace(owner.measurement, interpreter=bytes(32))
    reply = actor.send(actor.sign(replace(claims, measurement=patched)))
    problem = reply.problem()
    assert (problem.code, problem.check) == (Code.MEASUREMENT_UNKNOWN, "8")
    assert (problem.expected, problem.actual) == (
        f"interpreter {owner.measurement.interpreter.hex()}",
        f"interpreter {bytes(32).hex()}",
    )


def test_the_stored_answer_is_the_one_that_left(owner: Owner, broker: LocalBroker) -> None:
    actor = Actor.enter(owner)
    good = actor.send(actor.sign(actor.claims(actor.challenge())))
    bad = actor.send(actor.sign(replace(actor.claims(actor.challenge()), state=State.CREATED)))
    stored = broker.rows("SELECT status, answer FROM challenges ORDER BY used_us")
    assert stored == [(200, good.body), (403, bad.body)]


def _audit(owner: Owner) -> list[Json]:
    return owner.client().audit()


def test_every_decision_is_in_the_audit_log_once_and_no_secret_is(owner: Owner, broker: LocalBroker) -> None:
    actor = Actor.enter(owner)
    evidence = actor.sign(actor.claims(actor.challenge()))
    actor.send(evidence)
    for _ in range(3):
        assert refused(actor, evidence) is Code.NONCE_REPLAYED
    records = _audit(owner)
    verify_chain(records)
    events = [(r["event"], r["facts"].get("code")) for r in records if isinstance(r, dict)]
    assert events == [
        ("delegation", None),
        ("deployment", None),
        ("launch", None),
        ("challenge", None),
        ("release", None),
        ("refusal", "nonce-replayed"),
    ]
    for name in ("broker.sqlite3", "broker.sqlite3-wal"):
        content = (broker.data / name).read_bytes() if (broker.data / name).exists() else b""
        for form in (owner.package_key, owner.package_key.hex().encode(), base64.b64encode(owner.package_key)):
            assert form not in content
            assert base64.urlsafe_b64encode(form) not in content


def test_a_profile_below_the_policy_is_refused_whatever_the_token_says(broker: LocalBroker) -> None:
    owner = Owner(broker, profile=Profile.STRICT)
    actor = Actor.enter(owner)
    claims = actor.claims(actor.challenge())
    standard = replace(claims.hardening, profile=Profile.STANDARD)
    assert refused(actor, actor.sign(replace(claims, hardening=standard))) is Code.ANTI_DEBUG_DOWNGRADED
