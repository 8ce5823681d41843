"""What is said of the machine: nothing that was not looked at, and nobody's name."""

from __future__ import annotations

import getpass
import json
import platform
from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.bench.harness.machine import Gpu, Seen, describe, look, stolen_ppm
from glasshouse.bench.overhead.facts import Facts
from glasshouse.bench.overhead.slices import Throttle


def test_the_description_has_the_form_of_the_statement_and_no_names() -> None:
    found = describe(None)
    workload = {"facts": {}, "kind": "mlp", "name": "mlp", "unit": "epoch"}
    Facts(workload=workload, system=found, created_us=1)
    said = json.dumps(found)
    for name in (platform.node(), getpass.getuser()):
        assert len(name) < 5 or name not in said
    assert found["gpu"] is None
    assert found["logical_cpus"]


def test_stolen_time_is_a_part_of_all_time() -> None:
    assert stolen_ppm((1000, 10), (1200, 20)) == 50_000
    assert stolen_ppm((1000, 10), (1000, 10)) is None
    assert stolen_ppm(None, (1000, 10)) is None


def test_a_machine_without_a_gpu_says_null_and_not_none_found() -> None:
    values = look(None).until(look(None), ours=[1])
    assert not {"throttle", "ecc_errors", "foreign_processes"} & set(values)


class Driver:
    """Speaks for one GPU as its library does; what is missing raises, as there."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.__dict__ |= {
            "nvmlClocksThrottleReasonSwThermalSlowdown": 0x20,
            "nvmlClocksThrottleReasonHwThermalSlowdown": 0x40,
            "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": 0x80,
        }

    def __getattr__(self, question: str) -> Any:
        if question not in self._answers:
            raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
        return lambda *_arguments: self._answers[question]


def _seen(**answers: Any) -> Seen:
    return Seen(cpu=None, gpu=Gpu(Driver(**answers), None).state())


def test_what_the_driver_says_is_passed_on() -> None:
    before = _seen(
        nvmlDeviceGetCurrentClocksThrottleReasons=0x20 | 0x4,
        nvmlDeviceGetTotalEccErrors=3,
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=10)],
    )
    after = _seen(
        nvmlDeviceGetCurrentClocksThrottleReasons=0x80,
        nvmlDeviceGetTotalEccErrors=5,
        nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=10), SimpleNamespace(pid=99)],
        nvmlDeviceGetMemoryInfo=SimpleNamespace(used=1 << 30),
    )
    values = before.until(after, ours=[10, 11])
    assert values["throttle"] == (Throttle.THERMAL, Throttle.POWER_BRAKE)
    assert values["ecc_errors"] == 2
    assert values["foreign_processes"] == 1
    assert after.gpu is not None
    assert after.gpu.memory_bytes == 1 << 30


def test_what_the_driver_does_not_say_stays_unknown() -> None:
    values = _seen().until(_seen(), ours=[10])
    assert values.get("throttle") is None
    assert values.get("ecc_errors") is None
    assert values["foreign_processes"] is None


@pytest.mark.parametrize("pids", [[], [99]])
def test_a_driver_that_does_not_see_our_processes_cannot_say_that_there_are_no_others(pids: list[int]) -> None:
    seen = _seen(nvmlDeviceGetComputeRunningProcesses=[SimpleNamespace(pid=pid) for pid in pids])
    assert seen.until(seen, ours=[10])["foreign_processes"] is None
