"""`glasshouse new WORKLOAD`: a job file that seals and runs as it is, with every key explained."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import Force, JsonOptions, argument, option
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.jobschema import template
from glasshouse.jobs.owner.home import is_there, write_private
from glasshouse.wire.policy import SCRIPT, WORKLOADS
from glasshouse.workloads.job_keys import invalid
from glasshouse.workloads.registry import MODULES


def command(
    workload: Annotated[str, argument(f"[{'|'.join(WORKLOADS)}]", "What to train.")] = SCRIPT,
    out: Annotated[Path | None, option("-o --out FILE", "The job file; by default WORKLOAD.toml.")] = None,
    force: Force = False,
    *,
    options: JsonOptions,
) -> None:
    """Write a job file, and examples of the inputs that it names and that are not there."""
    if workload not in MODULES:
        raise invalid("the workload", f"one of {', '.join(MODULES)}", workload)
    made, target = template(workload), out or Path(f"{workload}.toml")
    if is_there(target) and not force:
        raise UsageError(Code.USAGE, f"{target} exists already", hint="--force replaces it")
    write_private(target, made.job.encode(), replace=force)
    # Files that are there are the owner's: the job begins with them.
    written = {name: text for name, text in made.files.items() if not is_there(target.parent / name)}
    for name, text in written.items():
        write_private(target.parent / name, text.encode(), replace=False)
    output = options.output
    output.result({"job": str(target), "written": sorted(written), "kept": sorted(set(made.files) - set(written))})
    output.say(f"Wrote {target}.", style="bold green")
    inputs = (f"{name} ({'an example' if name in written else 'yours'})" for name in made.files)
    output.facts({"inputs": ", ".join(inputs), "next": f"glasshouse run {shlex.quote(str(target))}"})
