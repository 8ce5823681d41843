"""Writes spec/vectors/owner-api/ again: signed requests to a gate, good ones and one for each thing that can be wrong.

Run: python spec/vectors/generate_owner_api.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from glasshouse.attestation.measurements.measured import PARTS, Measured, References
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.broker.http_api import MAX_COLLATERAL_BYTES, CollateralRequest
from glasshouse.errors import Code
from glasshouse.evidence.events import Event, EventType
from glasshouse.evidence.heads import countersign
from glasshouse.evidence.log import EventLog
from glasshouse.evidence.stored import StoredPart
from glasshouse.handshake.delegation import RUN_USES, Delegation
from glasshouse.handshake.owner_api import REQUEST_TYPE, SIGNED_POLICY_TYPE, SignedPolicy, sign_request
from glasshouse.wire import dsse, jwt
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import Tree, leaf_hash
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.states import Outcome, State

FOLDER = Path(__file__).resolve().parent / "owner-api"
OWNER, OTHER, STRANGER, GATE, RUNTIME = (SigningKey(bytes([number]) * 32) for number in (1, 2, 3, 4, 5))
NOW_US = 1_900_000_000_123_456
RUN = "/v1/runs/" + "ab" * 16
BODY = encode({"deployment": "cd" * 16, "machines": 2, "ranks": 1})
INVALID, STALE = Code.OWNER_REQUEST.value, Code.OWNER_STALE.value


def signed(**changes: Any) -> str:
    given = {"gate_public": GATE.public, "method": "GET", "target": RUN, "body": b"", "serial_us": NOW_US}
    return sign_request(OWNER, **{**given, **changes})


def forged(key: SigningKey = OWNER, typ: str = REQUEST_TYPE, **changes: Any) -> str:
    """A request whose claims are not what the house would write."""
    issued_s = NOW_US // 1_000_000
    claims = {
        "aud": GATE.key_id,
        "body_sha256": sha256(b"").hex(),
        "exp": issued_s + 300,
        "iat": issued_s,
        "method": "GET",
        "serial_us": NOW_US,
        "target": RUN,
    } | changes
    return "Glasshouse " + jwt.issue(key, typ=typ, claims={k: v for k, v in claims.items() if v is not None})


def case(description: str, authorization: str | None, *, code: str | None = None, **given: Any) -> dict[str, Any]:
    inputs = {"authorization": authorization, "body": "", "last_us": 0, "method": "GET", "target": RUN}
    return {
        "description": description,
        "expect": {"code": code, **({} if code else {"owner": OWNER.public.hex()})},
        "input": inputs | {"now_us": NOW_US} | given,
    }


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    posted: dict[str, Any] = {"method": "POST", "target": "/v1/groups", "body": BODY}
    asked = {"method": "POST", "target": "/v1/groups", "body": BODY.decode()}
    yield "look", case("a request without a body", signed())
    yield "announce", case("a request with a body", signed(**posted), **asked)
    yield "page", case("a target with a query", signed(target="/v1/audit?after=7"), target="/v1/audit?after=7")
    yield "early", case("a clock five minutes ahead", signed(serial_us=NOW_US + 300_000_000))
    yield "late", case("a clock almost five minutes behind", signed(serial_us=NOW_US - 299_000_000))
    yield "next", case("one after the last", signed(), last_us=NOW_US - 1)
    # 1
    yield "absent", case("no field", None, code=INVALID)
    yield "scheme", case("another scheme", signed().replace("Glasshouse", "Bearer"), code=INVALID)
    yield "long", case("more than 1,024 characters", signed() + "A" * 1024, code=INVALID)
    yield "two-parts", case("not a compact token", signed().rpartition(".")[0], code=INVALID)
    _, claims, signature = signed().removeprefix("Glasshouse ").split(".")
    crit = b64encode(encode({"alg": "EdDSA", "crit": [], "kid": OWNER.key_id, "typ": REQUEST_TYPE}))
    yield "crit", case("a header with crit", f"Glasshouse {crit}.{claims}.{signature}", code=INVALID)
    # 2
    yield "stranger", case("signed by one who is not enrolled", forged(STRANGER), code=INVALID)
    # 3
    kid = b64encode(encode({"alg": "EdDSA", "kid": OTHER.key_id, "typ": REQUEST_TYPE}))
    yield "other", case("the key id of another enrolled owner", f"Glasshouse {kid}.{claims}.{signature}", code=INVALID)
    yield (
        "flipped",
        case("a signature of other claims", forged(method="PUT").rpartition(".")[0] + "." + signature, code=INVALID),
    )
    yield "launch-token", case("a launch token's type", forged(typ="glasshouse-launch+jwt"), code=INVALID)
    yield "other-gate", case("for another gate", signed(gate_public=STRANGER.public), code=INVALID)
    # 4
    yield "too-early", case("a clock more than five minutes ahead", signed(serial_us=NOW_US + 301_000_000), code=STALE)
    yield "too-late", case("made five minutes ago", signed(serial_us=NOW_US - 300_000_000), code=STALE)
    # 5
    yield "method", case("another method", signed(), method="PUT", code=INVALID)
    yield "target", case("another run", signed(), target="/v1/runs/" + "ac" * 16, code=INVALID)
    yield "query", case("a query that was not signed", signed(), target=RUN + "?after=1", code=INVALID)
    outside = "/v1/runs/../broker"
    yield "outside", case("a target of another form", forged(target=outside), target=outside, code=INVALID)
    yield "further", case("one more claim", forged(jti="1"), code=INVALID)
    yield "lacking", case("one claim less", forged(body_sha256=None), code=INVALID)
    yield "long-lived", case("valid for a day", forged(exp=NOW_US // 1_000_000 + 86_400), code=INVALID)
    yield "two-times", case("a serial of another second", forged(serial_us=NOW_US - 5_000_000), code=INVALID)
    # 6
    yield (
        "body",
        case("another body", signed(**posted), **(asked | {"body": BODY.decode().replace("2", "3")}), code=INVALID),
    )
    yield "no-body", case("a body that is gone", signed(**posted), **(asked | {"body": ""}), code=INVALID)
    # 7
    yield "again", case("the last one again", signed(), last_us=NOW_US, code=STALE)
    yield "overtaken", case("a later one was taken", signed(), last_us=NOW_US + 1, code=STALE)


def policy_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    policy = DeploymentPolicy(
        assurance=Assurance.SOFTWARE,
        profile=Profile.STRICT,
        egress=(),
        references=References.of(Measured(**{part: sha256(part.encode()) for part in PARTS})),
        release_budget=1,
        not_after_us=NOW_US + 10**9,
        lease_s=60,
        max_duration_s=3600,
    )
    good = SignedPolicy(broker_public=GATE.public, manifest_sha256=sha256(b"manifest"), policy=policy)
    payload = good.sign(OWNER).payload

    def of(description: str, envelope: dsse.Envelope, code: Code | None = None) -> dict[str, Any]:
        expect: dict[str, Any] = {"code": code and code.value}
        if code is None:
            expect["policy_sha256"] = policy.sha256.hex()
        return {"description": description, "expect": expect, "input": {"envelope": envelope.encode().decode()}}

    yield "policy", of("a signed policy", good.sign(OWNER))
    yield "policy-stranger", of("signed by another owner", good.sign(OTHER), Code.SIGNATURE)
    two = dsse.sign(SIGNED_POLICY_TYPE, payload, [OWNER, OTHER])
    yield "policy-two-signers", of("signed by one more", two, Code.SIGNATURE)
    forged_type = dsse.sign("application/vnd.glasshouse.delegation+json", payload, [OWNER])
    yield "policy-wrong-type", of("as a delegation", forged_type, Code.WRONG_TYPE)
    delegation = Delegation(broker_public=GATE.public, uses=RUN_USES, not_before_us=0, not_after_us=NOW_US)
    yield "policy-delegation", of("a delegation in its place", delegation.sign(OWNER), Code.WRONG_TYPE)
    lacking = encode({"broker_public": b64encode(GATE.public), "policy": policy.to_json()})
    no_manifest = dsse.sign(SIGNED_POLICY_TYPE, lacking, [OWNER])
    yield "policy-no-manifest", of("of no package", no_manifest, Code.SCHEMA)


def stored_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Parts of files for the store, and what is not one: checks 1 to 4 of section 7."""
    lines: list[bytes] = []
    times = iter(range(NOW_US, NOW_US + 1000))
    log = EventLog(run_id="ab" * 16, evidence_key=RUNTIME, clock_us=lambda: next(times), sink=lines.append)
    order = list(State)
    for state in order[1 : order.index(State.RUNNING) + 1]:
        log.transition(state)
    content = bytes(range(256)) * 4
    named: dict[str, Any] = {"sealed_bytes": len(content), "sealed_sha256": sha256(content).hex(), "sequence": 0}
    log.append(EventType.SEGMENT, named)
    log.append(EventType.OUTPUT, {"bytes": 900, "class": "file", "kind": "output", **named})

    def head(key: SigningKey = GATE) -> Envelope:
        signed = countersign(
            log.head(),
            (),
            run_id="ab" * 16,
            previous=None,
            evidence_public=RUNTIME.public,
            broker_key=key,
            now_us=NOW_US,
        )
        return signed.envelope

    def part(number: int, countersigned: Envelope, name: str, **changes: Any) -> StoredPart:
        tree = Tree()
        for line in lines:
            tree.append(leaf_hash(line[:-1]))
        index = number % len(lines)
        good = StoredPart(
            name=name,
            size=len(content),
            sha256=sha256(content),
            start=0,
            data=content,
            event=Event.parse(lines[index][:-1]),
            head=countersigned,
            proof=tuple(tree.inclusion_proof(index, len(lines))),
        )
        return replace(good, **changes)

    def of(description: str, given: StoredPart | bytes, code: Code | None = None) -> dict[str, Any]:
        body = given if isinstance(given, bytes) else given.encode()
        return {"description": description, "expect": {"code": code and code.value}, "input": {"body": body.decode()}}

    output, segment = "outputs/0000.sealed", "log/0000.sealed"
    now, of_another = head(), head(STRANGER)
    good = part(-1, now, output)
    yield "store", of("a whole output", good)
    yield "store-piece", of("a piece of an output", replace(good, start=1000, data=content[1000:]))
    yield "store-nothing", of("no bytes: how much is there?", replace(good, data=b""))
    yield "store-segment", of("a log segment", part(-2, now, segment))
    # 1
    yield "store-name", of("another name", replace(good, name="runtime.log"), Code.MESSAGE_INVALID)
    yield "store-up", of("a name that leads elsewhere", replace(good, name="outputs/../0.sealed"), Code.MESSAGE_INVALID)
    yield "store-behind", of("bytes behind the end", replace(good, start=1), Code.MESSAGE_INVALID)
    yield "store-empty", of("a file of no bytes", replace(good, size=0, data=b""), Code.MESSAGE_INVALID)
    yield "store-step", of("a step of 31 bytes", replace(good, proof=(bytes(31),)), Code.MESSAGE_INVALID)
    # 2
    yield "store-gate", of("countersigned by another gate", replace(good, head=of_another), Code.RUN_UNKNOWN)
    alone = Envelope.parse(log.head(), max_bytes=8192)
    yield "store-head", of("a head without countersignature", replace(good, head=alone), Code.RUN_UNKNOWN)
    # 3
    moved = replace(good, event=replace(good.event, time_us=good.event.time_us + 1))
    yield "store-event", of("an event that the log does not have", moved, Code.HEAD_INCONSISTENT)
    yield (
        "store-proof",
        of("a proof without its last step", replace(good, proof=good.proof[:-1]), Code.HEAD_INCONSISTENT),
    )
    # 4
    yield "store-digest", of("another digest", replace(good, sha256=bytes(32)), Code.HEAD_INCONSISTENT)
    yield "store-size", of("another length", replace(good, size=2000), Code.HEAD_INCONSISTENT)
    yield "store-number", of("another number", replace(good, name="outputs/0001.sealed"), Code.HEAD_INCONSISTENT)
    yield (
        "store-zeros",
        of("another spelling of the number", replace(good, name="outputs/00000.sealed"), Code.HEAD_INCONSISTENT),
    )
    yield "store-kind", of("an output's event for a segment", replace(good, name=segment), Code.HEAD_INCONSISTENT)
    yield "store-early", of("a receipt before the end", replace(good, name="receipt.json"), Code.HEAD_INCONSISTENT)
    log.transition(State.ZEROIZING, code=Code.INTERRUPTED)
    log.transition(State.ZEROIZED, outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED)
    final = head()
    yield "store-receipt", of("a receipt at the end", part(-1, final, "receipt.json"))
    yield "store-log", of("the log at the end", part(-1, final, "events.log"))
    yield "store-before", of("by an event before the end", part(-2, final, "heads.log"), Code.HEAD_INCONSISTENT)


def collateral_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies of POST /v1/collateral, of the first owner: section 3, and section 5 of spec/hardware-evidence.md."""
    crl, rim = (
        Item(name="amd/crl/Milan", data=b"\x30\x00"),
        Item(name="nvidia/rim/NV_GPU_DRIVER_GH100_1", data=b"<x/>"),
    )
    pack = Pack(items=(crl, rim))
    value: dict[str, Any] = CollateralRequest(collateral=pack, owner=OWNER.public).to_json()

    def of(description: str, body: bytes | dict[str, Any], code: Code | None = None) -> dict[str, Any]:
        given = body if isinstance(body, dict) else {"body": body.decode()}
        expect: dict[str, Any] = {"code": code and code.value}
        if code is None:
            found = CollateralRequest.parse(body if isinstance(body, bytes) else b"")
            expect["collateral_sha256"] = found.collateral.sha256.hex()
        return {"description": description, "expect": expect, "input": given}

    yield "collateral", of("a pack of two items", encode(value))
    yield "collateral-empty", of("a pack of none", encode(value | {"collateral": Pack(items=()).to_json()}))
    other = encode(value | {"owner": b64encode(OTHER.public)})
    yield "collateral-other", of("of another owner than the caller", other, Code.PACKAGE_OWNER)
    turned = value["collateral"] | {"items": value["collateral"]["items"][::-1]}
    yield "collateral-unsorted", of("items that are not sorted", encode(value | {"collateral": turned}), Code.SCHEMA)
    roots = value["collateral"] | {"roots": []}
    yield "collateral-roots", of("a pack with roots", encode(value | {"collateral": roots}), Code.SCHEMA)
    yield "collateral-text", of("a pack in a text", encode(value | {"collateral": pack.encode().decode()}), Code.SCHEMA)
    yield "collateral-absent", of("no pack", encode({"owner": value["owner"]}), Code.SCHEMA)
    yield "collateral-no-owner", of("no owner", encode({"collateral": value["collateral"]}), Code.SCHEMA)
    short = encode(value | {"owner": b64encode(bytes(31))})
    yield "collateral-short-owner", of("a key of 31 bytes", short, Code.SCHEMA)
    spaced = encode(value).replace(b'"owner":', b'"owner": ')
    yield "collateral-spaced", of("not canonical", spaced, Code.NOT_CANONICAL)
    large = {"repeat": " ", "times": MAX_COLLATERAL_BYTES + 1}
    yield "collateral-large", of("one byte more than a pack of 2 MiB comes to", {"body": large}, Code.TOO_LARGE)


def build() -> dict[str, bytes]:
    """Return the files by name."""
    keys = {
        "gate": GATE.public.hex(),
        "owners": [OWNER.public.hex(), OTHER.public.hex()],
        "runtime": RUNTIME.public.hex(),
    }
    files = {"keys.json": _encoded(keys)}
    for name, document in (*cases(), *collateral_cases(), *policy_cases(), *stored_cases()):
        if f"{name}.json" in files:
            raise ValueError(f"two vectors with the name {name}")
        files[f"{name}.json"] = _encoded(document)
    return files


def _encoded(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def main() -> None:
    files = build()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    print(f"{len(files)} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
