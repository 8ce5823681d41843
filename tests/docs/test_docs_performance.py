"""What docs/performance.md points at is there, and what is kept says where it was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def test_links_and_figures_of_the_page_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


def test_the_benches_results_are_data() -> None:
    kept = sorted(RESULTS.glob("*.json"))
    assert kept
    for path in kept:
        told = json.loads(path.read_text())
        assert told.get("machine") or told.get("system") or told.get("metadata"), f"{path.name} is from nowhere"
