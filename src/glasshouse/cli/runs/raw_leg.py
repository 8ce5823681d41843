"""The raw leg of `glasshouse run --raw`: labelled as what it is, at its beginning and at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glasshouse.cli.show.output import Output, printable
from glasshouse.cli.show.words import RAW, bytes_text
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.durations import format_s

if TYPE_CHECKING:
    from glasshouse.jobs.define.jobfile import Job
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.owner.owner_identity import Identity
    from glasshouse.jobs.supervise.prepare import Ranks

__all__ = ["run_raw_leg"]


def run_raw_leg(
    what: Path, job: Job | None, output: Output, place: Home, identity: Identity, *, ranks: Ranks | None
) -> int:
    """Run a job in the clear and say what came of it; return the exit code."""
    from glasshouse.jobs.define.raw_job import of_job, of_package, run_raw

    output.say(RAW, style="bold red")
    plain = of_package(what, home=place, identity=identity) if job is None else of_job(job)
    if ranks is not None and plain.workload != "script":
        raise UsageError(Code.JOB_INVALID, f"the workload {plain.workload!r} runs in one process")
    # What the training prints goes to standard error: standard output is one object, or the summary.
    with os.fdopen(os.dup(sys.stderr.fileno()), "wb", buffering=0) as log:
        ended = run_raw(
            plain, home=place, event=_progress(output), log=log, ranks=None if ranks is None else ranks.each
        )
    work, loss = ended.work, ended.loss
    seconds = work["elapsed_us"] / 1e6 if work else 0.0
    rate = round(work["done"] / seconds, 4) if work and work["done"] and seconds else None
    output.result(
        {
            "run_id": ended.run_id,
            "protected": False,
            "label": RAW,
            "outcome": ended.outcome,
            "code": ended.code,
            "assurance": None,
            "workload": plain.workload,
            "work": None
            if work is None
            else {
                "unit": work["unit"],
                "done": work["done"],
                "elapsed_s": seconds,
                "rate_per_s": rate,
                "stop_reason": work["stop_reason"],
            },
            "loss": None if loss is None else {"first": float(loss["first"]), "final": float(loss["final"])},
            "trainable": ended.trainable,
            "outputs": list(ended.outputs),
            "training_imports_s": ended.imports_s,
            "total_s": round(ended.total_s, 4),
            "files": str(ended.folder),
        }
    )
    output.say("")
    output.say(f"Raw run {ended.outcome}" + (f" ({ended.code})" if ended.code else ""), style="bold")
    output.facts(
        {
            "protection": "none; nothing about this run can be verified",
            "work": _work(work, seconds) if work else None,
            "loss": f"{float(loss['first']):.4g} → {float(loss['final']):.4g}" if loss else None,
            "outputs": "\n".join(
                f"{printable(one['name'], keep='')}  {bytes_text(one['bytes'])}  sha256 {one['sha256'][:16]}…"
                for one in ended.outputs
            )
            or "none",
            "files": f"{ended.folder} (in the clear)",
        }
    )
    return ended.exit_code


def _work(work: Mapping[str, Any], seconds: float) -> str:
    rate = f" ({work['done'] / seconds:.3g}/s)" if seconds else ""
    done = f"{work['done']} {work['unit']}s in " if work["done"] else ""  # a script need not report any
    return f"{done}{format_s(seconds)}{rate if done else ''}; ended by: {work['stop_reason']}"


def _progress(output: Output) -> Any:
    def event(message: Mapping[str, Any]) -> None:
        if message.get("type") == "progress" and output.console.is_terminal:
            total = f"/{message['total']}" if message["total"] else ""
            loss = f", loss {float(message['loss']):.4g}" if message["loss"] else ""
            output.say(f"  {message['unit']} {message['done']}{total}{loss}")

    return event
