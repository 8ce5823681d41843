"""Makes the public artifact of a run: from a bundle that verifies as good, and from nothing else."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

from glasshouse.attestation.claims import Claims
from glasshouse.errors import Code, UsageError, VerificationError
from glasshouse.evidence.artifact import (
    MAX_ARTIFACT_BYTES,
    NUMBERS,
    PUBLIC_DECIMAL,
    PUBLIC_STOP_REASONS,
    SECRET_MEMORIES,
    VOCABULARY,
    WORKSPACES,
    Artifact,
    PublicOutput,
    known,
)
from glasshouse.evidence.canary import check_canaries
from glasshouse.evidence.receipt import Output
from glasshouse.jobs.verify.documents import verify_bundle
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.wire.crypto import SigningKey, sha256

_SIX_PLACES = Decimal("0.000001")


def make_artifact(
    bundle: bytes,
    *,
    owner: SigningKey,
    canaries: Sequence[bytes | str],
    numbers: Mapping[str, str] | None = None,
    revealed: Mapping[int, tuple[bytes, bytes]] | None = None,
) -> bytes:
    """Return the signed artifact of a run.

    Args:
        canaries: this run's live secrets: keys, input names, paths; what the bundle itself names
            (container, devices) and `host_canaries` are added.
        numbers: public results by a name of `NUMBERS`, as decimals.
        revealed: salt and plaintext SHA-256 of the weights whose digests the owner publishes, by the output's sequence.

    Raises:
        VerificationError: the bundle is not good; or `artifact-canary`.
        FormatError: as `verify_bundle`; `schema-invalid` for a digest that the receipt does not commit to.
        UsageError: `usage` for a number that may not stand in an artifact; `artifact-invalid` for the receipt of one
            of several machines, which is not the whole run.
    """
    verdict = verify_bundle(bundle, owner=owner.public)
    plain = account(verdict, bundle)
    shown = revealed or {}
    artifact = replace(
        plain,
        numbers=_checked(numbers or {}),
        outputs=tuple(one.reveal(shown.get(sequence)) for sequence, one in enumerate(plain.outputs)),
    )
    claims = verdict.chain.claims
    check_canaries(
        artifact.encode(),
        [*canaries, *([] if claims is None else _run_canaries(claims)), *host_canaries()],
        vocabulary=VOCABULARY,
        max_bytes=MAX_ARTIFACT_BYTES,
    )
    return artifact.sign(owner).encode()


def account(verdict: Verdict, bundle: bytes) -> Artifact:
    """Return what a good bundle lets its owner publish, with no digest or number added; raises as `make_artifact`."""
    chain, receipt = verdict.chain, verdict.chain.receipt
    if verdict.status is not Status.GOOD or not (
        chain.manifest and chain.claims and chain.ear and chain.countersignature and receipt.work
    ):
        raise VerificationError(
            Code.ARTIFACT_INVALID, f"an artifact is made of a good bundle only; this one is {verdict.status}"
        )
    if verdict.machines > 1:
        raise UsageError(
            Code.ARTIFACT_INVALID,
            f"an artifact is of a run on one machine; this receipt is one of {verdict.machines} machines'",
        )
    return Artifact(
        bundle_sha256=sha256(bundle),
        assurance=chain.ear.assurance,
        profile=chain.ear.profile,
        suite=chain.manifest.suite,
        workload=chain.manifest.workload,
        egress_peers=len(chain.manifest.floor.egress),
        gpus=len(chain.claims.gpus),
        manifest_sha256=receipt.manifest_sha256,
        floor_sha256=receipt.floor_sha256,
        policy_sha256=receipt.policy_sha256,
        measurement=chain.claims.measurement_sha256,
        environment_sha256=chain.claims.environment_sha256,
        log_root=receipt.log_root,
        log_size=receipt.log_size,
        segments=receipt.segments,
        unit=receipt.work.unit,
        done=receipt.work.done,
        elapsed_us=receipt.work.elapsed_us,
        stop_reason=known(receipt.work.stop_reason, PUBLIC_STOP_REASONS),
        loss=None if receipt.loss is None else (_rounded(receipt.loss.first), _rounded(receipt.loss.final)),
        trainable=receipt.trainable,
        workspace=known(receipt.workspace, WORKSPACES),
        secret_memory=known(receipt.secret_memory, SECRET_MEMORIES),
        outputs=tuple(_public(output) for output in receipt.outputs),
        zeroization=tuple((probe.probe, probe.result) for probe in receipt.zeroization),
        lifecycle_us=dict(receipt.lifecycle_us),
        training_imports_us=receipt.training_imports_us,
        started_us=receipt.started_us,
        finished_us=receipt.finished_us,
        countersigned_us=chain.countersignature.time_us,
        numbers={},
    )


def compare(artifact: Artifact, bundle: bytes, *, owner: bytes, now_us: int | None = None) -> Verdict:
    """Compare every field of an artifact with what its bundle shows, and return the bundle's verdict.

    Raises:
        VerificationError: `artifact-invalid`, naming every field that differs; or as `verify_bundle`.
        FormatError, UsageError: as `make_artifact`.
    """
    verdict = verify_bundle(bundle, owner=owner, now_us=now_us)
    shown = account(verdict, bundle)
    given = replace(artifact, numbers={}, outputs=tuple(output.reveal(None) for output in artifact.outputs))
    names = [field.name for field in fields(Artifact)]
    if other := [name for name in names if getattr(given, name) != getattr(shown, name)]:
        raise VerificationError(
            Code.ARTIFACT_INVALID, f"the artifact differs from what the bundle shows, in: {', '.join(other)}"
        )
    return verdict


def host_canaries() -> list[str]:
    """Return what would show a stranger whose machine this is: its name, the user, home and working folder."""
    found = {socket.gethostname(), os.uname().nodename, str(Path.cwd())}
    for read in (getpass.getuser, lambda: str(Path.home())):
        try:
            found.add(read())
        except (KeyError, OSError, RuntimeError):  # a user without an entry has no name and no home to leak
            continue
    return sorted(item for item in found if item not in ("", "/"))


def _run_canaries(claims: Claims) -> list[str]:
    found = [claims.container_id, claims.run_id, claims.deployment, claims.package_id]
    for gpu in claims.gpus:
        found += [text for text in (gpu.uuid, gpu.name, gpu.driver) if text]
    return found


def _public(output: Output) -> PublicOutput:
    return PublicOutput(
        kind=output.kind,
        of=output.of,
        plain_bytes=output.plain_bytes,
        sealed_sha256=output.sealed_sha256,
        plain_hmac=output.plain_hmac,
    )


def _rounded(loss: str) -> str:
    try:
        text = format(Decimal(loss).quantize(_SIX_PLACES), "f")
    except InvalidOperation:
        text = ""
    if not PUBLIC_DECIMAL.fullmatch(text):
        raise VerificationError(Code.ARTIFACT_INVALID, "a loss that is too large to stand in an artifact")
    return text


def _checked(numbers: Mapping[str, str]) -> dict[str, str]:
    for name, value in numbers.items():
        if name not in NUMBERS:
            raise UsageError(Code.USAGE, f"an artifact has no number {name[:40]!r}; it has {', '.join(NUMBERS)}")
        if not PUBLIC_DECIMAL.fullmatch(value):
            raise UsageError(Code.USAGE, f"the number {name} is not a decimal of at most 12 digits and 6 places")
    return dict(numbers)
