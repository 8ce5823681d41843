"""The state home: where an owner's identity, keys, runs and embedded broker live.

```
.glasshouse/            0700
  owner.pub             public: signing and sealing key, one fingerprint
  owner.key             private, 0600; encrypted when the owner gave a passphrase
  keys/ID.json          package keys, sealed to the owner
  owners/NAME.pub       owners of others that are known here
  packages/ID.json      labels and deployment settings of packages
  runs/ID/              one folder per run
  broker/               the embedded broker's data, its sockets and its lock
```
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.files import is_file, private_folder

__all__ = ["Home"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Names of things below one state home.

    Attributes:
        path: the home's absolute path.
    """

    path: Path

    @classmethod
    def locate(cls, named: Path | None = None) -> Home:
        """Return the home that was named, else `GLASSHOUSE_HOME`, else `.glasshouse` in the working folder."""
        chosen = named or Path(os.environ.get("GLASSHOUSE_HOME") or ".glasshouse")
        return cls(path=Path(os.path.abspath(chosen)))  # noqa: PTH100 - resolve() would follow links

    def make(self) -> Home:
        """Make the home's folders; raises `UsageError`."""
        for folder in (self.path, self.keys, self.packages, self.runs, self.broker):
            private_folder(folder)
        return self

    def require(self) -> Home:
        """Return the home if it holds an identity.

        Raises:
            UsageError: `identity`.
        """
        if not is_file(self.owner_public):
            raise UsageError(
                Code.IDENTITY, f"no owner's identity in {self.path}", hint="make one with: glasshouse init"
            )
        return self

    @property
    def owner_public(self) -> Path:
        return self.path / "owner.pub"

    @property
    def owner_private(self) -> Path:
        return self.path / "owner.key"

    @property
    def keys(self) -> Path:
        return self.path / "keys"

    @property
    def owners(self) -> Path:
        return self.path / "owners"

    @property
    def packages(self) -> Path:
        return self.path / "packages"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def broker(self) -> Path:
        return self.path / "broker"
