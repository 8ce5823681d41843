"""The sentinel: notices a debugger on agent, worker or anything they started, and does not outlive them."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from glasshouse.errors import PlatformError
from glasshouse.runtime.kernel import (
    CLONE_NEWNS,
    MS_PRIVATE,
    MS_REC,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    REAL,
    Kernel,
)
from glasshouse.runtime.run import start_processes
from glasshouse.runtime.watchdog import process_tree, watchdog, watchdog_process
from glasshouse.runtime.watchdog.watchdog import Watchdog
from glasshouse.runtime.watchdog.watchdog_process import Alarm
from tools.forked import in_child, keep_only
from tools.machine import WithoutNamespaces, needs_filters, needs_namespaces, needs_root, needs_tracing
from tools.sandboxed import children_of, is_gone, specification, start
from tools.tracer import Tracer

QUICK_S = 0.1
NOTICED_S = 8.0  # a second, by `PERIOD_S`, on a machine with nothing else to do
SLEEP = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print('up', flush=True); time.sleep(60)"
WITH_THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n" + SLEEP
WITH_1500_THREADS = (
    "import threading, time\nthreading.stack_size(65536)\n"
    "for _ in range(1500): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n" + SLEEP
)
WITH_1000_CHILDREN = "import os, time\nfor _ in range(1000):\n  if os.fork() == 0: time.sleep(60)\n" + SLEEP
WITH_CHILD = "import os, time\nif os.fork() == 0: time.sleep(60)\n" + SLEEP


class Scene:
    """An agent with sentinel and worker in a process of its own, watched by the test from outside.

    What the agent sees comes as lines of JSON: first the process numbers, then each alarm.
    """

    def __init__(
        self, code: str = SLEEP, *, custodian: bool = False, kernel: Kernel | None = None, files: int = 1024
    ) -> None:
        self._lines, writer = os.pipe()
        self.agent = os.fork()
        if self.agent == 0:
            try:
                keep_only(writer)
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
                _be_agent(code, writer, custodian, kernel)
            except BaseException:
                os.write(writer, json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
            finally:
                os._exit(1)
        os.close(writer)
        pids = self.line()
        assert "failed" not in pids, pids["failed"]
        names = ("sentinel", "worker", "custodian")
        self.sentinel, self.worker, self.custodian = (int(str(pids[name])) for name in names)
        self.tracers: list[Tracer] = []

    def line(self, limit_s: float = 60.0) -> dict[str, object]:
        if not select.select([self._lines], [], [], limit_s)[0]:
            return {}
        text = b""
        while not text.endswith(b"\n") and (piece := os.read(self._lines, 1)):
            text += piece
        return dict(json.loads(text)) if text else {}

    def close(self) -> None:
        for pid in (self.agent, self.worker, self.sentinel):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.waitpid(self.agent, 0)
        for debugger in self.tracers:
            debugger.close()
        os.close(self._lines)


def _be_agent(code: str, writer: int, custodian: bool, kernel: Kernel | None) -> None:
    start_processes.harden_agent()
    watcher = watchdog.start(period_s=QUICK_S)
    helper = 0
    if custodian:
        helper = os.fork()
        if helper == 0:
            REAL.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            time.sleep(60)
            os._exit(0)
    worker = start(specification(code), kernel)
    os.read(worker.stdout, 3)
    assert worker.pid is not None
    assert watcher.watch(worker.pid, group=not worker.own_process_namespace)
    start_processes.seal_agent()
    pids = {"sentinel": watcher.pid, "worker": worker.pid, "custodian": helper}
    os.write(writer, json.dumps(pids).encode() + b"\n")
    while select.select([watcher.alarm_fd], [], []):
        alarm = watcher.alarm()
        ended = worker.end()
        gone = bool(helper) and became_true(lambda: is_gone(helper), 2)
        answer = {"alarm": str(alarm), "alive": watcher.alive(), "worker": ended, "custodian_gone": gone}
        os.write(writer, json.dumps(answer).encode() + b"\n")
        if alarm is Alarm.WATCHDOG_GONE:
            return


def played(story: Callable[[Scene], dict[str, object]], **scene: object) -> dict[str, object]:
    def act() -> dict[str, object]:
        stage = Scene(**scene)  # type: ignore[arg-type]
        try:
            return story(stage)
        finally:
            stage.close()

    return in_child(act)


def noticed(stage: Scene, target: int, *, stopping: bool) -> dict[str, object]:
    """Attach to `target` and return what the agent then saw, with how long that took."""
    begun = time.monotonic()
    stage.tracers.append(Tracer(target, stopping=stopping))
    return {**stage.line(), "took_s": time.monotonic() - begun}


def became_true(held: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not held():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


pytestmark = needs_filters


@needs_tracing
@pytest.mark.parametrize("stopping", [True, False], ids=["stopped", "running"])
def test_a_debugger_on_the_worker_is_noticed_and_the_worker_killed(stopping: bool) -> None:
    answer = played(lambda stage: noticed(stage, stage.worker, stopping=stopping))
    assert answer["alarm"] == "worker-traced"
    assert answer["worker"] == -signal.SIGKILL
    assert float(str(answer["took_s"])) < NOTICED_S


@needs_tracing
def test_a_debugger_on_one_thread_of_the_worker_is_noticed() -> None:
    def story(stage: Scene) -> dict[str, object]:
        thread = next(thread for thread in REAL.threads(stage.worker) if thread != stage.worker)
        return noticed(stage, thread, stopping=False)

    answer = played(story, code=WITH_THREAD)
    assert (answer["alarm"], answer["worker"]) == ("worker-traced", -signal.SIGKILL)


@needs_tracing
def test_a_debugger_on_a_child_of_the_worker_is_noticed() -> None:
    answer = played(lambda stage: noticed(stage, children_of(stage.worker)[0], stopping=True), code=WITH_CHILD)
    assert (answer["alarm"], answer["worker"]) == ("worker-traced", -signal.SIGKILL)


@needs_tracing
def test_a_debugger_on_the_last_of_1500_threads_is_noticed() -> None:
    def story(stage: Scene) -> dict[str, object]:
        threads = REAL.threads(stage.worker)
        return {"threads": len(threads), **noticed(stage, threads[-1], stopping=False)}

    answer = played(story, code=WITH_1500_THREADS, files=256)
    assert (answer["threads"], answer["alarm"], answer["worker"]) == (1501, "worker-traced", -signal.SIGKILL)


@needs_tracing
def test_a_debugger_on_the_last_of_1000_children_is_noticed() -> None:
    def story(stage: Scene) -> dict[str, object]:
        children = children_of(stage.worker)
        return {"children": len(children), **noticed(stage, children[-1], stopping=False)}

    answer = played(story, code=WITH_1000_CHILDREN, files=256)
    assert (answer["children"], answer["alarm"], answer["worker"]) == (1000, "worker-traced", -signal.SIGKILL)


def test_1500_threads_cost_few_descriptors_a_tenth_of_a_core_and_no_false_alarm() -> None:
    def story(stage: Scene) -> dict[str, object]:
        before_s, begun_s = _cpu_s(stage.sentinel), time.monotonic()
        alarm = stage.line(limit_s=3.0)
        share = (_cpu_s(stage.sentinel) - before_s) / (time.monotonic() - begun_s)
        return {"alarm": alarm, "share": share, "files": len(list(Path(f"/proc/{stage.sentinel}/fd").iterdir()))}

    answer = played(story, code=WITH_1500_THREADS)
    assert answer["alarm"] == {}
    assert process_tree.CACHED_FILES < int(str(answer["files"])) < process_tree.CACHED_FILES + 16
    assert float(str(answer["share"])) < 0.2


def test_a_sentinel_that_runs_out_of_descriptors_does_not_take_threads_for_ended() -> None:
    def story(stage: Scene) -> dict[str, object]:
        resource.prlimit(stage.sentinel, resource.RLIMIT_NOFILE, (3, 3))
        return stage.line()

    answer = played(story)
    assert (answer["alarm"], answer["worker"]) == ("look-incomplete", -signal.SIGKILL)


@needs_root
@needs_namespaces
def test_a_proc_that_no_longer_shows_the_worker_is_an_alarm() -> None:
    def act() -> dict[str, object]:
        REAL.unshare(CLONE_NEWNS)
        REAL.mount("none", "/", None, MS_REC | MS_PRIVATE)
        stage = Scene()
        try:
            REAL.mount("none", f"/proc/{stage.worker}", "tmpfs", 0)
            return stage.line()
        finally:
            stage.close()

    answer = in_child(act)
    assert (answer["alarm"], answer["worker"]) == ("look-incomplete", -signal.SIGKILL)


@needs_tracing
def test_a_debugger_on_the_custodian_is_noticed_and_the_custodian_killed() -> None:
    answer = played(lambda stage: noticed(stage, stage.custodian, stopping=True), custodian=True)
    assert (answer["alarm"], answer["custodian_gone"]) == ("agent-traced", True)


@needs_tracing
def test_a_debugger_that_watches_the_agent_run_is_noticed_and_the_worker_killed() -> None:
    answer = played(lambda stage: noticed(stage, stage.agent, stopping=False))
    assert (answer["alarm"], answer["worker"]) == ("agent-traced", -signal.SIGKILL)
    assert float(str(answer["took_s"])) < NOTICED_S


@needs_tracing
def test_a_debugger_that_stops_the_agent_loses_the_worker_at_once() -> None:
    def story(stage: Scene) -> dict[str, object]:
        stage.tracers.append(Tracer(stage.agent, stopping=True))
        return {"gone": became_true(lambda: is_gone(stage.worker), 0.8 * watchdog_process.STOPPED_AGENT_S)}

    assert played(story) == {"gone": True}


@needs_tracing
def test_the_sentinels_own_end_is_an_alarm() -> None:
    def story(stage: Scene) -> dict[str, object]:
        os.kill(stage.sentinel, signal.SIGKILL)
        return stage.line()

    answer = played(story)
    assert (answer["alarm"], answer["alive"], answer["worker"]) == ("sentinel-gone", False, -signal.SIGKILL)


def test_an_agent_that_is_killed_leaves_no_sentinel() -> None:
    def story(stage: Scene) -> dict[str, object]:
        os.kill(stage.agent, signal.SIGKILL)
        return {"gone": became_true(lambda: is_gone(stage.sentinel) and is_gone(stage.worker), NOTICED_S)}

    assert played(story) == {"gone": True}


def test_without_namespaces_a_killed_agent_still_takes_the_workers_children_along() -> None:
    def story(stage: Scene) -> dict[str, object]:
        family = [stage.worker, *children_of(stage.worker)]
        os.kill(stage.agent, signal.SIGKILL)
        return {"family": len(family), "gone": became_true(lambda: all(map(is_gone, family)), NOTICED_S)}

    assert played(story, code=WITH_CHILD, kernel=WithoutNamespaces()) == {"family": 2, "gone": True}


def test_a_sentinel_that_was_stopped_still_leaves_with_its_agent() -> None:
    def story(stage: Scene) -> dict[str, object]:
        os.kill(stage.sentinel, signal.SIGSTOP)
        os.kill(stage.agent, signal.SIGKILL)
        return {"gone": became_true(lambda: is_gone(stage.sentinel), NOTICED_S)}

    assert played(story) == {"gone": True}


def test_an_agent_that_stays_stopped_is_killed_and_the_worker_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_process, "STOPPED_AGENT_S", 0.5)

    def story(stage: Scene) -> dict[str, object]:
        os.kill(stage.agent, signal.SIGSTOP)
        return {"gone": became_true(lambda: is_gone(stage.agent) and is_gone(stage.worker), NOTICED_S)}

    assert played(story) == {"gone": True}


def with_sentinel(story: Callable[[Watchdog], object], *, kernel: Kernel = REAL) -> object:
    def act() -> object:
        watcher = watchdog.start(kernel=kernel, period_s=0.05)
        try:
            return story(watcher)
        finally:
            watcher.stop()

    return in_child(act)


def test_without_a_tracer_there_is_no_alarm_and_it_says_that_it_has_looked() -> None:
    def story(watcher: Watchdog) -> object:
        time.sleep(0.2)
        return watcher.alive(), watcher.watching(), watcher.alarm()

    assert with_sentinel(story) == (True, True, None)


def test_it_watches_only_the_worker_that_it_was_told_of() -> None:
    def story(watcher: Watchdog) -> object:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        before = watcher.watching(pid)
        told = watcher.watch(pid)
        after = watcher.watching(pid), watcher.watching(pid + 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return before, told, after, watcher.watch(pid)

    assert with_sentinel(story) == (False, True, (True, False), False)


@pytest.mark.parametrize("dumpable", [1, 0])
def test_it_reads_a_dumpable_process_as_the_same_user_could_and_is_refused_by_another(dumpable: int) -> None:
    def story(watcher: Watchdog) -> object:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            REAL.drop_capabilities()  # more capabilities than the reader's would refuse it by themselves
            REAL.prctl(PR_SET_DUMPABLE, dumpable)
            os.write(writer, b"x")
            time.sleep(60)
        os.read(reader, 1)
        answer = watcher.refuses_readers(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return answer, watcher.refuses_readers(pid)

    assert with_sentinel(story) == (dumpable == 0, None)


def test_it_holds_nothing_that_the_agent_had_open_and_no_capability(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("the owner's")

    def act() -> tuple[set[str], str, str]:
        with (tmp_path / "file").open():
            watcher = watchdog.start()
        try:
            held = {str(entry.readlink()) for entry in Path(f"/proc/{watcher.pid}/fd").iterdir()}
            status = REAL.status(watcher.pid)
            return {path for path in held if path.startswith("/")}, status["CapEff"], status["Seccomp"]
        finally:
            watcher.stop()

    files, held, filtered = in_child(act)
    assert {path for path in files if not path.startswith("/proc/")} == {os.devnull}
    assert (int(held, 16), filtered) == (0, "2")


def test_a_stopped_sentinel_is_not_alive() -> None:
    def story(watcher: Watchdog) -> object:
        os.kill(watcher.pid, signal.SIGSTOP)
        time.sleep(0.05)
        return watcher.alive(), watcher.watching()

    assert with_sentinel(story) == (False, False)


def test_a_sentinel_that_answers_but_has_stopped_looking_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "SILENT_S", 0.1)
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.05)

    def act() -> bool:
        watcher = watchdog.start(period_s=30)
        try:
            time.sleep(0.15)
            return watcher.alive()
        finally:
            watcher.stop()

    assert in_child(act) is False


def test_stopping_twice_is_fine_and_afterwards_nothing_is_watched() -> None:
    def story(watcher: Watchdog) -> object:
        watcher.stop()
        watcher.stop()
        return watcher.alive(), watcher.watching(), watcher.watch(os.getpid()), is_gone(watcher.pid)

    assert with_sentinel(story) == (False, False, False, True)


@needs_tracing
def test_no_sentinel_starts_for_a_process_that_is_already_traced() -> None:
    def act() -> int:
        reader, writer = os.pipe()
        agent = os.fork()
        if agent == 0:
            os.read(reader, 1)
            try:
                watchdog.start().stop()
                os._exit(0)
            except PlatformError:
                os._exit(9)
        debugger = Tracer(agent, stopping=False)
        os.write(writer, b"x")
        code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        debugger.close()
        return code

    assert in_child(act) == 9


def test_it_costs_less_than_a_thousandth_of_a_core() -> None:
    def act() -> float:
        watcher = watchdog.start(period_s=watchdog.PERIOD_S / 10)
        try:
            assert watcher.watching()  # past its first steps
            before = _cpu_s(watcher.pid)
            time.sleep(0.8)
            return (_cpu_s(watcher.pid) - before) / 0.8 / 10
        finally:
            watcher.stop()

    assert watchdog.PERIOD_S <= 0.5, "what it sees, it sees within a second"
    assert in_child(act) < 0.003  # measured 0.0007 on an idle machine; a loaded one has cold caches


def _cpu_s(pid: int) -> float:
    return int(REAL.read(f"/proc/{pid}/schedstat").split()[0]) / 1e9
