"""A run from the moment at which its processes exist: launch file, story, end; and who may interrupt it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from typing import BinaryIO

from glasshouse.errors import Code, GlasshouseError, RunError, UsageError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.log import EventLog
from glasshouse.handshake.launch import MAX_LAUNCH_BYTES, LaunchFile
from glasshouse.runtime.agent_options import Options
from glasshouse.runtime.gate.attest import now_us
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.run.lifecycle import tell
from glasshouse.runtime.run.run_state import STOP_GRACE_S, Ending, Identity, Run
from glasshouse.runtime.run.start_processes import Beginning
from glasshouse.runtime.run.step_times import Lifecycle, process_start_us
from glasshouse.runtime.run.zeroize import finish
from glasshouse.runtime.watchdog.heartbeat import Vigil
from glasshouse.runtime.watchdog.watchdog import PERIOD_S, Alarm
from glasshouse.runtime.worker.worker_init import SILENT_S
from glasshouse.runtime.worker.worker_session import Stage
from glasshouse.wire.signing import SigningKey
from glasshouse.wire.states import Outcome

__all__ = ["live"]

LAUNCH_PATIENCE_S = 120.0

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What is noticed by the agent itself is never explained away by an interruption that came before it.
_OURS = (Code.DEBUGGER, Code.LEASE_LOST, Code.DISK_FULL)


def live(options: Options, loop: Loop, out: OutDir, begun: Beginning, stdin: BinaryIO) -> Ending:
    """Tell the story, and finish whatever came of it.

    Args:
        options: the command line.
        loop: where everything is waited for.
        out: the run's folder.
        begun: the processes.
        stdin: the launch file, up to its end.
    """
    start_us = process_start_us()
    run = Run(
        options=options,
        loop=loop,
        out=out,
        lifecycle=Lifecycle(start_us),
        started_us=now_us() - (Lifecycle.now_us() - start_us),
        begun=begun,
    )
    ending = _tell(run, stdin)
    began = run.identity is not None
    return replace(finish(run, ending), began=began)


def _tell(run: Run, stdin: BinaryIO) -> Ending:
    try:
        _listen(run)
        run.identity = _identify(_read_launch(run, stdin), run)
        if run.begun.error is not None:
            raise run.begun.error
        tell(run)
    except Exception as error:
        return Ending.of(_true_cause(run, error))
    return Ending(outcome=Outcome.COMPLETED)


def _listen(run: Run) -> None:
    """Hear the sentinel, and requests to end the run."""
    if run.begun.sentinel is not None:
        run.loop.watch(run.begun.sentinel.alarm_fd, lambda: _alarmed(run))
        gone, came_round = partial(_alarm, run, Alarm.SENTINEL_GONE), partial(_came_round, run)
        Vigil(run.loop, run.begun.sentinel, gone, came_round=came_round)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    run.loop.watch(reader, lambda: _signalled(run, reader))
    # Each signal that arrives hands a traced process to its debugger, even one that it ignores: with these
    # blocked, an agent that is watched can still see to its own end. Not before the worker inherited the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ})


def _alarmed(run: Run) -> None:
    alarm = run.begun.sentinel.alarm() if run.begun.sentinel is not None else None
    if alarm is not None:
        _alarm(run, alarm)


def _alarm(run: Run, alarm: Alarm) -> None:
    if run.ending is None:
        run.record(EventType.NOTICE, {"code": alarm.value, "value": None})
        raise RunError(Code.DEBUGGER, "somebody attached a debugger, or the watch over that is gone")


def _came_round(run: Run, since_s: float) -> None:
    """Keep the worker, which is ended where this does not happen: not before it is measured, which takes its time."""
    if since_s > SILENT_S and run.ending is None:
        run.record(EventType.NOTICE, {"code": "agent-silent", "value": None})
    if run.session is not None and run.session.stage >= Stage.CONFIRMED:
        run.session.worker.beat()


def _signalled(run: Run, reader: int) -> None:
    wanted = set(os.read(reader, 512)) & set(_SIGNALS)
    if wanted:
        run.stop(RunError(Code.INTERRUPTED, "the run was interrupted"), grace_s=STOP_GRACE_S)


def _read_launch(run: Run, stdin: BinaryIO) -> LaunchFile:
    """Read standard input to its end, in the loop: what holds the other end may take its time."""
    pieces: list[bytes] = []
    descriptor = stdin.fileno()

    def read() -> None:
        pieces.append(os.read(descriptor, MAX_LAUNCH_BYTES + 1))

    def done() -> bool:
        return bool(pieces) and (not pieces[-1] or sum(map(len, pieces)) > MAX_LAUNCH_BYTES)

    run.loop.watch(descriptor, read)
    in_time = run.loop.run_until(done, within_s=LAUNCH_PATIENCE_S)
    run.loop.unwatch(descriptor)
    if not in_time:
        raise UsageError(Code.USAGE, "no launch file came over standard input")
    return LaunchFile.parse(b"".join(pieces))


def _identify(launch: LaunchFile, run: Run) -> Identity:
    key = SigningKey.generate()
    log = EventLog(run_id=launch.run_id, evidence_key=key, clock_us=now_us, sink=run.line)
    return Identity(launch=launch, token=launch.claims(), evidence_key=key, log=log)


def _true_cause(run: Run, error: BaseException) -> BaseException:
    """Return why the run ended, where what was noticed first is only a consequence."""
    if isinstance(error, RunError) and error.code is Code.WORKER_KILLED:
        # The sentinel kills a worker that is debugged, and says so a moment later.
        try:
            run.loop.sleep(PERIOD_S)
            if run.begun.sentinel is not None and not run.begun.sentinel.untouched():
                _alarm(run, Alarm.SENTINEL_GONE)  # it was kept from saying so
        except GlasshouseError as alarm:
            return alarm
    if run.stopping is not None and isinstance(error, RunError) and error.code not in _OURS:
        return run.stopping
    return error
