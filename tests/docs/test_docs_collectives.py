"""The tables of docs/collectives.md are those of the kept results, whose numbers follow from their raw samples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.collectives.cells import Kind, bars, numbers
from benchmarks.collectives.tables import kept, render

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "collectives.md").read_text()
KEPT = sorted((ROOT / "benchmarks" / "results").glob("collectives-*.json"))


def test_there_are_kept_measurements_of_every_kind_and_none_is_a_trial() -> None:
    found = [json.loads(path.read_bytes()) for path in KEPT]
    assert {cell["kind"] for one in found for cell in one["cells"]} == set(Kind)
    assert not any(one["quick"] or one["failed"] for one in found)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_numbers_of_a_kept_measurement_follow_from_its_samples(path: Path) -> None:
    one = json.loads(path.read_bytes())
    for cell in one["cells"]:
        again = numbers(cell)
        assert {name: cell[name] for name in again} == again
        assert cell["rounds"] >= 5
    judged = {bar["what"]: {name: bar[name] for name in ("at_most", "found", "met")} for bar in bars(one)}
    assert judged == one["bars"]


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_a_kept_measurement_names_no_host_user_or_path(path: Path) -> None:
    system = json.loads(path.read_bytes())["system"]
    assert not [value for value in system.values() if isinstance(value, str) and ("/" in value or "\\" in value)]


def test_the_page_is_what_the_kept_results_say() -> None:
    assert render(PAGE, kept()) == PAGE
    assert all(path.name in PAGE for path in KEPT)


def test_ranks_that_one_starts_oneself_run_as_the_page_says(tmp_path: Path) -> None:
    section = PAGE[PAGE.index("## Without `glasshouse run`") : PAGE.index("## How it is made")]
    commands, script = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)
    said = "dist.barrier()\nPath(f'rank-{dist.get_rank()}').write_text(dist.get_backend())\n"
    ends = f"{said}dist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(script + ends)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/sh", "-ec", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {"rank-0": "sealed", "rank-1": "sealed"}
    secret = tmp_path / "group.secret"
    assert (secret.stat().st_mode & 0o777, secret.stat().st_size) == (0o600, 32)


def test_a_number_that_was_edited_is_found() -> None:
    edited = re.sub(r"\d\.\d\d×", "0.01×", PAGE)
    assert edited != PAGE
    assert render(edited, kept()) != edited


def test_links_of_the_page_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE) if "://" not in target]
    assert targets
    for target in targets:
        assert (ROOT / "docs" / target).exists(), target
