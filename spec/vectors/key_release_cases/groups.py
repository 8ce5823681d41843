"""Cases of groups: sections 2.4, 5.4, 6.1 and 7.3 of the specification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from glasshouse.attestation.evidence import EvidenceEnvelope
from glasshouse.handshake.messages import RELEASE_REQUEST_TYPE, REQUEST_TYPE, Pending, ReleaseRequest
from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.group import Group
from key_release_cases.common import Case, case
from key_release_cases.gate import gate_input
from simulators.key_release_world import NOW_US, World, digest, signing_key

PLACE = Group(id=digest("group"), machines=3, machine=1, ranks=2)
"""As `World.in_group` has it."""


def gate_cases() -> Iterator[Case]:
    world = World.in_group()
    honest, place = world.message(), PLACE
    signed = EvidenceEnvelope.open(honest).read()
    accepted = {"composite": signed.evidence.composite.hex(), "evidence_sha256": signed.sha256.hex()}
    yield case(
        "gate-valid-group", "One machine of a group; no other was refused.", gate_input(world, honest), **accepted
    )
    for name, description, token in (
        ("other-group", "A genuine token of another group.", world.token(group=replace(place, id=digest("other")))),
        (
            "other-machine",
            "A genuine token of another machine of the group.",
            world.token(group=replace(place, machine=0)),
        ),
        ("other-machines", "A token that says more machines.", world.token(group=replace(place, machines=4))),
        ("other-ranks", "A token that says more ranks.", world.token(group=replace(place, ranks=3))),
        ("no-group", "A token without a group, for a launch of one.", world.token(group=None)),
    ):
        message = world.message(world.claims(token=token))
        given = gate_input(world, message)
        yield case(f"gate-3-claim-{name}", description, given, code="token-claim-mismatch", check="3")
    alone = World()
    message = alone.message(alone.claims(token=alone.token(group=place)))
    yield case(
        "gate-3-claim-group",
        "A token that says a group, for a launch of none.",
        gate_input(alone, message),
        code="token-claim-mismatch",
        check="3",
    )
    yield case(
        "gate-13-group-larger-than-budget",
        "One release is left, and the group has three machines.",
        gate_input(world, honest, released_to=2),
        code="release-budget-exhausted",
        check="13",
    )
    for name, description, code in (
        ("rank-refused", "Another machine of the group was refused.", "measurement-unknown"),
        ("rank-missing", "Another machine of the group was missing at the deadline.", "rank-lost"),
    ):
        given = gate_input(world, honest, group={"code": code, "culprit": 2, "state": "refused"})
        yield case(f"gate-14-{name}", description, given, code="rank-refused", check="14")


def group_cases() -> Iterator[Case]:
    place = Group(id=digest("group"), machines=3, machine=2, ranks=4)
    key = digest("package key")

    def given(group: Mapping[str, Any]) -> dict[str, Any]:
        return {"group": dict(group), "package_key": b64encode(key)}

    yield case(
        "group-valid",
        "The third of three machines with four ranks each.",
        given(place.to_json()),
        first_rank=8,
        secret=b64encode(place.secret(key)),
        world_size=12,
    )
    alone = Group(id=digest("group"), machines=1, machine=0, ranks=1)
    yield case(
        "group-valid-of-one",
        "One rank on one machine.",
        given(alone.to_json()),
        first_rank=0,
        secret=b64encode(alone.secret(key)),
        world_size=1,
    )
    for name, description, changes in (
        ("short-id", "An id of 31 bytes.", {"id": digest("group").hex()[:-2]}),
        ("upper-case-id", "An id in capitals.", {"id": digest("group").hex().upper()}),
        ("no-machines", "No machine at all.", {"machine": 0, "machines": 0}),
        ("too-many-machines", "65 machines.", {"machines": 65}),
        ("machine-outside", "The fourth of three machines.", {"machine": 3}),
        ("no-ranks", "No rank on a machine.", {"ranks": 0}),
        ("too-many-ranks", "65 ranks on a machine.", {"ranks": 65}),
        ("ranks-true", "True is no number.", {"ranks": True}),
        ("unknown-field", "A rank of its own.", {"rank": 1}),
    ):
        yield case(f"group-{name}", description, given({**place.to_json(), **changes}), code="schema-invalid")


def ask_cases() -> Iterator[Case]:
    world = World.in_group()
    request = ReleaseRequest(
        nonce=world.challenge.nonce, evidence_sha256=EvidenceEnvelope.open(world.message()).read().sha256
    )
    value = {"evidence_sha256": request.evidence_sha256.hex(), "nonce": b64encode(request.nonce)}
    key = world.evidence_key

    def given(message: bytes | Mapping[str, Any]) -> dict[str, Any]:
        text = message.decode() if isinstance(message, bytes) else message
        return {"evidence_public": b64encode(key.public), "message": text}

    def signed(payload: Mapping[str, Any], *keys: Any, kind: str = RELEASE_REQUEST_TYPE) -> bytes:
        return dsse.sign(kind, encode(dict(payload)), list(keys or (key,))).encode()

    yield case("ask-valid", "By the machine that was accepted.", given(request.sign(key).encode()), **value)
    yield case(
        "ask-too-large",
        "One byte more than the limit.",
        given({"repeat": " ", "times": 4 * 1024 + 1}),
        code="message-too-large",
        check="1",
    )
    for name, description, message in (
        ("swap-request", "The payload under a challenge request's type.", signed(value, kind=REQUEST_TYPE)),
        ("unknown-field", "A field that nobody knows.", signed({**value, "machine": 0})),
        ("missing-field", "No digest of evidence.", signed({"nonce": value["nonce"]})),
        ("short-nonce", "A nonce of 31 bytes.", signed({**value, "nonce": b64encode(bytes(31))})),
    ):
        yield case(f"ask-{name}", description, given(message), code="message-invalid", check="1")
    for name, description, message in (
        ("thief", "Signed by somebody who read the evidence.", signed(value, signing_key("thief"))),
        ("launch-key", "Signed by the launch key, which is not attested.", signed(value, world.launch_key)),
        ("two-signatures", "Somebody else signed too.", signed(value, key, signing_key("other"))),
    ):
        yield case(f"ask-{name}", description, given(message), code="evidence-signature-invalid", check="4")


def pending_cases() -> Iterator[Case]:
    honest = Pending(accepted=2, machines=3, deadline_us=NOW_US)

    def given(**changes: Any) -> dict[str, Any]:
        value: dict[str, Any] = {"accepted": 2, "deadline_us": NOW_US, "machines": 3, **changes}
        return {"pending": encode(value).decode()}

    yield case("pending-valid", "Two of three are here.", {"pending": honest.encode().decode()}, accepted=2, machines=3)
    yield case("pending-nobody", "Nobody is here.", given(accepted=0), code="schema-invalid")
    yield case("pending-too-many", "65 machines.", given(machines=65), code="schema-invalid")
    yield case("pending-with-a-release", "A field that nobody knows.", given(ear="a.b.c"), code="schema-invalid")
