"""Small all-reduces of two ranks, on quiet cores and beside two processes that keep them busy.

Usage: ``python benchmarks/collectives_busy.py OUT.json``. Takes a minute and a half.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from glasshouse.bench.collectives.measurement import Measurement
from glasshouse.bench.collectives.plan import Plan
from glasshouse.bench.collectives.run import measure
from glasshouse.bench.collectives.values import Cell, Kind, Way
from glasshouse.bench.collectives.words import cell_words, time_words, times_words
from glasshouse.cli.bench_collectives_view import Silent

WAYS = (Way.RAW, Way.SEALED, Way.NETWORK)
CELLS = tuple(Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=size, ways=WAYS) for size in (64 << 10, 1 << 20))
BUSY = {"quiet": 0, "busy": 2}


def main(path: Path) -> None:
    found = {name: _beside(processes) for name, processes in BUSY.items()}
    kept = {name: one.to_json() for name, one in found.items()}
    path.write_text(json.dumps({"system": kept["quiet"]["system"], **kept}) + "\n")
    for name, one in found.items():
        for cell in one.found:
            ratios = ", ".join(f"{way.value} {times_words(cell.ratio(way).value)}" for way in WAYS[1:])
            others = f"others kept {cell.foreign_cpu:.1f} processors busy"
            print(f"{name}, {cell_words(cell.cell)}: raw {time_words(cell.seconds(Way.RAW))}, {ratios}; {others}")


def _beside(processes: int) -> Measurement:
    with ExitStack() as beside:
        for _ in range(processes):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            beside.callback(process.wait)
            beside.callback(process.kill)
        return measure(Plan(cells=CELLS, time_s=35, seed=int.from_bytes(os.urandom(4)), quick=False), Silent())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
