"""The page of a characterisation: what was found, what was not, the paper beside it, and nothing that runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from glasshouse.bench.collectives.figures import pictures
from glasshouse.bench.collectives.measurement import Measurement
from glasshouse.bench.collectives.plan import full
from glasshouse.bench.collectives.report import build, write
from glasshouse.bench.collectives.values import Kind, Way
from glasshouse.bench.report.figures.picture import Missing, Picture
from glasshouse.bench.report.theme import Sheet
from simulators.collectives_measured import found, measurement

SECONDS = {Way.RAW: 0.1, Way.SEALED: 0.12, Way.SERIAL: 0.2}


@pytest.fixture(scope="module")
def page() -> str:
    return build(measurement())


def test_the_page_says_the_verdict_the_ratios_and_the_paper(page: str) -> None:
    for words in ("All 7 bars were met", "8.68×", "41.6×", "3.03×", "arXiv:2501.11771", "11 to 32"):
        assert words in page or words.replace(" ", "\u00a0") in page
    for way in Way:
        assert way.value in page
    assert "no time left" in page  # what was not measured, and why


def test_the_page_runs_nothing_and_fetches_nothing(page: str) -> None:
    assert "<script" not in page
    assert "default-src &#x27;none&#x27;" in page
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page)


def test_the_same_measurement_gives_the_same_page(page: str) -> None:
    assert build(measurement()) == page


def test_a_machine_with_a_hostile_name_stays_text() -> None:
    name = "<script>alert(1)</script>\u202egnp"
    page = build(measurement(system={"cpu": name, "logical_cpus": 2}))
    assert "<script" not in page
    assert "\u202e" not in page


def test_what_was_not_measured_says_so_instead_of_being_drawn() -> None:
    empty = Measurement(system={}, found=())
    assert all(isinstance(picture, Missing) for picture in pictures(empty))
    assert "Not measured" in build(empty)


def test_every_picture_carries_its_numbers() -> None:
    made = pictures(measurement())
    assert [picture.name for picture in made if isinstance(picture, Missing)] == []
    for picture in made:
        assert isinstance(picture, Picture)
        assert picture.rows
        assert all(len(row) == len(picture.headers) for row in picture.rows), picture.name


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16",)], ids=" ".join)
def test_a_line_goes_from_the_smallest_size_to_the_largest_and_is_of_one_type(dtypes: tuple[str, ...]) -> None:
    cells = full(time_s=1.0, seed=1, parts=("all-reduce",), dtypes=dtypes).cells  # in the order of a measurement
    picture = pictures(Measurement(system={}, found=tuple(found(cell, SECONDS) for cell in cells)))[0]
    assert isinstance(picture, Picture)
    sheet = Sheet(narrow=False, height_px=picture.drawing.height_px)
    picture.drawing.draw(sheet)
    for ranks, axes in zip((2, 4), sheet.whole.axes, strict=True):
        # The intervals have no marks, and what only stands in the legend has no points.
        lines = [line for line in axes.get_lines() if line.get_marker() != "None" and np.size(line.get_xdata())]
        sizes = {dtype: sorted(c.bytes or 0 for c in cells if (c.ranks, c.dtype) == (ranks, dtype)) for dtype in dtypes}
        assert [np.asarray(line.get_xdata()).tolist() for line in lines] == list(sizes.values()) * (len(SECONDS) - 1)
        assert len({line.get_linestyle() for line in lines}) == len(dtypes)
    [legend] = sheet.whole.legends
    assert {text.get_text() for text in legend.get_texts()} == {*SECONDS, *dtypes} - {Way.RAW}
    assert len(picture.rows) == len(cells) * len(SECONDS)


def test_a_busy_machine_and_a_trial_are_said_to_be_so() -> None:
    one = measurement()
    busy = found(one.of(Kind.TRAIN)[0].cell, {Way.RAW: 0.2, Way.SEALED: 0.3, Way.ALONE: 0.1}, foreign_cpu=1.5)
    page = build(Measurement(system={}, found=(busy,), quick=True))
    assert "Other programs kept up to 1.5 processors busy" in page
    assert "nothing is judged by it" in page
    assert "1 of 1 bars were missed" in build(Measurement(system={}, found=(busy,)))


def test_the_files_lie_beside_each_other(tmp_path: Path) -> None:
    path = write(measurement(), tmp_path)
    names = {file.name for file in (tmp_path / "figures").iterdir()}
    assert path == tmp_path / "report.html"
    assert {"sizes.svg", "sizes.png", "iterations.svg", "caps.png"} <= names
