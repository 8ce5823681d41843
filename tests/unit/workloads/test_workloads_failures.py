"""One word leaves the worker; the rest is for the sealed log."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, RunError
from glasshouse.workloads.failures import code_of, explain


class OutOfMemoryError(RuntimeError):
    """Named as the framework names its own."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), Code.OUT_OF_MEMORY),
        (OutOfMemoryError("CUDA out of memory"), Code.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), Code.OUT_OF_MEMORY),
        (OSError(12, "Cannot allocate memory"), Code.OUT_OF_MEMORY),
        (ValueError("patient 7 is out of memory"), Code.WORKER_FAILED),
        (RuntimeError("shapes differ"), Code.WORKER_FAILED),
        (RunError(Code.NONFINITE_LOSS, "nan"), Code.NONFINITE_LOSS),
        (KeyboardInterrupt(), Code.WORKER_FAILED),
    ],
)
def test_failures_have_codes(error: BaseException, code: Code) -> None:
    assert code_of(error) is code


def test_a_cause_is_shown_and_an_expected_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    explain(RunError(Code.MODEL_NOT_FOUND, "no model", hint="pack it"))
    said = capsys.readouterr().err
    assert said == "glasshouse: no model [model-not-found]\nglasshouse: pack it\n"
    try:
        raise RunError(Code.SCRIPT_FAILED, "the script failed") from ZeroDivisionError("by zero")
    except RunError as error:
        explain(error)
    assert "ZeroDivisionError: by zero" in capsys.readouterr().err
