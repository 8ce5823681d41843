"""`glasshouse logs RUN [-f]`: decrypts what the training wrote to standard output and error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

from glasshouse.cli.options import Machine, OwnerOptions, Run, option
from glasshouse.cli.show.output import CommandOutput, printable
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.results import run_logs
from glasshouse.jobs.results.run_logs import Segment, named_segments
from glasshouse.jobs.supervise.control import look


def command(
    run: Run = "latest",
    follow: Annotated[bool, option("-f --follow", "Go on until the run has ended.")] = False,
    machine: Machine = 0,
    *,
    options: OwnerOptions,
) -> None:
    """Print a run's decrypted log, and warn where nothing vouches for it."""
    output, home = options.output, options.own_home
    if follow and output.as_json:
        raise UsageError(Code.USAGE, "--follow and --json do not go together: one object cannot be followed")
    whole = RunFolder.find(home, run)
    folder = whole.machine(machine)
    record = folder.load()
    identity = options.unlock()
    if follow and whole.load().phase is not Phase.ENDED:
        _follow(output, whole, folder, home, identity)
        return
    named = named_segments(folder, owner_signing=identity.signing.public)
    found = run_logs.segments(folder, named.events, sealing=identity.sealing)
    if output.as_json:
        text = [
            {"sequence": one.sequence, "name": one.name, "text": one.data.decode(errors="replace")} for one in found
        ]
        output.result(
            {"run_id": record.run_id, "vouched": named.vouched, "problem": named.why or None, "segments": text}
        )
        return
    if not named.vouched:
        output.warn(f"nothing vouches for this log yet, the machine's host may have written it: {named.why}")
    if not _print(found):
        output.warn("this run has printed nothing so far" if record.outcome is None else "this run printed nothing")


def _follow(output: CommandOutput, whole: RunFolder, folder: RunFolder, home: Home, identity: Identity) -> None:
    """Print segments as they come, and hold them to the receipt at the end; raises `VerificationError`."""

    def over() -> bool:
        return look(whole, home, deep=False).record.phase is Phase.ENDED

    output.warn("nothing vouches for this log while the run goes on: the machine's host may write it")
    shown = []
    for event, segment in run_logs.follow(folder, over, sealing=identity.sealing):
        _print([segment])
        shown.append(event)
    named = named_segments(folder, owner_signing=identity.signing.public)
    run_logs.refuse_other(shown, named)
    output.warn(f"the run has ended; nothing vouches for its log: {named.why}" if named.why else "the run has ended")


def _print(found: Iterable[Segment]) -> bool:
    """Print segments and return whether there were any."""
    some = False
    for one in found:
        some = True
        if sys.stdout.isatty():
            # A log comes from a machine that is not trusted: on a terminal it may print, and not command.
            # What a progress bar draws over is shown line by line, for it can hide what stood there.
            text = one.data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
            sys.stdout.write(printable(text, keep="\n\t"))
        else:
            sys.stdout.buffer.write(one.data)
    sys.stdout.flush()
    return some
