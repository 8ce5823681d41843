"""The tables of a measurement: printed after a run, and in docs/collectives.md, from the kept results.

    python -m benchmarks.collectives.tables     writes the page's tables again

Between `<!-- measured: NAME -->` and `<!-- end -->` the page is this program's; a test holds it to that.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collectives.cells import Kind, bars, best_of

__all__ = ["kept", "markdown", "render", "tables"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "collectives.md"
_SECTION = re.compile(r"(<!-- measured: ([a-z-]+) -->\n).*?(<!-- end -->)", re.S)

Document = Mapping[str, Any]
Table = list[tuple[str, ...]]


def kept() -> dict[str, Document]:
    """Return the kept measurements by the name of their file, the newest first."""
    paths = (ROOT / "benchmarks" / "results").glob("collectives-*_*.json")
    found = {path.name: json.loads(path.read_bytes()) for path in sorted(paths)}
    return dict(sorted(found.items(), key=lambda one: -one[1]["created_us"]))


def render(page: str, found: Mapping[str, Document]) -> str:
    """Return the page with its measured sections written again."""
    made = {name: markdown(table) for name, table in tables(list(found.values())).items()} | {"machine": _runs(found)}
    return _SECTION.sub(lambda match: match[1] + made[match[2]] + match[3], page)


def tables(found: Sequence[Document]) -> dict[str, Table]:
    """Return every table by its name, the header first; of a cell in several measurements the first one's numbers."""
    cells: dict[tuple[object, ...], Document] = {}
    for one in found:
        for cell in one["cells"]:
            key = tuple(cell[name] for name in ("kind", "ranks", "bytes", "model", "cap_mib", "dtype"))
            cells.setdefault(key, cell)
    of = {kind: [cell for cell in cells.values() if cell["kind"] == kind] for kind in Kind}
    return {
        "bars": _bars(found),
        "all-reduce": _cells(of[Kind.ALL_REDUCE]),
        "phases": _phases(of[Kind.ALL_REDUCE]),
        "training": _cells(of[Kind.TRAIN]),
        "replay": _cells(of[Kind.REPLAY]),
    }


def markdown(table: Table) -> str:
    """Return a table as the page has it."""
    head, *rows = (f"| {' | '.join(row)} |" for row in table)
    return "\n".join([head, "|---" * len(table[0]) + "|", *rows]) + "\n"


def _runs(found: Mapping[str, Document]) -> str:
    lines = []
    for number, (name, one) in enumerate(found.items(), 1):
        system = one["system"]
        where = f"{system['cores']} × {system['cpu']}, {system['kernel']}, torch {system['torch']}"
        busy = max(cell["foreign_cpu"] or 0.0 for cell in one["cells"])
        virtual = ", a virtual machine" if system["virtual"] else ""
        others = f"other programs kept at most {busy:.2f} processors busy"
        lines.append(f"{number}. [{name}](../benchmarks/results/{name}): {where}{virtual}; {others}.\n")
    return "".join(lines)


def _bars(found: Sequence[Document]) -> Table:
    rows: Table = [("", "what", "found", "95 % interval", "at most", "")]
    for number, one in enumerate(found, 1):
        for bar in bars(one):
            interval = " to ".join(f"{end:.3f}" for end in bar["interval"] or ())
            limits = (f"{bar['found']:.3f} ×", interval, f"{bar['at_most']:g} ×")
            rows.append((f"run {number}", bar["what"], *limits, "met" if bar["met"] else "**missed**"))
    return rows


def _cells(cells: Sequence[Document]) -> Table:
    """Return cells of one kind, without the columns that have nothing for it."""
    ways = ("sealed", "network", "direct", "ring", "serial", "plain")
    pairs = {"exposed_s": "exposed, raw and sealed", "cpu_s": "CPU, raw and sealed"}
    rows: Table = [("", "raw", *ways, "computation", *pairs.values(), "all-reduces", "replayed")]
    for cell in cells:
        median, whole, replay = cell["median_s"], cell["whole_buckets"], cell["kind"] == Kind.REPLAY
        # Of a replay that is a sample, raw is scaled to the whole model.
        row = (cell_words(cell), _time(median["raw"] / cell["share"]), *(_times(cell, way) for way in ways))
        row += (_time(median["alone"]) if "alone" in median else "", *(_pair(cell, name) for name in pairs))
        rows.append((*row, str(whole or ""), f"{100 * cell['share']:.0f} %" if replay else ""))
    used = [not number or any(column[1:]) for number, column in enumerate(zip(*rows, strict=True))]
    return [tuple(itertools.compress(row, used)) for row in rows]


def _phases(cells: Sequence[Document]) -> Table:
    rows: Table = [
        ("exchange", "way", "AEAD calls", "AEAD bytes", "received", "seal", "open", "kernel", "other", "waiting")
    ]
    for cell in cells:
        if cell["bytes"] == 25 << 20 and cell["dtype"] == "float32":
            for way, count in cell["counts"].items():
                calls = f"{count['seal_calls'] + count['open_calls']:,.0f}"
                sizes = (_size(count["seal_bytes"] + count["open_bytes"]), _size(count["received_bytes"]))
                # Earlier measurements counted additions by themselves.
                spans = [count[name] for name in ("seal_s", "open_s", "system_s")]
                spans += [count["other_s"] + count.get("add_s", 0.0), count["wait_s"]]
                rows.append((cell_words(cell), way, calls, *sizes, *map(_time, spans)))
    return rows


def cell_words(cell: Document) -> str:
    """Return what a cell is, in one line."""
    words = [_size(cell["bytes"]) if cell["model"] is None else cell["model"]]
    words += [cell["dtype"]] if cell["dtype"] != "float32" else []
    if cell["model"] is not None:
        words.append("default cap" if cell["cap_mib"] is None else f"cap {cell['cap_mib']} MiB")
    return ", ".join([*words, f"{cell['ranks']} ranks"])


def ratios(cell: Document) -> str:
    """Return the fastest sealed way of a cell and its ratio to raw gloo."""
    best = best_of(cell)
    return "" if best is None else f"raw {_time(cell['median_s']['raw'])}, {best} {_times(cell, best)}"


def _pair(cell: Document, name: str) -> str:
    return " and ".join(_time(cell[name][way]) for way in ("raw", "sealed") if way in cell[name])


def _times(cell: Document, way: str) -> str:
    if way not in cell["samples"]:
        return ""
    value = cell["ratio_to_raw"][way][0]
    return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"


def _time(seconds: float) -> str:
    """Return a time with three significant digits."""
    unit, value = next(
        ((unit, seconds / size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if abs(seconds) >= size),
        ("µs", seconds * 1e6),
    )
    return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"


def _size(count: float) -> str:
    return f"{count / 2**20:.4g} MiB" if count >= 1 << 20 else f"{count / 2**10:.4g} KiB"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), kept()))
