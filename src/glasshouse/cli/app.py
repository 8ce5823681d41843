"""The command line: which commands there are, and which text and exit code an error becomes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from glasshouse.cli.show.output import CommandOutput, error_object, printable
from glasshouse.errors import Code, ExitCode, GlasshouseError, InternalError, PlatformError, UsageError

# In the order of use: a command, its folder, its help. The module has a function `command`, or a `group` of them.
_COMMANDS = {
    "init": ("setup", "Make an owner's identity."),
    "new": ("runs", "Write a commented job file to begin with."),
    "schema": ("setup", "Print the JSON Schema of a job file."),
    "seal": ("runs", "Seal a job into one file."),
    "inspect": ("runs", "What a stranger may know of a sealed package."),
    "offers": ("runs", "What could be rented now, and for how much."),
    "run": ("runs", "Run a job on a machine that its owner does not trust."),
    "attach": ("runs", "Follow a run."),
    "stop": ("runs", "Stop a run: it zeroizes."),
    "resume": ("runs", "Go on with a run at another machine, from its last checkpoint."),
    "migrate": ("runs", "Move a run to another machine: it saves, wipes itself, and goes on there."),
    "rewind": ("runs", "Go on with a run from an older checkpoint than its last."),
    "status": ("runs", "The runs, or one of them."),
    "logs": ("runs", "What the training printed, decrypted."),
    "fetch": ("results", "Decrypt a run's outputs."),
    "verify": ("results", "Check a receipt, artifact, log or package, offline."),
    "artifact": ("results", "A public account of a run, without names or secrets."),
    "card": ("results", "One page of who vouches for what in a run."),
    "export": ("results", "A run's evidence for other tools: PEM, model_signing, CycloneDX."),
    "cost": ("results", "What a run cost, what of that protection did, and what a step came to."),
    "revoke": ("results", "Release a package's key no more."),
    "sweep": ("results", "Give back rented machines whose command was killed."),
    "rm": ("results", "Remove runs that have ended."),
    "prune": ("results", "Remove runs that ended long ago."),
    "tamper": ("results", "Play 37 attacks against a live broker and its store."),
    "doctor": ("setup", "What this machine offers, and what its host could see."),
    "measure": ("setup", "What this installation, or a machine's, measures to, part by part."),
    "identity": ("setup", "The owner's identity: show, pem, export, restore, move."),
    "machine": ("setup", "Machines that you have, reached by ssh: add, list, remove."),
    "runtime": ("setup", "What a machine needs that has no Glasshouse: bundle."),
    "reference": ("setup", "Installations that a job may accept: add, list, remove."),
    "collateral": ("setup", "What vendors publish to check hardware evidence by: fetch, show, check."),
    "gate": ("setup", "Gates that stay: add, list, remove."),
    "owners": ("setup", "Owners whose receipts you recognise: add, list, remove."),
    "broker": ("setup", "The gate that releases keys."),
}
_HELP_NAMES = ["-h", "--help"]
# What the framework raises once it has printed the help of a group that was called without a command; its class is
# known by name alone, because the framework has its own copy of the module that defines it.
_HELP_PRINTED = "NoArgsIsHelpError"


class _Commands(TyperGroup):
    """The commands, each imported when it is called: the list of all needs none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, also of the commands of other distributions that can be loaded."""
        from glasshouse.jobs.owner.installation import COMMANDS, installed

        for name in installed(COMMANDS):
            with contextlib.suppress(UsageError):  # its absence from the help is enough
                self.load(name)
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.load(args[0])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # that no command handled; the framework would exit without a message
            raise typer.Abort from None

    def load(self, name: str) -> None:
        """Import a command; a name that is none stays unknown. Raises `UsageError` where another's cannot be loaded."""
        holder, group = typer.Typer(), None
        if name in _COMMANDS:
            wing, text = _COMMANDS[name]
            module = importlib.import_module(f"glasshouse.cli.{wing}.{name}_command")
            group = getattr(module, "group", None)
            if group is None:
                holder.command(name, help=text)(expanded(module.command))
            else:
                holder.add_typer(group, name=name, help=text)
        else:
            from glasshouse.jobs.owner.installation import COMMANDS, OURS, installed, load

            if name not in OURS and name not in installed(COMMANDS):
                return
            group = load(COMMANDS, name, typer.Typer)
            holder.add_typer(group, name=name)
        for one in group.registered_commands if group else ():
            one.callback = expanded(one.callback)
        self.commands[name] = typer.main.get_group(holder).commands[name]
        _leave_flags_empty(self.commands[name])


def _leave_flags_empty(command: Any) -> None:
    """Show no type after an option that takes no value."""
    for parameter in command.get_params(typer.Context(command, help_option_names=_HELP_NAMES)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for below in getattr(command, "commands", {}).values():
        _leave_flags_empty(below)


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command as the framework takes it: with a parameter for each field of its `options`."""
    hints = get_type_hints(command, include_extras=True)
    kind = hints.get("options")
    if kind is None:
        return command

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        shared = {one.name: given.pop(one.name) for one in fields(kind)}
        return command(**given, options=kind(**shared))

    own = [one for one in inspect.signature(command).parameters.values() if one.name != "options"]
    of_kind = get_type_hints(kind, include_extras=True)
    # The help lists the common ones last.
    shared = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=of_kind[one.name])
        for one in reversed(fields(kind))
    ]
    whole = [*(one.replace(annotation=hints[one.name]) for one in own), *shared]
    call.__signature__ = inspect.Signature(whole)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in whole}
    return call


def command_line() -> Any:
    """Return the command line, of whose commands none is imported yet."""
    app = typer.Typer(
        cls=_Commands,
        name="glasshouse",
        help="Train on machines you do not trust, and show afterwards what happened there.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": _HELP_NAMES},
    )
    app.callback()(_root)
    for name, (_, text) in _COMMANDS.items():
        app.command(name, help=text)(lambda: None)  # stands in until it is loaded
    root: Any = typer.main.get_command(app)
    _leave_flags_empty(root)
    return root


def main() -> None:
    """Run the command line of this process, and exit."""
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # The pipe or terminal that it went to is closed; the interpreter must not complain when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; nothing is raised."""
    as_json = "--json" in arguments
    # The keys of accounts leave the environment: no broker, no ssh and no runtime has any use for one.
    if any(name.endswith("_API_KEY") for name in os.environ):  # else nothing is loaded for it
        from glasshouse.jobs.places.accounts import take_keys

        take_keys()
    try:
        result = command_line().main(args=arguments, prog_name="glasshouse", standalone_mode=False)
        return int(result) if isinstance(result, int) else ExitCode.DONE
    except GlasshouseError as error:
        return _failed(error, as_json)
    except typer.Abort:
        return _failed(UsageError(Code.INTERRUPTED, "interrupted"), as_json)
    except BrokenPipeError:
        # The reader of our output has gone. What it did not read must not pass for a good answer.
        return ExitCode.INTERNAL
    except SystemExit as ended:
        # Completion ends so, with what it has printed.
        return ended.code if isinstance(ended.code, int) else ExitCode.INTERNAL
    except Exception as error:
        if type(error).__name__ == _HELP_PRINTED and not as_json:
            return ExitCode.USAGE
        return _failed(_understood(error), as_json)


def _version(wanted: bool) -> None:
    if wanted:
        from glasshouse import __version__

        sys.stdout.write(f"glasshouse {__version__}\n")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _understood(error: Exception) -> GlasshouseError:
    """Return a wrong command line as a usage error, and anything else as a defect of ours."""
    described: Callable[[], str] | None = getattr(error, "format_message", None)
    if described is not None:
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "glasshouse"
        return UsageError(Code.USAGE, described() + _refused_value(error), hint=f"see: {path} --help")
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        # A file or folder that the owner's machine does not give us, wherever we came upon it, is no defect of ours.
        return UsageError(Code.FILE_MISSING, f"cannot use {os.fsdecode(error.filename)}: {error.strerror.lower()}")
    if isinstance(error, MemoryError):
        return PlatformError(Code.PLATFORM, "there is not enough free memory here to do this")
    # The place, never the values: they may hold what must not be printed.
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return InternalError(
        Code.INTERNAL, f"a defect in Glasshouse: {type(error).__name__}{place}", hint="please report it with this line"
    )


def _refused_value(error: Exception) -> str:
    """Return the value that the framework's validation refused, where its message leaves it out: no secret is one."""
    validation = error.__cause__ or error.__context__
    problems: Callable[[], list[dict[str, Any]]] | None = getattr(validation, "errors", None)
    value = next((problem.get("input") for problem in problems()), None) if problems is not None else None
    return f", not {value[:40]!r}" if isinstance(value, str) and value[:40] not in str(error) else ""


def _failed(error: GlasshouseError, as_json: bool) -> int:
    with contextlib.suppress(OSError):  # the terminal or pipe is closed: the exit code is still right
        CommandOutput(as_json).result(error_object(error))
        if not as_json:
            sys.stderr.write(f"error: {printable(error.message, keep='')} [{error.code.value}]\n")
            if error.hint:
                sys.stderr.write(f"  {printable(error.hint)}\n")
    return ExitCode.INTERRUPTED if error.code is Code.INTERRUPTED else error.exit_code
