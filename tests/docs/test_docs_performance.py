"""What docs/performance.md points at is there, and what is kept says where it was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse_bench.verdict import percent
from glasshouse_bench.verify import verify_measurement

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def test_links_and_figures_of_the_page_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("overhead-*")), ids=lambda path: path.name)
def test_kept_measurements_are_verified_and_the_page_says_what_they_say(folder: Path) -> None:
    owner = OwnerPublic.parse((folder / "owner.pub").read_bytes())
    verdict = verify_measurement(folder, owner=owner)
    assert verdict.exit_code is ExitCode.DONE
    assert folder.name in PAGE
    result = verdict.measurement.main.analysis["result"]
    for end in (result["slowdown"], result["slowdown_95"]["low"], result["slowdown_95"]["high"]):
        assert percent(end).removesuffix(" %").replace("-", "−") in PAGE


def test_the_benches_results_are_data() -> None:
    kept = sorted(RESULTS.glob("*.json"))
    assert kept
    for path in kept:
        told = json.loads(path.read_text())
        assert told.get("machine") or told.get("system") or told.get("metadata"), f"{path.name} is from nowhere"
