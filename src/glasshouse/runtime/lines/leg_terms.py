"""What the checkpoints of one leg are bound to, on one machine, and whose signatures count."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.package.limits import CheckpointLimits
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import Place
from glasshouse.wire.lines.line_start import LineStart


@dataclass(frozen=True, kw_only=True, slots=True)
class LegTerms:
    """The terms of one machine's part in a leg."""

    start: LineStart  # the EAR's
    deployment: str
    environment_sha256: bytes
    group: Group
    limits: CheckpointLimits
    manifest_sha256: bytes
    recipients: tuple[bytes, ...]  # HPKE public keys: of the owner-signed manifest, and the resume key
    run_id: str
    evidence_key: SigningKey
    broker_public: bytes  # pinned
    store_public: bytes  # from the owner's delegation

    @property
    def leads(self) -> bool:
        """Whether this is machine 0, which writes headers."""
        return self.group.machine == 0

    @property
    def own_ranks(self) -> range:
        """The ranks on this machine."""
        return range(self.group.first_rank, self.group.first_rank + self.group.ranks)

    def place(self, *, seq: int, step: int, previous: bytes | None) -> Place:
        """Return which checkpoint a part of this leg belongs to."""
        return Place(
            deployment=self.deployment,
            environment_sha256=self.environment_sha256,
            leg=self.start.leg,
            line=self.start.id,
            machines=self.group.machines,
            manifest_sha256=self.manifest_sha256,
            ranks=self.group.ranks,
            seq=seq,
            step=step,
            previous=previous,
        )


def group_of(group: Group | None) -> Group:
    """Return a job's group; of a job in one process that of its only rank, which shares no secret."""
    return group or Group(id=bytes(32), machines=1, machine=0, ranks=1)
