"""Writes the measured tables of docs/collectives.md from the kept results.

Between `<!-- measured: NAME -->` and `<!-- end -->` the page is this program's; a test holds it to that. To keep a new
measurement, copy its `collectives.json` to benchmarks/results/collectives-WHAT_HARDWARE_DATE.json and run this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from glasshouse.bench.collectives.measurement import Measurement, bars
from glasshouse.bench.collectives.paper import PUBLISHED
from glasshouse.bench.collectives.values import Cell, Found, Kind, Way
from glasshouse.bench.collectives.words import cell_words, size_words, time_words, times_words

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "collectives.md"
RESULTS = ROOT / "benchmarks" / "results"
_SECTION = re.compile(r"(<!-- measured: ([a-z-]+) -->\n).*?(<!-- end -->)", re.S)


def kept() -> dict[str, Measurement]:
    """Return the kept measurements by the name of their file, the newest first."""
    found = {path.name: Measurement.parse(path.read_bytes()) for path in sorted(RESULTS.glob("collectives-*.json"))}
    return dict(sorted(found.items(), key=lambda one: -one[1].created_us))


def render(page: str, found: dict[str, Measurement]) -> str:
    """Return the page with its measured sections written again."""
    makers = {
        "machine": _machines,
        "bars": _bars,
        "all-reduce": _exchanges,
        "training": _training,
        "replay": _replays,
        "paper": _paper,
        "phases": _phases,
    }

    def section(match: re.Match[str]) -> str:
        return match[1] + makers[match[2]](found) + match[3]

    return _SECTION.sub(section, page)


def _machines(found: dict[str, Measurement]) -> str:
    lines = []
    for number, (name, one) in enumerate(found.items(), 1):
        system = one.system
        where = f"{system['logical_cpus']} × {system['cpu']}, {system['kernel']}, torch {system['torch']}"
        busy = max((cell.foreign_cpu or 0.0 for cell in one.found), default=0.0)
        virtual = ", a virtual machine" if system["virtualised"] else ""
        lines.append(
            f"{number}. [{name}](../benchmarks/results/{name}): {where}{virtual}; "
            f"other programs kept at most {busy:.2f} processors busy.\n"
        )
    return "".join(lines)


def _bars(found: dict[str, Measurement]) -> str:
    rows = [
        (
            f"run {number}",
            bar.what,
            f"{bar.found:.3f} {bar.unit}",
            "" if bar.low is None or bar.high is None else f"{bar.low:.3f} to {bar.high:.3f}",
            f"{bar.at_most:g} {bar.unit}",
            "met" if bar.met else "**missed**",
        )
        for number, one in enumerate(found.values(), 1)
        for bar in bars(one)
    ]
    return _table(("", "what", "found", "95 % interval", "at most", ""), rows)


def _exchanges(found: dict[str, Measurement]) -> str:
    return _cells(found, Kind.ALL_REDUCE, (Way.SEALED, Way.NETWORK, Way.DIRECT, Way.RING, Way.SERIAL, Way.PLAIN))


def _training(found: dict[str, Measurement]) -> str:
    rows = []
    for cell in _of(found, Kind.TRAIN):
        exposed = [cell.exposed_s(way) for way in (Way.RAW, Way.SEALED)]
        rows.append(
            (
                cell_words(cell.cell),
                time_words(cell.seconds(Way.RAW)),
                *(_times(cell, way) for way in (Way.SEALED, Way.DIRECT, Way.RING, Way.SERIAL)),
                time_words(cell.seconds(Way.ALONE)) if Way.ALONE in cell.samples else "",
                " and ".join("" if value is None else time_words(value) for value in exposed),
                str(cell.whole_buckets),
            )
        )
    headers = (
        "iteration",
        "raw",
        "sealed",
        "direct",
        "ring",
        "serial",
        "computation",
        "exposed, raw and sealed",
        "all-reduces",
    )
    return _table(headers, rows)


def _replays(found: dict[str, Measurement]) -> str:
    rows = [
        (
            cell_words(cell.cell),
            str(cell.whole_buckets),
            f"{100 * cell.share:.0f} %",
            *(_times(cell, way) for way in (Way.SEALED, Way.DIRECT, Way.RING, Way.SERIAL)),
            time_words(cell.seconds(Way.RAW) / cell.share),
        )
        for cell in _of(found, Kind.REPLAY)
    ]
    headers = ("exchange", "all-reduces", "replayed", "sealed", "direct", "ring", "serial", "raw, scaled to the whole")
    return _table(headers, rows)


def _cells(found: dict[str, Measurement], kind: Kind, ways: Sequence[Way]) -> str:
    rows = [
        (
            cell_words(cell.cell),
            time_words(cell.seconds(Way.RAW)),
            *(_times(cell, way) for way in ways),
            _processor(cell),
        )
        for cell in _of(found, kind)
    ]
    return _table((kind.value, "raw", *(way.value for way in ways), "CPU, raw and sealed"), rows)


def _paper(found: dict[str, Measurement]) -> str:
    rows = [(one.what, one.shown, one.testbed) for one in PUBLISHED]
    for kind, what in ((Kind.TRAIN, "ours, trained iteration"), (Kind.REPLAY, "ours, exchange alone")):
        for cell in _of(found, kind):
            if cell.cell.cap_mib is not None or cell.cell.dtype != "float32":
                continue
            best = cell.best()
            if best is None or (kind is Kind.REPLAY and cell.cell.model != "gpt2-xl"):
                continue
            shown = f"{best.value} {_times(cell, best)}, serial {_times(cell, Way.SERIAL)}"
            rows.append((f"{what}: {cell_words(cell.cell)}", shown, "two CPU cores, one host, AES-256-GCM"))
    return _table(("what", "times the unprotected", "testbed"), rows)


def _phases(found: dict[str, Measurement]) -> str:
    rows = [
        (
            cell_words(cell.cell),
            way.value,
            f"{count.seal_calls + count.open_calls:,.0f}",
            size_words(round(count.seal_bytes + count.open_bytes)),
            size_words(round(count.received_bytes)),
            *(
                time_words(value)
                for value in (
                    count.seal_s,
                    count.open_s,
                    count.add_s,
                    count.system_s,
                    count.other_s,
                    count.wait_s,
                )
            ),
        )
        for cell in _of(found, Kind.ALL_REDUCE)
        if cell.cell.bytes == 25 << 20 and cell.cell.dtype == "float32"
        for way, count in cell.counts.items()
    ]
    headers = (
        "exchange",
        "way",
        "AEAD calls",
        "AEAD bytes",
        "received",
        "seal",
        "open",
        "add",
        "kernel",
        "control",
        "waiting",
    )
    return _table(headers, rows)


def _of(found: dict[str, Measurement], kind: Kind) -> list[Found]:
    """Return the cells of a kind, each as it was measured last."""
    cells: dict[Cell, Found] = {}
    for one in found.values():
        for cell in one.of(kind):
            cells.setdefault(replace(cell.cell, ways=()), cell)
    return list(cells.values())


def _times(cell: Found, way: Way) -> str:
    return times_words(cell.ratio(way).value) if way in cell.samples else ""


def _processor(cell: Found) -> str:
    ways = [way for way in (Way.RAW, Way.SEALED) if way in cell.samples]
    return " and ".join(time_words(cell.cpu_s(way)) for way in ways)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headers)} |", "|---" * len(headers) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(line.replace("\u00a0", " ") for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), kept()))
