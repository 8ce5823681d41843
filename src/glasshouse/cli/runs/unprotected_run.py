"""The raw leg of `glasshouse run --raw`: labelled as what it is, at its beginning and at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glasshouse.cli.options import OwnerOptions
from glasshouse.cli.show.ending import output_line, work_text
from glasshouse.cli.show.words import RAW
from glasshouse.errors import Code, UsageError
from glasshouse.evidence.results import Work
from glasshouse.jobs.define.raw_job import of_job, of_package, run_raw
from glasshouse.jobs.results.summary import work_facts
from glasshouse.jobs.supervise.run_request import load_job, shape_of


def run_raw_leg(what: Path, ranks: int | None, options: OwnerOptions) -> int:
    """Run a job file or package in the clear, in so many ranks, and print its end; return the exit code."""
    output, home, shape, job = options.output, options.own_home, shape_of(ranks, None), load_job(what)
    if job is not None and shape is not None:
        shape.check(job.workload, job.floor)
    identity = options.unlock()
    output.say(RAW, style="bold red")
    plain = of_package(what, home=home, identity=identity) if job is None else of_job(job)
    if shape is not None and plain.workload != "script":
        raise UsageError(Code.JOB_INVALID, f"the workload {plain.workload!r} runs in one process")

    def progress(message: Mapping[str, Any]) -> None:
        if message.get("type") == "progress" and output.console.is_terminal:
            total = f"/{message['total']}" if message["total"] else ""
            loss = f", loss {float(message['loss']):.4g}" if message["loss"] else ""
            output.say(f"  {message['unit']} {message['done']}{total}{loss}")

    # What the training prints goes to standard error: standard output is one object, or the summary.
    with os.fdopen(os.dup(sys.stderr.fileno()), "wb", buffering=0) as log:
        ended = run_raw(plain, home=home, event=progress, log=log, ranks=None if shape is None else shape.each)
    loss = ended.loss
    work = None if ended.work is None else Work.from_json(ended.work)
    output.result(
        {
            "run_id": ended.run_id,
            "protected": False,
            "label": RAW,
            "outcome": ended.outcome,
            "code": ended.code,
            "assurance": None,
            "workload": plain.workload,
            "work": None if work is None else work_facts(work),
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
    outputs = (output_line(one["name"], one["bytes"], f"{one['sha256'][:16]}…") for one in ended.outputs)
    output.facts(
        {
            "protection": "none; nothing about this run can be verified",
            "work": None if work is None else work_text(work),
            "loss": f"{float(loss['first']):.4g} → {float(loss['final']):.4g}" if loss else None,
            "outputs": "\n".join(outputs) or "none",
            "files": f"{ended.folder} (in the clear)",
        }
    )
    return ended.exit_code
