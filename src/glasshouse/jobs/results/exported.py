"""A run's evidence in the forms that other tools read: PEM keys, DSSE envelopes, a CycloneDX bill of materials."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from glasshouse import __version__
from glasshouse.errors import Code, UsageError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.receipt import WEIGHTS
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.collect import RunOutput, look_inside
from glasshouse.jobs.supervise.control import look, require_ended
from glasshouse.jobs.verify.conclusion import read_receipt
from glasshouse.jobs.verify.documents import verify_sealed_in
from glasshouse.jobs.verify.run_files import verify_log_in
from glasshouse.jobs.verify.verdict import Status, Verdict, verify_bundle
from glasshouse.wire.crypto import sha256
from glasshouse.wire.dsse import Envelope


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedRun:
    """A run whose receipt and files all hold."""

    bundle: bytes  # the receipt bundle's bytes
    verdict: Verdict  # of it, with log, heads and sealed files
    outputs: tuple[RunOutput, ...]  # opened and compared with it

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
    return ExportedRun(bundle=bundle, verdict=verdict, outputs=tuple(outputs))


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
