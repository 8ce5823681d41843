"""What `verify` found of a document that the owner alone signed: an artifact, or a sealed package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from glasshouse.errors import ExitCode
from glasshouse.evidence.artifact import Artifact
from glasshouse.evidence.events import ProbeResult
from glasshouse.jobs.owner.durations import format_s, utc
from glasshouse.jobs.verify.verdict import SECOND_US, TOO_LONG, Verdict
from glasshouse.wire.canonical import Json


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageVerdict:
    """A package that the owner signed."""

    package_id: str  # which
    manifest_sha256: bytes
    assurance: str  # the floor that every run of it must meet
    profile: str
    assets: int | None  # what was opened and compared with its digests; None when only the public part was
    content_bytes: int | None

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command with this verdict."""
        return ExitCode.DONE

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level that the package demands."""
        demand = f"demands at least assurance {self.assurance}, hardening {self.profile}"
        if self.assets is None:
            return f"Signed by its owner ({demand}); its content was not opened."
        return f"Signed by its owner ({demand}); all {self.assets} assets opened and match their digests."

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        return {
            "assets": self.assets,
            "assurance": self.assurance,
            "content_bytes": self.content_bytes,
            "hardening": self.profile,
            "kind": "package",
            "package": {"id": self.package_id, "manifest_sha256": self.manifest_sha256.hex()},
            "status": "authentic",
            "verdict": self.sentence,
        }


AnyVerdict: TypeAlias = Verdict | ArtifactVerdict | PackageVerdict
