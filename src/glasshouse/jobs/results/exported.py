"""A run's evidence in the forms that other tools read: PEM keys, DSSE envelopes, and what signatures and cards need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from glasshouse.errors import Code, UsageError
from glasshouse.evidence.bundle import Bundle
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.collect import RunOutput, look_inside
from glasshouse.jobs.supervise.control import look, require_ended
from glasshouse.jobs.verify.conclusion import read_receipt
from glasshouse.jobs.verify.documents import verify_sealed_in
from glasshouse.jobs.verify.run_files import verify_log_in
from glasshouse.jobs.verify.verdict import Status, Verdict, verify_bundle
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
