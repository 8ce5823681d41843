"""`glasshouse fetch RUN -o DIR`: decrypts the outputs that the run's verified receipt names.

Sealed files that the run's folder lacks come from the gate that stored them, if there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import (
    Force,
    HomeOption,
    Json,
    Machine,
    PassphraseFd,
    PassphraseFile,
    Run,
    locate,
    unlock,
)
from glasshouse.cli.show.output import Output, printable
from glasshouse.cli.show.words import bytes_text, verdict_words

__all__ = ["command"]


def command(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to put them.")],
    force: Force = False,
    hidden: Annotated[bool, typer.Option("--hidden", help="Also outputs with a name like .ssh/x or .envrc.")] = False,
    from_gate: Annotated[
        bool, typer.Option("--from-gate", help="Wait no more for the machine: take what the run's gate stored.")
    ] = False,
    machine: Machine = 0,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.cli.show.steps import Shown
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.results.fetching import fetch_run

    output, place = Output(as_json), locate(home)
    fetched = fetch_run(
        RunFolder.find(place, run),
        out,
        home=place,
        unlock=lambda: unlock(place, passphrase_file, passphrase_fd),
        listener=Shown(output),
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
    left_out = [printable(one.name, keep="") for one in fetched.outputs if one.path is None]
    for one in fetched.outputs:
        if one.path is not None:
            path = printable(str(one.path), keep="")
            output.say(f"{path}  {bytes_text(one.plain_bytes)}  sha256 {one.sha256.hex()}")
    if left_out:
        output.warn(
            f"not written, because a part of the name begins with a dot: {', '.join(left_out)}; "
            "look at the names, then fetch them with --hidden"
        )
    output.facts({"receipt": verdict_words(fetched.verdict, fetched.assurance)})
