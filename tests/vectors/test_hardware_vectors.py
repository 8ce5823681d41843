"""Public evidence of real machines, at its time and by a policy: accepted, or refused by the code that says why."""

from __future__ import annotations

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.kinds import KINDS
from tools.hardware_cases import HardwareCase, accepted_alterations, hardware_cases

CASES = hardware_cases()
_SOME = 97  # of a file, every so manieth byte; all of them in tests/long


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_public_evidence_gets_its_verdict(case: HardwareCase) -> None:
    files, pack = case.files(), case.pack()
    if case.expect is None:
        case.appraise(files, pack)
        return
    with pytest.raises(CheckFailedError) as refused:
        case.appraise(files, pack)
    assert (refused.value.code, refused.value.check) == (case.expect, "12"), refused.value


@pytest.mark.parametrize("case", [case for case in CASES if case.every_byte], ids=lambda case: case.name)
def test_no_altered_report_is_accepted(case: HardwareCase) -> None:
    """An accepted report of which a byte is changed, an end is cut off or that has a byte more, here and there."""
    assert accepted_alterations(case, _SOME) == []


def test_each_kind_has_an_accepted_report_of_which_every_byte_counts() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert {case.kind for case in CASES if case.every_byte} == KINDS.keys()
