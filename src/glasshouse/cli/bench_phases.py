"""`glasshouse bench phases`: where a training step's time goes, raw against protected, and what limits its speed."""

from __future__ import annotations

import math
import secrets
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glasshouse.cli.bench_options import check_installed, maker, owner, seconds, seed_of
from glasshouse.cli.options import HomeOption, Json, PassphraseFd, PassphraseFile
from glasshouse.cli.output import Output
from glasshouse.cli.words import bytes_text
from glasshouse.errors import Code, ExitCode

if TYPE_CHECKING:
    from rich.table import Table

    from glasshouse.bench.harness.phases import PhaseRun
    from glasshouse.bench.harness.phases_alone import PhasesAlone
    from glasshouse.bench.overhead.phases import ArmPhases, Phases
    from glasshouse.jobs.identity import Identity, OwnerPublic

__all__ = ["check", "command", "print_phases"]

_NO = "not measured"
_NAMES = {
    "gradients": "gradients' exchange",
    "checkpoint": "checkpoint, handed over to be sealed",
}
# Where decryption is: the built-in workloads have read everything when their first step begins.
_DATA = "what a step reads is decrypted within it; mlp and lora read their inputs before the first step"
_BOUND = {
    "no-device": "the work runs on the CPU",
    "host-waits": "the host waits for the GPU",
    "device-waits": "the GPU waits for the host",
    "not-observed": "no step before a stamped slice could be probed",
}
_CHECKPOINTS = {
    "none-made": "none made: this job makes none",
    "none-in-a-slice": "made, but too seldom for a slice to hold one",
}


def command(
    workload: Annotated[str, typer.Option("--workload", metavar="KIND", help="mlp, lora, or your own script.")],
    job: Annotated[
        Path | None, typer.Option("--job", metavar="JOB.toml", help="Your own job instead of the built-in one.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="For lora: config:qwen2-tiny, config:qwen2.5-0.5b or config:qwen2.5-7b."),
    ] = None,
    blocks: Annotated[
        int, typer.Option("--blocks", min=1, max=1000, help="Each is four slices of about half a second.")
    ] = 6,
    warmup: Annotated[str, typer.Option("--warmup", metavar="TIME", help="The least warm-up.")] = "6s",
    seed: Annotated[
        str | None, typer.Option("--seed", metavar="HEX", help="32 bytes; the order of the slices is drawn from them.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Keep slices, numbers, statement and report here.")
    ] = None,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    check_installed()
    make = maker(workload, job, model, device)
    drawn = secrets.token_bytes(32) if seed is None else seed_of(seed)
    warmup_s = seconds("--warmup", warmup)
    output = Output(as_json)

    from glasshouse.bench.harness.phases import PhaseWish
    from glasshouse.bench.harness.phases_alone import phases_alone
    from glasshouse.bench.harness.stop import Stop
    from glasshouse.bench.report import write as write_report
    from glasshouse.jobs.identity import Identity

    # What is not kept is not signed: then nobody is asked for a passphrase.
    identity = Identity.generate() if out is None else owner(home, passphrase_file, passphrase_fd, output)
    with Stop() as stop, stop.handled():
        found = phases_alone(
            PhaseWish(seed=drawn, blocks=blocks, warmup_s=warmup_s),
            make,
            folder=out,
            identity=identity,
            stop=stop,
            watch=lambda what: output.say(what, style="dim"),
            write_report=write_report,
        )
    return _close(output, found, out, identity)


def _close(output: Output, found: PhasesAlone, out: Path | None, identity: Identity) -> int:
    run = found.run
    output.result(
        {
            "folder": None if out is None or run is None else str(out),
            "phases": None if run is None else run.phases.to_json() | _beside(run),
            "report": None if found.report is None else str(found.report),
            "system": dict(found.facts.system),
            "took_s": round(found.took_s, 1),
            "workload": dict(found.facts.workload),
        }
    )
    if run is None:
        output.say("Stopped before the first block was complete: there is nothing to show.", style="bold yellow")
        return ExitCode.INTERRUPTED
    print_phases(output, run)
    if found.report is not None:
        output.say("")
        output.facts({"report": found.report, **check(found.report.parent, identity.public)})
    return ExitCode.INTERRUPTED if run.ended is Code.INTERRUPTED else ExitCode.DONE


def check(folder: Path, owner: OwnerPublic) -> dict[str, object]:
    """Return how to check a measurement: the key that lies beside it proves nothing to who does not know it."""
    return {
        "check it": shlex.join(["glasshouse", "verify", str(folder), "--owner", str(folder / "owner.pub")]),
        "signed by": f"{owner.fingerprint}; a stranger needs this fingerprint from you by another way",
    }


def _beside(run: PhaseRun) -> dict[str, Any]:
    """Return what the slices themselves do not say."""
    return {
        "beside_cpu_share": {arm.value: share for arm, share in run.beside.items()},
        "checkpoints": run.checkpoints,
        "ended_by": None if run.ended is None else run.ended.value,
        "hooks_share": run.hooks,
    }


def print_phases(output: Output, run: PhaseRun) -> None:
    """Print the phases of a step, raw against protected, for people."""
    if output.as_json:
        return
    output.console.print(_table(run.phases))
    output.say("")
    output.console.print(_resources(run))
    output.say("")
    output.facts(
        {
            "limited by": _bound(run.phases),
            "data": _DATA,
            "checkpoint": _CHECKPOINTS.get(run.checkpoints),
            "inside hooks": f"{100 * run.hooks:.4f} % of the protected worker's time, in channel and inputs",
            "note": "medians of a few slices: they show where the time goes, not what protection costs",
        }
    )


def _table(phases: Phases) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("phase")
    for name in ("raw", "share", "protected", "share"):
        table.add_column(name, justify="right")
    names = sorted({name for arm in phases.arms.values() for name in arm.phases_ns}, key=_place)
    for name in names:
        cells = [_part(arm, arm.phases_ns.get(name, 0.0)) for arm in _arms(phases)]
        table.add_row(_NAMES.get(name, name), *cells[0], *cells[1])
    cells = [_part(arm, arm.residual_ns) for arm in _arms(phases)]
    table.add_row("residual (no stamp covers it)", *cells[0], *cells[1])
    table.add_row("step with stamps", *(cell for arm in _arms(phases) for cell in (_time(arm.stamped_step_ns), "")))
    table.add_row("step without", *(cell for arm in _arms(phases) for cell in (_time(arm.step_ns), "")))
    return table


def _resources(run: PhaseRun) -> Table:
    from rich.table import Table

    from glasshouse.bench.overhead.design import Arm

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("raw", "protected"):
        table.add_column(name, justify="right")
    arms = _arms(run.phases)
    table.add_row("steps per second", *(f"{arm.steps_per_s:,.4g}" for arm in arms))
    table.add_row("what the stamps change", *map(_stamps, arms))
    table.add_row(
        "CPU of the worker, cores", *(_NO if arm.cpu_share is None else f"{arm.cpu_share:.2f}" for arm in arms)
    )
    table.add_row(
        "CPU of its other processes", *(f"{run.beside[arm]:.4f}" if arm in run.beside else _NO for arm in Arm)
    )
    table.add_row("memory of the worker", *(_size(arm.rss_bytes) for arm in arms))
    none = "no GPU" if run.phases.reason == "no-device" else _NO
    table.add_row("GPU memory", *(none if arm.device_bytes is None else _size(arm.device_bytes) for arm in arms))
    energies = [arm.energy_mj for arm in arms]
    table.add_row("GPU energy per step", *(none if energy is None else f"{energy:,.3g} mJ" for energy in energies))
    return table


def _arms(phases: Phases) -> list[ArmPhases]:
    """Return raw and protected: a whole block has a stamped slice of either."""
    from glasshouse.bench.overhead.design import Arm

    return [phases.arms[arm] for arm in Arm]


def _place(name: str) -> tuple[int, str]:
    from glasshouse.wire.pacing import PHASES

    return (PHASES.index(name) if name in PHASES else len(PHASES), name)


def _part(arm: ArmPhases, spent_ns: float) -> tuple[str, str]:
    return _time(spent_ns), f"{100 * spent_ns / arm.stamped_step_ns:.1f} %"


def _time(spent_ns: float | None) -> str:
    if spent_ns is None:
        return _NO
    return f"{spent_ns / 1000:,.1f} µs"


def _stamps(arm: ArmPhases) -> str:
    if arm.perturbation is None:
        return _NO
    found, ends = f"{100 * math.expm1(arm.perturbation):+.2f} %", arm.perturbation_interval
    if ends is None:
        return f"{found} (one block, no interval)"
    return f"{found} ({100 * math.expm1(ends.low):+.2f} % to {100 * math.expm1(ends.high):+.2f} %)"


def _size(count: int | None) -> str:
    return _NO if count is None else bytes_text(count)


def _bound(phases: Phases) -> str:
    word = {"host": "the host", "gpu": "the GPU", "unknown": "nobody can tell"}[phases.bound.value]
    share = "" if phases.waiting is None else f", {100 * phases.waiting:.1f} % of a step"
    return f"{word}: {_BOUND[phases.reason]}{share}"
