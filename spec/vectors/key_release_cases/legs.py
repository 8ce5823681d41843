"""Cases of legs of lines: spec/checkpoints.md section 1, in the documents of a key release."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from glasshouse.handshake.delegation import DELEGATION_TYPE
from glasshouse.wire import dsse, jwt
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.lines.line_start import LineStart
from key_release_cases.common import Case, case, sample
from key_release_cases.gate import gate_input
from key_release_cases.tokens import forged_token
from simulators.key_release_world import NOW_US, World, digest, signing_key

START = LineStart(id=digest("line"), leg=2, seq=4, checkpoint=digest("checkpoint 4"))
_WRONG: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("no-checkpoint", "A number without its checkpoint.", {"checkpoint": None}),
    ("no-seq", "A checkpoint without its number.", {"seq": 0}),
    ("first", "A first leg that goes on from something.", {"leg": 1}),
    ("no-leg", "Leg 0.", {"leg": 0}),
    ("rewind", "A rewind without a later checkpoint.", {"rewind": True}),
    ("counted", "A later checkpoint that is none.", {"counted": 4}),
    ("unknown-member", "A member too many.", {"ticket": "0" * 64}),
)


def leg_cases() -> Iterator[Case]:
    world = World()
    broker, evidence = b64encode(world.broker.public), b64encode(world.evidence_key.public)
    key = world.broker
    header, claims = (jwt.b64decode(part) for part in world.token(line=START).split(".")[:2])

    def token(name: str, description: str, line: dict[str, Any], **expect: Any) -> Case:
        text = forged_token(key, header, encode(json.loads(claims) | {"line": _without_none(line)}))
        given = {"broker_public": broker, "now_us": NOW_US, "token": text}
        return case(f"token-line-{name}", description, given, **expect)

    start = START.to_json()
    yield token("valid", "A leg of a line.", start, jti=world.launch.jti)
    rewound = start | {"counted": 6, "rewind": True}
    yield token("valid-rewind", "A leg that its owner ordered back.", rewound, jti=world.launch.jti)
    for name, description, changes in _WRONG:
        yield token(name, description, start | changes, code="schema-invalid")
    holder = world.evidence_key.key_id
    yield token("previous", "The holder of the leg before.", start | {"previous": holder}, code="schema-invalid")

    def ear(name: str, description: str, line: dict[str, Any] | None, **expect: Any) -> Case:
        named = sample(world).to_json() | {"aud": holder, "iss": key.key_id}
        named["glasshouse"] = {**named["glasshouse"], "line": line}
        text = jwt.issue(key, typ="ear+jwt", claims=named)
        given = {"broker_public": broker, "ear": text, "evidence_public": evidence, "now_us": NOW_US}
        return case(f"ear-line-{name}", description, given, **expect)

    good = {"assurance": "software", "status": "warning"}
    yield ear("valid", "A leg, and the holder of the one before.", start | {"previous": holder}, **good)
    yield ear("valid-first", "The first leg.", {"id": START.id.hex(), "leg": 1, "seq": 0}, **good)
    yield ear("no-previous", "A later leg after none.", start, code="schema-invalid")
    first = {"id": START.id.hex(), "leg": 1, "previous": holder, "seq": 0}
    yield ear("first-with-previous", "A first leg after another.", first, code="schema-invalid")

    of_leg = replace(world.launch, line=START)
    leg = World()
    leg.launch = of_leg
    for name, description, of, text in (
        ("line", "A token that says a leg, for a launch of none.", world, world.token(line=START)),
        ("no-line", "A token without a leg, for a launch of one.", leg, leg.token()),
        ("other-leg", "A genuine token of another leg.", leg, leg.token(line=replace(START, leg=3))),
        ("other-line", "A genuine token of another line.", leg, leg.token(line=replace(START, id=digest("other")))),
    ):
        given = gate_input(of, of.message(of.claims(token=text)))
        if of is leg:
            given["launch"]["line"] = start
        yield case(f"gate-3-claim-{name}", description, given, code="token-claim-mismatch", check="3")

    def delegation(name: str, description: str, use: str, *, code: str | None = None, **changes: Any) -> Case:
        value = json.loads(world.delegation.payload) | changes
        text = dsse.sign(DELEGATION_TYPE, encode(value), [world.owner]).encode().decode()
        given = {"at_us": NOW_US, "broker_public": broker, "delegation": text, "use": use}
        given["owner_public"] = b64encode(world.owner.public)
        return case(f"delegation-{name}", description, given, code=code)

    uses, store = ["countersign", "release", "store"], b64encode(signing_key("store").public)
    yield delegation("store", "A gate that keeps checkpoints.", "store", uses=uses, store_public=store)
    yield delegation("no-store", "A gate that keeps none.", "store", code="delegation-invalid")
    yield delegation("store-without-key", "A store without its key.", "store", code="schema-invalid", uses=uses)
    yield delegation("store-without-use", "Its key alone.", "release", code="schema-invalid", store_public=store)

    floor, policy = world.floor.to_json(), world.policy.to_json()
    for name, legs in (("none", 0), ("too-many", 1_000_001)):
        given = {"floor": floor, "policy": policy | {"max_legs": legs}}
        yield case(f"policy-max-legs-{name}", f"{legs} legs.", given, code="policy-impossible")
    several = policy | {"max_legs": 5}
    digests = {"floor_sha256": world.floor.sha256.hex()}
    digests["policy_sha256"] = type(world.policy).from_json(several).sha256.hex()
    yield case("policy-max-legs", "Five legs without an order.", {"floor": floor, "policy": several}, **digests)


def _without_none(value: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in value.items() if one is not None}
