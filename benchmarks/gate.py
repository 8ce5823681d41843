"""What strangers at the broker's door cost an honest runtime: exchanges and heads, quiet and under load, in turn.

Run from a checkout: ``python benchmarks/gate.py --out benchmarks/results/gate_NAME.json``. It takes three minutes.
Every load goes to a broker of its own on the loopback, is bounded in number and time, and ends with this program.
Absolute times are this machine's. What is compared with the bars is a ratio: of the median exchange under load to the
median just before it, and of these ratios the median over all rounds. Other work on the machine shows in `load_1m`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from glasshouse.broker.client import Reply
from glasshouse.broker.process import BrokerProcess
from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.events import EventType
from glasshouse.evidence.heads import HeadSubmission
from glasshouse.evidence.log import EventLog
from glasshouse.tamper.stage import Actor, Owner, clock_us

ROUNDS = 5
QUIET_S, LOAD_S = 1.0, 2.0
PAUSE_S = 0.05
RETRY_S = 0.2  # as a runtime waits
LEASE_S = 5.0
HEAD_EVERY_S = 1.0
HOSTILE_BYTES = 124_000
MANY = [f"127.0.{block}.{host}" for block in (1, 2) for host in range(1, 101)]

# Name, what strangers do and from where, and the bar.
SCENARIOS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("idle, from the honest address", {"idle": 1000, "new_per_s": 50, "addresses": ["127.0.0.1"]}, 2.0),
    ("idle, from 200 addresses", {"idle": 1000, "new_per_s": 50, "addresses": MANY}, 2.0),
    ("idle and refilled, from 200 addresses", {"idle": 1000, "new_per_s": 500, "addresses": MANY}, 2.0),
    ("slow bodies, from 200 addresses", {"idle": 1000, "new_per_s": 50, "addresses": MANY, "slow": True}, 2.0),
    ("hostile, from the honest address", {"hostile_per_s": 100, "addresses": ["127.0.0.1"]}, 3.0),
    ("hostile, from 200 addresses", {"hostile_per_s": 100, "addresses": MANY}, 3.0),
    ("both, from 200 addresses", {"idle": 1000, "new_per_s": 50, "hostile_per_s": 100, "addresses": MANY}, 3.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the result goes; otherwise it is printed alone")
    parser.add_argument("--only", default="", help="only scenarios whose name begins so")
    parser.add_argument("--strangers", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.strangers:
        asyncio.run(_strangers(json.loads(options.strangers)))
        return
    result = measure(options.only)
    text = json.dumps(result, indent=1, sort_keys=True) + "\n"
    if options.out:
        options.out.write_text(text)
    for name, found in result["scenarios"].items():
        quiet, load, ratios = found["quiet_ms"]["p50"], found["load_ms"]["p50"], found["ratios"]
        print(
            f"{name:40s} p50 {quiet:6.1f} -> {load:6.1f} ms"
            f"  x{found['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}; bar x{found['bar']:.0f})"
            f"  again {found['tried_again']}  longest without a head {found['longest_without_head_s']:.2f} s",
            flush=True,
        )
    if not all(found["held"] for found in result["scenarios"].values()):
        sys.exit("a bar was missed")


def measure(only: str = "") -> dict[str, Any]:
    """Run the scenarios, each against a broker of its own."""
    before = os.getloadavg()[0]
    found = {name: _scenario(load, bar) for name, load, bar in SCENARIOS if name.startswith(only)}
    return {
        "lease_s": LEASE_S,
        "machine": {
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
            "load_1m": [round(before, 2), round(os.getloadavg()[0], 2)],
            "python": platform.python_version(),
        },
        "rounds": ROUNDS,
        "scenarios": found,
    }


def _scenario(load: dict[str, Any], bar: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="glasshouse-gate-") as folder, BrokerProcess(Path(folder)) as broker:
        owner = Owner(broker, releases=1000)
        quiet: list[float] = []
        loaded: list[float] = []
        ratios: list[float] = []
        again, busy_s = 0, 0.0
        with _reporting(owner) as gaps:
            _exchanges(owner, 1.0)  # warm up
            for _ in range(ROUNDS):
                before = _exchanges(owner, QUIET_S)[0]
                with _load(broker.runtime_url, load):
                    began = _cpu_s(broker.pid)
                    times, tries = _exchanges(owner, LOAD_S)
                    busy_s += _cpu_s(broker.pid) - began
                ratios.append(statistics.median(times) / statistics.median(before))
                quiet += before
                loaded += times
                again += tries
                time.sleep(0.5)  # until what the load left is gone
    ratio = statistics.median(ratios)
    longest_s = max(gaps)
    return {
        "bar": bar,
        "broker_cpu_share": round(busy_s / (ROUNDS * LOAD_S), 3),
        "exchanges": {"load": len(loaded), "quiet": len(quiet)},
        "held": ratio <= bar and longest_s < LEASE_S,
        "load": {**load, "addresses": len(load["addresses"])},
        "load_ms": _quantiles(loaded),
        "longest_without_head_s": round(longest_s, 3),
        "quiet_ms": _quantiles(quiet),
        "ratio": round(ratio, 3),
        "ratios": [round(one, 3) for one in ratios],
        "tried_again": again,
    }


def _exchanges(owner: Owner, seconds: float) -> tuple[list[float], int]:
    """Attest new runtimes, one after the other, for a while; return each one's time, and how often one came again."""
    times, again = [], 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        actor = Actor.enter(owner)
        began = time.perf_counter()
        while True:
            try:
                challenge = actor.challenge()
                evidence = actor.sign(actor.claims(challenge))
                if actor.open(actor.send(evidence).content(), challenge, evidence) != owner.package_key:
                    raise SystemExit("another key than the package's")
                break
            except GlasshouseError as error:
                if error.code is not Code.BROKER_UNREACHABLE:
                    raise
                again += 1
                time.sleep(RETRY_S)
        times.append(1000 * (time.perf_counter() - began))
        time.sleep(PAUSE_S)
    return times, again


@contextlib.contextmanager
def _reporting(owner: Owner) -> Iterator[list[float]]:
    """Keep a run's lease alive as a runtime does; the list is of seconds from one countersigned head to the next."""
    actor = Actor.enter(owner)
    challenge = actor.challenge()
    evidence = actor.sign(actor.claims(challenge))
    actor.open(actor.send(evidence).content(), challenge, evidence)
    gaps, stop = [0.0], threading.Event()
    thread = threading.Thread(target=_report, args=(actor, gaps, stop))
    thread.start()
    try:
        yield gaps
    finally:
        stop.set()
        thread.join()


def _report(actor: Actor, gaps: list[float], stop: threading.Event) -> None:
    log = EventLog(run_id=actor.launch.run_id, evidence_key=actor.evidence, clock_us=clock_us, sink=lambda _line: None)
    confirmed, last = 0, time.monotonic()
    while not stop.wait(HEAD_EVERY_S):
        log.append(EventType.NOTICE, {"code": "alive", "value": None})
        message = HeadSubmission(head=log.head(), proof=tuple(log.consistency_from(confirmed))).encode()
        if _sent(lambda message=message: actor.post("/v1/heads", message)):  # type: ignore[misc]
            confirmed = log.size
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
    gaps.append(time.monotonic() - last - HEAD_EVERY_S)


def _sent(post: Callable[[], Reply]) -> bool:
    try:
        return post().status == 200
    except GlasshouseError:
        return False


@contextlib.contextmanager
def _load(url: str, load: dict[str, Any]) -> Iterator[None]:
    told = json.dumps({**load, "seconds": LOAD_S + 5, "url": url})
    process = subprocess.Popen([sys.executable, __file__, "--strangers", told], stdout=subprocess.PIPE)
    try:
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            raise SystemExit("the strangers did not come")
        yield
        if process.poll() is not None:
            raise SystemExit("the strangers went before the end")
    finally:
        process.kill()
        process.communicate()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    picked = {name: ordered[math.ceil(q * len(ordered)) - 1] for name, q in (("p90", 0.9), ("max", 1.0))}
    return {name: round(value, 3) for name, value in {"p50": statistics.median(ordered), **picked}.items()}


# The strangers: a process of their own, so that what they cost is not counted to the honest one.


async def _strangers(load: dict[str, Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    host, _, port = load["url"].removeprefix("http://").rpartition(":")
    where, addresses = (host, int(port)), itertools.cycle(load["addresses"])
    tasks: list[asyncio.Task[None]] = []
    if load.get("idle"):
        held: set[asyncio.Transport] = set()
        for _ in range(load["idle"]):
            await _idle(held, where, next(addresses), slow=load.get("slow", False))
        tasks.append(asyncio.create_task(_keep_idle(held, where, addresses, load)))
    if load.get("hostile_per_s"):
        tasks.append(asyncio.create_task(_keep_hostile(where, addresses, load["hostile_per_s"])))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.sleep(load["seconds"])


class _Held(asyncio.Protocol):
    def __init__(self, held: set[asyncio.Transport]) -> None:
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._held.add(transport)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self._transport)


async def _idle(held: set[asyncio.Transport], where: tuple[str, int], source: str, *, slow: bool) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        transport, _ = await loop.create_connection(lambda: _Held(held), *where, local_addr=(source, 0))
        if slow:
            transport.write(_head("/v1/evidence", HOSTILE_BYTES) + b"{")


async def _keep_idle(
    held: set[asyncio.Transport], where: tuple[str, int], addresses: Iterator[str], load: dict[str, Any]
) -> None:
    while True:
        began = time.monotonic()
        for _ in range(load["new_per_s"] // 10):
            await _idle(held, where, next(addresses), slow=load.get("slow", False))
        while len(held) > 2 * load["idle"]:
            held.pop().abort()
        await asyncio.sleep(max(0, began + 0.1 - time.monotonic()))


async def _keep_hostile(where: tuple[str, int], addresses: Iterator[str], per_s: int) -> None:
    messages = itertools.cycle(hostile())
    waiting: set[asyncio.Task[None]] = set()
    while True:
        began = time.monotonic()
        if len(waiting) < 4 * per_s:
            task = asyncio.create_task(_post(where, next(addresses), *next(messages)))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        await asyncio.sleep(max(0, began + 1 / per_s - time.monotonic()))


async def _post(where: tuple[str, int], source: str, path: str, body: bytes) -> None:
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(*where, local_addr=(source, 0))
        try:
            writer.write(_head(path, len(body)) + body)
            await asyncio.wait_for(reader.read(), 20)
        except (OSError, TimeoutError):
            pass
        finally:
            writer.close()


def _head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def hostile() -> list[tuple[str, bytes]]:
    """Messages of 124 KB that cost a reader as much as such a message can, for all that is known of it."""
    room = HOSTILE_BYTES - 2
    bombs = [
        b"[" + b"0," * (room // 2 - 1) + b"0]",
        b"[" + b"{}," * (room // 3 - 1) + b"{}]",
        b"[" + b"[[[0]]]," * (room // 8 - 1) + b"0]",
        b"{" + b",".join(b'"%05d":0' % number for number in range(room // 10)) + b"}",
        b"[" * room,
        b'"' + b"\\u00e9" * (room // 6) + b'"',
        b'"' + "é".encode() * (room // 2) + b'"',
        b"9" * room,
    ]
    signature = base64.b64encode(bytes(64)).decode()
    wrapped = []
    for bomb in bombs[:4]:
        inner = base64.b64encode(bomb[: room * 3 // 4 - 600]).decode()
        value = {
            "payload": inner,
            "payloadType": "application/vnd.glasshouse.evidence+json",
            "signatures": [{"keyid": name * 32, "sig": signature} for name in "ab"],
        }
        wrapped.append(json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
    return [("/v1/evidence", body) for body in (*bombs, *wrapped)]


if __name__ == "__main__":
    main()
