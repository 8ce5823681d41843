"""The steps of `glasshouse bench overhead`: what is asked for wrongly is refused before anything is started."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from glasshouse.cli.options import OwnerOptions
from glasshouse.cli.show.output import CommandOutput
from glasshouse.errors import Code, ExitCode, RunError, UsageError
from glasshouse.jobs.define.wanted import parse_s
from glasshouse.jobs.owner.installation import install_command
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse_bench.artifact import Part
from glasshouse_bench.design import Mode, Planted
from glasshouse_bench.harness import subject
from glasshouse_bench.harness.machine import Card
from glasshouse_bench.harness.measure import measure
from glasshouse_bench.harness.planning import Wish, refuse_short
from glasshouse_bench.harness.room import room_for
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.statement import write_statement
from glasshouse_bench.verify import verify_measurement

__all__ = ["close", "maker", "new_folder", "owner", "run", "wish"]

_MODES = ("interleaved", "sequential", "alternating", "null")
_DEVICES = ("auto", "cpu", "cuda")
_PERCENT = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,4})?)\s*%?")
_PLANTED = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,4})?)%(,bunched)?")


def wish(mode: str, length: str, margin: str, planted: str | None) -> Wish:
    """Return what was asked for; raises `UsageError`, also where no job has room in the time."""
    _choice("--mode", mode, _MODES)
    seconds, share = parse_s(length), _PERCENT.fullmatch(margin.strip())
    if seconds is None:
        raise UsageError(Code.USAGE, f"--time takes a time such as 10m or 2h, not {length[:40]!r}")
    if share is None or not float(share[1]):
        raise UsageError(Code.USAGE, f"--margin takes a percentage such as 1%, not {margin[:40]!r}")
    modes = [Mode.INTERLEAVED, Mode.NULL] if mode == "interleaved" else [Mode(mode)]
    asked = Wish(modes=modes, seconds=seconds, margin=float(share[1]) / 100, planted=_planted(planted, modes))
    refuse_short(asked)
    return asked


def maker(workload: str, job: Path | None, model: str | None, device: str | None) -> Callable[[Path], subject.Subject]:
    """Return what makes the measured job in a folder; raises `UsageError`."""
    _choice("--workload", workload, subject.WORKLOADS)
    _choice("--device", device or "auto", _DEVICES)
    if workload != "script" and importlib.util.find_spec("torch") is None:
        raise UsageError(Code.REQUIREMENT_MISSING, f"{workload} needs torch", hint=install_command())
    if job is not None and model is not None:
        raise UsageError(Code.USAGE, "--model is for the built-in job; the model of yours stands in its job file")
    if job is not None:
        mine = subject.owners(job, workload, device=device)
        return lambda _folder: mine
    if workload == "script":
        raise UsageError(Code.USAGE, "the workload script is your own: name its job file with --job")
    return lambda folder: subject.builtin(workload, folder, model=model, device=device or "auto")


def owner(options: OwnerOptions) -> Identity:
    """Return the owner, or one made for this measurement where there is none; raises `UsageError`."""
    if options.home is not None or options.any_home.owner_public.is_file():
        return options.unlock()
    options.output.warn(
        "no owner's identity here: a key made for this measurement signs it, and it cannot be taken up again once it "
        "is interrupted; `glasshouse init` makes a lasting one"
    )
    return Identity.generate()


def new_folder(workload: str) -> Path:
    return Path(f"overhead-{workload}-{time.strftime('%Y%m%d-%H%M%S')}")


def run(
    output: CommandOutput,
    asked: Wish,
    make: Callable[[Path], subject.Subject],
    *,
    folder: Path,
    identity: Identity,
    on_cpu: bool,
) -> int:
    """Measure, print what comes of it, and return the exit code; raises as `measure` and `close`."""
    with Stop() as stop:
        card = None if on_cpu else Card.first()
        parts = measure(asked, make, folder=folder, identity=identity, say=output.say, stop=stop, card=card)
    return close(output, folder, parts, identity, interrupted=stop.asked)


def close(output: CommandOutput, folder: Path, parts: Sequence[Part], identity: Identity, *, interrupted: bool) -> int:
    """Sign what there is, print what came of it, and return the exit code."""
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


def _planted(text: str | None, modes: list[Mode]) -> Planted | None:
    """Return the cost that is added to the second arm of a null measurement, to try the harness itself."""
    if text is None:
        return None
    found = _PLANTED.fullmatch(text)
    if found is None or modes != [Mode.NULL]:
        raise UsageError(Code.USAGE, "--planted takes 2% or 2%,bunched, with --mode null")
    if found[2]:
        return Planted(step_ppm=0, bunched_ns=round(float(found[1]) * 10_000_000))
    return Planted(step_ppm=round(float(found[1]) * 10_000), bunched_ns=0)


def _choice(option: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise UsageError(Code.USAGE, f"{option} is one of {', '.join(options)}, not {value[:40]!r}")
