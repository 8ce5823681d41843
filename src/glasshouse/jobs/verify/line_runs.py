"""Verifies a line by the runs that its owner has of it: each of them is in the verdict, whatever it left.

Law: a run that left nothing, or what does not hold, is never passed over: the line is as good without it as with it
only where its gate says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from glasshouse.errors import Code, GlasshouseError, VerificationError
from glasshouse.jobs.gates.line_notes import KnownLeg, known_legs, went_on_as
from glasshouse.jobs.owner.home import Home, is_there
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.verify.conclusion import never_placed, verify_run, verify_sealed_in
from glasshouse.jobs.verify.line_file import line_file
from glasshouse.jobs.verify.line_verdict import (
    INVALID,
    NEVER_PLACED,
    NO_RECEIPT,
    NOT_ENDED,
    LegRun,
    LineVerdict,
    verify_line,
)
from glasshouse.jobs.verify.verdict import Verdict


class LineRefusedError(VerificationError):
    """A line of which something does not hold, or is missing.

    Args:
        error: what does not.
        runs: what each of its runs that are here left.
    """

    def __init__(self, error: GlasshouseError, runs: Sequence[LegRun]) -> None:
        super().__init__(error.code, error.message, hint=error.hint)
        self.runs = tuple(runs)


def verify_line_of(home: Home, line: bytes, owner: bytes, now_us: int | None = None) -> LineVerdict:
    """Verify a line by all that is known of it here, with the files of each of its runs.

    Raises `LineRefusedError`, with the code of the receipt that does not hold, or as `verify_line`.
    """
    runs = leg_runs(home, line, owner, now_us)
    try:
        for run in runs:
            if run.refused is not None:
                why = f"NOT authentic: the receipt of run {run.run_id[:8]}, leg {run.leg}: {run.refused.message}"
                raise VerificationError(run.refused.code, why, hint=run.refused.hint)
        found = line_file(home, line.hex())
        if found is None:
            raise VerificationError(Code.CHAIN_INCOMPLETE, "nothing of the line is known here")
        return replace(verify_line(found.encode(), owner=owner, now_us=now_us, open_end=True), runs=runs)
    except GlasshouseError as error:
        raise LineRefusedError(error, runs) from None


def leg_runs(home: Home, line: bytes, owner: bytes, now_us: int | None = None) -> tuple[LegRun, ...]:
    """Return what each run of a line that is here left, on each of its machines."""
    return tuple(
        _left(home, leg, folder, machine, owner, now_us)
        for leg in known_legs(home, line.hex())
        for machine, folder in enumerate(leg.folder.machines())
    )


def _left(home: Home, leg: KnownLeg, folder: RunFolder, machine: int, owner: bytes, now_us: int | None) -> LegRun:
    run = LegRun(leg=leg.number, run_id=folder.run_id, machine=machine, receipt=NO_RECEIPT)
    if is_there(folder.receipt):
        try:
            verdict = verified_run(folder, owner, now_us)
        except GlasshouseError as error:
            return replace(run, receipt=INVALID, refused=error)
        return replace(run, receipt="incomplete" if verdict.lacks else "verified", verdict=verdict)
    record = folder.load()
    if record.phase is not Phase.ENDED:
        receipt = NOT_ENDED
    else:
        receipt = NEVER_PLACED if never_placed(folder, record) else NO_RECEIPT
    return replace(run, receipt=receipt, next=what_next(home, folder, leg.record))


def verified_run(folder: RunFolder, owner: bytes, now_us: int | None) -> Verdict:
    """Verify a run's receipt with all that lies beside it; raises as `verify_run` and `verify_sealed_in`."""
    return verify_sealed_in(verify_run(folder, owner=owner, now_us=now_us), folder.out, expected=True)


def what_next(home: Home, folder: RunFolder, record: RunRecord) -> str:
    """Return what to look at, and to do, about a run without a receipt; `record` is of its first machine."""
    name = record.run_id[:8]
    if record.phase is not Phase.ENDED:
        return f"see: glasshouse status {name}"
    words = [f"see: glasshouse status {name}, and the runtime's own log: {folder.runtime_log}"]
    later = went_on_as(home, record)
    if later is not None:
        words.append(f"it went on as {later}: glasshouse verify {later}")
    elif record.line is not None:
        words.append(f"to go on: glasshouse resume {name}")
    return "; ".join(words)
