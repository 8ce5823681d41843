"""The figures of docs/performance.md are those of the kept results, and the kept results still verify."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.verify import verify_measurement
from glasshouse.jobs.identity import read_public

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
KEPT = sorted((ROOT / "benchmarks" / "results").glob("overhead-*/statement.json"))


def test_there_are_kept_measurements_and_the_page_names_each() -> None:
    assert KEPT
    for statement in KEPT:
        assert statement.parent.name in PAGE


@pytest.mark.parametrize("statement", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_measurement_verifies_and_the_page_says_its_numbers(statement: Path) -> None:
    folder = statement.parent
    verdict = verify_measurement(folder, owner=read_public(folder / "owner.pub"))
    rows = [line for line in PAGE.splitlines() if folder.name in line]
    for part in verdict.measurement.parts:
        found = part.analysis.result
        if part.mode is Mode.SEQUENTIAL or found is None:
            continue
        interval = found.interval()
        assert interval is not None
        text = f"{100 * found.slowdown:+.2f} %".replace("-", "−")
        assert any(text in row for row in rows), f"{text} of {part.mode} is not on the page"


def test_links_and_figures_of_the_page_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


def test_the_benches_results_are_data() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        kept = json.loads(path.read_text())
        assert kept.get("machine") or kept.get("system"), f"{path.name} does not say where it was measured"
