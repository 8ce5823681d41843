"""A run's evidence in the hands of other tools: they accept what is genuine and refuse what was changed."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.dsse import Envelope as TheirEnvelope
from securesystemslib.exceptions import VerificationError as TheirRefusal
from securesystemslib.signer import SSlibKey

from glasshouse.cli import app as cli
from glasshouse.errors import Code, ExitCode, FormatError, GlasshouseError, UsageError
from glasshouse.evidence.bundle import Bundle
from glasshouse.handshake.delegation import Delegation
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.exported import certified_key, model_key, public_pem
from glasshouse.jobs.verify.publish import verify_artifact
from glasshouse.jobs.verify.verdict import verify_bundle
from glasshouse.wire.crypto import key_id
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.states import Outcome
from simulators.owner_side import OwnersWorld
from simulators.world import World


@dataclass
class Exported:
    """What an owner exported.

    Attributes:
        files: by name.
        model: the folder of the fetched outputs.
    """

    world: OwnersWorld
    folder: RunFolder
    out: Path
    model: Path

    def read(self, name: str) -> bytes:
        return (self.out / name).read_bytes()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    root = tmp_path_factory.mktemp("owner")
    world = OwnersWorld()
    folder = world.settle(root)
    world.tell(folder, world.run())
    home = ("--home", str(world.home.path))
    made = Exported(world=world, folder=folder, out=root / "evidence", model=root / "model")
    assert cli.run(["export", "latest", "-o", str(made.out), "--name", "clinic", *home]) == ExitCode.DONE
    assert cli.run(["fetch", "latest", "-o", str(made.model), *home]) == ExitCode.DONE
    return made


# ---- OpenSSF model signing, by its own command


def model_signing(exported: Exported, signature: Path | None = None, key: Path | None = None) -> str:
    """Return what the command says; an answer that is neither yes nor no fails the test."""
    words = ["--signature", str(signature or exported.out / "model.sig")]
    words += ["--public_key", str(key or exported.out / "model-signing.pem")]
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(exported.model), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert ("Verification succeeded" in said) == (done.returncode == 0)
    assert ("Verification failed" in said) == (done.returncode != 0)
    return said


def test_model_signing_verifies_the_fetched_outputs(exported: Exported) -> None:
    assert "Verification succeeded" in model_signing(exported)


@pytest.mark.parametrize(
    ("change", "says"),
    [("a weight", "Hash mismatch"), ("a file more", "Extra files"), ("a file less", "Missing files")],
)
def test_model_signing_refuses_other_files(exported: Exported, change: str, says: str) -> None:
    path, other = exported.model / "adapter.safetensors", exported.model / "poison.safetensors"
    data = path.read_bytes()
    match change:
        case "a weight":
            path.write_bytes(data[:-1] + b"!")
        case "a file more":
            other.write_bytes(b"poison")
        case "a file less":
            path.unlink()
    try:
        assert says in model_signing(exported)
    finally:
        path.write_bytes(data)
        other.unlink(missing_ok=True)


def test_model_signing_refuses_another_owners_key_and_a_changed_signature(exported: Exported, tmp_path: Path) -> None:
    other = OwnersWorld(name="stranger")
    other.settle(tmp_path)
    identity = Identity(signing=other.owner, sealing=other.owner_hpke)
    (tmp_path / "other.pem").write_bytes(model_key(other.home, identity, now_us=1).pem)
    assert "Key mismatch" in model_signing(exported, key=tmp_path / "other.pem")
    bundle: Any = json.loads(exported.read("model.sig"))
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b"clinic", b"klinik")
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    (tmp_path / "model.sig").write_text(json.dumps(bundle))
    assert "Verification failed" in model_signing(exported, signature=tmp_path / "model.sig")


def test_the_key_is_made_once_kept_sealed_and_certified_by_the_owner(exported: Exported) -> None:
    world = exported.world
    identity = Identity(signing=world.owner, sealing=world.owner_hpke)
    again = model_key(world.home, identity, now_us=2)
    assert again.pem == exported.read("model-signing.pem")
    certificate = Envelope.parse(exported.read("model-signing-key.json"), max_bytes=1 << 16)
    key = load_pem_public_key(again.pem)
    der = certified_key(certificate, owner=world.owner.public)
    assert base64.b64encode(der) in again.pem.replace(b"\n", b"")
    assert key == again.private.public_key()
    stored = world.home.model_signing.read_bytes()
    assert (world.home.model_signing.stat().st_mode & 0o777) == 0o600
    scalar = again.private.private_numbers().private_value.to_bytes(32)
    for form in (scalar, scalar.hex().encode(), base64.urlsafe_b64encode(scalar).rstrip(b"="), b"PRIVATE KEY"):
        assert form not in stored


def test_the_key_of_another_owner_is_not_taken_over(exported: Exported, tmp_path: Path) -> None:
    thief = OwnersWorld(name="thief")
    thief.settle(tmp_path)
    thief.home.model_signing.write_bytes(exported.world.home.model_signing.read_bytes())
    thief.home.model_signing.chmod(0o600)
    with pytest.raises(UsageError) as refused:
        model_key(thief.home, Identity(signing=thief.owner, sealing=thief.owner_hpke), now_us=1)
    assert refused.value.code is Code.IDENTITY


def test_our_own_verifiers_accept_nothing_of_that_key(exported: Exported) -> None:
    owner = exported.world.owner.public
    signature, certificate = exported.read("model.sig"), exported.read("model-signing-key.json")
    envelope = json.dumps(json.loads(signature)["dsseEnvelope"], separators=(",", ":"), sort_keys=True).encode()
    for document in (signature, certificate, envelope):
        with pytest.raises(GlasshouseError):
            verify_bundle(document, owner=owner)
        with pytest.raises(GlasshouseError):
            verify_artifact(document, owner=owner)
        with pytest.raises(FormatError):
            Delegation.parse_signed(document, owner)
    parsed = Envelope.parse(certificate, max_bytes=1 << 16)
    for other in ("application/vnd.in-toto+json", "application/vnd.glasshouse.delegation+json"):
        with pytest.raises(FormatError):
            parsed.verify(other, owner)


def test_only_a_run_that_completed_is_signed_as_a_model(tmp_path: Path) -> None:
    world = OwnersWorld()
    world.tell(world.settle(tmp_path), world.run(outcome=Outcome.FAILED, code=Code.SCRIPT_FAILED))
    for what in ("--model-signing", "--bom"):
        words = ["export", "latest", "-o", str(tmp_path / "out"), what, "--home", str(world.home.path)]
        assert cli.run(words) == ExitCode.USAGE
    assert not world.home.model_signing.exists()
    pem = ["export", "latest", "-o", str(tmp_path / "out"), "--pem", "--home", str(world.home.path)]
    assert cli.run(pem) == ExitCode.DONE


def test_nothing_is_exported_of_a_run_whose_files_do_not_hold(tmp_path: Path) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    (folder.out / "heads.log").unlink()
    words = ["export", "latest", "-o", str(tmp_path / "out"), "--home", str(world.home.path)]
    assert cli.run(words) == ExitCode.VERIFICATION_FAILED
    assert not (tmp_path / "out").exists()


# ---- DSSE envelopes, by securesystemslib


def their_key(pem: bytes) -> SSlibKey:
    key = load_pem_public_key(pem)
    raw = key.public_bytes_raw()  # type: ignore[union-attr]
    return SSlibKey.from_crypto(key, keyid=key_id(raw))


@pytest.mark.parametrize(
    ("part", "signer"),
    [
        ("receipt", "evidence"),
        ("manifest", "owner"),
        ("delegation", "owner"),
        ("head", "broker"),
        ("countersignature", "broker"),
    ],
)
def test_securesystemslib_verifies_every_signed_part(exported: Exported, part: str, signer: str) -> None:
    envelope = TheirEnvelope.from_dict(json.loads(exported.read(f"{part}.dsse.json")))
    assert envelope.verify([their_key(exported.read(f"{signer}.pem"))], 1)
    wrong = "owner" if signer != "owner" else "broker"
    with pytest.raises(TheirRefusal):
        envelope.verify([their_key(exported.read(f"{wrong}.pem"))], 1)
    envelope.payload += b" "
    with pytest.raises(TheirRefusal):
        envelope.verify([their_key(exported.read(f"{signer}.pem"))], 1)


def test_the_exported_parts_are_those_of_the_bundle(exported: Exported) -> None:
    bundle = Bundle.parse(exported.folder.receipt.read_bytes())
    assert exported.read("receipt.dsse.json") == bundle.receipt.encode()
    assert exported.read("owner.pem") == public_pem(exported.world.owner.public)
    assert exported.read("owner.pem") != public_pem(World("rival").owner.public)


def test_the_owners_key_is_exported_as_pem_without_a_run(exported: Exported, tmp_path: Path) -> None:
    words = ["identity", "pem", "-o", str(tmp_path / "owner.pem"), "--home", str(exported.world.home.path)]
    assert cli.run(words) == ExitCode.DONE
    key = load_pem_public_key((tmp_path / "owner.pem").read_bytes())
    assert key.public_bytes_raw() == exported.world.owner.public  # type: ignore[union-attr]


# ---- CycloneDX, by its own validator


def test_the_bill_of_materials_is_one_by_the_schema(exported: Exported) -> None:
    # Takes two seconds to import, which each process of the suite would pay for at the top.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    data = exported.read("bom.cdx.json")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(data.decode()) is None
    found = json.loads(data)
    model = found["metadata"]["component"]
    assert (model["type"], model["name"]) == ("machine-learning-model", "clinic")
    hashes = {one["name"]: one.get("hashes") for one in model["components"]}
    assert hashes.pop("metrics.json") is None  # a small file could be guessed
    assert hashes.keys() == {"adapter.safetensors", "checkpoints/step-5.safetensors"}
    for name, found_hashes in hashes.items():
        assert found_hashes == [{"alg": "SHA-256", "content": _sha256((exported.model / name).read_bytes())}]
    assert _sha256((exported.model / "metrics.json").read_bytes()).encode() not in data
    (attestation,) = model["externalReferences"]
    assert attestation["hashes"][0]["content"] == _sha256(exported.folder.receipt.read_bytes())
    assert {"name": "glasshouse:assurance", "value": "software"} in model["properties"]
    spoilt = data.decode().replace('"machine-learning-model"', '"miracle"')
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(spoilt) is not None


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()
