"""Hostile bytes never crash a parser, and what a parser accepts has exactly one encoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glasshouse.attestation.claims import CHECKS, CheckResult, Claims, HardeningReport, consistent, missing
from glasshouse.attestation.ear import Ear
from glasshouse.attestation.evidence import Evidence, EvidenceEnvelope
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.verify import check_1_message
from glasshouse.errors import GlasshouseError
from glasshouse.handshake.delegation import Delegation
from glasshouse.handshake.launch import LaunchFile, parse_token
from glasshouse.handshake.messages import Challenge, ReleaseMessage
from glasshouse.handshake.records import check_challenge_request
from glasshouse.wire import dsse
from glasshouse.wire.canonical import encode
from glasshouse.wire.policy import Profile
from simulators.key_release_world import NOW_US, World, report

WORLD = World()
MESSAGE = WORLD.message()
RELEASE = WORLD.release(MESSAGE)
REQUEST = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "key-release" / "request-valid.json"
BROKER, OWNER = WORLD.broker.public, WORLD.owner.public


def _text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """A token arrives as text inside a document: bytes that are no text never get so far."""
    return lambda data: parse(data.decode("latin-1"))


def _ear(text: str) -> Ear:
    return Ear.parse_token(text, broker_public=BROKER, evidence_public=WORLD.evidence_key.public, now_us=NOW_US)


PARSERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "evidence": (lambda data: EvidenceEnvelope.open(data).read(), MESSAGE),
    "payload": (Evidence.parse, EvidenceEnvelope.open(MESSAGE).read().envelope.payload),
    "check 1": (check_1_message, MESSAGE),
    "challenge": (Challenge.parse, WORLD.challenge.encode()),
    "release": (ReleaseMessage.parse, RELEASE),
    "launch": (LaunchFile.parse, WORLD.launch_file().encode()),
    "delegation": (lambda data: Delegation.parse_signed(data, OWNER), WORLD.delegation.encode()),
    "policy": (DeploymentPolicy.parse, WORLD.policy.encode()),
    "request": (
        lambda data: check_challenge_request(data, broker_public=BROKER, now_us=NOW_US),
        json.loads(REQUEST.read_bytes())["input"]["message"].encode(),
    ),
    "token": (_text(lambda text: parse_token(text, broker_public=BROKER, now_us=NOW_US)), WORLD.token().encode()),
    "ear": (_text(_ear), ReleaseMessage.parse(RELEASE).ear.encode()),
}
every_parser = pytest.mark.parametrize("name", PARSERS)


def survives(name: str, data: bytes) -> bool:
    """Return whether the parser accepted; anything but a `GlasshouseError` is a crash."""
    try:
        PARSERS[name][0](data)
    except GlasshouseError:
        return False
    return True


@every_parser
def test_the_honest_document_is_accepted(name: str) -> None:
    assert survives(name, PARSERS[name][1])


@every_parser
@given(data=st.binary(max_size=2000))
@settings(max_examples=60, deadline=None)
def test_random_bytes_are_refused(name: str, data: bytes) -> None:
    assert not survives(name, data)


@every_parser
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_other_bytes_pass_for_the_same_document(name: str, data: st.DataObject) -> None:
    """Cut, doubled, overwritten or stuffed anywhere: refused, or (unsigned parts) another valid document."""
    honest = PARSERS[name][1]
    start = data.draw(st.integers(0, len(honest) - 1))
    end = data.draw(st.integers(start, min(len(honest), start + 40)))
    changed = honest[:start] + data.draw(st.binary(max_size=12)) + honest[end:]
    if survives(name, changed) and changed != honest:
        assert name in {"evidence", "check 1", "payload", "challenge", "release", "policy", "launch"}
        again = REENCODE[name](changed)
        assert again == changed


REENCODE: dict[str, Callable[[bytes], bytes]] = {
    "evidence": lambda data: EvidenceEnvelope.open(data).read().envelope.encode(),
    "check 1": lambda data: EvidenceEnvelope.open(data).read().envelope.encode(),
    "payload": lambda data: Evidence.parse(data).encode(),
    "challenge": lambda data: Challenge.parse(data).encode(),
    "release": lambda data: ReleaseMessage.parse(data).encode(),
    "policy": lambda data: DeploymentPolicy.parse(data).encode(),
    "launch": lambda data: LaunchFile.parse(data).encode(),
}


@pytest.mark.parametrize("name", REENCODE)
def test_parse_then_encode_reproduces(name: str) -> None:
    assert REENCODE[name](PARSERS[name][1]) == PARSERS[name][1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(name=st.sampled_from(sorted(WORLD.claims().to_json())), value=json_values)
@settings(max_examples=300, deadline=None)
def test_any_json_in_the_place_of_any_claim(name: str, value: Any) -> None:
    """An attacker who signs anything at all, with both keys: refused, or claims that encode to themselves."""
    document = {**WORLD.claims().to_json(), name: value}
    try:
        claims = Claims.from_json(document)
    except GlasshouseError:
        return
    assert encode(claims.to_json()) == encode(document)


@given(value=json_values)
@settings(max_examples=150, deadline=None)
def test_any_json_in_an_envelope_signed_by_both_keys(value: Any) -> None:
    payload = encode(value)
    message = dsse.sign(
        "application/vnd.glasshouse.evidence+json", payload, [WORLD.evidence_key, WORLD.launch_key]
    ).encode()
    assert not survives("evidence", message)


results = st.sampled_from(list(CheckResult))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_consistent_report_passed_everything_that_its_profile_demands(data: st.DataObject) -> None:
    agent = {name: data.draw(results) for name in sorted(CHECKS["agent"])}
    worker = {name: data.draw(results) for name in sorted(CHECKS["worker"])}
    shown = replace(
        report(),
        agent=agent,
        worker=worker,
        profile=data.draw(st.sampled_from(list(Profile))),
        anti_debug=data.draw(st.booleans()),
    )
    assert HardeningReport.from_json(shown.to_json()) == shown
    if consistent(shown):
        assert missing(shown, shown.profile) == []
        if shown.profile is not Profile.OFF:
            assert shown.anti_debug
