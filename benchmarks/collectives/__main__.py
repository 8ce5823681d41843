"""What sealed collectives cost beside gloo's plaintext ones: ``make bench-collectives``.

All of it takes about twenty minutes; `--quick` tries it out. The exit status is 1 when a bar is missed or a rank
failed, and 130 after an interrupt; what is complete by then is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.collectives.cells import DTYPES, REPLAYED, TRAINED, Kind, plan
from benchmarks.collectives.run import measure
from benchmarks.collectives.tables import markdown, tables
from benchmarks.kept import options

__all__ = ["main"]

MIB = 1 << 20
SIZES = [MIB // 16, MIB // 4, MIB, 4 * MIB, 25 * MIB, 100 * MIB]
CAPS_MIB = [None, 1, 5, 100, 250]  # of buckets; None is DDP's own
CELL_S = 12  # beyond five rounds
QUICK_MODELS = ["resnet-2m", "resnet-50"]


def _size(text: str) -> int:
    factor = {"K": 1 << 10, "M": MIB}.get(text[-1:].upper(), 0)
    if not factor or not 1 <= int(text[:-1]) <= 4_096:
        raise argparse.ArgumentTypeError(f"a size is such as 64K or 25M, not {text[:40]!r}")
    return factor * int(text[:-1])


def _parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(map(str, Kind)), default=list(Kind), metavar="PART", help=", ".join(Kind))
    add("--ranks", nargs="+", type=int, choices=range(2, 17), default=[2, 4], metavar="N", help="numbers of processes")
    add("--sizes", nargs="+", type=_size, default=SIZES, metavar="SIZE", help="of all-reduced tensors: 64K 25M")
    add("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], metavar="TYPE", help="the first leads")
    add("--beside", type=int, choices=range(65), default=0, metavar="N", help="busy processes that run meanwhile")
    add("--quick", action="store_true", help="a trial of a few cells, whose numbers are no result")
    return parser


def main(words: Sequence[str]) -> int:
    """Measure, print, keep; return the exit status."""
    parser = _parser()
    if "--quick" in words:
        parser.set_defaults(ranks=[2], sizes=[MIB // 16, MIB], dtypes=["float32"])
    asked = parser.parse_args(words)
    models, caps, seconds = (QUICK_MODELS, [None], 1) if asked.quick else ([*TRAINED, *REPLAYED], CAPS_MIB, CELL_S)
    cells = plan(ranks=asked.ranks, parts=asked.parts, sizes=asked.sizes, models=models, caps=caps, dtypes=asked.dtypes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit is an interrupt
    memory = [25 * MIB] if Kind.ALL_REDUCE in asked.parts else []
    with _busy(asked.beside):
        document = measure(cells, seconds=seconds, seed=secrets.randbelow(1 << 53), memory=memory)
    document |= {"beside": asked.beside, "quick": asked.quick}
    if asked.output is not None:
        asked.output.write_text(json.dumps(document) + "\n")
    print(*(f"\n{name}\n{markdown(table)}" for name, table in tables([document]).items() if len(table) > 1), sep="")
    if document["failed"] is not None:
        print(f"It ended early, with {len(document['not_measured'])} cells not measured: {document['failed']}")
        return 130 if document["failed"] == "stopped" else 1
    if asked.quick:
        print("A quick trial judges nothing: a few rounds of each are no result.")
    return int(not asked.quick and any(not bar["met"] for bar in document["bars"].values()))


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep cores busy with `count` processes that do nothing else."""
    with contextlib.ExitStack() as beside:
        for _ in range(count):
            # In a session of its own, an interrupt from the terminal does not end it early.
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
            beside.callback(process.wait)
            beside.callback(process.kill)
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
