"""A machine-learning bill of materials of a run, in CycloneDX 1.6: what came out, of what, where the evidence is."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from glasshouse import __version__
from glasshouse.errors import Code, UsageError
from glasshouse.evidence.receipt import WEIGHTS
from glasshouse.jobs.results.collect import RunOutput
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.wire.crypto import sha256


def bill_of_materials(
    verdict: Verdict, outputs: Sequence[RunOutput], *, name: str, bundle: bytes, fingerprint: str
) -> bytes:
    """Return the document of a model with outputs that were compared with its good receipt, else raise `UsageError`."""
    if verdict.status is not Status.GOOD:
        why = f"a bill of materials is made of a good receipt only; this one is {verdict.status}"
        raise UsageError(Code.USAGE, why)
    receipt = verdict.chain.receipt
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
            for one, named in zip(outputs, receipt.outputs, strict=True)
        ],
        "externalReferences": [
            {
                "comment": "Glasshouse receipt bundle; check it with: glasshouse verify receipt.json",
                "hashes": [{"alg": "SHA-256", "content": sha256(bundle).hex()}],
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
        "serialNumber": uuid.UUID(bytes=sha256(bundle)[:16], version=4).urn,
        "specVersion": "1.6",
        "version": 1,
    }
    return (json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()
