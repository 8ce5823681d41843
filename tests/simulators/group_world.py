"""A run on several machines on the owner's side: one package, broker and group; each machine with a run of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.handshake.launch import TokenClaims
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.group import Group
from simulators.owner_side import OwnersWorld

__all__ = ["MachineWorld", "settle_group"]

_OF_A_MACHINE = frozenset({"run", "token", "launch", "evidence", "nonce", "id of run", "id of token"})


@dataclass
class MachineWorld(OwnersWorld):
    """One machine of a group.

    Attributes:
        group: its place; None for a run that is in no group.
    """

    group: Group | None = None

    def digest(self, label: str) -> bytes:
        if self.group is not None and label.removeprefix("key of ") in _OF_A_MACHINE:
            label = f"{label} on machine {self.group.machine} of {self.group.id.hex()}"
        return super().digest(label)

    def token_claims(self, **changes: object) -> TokenClaims:
        return super().token_claims(**{"group": self.group, **changes})

    def key(self, label: str) -> SigningKey:
        return SigningKey(self.digest(f"key of {label}"))

    def record_of(self, folder: RunFolder) -> RunRecord:
        return replace(super().record_of(folder), group=self.group)


def settle_group(
    root: Path, machines: int = 2, *, ranks: int = 2, name: str = "first"
) -> tuple[RunFolder, list[MachineWorld], list[RunFolder]]:
    """Make a state home with a run on several machines; each of them left outputs.

    Returns:
        The run's folder, each machine's world, and each machine's folder.
    """
    worlds: list[MachineWorld] = []
    folders: list[RunFolder] = []
    for machine in range(machines):
        place = Group(id=sha256(name.encode()), machines=machines, machine=machine, ranks=ranks)
        world = MachineWorld(group=place)
        folder = world.settle(root / f"machine-{machine}")
        if machine:
            into = folders[0].path / "machines" / folder.run_id
            into.parent.mkdir(mode=0o700, exist_ok=True)
            folder.path.rename(into)
            folder, world.home = RunFolder(into), worlds[0].home
        worlds.append(world)
        folders.append(folder)
    return folders[0], worlds, folders
