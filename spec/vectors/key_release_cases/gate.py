"""Cases of the gate: section 6 of the specification."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from glasshouse.attestation.claims import ContainerSource, Gpu, SecretMemoryKind, WorkspaceKind, composite
from glasshouse.attestation.evidence import EVIDENCE_TYPE, EvidenceEnvelope
from glasshouse.attestation.measurements.measured import PARTS, Measured
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.handshake.delegation import DELEGATION_TYPE, Use
from glasshouse.handshake.launch import CLOCK_STEP_S, TOKEN_TYPE, issue_token
from glasshouse.handshake.messages import REQUEST_TYPE
from glasshouse.wire import dsse, jwt
from glasshouse.wire.canonical import b64encode, decode, encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.wire.states import State
from key_release_cases.common import HEAD_TYPE, Case, case, sample_ear
from simulators.key_release_world import (
    FAILED,
    NOW_US,
    SECOND_US,
    World,
    answers,
    digest,
    identifier,
    report,
    signing_key,
)
from simulators.measured import measured


def gate_input(world: World, message: bytes | Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    record, launch = world.record, world.launch
    given: dict[str, Any] = {
        "broker_public": b64encode(world.broker.public),
        "challenge": decode(world.challenge.encode(), max_bytes=4096),
        "challenge_used": False,
        "hpke_key_known": False,
        "launch": {
            "container": {"id": launch.container_id, "source": launch.container_source.value},
            "deployment": launch.deployment,
            "expires_us": launch.expires_us,
            "jti": launch.jti,
            "launch_public": b64encode(launch.launch_public),
            "run_id": launch.run_id,
        },
        "message": message.decode() if isinstance(message, bytes) else message,
        "now_us": world.now_us,
        "record": {
            "delegation": world.delegation.encode().decode() if record.delegation else None,
            "deployment": record.deployment,
            "floor": record.floor.to_json(),
            "key_commitment": record.key_commitment.hex(),
            "manifest_sha256": record.manifest_sha256.hex(),
            "owner_public": b64encode(world.owner.public),
            "package_id": record.package_id,
            "policy": record.policy.to_json(),
            "revoked": record.revoked,
        },
        "released_to": 0,
    }
    if launch.group is not None:
        given["launch"]["group"] = launch.group.to_json()
        given["released_together"] = launch.group.machines
        given["group"] = {"code": None, "culprit": None, "state": "open"}
    return {**given, **changes}


def gate_cases() -> Iterator[Case]:
    world = World()
    honest = world.message()
    signed = EvidenceEnvelope.open(honest).read()
    yield case(
        "gate-valid",
        "Everything is as it should be.",
        gate_input(world, honest),
        composite=signed.evidence.composite.hex(),
        evidence_sha256=signed.sha256.hex(),
    )
    yield case(
        "gate-valid-lost-answer",
        "The budget is used up, but by this very HPKE key.",
        gate_input(world, honest, released_to=1, hpke_key_known=True),
        composite=signed.evidence.composite.hex(),
        evidence_sha256=signed.sha256.hex(),
    )
    yield from gate_message_cases(world, honest)
    yield from gate_element_cases()
    yield from gate_ascii_cases()
    yield from gate_stranger_cases(world, honest)
    yield from gate_challenge_cases(world, honest)
    yield from gate_token_cases(world)
    yield from gate_claim_cases(world)
    yield from gate_level_cases(world)
    yield case(
        "gate-13-release-budget-exhausted",
        "Another HPKE key, and no release left.",
        gate_input(world, honest, released_to=1),
        code="release-budget-exhausted",
        check="13",
    )


def gate_message_cases(world: World, honest: bytes) -> Iterator[Case]:
    """Checks 1 and 4: the message as such."""

    def invalid(name: str, description: str, message: bytes | Mapping[str, Any]) -> Case:
        return case(f"gate-1-{name}", description, gate_input(world, message), code="message-invalid", check="1")

    envelope = dsse.Envelope.parse(honest, max_bytes=2**20)
    payload: dict[str, Any] = dict(json.loads(envelope.payload))
    keys = [world.evidence_key, world.launch_key]
    yield case(
        "gate-1-message-too-large",
        "One byte more than the limit.",
        gate_input(world, {"repeat": " ", "times": 32 * 1024 + 1}),
        code="message-too-large",
        check="1",
    )
    yield invalid("not-json", "Not JSON at all.", b"evidence")
    yield invalid("not-canonical", "A space after a comma.", honest.replace(b'","', b'", "', 1))
    yield invalid("one-signature", "The launch key did not sign.", world.message(keys=keys[:1]))
    yield invalid("three-signatures", "Somebody else signed too.", world.message(keys=[*keys, signing_key("other")]))
    for name, kind in (
        ("head", HEAD_TYPE),
        ("delegation", DELEGATION_TYPE),
        ("challenge-request", REQUEST_TYPE),
        ("manifest", "application/vnd.glasshouse.manifest+json"),
        ("statement", "application/vnd.in-toto+json"),
    ):
        yield invalid(f"swap-{name}", "The payload under another document's type.", world.message(payload_type=kind))
    for name, description, claims in (
        ("unknown-claim", "A claim that the schema does not know.", {**payload["claims"], "note": "hello"}),
        ("missing-claim", "No state.", {key: value for key, value in payload["claims"].items() if key != "state"}),
        ("other-profile", "Another EAT profile.", {**payload["claims"], "eat_profile": "urn:example:evidence"}),
        ("short-nonce", "A nonce of 31 bytes.", {**payload["claims"], "eat_nonce": b64encode(bytes(31))}),
        ("hpke-key", "An HPKE key that nothing can be sealed to.", {**payload["claims"], "hpke_public": half(0)}),
        (
            "hpke-key-bit",
            "An X25519 number with its highest bit set.",
            {**payload["claims"], "hpke_public": half(9 | 1 << 255)},
        ),
        (
            "hpke-key-field",
            "An X25519 number beyond the field.",
            {**payload["claims"], "hpke_public": half(2**255 - 19 + 9)},
        ),
    ):
        body = encode({**payload, "claims": claims})
        yield invalid(name, description, dsse.sign(EVIDENCE_TYPE, body, keys).encode())
    yield from gate_payload_cases(world, envelope, keys)
    signatures = [
        ("thief", "Signed by the evidence key and by a thief of the token.", {}, [keys[0], signing_key("thief")]),
        ("other-evidence-key", "Signed by another evidence key than claimed.", {}, [signing_key("other"), keys[1]]),
        (
            "one-key-twice",
            "The launch key claims to be the evidence key too.",
            {"evidence_public": world.launch_key.public},
            [keys[1], signing_key("other")],
        ),
    ]
    for name, description, changes, signers in signatures:
        message = world.message(world.claims(**changes), keys=signers)
        yield case(
            f"gate-4-{name}",
            description,
            gate_input(world, message),
            code="evidence-signature-invalid",
            check="4",
        )
    other = dsse.Envelope.parse(world.message(world.claims(measurement=measured("mine"))), max_bytes=2**20)
    yield case(
        "gate-4-spliced",
        "Genuine signatures over other claims.",
        gate_input(world, replace(envelope, payload=other.payload).encode()),
        code="evidence-signature-invalid",
        check="4",
    )


def gate_payload_cases(world: World, honest: dsse.Envelope, keys: Sequence[SigningKey]) -> Iterator[Case]:
    """The order of checks 1, 2 and 4: the payload's first claims; the challenge; the signatures; then the payload."""
    payload: dict[str, Any] = dict(json.loads(honest.payload))
    noted = encode({**payload, "claims": {**payload["claims"], "note": "hello"}})
    spaced = honest.payload.replace(b'"hardware":[]', b'"hardware": []')
    twice = honest.payload[:-1] + b"," + honest.payload[1:]
    signed = partial(dsse.sign, EVIDENCE_TYPE, keys=keys)
    noted_by_nobody = replace(honest, payload=noted).encode()
    for name, description, message, changes in (
        ("payload-spaced", "Signed as it must be, and not canonical behind its first claims.", signed(spaced), {}),
        ("payload-twice", "Every field stands twice.", signed(twice), {}),
        (
            "payload-replayed",
            "An unknown claim, for a challenge that was used.",
            signed(noted),
            {"challenge_used": True},
        ),
        ("payload-order", "The composite stands before the claims.", signed(swapped(payload)), {}),
        (
            "payload-order-unsigned",
            "The same with signatures of something else.",
            replace(honest, payload=swapped(payload)),
            {},
        ),
    ):
        given = gate_input(world, message.encode(), **changes)
        yield case(f"gate-1-{name}", description, given, code="message-invalid", check="1")
    yield case(
        "gate-2-nonce-unknown-payload",
        "Unsigned and with an unknown claim, for a challenge that was never given.",
        gate_input(world, noted_by_nobody, challenge=None),
        code="nonce-unknown",
        check="2",
    )
    yield case(
        "gate-4-unsigned-payload",
        "With an unknown claim, which is found out only in what was signed.",
        gate_input(world, noted_by_nobody),
        code="evidence-signature-invalid",
        check="4",
    )


def swapped(payload: Mapping[str, Any]) -> bytes:
    """A payload whose first key is its second one."""
    return json.dumps(
        {name: payload[name] for name in ("composite", "claims", "hardware")}, separators=(",", ":")
    ).encode()


def gate_element_cases() -> Iterator[Case]:
    """Check 1: what makes parsing dear is counted before parsing, in strings too."""
    for name, description, elements, code in (
        ("gate-valid-elements", "As many elements as evidence may have, most of them in names of GPUs.", 512, None),
        ("gate-1-elements", "One element more.", 513, "message-invalid"),
    ):
        world = World()
        plain = Gpu(name="", memory_bytes=0, driver="", uuid="")
        bare = dsse.Envelope.parse(world.message(world.claims(gpus=(plain,) * 10)), max_bytes=2**20).payload
        missing = elements - sum(bare.count(mark) for mark in b",[{")
        gpus = [replace(plain, name="," * min(128, max(0, missing - 128 * number))) for number in range(10)]
        message = world.message(world.claims(gpus=tuple(gpus)))
        signed = EvidenceEnvelope.open(message).read() if code is None else None
        found = signed and {"composite": signed.evidence.composite.hex(), "evidence_sha256": signed.sha256.hex()}
        given = gate_input(world, message)
        yield case(name, description, given, code=code, check="1" if code else None, **(found or {}))


def gate_ascii_cases() -> Iterator[Case]:
    """Check 1: other text than ASCII is refused before it is parsed, also where a field would take it."""
    world = World()
    given = gate_input(world, world.message(world.claims(token="\u00e9")))  # noqa: S106 - not a token
    yield case("gate-1-ascii", "A token that is not ASCII.", given, code="message-invalid", check="1")


def gate_stranger_cases(world: World, honest: bytes) -> Iterator[Case]:
    """Check 4 comes before what could be consumed or refused: a stranger is answered the same, whatever stands open."""
    envelope = dsse.Envelope.parse(honest, max_bytes=2**20)
    claims = world.claims(evidence_public=signing_key("stranger").public, token="a.b.c")  # noqa: S106 - not a token
    unsigned = world.message(claims, keys=[signing_key("stranger"), signing_key("other")])
    mine = world.launch_key.key_id
    spoiled = tuple((name, value if name == mine else bytes(64)) for name, value in envelope.signatures)
    grouped = World.in_group()
    over = {"code": "measurement-unknown", "culprit": 2, "state": "refused"}
    for name, description, gate, message, changes in (
        ("unsigned", "A stranger's keys, and no token of this broker.", world, unsigned, {}),
        ("unsigned-replayed", "The same for a challenge that was answered.", world, unsigned, {"challenge_used": True}),
        ("unsigned-expired", "The same at its end.", world, unsigned, {"now_us": world.challenge.expires_us}),
        ("unsigned-group", "The same for a group that is over.", grouped, unsigned, {"group": over}),
        (
            "spoiled",
            "Genuine evidence, with the launch key's signature; the other one is spoiled.",
            world,
            replace(envelope, signatures=spoiled).encode(),
            {},
        ),
    ):
        given = gate_input(gate, message, **changes)
        yield case(f"gate-4-{name}", description, given, code="evidence-signature-invalid", check="4")


def half(number: int) -> str:
    """An HPKE key whose X25519 half is this number."""
    return b64encode(World().hpke.public[:1184] + number.to_bytes(32, "little"))


def gate_challenge_cases(world: World, honest: bytes) -> Iterator[Case]:
    """Check 2: the challenge's state, and the deployment's at check 3."""
    late = world.challenge.expires_us
    for name, description, code, changes in (
        ("nonce-unknown", "A challenge that was never given.", "nonce-unknown", {"challenge": None}),
        ("nonce-replayed", "A challenge that was answered before.", "nonce-replayed", {"challenge_used": True}),
        ("nonce-expired", "A challenge at the end of its life.", "nonce-expired", {"now_us": late}),
        (
            "nonce-replayed-expired",
            "Answered before and expired since: still a replay.",
            "nonce-replayed",
            {"challenge_used": True, "now_us": late},
        ),
    ):
        yield case(f"gate-2-{name}", description, gate_input(world, honest, **changes), code=code, check="2")


def gate_token_cases(world: World) -> Iterator[Case]:
    """Check 3."""

    def refused(name: str, description: str, token: str, code: str) -> Case:
        message = world.message(world.claims(token=token))
        return case(f"gate-3-{name}", description, gate_input(world, message), code=code, check="3")

    second = NOW_US // SECOND_US
    wrong_audience = {**jwt.parse(world.token()).claims, "aud": "another"}
    yield refused(
        "token-signature-invalid",
        "A token that an attacker signed.",
        issue_token(signing_key("attacker"), world.token_claims()),
        "token-signature-invalid",
    )
    yield refused("token-garbage", "Not a token.", "a.b.c", "token-signature-invalid")
    yield refused("swap-ear", "An attestation result as launch token.", sample_ear(world), "token-type-mismatch")
    yield refused("token-expired", "The second in which it expires.", world.token(expires_s=second), "token-expired")
    early = world.token(issued_s=second + CLOCK_STEP_S + 1)
    yield refused("token-early", "More than a minute before it was issued.", early, "token-expired")
    stepped = world.message(world.claims(token=world.token(issued_s=second + CLOCK_STEP_S)))
    signed = EvidenceEnvelope.open(stepped).read()
    yield case(
        "gate-valid-clock-back",
        "The broker's clock stepped back by a minute since it issued the token.",
        gate_input(world, stepped),
        composite=signed.evidence.composite.hex(),
        evidence_sha256=signed.sha256.hex(),
    )
    yield refused(
        "token-key-mismatch",
        "A token for another launch key.",
        world.token(launch_public=signing_key("thief").public),
        "token-key-mismatch",
    )
    yield refused(
        "token-audience",
        "A token for somebody else.",
        jwt.issue(world.broker, typ=TOKEN_TYPE, claims=wrong_audience),
        "token-claim-mismatch",
    )
    for name, changes in (
        ("jti", {"jti": identifier("other")}),
        ("deployment", {"deployment": identifier("other")}),
        ("run", {"run_id": identifier("other")}),
        ("package", {"package_id": identifier("other")}),
        ("manifest", {"manifest_sha256": digest("other")}),
        ("floor", {"floor_sha256": digest("other")}),
        ("policy", {"policy_sha256": digest("other")}),
        ("container", {"container_id": identifier("other")}),
        ("source", {"container_source": ContainerSource.PLATFORM}),
    ):
        token = world.token(**changes)
        yield refused(f"claim-{name}", f"A genuine token with another {name}.", token, "token-claim-mismatch")
    expired = World()
    expired.policy = replace(expired.policy, not_after_us=NOW_US)
    yield case(
        "gate-3-deployment-expired",
        "The policy's last moment has come.",
        gate_input(expired, expired.message()),
        code="deployment-expired",
        check="3",
    )
    revoked = World()
    revoked.record = replace(revoked.record, revoked=True)
    yield case(
        "gate-3-package-revoked",
        "The owner revoked the package.",
        gate_input(revoked, revoked.message()),
        code="package-revoked",
        check="3",
    )
    yield from gate_delegation_cases()


def gate_delegation_cases() -> Iterator[Case]:
    """Check 3, on what the owner lets this broker do at the moment of the decision."""
    for name, description, changes in (
        ("narrowed", "The owner took the use back.", {"uses": frozenset({Use.COUNTERSIGN})}),
        ("over", "The moment in which the delegation ends.", {"not_after_us": NOW_US}),
        ("early", "The delegation has not begun.", {"not_before_us": NOW_US + 1}),
        ("other-broker", "To another broker.", {"broker_public": signing_key("other").public}),
        ("none", "The owner never delegated anything.", None),
    ):
        world = World()
        if changes is None:
            world.record = replace(world.record, delegation=None)
        else:
            world.delegate(**changes)
        yield case(
            f"gate-3-delegation-{name}",
            description,
            gate_input(world, world.message()),
            code="delegation-invalid",
            check="3",
        )


def patched(part: str) -> Measured:
    """Return a measurement of which one part is another, which is recorded for none."""
    return replace(measured("runtime"), **{part: digest("patched")})


def gate_claim_cases(world: World) -> Iterator[Case]:
    """Checks 5 to 10, each re-signed by both keys: only the named check refuses."""
    skew = world.policy.clock_skew_us
    for number, name, code, description, changes in (
        (
            "5",
            "old",
            "evidence-stale",
            "Made too long before the challenge.",
            {"issued_us": NOW_US - skew - 2 * SECOND_US},
        ),
        ("5", "future", "evidence-stale", "Made in the future.", {"issued_us": NOW_US + skew + 1}),
        ("6", "hash", "manifest-mismatch", "Another manifest.", {"manifest_sha256": digest("other")}),
        ("6", "package", "manifest-mismatch", "Another package id.", {"package_id": identifier("other")}),
        ("7", "id", "container-mismatch", "Another container.", {"container_id": identifier("other")}),
        ("7", "source", "container-mismatch", "Another source.", {"container_source": ContainerSource.PLATFORM}),
        ("7", "run", "container-mismatch", "Another run.", {"run_id": identifier("other")}),
        ("7", "deployment", "container-mismatch", "Another deployment.", {"deployment": identifier("other")}),
        ("8", "patched", "measurement-unknown", "A runtime nobody recorded.", {"measurement": measured("patched")}),
        ("8", "without-parts", "measurement-unknown", "Evidence of profile 1.", {"measurement": digest("runtime")}),
        *(
            ("8", f"patched-{part}", "measurement-unknown", f"Another {part}.", {"measurement": patched(part)})
            for part in PARTS
        ),
        ("10", "hardened", "state-mismatch", "Not yet measured.", {"state": State.HARDENED}),
        ("10", "attested", "state-mismatch", "Attested already.", {"state": State.ATTESTED}),
        ("10", "running", "state-mismatch", "Running already.", {"state": State.RUNNING}),
    ):
        message = world.message(world.claims(**changes))
        yield case(f"gate-{number}-{name}", description, gate_input(world, message), code=code, check=number)
    yield case(
        "gate-9-composite-mismatch",
        "The composite of other claims.",
        gate_input(world, world.message(composite_digest=composite(world.claims(issued_us=NOW_US - 1)))),
        code="composite-mismatch",
        check="9",
    )


def gate_level_cases(world: World) -> Iterator[Case]:
    """Checks 11 and 12."""
    strict = World()
    strict.policy = replace(strict.policy, profile=Profile.STRICT)
    tee = World()
    tee.policy = replace(tee.policy, assurance=Assurance.CPU_TEE)
    quote, snp = Blob.of("tpm", b"quote"), Blob.of("sev-snp", b"report")
    hardening = [
        ("11a", "anti-debug-disabled", world, report(anti_debug=False, worker=answers("worker", watched=FAILED))),
        ("11b", "anti-debug-downgraded", world, report(profile=Profile.OFF)),
        ("11b", "anti-debug-downgraded-strict", strict, report()),
        ("11c", "anti-debug-inconsistent", world, report(worker=answers("worker", not_traced=FAILED))),
        ("11c", "anti-debug-inconsistent-egress", world, report(worker=answers("worker", egress_closed=FAILED))),
        ("11c", "anti-debug-inconsistent-workspace", world, report(workspace=WorkspaceKind.DIRECTORY)),
        ("11c", "anti-debug-inconsistent-memory", world, report(secret_memory=SecretMemoryKind.LOCKED)),
    ]
    for number, name, gate, shown in hardening:
        code = "-".join(name.split("-")[:3])
        message = gate.message(gate.claims(hardening=shown))
        yield case(f"gate-{number}-{name}", "The hardening report.", gate_input(gate, message), code=code, check=number)
    levels = [
        ("assurance-too-low", "Software where a TEE is wanted.", tee, {}, ()),
        ("hardware-missing", "A TEE claimed with nothing behind it.", tee, {"assurance": Assurance.GPU_TEE}, ()),
        ("hardware-missing-gpus", "GPUs claimed, without theirs.", tee, {"assurance": Assurance.GPU_TEE}, (snp,)),
        ("hardware-missing-kind", "A CPU claimed, and a TPM's.", tee, {"assurance": Assurance.CPU_TEE}, (quote,)),
        ("hardware-unexpected", "Hardware evidence beside a claim of software.", world, {}, (quote,)),
        ("hardware-unexpected-twice", "One kind twice.", world, {"assurance": Assurance.TPM}, (quote, quote)),
        ("hardware-unexpected-two", "Two processors.", tee, {"assurance": Assurance.CPU_TEE}, (snp, quote)),
    ]
    for name, description, gate, changes, hardware in levels:
        message = gate.message(gate.claims(**changes), hardware=hardware)
        code = name if name == "assurance-too-low" else "-".join(name.split("-")[:2])
        yield case(f"gate-12-{name}", description, gate_input(gate, message), code=code, check="12")
