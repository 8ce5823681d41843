"""Several runtimes at once against one listener, and what they found in a window of time.

Laws: every runtime is a process of its own, ready before the first begins; the window opens after a warm-up and
closes while all of them are still at work, so that the number that is told was kept up by all of them together.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from glasshouse.bench.processes import cpu_s
from glasshouse.errors import Code, InternalError

__all__ = ["Level", "measure", "quantiles_ms"]

_LEAD_NS = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What a number of runtimes found together.

    Attributes:
        numbers: for the report.
        held: (run, digest of the HPKE key) of every release that was opened, warm-up included.
        refused: codes of all exchanges that got none.
    """

    numbers: dict[str, Any]
    held: list[tuple[str, str]]
    refused: list[str]


def measure(tasks: Sequence[dict[str, Any]], *, server_pid: int, seconds: float, warm_up_s: float) -> Level:
    """Run one process for each task, all at the same time, until the time is up or a task is done.

    Args:
        tasks: what `runtime` reads on its standard input.
        server_pid: whose CPU time is told apart.
        seconds, warm_up_s: length of the window, and of what comes before it.

    Raises:
        InternalError: a runtime's process failed, or nothing was done in the window.
    """
    clients = [_Client(task) for task in tasks]
    try:
        for client in clients:
            client.wait_ready()
        begin_ns = time.perf_counter_ns() + _LEAD_NS
        open_ns = begin_ns + int(warm_up_s * 1e9)
        stop_ns = open_ns + int(seconds * 1e9)
        for client in clients:
            client.go(begin_ns, stop_ns)
        time.sleep(max(0, open_ns - time.perf_counter_ns()) / 1e9)
        before = cpu_s(server_pid)
        reports = [client.report() for client in clients]
        after = cpu_s(server_pid)
    finally:
        for client in clients:
            client.end()
    server_s = None if before is None or after is None else after - before
    return _level(reports, open_ns=open_ns, stop_ns=stop_ns, server_s=server_s)


def _level(reports: list[dict[str, Any]], *, open_ns: int, stop_ns: int, server_s: float | None) -> Level:
    # A runtime that ran out of launches closes the window for all: what comes later is not the same load.
    close_ns = min([stop_ns, *(report["ended_ns"] for report in reports)])
    records = [record for report in reports for record in report["records"]]
    good = [record for record in records if not record["code"]]
    inside = [record for record in good if open_ns <= record["end_ns"] <= close_ns]
    if not inside:
        raise InternalError(
            Code.INTERNAL,
            "no exchange ended in the window of the measurement",
            hint="measure for longer; a server that answers nobody shows in the refusals: "
            + ", ".join(sorted({record["code"] for record in records if record["code"]})),
        )
    paths = sorted({path for record in inside for path, _ in record["requests"]})
    seconds = (close_ns - open_ns) / 1e9
    since_open = sum(record["end_ns"] >= open_ns for record in good)
    numbers: dict[str, Any] = {
        "runtimes": len(reports),
        "seconds": round(seconds, 3),
        "exchanges": len(inside),
        "per_s": round(len(inside) / seconds, 1),
        "exchange_ms": quantiles_ms([record["end_ns"] - record["begin_ns"] for record in inside]),
        **{
            f"{path.rpartition('/')[2]}_ms": quantiles_ms(
                [ns for record in inside for name, ns in record["requests"] if name == path]
            )
            for path in paths
        },
        "server_cpu_ms": None if server_s is None else round(1000 * server_s / since_open, 3),
        "client_cpu_ms": round(1000 * sum(report["cpu_s"] for report in reports) / len(records), 3),
        "tried_again": sum(len(record["requests"]) > len(paths) for record in records),
        "failed": len(records) - len(good),
        "ran_out_of_launches": close_ns < stop_ns,
    }
    return Level(
        numbers=numbers,
        held=[(record["run_id"], record["hpke_sha256"]) for record in good],
        refused=[record["code"] for record in records if record["code"]],
    )


def quantiles_ms(times_ns: Sequence[int]) -> dict[str, float]:
    """Return p50, p90, p99 and the longest, in milliseconds: each a time that was measured (nearest rank)."""
    ordered = sorted(times_ns)
    ranks = {name: math.ceil(share * len(ordered)) - 1 for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {name: round(ordered[rank] / 1e6, 3) for name, rank in {**ranks, "max": len(ordered) - 1}.items()}


class _Client:
    """A runtime's process; it ends with its standard input."""

    def __init__(self, task: dict[str, Any]) -> None:
        command = [sys.executable, "-I", "-m", "glasshouse.bench.broker.runtime"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tell(json.dumps(task))

    def wait_ready(self) -> None:
        if self._line() != "ready\n":
            raise _failed()

    def go(self, begin_ns: int, stop_ns: int) -> None:
        self._tell(f"{begin_ns} {stop_ns}")

    def report(self) -> dict[str, Any]:
        line = self._line()
        if not line.endswith("\n"):
            raise _failed()
        report: dict[str, Any] = json.loads(line)
        return report

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _tell(self, line: str) -> None:
        if self._process.stdin is None:
            raise _failed()
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            raise _failed() from None

    def _line(self) -> str:
        return self._process.stdout.readline() if self._process.stdout else ""


def _failed() -> InternalError:
    return InternalError(Code.INTERNAL, "a runtime of the benchmark ended early; its reason is on standard error")
