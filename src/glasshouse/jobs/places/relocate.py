"""Moves what an earlier version kept in a project's `.glasshouse` to the user's own home; runs stay where they are.

Laws: everything is copied and synced before anything is removed, and the public half of the identity is copied last and
removed last, so a crash at any moment leaves one home that is whole, and the same command again finishes the move.
Nothing that is at the new place is replaced, and nothing is removed whose copy is not there byte for byte.
"""

from __future__ import annotations

import contextlib
import filecmp
import shlex
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import (
    Home,
    is_file,
    is_there,
    open_regular,
    private_folder,
    state_folder,
    write_private,
)
from glasshouse.jobs.owner.owner_identity import read_private, read_public
from glasshouse.jobs.places.rental_journal import rentals


@dataclass(frozen=True, kw_only=True, slots=True)
class Relocated:
    """A home that was moved."""

    fingerprint: str  # of the identity
    files: int  # how many are no longer at the old place
    kept: tuple[Path, ...]  # files that stay there, because the new place has others of their names


def relocate(source: Path, target: Home) -> Relocated:
    """Move identity, key store, package records, keys of accounts at providers, and the broker's data to the new home.

    Raises:
        UsageError: `identity` when there is none, others could read it, or the target has another; `usage` while a
            run, a rental or a broker needs either home, or when a file of another home is in the way.
    """
    old = Home(path=source)
    if old.path == target.path:
        raise UsageError(Code.USAGE, f"{source} is that home already", hint="leave --home and GLASSHOUSE_HOME out")
    if not is_there(old.owner_public):
        raise UsageError(Code.IDENTITY, f"no identity to move in {source}")
    owner = read_public(old.owner_public)
    settled = is_file(target.owner_public)
    if settled and read_public(target.owner_public) != owner:
        raise UsageError(
            Code.IDENTITY,
            f"{target.path} has another identity already",
            hint=f"use this one where it is: --home {shlex.quote(str(source))}",
        )
    if not settled or is_there(old.owner_private):
        read_private(old.owner_private)  # one that came with a repository is open to others: it is not the user's
    for journal in rentals(old):
        if not journal.load().over:  # a sweep of the new home would not find it
            raise UsageError(
                Code.USAGE,
                f"a machine that was rented from {source} is not shown to be gone",
                hint=f"give it back first: glasshouse sweep --home {shlex.quote(str(source))}",
            )
    target.make()
    with Embedded(old).held_off(), Embedded(target).held_off():
        names = _names(old)
        copied = _copy(old, target, names, settled=settled)
        for name in copied:
            (old.path / name).unlink(missing_ok=True)
    state_folder(old.path)
    for folder in (old.keys, old.packages, old.accounts, _data(old)):
        with contextlib.suppress(OSError):  # what stays keeps its folder
            folder.rmdir()
    return Relocated(
        fingerprint=owner.fingerprint,
        files=len(copied),
        kept=tuple(old.path / name for name in names if name not in copied),
    )


def _names(home: Home) -> list[Path]:
    """Return what is moved, relative to the home, in the order in which it is copied and removed."""
    found: list[Path] = []
    for folder in (home.keys, home.packages, home.accounts, _data(home)):
        if folder.is_symlink():  # what lies behind it is not the home's to take away
            raise UsageError(Code.USAGE, f"{folder} is a link; a home holds none")
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_symlink() or not path.is_file():
                raise UsageError(Code.USAGE, f"{path} is a link or no file; a home holds neither")
            found.append(path)
    found += [path for path in (home.owner_private, home.owner_public) if is_there(path)]
    return [path.relative_to(home.path) for path in found]


def _copy(old: Home, target: Home, names: list[Path], *, settled: bool) -> list[Path]:
    """Copy what the target lacks and return what it then has byte for byte; raises `UsageError`."""
    if not settled:  # else an earlier move had copied everything, and the target may have been used since
        # Looked for in all of them before the first is copied: a move that cannot succeed does not begin.
        for name in names:
            if is_there(target.path / name) and not _same(old, target, name):
                raise UsageError(Code.USAGE, f"{target.path / name} is of another home, and in the way")
    for name in names:
        # A journal of the old database beside a newer one would damage it: these are copied together or not at all.
        if not is_there(target.path / name) and not (settled and name.is_relative_to("broker")):
            private_folder((target.path / name).parent)
            with open_regular(old.path / name) as source:
                write_private(target.path / name, partial(shutil.copyfileobj, source), replace=False)
    return [name for name in names if _same(old, target, name)]


def _same(old: Home, target: Home, name: Path) -> bool:
    copy = target.path / name
    return is_file(copy) and filecmp.cmp(old.path / name, copy, shallow=False)


def _data(home: Home) -> Path:
    return home.broker / "data"
