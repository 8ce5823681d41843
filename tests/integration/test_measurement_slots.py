"""Two real processes that share nothing but a seed and the machine's clock keep out of each other's slots."""

from __future__ import annotations

import subprocess
import sys
import time

from glasshouse_bench.records import parse
from glasshouse_bench.sessions import session_of

WORKER = """
import sys
from glasshouse.workloads.slots import Pacer, Plan

print("ready", flush=True)
end_ns = int(sys.stdin.readline())
plan = Plan(
    seed=bytes(32), arm=sys.argv[1], slot_ns=50_000_000, steps=3, uncounted=1, warmup_steps=4, end_ns=end_ns
)
pacer = Pacer(plan)
going_on = pacer.boundary()
while going_on:
    sum(number * number for number in range(20_000))
    going_on = pacer.boundary(0.5)
sys.stdout.buffer.write(pacer.record(tokens_per_step=256))
"""


def test_two_processes_take_turns_by_the_machines_clock() -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, arm], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for arm in "RP"
    ]
    for worker in workers:
        assert worker.stdout
        assert worker.stdout.readline() == b"ready\n"
    end_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + 3 * 10**9
    for worker in workers:
        assert worker.stdin
        worker.stdin.write(b"%d\n" % end_ns)
        worker.stdin.flush()
    # Reading a record refuses each step that began outside its own worker's slots.
    raw, protected = (parse(worker.communicate()[0]) for worker in workers)
    assert [worker.returncode for worker in workers] == [0, 0]
    assert (raw.reason, protected.reason) == ("end", "end")
    assert (raw.until_ns, raw.tokens_per_step) == (end_ns, 256)
    assert set(raw.slots.tolist()).isdisjoint(protected.slots.tolist())
    assert min(len(raw.losses), len(protected.losses)) > 4
    assert session_of(raw, protected, length_ns=10**9).unlike_losses is None
