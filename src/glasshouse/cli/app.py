"""Puts the commands together, and turns errors into words and exit codes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from glasshouse.cli.output import Output, error_object, printable
from glasshouse.errors import Code, ExitCode, GlasshouseError, InternalError, PlatformError, UsageError

__all__ = ["application", "main", "run"]

# Order as people meet them.
_COMMANDS = (
    ("init", "make an owner's identity"),
    ("new", "write a commented job file to begin with"),
    ("schema", "print the JSON Schema of a job file"),
    ("seal", "seal a job into one file"),
    ("inspect", "what a stranger may know of a sealed package"),
    ("offers", "what could be rented now, and for how much"),
    ("run", "run a job on a machine that its owner does not trust"),
    ("attach", "follow a run"),
    ("stop", "stop a run: it zeroizes"),
    ("status", "the runs, or one of them"),
    ("logs", "what the training printed, decrypted"),
    ("fetch", "decrypt a run's outputs"),
    ("verify", "check a receipt, artifact, log or package, offline"),
    ("artifact", "a public account of a run, without names or secrets"),
    ("card", "one page of who vouches for what in a run"),
    ("export", "a run's evidence for other tools: PEM, model_signing, CycloneDX"),
    ("cost", "what a run cost, what of that protection did, and what a step came to"),
    ("revoke", "release a package's key no more"),
    ("sweep", "give back rented machines whose command was killed"),
    ("rm", "remove runs that have ended"),
    ("prune", "remove runs that ended long ago"),
    ("tamper", "tell fourteen attacks to a live broker"),
    ("doctor", "what this machine offers, and what its host could see"),
    ("measure", "what this installation, or a machine's, measures to, part by part"),
)
# What the framework raises after it has printed the help of a group that was named alone; it is known by its name,
# because the framework brings its own copy of the module that it comes from.
_HELP_PRINTED = "NoArgsIsHelpError"
_HELP_NAMES = ["-h", "--help"]
_GROUPS = (
    ("identity", "the owner's identity: show, pem, export, restore, move"),
    ("machine", "machines that you have, reached by ssh: add, list, remove"),
    ("runtime", "what a machine needs that has no Glasshouse: bundle"),
    ("reference", "installations that a job may accept: add, list, remove"),
    ("gate", "gates that stay: add, list, remove"),
    ("owners", "owners whose receipts you recognise: add, list, remove"),
    ("broker", "the gate that releases keys"),
)


def application(wanted: str | None = None) -> typer.Typer:
    """Return the command line; modules of single commands are light, what they call is imported when called.

    Args:
        wanted: the one command that will be called; None for all, also those of other distributions.
    """
    app = typer.Typer(
        name="glasshouse",
        help="Train on machines you do not trust, and show afterwards what happened there.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": _HELP_NAMES},
    )
    app.callback()(_root)
    for name, text in _COMMANDS:
        module = importlib.import_module(f"glasshouse.cli.{name}")
        app.command(name, help=f"{text[0].upper()}{text[1:]}.")(module.command)
    for name, text in _GROUPS:
        group: typer.Typer = importlib.import_module(f"glasshouse.cli.{name}").group
        app.add_typer(group, name=name, help=f"{text[0].upper()}{text[1:]}.")
        _guard(group)
    for name, group in _added(wanted):
        app.add_typer(group, name=name)
        _guard(group)
    _guard(app)
    return app


def _added(wanted: str | None) -> Iterator[tuple[str, typer.Typer]]:
    """Yield groups of commands that other distributions add; none is loaded for a command of our own."""
    ours = {name for name, _ in (*_COMMANDS, *_GROUPS)}
    if wanted in ours:
        return
    from glasshouse.jobs.owner.extensions import COMMANDS, OURS, installed, load

    for name in installed(COMMANDS) if wanted not in OURS else (wanted,):
        if name in ours or wanted not in (None, name):
            continue
        try:
            yield name, load(COMMANDS, name, typer.Typer)
        except UsageError:
            # Its absence from the help is enough, but who calls it must read what it lacks.
            if wanted == name:
                raise


def command_line(arguments: Sequence[str] = ()) -> Any:
    """Return the command line as it is run; the help says of a flag that it takes nothing by saying nothing."""
    wanted = next((one for one in arguments if not one.startswith("-")), None)
    root: Any = typer.main.get_command(application(wanted))
    for command in _commands(root):
        context = typer.Context(command, help_option_names=_HELP_NAMES)
        for parameter in command.get_params(context):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return root


def _commands(command: Any) -> Iterator[Any]:
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from _commands(below)


def main() -> None:
    """The console script."""
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
    _take_keys()
    try:
        result = command_line(arguments).main(args=arguments, prog_name="glasshouse", standalone_mode=False)
        return int(result) if isinstance(result, int) else ExitCode.DONE
    except GlasshouseError as error:
        return _failed(error, as_json)
    except (_InterruptedError, typer.Abort):
        return _failed(UsageError(Code.INTERRUPTED, "interrupted"), as_json)
    except BrokenPipeError:
        # The reader of our output has gone. What was not said must not pass for a good answer.
        return ExitCode.INTERNAL
    except SystemExit as ended:
        # Completion ends so, with what it has printed.
        return ended.code if isinstance(ended.code, int) else ExitCode.INTERNAL
    except Exception as error:
        if type(error).__name__ == _HELP_PRINTED and not as_json:
            return ExitCode.USAGE
        return _failed(_understood(error), as_json)


def _take_keys() -> None:
    """Take the keys of accounts out of the environment: no broker, no ssh and no runtime has any use for one."""
    if any(name.endswith("_API_KEY") for name in os.environ):  # else nothing is loaded for it
        from glasshouse.jobs.places.accounts import take_keys

        take_keys()


class _InterruptedError(Exception):
    """A Ctrl-C that no command took for itself; the framework would swallow it, exit code and words."""


def _guard(app: typer.Typer) -> None:
    for registered in app.registered_commands:
        if registered.callback is not None:
            registered.callback = _guarded(registered.callback)


def _guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            raise _InterruptedError from None

    return call


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
    said: Callable[[], str] | None = getattr(error, "format_message", None)
    if said is not None:
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "glasshouse"
        return UsageError(Code.USAGE, said() + _given(error), hint=f"see: {path} --help")
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        # A file or folder that the owner's machine does not give us, wherever we came upon it, is no defect of ours.
        return UsageError(Code.FILE_MISSING, f"cannot use {os.fsdecode(error.filename)}: {error.strerror.lower()}")
    if isinstance(error, MemoryError):
        return PlatformError(Code.PLATFORM, "there is not enough free memory here to do this")
    # The place, never the values: they may hold what must not be printed.
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"  # noqa: PTH119
    return InternalError(
        Code.INTERNAL, f"a defect in Glasshouse: {type(error).__name__}{place}", hint="please report it with this line"
    )


def _given(error: Exception) -> str:
    """Return the value that the framework's validation refused, where its message leaves it out: no secret is one."""
    validation = error.__cause__ or error.__context__
    problems: Callable[[], list[dict[str, Any]]] | None = getattr(validation, "errors", None)
    value = next((problem.get("input") for problem in problems()), None) if problems is not None else None
    return f", not {value[:40]!r}" if isinstance(value, str) and value[:40] not in str(error) else ""


def _failed(error: GlasshouseError, as_json: bool) -> int:
    with contextlib.suppress(OSError):  # the terminal or pipe is closed: the exit code still says it
        Output(as_json).result(error_object(error))
        if not as_json:
            sys.stderr.write(f"error: {printable(error.message, keep='')} [{error.code.value}]\n")
            if error.hint:
                sys.stderr.write(f"  {printable(error.hint)}\n")
    return ExitCode.INTERRUPTED if error.code is Code.INTERRUPTED else error.exit_code
