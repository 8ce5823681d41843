"""Options and arguments that several commands share, and what stands behind them: output, home, identity.

A command has one parameter `options` for `--json`, `--home` and where the passphrase is: flags, by `app.expanded`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glasshouse.cli.show.output import CommandOutput, again
from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.owner.home import Home

if TYPE_CHECKING:  # the ciphers behind it are not loaded for the help
    from glasshouse.jobs.owner.owner_identity import Identity
    from glasshouse.wire.crypto import RecipientKey

_MAX_PASSPHRASE_BYTES = 4096
_NAME_IT = "name a file with --passphrase-file, or a descriptor with --passphrase-fd"


def option(form: str, text: str, **limits: Any) -> Any:
    """Return an option's declaration: its names and what its value is called, as in `-o --out FILE`, and its help."""
    names = [word for word in form.split() if word.startswith("-")]
    return typer.Option(*names, metavar=" ".join(form.split()[len(names) :]) or None, help=text, **limits)


def argument(form: str, text: str, **more: Any) -> Any:
    """Return an argument's declaration: what it is called, and its help."""
    return typer.Argument(metavar=form, help=text, **more)


PassphraseFile = Annotated[
    Path | None, option("--passphrase-file FILE", "Read the passphrase from this file instead of asking.")
]
PassphraseFd = Annotated[int | None, option("--passphrase-fd N", "Read the passphrase from this open descriptor.")]
Force = Annotated[bool, option("--force", "Replace files that are there.")]
Yes = Annotated[bool, option("--yes", "Do not ask.")]
GateOption = Annotated[
    str | None, option("--gate NAME|URL", "A gate that was added by `glasshouse gate`: its name or URL.")
]
Accept = Annotated[
    bool, option("--accept-host-key", "Rent also what does not print its host key; the rental records it.")
]
On = Annotated[str | None, option("--on MACHINE", "Where, as of `glasshouse run`; by default where it was.")]
Detach = Annotated[bool, option("--detach", "Return when it is placed; it goes on by itself.")]
Machine = Annotated[int, option("--machine M", "Of a run on several machines: which, from 0.")]


def _runs_that_begin(incomplete: str) -> list[str]:
    """Return the runs that a shell may complete a name to; a home that cannot be read has none."""
    from glasshouse.jobs.owner.rundir import RunFolder

    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [folder.run_id for folder in RunFolder.all(Home.locate())]
    return [name for name in ("latest", *sorted(names)) if name.startswith(incomplete)]


Run = Annotated[
    str, argument("RUN", "Run id, a unique beginning of one, or `latest`.", autocompletion=_runs_that_begin)
]


@dataclass(frozen=True, kw_only=True)
class JsonOptions:
    """The option of every command, and what it prints with."""

    as_json: Annotated[bool, option("--json", "Print one JSON object and nothing else.")] = False

    @functools.cached_property
    def output(self) -> CommandOutput:
        """The command's output."""
        return CommandOutput(self.as_json)


@dataclass(frozen=True, kw_only=True)
class HomeOptions(JsonOptions):
    """The options of a command that uses the state home."""

    home: Annotated[
        Path | None,
        option(
            "--home DIR", "One folder for keys and runs (or GLASSHOUSE_HOME); else your data folder and ./.glasshouse."
        ),
    ] = None

    @functools.cached_property
    def any_home(self) -> Home:
        """The state home, which need not exist."""
        return Home.locate(self.home)

    @property
    def own_home(self) -> Home:
        """The state home; raises `UsageError` when it holds no identity."""
        return self.any_home.require()

    @property
    def again(self) -> str:
        """What a proposed command repeats to use the same state home."""
        return again(self.home)

    def mention_old(self) -> None:
        """Warn of an identity in the working folder's `.glasshouse`, beside the home's."""
        if (old := self.any_home.old) is not None:
            self.output.warn(
                f"{old} holds an identity too, of an earlier version: --home .glasshouse uses it, "
                "glasshouse identity move brings it into your own data folder if that has none"
            )


@dataclass(frozen=True, kw_only=True)
class OwnerOptions(HomeOptions):
    """The options of a command that uses the owner's private keys."""

    passphrase_fd: PassphraseFd = None
    passphrase_file: PassphraseFile = None

    def passphrase(self) -> str:
        """Return the passphrase; raises as `read_passphrase`."""
        return read_passphrase(self.passphrase_file, self.passphrase_fd)

    def unlock(self) -> Identity:
        """Return the owner's identity; only for an encrypted one is its passphrase read."""
        from glasshouse.jobs.owner.owner_identity import unlock

        return unlock(self.own_home.owner_private, self.passphrase)


def list_and_remove(
    group: typer.Typer,
    kind: str,
    known: Callable[[Home], Mapping[str, Mapping[str, Any]]],
    forget: Callable[[Home, str], Mapping[str, Any]],
    *,
    add: str,
    then: str = "nothing happens to it",
) -> None:
    """Add the two commands to a group.

    Args:
        kind: of what, in the singular.
        known: returns what each name stands for: its JSON members, of which people are shown the first that is there,
            and of a table its names.
        forget: forgets a name, and returns what it stood for.
        add: what to do where nothing has a name yet.
        then: what forgetting one does.
    """

    @group.command("list", help=f"The {kind}s that have a name here.")
    def show(*, options: HomeOptions) -> None:
        output, found = options.output, known(options.any_home)
        output.result({f"{kind}s": [{"name": name, **one} for name, one in found.items()]})
        output.facts({name: _shown(one) for name, one in found.items()})
        if not found:
            output.say(f"No {kind} has a name here: {add}")

    @group.command("remove", help=f"Forget a {kind}; {then}.")
    def remove(name: Annotated[str, argument("NAME", "Its name here.")], *, options: HomeOptions) -> None:
        output, one = options.output, forget(options.any_home, name)
        output.result({"name": name, **one})
        output.say(f"{name} ({_shown(one)}) has no name here any more.")


def _shown(one: Mapping[str, Any]) -> str:
    value = next(value for value in one.values() if value is not None)
    return " and ".join(value) if isinstance(value, dict) else str(value)


def sealing_without_asking(home: Home) -> RecipientKey | None:
    """Return the owner's sealing key, for the names of outputs, if it is here and not encrypted."""
    from glasshouse.jobs.owner.owner_identity import Identity, is_encrypted, read_private

    try:
        data = read_private(home.owner_private)
        return None if is_encrypted(data) else Identity.parse(data, None).sealing
    except GlasshouseError:
        return None


def read_passphrase(
    file: Path | None, descriptor: int | None, *, prompt: str = "Passphrase: ", hint: str = _NAME_IT
) -> str:
    """Return a passphrase from a file, a descriptor or the terminal; never from argv or the environment.

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
        raise UsageError(Code.IDENTITY, "a passphrase is needed and there is no terminal to ask on", hint=hint)
    import getpass

    return getpass.getpass(prompt)


def ask_new_passphrase(
    file: Path | None, descriptor: int | None, *, prompt: str = "New passphrase: ", hint: str = _NAME_IT
) -> str:
    """Return a new passphrase, asked for twice on a terminal; raises `UsageError` for a short one, or two."""
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
