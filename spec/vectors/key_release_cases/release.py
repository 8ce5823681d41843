"""Cases of the release, as the runtime checks and opens it: section 8 of the specification."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from glasshouse.attestation.ear import RUNTIME, Ear, Submodule
from glasshouse.attestation.evidence import EvidenceEnvelope
from glasshouse.attestation.roots.appraised import SOFTWARE_VECTOR
from glasshouse.errors import FormatError
from glasshouse.handshake.messages import ReleaseMessage, release_info
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.crypto import SigningKey, hpke_seal
from glasshouse.wire.policy import Assurance, Floor, Profile
from key_release_cases.common import Case, case, sample
from simulators.key_release_world import (
    NOW_US,
    SECOND_US,
    World,
    digest,
    hpke_key,
    identifier,
    signing_key,
)


def release_cases(previous: Mapping[str, Any]) -> Iterator[Case]:
    world = World()
    ear, evidence = sample(world), world.message()
    honest = sealed(world, ear.issue(world.broker), previous.get("release-valid.json"))

    def given(release: ReleaseMessage | Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        text = release.encode() if isinstance(release, ReleaseMessage) else encode(dict(release))
        return {
            "challenge": world.challenge.encode().decode(),
            "evidence": evidence.decode(),
            "evidence_public": b64encode(world.evidence_key.public),
            "floor": world.floor.to_json(),
            "hpke_private": b64encode(world.hpke.private()),
            "launch": world.launch_file().encode().decode(),
            "manifest_sha256": world.record.manifest_sha256.hex(),
            "now_us": NOW_US,
            "release": text.decode(),
            **changes,
        }

    def with_ear(changed: Ear, broker: SigningKey = world.broker) -> ReleaseMessage:
        return replace(honest, ear=changed.issue(broker))

    def refused(name: str, description: str, release: Any, code: str = "release-invalid", **changes: Any) -> Case:
        return case(f"release-{name}", description, given(release, **changes), code=code)

    package_key = b64encode(world.package_key)
    yield case("release-valid", "Opens to the package key.", given(honest), package_key=package_key)
    value: dict[str, Any] = json.loads(honest.encode())
    yield refused("schema", "A recipient smuggled in.", {**value, "recipients": []})
    yield refused("suite", "Another HPKE suite.", {**value, "suite": "HPKE-0x0020-0x0001-0x0001"})
    yield refused("short", "A sealed key that is too short.", {**value, "sealed_key": value["sealed_key"][:-4]})
    yield refused("swap-token", "The launch token as result.", replace(honest, ear=world.token()))
    attacker = with_ear(ear, signing_key("attacker"))
    yield refused("broker-untrusted", "A result that another broker signed.", attacker, "broker-untrusted")
    for name, changes in (
        ("nonce", {"nonce": digest("other")}),
        ("evidence", {"evidence_sha256": digest("other")}),
        ("manifest", {"manifest_sha256": digest("other")}),
        ("deployment", {"deployment": identifier("other")}),
        ("run", {"run_id": identifier("other")}),
        ("floor", {"floor_sha256": digest("other")}),
        ("policy", {"policy_sha256": digest("other")}),
        ("audience", {"evidence_public": signing_key("other").public}),
        ("expired", {"issued_s": 1, "expires_s": 2}),
        ("below-floor", {"profile": Profile.OFF}),
    ):
        if "policy_sha256" in changes:  # which each submodule names
            changes["submodules"] = Submodule.all_of({RUNTIME: SOFTWARE_VECTOR}, changes["policy_sha256"])
        changed = with_ear(replace(ear, **changes))
        yield refused(f"ear-{name}", f"A genuine result, of another {name}.", changed)
    other = {"manifest_sha256": digest("other").hex()}
    yield refused("package", "For another package than the one in hand.", honest, **other)
    tee = Floor(assurance=Assurance.CPU_TEE, profile=Profile.STANDARD).to_json()
    yield refused("floor", "Under another floor than the package's.", honest, floor=tee)
    code = "signature-invalid"
    private = b64encode(hpke_key("recorder").private())
    yield refused("recorder", "Opened with a recorder's own key.", honest, code, hpke_private=private)
    later = replace(world.challenge, issued_us=NOW_US - 2 * SECOND_US).encode().decode()
    yield refused("challenge-changed", "The challenge was changed on the way.", honest, code, challenge=later)
    flipped = bytearray(honest.sealed_key)
    flipped[-1] ^= 1
    yield refused("bit-flip", "A flipped bit in the sealed key.", replace(honest, sealed_key=bytes(flipped)), code)


def sealed(world: World, ear: str, previous: Mapping[str, Any] | None) -> ReleaseMessage:
    """Return the release, with the ciphertext of the committed vector if it still opens."""
    info = release_info(
        challenge=world.challenge.encode(),
        evidence_sha256=EvidenceEnvelope.open(world.message()).read().sha256,
        ear=ear,
        floor_sha256=world.floor.sha256,
        policy_sha256=world.policy.sha256,
    )
    if previous is not None:
        kept = ReleaseMessage.parse(str(previous["input"]["release"]).encode()).sealed_key
        try:
            if world.hpke.open(kept, info=info) == world.package_key:
                return ReleaseMessage(ear=ear, sealed_key=kept)
        except FormatError:
            pass  # sealed under another context: seal it again
    fresh = hpke_seal(world.package_key, recipient=world.hpke.public, info=info)
    return ReleaseMessage(ear=ear, sealed_key=fresh)
