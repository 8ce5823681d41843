"""Whom the kernel ends first where memory runs out, and where a container has decided that before."""

from __future__ import annotations

from pathlib import Path

import pytest

from glasshouse.runtime.confine import memory_limits
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.run import doctor, start_processes
from glasshouse.runtime.run.findings import Finding, Standing
from tools.forked import in_child
from tools.machine import WithoutNamespaces, needs_filters, needs_namespaces
from tools.sandboxed import run


def own() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


@pytest.mark.parametrize("inherited", [999, 1000])
def test_an_agent_lowers_the_score_that_it_was_started_with_and_so_that_of_its_keepers(inherited: int) -> None:
    def story() -> tuple[list[str], int, int]:
        memory_limits.put(inherited)
        notes = start_processes.harden_agent()
        return notes, own(), in_child(own)

    notes, agent, child = in_child(story)
    assert "no-oom-score" not in notes
    assert (agent, child) == (0, 0)


@pytest.mark.parametrize(("least", "inherited", "reached"), [(1000, 1000, 1000), (999, 999, 999), (300, 900, 300)])
def test_without_the_right_to_it_an_agent_goes_as_low_as_its_container_was_set(
    least: int, inherited: int, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = memory_limits.put

    def permitted(score: int) -> None:
        """As the kernel does without CAP_SYS_RESOURCE: no lower than a process with it has set."""
        if score < least:
            raise PermissionError(13, "Permission denied")
        really(score)

    def story() -> tuple[int, bool]:
        really(inherited)
        start_processes.harden_agent()
        return own(), memory_limits.is_low(REAL.read)

    monkeypatch.setattr(memory_limits, "put", permitted)
    assert in_child(story) == (reached, reached == 300)


def test_an_agent_that_is_protected_more_than_that_stays_so() -> None:
    class Machine(Kernel):
        def read(self, path: str) -> bytes:
            return b"-500\n" if path == "/proc/self/oom_score_adj" else super().read(path)

    def story() -> int:
        memory_limits.put(7)
        memory_limits.lower(Machine().read)
        return own()

    assert in_child(story) == 7


@needs_filters
@pytest.mark.parametrize(
    "kernel",
    [pytest.param(None, marks=needs_namespaces), WithoutNamespaces()],
    ids=["namespaces", "none"],
)
@pytest.mark.parametrize(("score", "noted"), [(0, False), (750, False), (751, True), (999, True), (1000, True)])
def test_evidence_says_where_the_kernel_may_end_the_agent_before_the_worker(
    kernel: Kernel | None, score: int, noted: bool
) -> None:
    def story() -> tuple[str, ...]:
        memory_limits.put(score)
        return run("pass", kernel=kernel).report.notes

    assert ("no-oom-score" in in_child(story)) is noted


@pytest.mark.parametrize("content", [b"751\n", b"1000\n", b"", None])
def test_doctor_says_it_before_the_run_and_what_to_do(content: bytes | None) -> None:
    class Machine(Kernel):
        def read(self, path: str) -> bytes:
            if path != "/proc/self/oom_score_adj":
                return super().read(path)
            if content is None:
                raise PermissionError(path)
            return content

    def finding(kernel: Kernel) -> Finding:
        return {one.feature: one for one in in_child(lambda: doctor.examine(kernel))}["memory-order"]

    assert finding(REAL).standing is Standing.GOOD
    assert finding(Machine()).standing is Standing.WEAKER
    assert "CAP_SYS_RESOURCE" in finding(Machine()).consequence


def test_where_all_of_a_group_is_ended_together_evidence_and_doctor_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "oom-group" not in run("pass").report.notes
    monkeypatch.setattr(memory_limits, "ends_together", lambda: True)
    assert "oom-group" in run("pass", kernel=WithoutNamespaces()).report.notes
    found = {one.feature: one for one in in_child(lambda: doctor.examine(REAL))}["memory-order"]
    assert (found.value, found.standing) == ("together", Standing.WEAKER)
    assert "singleProcessOOMKill" in found.consequence
