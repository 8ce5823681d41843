"""Of one accepted report of each kind every byte flipped, every shorter form, and one byte more: none is accepted."""

from __future__ import annotations

import pytest

from tools.hardware_cases import HardwareCase, accepted_alterations, hardware_cases

# An altered certificate whose number is not positive is read, with a warning, and is not signed.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number")


@pytest.mark.parametrize("case", [case for case in hardware_cases() if case.every_byte], ids=lambda case: case.name)
def test_no_byte_of_a_report_may_differ(case: HardwareCase) -> None:
    assert accepted_alterations(case, 1) == []
