"""What measures is installed for those who develop, and never for those who run."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def installs(target: str, tmp_path: Path) -> list[str]:
    """The pip lines that `make target` would run in a fresh checkout."""
    if (make := shutil.which("make")) is None:
        pytest.skip("make is not installed")
    planned = subprocess.run(
        [make, "--dry-run", "--always-make", f"VENV={tmp_path / 'venv'}", target],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [line for line in planned.stdout.splitlines() if "pip install" in line]


def test_a_demonstration_installs_nothing_that_measures(tmp_path: Path) -> None:
    (line,) = installs("demo", tmp_path)
    assert line.endswith("-e '.[train,examples]'")


def test_setup_installs_both_distributions(tmp_path: Path) -> None:
    (line,) = installs("setup", tmp_path)
    assert line.endswith("-e '.[dev]' -e bench")


def test_the_product_never_depends_on_what_measures_it() -> None:
    product, measures = (
        tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in (".", "bench")
    )
    assert product["name"] in measures["dependencies"]
    wanted = [product["dependencies"], *product["optional-dependencies"].values()]
    assert not [one for group in wanted for one in group if one.startswith(measures["name"])]
