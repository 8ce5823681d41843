"""What the scripts share: their options, the numbers with their bars, and the file that is kept.

Law: a number that has a bar is never shown or kept without it, and a missed bar ends the script with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

__all__ = ["Bar", "finish", "judge", "kept", "machine", "options", "quantiles"]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a number has to reach.

    Attributes:
        limit: in the number's own unit.
        least: whether it is a lower limit; an upper one otherwise.
    """

    limit: float
    least: bool = False

    def met(self, found: float) -> bool:
        """Return whether a number reaches the bar; NaN reaches none."""
        return found >= self.limit if self.least else found <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.least else '≤'} {self.limit:g}"


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `-o FILE`; a file that is there already is refused before anything is measured."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "-o", "--output", type=_new_file, metavar="FILE", help="keep the result as JSON; never over another"
    )
    return parser


def kept(numbers: Mapping[str, float], bars: Mapping[str, Bar], **raw: Any) -> dict[str, Any]:
    """Return a result as it is kept.

    Args:
        numbers: what was found, by name; the name ends with the unit.
        bars: of some of these numbers, by the same names.
        raw: every single value behind the numbers, and what they were taken on.

    Raises:
        KeyError: a bar without its number, which must not pass for one that was met.
    """
    judged = {
        name: {"bar": str(bar), "found": numbers[name], "met": bar.met(numbers[name])} for name, bar in bars.items()
    }
    return {"bars": judged, "machine": machine(), "numbers": dict(numbers), **raw}


def finish(result: dict[str, Any], output: Path | None) -> int:
    """Print the numbers beside their bars, write the file, and return the exit status."""
    bars = {name: (bar["bar"], bar["met"]) for name, bar in result["bars"].items()}
    status = judge(result["numbers"], bars)
    if output is not None:
        with output.open("x") as out:
            out.write(json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n")
    return status


def judge(numbers: Mapping[str, float], bars: Mapping[str, tuple[str, bool]]) -> int:
    """Print a number a line, those with a bar first; return 1 where a bar was missed, and 0 otherwise."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "what", "found", "bar"):
        table.add_column(name)
    for name in sorted(numbers, key=lambda name: name not in bars):
        limit, met = bars.get(name, ("", None))
        mark = "" if met is None else "[green]✓[/]" if met else "[bold red]✗[/]"
        table.add_row(mark, name.replace("_", " "), f"{numbers[name]:g}", limit)
    console = Console()
    console.print(table)
    if missed := [name.replace("_", " ") for name, (_, met) in bars.items() if not met]:
        console.print(
            f"This machine, or what else loads it now, did not reach: {', '.join(missed)}.", style="bold yellow"
        )
    return 1 if missed else 0


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.exists() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is there already, or lies in no folder: name a new file")
    return path


def machine() -> dict[str, Any]:
    """Return what the numbers depend on; no name and no path of this machine."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": model,
        "cryptography": version("cryptography"),
        "kernel": f"{platform.system()} {platform.release()}",
        # Other work on the machine shows here: of the minute that ends now.
        "load_1m": round(os.getloadavg()[0], 2),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "virtual": "hypervisor" in " ".join(lines) if Path("/proc/cpuinfo").exists() else None,
    }


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return p50, p90, p99 and the longest: each a time that was measured (nearest rank)."""
    found = np.quantile(times, (0.5, 0.9, 0.99, 1.0), method="inverted_cdf").tolist()
    return dict(zip(("p50_ms", "p90_ms", "p99_ms", "max_ms"), found, strict=True))
