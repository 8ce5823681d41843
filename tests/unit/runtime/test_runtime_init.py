"""The worker cannot outlive its keepers: whichever of them is killed, and whatever its script tried before."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.runtime.kernel import PR_SET_CHILD_SUBREAPER, REAL, Kernel
from glasshouse.runtime.watchdog import watchdog
from glasshouse.runtime.worker import sandbox, worker_init
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.worker_init import fork_worker
from tools.forked import in_child
from tools.machine import WithoutMounts, WithoutNamespaces, needs_filters, needs_namespaces
from tools.sandboxed import children_of, is_gone, run, specification, start, start_held

pytestmark = needs_filters

# Below the minute that what should be gone would sleep.
PATIENCE_S = 40.0
# What a script could try in order to stay: drop the signal, reap for itself, leave the session, ignore signals.
STAYS = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
for number in range(1, 65):
    libc.prctl(1, number, 0, 0, 0)
print(libc.prctl(1, 0, 0, 0, 0), ctypes.get_errno(), libc.prctl(36, 1, 0, 0, 0), flush=True)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    try:
        os.setsid()
    except PermissionError:
        pass
    if os.fork():
        os._exit(0)  # the grandchild is an orphan
print('up', flush=True)
time.sleep(60)
"""
# As above, and the worker is another program since, started by a thread: that drops the signal too, for the kernel.
REPLACED = (
    f"import os, sys, threading\nprogram = [sys.executable, '-c', {STAYS!r}]\n"
    + """
threading.Thread(target=lambda: os.execv(sys.executable, program)).start()
"""
)
MACHINES = pytest.mark.parametrize("kernel", [None, WithoutNamespaces()], ids=["namespaces", "no namespaces"])


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and not all(map(is_gone, pids)):
        time.sleep(0.01)
    return all(map(is_gone, pids))


# Started by a fork, so that the init's clock can be set.
HERE = pytest.mark.parametrize("kernel", [REAL, WithoutNamespaces()], ids=["namespaces", "no namespaces"])
BEAT_S = 0.05


def descendants(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants(child))]


def read_until(descriptor: int, word: bytes) -> bytes:
    text = b""
    while word not in text and select.select([descriptor], [], [], PATIENCE_S)[0]:
        piece = os.read(descriptor, 4096)
        if not piece:
            break
        text += piece
    return text


class Keepers:
    """An agent with a sentinel and a worker that wants to stay."""

    def __init__(self, kernel: Kernel | None, code: str, beats: int = 0) -> None:
        reader, writer = os.pipe()
        self.agent = os.fork()
        if self.agent == 0:
            try:
                watcher = watchdog.start()
                worker = start(specification(code), kernel)
                said = read_until(worker.stdout, b"up")
                group = not worker.own_process_namespace
                watched = watcher.watch(worker.pid or 0, init=worker.init_pid, group=group)
                facts = [watched, said.decode(), watcher.pid, worker.init_pid, worker.pid]
                os.write(writer, json.dumps(facts).encode())
                for _ in range(beats):
                    worker.beat()
                    time.sleep(BEAT_S)
                select.select([worker.pidfd], [], [])
                worker.end()
                time.sleep(60)
            finally:
                os._exit(1)
        os.close(writer)
        self.watched, self.said, self.sentinel, self.init, self.worker = json.loads(os.read(reader, 4096))
        os.close(reader)
        self.family = [self.sentinel, *descendants(self.init), self.init]

    def stop_agent(self) -> int:
        os.kill(self.agent, signal.SIGSTOP)
        return self.agent

    def kill_init(self) -> int:
        """End the init, and let the sentinel look at what is left."""
        os.kill(self.init, signal.SIGKILL)
        time.sleep(2 * watchdog.PERIOD_S)
        return self.init

    def kill(self, *pids: int) -> bool:
        """Kill some; return whether the worker and all that it started is gone then."""
        for pid in pids:
            with suppress(ProcessLookupError):  # gone with the one before it
                os.kill(pid, signal.SIGKILL)
        left = [pid for pid in self.family if pid != self.sentinel]
        ended = gone(left if self.agent not in pids else self.family)
        os.kill(self.agent, signal.SIGKILL)
        os.waitpid(self.agent, 0)
        return ended


def killed(kernel: Kernel | None, choose: Callable[[Keepers], list[int]], code: str = STAYS) -> tuple[bool, int, bool]:
    def act() -> tuple[bool, int, bool]:
        REAL.prctl(PR_SET_CHILD_SUBREAPER, 1)
        keepers = Keepers(kernel, code)
        members = len(keepers.family)
        ended = keepers.kill(*choose(keepers))
        for pid in keepers.family:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        return keepers.watched, members, ended

    return in_child(act, limit_s=120)


@MACHINES
@pytest.mark.parametrize(
    "choose",
    [
        lambda one: [one.agent],
        lambda one: [one.init],
        lambda one: [one.worker],
        lambda one: [one.sentinel, one.agent],
        lambda one: [one.agent, one.sentinel, one.worker],
        lambda one: [one.sentinel, one.init],
        lambda one: [one.init, one.agent],
        lambda one: [one.stop_agent(), one.init, one.agent][1:],
        lambda one: [one.stop_agent(), one.kill_init(), one.agent][2:],
    ],
    ids=[
        "agent",
        "init",
        "worker",
        "sentinel and agent",
        "agent, sentinel and worker",
        "sentinel and init",
        "init and agent",
        "init and a stopped agent",
        "init, and a stopped agent once the sentinel has looked",
    ],
)
@pytest.mark.parametrize("code", [STAYS, REPLACED], ids=["", "replaced"])
def test_whichever_keeper_is_killed_nothing_of_the_worker_stays(
    kernel: Kernel | None, choose: Callable[[Keepers], list[int]], code: str
) -> None:
    # Watchdog, init, worker, and an orphan of the worker's in a session of its own.
    watched, members, ended = killed(kernel, choose, code)
    assert (watched, members >= 4, ended) == (True, True, True)


@MACHINES
def test_a_worker_is_waited_for_as_long_as_it_takes_the_kernel_to_end_it(
    kernel: Kernel | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its init is gone at once, its gigabytes are not; only a namespace's init outlives all that is in it."""
    still = [{1: 1}, {1: 1}, {}]

    def story() -> int:
        worker = start(specification(STAYS), kernel)
        monkeypatch.setattr(sandbox, "members", lambda _session: still.pop(0))
        worker.end(patience_s=0.0)
        return len(still)

    assert in_child(story) == (3 if kernel is None else 0)


def test_a_workspace_with_a_name_goes_also_where_what_lives_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(_session: int) -> dict[int, int]:
        raise OSError(errno.EMFILE, "as in an agent without descriptors")

    def story() -> tuple[bool, bool]:
        worker = start(specification(STAYS), WithoutMounts())
        worker.report = replace(worker.report, notes=(*worker.report.notes, "no-pid-namespace"))  # type: ignore[type-var]
        monkeypatch.setattr(sandbox, "members", unseen)
        before = os.path.lexists(worker.named_path)
        worker.end()
        return before, os.path.lexists(worker.named_path)

    assert in_child(story) == (True, False)


@MACHINES
def test_where_memory_runs_out_the_worker_is_chosen_before_its_init(kernel: Kernel | None) -> None:
    def scores(worker: Worker) -> dict[str, object]:
        pids = {"init": worker.init_pid, "worker": worker.pid}
        found: dict[str, object] = {name: Path(f"/proc/{pid}/oom_score_adj").read_text() for name, pid in pids.items()}
        worker.link.send(b"x")
        return found

    ran = run("import posix; posix.read(3, 1)", kernel=kernel, after=scores)
    assert ran.facts == {"init": "999\n", "worker": "1000\n"}


@MACHINES
def test_a_stopped_init_still_leaves_with_its_agent(kernel: Kernel | None) -> None:
    def choose(one: Keepers) -> list[int]:
        os.kill(one.init, signal.SIGSTOP)
        return [one.sentinel, one.agent]

    assert killed(kernel, choose)[2]


@MACHINES
def test_a_script_cannot_let_go_of_the_signal_that_ends_it(kernel: Kernel | None) -> None:
    code = """
import ctypes
libc, word = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
for wanted in (0, 1, 17, 18, 64, 65, 1 << 32, -1, 2, 15, 9):
    answer = libc.prctl(1, ctypes.c_ulong(wanted), 0, 0, 0)
    libc.prctl(2, ctypes.byref(word), 0, 0, 0)
    print(wanted, answer, word.value)
"""
    ran = run(code, kernel=kernel)
    answers = {int(line.split()[0]): tuple(map(int, line.split()[1:])) for line in ran.output.splitlines()}
    # torch.multiprocessing.spawn and torchelastic fail on a refusal of SIGINT and SIGTERM, so that is answered as done.
    assert answers.pop(2) == answers.pop(15) == answers.pop(9) == (0, 9)
    assert set(answers.values()) == {(-1, 9)}
    assert len(answers) == 8


@MACHINES
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
    ids=["exit", "killed", "signalled"],
)
def test_the_init_says_how_the_worker_ended(kernel: Kernel | None, end: str, code: int) -> None:
    assert run(f"import os, signal, time\n{end}", kernel=kernel).exit_code == code


@MACHINES
def test_the_init_passes_signals_on_and_takes_none_for_its_agents_end(kernel: Kernel | None) -> None:
    def signal_init(worker: Worker) -> dict[str, object]:
        os.read(worker.stdout, 3)
        for number in (signal.SIGCONT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM):
            os.kill(worker.init_pid or 0, number)
            time.sleep(0.05)
        return {}

    code = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('passed', flush=True))"
    code += "; print('up', flush=True)\nwhile True: time.sleep(60)"
    ran = run(code, kernel=kernel, after=signal_init)
    assert (ran.output, ran.exit_code) == ("passed\n", -signal.SIGTERM)


def test_an_init_that_was_killed_never_makes_a_worker_that_completed() -> None:
    def act() -> int:
        worker = start(specification("import time; time.sleep(60)"))
        os.kill(worker.init_pid or 0, signal.SIGKILL)
        select.select([worker.pidfd], [], [], PATIENCE_S)
        return worker.end()

    assert in_child(act) == -signal.SIGKILL


def test_orphans_are_reaped() -> None:
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        if os.fork():
            os._exit(0)
        os._exit(0)
    os.wait()
print('up', flush=True)
time.sleep(60)
"""

    def act() -> int:
        worker = start(specification(code))
        read_until(worker.stdout, b"up")
        deadline = time.monotonic() + PATIENCE_S
        while len(children_of(worker.init_pid or 0)) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        left = len(children_of(worker.init_pid or 0))
        worker.end()
        return left

    assert in_child(act) == 1


def test_orphans_that_end_without_a_pause_do_not_keep_the_init_from_seeing_its_agent_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act() -> bool:
        agent, worker, rounds = _sleeping(), _sleeping(), iter(range(1_000_000))
        pidfd = os.pidfd_open(agent)

        def one_more_has_ended() -> int:
            if next(rounds) == 3:
                os.kill(agent, signal.SIGKILL)
                os.waitpid(agent, 0)
            orphan = os.fork()
            if orphan == 0:
                os._exit(0)
            return orphan

        monkeypatch.setattr(worker_init, "_ended_child", one_more_has_ended)
        reader, _writer = os.pipe()
        worker_init._serve(worker, pidfd, reader, own_namespace=False)
        return is_gone(worker)

    assert in_child(act)


def silent(kernel: Kernel, story: Callable[[Keepers], object], *, beats: int) -> object:
    def act() -> object:
        REAL.prctl(PR_SET_CHILD_SUBREAPER, 1)
        keepers = Keepers(kernel, STAYS, beats)
        try:
            return story(keepers)
        finally:
            for pid in (keepers.agent, keepers.init, *keepers.family):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    return in_child(act, limit_s=120)


@HERE
def test_an_agent_that_does_not_come_round_loses_the_worker_that_may_hold_it(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it waits for in the kernel: a folder's lock, a pipe, memory that victims who cannot die still hold."""
    monkeypatch.setattr(worker_init, "SILENT_S", 0.6)
    monkeypatch.setattr(worker_init, "_LOOK_S", 0.1)

    def story(keepers: Keepers) -> object:
        return gone([keepers.init, *keepers.family[1:]]), is_gone(keepers.agent)

    assert silent(kernel, story, beats=2) == (True, False)


@HERE
def test_an_agent_that_comes_round_keeps_its_worker_also_when_all_was_paused(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_init, "SILENT_S", 1.0)
    monkeypatch.setattr(worker_init, "_LOOK_S", 0.1)

    def story(keepers: Keepers) -> object:
        time.sleep(1.5)
        kept = not is_gone(keepers.worker)
        for pid in (keepers.agent, keepers.init):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(keepers.init, signal.SIGCONT)  # the first of the two to run again
        time.sleep(0.3)
        os.kill(keepers.agent, signal.SIGCONT)
        time.sleep(1.5)
        return kept, is_gone(keepers.worker)

    assert silent(kernel, story, beats=10_000) == (True, False)


@HERE
def test_a_beat_that_the_init_has_not_read_keeps_no_exit_code_from_the_agent(kernel: Kernel) -> None:
    def act() -> list[int | None]:
        codes = []
        for _ in range(5):
            worker = start_held("raise SystemExit(7)", kernel)
            assert worker.pid is not None
            while not is_gone(worker.pid):
                pass
            worker.beat()  # when its init has looked for beats, and is about to say how it ended
            while worker.poll() is None:
                time.sleep(0.001)
            codes.append(worker.exit_code)
            worker.end()
        return codes

    assert in_child(act) == [7] * 5


def test_before_its_first_beat_an_agent_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_init, "SILENT_S", 0.3)
    monkeypatch.setattr(worker_init, "_LOOK_S", 0.1)
    assert silent(REAL, lambda keepers: (time.sleep(1.0), is_gone(keepers.worker))[1], beats=0) is False


def _sleeping() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def test_an_init_whose_agent_is_gone_or_is_another_makes_no_worker() -> None:
    def act() -> list[str]:
        said = []
        for ended in (True, False):
            reader, writer = os.pipe()
            agent = os.fork()
            if agent == 0:
                os.close(writer)
                os.read(reader, 1)
                os._exit(0)
            pidfd = os.pidfd_open(agent)
            if ended:
                os.close(writer)
                os.waitpid(agent, 0)
            try:
                fork_worker(REAL, agent, pidfd, writer, own_namespace=False)
            except OSError as error:
                said.append(str(error))
        return said

    assert in_child(act) == ["the agent is gone"] * 2


def _marked(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (path / "cmdline").read_bytes().decode("utf-8", "replace") and not is_gone(int(path.name)):
                found.append(int(path.name))
        except OSError:
            continue
    return found


@needs_namespaces
def test_an_agent_that_is_killed_at_any_moment_of_the_start_leaves_nothing() -> None:
    def act() -> list[int]:
        REAL.prctl(PR_SET_CHILD_SUBREAPER, 1)
        marker = f"marker-{os.urandom(8).hex()}"
        left: list[int] = []
        for moment in range(24):
            agent = os.fork()
            if agent == 0:
                spec = specification("import time; time.sleep(60)", pycache_prefix=f"/nonexistent/{marker}")
                worker: Worker = sandbox.start(spec)
                time.sleep(60 if worker else 0)
                os._exit(0)
            time.sleep(moment * 0.02)
            os.kill(agent, signal.SIGKILL)
            os.waitpid(agent, 0)
            deadline = time.monotonic() + PATIENCE_S
            # One that was being started as its agent was killed has no mark yet: the next look finds it.
            while (found := _marked(marker)) and time.monotonic() < deadline:
                time.sleep(0.01)
            left += found
        return left

    assert in_child(act, limit_s=240) == []
