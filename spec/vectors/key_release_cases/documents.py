"""Cases of challenge request, challenge, delegation, launch file and policy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from glasshouse.attestation.evidence import EVIDENCE_TYPE
from glasshouse.attestation.measurements.measured import Measured
from glasshouse.handshake.delegation import DELEGATION_TYPE, Delegation
from glasshouse.handshake.messages import REQUEST_TYPE, ChallengeRequest, TpmKeys
from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.policy import Assurance, Floor, Profile
from key_release_cases.common import Case, case, sample_ear
from simulators.hardware_objects import hardware_objects
from simulators.key_release_world import (
    NOW_US,
    SECOND_US,
    World,
    digest,
    identifier,
    signing_key,
)


def request_cases() -> Iterator[Case]:
    world = World()
    honest = ChallengeRequest(token=world.token(), request_id=digest("request")[:16])

    def given(message: bytes | Mapping[str, Any]) -> dict[str, Any]:
        text = message.decode() if isinstance(message, bytes) else message
        return {"broker_public": b64encode(world.broker.public), "message": text, "now_us": NOW_US}

    def refused(name: str, description: str, message: bytes | Mapping[str, Any], check: str, code: str) -> Case:
        return case(f"request-{name}", description, given(message), code=code, check=check)

    payload, valid = honest.encode(), honest.sign(world.launch_key).encode()
    yield case("request-valid", "Signed by the launch key.", given(valid), jti=world.launch.jti)
    keys = TpmKeys(ak=digest("ak") * 3, ek=digest("ek") * 30)
    named: dict[str, Any] = json.loads(replace(honest, tpm=keys).encode())

    def signed(tpm: Any) -> bytes:
        return dsse.sign(REQUEST_TYPE, encode(named | {"tpm": tpm}), [world.launch_key]).encode()

    with_keys = given(replace(honest, tpm=keys).sign(world.launch_key).encode())
    yield case("request-valid-tpm", "With the keys of a TPM.", with_keys, jti=world.launch.jti, tpm=named["tpm"])
    bare = named["tpm"] | {"ek": ""}
    no_certificate = given(signed(bare))
    yield case("request-valid-tpm-bare", "A TPM without a certificate.", no_certificate, jti=world.launch.jti, tpm=bare)
    for name, description, tpm in (
        ("tpm-null", "Null, where no TPM is named.", None),
        ("tpm-no-ek", "No endorsement key.", {"ak": named["tpm"]["ak"]}),
        ("tpm-long-ak", "An attestation key of 1,025 bytes.", bare | {"ak": b64encode(bytes(1025))}),
        ("tpm-long-ek", "Certificates of 4,097 bytes.", bare | {"ek": b64encode(bytes(4097))}),
        ("tpm-name", "With a name that the gate makes itself.", bare | {"name": "000b"}),
    ):
        yield refused(name, description, signed(tpm), "1", "message-invalid")
    too_large = {"repeat": " ", "times": 32 * 1024 + 1}
    yield refused("too-large", "One byte more than the limit.", too_large, "1", "message-too-large")
    crowded = ChallengeRequest(token="," * 20, request_id=honest.request_id).sign(world.launch_key).encode()
    yield refused("elements", "More elements than a request may have.", crowded, "1", "message-invalid")
    yield refused("swap-evidence", "Evidence as a request.", world.message(), "1", "message-invalid")
    swapped = dsse.sign(EVIDENCE_TYPE, payload, [world.launch_key]).encode()
    yield refused("swap-type", "A request under the type of evidence.", swapped, "1", "message-invalid")
    thief = honest.sign(signing_key("thief")).encode()
    yield refused("thief", "Signed by a thief of the token.", thief, "3", "token-key-mismatch")
    ear = ChallengeRequest(token=sample_ear(world), request_id=honest.request_id).sign(world.launch_key).encode()
    yield refused("swap-ear", "An attestation result as token.", ear, "3", "token-type-mismatch")
    second = NOW_US // SECOND_US
    old = (
        ChallengeRequest(token=world.token(expires_s=second), request_id=honest.request_id)
        .sign(world.launch_key)
        .encode()
    )
    yield refused("token-expired", "With an expired token.", old, "3", "token-expired")


def challenge_cases() -> Iterator[Case]:
    world = World()
    text = world.challenge.encode().decode()
    launch = world.launch_file().encode().decode()
    value: dict[str, Any] = json.loads(text)

    def given(challenge: str, now_us: int = NOW_US) -> dict[str, Any]:
        return {"challenge": challenge, "launch": launch, "now_us": now_us}

    def refused(name: str, description: str, **changes: Any) -> Case:
        return case(
            f"challenge-{name}", description, given(encode({**value, **changes}).decode()), code="broker-protocol"
        )

    yield case("challenge-valid", "For this launch.", given(text), nonce=value["nonce"])
    credential = b64encode(digest("credential") * 10)
    opened = given(encode({**value, "credential": credential}).decode())
    yield case("challenge-valid-tpm", "For a TPM to open.", opened, nonce=value["nonce"], credential=credential)
    yield refused("null-credential", "Null, where there is none.", credential=None)
    yield refused("long-credential", "A credential of 3,073 bytes.", credential=b64encode(bytes(3073)))
    yield refused("other-deployment", "For another deployment.", deployment=identifier("other"))
    yield refused("other-suite", "Another HPKE suite.", suite="HPKE-0x0020-0x0001-0x0001")
    yield refused("short-nonce", "A nonce of 16 bytes.", nonce=b64encode(bytes(16)))
    yield refused("too-long", "It lives for more than ten minutes.", expires_us=value["issued_us"] + 601 * SECOND_US)
    yield refused("never", "It ends when it begins.", expires_us=value["issued_us"])
    yield refused("unknown-field", "A field nobody knows.", recipients=[])
    other_time = given(text, NOW_US + 3600 * SECOND_US)
    yield case("challenge-other-time", "An hour too late, by this clock.", other_time, code="broker-protocol")


def delegation_cases() -> Iterator[Case]:
    world = World()
    text = world.delegation.encode().decode()
    owner = b64encode(world.owner.public)
    given = {"at_us": NOW_US, "broker_public": b64encode(world.broker.public), "owner_public": owner, "use": "release"}

    def refused(name: str, description: str, envelope: bytes, code: str, **changes: Any) -> Case:
        return case(f"delegation-{name}", description, {**given, "delegation": envelope.decode(), **changes}, code=code)

    def payload(**changes: Any) -> bytes:
        value: dict[str, Any] = {**json.loads(world.delegation.payload), **changes}
        return dsse.sign(DELEGATION_TYPE, encode(value), [world.owner]).encode()

    yield case("delegation-valid", "Signed by the owner.", {**given, "delegation": text})
    serial = payload(serial_us=NOW_US).decode()
    yield case("delegation-serial", "Signed by the owner, with a serial.", {**given, "delegation": serial})
    yield refused("no-serial", "A serial that stands for none.", payload(serial_us=0), "schema-invalid")
    wire = text.encode()
    forged = dsse.sign(DELEGATION_TYPE, world.delegation.payload, [world.broker]).encode()
    swapped = dsse.sign("application/vnd.glasshouse.manifest+json", world.delegation.payload, [world.owner]).encode()
    yield refused("self-signed", "The broker signed for itself.", forged, "signature-invalid")
    yield refused("swap-manifest", "Under the type of a manifest.", swapped, "wrong-type")
    yield refused("evidence", "Evidence, which is longer than any delegation.", world.message(), "too-large")
    yield refused("unknown-use", "A use that does not exist.", payload(uses=["everything"]), "schema-invalid")
    yield refused("no-use", "For nothing.", payload(uses=[]), "schema-invalid")
    yield refused("unsorted", "Uses out of order.", payload(uses=["release", "countersign"]), "schema-invalid")
    no_time = payload(not_after_us=1, not_before_us=1)
    yield refused("no-time", "It ends when it begins.", no_time, "schema-invalid")
    narrow = payload(uses=["countersign"])
    yield refused("other-use", "For another use.", narrow, "delegation-invalid")
    other = b64encode(signing_key("other").public)
    yield refused("other-broker", "To another broker.", wire, "delegation-invalid", broker_public=other)
    end = Delegation.from_envelope(world.delegation, world.owner.public).not_after_us
    yield refused("expired", "The moment in which it ends.", wire, "delegation-invalid", at_us=end)


def launch_cases() -> Iterator[Case]:
    world = World()
    honest: dict[str, Any] = json.loads(world.launch_file().encode())

    def refused(name: str, description: str, code: str, **changes: Any) -> Case:
        text = encode({**honest, **changes}).decode()
        return case(f"launch-{name}", description, {"launch": text}, code=code)

    yield case(
        "launch-valid",
        "Token, keys and binding belong together.",
        {"launch": encode(honest).decode()},
        deployment=world.record.deployment,
        launch_public=b64encode(world.launch_key.public),
    )
    seed = b64encode(signing_key("other").seed())
    yield refused("other-seed", "The seed of another launch key.", "token-key-mismatch", launch_seed=seed)
    broker = b64encode(signing_key("other").public)
    yield refused("other-broker", "Another broker is pinned.", "signature-invalid", broker_public=broker)
    yield refused("other-run", "Another run than the token's.", "token-claim-mismatch", run_id=identifier("other"))
    container = {"id": identifier("other"), "source": "minted"}
    yield refused("other-container", "Another container.", "token-claim-mismatch", container=container)
    yield refused("swap-ear", "An attestation result as token.", "wrong-type", token=sample_ear(world))
    yield refused("off", "Hardening off.", "schema-invalid", profile="off")
    yield refused("url", "A URL of another kind.", "schema-invalid", broker_url="https://user@host/path")
    yield refused("unknown-field", "A recipient smuggled in.", "schema-invalid", recipients=[])
    yield refused("delegation", "No envelope where the delegation belongs.", "schema-invalid", delegation={})


def policy_cases() -> Iterator[Case]:
    world = World()
    policy = world.policy.to_json()
    floor = Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD, egress=("mirror.example:443",))

    def refused(name: str, description: str, code: str, **changes: Any) -> Case:
        given = {"floor": floor.to_json(), "policy": {**policy, **changes}}
        return case(f"policy-{name}", description, given, code=code)

    tight = {**policy, "profile": "strict", "egress": ["mirror.example:443"]}
    valid = {"floor": floor.to_json(), "policy": tight}
    yield case(
        "policy-valid",
        "Tighter than the floor.",
        valid,
        floor_sha256=floor.sha256.hex(),
        policy_sha256=type(world.policy).from_json(tight).sha256.hex(),
    )
    references = world.policy.references.to_json()
    for part, digests in references.items():
        fewer = {name: value for name, value in references.items() if name != part}
        yield refused(
            f"no-{part}", f"Nothing to compare {part} with.", "policy-impossible", references=fewer | {part: []}
        )
        yield refused(f"without-{part}", f"No word of {part}.", "schema-invalid", references=fewer)
        yield refused(
            f"repeated-{part}", "A reference twice.", "schema-invalid", references=fewer | {part: [*digests, *digests]}
        )
    more = references | {"torch": references["glasshouse"]}
    yield refused("another-part", "A part that there is not.", "schema-invalid", references=more)
    yield refused("no-parts", "A list for the whole.", "schema-invalid", references=references["glasshouse"])
    yield refused("no-release", "No release to give.", "policy-impossible", release_budget=0)
    yield refused("off", "Hardening off.", "policy-impossible", profile="off")
    yield refused("skew", "A clock that may be off by an hour.", "policy-impossible", clock_skew_us=3600 * SECOND_US)
    yield refused("forever", "A run without end.", "policy-impossible", max_duration_s=2**40)
    yield refused("egress", "A peer that the floor does not have.", "policy-loosened", egress=["evil.example:443"])
    yield refused("egress-group", "The group, which the floor does not have.", "policy-loosened", egress=["group"])
    yield refused("egress-word", "A word that is no peer.", "schema-invalid", egress=["groups"])
    own, wide = replace(floor, egress=("group",)), {**policy, "egress": ["group"]}
    yield case(
        "policy-valid-group",
        "The machines of the group may talk, and nobody else.",
        {"floor": own.to_json(), "policy": wide},
        floor_sha256=own.sha256.hex(),
        policy_sha256=type(world.policy).from_json(wide).sha256.hex(),
    )
    hardware: dict[str, Any] = {"tdx": hardware_objects()["tdx"]}
    attested = {**policy, "assurance": "cpu-tee", "hardware": hardware}
    yield case(
        "policy-valid-hardware",
        "A level above `software`, and what hardware has to show.",
        {"floor": floor.to_json(), "policy": attested},
        floor_sha256=floor.sha256.hex(),
        policy_sha256=type(world.policy).from_json(attested).sha256.hex(),
    )
    chainless = {"tdx": {name: value for name, value in hardware["tdx"].items() if name != "chain"}}
    yield refused("no-chain", "Nothing leads to the runtime.", "chain-missing", assurance="cpu-tee", hardware=chainless)
    yield refused("null-hardware", "Null, where nothing is demanded.", "schema-invalid", hardware=None)
    strict = replace(floor, profile=Profile.STRICT)
    tee = replace(floor, assurance=Assurance.GPU_TEE)
    for name, higher in (("profile", strict), ("assurance", tee)):
        given = {"floor": higher.to_json(), "policy": policy}
        yield case(f"policy-loosened-{name}", f"A {name} below the floor's.", given, code="policy-loosened")


def measurement_cases() -> Iterator[Case]:
    files = {
        "cryptography": {"cryptography/__init__.py": digest("a"), "blake3/blake3.so": digest("b")},
        "glasshouse": {"glasshouse/__init__.py": digest("c")},
        # In the order of bytes: names above the first plane come after those of the private use area.
        "interpreter": {"python": digest("d"), "stdlib/\U00010000.py": digest("e"), "stdlib/\uffee.py": digest("f")},
        "start_up": {},
    }
    found = Measured.of(files)
    listed = {part: {name: value.hex() for name, value in files[part].items()} for part in files}
    valid = found.to_json()
    given = {"files": listed, "measurement": valid}
    yield case("measurement-valid", "Four parts, one without files.", given, sha256=found.sha256.hex())

    def refused(name: str, description: str, measurement: Any) -> Case:
        return case(f"measurement-{name}", description, {"measurement": measurement}, code="schema-invalid")

    for part in valid:
        fewer = {name: value for name, value in valid.items() if name != part}
        yield refused(f"without-{part}", f"No {part}.", fewer)
        yield refused(f"short-{part}", "A digest of 31 bytes.", fewer | {part: "00" * 31})
    yield refused("another-part", "A part that there is not.", {**valid, "torch": "00" * 32})
    yield refused("no-parts", "One digest for the whole.", found.sha256.hex())
