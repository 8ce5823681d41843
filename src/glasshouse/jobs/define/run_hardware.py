"""What a run above the level `software` is judged by, kept in its folder: its receipt's bundle gets it at the end.

Neither part is secret; both are as the gate had them when the run was launched.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.roots.collateral import MAX_PACK_BYTES, Pack
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner.home import is_there, read_bounded, write_private
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.wire.record import Record

_MAX_BYTES = 2 * MAX_PACK_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHardware(Record, name="hardware of a run", max_bytes=_MAX_BYTES):
    """The policy of a run's deployment, and the collateral pack that its owner had then."""

    policy: DeploymentPolicy
    collateral: Pack | None = None

    def save(self, folder: RunFolder) -> None:
        """Write them into the folder of a run above `software`; raises `UsageError`."""
        if self.policy.hardware is not None:
            write_private(folder.hardware, self.encode())

    @classmethod
    def load(cls, folder: RunFolder) -> RunHardware | None:
        """Return those of a run, None for one at the level `software`; raises `UsageError` for damaged ones."""
        if not is_there(folder.hardware):
            return None
        try:
            return cls.parse(read_bounded(folder.hardware, max_bytes=_MAX_BYTES, what="hardware of a run"))
        except FormatError:
            raise UsageError(Code.USAGE, f"what the run is judged by, {folder.hardware}, is damaged") from None
