"""Options and arguments that several commands share, and the owner's identity behind them."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.errors import Code, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from glasshouse.cli.show.output import Output
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.owner_identity import Identity

__all__ = [
    "Force",
    "GateOption",
    "HomeOption",
    "Json",
    "Machine",
    "PassphraseFd",
    "PassphraseFile",
    "Run",
    "Yes",
    "again",
    "ask_new_passphrase",
    "locate",
    "mention_old",
    "passphrase_from",
    "read_passphrase",
    "unlock",
]

_MAX_PASSPHRASE_BYTES = 4096

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="One folder for keys and runs (or GLASSHOUSE_HOME); else your data folder and ./.glasshouse.",
    ),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="Read the passphrase from this file instead of asking."),
]
PassphraseFd = Annotated[
    int | None,
    typer.Option("--passphrase-fd", metavar="N", help="Read the passphrase from this open descriptor."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
GateOption = Annotated[
    str | None,
    typer.Option("--gate", metavar="NAME|URL", help="A gate that was added by `glasshouse gate`: its name or URL."),
]
Machine = Annotated[int, typer.Option("--machine", metavar="M", help="Of a run on several machines: which, from 0.")]


def _runs_that_begin(incomplete: str) -> list[str]:
    """Return the runs that a shell may complete a name to; a home that cannot be read has none."""
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.rundir import RunFolder

    try:
        names = [folder.run_id for folder in RunFolder.all(Home.locate())]
    except OSError:
        names = []
    return [name for name in ("latest", *sorted(names)) if name.startswith(incomplete)]


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run id, a unique beginning of one, or `latest`.", autocompletion=_runs_that_begin
    ),
]


def locate(home: Path | None) -> Home:
    """Return the state home; raises `UsageError` when it holds no identity."""
    from glasshouse.jobs.owner.home import Home

    return Home.locate(home).require()


def mention_old(output: Output, place: Home) -> None:
    """Say that the working folder's `.glasshouse` holds an identity of its own, beside the home's."""
    if place.old is not None:
        output.warn(
            f"{place.old} holds an identity too, of an earlier version: --home .glasshouse uses it, "
            "glasshouse identity move brings it into your own data folder if that has none"
        )


def again(home: Path | None) -> str:
    """Return what a command that we propose must repeat to meet the same state home: ` --home DIR`, or nothing."""
    return "" if home is None else f" --home {shlex.quote(str(home))}"


def passphrase_from(file: Path | None, descriptor: int | None) -> Callable[[], str]:
    """Return what reads the passphrase, as `read_passphrase` does, once it is needed."""
    return lambda: read_passphrase(file, descriptor)


def unlock(home: Home, passphrase_file: Path | None, passphrase_fd: int | None) -> Identity:
    """Return the owner's identity, asking for its passphrase only where it has one; raises as `identity.unlock`."""
    from glasshouse.jobs.owner.owner_identity import unlock as unlocked

    return unlocked(home.owner_private, passphrase_from(passphrase_file, passphrase_fd))


def read_passphrase(
    file: Path | None,
    descriptor: int | None,
    *,
    prompt: str = "Passphrase: ",
    hint: str = "name a file with --passphrase-file, or a descriptor with --passphrase-fd",
) -> str:
    """Return a passphrase from a file, a descriptor or the terminal; never from argv or the environment.

    Args:
        file, descriptor: where it stands; None to ask.
        prompt: what the terminal is asked with.
        hint: what to do where there is no terminal.

    Raises:
        UsageError: `identity` or `file-missing`.
    """
    if file is not None and descriptor is not None:
        raise UsageError(Code.USAGE, "name either --passphrase-file or --passphrase-fd")
    if descriptor is not None:
        return _from_descriptor(descriptor, f"descriptor {descriptor}")
    if file is not None:
        try:
            opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(Code.FILE_MISSING, f"cannot read the passphrase file {file}: {error.strerror}") from None
        found = os.fstat(opened)
        if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
            os.close(opened)
            raise UsageError(Code.IDENTITY, f"others may read the passphrase file {file}", hint=f"chmod 600 {file}")
        return _from_descriptor(opened, str(file))
    if not sys.stdin.isatty():
        raise UsageError(
            Code.IDENTITY,
            "a passphrase is needed and there is no terminal to ask on",
            hint=hint,
        )
    import getpass

    return getpass.getpass(prompt)


def ask_new_passphrase(
    file: Path | None,
    descriptor: int | None,
    *,
    prompt: str = "New passphrase: ",
    hint: str = "name a file with --passphrase-file, or a descriptor with --passphrase-fd",
) -> str:
    """Return a new passphrase; on a terminal it is asked for twice.

    Raises:
        UsageError: `identity` when it is too short or the two differ.
    """
    from glasshouse.jobs.owner.owner_identity import MIN_PASSPHRASE_CHARS

    first = read_passphrase(file, descriptor, prompt=prompt, hint=hint)
    if len(first) < MIN_PASSPHRASE_CHARS:
        raise UsageError(Code.IDENTITY, f"a passphrase has at least {MIN_PASSPHRASE_CHARS} characters")
    if file is None and descriptor is None and read_passphrase(None, None, prompt="The same again: ") != first:
        raise UsageError(Code.IDENTITY, "the two passphrases differ")
    return first


def _from_descriptor(descriptor: int, what: str) -> str:
    try:
        with os.fdopen(descriptor, "rb") as source:
            data = source.read(_MAX_PASSPHRASE_BYTES + 1)
        text = data.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError):
        raise UsageError(Code.FILE_MISSING, f"cannot read a passphrase from {what}") from None
    if not text or len(data) > _MAX_PASSPHRASE_BYTES or "\n" in text:
        raise UsageError(Code.IDENTITY, f"{what} does not hold one line with a passphrase")
    return text
