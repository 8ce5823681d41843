"""Makes the public artifact of a run, from a bundle that verifies as good and from nothing else, and verifies one."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

from glasshouse.attestation.claims import Claims
from glasshouse.errors import Code, ExitCode, FormatError, UsageError, VerificationError
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
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.receipt import Output
from glasshouse.jobs.define.package_records import KeyStore
from glasshouse.jobs.owner.durations import format_s, utc
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.jobs.verify.verdict import SECOND_US, TOO_LONG, Status, Verdict, check_past, verify_bundle
from glasshouse.package.read import Package
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import SigningKey, key_id, sha256
from glasshouse.wire.dsse import Envelope

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


def leak_patterns(folder: RunFolder, record: RunRecord, *, home: Home, identity: Identity) -> list[bytes | str]:
    """Return what must not be public: keys, names of inputs and of the job, paths on the owner's side.

    Raises as `Package.unlock` where the package does not open, so that its contents are unknown.
    """
    key = KeyStore(home.keys).get(
        record.package_id, manifest_sha256=bytes.fromhex(record.manifest_sha256), sealing=identity.sealing
    )
    found: list[bytes | str] = [key, identity.signing.seed(), identity.sealing.private()]
    with record.package.open("rb") as stream:
        index = Package.open(stream, owner_signing=identity.signing.public).unlock(key)
        for entry in index.assets:
            found += [entry.path, *entry.path.split("/"), entry.digest]
    found += [record.name, str(record.package), str(home.path), str(folder.path)]
    return [one for one in found if one]


def verify_artifact(data: bytes, *, owner: bytes, now_us: int | None = None) -> ArtifactVerdict:
    """Check an artifact by itself; `publish.compare` holds it to its bundle.

    Raises:
        VerificationError: `owner-mismatch` for one by another owner, `artifact-invalid` for any alteration and for a
            run of the future.
    """
    try:
        envelope = Envelope.parse(data, max_bytes=MAX_ARTIFACT_BYTES)
        if [name for name, _ in envelope.signatures] != [key_id(owner)]:
            raise VerificationError(Code.OWNER_UNKNOWN, "an artifact by another owner than expected")
        artifact = Artifact.parse_signed(data, owner)
    except FormatError as error:
        raise VerificationError(Code.ARTIFACT_INVALID, f"not the artifact that the owner signed: {error}") from None
    check_past(artifact.countersigned_us, now_us, Code.ARTIFACT_INVALID)
    return ArtifactVerdict(artifact=artifact)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactVerdict:
    """An artifact that the owner signed, unaltered."""

    artifact: Artifact  # its fields
    # The verdict on its bundle, which shows every field of it; None when that was not looked at.
    bundle: Verdict | None = None

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command with this verdict."""
        return ExitCode.DONE

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level and with whose word it is."""
        about = self.artifact
        text = [
            f"Signed by its owner (assurance {about.assurance}, by the owner's word): a run that completed, "
            f"countersigned {utc(about.countersigned_us)}, whose bundle has the SHA-256 {about.bundle_sha256.hex()}."
        ]
        if self.bundle is not None:
            text = [
                f"Signed by its owner (assurance {about.assurance}), and every field is what the bundle "
                f"{about.bundle_sha256.hex()} shows: a run that completed, countersigned {utc(about.countersigned_us)}."
            ]
        if about.numbers:
            text.append(f"In no bundle, the owner's word alone: {', '.join(sorted(about.numbers))}.")
        text += [f"Note: {doubt}." for doubt in self.doubts]
        return " ".join([*text, self.proves])

    @property
    def proves(self) -> str:
        """To whom it proves what."""
        if self.bundle is not None:
            return self.bundle.proves
        return "The owner says all of this; nothing else stands behind it here: compare it with its bundle (--bundle)."

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is genuine here and yet bears out less than it seems to."""
        if self.bundle is not None:
            return self.bundle.doubts
        about, found = self.artifact, []
        unsure = [name for name, result in about.zeroization if result is ProbeResult.UNVERIFIABLE]
        if unsure:
            found.append(f"what the probes {', '.join(unsure)} search could not be searched")
        if about.elapsed_us > about.finished_us - about.started_us + SECOND_US:
            found.append(TOO_LONG)
        return tuple(found)

    @property
    def facts(self) -> dict[str, str]:
        """What it records of the run, for people: dates, GPUs, work, loss and probes."""
        about = self.artifact
        return {
            "dates": f"{utc(about.started_us)} to {utc(about.finished_us)}, "
            f"countersigned {utc(about.countersigned_us)}",
            "GPUs": str(about.gpus),
            "work": f"{about.done} {about.unit}s in {format_s(about.elapsed_us / 1e6)}; ended by: {about.stop_reason}",
            "loss": " → ".join(about.loss) if about.loss else "none",
            "probes": ", ".join(f"{name} {result.value}" for name, result in about.zeroization),
        }

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        return {
            "artifact": self.artifact.to_json(),
            "assurance": self.artifact.assurance.value,
            "bundle": None if self.bundle is None else self.bundle.to_json(),
            "doubts": list(self.doubts),
            "kind": "artifact",
            "proves": self.proves,
            "status": "authentic",
            "verdict": self.sentence,
        }
