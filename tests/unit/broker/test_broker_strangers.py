"""The messages that `benchmarks/gate.py` throws at a broker: each is refused, for little work."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.verify import check_1_message
from glasshouse.errors import Code

MOST_CALLS = 5000


def script() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "gate.py"
    spec = importlib.util.spec_from_file_location("gate_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOSTILE = [body for _, body in script().hostile()]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_message_is_refused_for_little_work(number: int) -> None:
    """Calls are counted, not seconds: a message of as many zeros as fit cost a hundred thousand of them."""
    message, calls = HOSTILE[number], 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    assert 100_000 < len(message) <= MAX_EVIDENCE_BYTES
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(CheckFailedError) as caught:
            check_1_message(message)
    finally:
        sys.setprofile(before)
    assert (caught.value.check, caught.value.code) == ("1", Code.MESSAGE_INVALID)
    assert calls < MOST_CALLS
