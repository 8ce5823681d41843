"""The gate under load, on this machine's loopback: ``make bench-gate``, one half alone with ``ARGUMENTS=runtimes``.

``runtimes``: many runtimes attest at once, each a process of its own with the agent's own client, against a broker in
its own process whose database lies on a disk with synced commits. An exchange is challenge, evidence, and the released
key opened. The window opens when all have warmed up and closes when the first is done, so that its rate was kept up by
all together, clients and broker on the same cores. What the runtimes hold is compared with the database after the
broker was killed, warm-up included: one lost or doubled release fails the run whatever the rate.

``strangers``: what idle and hostile connections cost an honest runtime and a run's lease. Judged is the ratio of the
median exchange under load to the median just before it, and of these the median over the rounds.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.gate_counts import Kept, compare
from benchmarks.gate_load import (
    REQUESTS,
    Message,
    beside,
    hostile,
    hostile_evidence,
    hostile_receipt,
    nothing,
    strangers,
    unsigned_receipts,
)
from benchmarks.kept import Bar, finish, kept, options, quantiles
from glasshouse.attestation.policy import MAX_RELEASES
from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.store.broker_state import DATABASE_NAME
from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import HeadSubmission
from glasshouse.evidence.log import EventLog
from glasshouse.package.layout import check_commitment
from glasshouse.runtime.gate.attest import attest
from glasshouse.runtime.gate.broker_client import TIMEOUT_S, BrokerClient
from glasshouse.runtime.loop import Loop
from glasshouse.tamper.stage import Actor, Owner, clock_us
from glasshouse.wire.crypto import RecipientKey, SigningKey, hpke_seal, lengths_prefixed, sha256, verify_signature
from glasshouse.wire.states import Outcome, State

JUDGED = 8  # runtimes at once that the bars are about; the largest number measured where it is not among them
BARS = {"releases_per_s": Bar(100.0, least=True), "p99_ms": Bar(250.0), "lost_doubled_or_failed": Bar(0)}
WAIT_S = 120.0
IN_MEMORY = frozenset({"tmpfs", "ramfs"})

QUIET_S, LOAD_S, PAUSE_S = 1.0, 2.0, 0.05
LEASE_S, HEAD_EVERY_S = 5.0, 1.0
HONEST = ["127.0.0.1"]
MANY = [f"127.0.{block}.{host}" for block in (1, 2) for host in range(1, 101)]
IDLE, HOSTILE = {"idle": 1000, "new_per_s": 50}, {"hostile_per_s": 100}
PIECES = HOSTILE | {"piece_bytes": 1460}
# Name, what strangers do and from where, and the bar of the ratio.
SCENARIOS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("idle, from the honest address", IDLE | {"addresses": HONEST}, 2.0),
    ("idle, from 200 addresses", IDLE | {"addresses": MANY}, 2.0),
    ("idle and refilled, from 200 addresses", IDLE | {"new_per_s": 500, "addresses": MANY}, 2.0),
    ("slow bodies, from 200 addresses", IDLE | {"addresses": MANY, "slow": True}, 2.0),
    ("hostile, from the honest address", HOSTILE | {"addresses": HONEST}, 3.0),
    ("hostile, from 200 addresses", HOSTILE | {"addresses": MANY}, 3.0),
    ("hostile in pieces, from the honest address", PIECES | {"addresses": HONEST}, 3.0),
    ("hostile in pieces, from 200 addresses", PIECES | {"addresses": MANY}, 3.0),
    ("both, from 200 addresses", IDLE | HOSTILE | {"addresses": MANY}, 3.0),
    # The dearest message of each of the two routes that take large ones, and nothing cheaper between them.
    ("largest evidence, from 200 addresses", HOSTILE | {"addresses": MANY, "only": "/v1/evidence"}, 3.0),
    ("largest receipts, from 200 addresses", HOSTILE | {"addresses": MANY, "only": "/v1/receipt"}, 3.0),
)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("mode", nargs="?", choices=("runtimes", "strangers"), help="both by default")
    parser.add_argument("--runtimes", default="1,2,4,8,16", help="how many at once, one level after the other")
    parser.add_argument("--exchanges", type=int, default=200, help="of each runtime, after a fifth of it as a warm-up")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where the database lies: on a disk")
    parser.add_argument("--rounds", type=int, default=5, help="of strangers: quiet and under load, in turn")
    parser.add_argument("--only", default="", help="of strangers: scenarios whose name begins so")
    asked = parser.parse_args()
    levels = sorted({int(part) if part.isdecimal() else 0 for part in asked.runtimes.split(",")})
    scenarios = [scenario for scenario in SCENARIOS if scenario[0].startswith(asked.only)]
    if not (levels[0] >= 1 and levels[-1] <= 64 and 1 <= asked.exchanges <= MAX_RELEASES // 2):
        parser.error(f"this takes 1 to 64 runtimes at once, and 1 to {MAX_RELEASES // 2} exchanges of each")
    if asked.rounds < 1 or not scenarios or not asked.folder.is_dir() or not sys.platform.startswith("linux"):
        parser.error("this takes Linux, at least one round, the name of a scenario, and a folder that exists")
    halves = []
    if asked.mode in (None, "runtimes"):
        halves.append(runtimes(levels, asked.exchanges, asked.folder))
    if asked.mode in (None, "strangers"):
        halves.append({"strangers": {name: _scenario(load, bar, asked.rounds) for name, load, bar in scenarios}})
    return finish(result({name: found for half in halves for name, found in half.items()}), asked.output)


def result(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of one half or both."""
    numbers: dict[str, float] = {}
    bars: dict[str, Bar] = {}
    if "levels" in found:
        level = next((level for level in found["levels"] if level["runtimes"] == JUDGED), found["levels"][-1])
        bare, cpu_ms = found["bare_requests"], level["server_cpu_ms"]
        wrong = sum(found["counts"][name] for name in found["counts"] if name not in ("held", "released"))
        numbers = {
            "releases_per_s": level["per_s"],
            "p99_ms": level["p99_ms"],
            "lost_doubled_or_failed": wrong
            + sum(one["failed"] for one in found["levels"])
            + (0 if found["contested_budget"]["exact"] else 1),
            "rate_to_bare_requests": round(level["per_s"] / bare["per_s"], 3),
            "broker_cpu_to_bare_requests": round(cpu_ms / bare["server_cpu_ms"], 3),
            "broker_cpu_to_cryptography": round(1000 * cpu_ms / found["cryptography_us"], 3),
        }
        bars |= BARS
    for name, scenario in found.get("strangers", {}).items():
        numbers |= {
            f"{name}: ratio": scenario["ratio"],
            f"{name}: s without a head": scenario["longest_without_head_s"],
        }
        bars |= {f"{name}: ratio": Bar(scenario["bar"]), f"{name}: s without a head": Bar(LEASE_S)}
    return kept(numbers, bars, **found)


# One exchange, as the agent does it.


class CountingGate(BrokerClient):
    """The agent's own client, and how many requests it made."""

    requests = 0

    def post(self, path: str, body: bytes, *, timeout_s: float = TIMEOUT_S) -> bytes:
        self.requests += 1
        return super().post(path, body, timeout_s=timeout_s)


def exchange(actor: Actor, gate: BrokerClient, loop: Loop) -> None:
    """Attest and open the release.

    Raises:
        GlasshouseError: there is none, or not the right one.
    """
    manifest = actor.owner.manifest
    _, release, _ = attest(
        loop=loop,
        gate=gate,
        launch=actor.launch,
        manifest=manifest,
        evidence_key=actor.evidence,
        attester=lambda challenge, _now_us: (actor.claims(challenge), {}),
        sent=lambda _evidence, _hardware: None,
    )
    package_key = actor.hpke.open(release.sealed_key, info=release.info)
    check_commitment(package_key, manifest.package_id, manifest.key_commitment)


class Record(NamedTuple):
    """One exchange: how long, when it ended by the monotonic clock, with how many requests, and what came of it."""

    ms: float
    end_ns: int
    requests: int
    code: str
    held: tuple[str, str]


def _timed(actor: Actor | None, gate: CountingGate, loop: Loop) -> Record:
    """Time an exchange or, without an actor, as many requests of the same sizes."""
    gate.requests, begin_ns, code = 0, time.perf_counter_ns(), ""
    try:
        if actor is not None:
            exchange(actor, gate, loop)
        else:
            for path, size in REQUESTS.items():
                gate.post(path, b"[" + b" " * (size - 2) + b"]")
    except GlasshouseError as error:
        code = error.code.value
    end_ns = time.perf_counter_ns()
    keys = b"" if actor is None else lengths_prefixed(actor.hpke.public, actor.evidence.public)
    held = ("", "") if actor is None else (actor.launch.run_id, sha256(keys).hex())
    return Record(round((end_ns - begin_ns) / 1e6, 3), end_ns, gate.requests, code, held)


# Many runtimes at once.


def runtimes(levels: Sequence[int], exchanges: int, place: Path) -> dict[str, Any]:
    """Measure whole exchanges at several numbers of concurrent runtimes, and count every release."""
    warm_up = math.ceil(exchanges / 5)
    budgets: dict[str, int] = {}
    held: list[tuple[str, str]] = []
    numbers = []

    def actors(owner: Owner, count: int) -> list[Actor]:
        return [Actor.enter(owner) for _ in range(count)]

    # A socket's path must be short, the database on the storage that is meant.
    with (
        tempfile.TemporaryDirectory(dir=place, prefix="glasshouse-bench-") as data,
        tempfile.TemporaryDirectory(prefix="glasshouse-") as sockets,
    ):
        broker = BrokerProcess(Path(sockets), "--data", data)
        try:
            for number in levels:
                owners = [Owner(broker, releases=warm_up + exchanges) for _ in range(number)]
                budgets |= {owner.deployment: warm_up + exchanges for owner in owners}
                parts = [actors(owner, warm_up + exchanges) for owner in owners]
                crowd = _crowd(broker.runtime_url, parts, warm_up=warm_up, server_pid=broker.pid)
                held += crowd.held
                numbers.append(crowd.numbers())
                _show(numbers[-1])
            # More runtimes than the budget has releases for, all at once: exactly the budget may be held.
            budget = levels[-1]
            owner = Owner(broker, releases=budget)
            budgets[owner.deployment] = budget
            parts = [actors(owner, 2) for _ in range(budget)]
            crowd = _crowd(broker.runtime_url, parts, warm_up=0, server_pid=broker.pid)
            held += crowd.held
            refused = sum(record.code == Code.RELEASE_BUDGET for record in crowd.records)
        finally:
            # Killed, not stopped: what was answered must be there already.
            broker.kill()
        counts = compare(held, Kept.read(Path(data) / DATABASE_NAME), budgets)
        with beside(nothing) as (pid, url):
            judged = JUDGED if JUDGED in levels else levels[-1]
            empty = [[None] * (warm_up + exchanges)] * judged
            bare = _crowd(url, empty, warm_up=warm_up, server_pid=pid).numbers()
    mounts = [one for one in psutil.disk_partitions(all=True) if place.resolve().is_relative_to(one.mountpoint)]
    _, filesystem = max([(len(one.mountpoint), one.fstype) for one in mounts], default=(0, "unknown"))
    if filesystem in IN_MEMORY:
        print("The database lies in memory: a commit costs nothing there, and would not outlive a restart.")
    return {
        "bare_requests": bare,
        "contested_budget": {
            "asked": 2 * budget,
            "budget": budget,
            "exact": (len(crowd.held), refused) == (budget, budget),
            "refused": refused,
            "released": len(crowd.held),
        },
        "counts": counts,
        "cryptography_us": round(cryptography_us(), 1),
        "filesystem": filesystem,
        "levels": numbers,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """The records of several runtimes before the window opened and after, the window, and processor times in it."""

    warm_up: list[Record]
    measured: list[Record]
    open_ns: int
    close_ns: int
    server_s: float
    clients_s: float
    runtimes: int

    @property
    def records(self) -> list[Record]:
        return self.warm_up + self.measured

    @property
    def held(self) -> list[tuple[str, str]]:
        return [record.held for record in self.records if not record.code]

    def numbers(self) -> dict[str, Any]:
        """Return the rate and the times of the exchanges that ended inside the window."""
        inside = [one for one in self.measured if not one.code and one.end_ns <= self.close_ns]
        if not inside:
            codes = sorted({record.code for record in self.records})
            raise SystemExit(f"no exchange ended in the window of the measurement: {', '.join(codes)}")
        seconds = (self.close_ns - self.open_ns) / 1e9
        times = [record.ms for record in inside]
        return {
            "runtimes": self.runtimes,
            "per_s": round(len(inside) / seconds, 1),
            **quantiles(times),
            "server_cpu_ms": round(1000 * self.server_s / len(self.measured), 3),
            "client_cpu_ms": round(1000 * self.clients_s / len(self.measured), 3),
            "exchanges": len(inside),
            "seconds": round(seconds, 3),
            "tried_again": sum(record.requests > len(REQUESTS) for record in self.records),
            "failed": sum(bool(record.code) for record in self.records),
            "times_ms": times,
        }


Played = tuple[list[Record], list[Record], int, float]
_PLAYS: list[Callable[[int], Played]] = []  # set in a forked process: keys are not pickled


def _crowd(url: str, parts: Sequence[Sequence[Actor | None]], *, warm_up: int, server_pid: int) -> Crowd:
    """Run one process for each part, all at the same time, until every one has done its own."""
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(len(parts) + 1)
    play = partial(_play, url, parts, warm_up, start)
    with ProcessPoolExecutor(len(parts), fork, initializer=_PLAYS.append, initargs=(play,)) as pool:
        playing = [pool.submit(_played, number) for number in range(len(parts))]
        try:
            start.wait(WAIT_S)
        except threading.BrokenBarrierError:
            pool.shutdown(wait=False, cancel_futures=True)
            raise SystemExit("a runtime's process ended, or hung, before all were ready") from None
        before = _cpu_s(server_pid)
        played = [one.result(10 * WAIT_S) for one in playing]
        server_s = _cpu_s(server_pid) - before
    return Crowd(
        warm_up=[record for one in played for record in one[0]],
        measured=[record for one in played for record in one[1]],
        open_ns=max(one[2] for one in played),
        # What comes after the first is done is not the same load.
        close_ns=min(one[1][-1].end_ns for one in played),
        server_s=server_s,
        clients_s=sum(one[3] for one in played),
        runtimes=len(parts),
    )


def _played(number: int) -> Played:
    return _PLAYS[-1](number)


def _play(url: str, parts: Sequence[Sequence[Actor | None]], warm_up: int, start: Any, number: int) -> Played:
    """In a runtime's process: warm up, wait for the others, and do the rest."""
    loop, part = Loop(), parts[number]
    gate = CountingGate(url, loop)
    gc.freeze()
    first = [_timed(actor, gate, loop) for actor in part[:warm_up]]
    start.wait(WAIT_S)
    open_ns, cpu_s = time.perf_counter_ns(), time.process_time()
    rest = [_timed(actor, gate, loop) for actor in part[warm_up:]]
    return first, rest, open_ns, time.process_time() - cpu_s


def cryptography_us(rounds: int = 200) -> float:
    """Return the median microseconds of what no gate can leave out, over messages of the sizes of real ones.

    Two verifications of the token (once a request), one of the challenge request, two of the evidence, the
    signature of the result, and the HPKE seal of the package key.
    """
    key, recipient = SigningKey.generate(), RecipientKey.generate().public
    token, asked, evidence = bytes(1100), bytes(REQUESTS["/v1/challenge"]), bytes(REQUESTS["/v1/evidence"])
    signed = [(message, key.sign(message)) for message in (token, token, asked, evidence, evidence)]

    def once() -> None:
        for message, signature in signed:
            verify_signature(key.public, signature, message)
        key.sign(token)
        hpke_seal(bytes(32), recipient=recipient, info=bytes(600))

    return 1e6 * statistics.median(timeit.repeat(once, number=1, repeat=rounds))


# An honest runtime beside strangers.


def _scenario(load: dict[str, Any], bar: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="glasshouse-gate-") as folder, BrokerProcess(Path(folder)) as broker:
        owner = Owner(broker, releases=MAX_RELEASES)
        quiet: list[Record] = []
        loaded: list[Record] = []
        ratios: list[float] = []
        busy_s = 0.0
        with _reporting(owner) as gaps:
            _exchanges(owner, 1.0)  # warm up
            for _ in range(rounds):
                before = _exchanges(owner, QUIET_S)
                with beside(strangers, broker.runtime_url, load, _messages(owner, load.get("only"))):
                    began = _cpu_s(broker.pid)
                    after = _exchanges(owner, LOAD_S)
                    busy_s += _cpu_s(broker.pid) - began
                ratios.append(statistics.median(one.ms for one in after) / statistics.median(one.ms for one in before))
                quiet, loaded = quiet + before, loaded + after
                time.sleep(0.5)  # until what the load left is gone
    return {
        "bar": bar,
        "broker_cpu_share": round(busy_s / (rounds * LOAD_S), 3),
        "load": {**load, "addresses": len(load["addresses"])},
        "load_ms": [record.ms for record in loaded],
        "longest_without_head_s": round(max(gaps), 3),
        "quiet_ms": [record.ms for record in quiet],
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "tried_again": sum(record.requests > len(REQUESTS) for record in loaded),
    }


def _exchanges(owner: Owner, seconds: float) -> list[Record]:
    """Attest new runtimes, one after the other, for a while."""
    loop, records = Loop(), []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        actor = Actor.enter(owner)
        records.append(_timed(actor, CountingGate(actor.url, loop), loop))
        if records[-1].code:
            raise SystemExit(f"an honest runtime was refused: {records[-1].code}")
        time.sleep(PAUSE_S)
    return records


class Reported:
    """The log of a run that attests, and what its broker has confirmed of it."""

    def __init__(self, owner: Owner) -> None:
        self.actor = actor = Actor.enter(owner)
        exchange(actor, BrokerClient(actor.url, Loop()), Loop())
        self.log = EventLog(
            run_id=actor.launch.run_id, evidence_key=actor.evidence, clock_us=clock_us, sink=lambda _line: None
        )
        self._confirmed = 0

    def send(self) -> bytes:
        """Send the log's head and return it; empty where it was not confirmed."""
        head = self.log.head()
        message = HeadSubmission(head=head, proof=tuple(self.log.consistency(self._confirmed, self.log.size))).encode()
        with contextlib.suppress(GlasshouseError):
            if self.actor.post("/v1/heads", message).status == 200:
                self._confirmed = self.log.size
                return head
        return b""


def _messages(owner: Owner, only: str | None) -> list[Message]:
    """Return what strangers send: all that is known, or of one path the dearest that nobody signed."""
    actor = Actor.enter(owner)
    evidence = hostile_evidence(actor.claims(actor.challenge()), actor.launch.key().key_id)
    key, head = _ended(owner)
    receipts = unsigned_receipts(key.key_id, head)
    if only is not None:
        return [next(one for one in (evidence[-1], receipts[0]) if one.path == only)]
    # Of a run of its own: its broker looks at one signed receipt of a key, and at no other by it.
    return [*hostile(), *evidence, *receipts, hostile_receipt(*_ended(owner))]


def _ended(owner: Owner) -> tuple[SigningKey, bytes]:
    """Attest a run that ends at once; return its evidence key and its last head, countersigned."""
    run = Reported(owner)
    run.log.transition(State.ZEROIZING, code=Code.INTERRUPTED)
    run.log.transition(State.ZEROIZED, outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED)
    return run.actor.evidence, run.send()


@contextlib.contextmanager
def _reporting(owner: Owner) -> Iterator[list[float]]:
    """Keep a run's lease alive as a runtime does; the list is of seconds from one countersigned head to the next."""
    gaps, stop = [0.0], threading.Event()
    thread = threading.Thread(target=_report, args=(Reported(owner), gaps, stop))
    thread.start()
    try:
        yield gaps
    finally:
        stop.set()
        thread.join()


def _report(run: Reported, gaps: list[float], stop: threading.Event) -> None:
    last = time.monotonic()
    while not stop.wait(HEAD_EVERY_S):
        run.log.append(EventType.NOTICE, {"code": "alive", "value": None})
        if run.send():
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
    gaps.append(time.monotonic() - last - HEAD_EVERY_S)


def _cpu_s(pid: int) -> float:
    # The process's own clock (clock_getcpuclockid(3)): /proc counts in hundredths, and a short run has none.
    return time.clock_gettime((~pid << 3) | 2)


def _show(level: dict[str, Any]) -> None:
    """Print a level as soon as it is measured."""
    numbers = [f"{name.replace('_', ' ')} {value:g}" for name, value in level.items() if name != "times_ms"]
    print(", ".join(numbers), flush=True)


if __name__ == "__main__":
    sys.exit(main())
