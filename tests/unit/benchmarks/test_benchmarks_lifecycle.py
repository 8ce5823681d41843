"""The lifecycle benchmark: medians over runs, ratios of medians, and one sum over every process but the worker."""

from __future__ import annotations

from benchmarks.lifecycle import result


def run(total: float, command: float) -> dict[str, float]:
    return {
        "total_without_imports_s": total,
        "command_s": command,
        "raw_command_s": 1.0,
        "raw_without_imports_s": 0.5,
    }


def test_numbers_are_medians_and_a_run_without_training_is_judged_by_its_time_alone() -> None:
    found = result([run(1.0, 2.0), run(1.5, 3.0), run(9.0, 90.0)], None)
    assert found["numbers"]["command_to_raw_command"] == 3.0
    assert found["numbers"]["total_to_raw_without_imports"] == 3.0
    assert found["bars"].keys() == {"total_without_imports_s"}
    assert len(found["runs"]) == 3


def test_memory_and_processor_time_are_summed_over_the_processes() -> None:
    processes = {
        "agent": {"pss_mib": 100.0, "cpu_percent": 0.4},
        "broker": {"pss_mib": 60.5, "cpu_percent": 0.05},
    }
    found = result([run(1.0, 2.0)], {"seconds": 60.0, "processes": processes})
    assert found["bars"]["pss_mib"] == {"bar": "≤ 150", "found": 160.5, "met": False}
    assert found["bars"]["cpu_percent"]["met"] is True
    assert found["numbers"]["cpu_percent of agent"] == 0.4
