"""Records of packages beside their keys: a label, and how to deploy it.

Nothing here is signed or secret. A record that is missing means the defaults of `jobfile.Deployment`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.define.wanted import Deployment
from glasshouse.jobs.owner.home import Home, private_folder, read_state, write_state
from glasshouse.package.manifest import Manifest
from glasshouse.package.read import Package
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, items, text


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTo(Record, name="gate"):
    """A gate that a package's key was sent to."""

    name: Annotated[str, text()]  # what it was called then
    public: Sha256  # its signing key, by which it is found whatever it is called
    deployed: bool  # whether it confirmed that it has the key; otherwise it may have it


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageRecord(Record, name="package record"):
    """The owner's record of a package."""

    package_id: Id
    name: Annotated[str, text(1024)]  # label for people
    workload: Annotated[str, text()]  # `mlp`, `lora` or `script`
    deployment: Deployment  # how to deploy it
    revoked: bool = False  # whether its owner has revoked its key
    gates: Annotated[tuple[GivenTo, ...], items(4096), LEFT_OUT] = ()  # those that stay and were given its key

    def save(self, home: Home) -> None:
        """Write the record; raises `UsageError`."""
        write_state(private_folder(home.packages) / f"{self.package_id}.json", self.to_json())

    def given_to(self, gate: GivenTo) -> PackageRecord:
        """Return the record with one more gate; an earlier confirmation still counts."""
        deployed = gate.deployed or any(one.deployed for one in self.gates if one.public == gate.public)
        others = tuple(one for one in self.gates if one.public != gate.public)
        return replace(self, gates=(*others, replace(gate, deployed=deployed)))

    def remove(self, home: Home) -> None:
        """Forget a package that never got its name."""
        with contextlib.suppress(OSError):
            (home.packages / f"{self.package_id}.json").unlink()

    @classmethod
    def load(cls, home: Home, package_id: str, *, workload: str) -> PackageRecord:
        """Return the record, or the defaults for a package from elsewhere; raises `UsageError` when it is damaged."""
        path = home.packages / f"{package_id}.json"
        if not path.exists():
            return cls(package_id=package_id, name=package_id[:8], workload=workload, deployment=Deployment())
        value = read_state(path, what="package record")
        try:
            return cls.from_json(cls.known(value))
        except FormatError:
            raise UsageError(Code.USAGE, f"the package record {path} is damaged") from None


def public_part(path: Path, *, owner_signing: bytes | None = None) -> tuple[Manifest, bytes]:
    """Return a package's checked public manifest and its envelope; raises as `Package.open`, or `UsageError`."""
    try:
        with path.open("rb") as stream:
            package = Package.open(stream, owner_signing=owner_signing)
            return package.manifest, package.envelope
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read the package {path}: {error.strerror}") from None
