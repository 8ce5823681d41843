"""A pytest plugin: in CI nothing may be skipped for want of what could have been installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

# How the reason begins that no installation could mend: kernel, processor, user or device.
MACHINE = ("this machine", "this kernel", "there is no GPU here")
_OUTPUT = "skipped while collecting"


def may_be_skipped(reason: str) -> bool:
    return reason.removeprefix("Skipped: ").startswith(MACHINE)


class NothingMissing:
    """Fails a session, in one process or in several, in which something was skipped that may not be."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        # An expected failure is reported as skipped too, without a place.
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons.add(report.longrepr[2].removeprefix("Skipped: "))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        # What is skipped as a whole file is reported to nobody but the process that collected it.
        self._reasons.update(getattr(node, "workeroutput", {}).get(_OUTPUT, ()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = sorted(self._reasons)
            return
        missing = sorted(reason for reason in self._reasons if not may_be_skipped(reason))
        for reason in missing:
            session.config.get_terminal_writer().line(f"SKIPPED, and in CI it must not be: {reason}", red=True)
        if missing and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
