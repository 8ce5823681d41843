"""`glasshouse fetch RUN -o DIR`: decrypts the outputs that the run's verified receipt names."""

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
    of_machine,
    unlock,
)
from glasshouse.cli.output import Output, printable
from glasshouse.cli.words import bytes_text, verdict_words

__all__ = ["command"]


def command(
    run: Run,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to put them.")],
    force: Force = False,
    hidden: Annotated[bool, typer.Option("--hidden", help="Also outputs with a name like .ssh/x or .envrc.")] = False,
    machine: Machine = 0,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> None:
    from glasshouse.jobs.collect import fetch, require_receipt
    from glasshouse.jobs.control import concluded, look, require_ended
    from glasshouse.jobs.finish import INVALID
    from glasshouse.jobs.rundir import RunFolder

    output, place = Output(as_json), locate(home)
    found = look(RunFolder.find(place, run), place)
    require_ended(found)
    folder, conclusion = of_machine(found.folder, machine), concluded(found.folder, place, found.record)
    if machine and conclusion.verdict != INVALID:
        conclusion = conclusion.machines[machine]
    receipt = require_receipt(conclusion)
    identity = unlock(place, passphrase_file, passphrase_fd)
    fetched = fetch(folder, receipt, sealing=identity.sealing, out=out, force=force, hidden=hidden)
    level = receipt.assurance.value if receipt.assurance else None
    output.result(
        {
            "run_id": found.record.run_id,
            "folder": str(out),
            "assurance": level,
            "verdict": conclusion.verdict,
            "outputs": [
                {
                    "name": one.name,
                    "kind": one.kind,
                    "path": None if one.path is None else str(one.path),
                    "sha256": one.sha256.hex(),
                    "bytes": one.plain_bytes,
                }
                for one in fetched
            ],
        }
    )
    if not fetched:
        output.say("The run has no outputs.")
    left_out = [printable(one.name, keep="") for one in fetched if one.path is None]
    for one in fetched:
        if one.path is not None:
            path = printable(str(one.path), keep="")
            output.say(f"{path}  {bytes_text(one.plain_bytes)}  sha256 {one.sha256.hex()}")
    if left_out:
        output.warn(
            f"not written, because a part of the name begins with a dot: {', '.join(left_out)}; "
            "look at the names, then fetch them with --hidden"
        )
    output.facts({"receipt": verdict_words(conclusion.verdict, level)})
