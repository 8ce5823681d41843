"""`glasshouse bench collectives`: what sealed collectives cost beside plaintext ones."""

from __future__ import annotations

import json
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.bench_options import check_installed, choice, seconds
from glasshouse.cli.options import Json
from glasshouse.cli.output import Output
from glasshouse.errors import Code, ExitCode, UsageError

if TYPE_CHECKING:
    from glasshouse.bench.collectives.measurement import Measurement
    from glasshouse.bench.collectives.plan import Plan

__all__ = ["command"]

_DEFAULT_TIME_S = 600
_MOST_RANKS = 16
_MOST_SEED = 1 << 53
_FILE = "collectives.json"


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="A trial of everything in under a minute; its numbers are no result.")
    ] = False,
    time_: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="About how long all of it may take; 10m by default.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option("--parts", metavar="NAME,...", help="all-reduce, train, replay, start; all of them by default."),
    ] = None,
    ranks: Annotated[str, typer.Option("--ranks", metavar="N,...", help="Numbers of processes.")] = "2,4",
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="SIZE,...", help="Of all-reduced tensors, such as 64K,1M,25M.")
    ] = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="NAME,...", help="Of those that the table of a full run names.")
    ] = None,
    caps: Annotated[
        str | None, typer.Option("--caps", metavar="MIB,...", help="Bucket caps; default is what DDP does by itself.")
    ] = None,
    dtypes: Annotated[
        str, typer.Option("--dtypes", metavar="NAME,...", help="float32, bfloat16, float16, float64; the first leads.")
    ] = "float32,bfloat16",
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=_MOST_SEED, help="The order of the samples is drawn from it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where the files go.")] = None,
    as_json: Json = False,
) -> int:
    check_installed()
    from glasshouse.bench.collectives.report import write
    from glasshouse.bench.collectives.run import measure
    from glasshouse.bench.harness.stop import Stop
    from glasshouse.cli.bench_collectives_view import Silent, View, print_result

    plan = _plan(quick, time_, parts, ranks, sizes, models, caps, dtypes, seed)
    output, folder = Output(as_json), out or Path(f"collectives-{time.strftime('%Y%m%d-%H%M%S')}")
    _prepare(folder)
    with Stop() as stop, stop.handled():
        with Silent() if as_json else View(output.console) as viewer:
            measurement = measure(plan, viewer, stopped=lambda: stop.asked)
        stopped = stop.asked
    text = json.dumps(measurement.to_json())
    (folder / _FILE).write_text(text + "\n")
    report = write(measurement, folder)
    output.result({**json.loads(text), "folder": str(folder), "report": str(report)})
    print_result(output, measurement, folder=folder)
    return _exit(measurement, stopped=stopped)


def _exit(measurement: Measurement, *, stopped: bool) -> int:
    """A missed bar is a failed run, as in the other benchmarks; a quick trial judges nothing."""
    from glasshouse.bench.collectives.measurement import bars

    if stopped:
        return ExitCode.INTERRUPTED
    if measurement.failed is not None:
        return ExitCode.RUN_FAILED
    met = all(bar.met for bar in bars(measurement))
    return ExitCode.DONE if measurement.quick or met else ExitCode.RUN_FAILED


def _prepare(folder: Path) -> None:
    """Make the folder before anybody waits; raises `UsageError` where it holds a measurement or cannot be made."""
    if (folder / _FILE).exists():
        raise UsageError(Code.USAGE, f"{folder} holds a measurement already ({_FILE})", hint="name another with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(Code.USAGE, f"{folder} cannot be made: {error.strerror}") from None


def _plan(
    quick: bool,
    time_: str | None,
    parts: str | None,
    ranks: str,
    sizes: str | None,
    models: str | None,
    caps: str | None,
    dtypes: str,
    seed: int | None,
) -> Plan:
    """Return what was asked for; raises `UsageError` before anything is started."""
    from glasshouse.bench.collectives import plan

    drawn = secrets.randbelow(_MOST_SEED) if seed is None else seed
    wanted = plan.PARTS if parts is None else tuple(choice("--parts", one, plan.PARTS) for one in _words(parts))
    if quick:
        if time_ is not None or sizes is not None or models is not None or caps is not None:
            raise UsageError(Code.USAGE, "--quick says by itself what is measured and for how long")
        return plan.quick(seed=drawn, parts=wanted)
    known = (*plan.TRAINED, *plan.REPLAYS)
    return plan.full(
        time_s=_DEFAULT_TIME_S if time_ is None else seconds("--time", time_),
        seed=drawn,
        parts=wanted,
        ranks=[_number("--ranks", one, 2, _MOST_RANKS) for one in _words(ranks)],
        sizes=plan.SIZES if sizes is None else [_size(one) for one in _words(sizes)],
        models=known if models is None else [choice("--models", one, known) for one in _words(models)],
        caps=plan.CAPS if caps is None else [_cap(one) for one in _words(caps)],
        dtypes=[choice("--dtypes", one, plan.DTYPES) for one in _words(dtypes)],
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _number(option: str, text: str, least: int, most: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
    if not least <= value <= most:
        raise UsageError(Code.USAGE, f"{option} takes numbers from {least} to {most}, not {text[:40]!r}")
    return value


def _cap(text: str) -> int | None:
    return None if text == "default" else _number("--caps", text, 1, 4_096)


def _size(text: str) -> int:
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 0)
    if not factor:
        raise UsageError(Code.USAGE, f"--sizes takes sizes such as 64K or 25M, not {text[:40]!r}")
    return factor * _number("--sizes", text[:-1], 1, 4_096)
