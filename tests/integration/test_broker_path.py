"""Somebody on the path reads, swallows and repeats everything; they get nothing, and nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from glasshouse.attestation.evidence import EVIDENCE_TYPE, EvidenceEnvelope
from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.client.owner_client import request
from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError
from glasshouse.handshake.messages import Challenge, ChallengeRequest, ReleaseMessage, release_info
from glasshouse.handshake.runtime_side import challenge_request, evidence_message
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64decode, decode
from glasshouse.wire.crypto import RecipientKey, SigningKey, sha256
from simulators.reporting import Reporter, release_to
from simulators.wire_tap import WireTap


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("broker")
    with BrokerProcess(directory) as running:
        yield running


@pytest.fixture
def tap(broker: BrokerProcess) -> Iterator[WireTap]:
    with WireTap(broker.runtime_url) as running:
        yield running


@pytest.fixture
def owner(broker: BrokerProcess) -> Owner:
    return Owner(broker)


def lost(tap: WireTap, actor: Actor, path: str, body: bytes) -> None:
    tap.swallow = 1
    with pytest.raises(PeerError) as caught:
        actor.post(path, body)
    assert caught.value.code is Code.BROKER_UNREACHABLE


def test_lost_answers_neither_lose_nor_double_a_release(tap: WireTap, owner: Owner) -> None:
    actor = Actor.enter(owner, url=tap.url)
    asking = challenge_request(actor.launch)
    lost(tap, actor, "/v1/challenge", asking)
    challenge = Challenge.parse(actor.post("/v1/challenge", asking).content())
    evidence = actor.sign(actor.claims(challenge))
    lost(tap, actor, "/v1/evidence", evidence)
    assert owner.releases() == 1
    for _ in range(3):
        again = actor.challenge()
        lost(tap, actor, "/v1/evidence", actor.sign(actor.claims(again)))
    assert release_to(actor) == owner.package_key
    assert owner.releases() == 1
    stranger = Actor.enter(owner)
    refused = stranger.send(stranger.sign(stranger.claims(stranger.challenge())))
    assert refused.problem().code is Code.RELEASE_BUDGET


def test_a_lost_refusal_is_not_a_second_chance(tap: WireTap, owner: Owner) -> None:
    actor = Actor.enter(owner, url=tap.url)
    claims = actor.claims(actor.challenge())
    lost(tap, actor, "/v1/evidence", actor.sign(replace(claims, container_id="elsewhere")))
    assert actor.send(actor.sign(claims)).problem().code is Code.NONCE_REPLAYED
    assert owner.releases() == 0


def test_a_recording_of_everything_replayed_as_it_is_gets_nothing(
    tap: WireTap, owner: Owner, broker: BrokerProcess
) -> None:
    actor = Actor.enter(owner, url=tap.url)
    release_to(actor)
    reporter = Reporter(actor)
    reporter.send(reporter.submission()).content()
    reporter.end()
    reporter.send(reporter.submission()).content()
    actor.post("/v1/receipt", reporter.receipt()).content()
    before = owner.client().run(actor.launch.run_id)
    answers = {}
    for exchange in list(tap.seen):
        reply = request(broker.runtime_url, "POST", exchange.path, exchange.sent)
        answers.setdefault(exchange.path, []).append((reply.status, reply.body == exchange.got))
    assert answers == {
        "/v1/challenge": [(409, False)],
        "/v1/evidence": [(409, False)],
        # What was countersigned may be had again: it is public, and it is the same.
        "/v1/heads": [(409, False), (200, True)],
        "/v1/receipt": [(200, True)],
    }
    assert owner.releases() == 1
    assert owner.client().run(actor.launch.run_id) == before, "not even a sign of life"


def test_a_recorded_release_opens_with_no_other_key(tap: WireTap, owner: Owner) -> None:
    release_to(Actor.enter(owner, url=tap.url))
    [challenge, evidence] = tap.seen
    release = ReleaseMessage.parse(evidence.got)
    info = release_info(
        challenge=challenge.got,
        evidence_sha256=sha256(evidence.sent),
        ear=release.ear,
        floor_sha256=owner.manifest.floor.sha256,
        policy_sha256=_policy_digest(challenge.sent),
    )
    with pytest.raises(FormatError):
        RecipientKey.generate().open(release.sealed_key, info=info)


def _policy_digest(message: bytes) -> bytes:
    asking, _ = ChallengeRequest.open(message)
    text = asking.token.split(".")[1]
    claims = decode(b64decode(text), max_bytes=16384)
    assert isinstance(claims, dict)
    return bytes.fromhex(str(claims["policy_sha256"]))


class Recorder:
    """Holds back the victim's evidence, and has keys of their own and everything that was said."""

    def __init__(self, owner: Owner, tap: WireTap) -> None:
        victim = Actor.enter(owner, url=tap.url)
        self.victim = victim
        self.challenge = victim.challenge()
        self.held_back = victim.sign(victim.claims(self.challenge))
        self.launch, self.evidence = SigningKey.generate(), SigningKey.generate()
        self.hpke = RecipientKey.generate()

    def with_own_keys(self, *, launch_signature: str) -> bytes:
        """Return evidence for the victim's challenge and launch token, to the recorder's own HPKE key."""
        recorded = EvidenceEnvelope.open(self.held_back).read()
        own_name = self.evidence
        claims = replace(recorded.evidence.claims, hpke_public=self.hpke.public, evidence_public=own_name.public)
        made = evidence_message(claims, (), evidence_key=own_name, launch_key=self.launch)
        if launch_signature == "own":
            return made
        # The victim's launch signature over other claims, pasted beside the recorder's own.
        launch_id = self.victim.launch.key().key_id
        pasted = dict(recorded.envelope.signatures)[launch_id]
        payload = EvidenceEnvelope.open(made).read().evidence.encode()
        own = dsse.sign(EVIDENCE_TYPE, payload, [own_name]).signatures
        both = tuple(sorted([*own, (launch_id, pasted)]))
        return dsse.Envelope(payload_type=EVIDENCE_TYPE, payload=payload, signatures=both).encode()

    def with_own_hpke_key(self) -> bytes:
        """Return the recorded evidence with nothing but the HPKE key changed, and the signatures as they were."""
        recorded = EvidenceEnvelope.open(self.held_back).read()
        claims = replace(recorded.evidence.claims, hpke_public=self.hpke.public)
        payload = replace(recorded.evidence, claims=claims).encode()
        return replace(recorded.envelope, payload=payload).encode()


@pytest.mark.parametrize("attack", ["own launch key", "pasted launch signature", "only the HPKE key"])
def test_a_recorder_who_answers_first_with_their_own_keys_gets_nothing(
    tap: WireTap, owner: Owner, broker: BrokerProcess, attack: str
) -> None:
    recorder = Recorder(owner, tap)
    message = {
        "own launch key": lambda: recorder.with_own_keys(launch_signature="own"),
        "pasted launch signature": lambda: recorder.with_own_keys(launch_signature="pasted"),
        "only the HPKE key": recorder.with_own_hpke_key,
    }[attack]()
    assert request(broker.runtime_url, "POST", "/v1/evidence", message).problem().code is Code.EVIDENCE_SIGNATURE
    assert owner.releases() == 0
    assert recorder.victim.send(recorder.held_back).status == 200, "it had not even stopped this attempt"
    assert owner.releases() == 1


def test_a_recorder_cannot_ask_for_challenges_in_the_victims_name(
    tap: WireTap, owner: Owner, broker: BrokerProcess
) -> None:
    recorder = Recorder(owner, tap)
    [asked] = tap.seen
    token = recorder.victim.launch.token
    forged = ChallengeRequest(token=token, request_id=bytes(16)).sign(recorder.launch).encode()
    assert request(broker.runtime_url, "POST", "/v1/challenge", forged).problem().code is Code.TOKEN_KEY
    for _ in range(20):
        assert request(broker.runtime_url, "POST", "/v1/challenge", asked.sent).body == asked.got
    assert owner.client().deployment(owner.deployment)["challenges_outstanding"] == 1


def test_a_changed_challenge_breaks_the_release_and_leaks_nothing(owner: Owner, tap: WireTap) -> None:
    actor = Actor.enter(owner, url=tap.url)
    challenge = actor.challenge()
    evidence = actor.sign(actor.claims(challenge))
    content = actor.send(evidence).content()
    later = replace(challenge, expires_us=challenge.expires_us + 1)
    with pytest.raises(GlasshouseError):
        actor.open(content, later, evidence)
    assert actor.open(content, challenge, evidence) == owner.package_key
