"""The figures of docs/performance.md are those of the kept results, which follow from their own slices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from glasshouse.bench.overhead.analysis import check_same
from glasshouse.bench.overhead.artifact import ANALYSIS, PHASES, Part, load_phases
from glasshouse.bench.overhead.design import Mode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"
KEPT = sorted(RESULTS.glob("overhead-*/facts.json"))


def test_there_are_kept_measurements_and_the_page_names_each() -> None:
    assert len(KEPT) == len(list(RESULTS.glob("overhead-*"))) > 0
    for facts in KEPT:
        assert facts.parent.name in PAGE


@pytest.mark.parametrize("facts", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_measurement_follows_from_its_slices_and_the_page_says_its_numbers(facts: Path) -> None:
    folder = facts.parent
    rows = [line for line in PAGE.splitlines() if folder.name in line]
    modes = [mode for mode in Mode if (folder / mode.value).is_dir()]
    assert Mode.INTERLEAVED in modes
    for mode in modes:
        part = Part.load(folder / mode.value)
        check_same(json.loads((folder / mode.value / ANALYSIS).read_bytes()), part.to_json())
        found = part.analysis.result
        if mode is Mode.SEQUENTIAL or found is None:
            continue
        interval = found.interval()
        assert interval is not None
        text = f"{100 * found.slowdown:+.2f} %".replace("-", "−")
        assert any(text in row for row in rows), f"{text} of {part.mode} is not on the page"
    phases = load_phases(folder)
    assert (phases is not None) == (folder / PHASES).exists()
    if phases is not None:
        check_same(json.loads((folder / PHASES).read_bytes()), phases.to_json())


@pytest.mark.parametrize("facts", KEPT, ids=lambda path: path.parent.name)
def test_a_kept_measurement_holds_no_digest_that_a_guess_could_be_compared_with(facts: Path) -> None:
    """Every digest that is left is of the plan, of a receipt that is not kept, or under a salt that is not."""
    named = re.compile(r'"([a-z0-9_]+)": ?"[0-9a-f]{64}"')
    for path in sorted(facts.parent.rglob("*")):
        assert path.is_dir() or path.suffix in (".json", ".jsonl"), path
        if path.is_file():
            assert set(named.findall(path.read_text())) <= {"seed", "bundle_sha256", "hmac_sha256"}, path


def test_links_and_figures_of_the_page_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


def test_the_benches_results_are_data() -> None:
    for path in sorted([*RESULTS.glob("*.json"), *KEPT]):
        kept = json.loads(path.read_text())
        assert kept.get("machine") or kept.get("system") or kept.get("metadata"), (
            f"{path.name} does not say where it was measured"
        )
