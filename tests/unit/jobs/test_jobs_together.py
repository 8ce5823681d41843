"""How the ends of several machines add up to that of their run: by what each is known to have come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.verify.conclusion import INVALID, NO_RECEIPT, Conclusion, together
from glasshouse.wire.states import Outcome


def end(outcome: Outcome, code: Code | None = None, verdict: str = "not-completed") -> Conclusion:
    return Conclusion(outcome=outcome, code=code, verdict=verdict)


GOOD = end(Outcome.COMPLETED, verdict="good")


@pytest.mark.parametrize(
    ("ends", "first", "blamed", "exit_code"),
    [
        ([GOOD, GOOD], (), None, ExitCode.DONE),
        ([GOOD, end(Outcome.COMPLETED, verdict="incomplete")], (), None, ExitCode.INCOMPLETE),
        ([GOOD, end(Outcome.RESIDUE, Code.RESIDUE_FOUND)], (), 1, ExitCode.RESIDUE),
        ([end(Outcome.FAILED, Code.SCRIPT_FAILED)] * 2, (1, 0), 1, ExitCode.RUN_FAILED),
        ([end(Outcome.REFUSED, Code.RANK_REFUSED)] * 2, (), 0, ExitCode.REFUSED),
        ([GOOD, end(Outcome.LOST, verdict=INVALID)], (), 1, ExitCode.VERIFICATION_FAILED),
    ],
)
def test_how_ends_add_up(ends: list[Conclusion], first: Iterable[int], blamed: int | None, exit_code: ExitCode) -> None:
    found = together(ends, first=tuple(first))
    assert (found.blamed, found.exit_code) == (blamed, exit_code)
    assert found.machines == tuple(ends)


def test_what_still_runs_on_any_machine_is_told_whichever_is_to_blame() -> None:
    lost = Conclusion(outcome=Outcome.LOST, code=None, verdict=NO_RECEIPT, problem="none of its processes is left")
    alive = replace(lost, problem="end them with: kill -9 7")
    assert together([lost, alive], first=(0, 1)).problem == (
        "machine 0: none of its processes is left; machine 1: end them with: kill -9 7"
    )
