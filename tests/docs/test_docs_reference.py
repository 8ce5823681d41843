"""The reference page of the command line is what `--help` says, and the public names are pinned."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_page_is_what_help_says() -> None:
    written = (ROOT / "docs/reference/cli.md").read_text()
    rendered = runpy.run_path(str(ROOT / "docs/reference/generate.py"))["render"]()
    assert written == rendered, "run: python docs/reference/generate.py"


def test_the_page_of_the_job_file_is_what_validates_it() -> None:
    written = (ROOT / "docs/reference/job.md").read_text()
    rendered = runpy.run_path(str(ROOT / "docs/reference/generate.py"))["render_job"]()
    assert written == rendered, "run: python docs/reference/generate.py"


PUBLIC = {"glasshouse.task": {"Task", "current"}, "glasshouse.cli": {"main"}}


@pytest.mark.parametrize("module", sorted(PUBLIC))
def test_public_names_are_pinned(module: str) -> None:
    assert PUBLIC[module] == set(importlib.import_module(module).__all__)
