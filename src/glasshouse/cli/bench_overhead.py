"""`glasshouse bench overhead`: what protection costs here, with an interval, a null result and raw slices."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.bench_options import DEVICES, check_installed, choice, maker, owner, ppm, seconds, seed_of
from glasshouse.cli.options import HomeOption, Json, PassphraseFd, PassphraseFile
from glasshouse.cli.output import Output
from glasshouse.errors import Code, ExitCode, UsageError

if TYPE_CHECKING:
    from glasshouse.bench.harness.measure import Measured
    from glasshouse.bench.harness.plan import Wish
    from glasshouse.jobs.identity import OwnerPublic

__all__ = ["command"]

_DEFAULT_TIME_S = 600
_MODES = ("interleaved", "sequential", "null", "all")
_ORDERS = ("alternating", "raw-first", "protected-first")


def command(
    workload: Annotated[str, typer.Option("--workload", metavar="KIND", help="mlp, lora, or your own script.")],
    job: Annotated[
        Path | None, typer.Option("--job", metavar="JOB.toml", help="Your own job instead of the built-in one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="For lora: config:qwen2-tiny, config:qwen2.5-0.5b or config:qwen2.5-7b."),
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="interleaved (with its null), sequential, null, or all.")
    ] = "interleaved",
    time_: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="About how long all of it may take; 10m by default.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option("--sessions", min=1, max=4096, help="Process pairs, instead of a time.")
    ] = None,
    blocks: Annotated[
        int | None, typer.Option("--blocks", min=1, max=1 << 20, help="Measured blocks in a session.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Sequential legs end after so many steps, not after a time.")
    ] = None,
    warmup: Annotated[str, typer.Option("--warmup", metavar="TIME", help="The least warm-up of a session.")] = "30s",
    order: Annotated[
        str, typer.Option("--order", help="Which process starts first: alternating, raw-first, protected-first.")
    ] = "alternating",
    seed: Annotated[
        str | None, typer.Option("--seed", metavar="HEX", help="32 bytes; the schedule is drawn from them.")
    ] = None,
    margin: Annotated[
        str | None, typer.Option("--margin", metavar="PERCENT", help="Differences below it count as equivalent.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where the files go.")] = None,
    with_phases: Annotated[
        bool, typer.Option("--phases", help="Measure where a step's time goes as well, in about half a minute.")
    ] = False,
    planted: Annotated[str | None, typer.Option("--planted", hidden=True)] = None,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    check_installed()
    wish = _wish(mode, time_, sessions, blocks, steps, warmup, order, seed, margin)
    choice("--device", device or "auto", DEVICES)
    planted_ppm = 0 if planted is None else ppm("--planted", planted)
    output, folder = Output(as_json), out or Path(f"overhead-{workload}-{time.strftime('%Y%m%d-%H%M%S')}")

    from glasshouse.bench.harness.measure import measure
    from glasshouse.bench.harness.phases import PhaseWish
    from glasshouse.bench.harness.stop import Stop
    from glasshouse.bench.report import write as write_report
    from glasshouse.cli.bench_overhead_view import Silent, View

    identity = owner(home, passphrase_file, passphrase_fd, output)
    viewer = Silent() if as_json else View(output.console)
    with Stop() as stop, stop.handled(), viewer:
        measured = measure(
            wish,
            maker(workload, job, model, device),
            folder=folder,
            identity=identity,
            viewer=viewer,
            stop=stop,
            planted_ppm=planted_ppm,
            phases=PhaseWish(seed=wish.seed) if with_phases else None,
            write_report=write_report,
        )
    return _close(output, measured, identity.public)


def _wish(
    mode: str,
    time_: str | None,
    sessions: int | None,
    blocks: int | None,
    steps: int | None,
    warmup: str,
    order: str,
    seed: str | None,
    margin: str | None,
) -> Wish:
    """Return what was asked for; raises `UsageError` before anything is started."""
    from glasshouse.bench.harness.plan import Wish
    from glasshouse.bench.overhead.design import LaunchOrder

    if time_ is not None and sessions is not None:
        raise UsageError(Code.USAGE, "--time and --sessions do not go together: either says how much is measured")
    if steps is not None and mode not in ("sequential", "all"):
        raise UsageError(Code.USAGE, "--steps is for sequential legs; slices are calibrated")
    time_s = None if sessions is not None else _DEFAULT_TIME_S if time_ is None else seconds("--time", time_)
    return Wish(
        mode=choice("--mode", mode, _MODES),
        seed=secrets.token_bytes(32) if seed is None else seed_of(seed),
        time_s=time_s,
        sessions=sessions,
        blocks=blocks,
        warmup_s=seconds("--warmup", warmup),
        order=LaunchOrder(choice("--order", order, _ORDERS)),
        margin_ppm=None if margin is None else ppm("--margin", margin, least=1),
        steps=steps,
    )


def _close(output: Output, measured: Measured, owner: OwnerPublic) -> int:
    """Print what came of it; return the exit code."""
    from glasshouse.cli.bench_overhead_view import print_result

    measurement = measured.measurement
    output.result(
        {
            "ended_by": None if measured.ended is None else measured.ended.value,
            "folder": str(measured.folder),
            "parts": {part.mode.value: part.to_json() for part in measurement.parts},
            "phases": None if measurement.phases is None else measurement.phases.to_json(),
            "planted_ppm": measurement.planted_ppm,
            "report": None if measured.report is None else str(measured.report),
            "system": dict(measurement.system),
            "took_s": round(measured.took_s, 1),
            "workload": dict(measurement.workload),
        }
    )
    print_result(output, measured, owner=owner)
    if measured.ended is Code.INTERRUPTED:
        return ExitCode.INTERRUPTED
    whole = all(part.analysis.attempts.included for part in measurement.parts)
    whole = whole and not measured.phases_problem
    return ExitCode.DONE if measured.ended is None and whole else ExitCode.RUN_FAILED
