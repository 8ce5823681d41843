"""The state home: where an owner's identity, keys, broker and runs are kept, in files for their owner alone.

Law: a path that `write_private` wrote shows either the old content or the new one, with mode
0600, at every moment and after a crash; a failure leaves nothing under the final name and no temporary file.

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
  collateral.json       the collateral pack: what vendors publish to check hardware evidence by, fetched last
  packs/DIGEST.json     the last collateral packs that gates were given, for results that name them
  broker/               the embedded broker's data, its store of checkpoints, its sockets and its lock
  projects/HASH.json    folders in which runs were made: the broker serves the runs of all of them
.glasshouse/            0700, in the working folder: no key ever lies beside the data that a job packs
  runs/ID/              one folder per run
  raw/ID/               one per unprotected run
```

A home that was named (`--home`, GLASSHOUSE_HOME) holds all of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from glasshouse.errors import Code, UsageError
from glasshouse.wire.own_state import PROJECT

MAX_STATE_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A launch file's URL holds no spaces, and a Unix socket's name no more than about a hundred bytes.
_SHORT_PLAIN = re.compile(r"[\x21-\x7e]{1,80}")
# `Path.is_file` and its like raise for a name that is too long, or behind a closed folder; these return False.
is_there, is_file, is_folder = os.path.lexists, os.path.isfile, os.path.isdir
_OWN_NAMES = frozenset(
    {
        *("accounts", "broker", "collateral.json", "gates.json", "keys", "machines.json", "model-signing.json"),
        *("owner.key", "owner.pub", "owners", "packages", "packs", "projects", "raw", "references", "rentals", "runs"),
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
        self.collateral, self.packs = path / "collateral.json", path / "packs"
        self.broker = path / "broker"
        self.store = self.broker / "store"
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


def private_folder(path: Path, *, close: bool = True) -> Path:
    """Make a folder (and its parents) that only its owner may enter; `close` one that exists to others too; return it.

    Raises:
        UsageError: `disk-full`, or `usage` for something else of that name, or another user's folder.
    """
    try:
        for folder in reversed((path, *path.parents)):
            # One by one: `parents` would make those with the mode that the umask leaves, open to others.
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        if error.errno in _FULL:
            raise _unwritable(path, error) from None
        raise UsageError(Code.USAGE, f"cannot make the folder {path}: {_reason(error)}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(Code.USAGE, f"{path} is a link or no folder; it must be a folder of its own")
    if found.st_uid != os.geteuid():
        raise UsageError(Code.USAGE, f"{path} belongs to another user")
    if close and found.st_mode & 0o077:
        path.chmod(0o700)
    return path


def write_private(path: Path, content: bytes | Callable[[BinaryIO], None], *, replace: bool = True) -> None:
    """Write bytes, or what a function writes to a seekable file, with mode 0600 in one step; raises `UsageError`."""
    # Nothing of the final name: 64 characters of it can be 256 bytes, more than a name may have.
    temporary = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        # O_EXCL: never write through a file or link that another process placed under this name.
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with os.fdopen(descriptor, "w+b") as out:
            if callable(content):
                content(out)
            else:
                out.write(content)
            out.flush()
            os.fsync(out.fileno())
        _put(temporary, path, replace)
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        temporary.unlink(missing_ok=True)


def _put(temporary: Path, path: Path, replace: bool) -> None:
    if replace:
        temporary.replace(path)
        return
    try:
        # A hard link fails when the name exists: no window between looking and renaming.
        path.hardlink_to(temporary)
    except OSError as error:
        if is_there(path):
            raise UsageError(Code.USAGE, f"{path} exists already", hint="--force replaces it") from None
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        temporary.rename(path)


def read_bounded(path: Path, *, max_bytes: int = MAX_STATE_BYTES, what: str = "file", private: bool = False) -> bytes:
    """Return a regular file's bytes; a `private` one may not be open to others; `what` names its kind in messages.

    Raises:
        UsageError: `file-missing` where it is missing, not regular or unreadable; `too-large`; or `identity` where
            others may open it.
    """
    try:
        # Asked of what was opened: the name may be exchanged between a look and the opening.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise UsageError(Code.FILE_MISSING, f"the {what} {path} is not a regular file")
        with os.fdopen(descriptor, "rb") as source:
            if private and mode & 0o077:
                raise UsageError(
                    Code.IDENTITY,
                    f"others may open the {what} {path}: its mode is {stat.S_IMODE(mode):04o}",
                    hint=f"chmod 600 {shlex.quote(str(path))}",
                )
            data = source.read(max_bytes + 1)
    except OSError as error:
        raise UsageError(Code.FILE_MISSING, f"cannot read the {what} {path}: {_reason(error)}") from None
    if len(data) > max_bytes:
        raise UsageError(Code.TOO_LARGE, f"the {what} {path} is longer than {max_bytes} bytes")
    return data


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file that came from a rented machine; raises `OSError` for a link, a pipe or anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def locked(path: Path, *, file: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, or of a `file`, which is made; raises `UsageError` where it cannot be opened."""
    # A network's file system locks no file for writers that is open for reading.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW if file else os.O_RDONLY | os.O_DIRECTORY
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(Code.USAGE, f"{path} cannot be opened: {_reason(error)}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def descend(folder: int, names: Iterable[str], flags: int) -> int:
    """Open a folder below an open one, which is closed, name by name without following a link; raises `OSError`."""
    for name in names:
        try:
            below = os.open(name, flags | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def write_state(path: Path, value: Mapping[str, Any]) -> None:
    """Write a plain JSON state file, for us alone."""
    write_private(path, (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode())


def read_state(path: Path, *, what: str) -> dict[str, Any]:
    """Return the object that `write_state` wrote; raises `UsageError`: `file-missing`, or `usage` when damaged."""
    try:
        value = json.loads(read_bounded(path, what=what))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(Code.USAGE, f"the {what} {path} is damaged")
    return value


def _unwritable(path: Path, error: OSError) -> UsageError:
    if error.errno in _FULL:
        why = f"no room to write {path}; nothing was left under that name"
        return UsageError(Code.DISK_FULL, why, hint="free some space")
    return UsageError(Code.USAGE, f"cannot write {path}: {_reason(error)}")


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def socket_folder(home: Home) -> Path:
    """Return a folder of ours whose name a socket's address can hold."""
    if _SHORT_PLAIN.fullmatch(str(home.broker)):
        return home.broker
    name = hashlib.sha256(os.fsencode(home.path)).hexdigest()[:16]
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return private_folder(base / f"glasshouse-{os.geteuid()}-{name}")
