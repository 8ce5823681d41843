"""The state home: where an owner's identity, keys and embedded broker live, and where runs are kept.

```
the user's data folder  0700, shared by all of the owner's projects
  owner.pub             public: signing and sealing key, one fingerprint
  owner.key             private, 0600; encrypted when the owner gave a passphrase
  model-signing.json    the key of exported model signatures, sealed to the owner; made on first use
  keys/ID.json          package keys, sealed to the owner
  owners/NAME.pub       owners of others that are known here
  packages/ID.json      labels and deployment settings of packages
  machines.json         machines that have a name: how to reach them
  gates.json            gates: where they are, what of them is pinned, where their audit log ended
  accounts/PROVIDER     the key of an account at a provider of machines, 0600, where its owner puts it there
  rentals/RUN/          machines that were rented; it goes with its run, once they are shown to be gone
  references/NAME.json  installations that jobs may name: the digests of their files
  broker/               the embedded broker's data, its sockets and its lock
  projects/HASH.json    folders in which runs were made: the broker serves the runs of all of them
.glasshouse/            0700, in the working folder: no key ever lies beside the data that a job packs
  runs/ID/              one folder per run
  raw/ID/               one per unprotected run
```

A home that was named (`--home`, GLASSHOUSE_HOME) holds all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.files import is_file, is_there, private_folder, read_state, write_private, write_state

PROJECT = ".glasshouse"
_OWN_NAMES = frozenset(
    {
        *("accounts", "broker", "gates.json", "keys", "machines.json", "model-signing.json", "owner.key", "owner.pub"),
        *("owners", "packages", "projects", "raw", "references", "rentals", "runs"),
    }
)


class Home:
    """The paths below one state home, `path`, and of the runs below `project`, where they lie apart; both absolute."""

    def __init__(self, *, path: Path, project: Path | None = None) -> None:
        self.path, self.project = path, project
        self.owner_public, self.owner_private = path / "owner.pub", path / "owner.key"
        self.keys, self.model_signing = path / "keys", path / "model-signing.json"
        self.owners = path / "owners"
        self.packages = path / "packages"
        self.machines, self.gates = path / "machines.json", path / "gates.json"
        self.accounts, self.rentals = path / "accounts", path / "rentals"
        self.references = path / "references"
        self.broker = path / "broker"
        self.runs, self.raw = (project or path) / "runs", (project or path) / "raw"

    @classmethod
    def locate(cls, named: Path | None = None) -> Home:
        """Return the home that was named, else `GLASSHOUSE_HOME`, else the user's with runs in the working folder."""
        chosen = named or os.environ.get("GLASSHOUSE_HOME")
        if chosen:
            return cls(path=_absolute(chosen))
        from platformdirs import user_data_path

        return cls(path=_absolute(user_data_path("glasshouse", appauthor=False)), project=_absolute(PROJECT))

    def make(self) -> Home:
        """Make the home's folders; raises `UsageError`."""
        state_folder(self.path)
        for folder in (self.keys, self.packages, self.broker):
            private_folder(folder)
        if self.project is None:  # a project gets its folder with its first run
            private_folder(self.runs)
        return self

    def require(self) -> Home:
        """Return the home if it holds an identity; raises `UsageError`: `identity`."""
        if is_file(self.owner_public):
            return self
        self.refuse_old()
        raise UsageError(Code.IDENTITY, f"no owner's identity in {self.path}", hint="make one with: glasshouse init")

    @property
    def old(self) -> Path | None:
        """The working folder's `.glasshouse` where it holds an identity, as it did in earlier versions."""
        return self.project if self.project is not None and is_there(self.project / "owner.key") else None

    def refuse_old(self) -> None:
        """Raise `UsageError` when the identity still lies where earlier versions kept it, and the home has none."""
        if self.old is not None and not is_file(self.owner_public):
            raise UsageError(
                Code.IDENTITY,
                f"no owner's identity in {self.path}; there is one in {self.old}, where earlier versions kept it",
                hint="if it is yours, move it with: glasshouse identity move (or use it there: --home .glasshouse)",
            )

    def note_project(self) -> None:
        """Make the folder of the runs, and remember it: they share the broker; raises `UsageError`."""
        state_folder(self.project or self.path)
        if self.project is None:
            return
        name = hashlib.sha256(os.fsencode(self.project)).hexdigest()[:32]
        note = private_folder(self.path / "projects") / f"{name}.json"
        if not is_there(note):
            write_state(note, {"path": str(self.project)})

    def everywhere(self) -> Iterator[Home]:
        """Yield this home, and the same with the runs of each other project."""
        yield self
        with contextlib.suppress(OSError):
            for note in sorted((self.path / "projects").glob("*.json")):
                with contextlib.suppress(UsageError, KeyError, TypeError):  # a damaged note names no project
                    project = Path(read_state(note, what="project record")["path"])
                    if project != self.project:
                        yield Home(path=self.path, project=project)


def state_folder(path: Path) -> Path:
    """Make a private folder for state that no repository takes in: with a `.gitignore` of `*`; raises `UsageError`."""
    private_folder(path)
    ignore = path / ".gitignore"
    # A folder of the user's own that was named as home (`--home .`) keeps being seen by git.
    if not is_there(ignore) and (path.name == PROJECT or {entry.name for entry in path.iterdir()} <= _OWN_NAMES):
        with contextlib.suppress(UsageError):  # another process was faster
            write_private(ignore, b"*\n", replace=False)
    return path


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
