"""The owner's files on their way into a package: found, checked, opened without following a link.

Laws: every file is reached from the job file's folder component by component, with O_NOFOLLOW, so that only regular
files below it enter a package, also when the folder changes while it is sealed; a file that changed since it was listed
is refused. A link, where a job opts in, is resolved once, at listing, and its file reached from the root in that way.
Nothing of a state home enters a package, and no private key of ours under any name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.private import Excluded, holds_keys, is_state, key_kind
from glasshouse.jobs.owner.home import descend, open_regular
from glasshouse.package.layout import MAGIC
from glasshouse.package.paths import check_path
from glasshouse.package.write import Source
from glasshouse.wire import own_state

_MAX_FILES = 65536
# O_PATH where there is one: to pass through a folder one need not be allowed to list it.
_PASS = getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A file as it was when the inputs were listed."""

    folder: Path
    parts: tuple[str, ...]
    identity: tuple[int, ...]

    def open(self) -> BinaryIO:
        where = self.folder.joinpath(*self.parts)
        try:
            parent = _descend(self.folder, self.parts[:-1])
            try:
                stream = os.fdopen(os.open(self.parts[-1], _FILE, dir_fd=parent), "rb")
            finally:
                os.close(parent)
        except OSError as error:
            raise UsageError(Code.SOURCE_CHANGED, f"{where} can no longer be read: {error.strerror}") from None
        if _identity(os.fstat(stream.fileno())) != self.identity:
            stream.close()
            raise UsageError(Code.SOURCE_CHANGED, f"{where} changed while it was being sealed")
        return stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """What a job's inputs are."""

    sources: list[Source]  # each file, in the order of spec/sealed-package.md section 5
    left_out: list[str]  # relative to the job file's folder; a folder ends with a slash


def gather(
    folder: Path, inputs: Mapping[str, str], *, follow_links: bool = False, exclude: Sequence[str] = ()
) -> Gathered:
    """List every file of a job's inputs.

    Args:
        inputs: name in the package → file or folder below `folder`, the job file's; a folder's files keep their names.
        follow_links: whether a link to a regular file stands for that file, wherever it lies.
        exclude: gitignore patterns, from the job file's folder, of what is left out of folders.

    Raises:
        UsageError: `file-missing`; `job-invalid` for a link, a device, a path that leaves the folder, an empty folder,
            two inputs of one name, a private key of ours, or what lies in a state home.
        PackageError: `package-path` for a name that no file in a package can have.
    """
    sources: dict[str, Source] = {}
    walk = _Walk(excluded=Excluded(exclude), left_out=[])
    for name, path in inputs.items():
        parts = PurePosixPath(path).parts
        if path.startswith(("/", "~")) or ".." in parts or "\x00" in path:
            hint = "inputs lie beside the job file or below it; copy or bind-mount what lies elsewhere"
            raise _invalid(name, f" = {path!r} leaves the job file's folder", hint)
        for package_name, found in _files(folder, name, parts, follow_links, walk):
            _refuse_private(name, found)
            if package_name in sources:
                raise UsageError(Code.JOB_INVALID, f"two inputs would both be {package_name!r} in the package")
            if len(sources) >= _MAX_FILES:
                raise _too_many()
            sources[check_path(package_name)] = Source(path=package_name, bytes=found.identity[2], open=found.open)
    return Gathered(
        sources=[sources[name] for name in sorted(sources, key=str.encode)],
        left_out=sorted(dict.fromkeys(walk.left_out)),
    )


def _too_many() -> UsageError:
    return UsageError(
        Code.JOB_INVALID,
        f"the inputs are more than {_MAX_FILES} files",
        hint="leave out what the job does not need: [package] exclude = [...]; or pack many small files as one archive",
    )


def _invalid(name: str, why: str, hint: str = "") -> UsageError:
    return UsageError(Code.JOB_INVALID, f"inputs.{name!r}{why}", hint=hint)


def _files(
    folder: Path, name: str, parts: tuple[str, ...], follow_links: bool, walk: _Walk
) -> Iterator[tuple[str, _Found]]:
    """Yield what one input names: itself, or each file below it in order."""
    where = folder.joinpath(*parts)
    found = _look(folder, parts, name)
    if not stat.S_ISDIR(found.st_mode):
        _refuse_inside_state(name, where.parent.resolve())
        yield name, _file(folder, parts, found, name, follow_links)
        return
    _refuse_inside_state(name, where.resolve())
    paths = sorted(walk.below(name, where, parts))
    for below in paths:
        inner = parts + below
        yield "/".join((name, *below)), _file(folder, inner, _look(folder, inner, name), name, follow_links)
    if not paths:
        but = " but those that are left out" if walk.left_out else ""
        raise UsageError(Code.FILE_MISSING, f"inputs.{name!r}: the folder {where} has no files{but}")


def _file(folder: Path, parts: tuple[str, ...], found: os.stat_result, name: str, follow_links: bool) -> _Found:
    """Return a regular file, or the one that a link leads to where links are followed."""
    if stat.S_ISREG(found.st_mode):
        return _Found(folder=folder, parts=parts, identity=_identity(found))
    where = folder.joinpath(*parts)
    if not stat.S_ISLNK(found.st_mode):
        raise _invalid(name, f": {where} is a device or a pipe; only files and folders")
    if not follow_links:
        hint = "to pack the files that links lead to, say so in the job file: [package] follow_links = true"
        raise _invalid(name, f": {where} is a link; only files and folders", hint)
    try:
        target = where.resolve(strict=True)
    except (OSError, RuntimeError):  # a ring of links is the latter until Python 3.13
        raise UsageError(Code.FILE_MISSING, f"inputs.{name!r}: the link {where} leads to nothing") from None
    _refuse_inside_state(name, target.parent, f"the link {where}")
    led_to = _look(Path(target.anchor), target.parts[1:], name)
    if not stat.S_ISREG(led_to.st_mode):
        raise _invalid(name, f": the link {where} leads to {target}, which is no regular file")
    return _Found(folder=Path(target.anchor), parts=target.parts[1:], identity=_identity(led_to))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    """Goes through folders, and notes what it leaves out."""

    excluded: Excluded
    left_out: list[str]

    def below(self, name: str, root: Path, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return every path under a folder that is to be packed and is not a folder itself; links are not followed."""
        found: list[tuple[str, ...]] = []
        folders: list[tuple[str, ...]] = [()]
        while folders:
            inner = folders.pop()
            with os.scandir(root.joinpath(*inner)) as entries:
                for entry in entries:
                    here = (*inner, entry.name)
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if self._leaves_out(name, entry, is_folder, "/".join((*parts, *here)), "/".join(here)):
                        self.left_out.append("/".join((*parts, *here, *([""] if is_folder else []))))
                    elif is_folder:
                        folders.append(here)
                    elif len(found) >= _MAX_FILES:
                        raise _too_many()
                    else:
                        found.append(here)
        return found

    def _leaves_out(self, name: str, entry: os.DirEntry[str], is_folder: bool, from_job: str, from_input: str) -> bool:
        # A link to a folder counts as one here: `.venv` is often one, and would else be refused.
        slash = "/" if is_folder or entry.is_symlink() else ""
        asked = self.excluded.asked(from_job + slash)
        if asked is True:
            return True
        if (is_folder and _is_runs_alone(name, Path(entry.path))) or (slash and entry.name == own_state.PROJECT):
            return True  # no pattern takes state back in
        return asked is None and (self.excluded.usual(from_input + slash) or (not slash and _is_package(entry)))


def _is_package(entry: os.DirEntry[str]) -> bool:
    """Return whether a file is what `seal` writes, which no package contains by default."""
    if not entry.name.endswith(".sealed"):
        return False
    try:
        with open_regular(Path(entry.path)) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _is_runs_alone(name: str, folder: Path) -> bool:
    """Return whether a folder keeps runs alone; raises `UsageError` for one that keeps keys."""
    if not os.access(folder, os.R_OK | os.X_OK):
        hint = "make it readable, or leave it out: [package] exclude = [...]"
        raise _invalid(name, f": the folder {folder} cannot be read", hint)
    if not is_state(folder):
        return False
    if holds_keys(folder):
        raise _invalid(
            name,
            f" contains a state home with private keys: {folder}",
            "name the folders that the job needs instead; keys that an earlier version left in a project move to "
            "your own data folder with: glasshouse identity move",
        )
    return True


def _refuse_inside_state(name: str, path: Path, what: str = "") -> None:
    """Refuse what lies in a state home, or is one, with all links resolved."""
    for folder in (path, *path.parents):
        if is_state(folder):
            raise _invalid(
                name,
                f": {f'{what} leads to what' if what else path} lies in a state home, {folder}",
                "keys and runs never go into a package; copy what the job needs to a folder of its own",
            )


def _refuse_private(name: str, found: _Found) -> None:
    """Refuse a file that is a private key of ours, whatever its name and wherever it lies."""
    with found.open() as stream:
        kind = key_kind(stream.read(own_state.LOOKED_AT_BYTES))
    if kind is not None:
        hint = "a private key never goes into a package; take it out of the inputs"
        raise _invalid(name, f": {found.folder.joinpath(*found.parts)} holds {kind}", hint)


def _look(folder: Path, parts: tuple[str, ...], name: str) -> os.stat_result:
    where = folder.joinpath(*parts)
    try:
        parent = _descend(folder, parts[:-1])
        try:
            if not parts:
                return os.fstat(parent)
            return os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(parent)
    except FileNotFoundError:
        raise UsageError(Code.FILE_MISSING, f"inputs.{name!r}: {where} does not exist") from None
    except OSError as error:
        why = f": {where} cannot be reached without following a link ({error.strerror})"
        raise _invalid(name, why) from None


def _descend(folder: Path, parts: tuple[str, ...]) -> int:
    """Open a folder component by component; the caller closes it."""
    # The job file's own folder may be reached through links: the owner named it.
    return descend(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), parts, _PASS)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    # The time of the last change of anything: the writer can set the other one back.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
