"""A runtime among liars: it believes the broker that its launch file pins, and only what answers its own evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.errors import Code, FormatError, GlasshouseError, PeerError, VerificationError
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import LaunchFile, parse_token, parse_token_at_issue
from glasshouse.handshake.messages import Challenge, ChallengeRequest
from glasshouse.handshake.records import check_challenge_request, check_standing
from glasshouse.handshake.runtime_side import (
    CheckedRelease,
    challenge_request,
    check_release,
    evidence_message,
    read_challenge,
)
from glasshouse.wire import dsse
from glasshouse.wire.policy import Assurance, Floor, Profile
from simulators.key_release_world import NOW_US, SECOND_US, World, digest, identifier, signing_key


@pytest.fixture
def world() -> World:
    return World()


def check(world: World, release: bytes, evidence: bytes, **changes: object) -> CheckedRelease:
    arguments = {
        "evidence": evidence,
        "evidence_public": world.evidence_key.public,
        "manifest_sha256": world.record.manifest_sha256,
        "floor": world.floor,
        "now_us": NOW_US,
        **changes,
    }
    return check_release(release, world.launch_file(), world.challenge, **arguments)  # type: ignore[arg-type]


def test_the_whole_exchange(world: World) -> None:
    launch = LaunchFile.parse(world.launch_file().encode())
    token, _ = check_challenge_request(challenge_request(launch), broker_public=world.broker.public, now_us=NOW_US)
    check_standing(token, record=world.record, launch=world.launch, broker_public=world.broker.public, now_us=NOW_US)
    challenge = read_challenge(world.challenge.encode(), launch, now_us=NOW_US)
    claims = world.claims(nonce=challenge.nonce, token=launch.token)
    message = evidence_message(claims, (), evidence_key=world.evidence_key, launch_key=launch.key())
    checked = check(world, world.release(message), message)
    assert world.hpke.open(checked.sealed_key, info=checked.info) == world.package_key
    assert (checked.ear.assurance, checked.ear.lease_s) == (Assurance.SOFTWARE, world.policy.lease_s)


def test_two_requests_of_one_launch_are_different_requests(world: World) -> None:
    launch = world.launch_file()
    assert challenge_request(launch) != challenge_request(launch)


def test_a_thief_of_the_token_cannot_even_ask(world: World) -> None:
    request = ChallengeRequest(token=world.token(), request_id=bytes(16)).sign(signing_key("thief")).encode()
    with pytest.raises(CheckFailedError) as refusal:
        check_challenge_request(request, broker_public=world.broker.public, now_us=NOW_US)
    assert (refusal.value.check, refusal.value.code) == ("3", Code.TOKEN_KEY)


def test_a_recorder_who_replays_the_release_to_another_runtime_gives_it_nothing(world: World) -> None:
    message = world.message()
    release = world.release(message)
    mine = World()
    mine.evidence_key = signing_key("recorder's evidence")
    with pytest.raises(PeerError) as refusal:
        check(mine, release, mine.message())
    assert refusal.value.code is Code.RELEASE_INVALID


def test_an_answer_to_an_earlier_piece_of_evidence_is_refused(world: World) -> None:
    first = world.message()
    second = world.message(world.claims(issued_us=NOW_US + 1))
    with pytest.raises(PeerError) as refusal:
        check(world, world.release(first), second)
    assert refusal.value.code is Code.RELEASE_INVALID


def test_another_broker_with_the_same_answer_is_not_believed(world: World) -> None:
    message = world.message()
    imposter = World()
    imposter.broker = signing_key("imposter")
    release = imposter.release(imposter.message())
    with pytest.raises(PeerError) as refusal:
        check(world, release, message)
    assert refusal.value.code is Code.BROKER_UNTRUSTED


def test_a_broker_that_released_below_the_owners_floor_is_not_obeyed(world: World) -> None:
    message = world.message()
    tee = Floor(assurance=Assurance.CPU_TEE, profile=Profile.STANDARD)
    with pytest.raises(PeerError) as refusal:
        check(world, world.release(message), message, floor=tee)
    assert refusal.value.code is Code.RELEASE_INVALID


def test_a_release_for_another_package_than_the_one_in_hand(world: World) -> None:
    message = world.message()
    with pytest.raises(PeerError) as refusal:
        check(world, world.release(message), message, manifest_sha256=digest("swapped package"))
    assert refusal.value.code is Code.RELEASE_INVALID


def test_a_rented_clock_may_be_wrong_by_ten_minutes_and_no_more(world: World) -> None:
    message = world.message()
    release = world.release(message)
    check(world, release, message, now_us=NOW_US - 599 * SECOND_US)
    with pytest.raises(PeerError):
        check(world, release, message, now_us=NOW_US - 601 * SECOND_US)


def test_a_challenge_of_another_deployment_is_not_answered(world: World) -> None:
    other = replace(world.challenge, deployment=identifier("other"))
    with pytest.raises(PeerError) as refusal:
        read_challenge(other.encode(), world.launch_file(), now_us=NOW_US)
    assert refusal.value.code is Code.BROKER_PROTOCOL


def test_a_wrong_clock_is_named_in_the_hint(world: World) -> None:
    with pytest.raises(PeerError) as refusal:
        read_challenge(world.challenge.encode(), world.launch_file(), now_us=NOW_US + 3600 * SECOND_US)
    assert "clock" in refusal.value.hint


def test_evidence_is_never_made_under_another_key_than_it_claims(world: World) -> None:
    with pytest.raises(ValueError, match="another evidence key"):
        evidence_message(world.claims(), (), evidence_key=signing_key("other"), launch_key=world.launch_key)


def test_a_launch_file_prints_neither_seed_nor_token(world: World) -> None:
    launch = world.launch_file()
    shown = repr(launch)
    assert launch.token not in shown
    assert repr(launch.launch_seed) not in shown
    assert launch.launch_seed.hex() not in shown


def test_a_launch_file_reads_its_token_by_no_clock(world: World) -> None:
    """An expired token is the broker's to refuse; a machine with a wrong clock can still read its launch file."""
    launch = world.launch_file()
    assert launch.claims() == parse_token_at_issue(launch.token, broker_public=world.broker.public)
    with pytest.raises(FormatError):
        parse_token(launch.token, broker_public=world.broker.public, now_us=NOW_US * 2)


@pytest.mark.parametrize("now_us", [NOW_US - 7200 * SECOND_US, NOW_US + 100_000 * SECOND_US], ids=["early", "late"])
def test_a_delegation_outside_its_time_stops_the_runtime(world: World, now_us: int) -> None:
    launch = world.launch_file()
    launch.check_delegation(owner_public=world.owner.public, now_us=NOW_US, leeway_us=0)
    with pytest.raises(VerificationError) as refusal:
        launch.check_delegation(owner_public=world.owner.public, now_us=now_us, leeway_us=600 * SECOND_US)
    assert refusal.value.code is Code.CHAIN_DELEGATION


def test_a_delegation_by_somebody_else_than_the_packages_owner(world: World) -> None:
    with pytest.raises(FormatError):
        world.launch_file().check_delegation(owner_public=signing_key("other").public, now_us=NOW_US, leeway_us=0)


def test_a_broker_delegated_to_countersign_may_not_release(world: World) -> None:
    countersign = Delegation(
        broker_public=world.broker.public,
        uses=frozenset({Use.COUNTERSIGN}),
        not_before_us=0,
        not_after_us=NOW_US * 2,
    )
    launch = world.launch_file(delegation=countersign.sign(world.owner))
    with pytest.raises(VerificationError):
        launch.check_delegation(owner_public=world.owner.public, now_us=NOW_US, leeway_us=0)


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b'{"launch_seed":"AAAA"}', b"[" * 70_000])
def test_a_launch_file_that_is_none(data: bytes) -> None:
    with pytest.raises(FormatError):
        LaunchFile.parse(data)


def test_the_challenge_a_broker_makes_is_the_challenge_a_runtime_reads(world: World) -> None:
    assert Challenge.parse(world.challenge.encode()) == world.challenge


def test_a_delegation_of_nothing_does_not_exist(world: World) -> None:
    with pytest.raises(GlasshouseError):
        Delegation(broker_public=bytes(32), uses=frozenset(), not_before_us=0, not_after_us=1)
    with pytest.raises(FormatError):
        Delegation.from_envelope(
            dsse.sign("application/vnd.glasshouse.delegation+json", b"[]", [world.owner]),
            world.owner.public,
        )
