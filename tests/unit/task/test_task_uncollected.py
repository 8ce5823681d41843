"""The one line that tells the owner what was lost: it says what was found, and nothing else reads like it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glasshouse.runtime.worker import tree_removal
from glasshouse.task import uncollected
from glasshouse.task.uncollected import Uncollected, regular_files


def test_a_line_says_what_was_found() -> None:
    found = Uncollected(files=2, bytes=7, named=("a b.pt", 'odd\n"name', "\udcff"))
    assert Uncollected.parse(found.line()) == found
    linked = Uncollected(files=0, bytes=0, named=(), links=("outputs/best",))
    assert Uncollected.parse(linked.line()) == linked
    earlier = found.line().replace('"links": [], ', "")
    assert earlier != found.line()
    assert Uncollected.parse(earlier) == found
    assert "\n" not in found.line()


@pytest.mark.parametrize(
    "line",
    [
        "",
        "loss 0.3",
        "glasshouse: written outside of the output folders, and lost: ",
        "glasshouse: written outside of the output folders, and lost: {}",
        "glasshouse: written outside of the output folders, and lost: []",
        'glasshouse: written outside of the output folders, and lost: {"bytes": -1, "files": 1, "named": []}',
        'glasshouse: written outside of the output folders, and lost: {"bytes": 1, "files": 1, "named": [1]}',
    ],
)
def test_any_other_line_says_nothing(line: str) -> None:
    assert Uncollected.parse(line) is None


def test_caches_and_what_lay_there_before_are_nobodys_result(tmp_path: Path) -> None:
    job = tmp_path / "job"
    for folder in (job, tmp_path / "cache", tmp_path / "tmp", tmp_path / ".config", job / "__pycache__", job / "out"):
        folder.mkdir()
    (job / "input.csv").write_text("as it was")
    before = uncollected.snapshot(tmp_path)
    for name in ("cache/c", "tmp/t", ".config/s", "job/__pycache__/p", "job/out/result"):
        (tmp_path / name).write_text("x")
    os.mkfifo(job / "pipe")
    (job / "link").symlink_to("/etc/hostname")
    look = lambda: uncollected.look(tmp_path, before, folder=job, outputs=[job / "out"])  # noqa: E731
    assert look() is None
    (job / "outside").write_text("12345")
    (tmp_path / "home.txt").write_text("1")
    assert look() == Uncollected(files=2, bytes=6, named=("../home.txt", "outside"))


def test_a_link_in_an_output_folder_is_named_because_it_does_not_come_back(tmp_path: Path) -> None:
    job, out = tmp_path / "job", tmp_path / "job" / "out"
    (out / "checkpoints" / "step-2").mkdir(parents=True)
    before = uncollected.snapshot(tmp_path)
    (out / "checkpoints" / "step-2" / "model").write_text("x")
    (out / "checkpoints" / "last").symlink_to("step-2")
    (out / "stolen").symlink_to("/etc/hostname")
    found = uncollected.look(tmp_path, before, folder=job, outputs=[out])
    assert found == Uncollected(files=0, bytes=0, named=(), links=("out/checkpoints/last", "out/stolen"))


def test_folders_are_nested_deeper_than_pythons_stack(tmp_path: Path) -> None:
    """Outside of the outputs and in them: what lies there is named, or comes back."""
    job, out = tmp_path / "job", tmp_path / "job" / "out"
    out.mkdir(parents=True)
    before = uncollected.snapshot(tmp_path)
    deep = "n/" * 1_200
    for place in (job, out):
        for depth in range(2, len(deep) + 1, 2):
            (place / deep[:depth]).mkdir()
        (place / deep / "file").write_text("x")
    found = uncollected.look(tmp_path, before, folder=job, outputs=[out])
    assert found is not None
    assert (found.files, found.bytes) == (1, 1)
    assert [name for name, _ in regular_files(out)] == [f"{deep}file"]
    assert tree_removal.removed(str(job))
