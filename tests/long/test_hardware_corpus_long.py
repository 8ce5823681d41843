"""Ten minutes of altered evidence for each kind: nothing but refusals come out, none takes long, none is accepted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from types import FrameType

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.errors import FormatError
from tools.corpus import altered
from tools.hardware_cases import HardwareCase, hardware_cases
from tools.software_tpm import BOOT_LOG

# An altered certificate whose number is not positive is read, with a warning, and is not signed.
pytestmark = pytest.mark.filterwarnings("ignore:Parsed a serial number")

SECONDS = float(os.environ.get("GLASSHOUSE_CORPUS_S", "600"))
_HANG_S = 60  # for what takes milliseconds


def _hangs(_number: int, _frame: FrameType | None) -> None:
    raise AssertionError("a parser hangs")


@pytest.fixture(autouse=True)
def watched() -> None:
    signal.signal(signal.SIGALRM, _hangs)


CASES = [case for case in hardware_cases() if case.every_byte]
SHARES = Counter(case.kind for case in CASES)  # the files of a kind share its minutes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_altered_evidence_is_refused(case: HardwareCase) -> None:
    files, pack = case.files(), case.pack()
    assert case.every_byte is not None
    end = time.monotonic() + SECONDS / SHARES[case.kind]
    for form in altered(files[case.every_byte], random.Random(case.name)):
        if time.monotonic() > end:
            break
        signal.alarm(_HANG_S)
        with pytest.raises(CheckFailedError):
            case.appraise({**files, case.every_byte: form}, pack)
    signal.alarm(0)


def test_altered_logs_are_read_or_refused() -> None:
    end = time.monotonic() + SECONDS
    for form in altered(BOOT_LOG.read_bytes(), random.Random("log")):
        if time.monotonic() > end:
            break
        signal.alarm(_HANG_S)
        with contextlib.suppress(FormatError):
            BootLog.read(form).replay()
    signal.alarm(0)
