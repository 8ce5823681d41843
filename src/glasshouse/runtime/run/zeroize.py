"""The end of every run, however it came about, always in this order (protocol.md, Evidence):

worker gone → keys wiped → probes → `zeroized` event → final head → receipt signed → countersigned →
bundle written → evidence key forgotten.

Laws: no step is left out because one before it failed; what failed makes a run that had completed a
failed one; the keys are gone before anything is said about them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from glasshouse.attestation.hardening import CheckResult, WorkspaceKind
from glasshouse.custodian.residue_patterns import ResiduePatterns
from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.events import EventType, ProbeResult
from glasshouse.evidence.results import Probe
from glasshouse.runtime.keys.shared_files import Before
from glasshouse.runtime.run import probes
from glasshouse.runtime.run.receipt_writer import close_books
from glasshouse.runtime.run.run_state import Ending, Run
from glasshouse.wire.states import Outcome, State

__all__ = ["finish"]

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


def finish(run: Run, ending: Ending) -> Ending:
    """End a run; returns how it ended in the end.

    Args:
        run: whatever there is.
        ending: how the story ended.
    """
    run.ending = ending
    if run.begun.sentinel is not None:
        # It watches to the end; what it sees from here on changes nothing that could still be done.
        run.loop.unwatch(run.begun.sentinel.alarm_fd)
    steps = _Steps()
    with run.lifecycle.step("zeroize"):
        steps.do(lambda: _announce(run, ending))
        steps.do(lambda: _end_worker(run))
        steps.do(lambda: _wipe_keys(run))
        answers = steps.do(lambda: _probe(run)) or [
            Probe(probe="zeroization", result=ProbeResult.UNVERIFIABLE, detail="probes-failed")
        ]
        steps.do(lambda: _wipe_patterns(run))
    final = _judge(ending, answers, steps.failed)
    run.ending = final
    books = _Steps()
    books.do(lambda: close_books(run, final, answers))
    books.do(lambda: _forget(run))
    if books.failed is not None and final.outcome is Outcome.COMPLETED:
        # For what waits on this process: a run whose receipt cannot be written has not ended well.
        return Ending(outcome=Outcome.FAILED, code=books.failed)
    return final


def _announce(run: Run, ending: Ending) -> None:
    if run.identity is None:
        return
    log = run.identity.log
    if log.state is not State.ZEROIZING:
        log.transition(State.ZEROIZING, code=ending.code)
    if run.keeper is not None:
        run.keeper.rest()
    run.out.give_reserve()


def _end_worker(run: Run) -> None:
    """Nothing of the worker is left, but what it printed is sealed: it says why it failed."""
    steps = _Steps()
    worker = run.begun.worker if run.session is None else run.session.worker
    if run.session is not None:
        steps.do(run.session.end)
    elif worker is not None:
        steps.do(worker.end)
    if run.begun.relay is not None:
        steps.do(run.begun.relay.stop)
    if run.sealed_log is not None:
        steps.do(run.sealed_log.finish)
        run.sealed_log.wipe()
    if worker is None or not worker.lives():
        steps.do(run.out.worker_gone)
    _raise_if_failed(steps)


def _wipe_keys(run: Run) -> None:
    steps = _Steps()
    if run.begun.custodian is not None:
        steps.do(run.begun.custodian.dismiss)
    if run.begun.regions is not None:
        steps.do(run.begun.regions.grant.wipe)
    # Ciphers keep copies of their keys and cleanse them when they are deleted; the session held the sealers.
    if run.session is not None:
        run.session.outputs = None
    gc.collect()
    _raise_if_failed(steps)


def _probe(run: Run) -> list[Probe]:
    windows: list[memoryview] = []
    if run.begun.regions is not None:
        windows = [window for _, window in ResiduePatterns(run.begun.regions.patterns.view)]
    worker = run.begun.worker
    no_swap = CheckResult.UNAVAILABLE
    agent, other = (run.report.agent, run.report.worker) if run.report is not None else ({}, {})
    found = [
        probes.probe_workspace(worker),
        probes.probe_shared_memory(windows, before=_shared_before(run)),
        probes.probe_swap(agent=agent.get("no-swap", no_swap), worker=other.get("no-swap", no_swap)),
        probes.probe_gpu(worker.pid if worker is not None else None),
    ]
    if run.begun.regions is not None:
        wiped = [run.begun.regions.grant, *([] if run.sealed_log is None else [run.sealed_log.memory])]
        memory = probes.probe_memory(windows, wiped=wiped, needle_memory=run.begun.regions.patterns)
        found.insert(0, memory)
    for window in windows:
        window.release()
    answers = [Probe(probe=one.name, result=one.result, detail=one.detail) for one in found]
    for answer in answers:
        run.record(EventType.PROBE, {"detail": answer.detail, "probe": answer.probe, "result": answer.result.value})
    return answers


def _shared_before(run: Run) -> Before:
    """Return what needs no search in shared memory: where the worker saw the machine's, that is nothing.

    A write through a mapping may leave a file's times as they were; only the worker of a run maps any.
    """
    report = run.begun.worker.report if run.begun.worker is not None else None
    return run.shared_before if report is not None and report.workspace is not WorkspaceKind.DIRECTORY else {}


def _wipe_patterns(run: Run) -> None:
    if run.begun.regions is not None:
        run.begun.regions.wipe()


def _judge(ending: Ending, answers: list[Probe], failed: Code | None) -> Ending:
    if any(answer.result is ProbeResult.FOUND for answer in answers):
        return Ending(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND)
    if failed is not None and ending.outcome is Outcome.COMPLETED:
        return Ending(outcome=Outcome.FAILED, code=failed)
    return ending


def _forget(run: Run) -> None:
    """Drop the last keys and the watch; the process ends right after this."""
    if run.begun.sentinel is not None:
        run.begun.sentinel.stop()
    run.identity = run.gate = run.keeper = None
    if run.begun.regions is not None:
        run.begun.regions.close()
    if run.sealed_log is not None:
        run.sealed_log.memory.close()
    if run.begun.package_file is not None:
        run.begun.package_file.close()
    gc.collect()


def _raise_if_failed(steps: _Steps) -> None:
    if steps.failed is not None:
        raise GlasshouseError(steps.failed, "a step of zeroization failed")
