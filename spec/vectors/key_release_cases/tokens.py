"""Cases of launch token and attestation result, as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from glasshouse.attestation.ear import Ear, Submodule
from glasshouse.attestation.roots.appraised import CHAINED_VECTOR
from glasshouse.handshake.launch import issue_token
from glasshouse.wire import jwt
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.policy import Assurance
from key_release_cases.common import Case, case, sample, sample_ear
from simulators.key_release_world import (
    NOW_US,
    SECOND_US,
    World,
    digest,
    signing_key,
)


def forged_token(key: SigningKey, header: bytes, claims: bytes) -> str:
    head = f"{b64encode(header)}.{b64encode(claims)}"
    return f"{head}.{b64encode(key.sign(head.encode()))}"


def jose_forgeries(token: str, key: SigningKey) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, description, token, code): what a JOSE library might take, and we must not."""
    head, claims, signature = token.split(".")
    header: dict[str, Any] = json.loads(jwt.b64decode(head))
    body: dict[str, Any] = json.loads(jwt.b64decode(claims))
    raw = encode(body)
    for name, extra in (
        ("jku", {"jku": "https://evil.example/keys"}),
        ("jwk", {"jwk": {"crv": "Ed25519", "kty": "OKP", "x": b64encode(key.public)}}),
        ("x5c", {"x5c": ["AAAA"]}),
        ("crit", {"crit": ["exp"]}),
    ):
        forged = forged_token(key, encode({**header, **extra}), raw)
        yield name, f"A header with {name}.", forged, "schema-invalid"
    yield "alg-none", "No algorithm.", forged_token(key, encode({**header, "alg": "none"}), raw), "schema-invalid"
    yield (
        "alg-hs256",
        "A symmetric algorithm.",
        forged_token(key, encode({**header, "alg": "HS256"}), raw),
        "schema-invalid",
    )
    untyped = {name: value for name, value in header.items() if name != "typ"}
    yield "no-typ", "No type.", forged_token(key, encode(untyped), raw), "schema-invalid"
    yield "typ-jwt", "A type that says nothing.", forged_token(key, encode({**header, "typ": "JWT"}), raw), "wrong-type"
    spaced = raw.replace(b'","', b'", "', 1)
    yield "not-canonical", "Claims with a space.", forged_token(key, encode(header), spaced), "not-canonical"
    repeated = b'{"aud":"' + str(body["aud"]).encode() + b'",' + raw[1:]
    yield "repeated-claim", "A claim twice.", forged_token(key, encode(header), repeated), "schema-invalid"
    yield "padded", "Base64 with padding.", f"{head}.{claims}.{signature}==", "schema-invalid"
    yield "unsigned", "No signature.", f"{head}.{claims}.", "schema-invalid"
    yield "four-parts", "One part too many.", f"{token}.AAAA", "schema-invalid"
    flipped = b64encode(bytes([jwt.b64decode(signature)[0] ^ 1]) + jwt.b64decode(signature)[1:])
    yield "bit-flip", "A flipped bit in the signature.", f"{head}.{claims}.{flipped}", "signature-invalid"
    for name in ("aud", "exp", "iat"):
        fewer = {claim: value for claim, value in body.items() if claim != name}
        code = "token-claim-mismatch" if name == "aud" else "schema-invalid"
        yield f"no-{name}", f"No {name}.", forged_token(key, encode(header), encode(fewer)), code
    more = encode({**body, "recipients": []})
    yield "unknown-claim", "A claim nobody knows.", forged_token(key, encode(header), more), "schema-invalid"


def token_cases() -> Iterator[Case]:
    world = World()
    honest = world.token()

    def given(token: str, now_us: int = NOW_US) -> dict[str, Any]:
        return {"broker_public": b64encode(world.broker.public), "now_us": now_us, "token": token}

    yield case("token-valid", "Issued by the broker.", given(honest), jti=world.launch.jti)
    yield case("token-swap-ear", "An attestation result.", given(sample_ear(world)), code="wrong-type")
    attacker = issue_token(signing_key("attacker"), world.token_claims())
    yield case("token-other-broker", "Signed by another key.", given(attacker), code="signature-invalid")
    end = world.token_claims().expires_s * SECOND_US
    yield case("token-expired", "In the second of its expiry.", given(honest, end), code="token-expired")
    for name, description, token, code in jose_forgeries(honest, world.broker):
        yield case(f"token-{name}", description, given(token), code=code)


def boastful_ears(world: World) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, description, claims): results that say more than software can show."""
    claims: dict[str, Any] = json.loads(encode(dict(jwt.parse(sample_ear(world)).claims)))

    def runtime(status: str, vector: Mapping[str, int], outer: str | None = None) -> dict[str, Any]:
        submodule = {**claims["submods"]["runtime"], "ear_status": status, "ear_trustworthiness_vector": dict(vector)}
        return {**claims, "ear_status": outer or status, "submods": {"runtime": submodule}}

    weak = {"configuration": 32, "executables": 32}
    yield "affirming", "Software that affirms.", runtime("affirming", {"configuration": 2, "executables": 2})
    yield "affirming-outside", "A status better than its vector.", runtime("warning", weak, outer="affirming")
    yield "hardware", "A hardware claim.", runtime("warning", {**weak, "hardware": 2})
    yield "identity", "An instance-identity claim.", runtime("warning", {**weak, "instance-identity": 2})
    yield "silent", "An empty vector.", runtime("warning", {})
    other = {**claims["submods"]["runtime"], "ear_appraisal_policy_ids": ["urn:example:policy"]}
    yield "policy-id", "Another policy than applied.", {**claims, "submods": {"runtime": other}}
    yield "two-submods", "A second attester.", {**claims, "submods": {**claims["submods"], "gpu": other}}
    tpm = {**claims["submods"]["runtime"], "ear_trustworthiness_vector": {"hardware": 32}}
    yield "kind-at-software", "A TPM beside software.", {**claims, "submods": {**claims["submods"], "tpm": tpm}}


def hardware_ears(world: World) -> Iterator[tuple[str, str, Ear, dict[str, Any], str | None]]:
    """Yield (name, description, result, changed claims, code): results of hardware, and those that say more."""
    genuine = {"hardware": 2, "instance-identity": 2}

    def of(level: Assurance, **kinds: Mapping[str, int]) -> Ear:
        vectors = {"runtime": CHAINED_VECTOR} | {kind.replace("_", "-"): vector for kind, vector in kinds.items()}
        submodules = Submodule.all_of(vectors, world.policy.sha256)
        return replace(sample(world), assurance=level, submodules=submodules, collateral_sha256=digest("pack"))

    tpm = replace(of(Assurance.TPM, tpm=genuine), collateral_sha256=None, tpm_activated=True)
    gpus = of(Assurance.GPU_TEE, nvidia=genuine, sev_snp=genuine)
    worst = of(Assurance.GPU_TEE, nvidia={"hardware": 32}, sev_snp=genuine)
    yield "tpm", "A TPM that opened its credential.", tpm, {}, None
    yield "gpu-tee", "A processor and GPUs.", gpus, {}, None
    yield "gpu-tee-worst", "GPUs below what they should be: so is the whole.", worst, {}, None
    schema = "schema-invalid"
    yield "gpu-tee-boast", "Better than the worst kind.", worst, {"ear_status": "affirming"}, schema
    body = gpus.to_json()
    without = {name: one for name, one in dict(body["submods"]).items() if name != "nvidia"}  # type: ignore[arg-type]
    yield "gpu-tee-no-gpu", "Without its GPUs.", gpus, {"submods": without}, schema
    word = replace(of(Assurance.TPM, gcp={"hardware": 32}), collateral_sha256=None)
    yield "gcp", "Google's word.", word, {}, None
    affirmed = {"ear_status": "affirming", "ear_trustworthiness_vector": genuine}
    said: dict[str, Any] = json.loads(word.encode())["submods"]
    said["gcp"] |= affirmed
    yield "gcp-boast", "Google's word, affirmed.", word, {"ear_status": "affirming", "submods": said}, schema
    cpu = of(Assurance.CPU_TEE, tdx=genuine)
    raised = {**cpu.to_json()["glasshouse"], "assurance": "gpu-tee"}  # type: ignore[dict-item]
    yield "cpu-tee-as-gpu-tee", "A processor that claims GPUs.", cpu, {"glasshouse": raised}, schema
    activated = {**cpu.to_json()["glasshouse"], "tpm_activated": True}  # type: ignore[dict-item]
    yield "activated-without-tpm", "An activation of no TPM.", cpu, {"glasshouse": activated}, schema


def ear_cases() -> Iterator[Case]:
    world = World()
    honest = sample_ear(world)

    def given(ear: str, now_us: int = NOW_US) -> dict[str, Any]:
        evidence, broker = b64encode(world.evidence_key.public), b64encode(world.broker.public)
        return {"broker_public": broker, "ear": ear, "evidence_public": evidence, "now_us": now_us}

    yield case("ear-valid", "Issued by the broker.", given(honest), assurance="software", status="warning")
    yield case("ear-swap-token", "A launch token.", given(world.token()), code="wrong-type")
    other = replace(sample(world), evidence_public=signing_key("other").public).issue(world.broker)
    yield case("ear-other-audience", "For another evidence key.", given(other), code="token-claim-mismatch")
    claims = dict(jwt.parse(other).claims) | {"aud": world.evidence_key.key_id}
    split = jwt.issue(world.broker, typ="ear+jwt", claims=claims)
    yield case("ear-other-cnf", "Audience and cnf disagree.", given(split), code="token-claim-mismatch")
    attacker = sample(world).issue(signing_key("attacker"))
    yield case("ear-other-broker", "Signed by another key.", given(attacker), code="signature-invalid")
    end = sample(world).expires_s * SECOND_US
    yield case("ear-expired", "In the second of its expiry.", given(honest, end), code="token-expired")
    begin = sample(world).issued_s
    short = replace(sample(world), expires_s=begin + 1).issue(world.broker)
    told = "Another length than the sum of its policy's times: that is the broker's to keep."
    yield case("ear-short", told, given(short, begin * SECOND_US), assurance="software", status="warning")
    never = replace(sample(world), expires_s=begin).issue(world.broker)
    yield case("ear-never-valid", "exp is iat.", given(never, begin * SECOND_US), code="token-expired")
    for name, description, boast in boastful_ears(world):
        token = jwt.issue(world.broker, typ="ear+jwt", claims=boast)
        yield case(f"ear-{name}", description, given(token), code="schema-invalid")
    for name, description, ear, changes, fault in hardware_ears(world):
        body = dict(jwt.parse(ear.issue(world.broker)).claims) | changes
        found = {"assurance": ear.assurance.value, "status": ear.status.value} if fault is None else {}
        boasting = given(jwt.issue(world.broker, typ="ear+jwt", claims=body))
        yield case(f"ear-{name}", description, boasting, code=fault, **found)
    for name, description, token, code in jose_forgeries(honest, world.broker):
        yield case(f"ear-{name}", description, given(token), code=code)
