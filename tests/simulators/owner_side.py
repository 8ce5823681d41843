"""A run folder on the owner's side, filled by the simulated world: really sealed outputs and log, real receipt."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from glasshouse.evidence.receipt import Output
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.package.outputs import OutputSealer, SealedOutput
from simulators.world import START_US, Run, World

__all__ = ["OwnersWorld", "seal_output"]


def seal_output(
    path: Path, content: bytes, *, recipient: bytes, run_id: str, manifest: bytes, name: str, sequence: int, kind: str
) -> SealedOutput:
    """Seal some bytes as an output; anyone who knows the owner's public key can."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        sealer = OutputSealer(
            out,
            recipients=[recipient],
            run_id=run_id,
            manifest_sha256=manifest,
            name=name,
            sequence=sequence,
            kind=kind,
            chunk_bytes=1 << 16,
        )
        sealer.update(content)
        return sealer.finish()


@dataclass
class OwnersWorld(World):
    """A world whose run leaves its files in a state home.

    Attributes:
        files: the outputs, name → (kind, class, content).
        printed: what the training printed.
    """

    files: dict[str, tuple[str, str, bytes]] = field(
        default_factory=lambda: {
            "adapter.safetensors": ("output", "weights", b"weights" * 1000),
            "checkpoints/step-5.safetensors": ("checkpoint", "weights", b"earlier" * 500),
            "metrics.json": ("output", "file", b'{"accuracy": 0.97}'),
        }
    )
    printed: bytes = b"step 1 of 5\nwith a canary\n"
    made: tuple[Output, ...] = ()

    def settle(self, root: Path) -> RunFolder:
        """Make the home and the run's folder with its sealed files; `tell` writes log and receipt."""
        self.home = Home(path=root / "home").make()
        identity = Identity(signing=self.owner, sealing=self.owner_hpke)
        identity.save(private=self.home.owner_private, public=self.home.owner_public, passphrase=None)
        folder = RunFolder(self.home.runs / self.id("run"))
        folder.path.mkdir(mode=0o700)
        made: list[Output] = []
        for sequence, (name, (kind, of, content)) in enumerate(self.files.items()):
            path = folder.out / "outputs" / f"{sequence:04d}.sealed"
            sealed = self._seal(path, content, name, sequence, kind)
            made.append(
                Output(
                    kind=kind,
                    of=of,
                    sequence=sequence,
                    plain_bytes=len(content),
                    plain_hmac=sealed.plain_hmac if of == "weights" else None,
                    sealed_bytes=sealed.sealed_bytes,
                    sealed_sha256=sealed.sealed_sha256,
                )
            )
        self.made = tuple(made)
        path = folder.out / "log" / "0000.sealed"
        segment = self._seal(path, self.printed, "log-0000", 0, "log")
        self.segment, self.segment_bytes = segment.sealed_sha256, segment.sealed_bytes
        folder.save(self.record_of(folder))
        return folder

    def tell(self, folder: RunFolder, run: Run) -> None:
        """Put a run's log, heads and bundle into its folder."""
        folder.out.mkdir(exist_ok=True)
        folder.events.write_bytes(b"".join(run.lines))
        (folder.out / "heads.log").write_bytes(b"".join(head.encode() + b"\n" for head in run.heads))
        folder.receipt.write_bytes(run.data)

    def record_of(self, folder: RunFolder) -> RunRecord:
        return RunRecord(
            run_id=folder.run_id,
            name="clinic",
            workload="lora",
            package=folder.package,
            package_id=self.manifest.package_id,
            manifest_sha256=self.manifest.sha256.hex(),
            assurance="software",
            profile="standard",
            created_us=START_US,
            max_duration_s=3600,
        )

    def outputs(self) -> tuple[Output, ...]:
        return self.made or super().outputs()

    def digest(self, label: str) -> bytes:
        # The world's log names its one segment by this label.
        if label == "segment" and hasattr(self, "segment"):
            return self.segment
        return super().digest(label)

    def _seal(self, path: Path, content: bytes, name: str, sequence: int, kind: str) -> SealedOutput:
        return seal_output(
            path,
            content,
            recipient=self.owner_hpke.public,
            run_id=self.id("run"),
            manifest=self.manifest.sha256,
            name=name,
            sequence=sequence,
            kind=kind,
        )
