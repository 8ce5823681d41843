"""`glasshouse bench overhead`: what protection costs while it trains."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, PassphraseFd, PassphraseFile, unlock
from glasshouse.cli.output import Output, printable
from glasshouse.errors import Code, ExitCode, RunError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from glasshouse.jobs.identity import Identity
    from glasshouse_bench.artifact import Attempt, Part
    from glasshouse_bench.design import Design, Mode, Planted
    from glasshouse_bench.harness.planning import Wish
    from glasshouse_bench.harness.subject import Subject

__all__ = ["overhead"]

_MODES = ("interleaved", "sequential", "alternating", "null")
_DEVICES = ("auto", "cpu", "cuda")
_PERCENT = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,4})?)\s*%?")
_PLANTED = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,4})?)%(,bunched)?")


def overhead(
    workload: Annotated[str, typer.Option("--workload", metavar="KIND", help="mlp, lora, or your own script.")],
    job: Annotated[
        Path | None, typer.Option("--job", metavar="JOB.toml", help="Your own job instead of the built-in one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="For lora: config:qwen2-tiny, config:qwen2.5-0.5b or config:qwen2.5-7b."),
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="interleaved (with a null beside it), sequential, alternating, or null.")
    ] = "interleaved",
    time_: Annotated[
        str,
        typer.Option("--time", metavar="TIME", help="For the sessions; a null beside them takes half of it more."),
    ] = "10m",
    margin: Annotated[
        str, typer.Option("--margin", metavar="PERCENT", help="Differences below it count as equivalent.")
    ] = "1%",
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            help="Where the files go; a measurement of yours that lies there goes on by its design.",
        ),
    ] = None,
    planted: Annotated[str | None, typer.Option("--planted", hidden=True)] = None,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse_bench.harness.machine import Card
    from glasshouse_bench.harness.measure import measure
    from glasshouse_bench.harness.planning import refuse_short
    from glasshouse_bench.harness.stop import Stop

    wish = _wish(mode, time_, margin, planted)
    refuse_short(wish)
    make = _maker(workload, job, model, device)
    output = Output(as_json)
    folder = out or Path(f"overhead-{workload}-{time.strftime('%Y%m%d-%H%M%S')}")
    identity = _owner(home, passphrase_file, passphrase_fd, output)
    card = None if device == "cpu" else Card.first()
    with Stop() as stop, stop.handled():
        viewer = _View(output.console, silent=as_json)
        parts = measure(wish, make, folder=folder, identity=identity, viewer=viewer, stop=stop, card=card)
        interrupted = stop.asked
    return _close(output, folder, parts, identity, interrupted=interrupted)


def _wish(mode: str, time_: str, margin: str, planted: str | None) -> Wish:
    """Return what was asked for; raises `UsageError` before anything is started."""
    from glasshouse.jobs.durations import parse_s
    from glasshouse_bench.design import Mode
    from glasshouse_bench.harness.planning import Wish

    _choice("--mode", mode, _MODES)
    seconds, share = parse_s(time_), _PERCENT.fullmatch(margin.strip())
    if seconds is None:
        raise UsageError(Code.USAGE, f"--time takes a time such as 10m or 2h, not {time_[:40]!r}")
    if share is None or not float(share[1]):
        raise UsageError(Code.USAGE, f"--margin takes a percentage such as 1%, not {margin[:40]!r}")
    modes = [Mode.INTERLEAVED, Mode.NULL] if mode == "interleaved" else [Mode(mode)]
    return Wish(modes=modes, seconds=seconds, margin=float(share[1]) / 100, planted=_planted(planted, modes))


def _planted(text: str | None, modes: list[Mode]) -> Planted | None:
    """Return the cost that is added to the second arm of a null measurement, to try the harness itself."""
    from glasshouse_bench.design import Mode, Planted

    if text is None:
        return None
    found = _PLANTED.fullmatch(text)
    if found is None or modes != [Mode.NULL]:
        raise UsageError(Code.USAGE, "--planted takes 2% or 2%,bunched, with --mode null")
    if found[2]:
        return Planted(step_ppm=0, bunched_ns=round(float(found[1]) * 10_000_000))
    return Planted(step_ppm=round(float(found[1]) * 10_000), bunched_ns=0)


def _maker(workload: str, job: Path | None, model: str | None, device: str | None) -> Callable[[Path], Subject]:
    """Return what makes the measured job in a folder; raises `UsageError` before anything is started."""
    from glasshouse.jobs.installation import install_command
    from glasshouse_bench.harness import subject

    _choice("--workload", workload, subject.WORKLOADS)
    _choice("--device", device or "auto", _DEVICES)
    if workload != "script" and importlib.util.find_spec("torch") is None:
        raise UsageError(Code.REQUIREMENT_MISSING, f"{workload} needs torch", hint=install_command("train"))
    if job is not None and model is not None:
        raise UsageError(Code.USAGE, "--model is for the built-in job; the model of yours stands in its job file")
    if job is not None:
        mine = subject.owners(job, workload, device=device)
        return lambda _folder: mine
    if workload == "script":
        raise UsageError(Code.USAGE, "the workload script is your own: name its job file with --job")
    return lambda folder: subject.builtin(workload, folder, model=model, device=device or "auto")


def _owner(home: Path | None, passphrase_file: Path | None, passphrase_fd: int | None, output: Output) -> Identity:
    """Return the owner, or one made for this measurement where there is none; raises `UsageError`."""
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.identity import Identity

    place = Home.locate(home)
    if home is not None or place.owner_public.is_file():
        return unlock(place.require(), passphrase_file, passphrase_fd)
    output.warn(
        "no owner's identity here: a key made for this measurement signs it, and it cannot be taken up again once it "
        "is interrupted; `glasshouse init` makes a lasting one"
    )
    return Identity.generate()


def _choice(option: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise UsageError(Code.USAGE, f"{option} is one of {', '.join(options)}, not {value[:40]!r}")


class _View:
    """A line for what begins, and one for each session that has ended."""

    def __init__(self, console: Console, *, silent: bool) -> None:
        self._console, self._silent = console, silent
        self._began = time.monotonic()
        self._expected_s = 0.0

    def doing(self, what: str) -> None:
        self._say(what)

    def planned(self, designs: Mapping[Mode, Design], *, seconds: float) -> None:
        from glasshouse.jobs.durations import format_s

        self._began, self._expected_s = time.monotonic(), seconds
        for mode, design in designs.items():
            slots = f"{design.steps} + {design.uncounted} steps in slots of {design.slot_ns / 1e6:.0f} ms"
            how = "whole processes" if mode.whole else slots
            self._say(f"{mode.value}: {design.sessions} sessions of {design.length_ns / 1e9:.0f} s, {how}")
            self._say(f"  design {design.sha256.hex()}")
        self._say(f"about {format_s(seconds)} from now; Ctrl-C keeps what is complete")
        self._say("the same command goes on with it, with -o and its folder")

    def session(self, part: Part, note: Attempt, reason: str) -> None:
        from glasshouse.jobs.durations import format_s

        left_s = max(0.0, self._expected_s - (time.monotonic() - self._began))
        how = f"raw {note.raw.ended.value}, {'second raw' if part.design.mode.value == 'null' else 'protected'} "
        how += note.protected.ended.value
        self._say(f"  {how}; about {format_s(left_s)} left" + (f"; {printable(reason)[:300]}" if reason else ""))

    def _say(self, text: str) -> None:
        if not self._silent:
            self._console.print(text, markup=False, highlight=False)


def _close(output: Output, folder: Path, parts: list[Part], identity: Identity, *, interrupted: bool) -> int:
    """Sign what there is, print what came of it, and return the exit code."""
    from glasshouse_bench.harness.room import room_for
    from glasshouse_bench.statement import write_statement
    from glasshouse_bench.verify import verify_measurement

    if not any(part.attempted for part in parts):
        raise RunError(Code.INTERRUPTED, "the measurement was interrupted before its first session ended")
    with room_for(folder):
        write_statement(folder, owner=identity.signing, created_us=time.time_ns() // 1000)
    verdict = verify_measurement(folder, owner=identity.public)
    output.result({**verdict.to_json(), "folder": str(folder), "interrupted": interrupted})
    output.say(verdict.sentence)
    output.facts({link.name: link.says for link in verdict.links})
    output.say(f"glasshouse bench report {folder}    glasshouse verify {folder}")
    return ExitCode.INTERRUPTED if interrupted else verdict.exit_code
