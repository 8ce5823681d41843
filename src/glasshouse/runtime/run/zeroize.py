"""The end of every run, however it came about, always in this order (spec/protocol.md, Evidence):

worker gone → keys wiped → probes → `zeroized` event → final head → receipt signed → countersigned →
bundle written → evidence key dropped.

Laws: no step is left out because one before it failed; what failed makes a run that had completed a
failed one; the keys are gone before anything is recorded about them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from glasshouse.attestation.claims import CheckResult, WorkspaceKind
from glasshouse.custodian.residue_patterns import ResiduePatterns
from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.events import EventType, ProbeResult
from glasshouse.evidence.results import Probe
from glasshouse.runtime.keys.shared_files import Before
from glasshouse.runtime.run import probes
from glasshouse.runtime.run.receipt_writer import write_receipt
from glasshouse.runtime.run.run_state import Ending, Run
from glasshouse.wire.states import Outcome, State

_T = TypeVar("_T")


class _Steps:
    """Runs steps one after the other, whatever becomes of each."""

    def __init__(self) -> None:
        self.failed: Code | None = None

    def do(self, step: Callable[[], _T]) -> _T | None:
        try:
            return step()
        except GlasshouseError as error:
            self.failed = self.failed or error.code
        except Exception:
            self.failed = self.failed or Code.INTERNAL
        return None

    def raise_failed(self) -> None:
        if self.failed is not None:
            raise GlasshouseError(self.failed, "a step of zeroization failed")


def end_run(run: Run, ending: Ending) -> Ending:
    """End a run whose work ended as `ending`, whatever there is of it; return how it ended with all of this."""
    run.ending = ending
    if run.processes.watchdog is not None:
        # It watches to the end; an alarm from here on changes nothing that could still be done.
        run.loop.unwatch(run.processes.watchdog.alarm_fd)
    steps = _Steps()
    with run.times.step("zeroize"):
        steps.do(lambda: _announce(run, ending))
        steps.do(lambda: _end_worker(run))
        steps.do(lambda: _wipe_keys(run))
        answers = steps.do(lambda: _probe(run)) or [
            Probe(probe="zeroization", result=ProbeResult.UNVERIFIABLE, detail="probes-failed")
        ]
        steps.do(lambda: _wipe_patterns(run))
    final = ending
    if any(answer.result is ProbeResult.FOUND for answer in answers):
        final = Ending(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND)
    elif steps.failed is not None and ending.outcome is Outcome.COMPLETED:
        final = Ending(outcome=Outcome.FAILED, code=steps.failed)
    run.ending = final
    last = _Steps()
    last.do(lambda: write_receipt(run, final, answers))
    last.do(lambda: _forget(run))
    if last.failed is not None and final.outcome is Outcome.COMPLETED:
        # For what waits on this process: a run whose receipt cannot be written has not ended well.
        return Ending(outcome=Outcome.FAILED, code=last.failed)
    return final


def _announce(run: Run, ending: Ending) -> None:
    if run.identity is None:
        return
    log = run.identity.log
    if log.state is not State.ZEROIZING:
        log.transition(State.ZEROIZING, code=ending.code)
    if run.heads is not None:
        run.heads.rest()
    run.out.give_reserve()


def _end_worker(run: Run) -> None:
    """Leave nothing of the worker, but what it printed, sealed: there is why it failed."""
    steps = _Steps()
    worker = run.processes.worker
    if run.session is not None:
        steps.do(run.session.end)
    elif worker is not None:
        steps.do(worker.end)
    if run.processes.relay is not None:
        steps.do(run.processes.relay.stop)
    if run.sealed_log is not None:
        steps.do(run.sealed_log.finish)
        run.sealed_log.wipe()
    if worker is None or not worker.lives():
        steps.do(run.out.worker_gone)
    steps.raise_failed()


def _wipe_keys(run: Run) -> None:
    steps = _Steps()
    if run.processes.custodian is not None:
        steps.do(run.processes.custodian.dismiss)
    if run.processes.regions is not None:
        steps.do(run.processes.regions.grant.wipe)
    # Ciphers keep copies of their keys and cleanse them when they are deleted; the session held the sealers.
    if run.session is not None:
        run.session.outputs = None
    gc.collect()
    steps.raise_failed()


def _probe(run: Run) -> list[Probe]:
    windows: list[memoryview] = []
    worker, regions = run.processes.worker, run.processes.regions
    if regions is not None:
        windows = [window for _, window in ResiduePatterns(regions.patterns.view)]
    agent, other = (run.report.agent, run.report.worker) if run.report is not None else ({}, {})
    answers = [
        probes.probe_workspace(worker),
        probes.probe_shared_memory(windows, before=_shared_before(run)),
        probes.probe_swap(
            agent=agent.get("no-swap", CheckResult.UNAVAILABLE), worker=other.get("no-swap", CheckResult.UNAVAILABLE)
        ),
        probes.probe_gpu(worker.pid if worker is not None else None),
    ]
    if regions is not None:
        wiped = [regions.grant, *([] if run.sealed_log is None else [run.sealed_log.memory])]
        answers.insert(0, probes.probe_memory(windows, wiped=wiped, needle_memory=regions.patterns))
    for window in windows:
        window.release()
    for answer in answers:
        run.record(EventType.PROBE, {"detail": answer.detail, "probe": answer.probe, "result": answer.result.value})
    return answers


def _shared_before(run: Run) -> Before:
    """Return what needs no search in shared memory: where the worker saw the machine's, that is nothing.

    A write through a mapping may leave a file's times as they were; only the worker of a run maps any.
    """
    report = run.processes.worker.report if run.processes.worker is not None else None
    return run.shared_before if report is not None and report.workspace is not WorkspaceKind.DIRECTORY else {}


def _wipe_patterns(run: Run) -> None:
    if run.processes.regions is not None:
        run.processes.regions.wipe()


def _forget(run: Run) -> None:
    """Drop the last keys and the watchdog; the process ends right after this."""
    if run.processes.watchdog is not None:
        run.processes.watchdog.stop()
    run.identity = run.gate = run.heads = None
    if run.processes.regions is not None:
        run.processes.regions.close()
    if run.sealed_log is not None:
        run.sealed_log.memory.close()
    if run.processes.package_file is not None:
        run.processes.package_file.close()
    gc.collect()
