"""`glasshouse fetch RUN -o DIR`: decrypts the outputs that the run's verified receipt names.

Sealed files that the run's folder lacks come from the gate that stored them, if there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from glasshouse.cli.options import Force, Machine, OwnerOptions, Run, option
from glasshouse.cli.show.ending import output_line
from glasshouse.cli.show.output import printable, verdict_words
from glasshouse.cli.show.steps import StepPrinter
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.fetching import fetch_run


def command(
    run: Run,
    out: Annotated[Path, option("-o --out DIR", "Where to put them.")],
    force: Force = False,
    hidden: Annotated[bool, option("--hidden", "Also outputs with a name like .ssh/x or .envrc.")] = False,
    from_gate: Annotated[
        bool, option("--from-gate", "Wait no more for the machine: take what the run's gate stored.")
    ] = False,
    machine: Machine = 0,
    *,
    options: OwnerOptions,
) -> None:
    """Decrypt a run's outputs into a folder, and list them."""
    output, home = options.output, options.own_home
    fetched = fetch_run(
        RunFolder.find(home, run),
        out,
        home=home,
        unlock=options.unlock,
        listener=StepPrinter(output),
        replace=force,
        hidden=hidden,
        machine=machine,
        from_gate=from_gate,
    )
    output.result(
        {
            "run_id": fetched.run_id,
            "folder": str(out),
            "assurance": fetched.assurance,
            "verdict": fetched.verdict,
            "outputs": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "path": None if one.path is None else str(one.path),
                    "sha256": one.sha256.hex(),
                    "bytes": one.plain_bytes,
                }
                for one in fetched.outputs
            ],
        }
    )
    if not fetched.outputs:
        output.say("The run has no outputs.")
    for one in fetched.outputs:
        if one.path is not None:
            output.say(output_line(str(one.path), one.plain_bytes, one.sha256.hex()))
    if left_out := [printable(one.name, keep="") for one in fetched.outputs if one.path is None]:
        output.warn(
            f"not written, because a part of the name begins with a dot: {', '.join(left_out)}; "
            "look at the names, then fetch them with --hidden"
        )
    output.facts({"receipt": verdict_words(fetched.verdict, fetched.assurance)})
