"""Memory that a step frees stays with the process, so that the next step need not ask for it again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from glasshouse.workloads.process import environment

# Takes and gives back what a step of a small model does, a hundred times; prints how many pages had to be brought.
STEPS = """
import resource, sys
from glasshouse.workloads.process.environment import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    for size in (1 << 20, 3 << 20, 6 << 20):
        blocks = [bytes(size) for _ in range(4)]
        del blocks
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

needs_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this machine has no glibc")


def faults(how: str) -> int:
    found = subprocess.run([sys.executable, "-I", "-c", STEPS, how], capture_output=True, text=True, check=True)
    return int(found.stdout)


@needs_glibc
def test_what_a_step_freed_is_not_brought_again_by_the_next() -> None:
    assert faults("keep") < faults("leave") / 10


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.ctypes, "CDLL", lambda _name: object())
    assert environment.keep_freed_memory() is False
