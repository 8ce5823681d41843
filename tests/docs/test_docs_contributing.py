"""What CONTRIBUTING sends a newcomer to is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCKS, TEXT = [], ""
for _number, _part in enumerate((ROOT / "CONTRIBUTING.md").read_text().split("```")):
    if _number % 2:
        BLOCKS.append(_part)
    else:
        TEXT += _part
CODE = " ".join(re.findall(r"`([^`]+)`", TEXT))
# As the page says: all other paths are below src/glasshouse.
TOP = ("spec/", "tests/", "docs/", "bench/", "benchmarks/", "examples/", "src/", ".ci/")
PATTERNS = ("KIND.py", "src/glasshouse/", "glasshouse/__init__.py")


def test_every_file_that_it_names_exists() -> None:
    paths = [path for path in re.findall(r"[\w.*-]+(?:/[\w.*-]+)+/?", CODE) if not path.endswith(PATTERNS)]
    paths = [path for path in paths if "*" not in path and not path.startswith((".", "build/"))]
    assert len(paths) > 30
    assert [
        path for path in paths if not (ROOT / ("" if path.startswith(TOP) else "src/glasshouse") / path).exists()
    ] == []


def test_every_make_target_that_it_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", " ".join((CODE, *BLOCKS))))
    assert len(named) > 4
    assert named <= targets
