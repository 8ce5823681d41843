"""What the owner's side remembers of a package beside its key: a label, and how to deploy it.

Nothing here is signed or secret. A record that is missing means the defaults of `jobfile.Deployment`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import Any

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.jobfile import Deployment
from glasshouse.jobs.owner.files import private_folder, read_state, write_state
from glasshouse.jobs.owner.home import Home

__all__ = ["GivenTo", "PackageRecord"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTo:
    """A gate that a package's key was sent to."""

    name: str  # what it was called then
    public: bytes  # its signing key, by which it is found whatever it is called
    deployed: bool  # whether it said that it has the key; otherwise it may have it


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageRecord:
    """A package as its owner knows it."""

    package_id: str  # 32 hex characters
    name: str  # label for people
    workload: str  # `mlp`, `lora` or `script`
    deployment: Deployment  # how to deploy it
    revoked: bool = False  # whether its owner has revoked its key
    gates: tuple[GivenTo, ...] = ()  # those that stay and were given its key

    def save(self, home: Home) -> None:
        """Write the record; raises `UsageError`."""
        value: dict[str, Any] = {
            "deployment": self.deployment.to_json(),
            "gates": [{"deployed": one.deployed, "name": one.name, "public": one.public.hex()} for one in self.gates],
            "name": self.name,
            "package_id": self.package_id,
            "revoked": self.revoked,
            "saved_us": time.time_ns() // 1000,
            "workload": self.workload,
        }
        write_state(private_folder(home.packages) / f"{self.package_id}.json", value)

    def given_to(self, gate: GivenTo) -> PackageRecord:
        """Return the record with one more gate; what one has said before counts on."""
        deployed = gate.deployed or any(one.deployed for one in self.gates if one.public == gate.public)
        others = tuple(one for one in self.gates if one.public != gate.public)
        return replace(self, gates=(*others, replace(gate, deployed=deployed)))

    def remove(self, home: Home) -> None:
        """Forget a package that never got its name."""
        with contextlib.suppress(OSError):
            (home.packages / f"{self.package_id}.json").unlink()

    @classmethod
    def load(cls, home: Home, package_id: str, *, workload: str) -> PackageRecord:
        """Return the record, or the defaults for a package that came from elsewhere.

        Raises:
            UsageError: `usage` when the record is damaged.
        """
        path = home.packages / f"{package_id}.json"
        if not path.exists():
            return cls(package_id=package_id, name=package_id[:8], workload=workload, deployment=Deployment())
        value = read_state(path, what="package record")
        try:
            return cls(
                package_id=package_id,
                name=str(value["name"]),
                workload=str(value["workload"]),
                deployment=_deployment(dict(value["deployment"])),
                revoked=bool(value["revoked"]),
                gates=tuple(
                    GivenTo(name=str(one["name"]), public=bytes.fromhex(one["public"]), deployed=bool(one["deployed"]))
                    for one in value.get("gates", ())
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(Code.USAGE, f"the package record {path} is damaged") from None


def _deployment(value: dict[str, Any]) -> Deployment:
    names = value.pop("reference", [])  # a record of an earlier version has none
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("references that are no names")
    return Deployment(reference=tuple(names), **{key: int(number) for key, number in value.items()})
