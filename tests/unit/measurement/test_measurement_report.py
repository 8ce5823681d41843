"""The page of a measurement: what it claims, that nothing runs in it, and that the same numbers give the same bytes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import pytest
from typer.testing import CliRunner

from glasshouse.errors import FormatError
from glasshouse_bench.cli import group
from glasshouse_bench.design import Mode, Planted
from glasshouse_bench.report import render
from glasshouse_bench.report.published import read_rows
from glasshouse_bench.statement import Measurement
from simulators.slot_measurement import PHASES, measured


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    measured(folder, ratio=1.0, sessions=8, died=[5], length_ns=800_000_000, parity=True, signed=False)
    (folder / "phases.json").write_bytes(PHASES.encode())
    return folder


@pytest.fixture(scope="module")
def page(good: Path) -> str:
    return render(Measurement.load(good))


class Elements(HTMLParser):
    """Which elements a page has, what they refer to, and the names that it gives them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data"):
                self.refers.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)


def written(folder: Path, **members: object) -> Path:
    path = folder / "rows.json"
    row = {"kind": "mlp", "name": "MLP", "gpu": "X", "target": "60 s", "order": None, "overhead_pct": "2.0", **members}
    path.write_text(json.dumps({"note": "", "rows": [row]}))
    return path


def test_the_page_says_the_word_and_no_more(page: str) -> None:
    assert "The word: <strong>equivalent</strong> (margin ±1 %)" in page
    assert "faster" not in page
    assert "This page is not signed" in page
    assert "7 complete, 1 died" in page
    assert "the same weights after 100 steps" in page
    for limit in ("invent all records", "narrows selection, not invention"):
        assert limit in page


def test_nothing_runs_and_nothing_is_loaded(page: str) -> None:
    found = Elements(page)
    assert not {"script", "iframe", "object", "embed", "link", "img", "form"} & set(found.tags)
    assert not found.handlers
    assert all(one.startswith("#") for one in found.refers)
    assert found.tags.count("svg") == 4
    assert len(found.ids) == len(set(found.ids))
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert not re.search(r"#0[1-7]0[1-7]0[1-7]", page)  # every colour is the page's


def test_a_step_of_each_arm_is_divided_into_phases_and_the_rest(page: str) -> None:
    # Raw: 3.8 + 5.1 + 0.9 of 10 ms; protected: 3.85 + 5.17 + 0.91 + 0.009 of 10.2 ms.
    [cells] = [re.findall(r"<td>(.*?)</td>", row) for row in page.splitlines() if row.startswith("<tr><th>the rest<")]
    assert cells == ["200 µs", "261 µs"]
    [hooks] = [re.findall(r"<td>(.*?)</td>", row) for row in page.splitlines() if row.startswith("<tr><th>hooks<")]
    assert hooks == ["0 µs", "9 µs"]
    for name in ("forward", "backward", "optimizer", "hooks", "the rest"):
        assert f">{name}</text>" in page


def test_the_same_measurement_gives_the_same_bytes_whatever_a_user_has_set(good: Path, page: str) -> None:
    with mpl.rc_context({"font.size": 20, "svg.fonttype": "path", "svg.hashsalt": None, "axes.facecolor": "red"}):
        assert render(Measurement.load(good)) == page


def test_the_text_of_a_strangers_file_stays_text(good: Path, tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>$x^2$"
    drawn = render(Measurement.load(good), published=written(tmp_path, name=hostile))
    assert "<script" not in drawn
    assert "&lt;script&gt;alert(1)&lt;/script&gt;$x^2$" in drawn


@pytest.mark.parametrize(
    "members",
    [{"overhead_pct": "NaN"}, {"overhead_pct": "100"}, {"overhead_pct": 2.0}, {"more": 1}, {"name": "x" * 41}],
)
def test_rows_of_another_form_are_refused(tmp_path: Path, members: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        read_rows(written(tmp_path, **members), kind="mlp")


def test_published_rows_are_of_the_same_kind_and_turned_from_throughput_into_time() -> None:
    assert read_rows(None, kind="script") == []
    rows = read_rows(None, kind="mlp")
    assert next(one for one in rows if one.order == "raw-first").slowdown == pytest.approx(-0.2967 / 1.2967)


def test_a_part_without_a_null_says_that_its_word_does_not_stand(tmp_path: Path) -> None:
    measured(tmp_path, modes=[Mode.INTERLEAVED], sessions=3, length_ns=800_000_000, signed=False)
    drawn = render(Measurement.load(tmp_path))
    assert "The word does not stand: it lacks a null part" in drawn
    assert "not measured" in drawn


def test_a_planted_cost_is_named_first(tmp_path: Path) -> None:
    planted = Planted(step_ppm=20_000, bunched_ns=0)
    measured(tmp_path, sessions=3, length_ns=800_000_000, planted=planted, signed=False)
    assert "A cost was planted in the protected arm on purpose" in render(Measurement.load(tmp_path))


def test_a_measurement_of_which_no_session_counts_claims_nothing(tmp_path: Path) -> None:
    measured(tmp_path, sessions=3, died=range(3), length_ns=800_000_000, signed=False)
    drawn = render(Measurement.load(tmp_path))
    assert "No session counts" in drawn
    assert "Nothing is claimed" in drawn


def test_one_session_has_no_interval(tmp_path: Path) -> None:
    measured(tmp_path, modes=[Mode.INTERLEAVED], sessions=1, length_ns=800_000_000, signed=False)
    drawn = render(Measurement.load(tmp_path))
    assert "95 % interval: no interval" in drawn
    assert "<strong>inconclusive</strong>" in drawn


def test_the_command_writes_the_page(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    found = CliRunner().invoke(group, ["report", str(good), "-o", str(path)])
    assert found.exit_code == 0
    assert path.read_text().startswith("<!doctype html>")
    assert path.stat().st_mode & 0o777 == 0o600
