"""The public artifact through its real path: planted secrets go in at every door, and none comes out."""

from __future__ import annotations

import base64
import getpass
import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode, FormatError, GlasshouseError, UsageError, VerificationError
from glasshouse.evidence.artifact import ARTIFACT_TYPE, Artifact
from glasshouse.evidence.receipt import LIFECYCLE, PROBES, Loss, Receipt
from glasshouse.jobs.verify.documents import verify_file
from glasshouse.jobs.verify.publish import ArtifactVerdict, compare, host_canaries, make_artifact, verify_artifact
from glasshouse.jobs.verify.verdict import Status, verify_bundle
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import sha256
from glasshouse.wire.states import Outcome, State
from simulators.world import START_US, Run, World, envelope

CANARY = "erika-mustermann-1964"


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture(scope="module")
def run(world: World) -> Run:
    return world.run()


@pytest.fixture(scope="module")
def artifact(world: World, run: Run) -> bytes:
    return make_artifact(
        run.data, owner=world.owner, canaries=[world.package_key], numbers={"accuracy": "0.956", "auc": "1"}
    )


def make(world: World, bundle: bytes, **options: Any) -> bytes:
    return make_artifact(bundle, **{"owner": world.owner, "canaries": [world.package_key], **options})


def refusal(data: bytes, owner: bytes) -> Code:
    with pytest.raises(GlasshouseError) as caught:
        verify_artifact(data, owner=owner)
    return caught.value.code


def test_it_verifies_offline_with_the_owners_key_alone(world: World, run: Run, artifact: bytes) -> None:
    verdict = verify_artifact(artifact, owner=world.owner.public)
    assert verdict.exit_code is ExitCode.DONE
    assert "assurance software" in verdict.sentence
    assert verdict.artifact.bundle_sha256 == sha256(run.data)
    assert verdict.artifact.numbers == {"accuracy": "0.956", "auc": "1"}
    assert verdict.to_json()["assurance"] == "software"


def test_no_plaintext_digest_stands_in_it_unasked(world: World, run: Run, artifact: bytes) -> None:
    weights, file = verify_artifact(artifact, owner=world.owner.public).artifact.outputs
    assert (weights.plain_hmac, weights.revealed) == (run.receipt.outputs[0].plain_hmac, None)
    assert (file.plain_hmac, file.revealed) == (None, None)
    for secret in (world.digest("adapter"), world.digest("salt")):
        assert secret.hex().encode() not in envelope(artifact).payload


def test_weights_whose_digest_is_revealed_are_its_subject(world: World, run: Run) -> None:
    """A file on a hub is compared by its SHA-256; the receipt had committed to it."""
    shown = world.digest("salt"), world.digest("adapter")
    data = make(world, run.data, revealed={0: shown})
    verdict = verify_artifact(data, owner=world.owner.public)
    assert verdict.artifact.outputs[0].revealed == shown
    assert json.loads(envelope(data).payload)["subject"] == [
        {"digest": {"sha256": world.digest("adapter").hex()}, "name": "weights/0000"}
    ]


def test_a_digest_that_the_receipt_does_not_commit_to_is_not_published(world: World, run: Run) -> None:
    salt, digest = world.digest("salt"), world.digest("adapter")
    for revealed in ({0: (salt, world.digest("another adapter"))}, {0: (bytes(32), digest)}, {1: (salt, digest)}):
        with pytest.raises(FormatError):
            make(world, run.data, revealed=revealed)


def test_an_owner_cannot_reveal_other_weights_than_the_run_made(world: World, run: Run) -> None:
    """The owner signs anything; the commitment that the digest must fit is in the same document."""
    payload = json.loads(envelope(make(world, run.data)).payload)
    other = {"plaintext_salt": "00" * 32, "plaintext_sha256": "11" * 32}
    payload["predicate"]["outputs"][0] |= other
    payload["subject"] = [{"digest": {"sha256": "11" * 32}, "name": "weights/0000"}]
    forged = dsse.sign(ARTIFACT_TYPE, encode(payload), [world.owner])
    assert refusal(forged.encode(), world.owner.public) is Code.ARTIFACT_INVALID


def test_every_alteration_is_refused(world: World, artifact: bytes) -> None:
    for at in range(len(artifact)):
        damaged = bytearray(artifact)
        damaged[at] ^= 1
        assert refusal(bytes(damaged), world.owner.public) in (Code.ARTIFACT_INVALID, Code.OWNER_UNKNOWN)
    for end in range(0, len(artifact), 50):
        assert refusal(artifact[:end], world.owner.public) is Code.ARTIFACT_INVALID


def test_another_owners_artifact_is_not_this_owners(world: World) -> None:
    rival = World("rival")
    other = make(rival, rival.run().data)
    assert refusal(other, world.owner.public) is Code.OWNER_UNKNOWN
    posing = dsse.sign(ARTIFACT_TYPE, envelope(other).payload, [rival.owner])
    posing = replace(posing, signatures=((world.owner.key_id, posing.signatures[0][1]),))
    assert refusal(posing.encode(), world.owner.public) is Code.ARTIFACT_INVALID


def test_what_the_owner_signed_as_something_else_is_no_artifact(world: World, run: Run) -> None:
    assert run.bundle.manifest
    assert refusal(run.bundle.manifest.encode(), world.owner.public) is Code.ARTIFACT_INVALID
    assert refusal(run.bundle.delegation.encode(), world.owner.public) is Code.ARTIFACT_INVALID


def test_it_is_made_of_a_good_bundle_and_of_no_other(world: World) -> None:
    away = World().run(broker_away=True).data
    failed = World().run(outcome=Outcome.FAILED, code=Code.WORKER_FAILED, reach=State.RUNNING).data
    residue = World().run(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND).data
    for bundle in (away, failed, residue):
        with pytest.raises(VerificationError) as caught:
            make(world, bundle)
        assert caught.value.code is Code.ARTIFACT_INVALID
    with pytest.raises(VerificationError) as caught:
        make(world, World("rival").run().data)
    assert caught.value.code is Code.OWNER_UNKNOWN


def resigned(world: World, artifact: bytes, **changes: Any) -> bytes:
    """What an owner signs who says of their run whatever they like."""
    statement = json.loads(envelope(artifact).payload)
    statement["predicate"] |= changes
    return dsse.sign(ARTIFACT_TYPE, encode(statement), [world.owner]).encode()


def test_a_higher_level_is_the_owners_word_and_no_bundle_bears_it_out(world: World, run: Run, artifact: bytes) -> None:
    """An artifact re-signed as of confidential hardware."""
    lie = resigned(world, artifact, assurance="gpu-tee")
    assert "(assurance gpu-tee, by the owner's word)" in verify_artifact(lie, owner=world.owner.public).sentence
    with pytest.raises(VerificationError) as caught:
        compare(verify_artifact(lie, owner=world.owner.public).artifact, run.data, owner=world.owner.public)
    assert caught.value.code is Code.ARTIFACT_INVALID


def test_an_artifact_of_the_future_is_refused_and_one_of_the_past_is_dated(world: World, artifact: bytes) -> None:
    verdict = verify_artifact(artifact, owner=world.owner.public, now_us=START_US)
    assert "2026-09-21" in verdict.sentence
    with pytest.raises(VerificationError, match="in the future"):
        verify_artifact(artifact, owner=world.owner.public, now_us=START_US - 3600 * 1_000_000)


def test_an_artifact_alone_is_said_to_be_its_owners_word(world: World, artifact: bytes) -> None:
    verdict = verify_artifact(artifact, owner=world.owner.public)
    assert "nothing else stands behind it here" in verdict.sentence
    assert "by the owner's word" in verdict.sentence
    assert "swap" in verdict.doubts[0]


def test_an_artifact_of_more_work_than_there_was_time_for_says_so_without_its_bundle(
    world: World, artifact: bytes
) -> None:
    told = Artifact.parse_signed(artifact, world.owner.public)
    grand = replace(told, elapsed_us=10**13, done=10**9).sign(world.owner).encode()
    assert "longer than the run lasted" in verify_artifact(grand, owner=world.owner.public).sentence
    assert "longer" not in verify_artifact(artifact, owner=world.owner.public).sentence


OTHERWISE: dict[str, Any] = {
    "bundle_sha256": "00" * 32,
    "countersigned_us": START_US + 3_000_000,
    "egress_peers": 3,
    "environment_sha256": "00" * 32,
    "finished_us": START_US + 1_000_000,
    "floor_sha256": "00" * 32,
    "gpus": 8,
    "lifecycle_us": dict.fromkeys(LIFECYCLE, 1),
    "log": {"root": "00" * 32, "size": 10**6},
    "loss": {"final": "0.000001", "first": "0.8"},
    "manifest_sha256": "00" * 32,
    "measurement": "00" * 32,
    "outputs": [],
    "policy_sha256": "00" * 32,
    "profile": "strict",
    "secret_memory": "locked-memory",
    "segments": 7,
    "started_us": START_US - 1,
    "suite": "ChaCha20-Poly1305",
    "trainable": None,
    "training_imports_us": 0,
    "work": {"done": 10**6, "elapsed_us": 5000, "stop_reason": "steps", "unit": "step"},
    "workload": "mlp",
    "workspace": "tmpfs",
    "zeroization": [{"probe": name, "result": "clean"} for name in PROBES[:-1]],
}


def test_every_field_of_an_artifact_is_held_to_its_bundle(world: World, run: Run, artifact: bytes) -> None:
    """What its owner signs besides is found in the bundle, or refused by the name of the field."""
    fields = set(json.loads(envelope(artifact).payload)["predicate"])
    assert fields - set(OTHERWISE) == {
        "assurance",
        "numbers",
        "outcome",
    }  # refused unseen, the owner's, and of one value
    honest = verify_artifact(artifact, owner=world.owner.public).artifact
    assert compare(honest, run.data, owner=world.owner.public).status is Status.GOOD
    for name, value in OTHERWISE.items():
        changes = {name: value}
        statement = json.loads(envelope(artifact).payload)
        if name == "outputs":
            statement["subject"] = [{"digest": {"sha256": honest.manifest_sha256.hex()}, "name": "manifest"}]
        statement["predicate"] |= changes
        forged = dsse.sign(ARTIFACT_TYPE, encode(statement), [world.owner]).encode()
        told = verify_artifact(forged, owner=world.owner.public).artifact
        with pytest.raises(VerificationError, match="differs from what the bundle shows") as caught:
            compare(told, run.data, owner=world.owner.public)
        assert caught.value.code is Code.ARTIFACT_INVALID


def test_an_artifact_that_fits_its_bundle_says_what_is_not_in_it(world: World, run: Run, artifact: bytes) -> None:
    verdict = verify_artifact(artifact, owner=world.owner.public)
    with_bundle = replace(verdict, bundle=compare(verdict.artifact, run.data, owner=world.owner.public))
    assert "every field is what the bundle" in with_bundle.sentence
    assert "In no bundle, the owner's word alone: accuracy, auc." in with_bundle.sentence
    assert "an owner can sign a run that never happened" in with_bundle.sentence
    shown = world.digest("salt"), world.digest("adapter")
    revealed = verify_artifact(make(world, run.data, revealed={0: shown}), owner=world.owner.public).artifact
    assert compare(revealed, run.data, owner=world.owner.public).status is Status.GOOD


def test_an_artifact_is_not_of_another_run_of_the_same_owner(world: World, artifact: bytes) -> None:
    other = World().run(change=lambda receipt: replace(receipt, trainable=1)).data
    with pytest.raises(VerificationError, match="bundle_sha256, trainable"):
        compare(verify_artifact(artifact, owner=world.owner.public).artifact, other, owner=world.owner.public)


def test_a_file_is_recognised_as_an_artifact(world: World, artifact: bytes, tmp_path: Path) -> None:
    path = tmp_path / "public.json"
    path.write_bytes(artifact)
    assert isinstance(verify_file(path, owner=world.owner.public), ArtifactVerdict)


# ---- canaries


def spellings(secret: str) -> list[str]:
    raw = secret.encode()
    return [
        secret,
        raw.hex(),
        raw.hex().upper(),
        base64.b64encode(raw).decode(),
        base64.b64encode(b"-" + raw).decode(),
        base64.b64encode(b"--" + raw).decode(),
        base64.urlsafe_b64encode(raw).decode(),
        secret.encode("utf-16-le").hex(),
        "".join(f"%{byte:02x}" for byte in raw),
        secret[::-1],
        "".join(f"\\u{byte:04x}" for byte in raw),
    ]


def test_canaries_planted_in_everything_that_the_runtime_writes_do_not_come_out(world: World) -> None:
    def plant(receipt: Receipt) -> Receipt:
        return replace(
            receipt,
            zeroization=tuple(replace(probe, detail=f"/home/{CANARY}/data.csv") for probe in receipt.zeroization),
        )

    bundle = World().run(change=plant).data
    assert CANARY.encode() in envelope_payloads(bundle)
    data = make(world, bundle, canaries=[CANARY, world.package_key])
    everything = data + envelope(data).payload
    for form in spellings(CANARY):
        assert form.lower().encode() not in everything.lower()
    verify_artifact(data, owner=world.owner.public)


def envelope_payloads(bundle: bytes) -> bytes:
    whole: Any = decode(bundle, max_bytes=1 << 20)
    return b"".join(
        base64.b64decode(part["payload"]) for part in whole.values() if isinstance(part, dict) and "payload" in part
    )


def test_a_live_key_in_the_place_of_a_digest_stops_it(world: World) -> None:
    """A runtime that smuggles a key out as the 'digest' of its output."""

    def smuggle(receipt: Receipt) -> Receipt:
        weights = replace(receipt.outputs[0], plain_hmac=world.package_key)
        return replace(receipt, outputs=(weights, *receipt.outputs[1:]))

    bundle = World().run(change=smuggle).data
    with pytest.raises(VerificationError) as caught:
        make(world, bundle)
    assert caught.value.code is Code.ARTIFACT_CANARY
    assert world.package_key.hex() not in str(caught.value)


def test_a_name_spelled_in_a_digest_stops_it(world: World) -> None:
    def smuggle(receipt: Receipt) -> Receipt:
        weights = replace(receipt.outputs[0], plain_hmac=b"..." + CANARY.encode() + b"........")
        return replace(receipt, outputs=(weights, *receipt.outputs[1:]))

    assert len(CANARY) == 21
    with pytest.raises(VerificationError) as caught:
        make(world, World().run(change=smuggle).data, canaries=[CANARY])
    assert caught.value.code is Code.ARTIFACT_CANARY


def test_the_runs_own_ids_and_this_host_are_looked_for_unasked(world: World, run: Run) -> None:
    container = b"container-7"

    def smuggle(receipt: Receipt) -> Receipt:
        weights = replace(receipt.outputs[0], plain_hmac=container.ljust(32, b"."))
        return replace(receipt, outputs=(weights, *receipt.outputs[1:]))

    with pytest.raises(VerificationError) as caught:
        make(world, World().run(change=smuggle).data)
    assert caught.value.code is Code.ARTIFACT_CANARY
    found = host_canaries()
    assert {socket.gethostname(), getpass.getuser(), str(Path.cwd())} <= set(found)


def test_digits_of_a_secret_among_the_numbers_stop_it(world: World, run: Run) -> None:
    with pytest.raises(VerificationError) as caught:
        make(world, run.data, canaries=["9138274650.12"], numbers={"accuracy": "9138274650.12"})
    assert caught.value.code is Code.ARTIFACT_CANARY


def test_making_it_without_anything_to_look_for_is_still_a_look(world: World, run: Run) -> None:
    """The host's own names are always looked for: an empty list switches nothing off."""
    assert make(world, run.data, canaries=[])
    with pytest.raises(VerificationError) as caught:
        make(world, run.data, canaries=[b""])
    assert caught.value.code is Code.ARTIFACT_CANARY


@pytest.mark.parametrize(
    "numbers", [{"patients": "569"}, {"accuracy": "95%"}, {"accuracy": "1e3"}, {"accuracy": "0.12345678"}], ids=str
)
def test_only_known_numbers_in_short_decimals(world: World, run: Run, numbers: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        make(world, run.data, numbers=numbers)


def test_losses_are_rounded_and_a_diverged_one_is_refused(world: World) -> None:
    bundle = World().run(change=lambda r: replace(r, loss=Loss(first="23.4568", final="1.5e-07"))).data
    made = verify_artifact(make(world, bundle), owner=world.owner.public).artifact
    assert made.loss == ("23.456800", "0.000000")
    bundle = World().run(change=lambda r: replace(r, loss=Loss(first="0.5", final="1e+30"))).data
    with pytest.raises(VerificationError) as caught:
        make(world, bundle)
    assert caught.value.code is Code.ARTIFACT_INVALID


def test_the_artifact_holds_what_the_receipt_says(world: World, run: Run, artifact: bytes) -> None:
    made = Artifact.from_json(json.loads(envelope(artifact).payload))
    receipt = verify_bundle(run.data, owner=world.owner.public).chain.receipt
    assert receipt.work
    assert (made.done, made.unit, made.elapsed_us) == (receipt.work.done, receipt.work.unit, receipt.work.elapsed_us)
    assert (made.log_root, made.log_size, made.trainable) == (receipt.log_root, receipt.log_size, receipt.trainable)
    assert [result for _, result in made.zeroization] == [probe.result for probe in receipt.zeroization]
    assert encode(made.to_json()) == envelope(artifact).payload
