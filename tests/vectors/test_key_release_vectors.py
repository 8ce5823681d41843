"""The key-release vectors, read as data: each case is accepted, or refused by its own code."""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.ear import Ear
from glasshouse.attestation.measurements.measured import Measured
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.verify import check_1_envelope, check_1_payload, check_4_signatures
from glasshouse.errors import Code, GlasshouseError, PeerError
from glasshouse.handshake.broker_side import appraise, check_2_known, check_2_unused, check_13_budget
from glasshouse.handshake.delegation import Delegation, Use
from glasshouse.handshake.launch import LaunchFile, parse_token
from glasshouse.handshake.messages import Challenge, Pending
from glasshouse.handshake.records import (
    DeploymentRecord,
    GroupRecord,
    GroupState,
    LaunchRecord,
    check_4_release_request,
    check_14_group,
    check_challenge_request,
    check_release_request,
)
from glasshouse.handshake.runtime_side import check_release, read_challenge
from glasshouse.wire.canonical import b64decode, b64encode, encode
from glasshouse.wire.crypto import RecipientKey
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.policy import Floor

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "key-release"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if not CASES:
    raise FileNotFoundError(f"no vectors in {FOLDER}")


def octets(text: Any) -> bytes:
    """A document as the vectors give it: a text, or a text too long to print."""
    return (text if isinstance(text, str) else text["repeat"] * text["times"]).encode()


def gate(given: dict[str, Any]) -> dict[str, Any]:
    record, launch = given["record"], given["launch"]
    message, now_us = octets(given["message"]), given["now_us"]
    opened = check_1_envelope(message)
    challenge = check_2_known(given["challenge"] and Challenge.parse(encode(given["challenge"])))
    launch_public = b64decode(launch["launch_public"])
    check_4_signatures(opened.envelope, evidence_public=opened.evidence_public, launch_public=launch_public)
    signed = check_1_payload(opened)
    check_2_unused(challenge, used=given["challenge_used"], now_us=now_us)
    policy = DeploymentPolicy.from_json(record["policy"])
    appraisal = appraise(
        signed,
        challenge=challenge,
        record=DeploymentRecord(
            deployment=record["deployment"],
            package_id=record["package_id"],
            manifest_sha256=bytes.fromhex(record["manifest_sha256"]),
            key_commitment=bytes.fromhex(record["key_commitment"]),
            floor=Floor.from_json(record["floor"]),
            policy=policy,
            revoked=record["revoked"],
            delegation=record["delegation"]
            and Delegation.parse_signed(record["delegation"].encode(), b64decode(record["owner_public"])),
        ),
        launch=LaunchRecord(
            jti=launch["jti"],
            deployment=launch["deployment"],
            run_id=launch["run_id"],
            container_id=launch["container"]["id"],
            container_source=ContainerSource(launch["container"]["source"]),
            launch_public=b64decode(launch["launch_public"]),
            expires_us=launch["expires_us"],
            group=Group.from_json(launch["group"]) if "group" in launch else None,
            line=LineStart.from_json(launch["line"]) if "line" in launch else None,
        ),
        broker_public=b64decode(given["broker_public"]),
        now_us=now_us,
    )
    more = given.get("released_together", 1)
    check_13_budget(released_to=given["released_to"], known=given["hpke_key_known"], policy=policy, more=more)
    if "group" in launch:
        check_14_group(group_record(launch, given["group"]))
    composite = json.loads(b64payload(message))["composite"]
    return {"composite": composite, "evidence_sha256": appraisal.evidence_sha256.hex()}


def consumes(given: dict[str, Any]) -> bool:
    """Whether evidence uses its challenge up: whatever is wrong with it, once it passed checks 1 and 4."""
    if given["challenge"] is None or given["challenge_used"]:
        return False
    try:
        opened = check_1_envelope(octets(given["message"]))
        launch_public = b64decode(given["launch"]["launch_public"])
        check_4_signatures(opened.envelope, evidence_public=opened.evidence_public, launch_public=launch_public)
        check_1_payload(opened)
    except CheckFailedError:
        return False
    return True


def group_record(launch: dict[str, Any], standing: dict[str, Any]) -> GroupRecord:
    place = Group.from_json(launch["group"])
    return GroupRecord(
        id=place.id,
        deployment=launch["deployment"],
        machines=place.machines,
        ranks=place.ranks,
        state=GroupState(standing["state"]),
        culprit=standing["culprit"],
        code=standing["code"] and Code(standing["code"]),
    )


def group(given: dict[str, Any]) -> dict[str, Any]:
    found = Group.from_json(given["group"])
    assert found.to_json() == given["group"]
    secret = found.secret(b64decode(given["package_key"]))
    return {"first_rank": found.first_rank, "secret": b64encode(secret), "world_size": found.world_size}


def ask(given: dict[str, Any]) -> dict[str, Any]:
    request, envelope = check_release_request(octets(given["message"]))
    check_4_release_request(envelope, evidence_public=b64decode(given["evidence_public"]))
    return {"evidence_sha256": request.evidence_sha256.hex(), "nonce": b64encode(request.nonce)}


def pending(given: dict[str, Any]) -> dict[str, Any]:
    found = Pending.parse(given["pending"].encode())
    assert found.encode() == given["pending"].encode()
    return {"accepted": found.accepted, "machines": found.machines}


def b64payload(message: bytes) -> bytes:
    return base64.b64decode(json.loads(message)["payload"])


def request(given: dict[str, Any]) -> dict[str, Any]:
    token, tpm = check_challenge_request(
        octets(given["message"]), broker_public=b64decode(given["broker_public"]), now_us=given["now_us"]
    )
    return {"jti": token.jti} | ({} if tpm is None else {"tpm": tpm.to_json()})


def challenge(given: dict[str, Any]) -> dict[str, Any]:
    launch = LaunchFile.parse(given["launch"].encode())
    found = read_challenge(given["challenge"].encode(), launch, now_us=given["now_us"])
    assert found.encode() == given["challenge"].encode()
    opened = {} if found.credential is None else {"credential": b64encode(found.credential)}
    return {"nonce": b64encode(found.nonce), **opened}


def delegation(given: dict[str, Any]) -> dict[str, Any]:
    found = Delegation.parse_signed(given["delegation"].encode(), b64decode(given["owner_public"]))
    found.check(Use(given["use"]), broker_public=b64decode(given["broker_public"]), at_us=given["at_us"])
    return {}


def launch(given: dict[str, Any]) -> dict[str, Any]:
    found = LaunchFile.parse(given["launch"].encode())
    assert found.encode() == given["launch"].encode()
    return {"deployment": found.claims().deployment, "launch_public": b64encode(found.key().public)}


def policy(given: dict[str, Any]) -> dict[str, Any]:
    found, floor = DeploymentPolicy.from_json(given["policy"]), Floor.from_json(given["floor"])
    found.tightens(floor)
    return {"floor_sha256": floor.sha256.hex(), "policy_sha256": found.sha256.hex()}


def token(given: dict[str, Any]) -> dict[str, Any]:
    found = parse_token(given["token"], broker_public=b64decode(given["broker_public"]), now_us=given["now_us"])
    return {"jti": found.jti}


def ear(given: dict[str, Any]) -> dict[str, Any]:
    found = Ear.parse_token(
        given["ear"],
        broker_public=b64decode(given["broker_public"]),
        evidence_public=b64decode(given["evidence_public"]),
        now_us=given["now_us"],
    )
    return {"assurance": found.assurance.value, "status": found.status.value}


def release(given: dict[str, Any]) -> dict[str, Any]:
    checked = check_release(
        given["release"].encode(),
        LaunchFile.parse(given["launch"].encode()),
        Challenge.parse(given["challenge"].encode()),
        evidence=given["evidence"].encode(),
        evidence_public=b64decode(given["evidence_public"]),
        manifest_sha256=bytes.fromhex(given["manifest_sha256"]),
        floor=Floor.from_json(given["floor"]),
        now_us=given["now_us"],
    )
    key = RecipientKey(b64decode(given["hpke_private"])).open(checked.sealed_key, info=checked.info)
    return {"package_key": b64encode(key)}


def measurement(given: dict[str, Any]) -> dict[str, Any]:
    found = Measured.from_json(given["measurement"])
    files = {
        part: {name: bytes.fromhex(value) for name, value in listed.items()} for part, listed in given["files"].items()
    }
    assert Measured.of(files) == found
    assert found.to_json() == given["measurement"]
    return {"sha256": found.sha256.hex()}


READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ask": ask,
    "challenge": challenge,
    "delegation": delegation,
    "ear": ear,
    "gate": gate,
    "group": group,
    "launch": launch,
    "measurement": measurement,
    "pending": pending,
    "policy": policy,
    "release": release,
    "request": request,
    "token": token,
}


@pytest.mark.parametrize("name", CASES)
def test_vector(name: str) -> None:
    case = CASES[name]
    expect = dict(case["expect"])
    code, check = expect.pop("code"), expect.pop("check")
    if case["kind"] == "gate":
        assert consumes(case["input"]) is expect.pop("consumes")
    read = READERS[case["kind"]]
    if code is None:
        assert read(case["input"]) == expect
        return
    with pytest.raises(GlasshouseError) as refusal:
        read(case["input"])
    assert refusal.value.code == code
    if check is not None:
        assert isinstance(refusal.value, CheckFailedError)
        assert refusal.value.check == check
    if case["kind"] == "release" and code != "signature-invalid":
        assert isinstance(refusal.value, PeerError)  # the runtime blames the broker; HPKE blames the sender


def test_composite_and_info_follow_from_the_text_of_the_specification() -> None:
    """Computed here from the bytes in the vectors alone, so that both sides cannot be wrong together."""

    def joined(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "big") + part for part in parts)

    def digest(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    valid, released = CASES["gate-valid"], CASES["release-valid"]["input"]
    claims = json.loads(b64payload(octets(valid["input"]["message"])))["claims"]
    canonical = json.dumps(claims, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert digest(joined(b"glasshouse composite v1", canonical)).hex() == valid["expect"]["composite"]
    assert digest(octets(valid["input"]["message"])).hex() == valid["expect"]["evidence_sha256"]

    message = json.loads(released["release"])
    result = json.loads(b64decode(message["ear"].split(".")[1]))["glasshouse"]
    info = joined(
        b"glasshouse key release v1",
        released["challenge"].encode(),
        digest(released["evidence"].encode()),
        digest(message["ear"].encode()),
        bytes.fromhex(result["floor_sha256"]),
        bytes.fromhex(result["policy_sha256"]),
        b"HPKE-0x647a-0x0001-0x0002",
    )
    key = RecipientKey(b64decode(released["hpke_private"])).open(b64decode(message["sealed_key"]), info=info)
    assert b64encode(key) == CASES["release-valid"]["expect"]["package_key"]


def test_a_measurement_follows_from_the_text_of_the_specification() -> None:
    def hashed(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()

    valid = CASES["measurement-valid"]
    parts = []
    for part in ("cryptography", "glasshouse", "interpreter", "start_up"):
        files = [(name.encode(), bytes.fromhex(value)) for name, value in valid["input"]["files"][part].items()]
        found = hashed(
            b"glasshouse measured part v1", part.encode(), *(piece for file in sorted(files) for piece in file)
        )
        assert found.hex() == valid["input"]["measurement"][part]
        parts += [part.encode(), found]
    assert hashed(b"glasshouse runtime measurement v2", *parts).hex() == valid["expect"]["sha256"]


def test_a_group_secret_follows_from_the_text_of_the_specification() -> None:
    """HKDF (RFC 5869) from its two HMACs, and the info from the lengths and parts that section 5.4 names."""
    valid = CASES["group-valid"]
    key, place = b64decode(valid["input"]["package_key"]), valid["input"]["group"]
    world = (place["machines"] * place["ranks"]).to_bytes(4, "big")
    parts = (b"glasshouse group v1", bytes.fromhex(place["id"]), world)
    info = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    pseudorandom = hmac.digest(bytes(32), key, "sha256")
    assert b64encode(hmac.digest(pseudorandom, info + b"\x01", "sha256")) == valid["expect"]["secret"]


def test_every_kind_has_a_valid_case_and_refusals() -> None:
    for kind in READERS:
        codes = {case["expect"]["code"] for case in CASES.values() if case["kind"] == kind}
        assert None in codes, f"no valid vector of the kind {kind}"
        assert codes - {None}, f"no refusal of the kind {kind}"


def test_every_code_of_the_gate_has_its_own_vector() -> None:
    codes = list(Code)
    numbered = set(codes[codes.index(Code.MESSAGE_TOO_LARGE) : codes.index(Code.HARDWARE_UNEXPECTED) + 1])
    numbered |= {
        Code.RELEASE_BUDGET,
        Code.RANK_REFUSED,
        Code.DEPLOYMENT_EXPIRED,
        Code.PACKAGE_REVOKED,
        Code.CHAIN_DELEGATION,
    }
    seen = {case["expect"]["code"] for case in CASES.values() if case["kind"] == "gate"} - {None}
    assert seen == numbered


def test_the_generator_writes_the_committed_files_again() -> None:
    path = ROOT / "spec" / "vectors" / "generate_key_release.py"
    spec = importlib.util.spec_from_file_location("generate_key_release", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    built = generator.build(generator.committed())
    on_disk = {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
    assert built.keys() == on_disk.keys()
    assert [name for name in built if built[name] != on_disk[name]] == []
