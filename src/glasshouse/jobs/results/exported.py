"""A run's evidence in the forms that other tools read: PEM keys, DSSE envelopes, a CycloneDX bill of materials, and
signatures of OpenSSF Model Signing (ADR 0022).

Its tools take no Ed25519 key, so the owner has a second key, ECDSA on P-256: made on the first export, kept sealed to
the owner's sealing key, certified by a statement that the owner signs. Law: nothing of ours accepts its signature.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from glasshouse import __version__
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.receipt import RECEIPT_TYPE, STATEMENT_TYPE, WEIGHTS
from glasshouse.jobs.owner.home import Home, is_there, read_bounded, write_private
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.collect import RunOutput, look_inside
from glasshouse.jobs.supervise.control import look, require_ended
from glasshouse.jobs.verify.conclusion import read_receipt, verify_sealed_in
from glasshouse.jobs.verify.line_file import line_file
from glasshouse.jobs.verify.line_verdict import verify_line
from glasshouse.jobs.verify.run_files import verify_log_in
from glasshouse.jobs.verify.verdict import Status, Verdict, verify_bundle
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.crypto import HPKE_OVERHEAD_BYTES, hpke_seal, lengths_prefixed, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.record import Record, octets

CERTIFICATE_TYPE = "application/vnd.glasshouse.model-signing-key+json"
SIGNATURE_NAME = "model.sig"
_CERTIFIES: Mapping[str, Json] = {
    "algorithm": "ecdsa-p256-sha256",
    "kind": "https://glasshouse.dev/model-signing-key/v1",
}
_STORED_KIND = "glasshouse-model-signing-key"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_MAX_BYTES = 16384
_SCALAR_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedRun:
    """A run whose receipt and files all hold."""

    bundle: bytes  # the receipt bundle's bytes
    verdict: Verdict  # of it, with log, heads and sealed files
    outputs: tuple[RunOutput, ...]  # opened and compared with it
    line: bytes | None = None  # the file of the whole line, which holds too; None for a run of none

    def require_good(self) -> None:
        """Raise `UsageError` unless the run completed, on one machine, and its receipt is whole."""
        if self.verdict.status is not Status.GOOD:
            why = f"only a good receipt is exported as a model's; this one is {self.verdict.status}"
            raise UsageError(Code.USAGE, why)


def exported_run(home: Home, run: str, identity: Identity) -> ExportedRun:
    """Verify all that a run on one machine left, as `verify RUN` does, and decrypt its outputs to nowhere."""
    found = look(RunFolder.find(home, run), home)
    require_ended(found)
    folder = found.folder
    bundle = read_receipt(folder)
    verdict = verify_bundle(bundle, owner=identity.signing.public, run_id=folder.run_id)
    log, heads = verify_log_in(verdict.chain, folder.out)
    verdict = verify_sealed_in(replace(verdict, log=log, heads=heads), folder.out, expected=True)
    if verdict.machines > 1:
        raise UsageError(Code.USAGE, f"this receipt is one of {verdict.machines} machines', and not the whole run")
    outputs = look_inside(folder, verdict.chain.receipt, sealing=identity.sealing)
    return ExportedRun(bundle=bundle, verdict=verdict, outputs=tuple(outputs), line=_line(home, verdict, identity))


def _line(home: Home, verdict: Verdict, identity: Identity) -> bytes | None:
    """Return the file of a run's line, verified; None for a run of none."""
    line = verdict.chain.token.line
    found = None if line is None else line_file(home, line.id.hex())
    if found is None:
        return None
    verify_line(found.encode(), owner=identity.signing.public)
    return found.encode()


def public_pem(public: bytes) -> bytes:
    """Return an Ed25519 public key as PEM (SubjectPublicKeyInfo, RFC 8410)."""
    key = Ed25519PublicKey.from_public_bytes(public)
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def export_keys(bundle: bytes, verdict: Verdict, *, owner: bytes) -> dict[str, bytes]:
    """Return the keys of a receipt bundle as PEM and its signed parts as DSSE envelopes, by file name."""
    parts = Bundle.parse(bundle)
    signed = ("countersignature", "delegation", "head", "manifest", "receipt")
    envelopes: dict[str, Envelope | None] = {name: getattr(parts, name) for name in signed}
    keys = {
        "broker": verdict.chain.delegation.broker_public,
        "evidence": verdict.chain.receipt.evidence_public,
        "launch": verdict.chain.token.launch_public,
        "owner": owner,
    }
    files = {f"{name}.pem": public_pem(public) for name, public in keys.items()}
    return files | {f"{name}.dsse.json": part.encode() for name, part in envelopes.items() if part is not None}


def bill_of_materials(run: ExportedRun, *, name: str, fingerprint: str) -> bytes:
    """Return the document of a model; raises `UsageError` as `require_good`."""
    run.require_good()
    verdict, receipt = run.verdict, run.verdict.chain.receipt
    facts = {
        "assurance": verdict.assurance,
        "deployment-policy-sha256": receipt.policy_sha256.hex(),
        "hardening": receipt.profile.value,
        "owner-fingerprint": fingerprint,
        "run-id": receipt.run_id,
        "runtime-measurement": "" if receipt.measurement is None else receipt.measurement.hex(),
        "workload": receipt.workload,
    }
    limits = (
        f"Attested at assurance {verdict.assurance}. Under its owner's key the receipt shows how the run "
        "was released and how it ended; it shows nothing about the quality of the model or of the data."
    )
    model = {
        "bom-ref": "model",
        "components": [
            {
                "bom-ref": f"output-{one.sequence}",
                "name": one.name,
                "properties": [
                    {"name": "glasshouse:kind", "value": one.kind},
                    {"name": "glasshouse:sealed-sha256", "value": named.sealed_sha256.hex()},
                ],
                "type": "file",
            }
            # A small file could be guessed from the digest of its plaintext.
            | ({"hashes": [{"alg": "SHA-256", "content": one.sha256.hex()}]} if named.of == WEIGHTS else {})
            for one, named in zip(run.outputs, receipt.outputs, strict=True)
        ],
        "externalReferences": [
            {
                "comment": "Glasshouse receipt bundle; check it with: glasshouse verify receipt.json",
                "hashes": [{"alg": "SHA-256", "content": sha256(run.bundle).hex()}],
                "type": "attestation",
                "url": "receipt.json",
            }
        ],
        "modelCard": {
            "considerations": {"technicalLimitations": [limits]},
            "modelParameters": {"datasets": [{"ref": "package"}]},
        },
        "name": name,
        "properties": [{"name": f"glasshouse:{key}", "value": value} for key, value in facts.items() if value],
        "type": "machine-learning-model",
    }
    package = {
        "bom-ref": "package",
        "data": [
            {
                "contents": {"properties": [{"name": "glasshouse:package-id", "value": receipt.package_id}]},
                "type": "dataset",
            }
        ],
        "description": "Code, data and weights, sealed by their owner; names and contents are not public.",
        "hashes": [{"alg": "SHA-256", "content": receipt.manifest_sha256.hex()}],
        "name": "sealed package",
        "type": "data",
    }
    made = datetime.fromtimestamp(receipt.finished_us // 1_000_000, tz=UTC)
    document = {
        "bomFormat": "CycloneDX",
        "components": [package],
        "dependencies": [{"dependsOn": ["package"], "ref": "model"}, {"ref": "package"}],
        "metadata": {
            "component": model,
            "timestamp": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": [{"name": "glasshouse", "type": "application", "version": __version__}]},
        },
        # The same run gives the same document.
        "serialNumber": uuid.UUID(bytes=sha256(run.bundle)[:16], version=4).urn,
        "specVersion": "1.6",
        "version": 1,
    }
    return (json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Certificate(Record, name="certificate", max_bytes=_MAX_BYTES, constants=_CERTIFIES):
    created_us: int
    public: Annotated[bytes, octets(max_length=256)]  # SubjectPublicKeyInfo, DER


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored(Record, name="model signing key", max_bytes=_MAX_BYTES, constants={"kind": _STORED_KIND, "version": 1}):
    certificate: Envelope
    sealed: Annotated[bytes, octets(_SCALAR_BYTES + HPKE_OVERHEAD_BYTES)]


@dataclass(frozen=True, slots=True)
class ModelKey:
    """The owner's key for exported model signatures."""

    private: ec.EllipticCurvePrivateKey  # on P-256
    certificate: Envelope  # the owner's statement that it is theirs

    @property
    def pem(self) -> bytes:
        """The public key as `model_signing` takes it."""
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def model_key(home: Home, identity: Identity, *, now_us: int) -> ModelKey:
    """Return the owner's key for model signatures, made by the first call; raises `UsageError` for a damaged one."""
    if not is_there(home.model_signing):
        _make(home, identity, now_us)
    try:
        data = read_bounded(home.model_signing, max_bytes=_MAX_BYTES, what="model signing key", private=True)
        stored = _Stored.parse(data.removesuffix(b"\n"))
        scalar = identity.sealing.open(stored.sealed, info=_info(identity))
        private = ec.derive_private_key(int.from_bytes(scalar), ec.SECP256R1())
        if certified_key(stored.certificate, owner=identity.signing.public) != _spki(private):
            raise FormatError(Code.SCHEMA, "its certificate is of another key")
    except (FormatError, ValueError) as error:
        why = f"the key of model signatures {home.model_signing} is not usable: {error}"
        raise UsageError(Code.IDENTITY, why) from None
    return ModelKey(private, stored.certificate)


def certified_key(certificate: Envelope, *, owner: bytes) -> bytes:
    """Return the public key (SubjectPublicKeyInfo, DER) that an owner's statement certifies; raises `FormatError`."""
    return _Certificate.parse(certificate.verify(CERTIFICATE_TYPE, owner)).public


def sign_model(key: ModelKey, outputs: Sequence[RunOutput], *, name: str, bundle_sha256: bytes) -> bytes:
    """Return the bundle that `model_signing verify` takes for a run's outputs; raises `UsageError` if it has none."""
    if not outputs:
        raise UsageError(Code.USAGE, "the run has no outputs: there is no model to sign")
    files = sorted((one.name, one.sha256) for one in outputs)
    resources: list[Json] = [{"algorithm": "sha256", "digest": digest.hex(), "name": path} for path, digest in files]
    root = hashlib.sha256(b"".join(digest for _, digest in files)).hexdigest()
    serialization: Json = {
        "allow_symlinks": False,
        "hash_type": "sha256",
        "ignore_paths": [SIGNATURE_NAME],
        "method": "files",
    }
    # Readers of this predicate pass over unknown members: the run behind it, and the key's owner.
    ours: Json = {"certificate": key.certificate.to_json(), "receipt_bundle_sha256": bundle_sha256.hex()}
    statement = encode(
        {
            "_type": STATEMENT_TYPE,
            "predicate": {
                "glasshouse": ours,
                "resources": resources,
                "serialization": serialization,
            },
            "predicateType": _PREDICATE_TYPE,
            "subject": [{"digest": {"sha256": root}, "name": name}],
        }
    )
    signature = key.private.sign(dsse.pae(RECEIPT_TYPE, statement), ec.ECDSA(hashes.SHA256()))
    envelope: Json = {
        "payload": base64.b64encode(statement).decode(),
        "payloadType": RECEIPT_TYPE,
        "signatures": [{"keyid": "", "sig": base64.b64encode(signature).decode()}],
    }
    hint = hashlib.sha256(key.pem).hexdigest()
    return encode(
        {
            "dsseEnvelope": envelope,
            "mediaType": _BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        }
    )


def _make(home: Home, identity: Identity, now_us: int) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    payload = _Certificate(created_us=now_us, public=_spki(private)).encode()
    certificate = dsse.sign(CERTIFICATE_TYPE, payload, [identity.signing])
    scalar = private.private_numbers().private_value.to_bytes(_SCALAR_BYTES)
    sealed = hpke_seal(scalar, recipient=identity.sealing.public, info=_info(identity))
    write_private(home.model_signing, _Stored(certificate=certificate, sealed=sealed).encode() + b"\n", replace=False)


def _spki(private: ec.EllipticCurvePrivateKey) -> bytes:
    return private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _info(identity: Identity) -> bytes:
    return lengths_prefixed(b"glasshouse model signing key v1", identity.signing.public)
