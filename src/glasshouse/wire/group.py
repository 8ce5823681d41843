"""Which ranks train together: a group of runtimes on one or more machines, and the secret that they share.

Source: spec/key-release.md section 2.4 (the launch token's `group`) and spec/sealed-package.md section 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import derive
from glasshouse.wire.record import Record, digest, integer

ID_BYTES = 32
MAX_MACHINES = 64
MAX_RANKS = 64  # on one machine

_LABEL = b"glasshouse group v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group(Record, name="group"):
    """One machine's place in a group of ranks."""

    id: Annotated[bytes, digest(ID_BYTES)]  # random, the same on all machines of the group and in no other group
    machines: Annotated[int, integer(1, MAX_MACHINES)]
    machine: Annotated[int, integer(0, MAX_MACHINES - 1)]  # which of them this is
    ranks: Annotated[int, integer(1, MAX_RANKS)]  # on each machine

    def __post_init__(self) -> None:
        if len(self.id) != ID_BYTES or not 1 <= self.ranks <= MAX_RANKS:
            raise FormatError(Code.SCHEMA, f"a group id of {len(self.id)} bytes, or {self.ranks} ranks on a machine")
        if not (1 <= self.machines <= MAX_MACHINES and 0 <= self.machine < self.machines):
            raise FormatError(Code.SCHEMA, f"machine {self.machine} of {self.machines} in a group")

    @property
    def world_size(self) -> int:
        """How many ranks there are on all machines."""
        return self.machines * self.ranks

    @property
    def first_rank(self) -> int:
        """The lowest rank on this machine; ranks are counted machine by machine."""
        return self.machine * self.ranks

    def secret(self, package_key: bytes | bytearray | memoryview) -> bytes:
        """Derive the group secret, 32 bytes, the same on every machine of the group; in the custodian alone."""
        return derive(package_key, _LABEL, self.id, self.world_size.to_bytes(4, "big"))
