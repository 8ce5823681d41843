"""What the owner's side remembers of a package beside its key: a label, and how to deploy it.

Nothing here is signed or secret. A record that is missing means the defaults of `jobfile.Deployment`.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.files import private_folder, read_state, write_state
from glasshouse.jobs.home import Home
from glasshouse.jobs.jobfile import Deployment

__all__ = ["PackageRecord"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageRecord:
    """A package as its owner knows it.

    Attributes:
        package_id: 32 hex characters.
        name: label for people.
        workload: `mlp`, `lora` or `script`.
        deployment: how to deploy it.
        revoked: whether its owner has revoked its key.
        gates: names of the gates that were given its key.
    """

    package_id: str
    name: str
    workload: str
    deployment: Deployment
    revoked: bool = False
    gates: tuple[str, ...] = ()

    def save(self, home: Home) -> None:
        """Write the record; raises `UsageError`."""
        value: dict[str, Any] = {
            "deployment": self.deployment.to_json(),
            "gates": list(self.gates),
            "name": self.name,
            "package_id": self.package_id,
            "revoked": self.revoked,
            "saved_us": time.time_ns() // 1000,
            "workload": self.workload,
        }
        write_state(private_folder(home.packages) / f"{self.package_id}.json", value)

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
                gates=tuple(map(str, value.get("gates", ()))),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(Code.USAGE, f"the package record {path} is damaged") from None


def _deployment(value: dict[str, Any]) -> Deployment:
    names = value.pop("reference", [])  # a record of an earlier version has none
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("references that are no names")
    return Deployment(reference=tuple(names), **{key: int(number) for key, number in value.items()})
