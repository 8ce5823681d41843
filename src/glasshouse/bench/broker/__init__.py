"""Measures the broker under runtimes that attest at the same time: rate, waits, and that nothing is lost or doubled.

Everything is real: the broker in its own process as it is served, HTTP over loopback, its database on a disk with
synced commits, every runtime a process with the agent's own code. Laws: what the clients hold is compared with the
database after the broker was killed, over every exchange of the run, warm-up included; one lost or doubled release
fails the benchmark whatever the rate. Clients and broker share the machine's cores: the rate is that of both together.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glasshouse.bench.broker import bare
from glasshouse.bench.broker.counts import Counts, Kept, compare
from glasshouse.bench.broker.load import Level, measure
from glasshouse.bench.broker.owner import Owner, Work
from glasshouse.broker.process import BrokerProcess
from glasshouse.broker.service import DATABASE_NAME
from glasshouse.errors import Code, InternalError, UsageError

__all__ = ["SWEEP", "run"]

SWEEP = (1, 2, 4, 8, 16)
JUDGED = 8
"""The number of runtimes that the bars are about; the largest measured where it is not among them."""
MAX_RUNTIMES = 64
BARS = {"releases_per_s": 100.0, "p99_ms": 250.0}
_PROBED = 50
_SPARE = 1.5
_MEMORY = frozenset({"tmpfs", "ramfs"})


def run(
    *,
    runtimes: Sequence[int] = SWEEP,
    seconds: float = 5.0,
    warm_up_s: float = 1.0,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Measure whole exchanges (challenge, evidence, release opened) at several numbers of concurrent runtimes.

    Args:
        runtimes: how many at a time, one level after the other.
        seconds, warm_up_s: how long each level is measured, and goes on before that.
        folder: where the database lies; storage that outlives a restart by default.

    Returns:
        `levels`, `bare_requests`, `instead`, `ratios`, `counts`, `contested_budget`, `bars` and what the numbers
        were taken on.

    Raises:
        UsageError: numbers that measure nothing.
        InternalError: a process of the benchmark failed.
    """
    if not runtimes or not all(1 <= number <= MAX_RUNTIMES for number in runtimes):
        raise UsageError(Code.USAGE, f"the benchmark takes 1 to {MAX_RUNTIMES} runtimes at a time")
    if not (0.1 <= seconds <= 600 and 0 <= warm_up_s <= 60):
        raise UsageError(Code.USAGE, "the benchmark measures for 0.1 to 600 s after at most 60 s of warm-up")
    if not sys.platform.startswith("linux"):
        raise UsageError(Code.PLATFORM, "the benchmark plays the agent, which needs Linux")
    place = folder or _lasting()
    judged = JUDGED if JUDGED in runtimes else max(runtimes)
    with _folders(place) as (data, sockets):
        bench = _Bench(BrokerProcess(sockets, data=data), seconds=seconds, warm_up_s=warm_up_s)
        try:
            levels = [bench.level(number) for number in sorted(set(runtimes))]
            contested = bench.contested(judged)
        finally:
            # Killed, not stopped: what was answered must be there already.
            bench.broker.kill()
        counts = compare(bench.held, Kept.read(data / DATABASE_NAME), bench.owner.budgets)
        bare_requests, instead = bench.nothing(judged), _floors(data)
    return _report(
        levels,
        bare_requests,
        contested=contested,
        counts=counts,
        instead=instead,
        judged=judged,
        filesystem=_filesystem(place),
    )


class _Bench:
    """A broker, its owner, and all releases that runtimes hold so far."""

    def __init__(self, broker: BrokerProcess, *, seconds: float, warm_up_s: float) -> None:
        self._seconds, self._warm_up_s = seconds, warm_up_s
        self._per_s, self._widest = 0.0, 1
        self.held: list[tuple[str, str]] = []
        self.broker = broker
        try:
            self.owner = Owner(self.broker)
        except BaseException:
            self.broker.kill()
            raise

    def level(self, runtimes: int) -> dict[str, Any]:
        """Measure one number of runtimes, with as many launches as they may need, and some to spare."""
        if not self._per_s:
            self._keep(self._measure([self.owner.work(_PROBED)], seconds=60.0, warm_up_s=0.0))
        # Several can at most double what one did, for it waits while the broker works; later levels follow the others.
        more = 2 if self._widest == 1 < runtimes else 1
        self._widest = runtimes
        wanted = self._per_s * more * _SPARE * (self._seconds + self._warm_up_s)
        each = max(_PROBED, math.ceil(wanted / runtimes))
        return self._keep(self._measure([self.owner.work(each) for _ in range(runtimes)]))

    def contested(self, runtimes: int) -> dict[str, Any]:
        """Let more runtimes ask, all at once, than the budget has releases for; exactly the budget may be held."""
        budget = runtimes
        work = self.owner.contested(budget=budget, processes=runtimes, launches=2)
        level = self._measure([[part] for part in work], seconds=60.0, warm_up_s=0.0)
        self.held += level.held
        refused = sum(code == Code.RELEASE_BUDGET.value for code in level.refused)
        return {
            "budget": budget,
            "asked": 2 * runtimes,
            "released": len(level.held),
            "refused": refused,
            "exact": (len(level.held), refused) == (budget, 2 * runtimes - budget),
        }

    def nothing(self, runtimes: int) -> dict[str, Any]:
        """Measure as many requests of the same sizes at the same server, which does nothing with them."""
        with _bare_server() as (pid, url):
            tasks = [{"url": url, "bare": bare.REQUESTS} for _ in range(runtimes)]
            level = measure(tasks, server_pid=pid, seconds=self._seconds, warm_up_s=self._warm_up_s)
        return level.numbers

    def _measure(
        self, work: Sequence[Sequence[Work]], *, seconds: float | None = None, warm_up_s: float | None = None
    ) -> Level:
        return measure(
            [{"url": self.broker.runtime_url, "work": [dataclasses.asdict(part) for part in parts]} for parts in work],
            server_pid=self.broker.pid,
            seconds=self._seconds if seconds is None else seconds,
            warm_up_s=self._warm_up_s if warm_up_s is None else warm_up_s,
        )

    def _keep(self, level: Level) -> dict[str, Any]:
        self.held += level.held
        self._per_s = max(self._per_s, level.numbers["per_s"])
        return level.numbers


@contextmanager
def _folders(place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for the database on the storage that is meant, and one with a short path for the sockets."""
    with (
        tempfile.TemporaryDirectory(dir=place, prefix="glasshouse-bench-") as data,
        tempfile.TemporaryDirectory(prefix="glasshouse-") as sockets,
    ):
        yield Path(data), Path(sockets)


@contextmanager
def _bare_server() -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-I", "-m", "glasshouse.bench.broker.idle"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip() if process.stdout else ""
        if not url:
            raise InternalError(Code.INTERNAL, "the bare server did not start; its reason is on standard error")
        try:
            yield process.pid, url
        finally:
            process.kill()


def _floors(folder: Path) -> dict[str, Any]:
    return {"cryptography_us": round(bare.cryptography_us(), 1), "two_commits_us": round(bare.commits_us(folder), 1)}


def _report(
    levels: list[dict[str, Any]],
    bare_requests: dict[str, Any],
    *,
    contested: dict[str, Any],
    counts: Counts,
    instead: dict[str, Any],
    judged: int,
    filesystem: str,
) -> dict[str, Any]:
    level = next(level for level in levels if level["runtimes"] == judged)
    failed = sum(one["failed"] for one in levels)
    wrong = counts.wrong + failed + (0 if contested["exact"] else 1)
    per_s, p99_ms = level["per_s"], level["exchange_ms"]["p99"]
    bars: dict[str, Any] = {
        "releases_per_s": {"at_least": BARS["releases_per_s"], "found": per_s, "met": per_s >= BARS["releases_per_s"]},
        "p99_ms": {"at_most": BARS["p99_ms"], "found": p99_ms, "met": p99_ms <= BARS["p99_ms"]},
        "lost_doubled_or_failed": {"at_most": 0, "found": wrong, "met": wrong == 0},
    }
    plain, cpu_ms = bare_requests, level["server_cpu_ms"]
    ratios = {"rate_to_bare_requests": round(per_s / plain["per_s"], 3)}
    if cpu_ms is not None:
        ratios["broker_cpu_to_bare_requests"] = round(cpu_ms / plain["server_cpu_ms"], 3)
        ratios["broker_cpu_to_cryptography"] = round(1000 * cpu_ms / instead["cryptography_us"], 3)
    return {
        "bars": bars,
        "judged_at_runtimes": judged,
        "ratios": ratios,
        "levels": levels,
        "bare_requests": bare_requests,
        "instead": {"bare_requests_per_s": bare_requests["per_s"], **instead},
        "counts": dataclasses.asdict(counts),
        "contested_budget": contested,
        "cores_shared_by_all": len(os.sched_getaffinity(0)),
        "filesystem": filesystem,
        "database_on_disk": filesystem not in _MEMORY,
    }


def _lasting() -> Path:
    """Return a folder for files that outlive a restart: a commit to memory would cost nothing and hold nothing."""
    place = Path("/var/tmp")  # noqa: S108 - the directory in it is private
    return place if place.is_dir() and os.access(place, os.W_OK) else Path(tempfile.gettempdir())


def _filesystem(place: Path) -> str:
    """Return the kind of filesystem that `place` lies on."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if place.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind
