"""The report of a measurement: a page for a buyer and for a sceptic, which nothing in the measurement can take over."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from glasshouse.bench.overhead.artifact import Measurement
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.estimate import Estimate, Word
from glasshouse.bench.overhead.interval import Interval
from glasshouse.bench.report import build, write
from glasshouse.bench.report.caveats import caveats
from glasshouse.bench.report.numbers import between, digits_for, duration, percent, seconds
from glasshouse.bench.report.published import published
from glasshouse.bench.report.view import View
from simulators.measured import KINDS, design, measured, measurement, part
from simulators.simulate import World

FIGURES = ["forest", "series", "contrasts", "order", "phases", "job-length", "width", "attempts"]
HOSTILE = "</title><script>alert(1)</script> <img src=x onerror=y> $x^2$ \u202eevil\x00 \"'&"
_VOID = {"meta", "br", "link"}


class _Page(HTMLParser):
    """Reads a page strictly: every element is closed in its order; keeps the text, the elements and the attributes."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).replace("\u00a0", " ").split())

    def row(self, name: str) -> list[str]:
        """Return the cells of the first row whose name begins so."""
        rows = ([cell.replace("\u00a0", " ") for cell in row] for row in self.rows)
        return next(row for row in rows if row[0].startswith(name))


@cache
def _told(kind: str) -> tuple[Measurement, str]:
    found = measured(kind)
    return found, build(found)


def _estimate(found: Measurement, mode: Mode = Mode.INTERLEAVED) -> Estimate:
    of = found.part(mode)
    assert of is not None
    assert of.analysis.result is not None
    return of.analysis.result


def _headline(source: str) -> str:
    inside = source[source.index("<h1>") : source.index("</h1>")]
    return " ".join(_Page(inside + "</h1>").text.split())


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_measurement_becomes_a_whole_page_that_refers_to_nothing(kind: str) -> None:
    _, source = _told(kind)
    page = _Page(source)
    names = [name for name, _ in page.elements]
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "foreignobject"} & set(
        names
    )
    policies = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert [policy for policy in policies if policy is not None and "default-src 'none'" in policy]
    identifiers = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "action", "srcset")]
        for name in ("href", "xlink:href"):
            target = attributes.get(name)
            assert target is None or (target[0] == "#" and target[1:] in identifiers)
    for target in re.findall(r"url\(([^)]*)\)", source):
        assert target[0] == "#"
        assert target[1:] in identifiers
    assert "http:" not in source
    assert "https:" not in source
    assert "@import" not in source
    assert len(source.encode()) < 1_500_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_finds_every_section_and_every_picture_has_words_for_it(kind: str) -> None:
    page = _Page(_told(kind)[1])
    identifiers = {attributes.get("id") for _, attributes in page.elements}
    assert {f"figure-{name}" for name in FIGURES} <= identifiers
    assert {"numbers", "sensitivity", "direct", "parity", "lifecycle", "system", "workload", "design"} <= identifiers
    assert {"recompute", "limits", "resources", "attempts-detail"} <= identifiers
    assert "glasshouse verify DIR" in page.text
    drawings = [attributes for name, attributes in page.elements if name == "svg"]
    assert all(attributes["role"] == "img" and len(attributes["aria-label"] or "") > 20 for attributes in drawings)
    assert sum(name == "figure" for name, _ in page.elements) * 2 == len(drawings)
    assert sum(name == "figcaption" for name, _ in page.elements) * 2 == len(drawings)
    assert sum(name == "details" for name, _ in page.elements) * 2 == len(drawings)


def test_the_table_has_the_numbers_of_the_analysis() -> None:
    found, source = _told("equivalent")
    page, main = _Page(source), _estimate(found)

    def said(interval: Interval | None) -> str:
        return between(interval).replace("\u00a0", " ")

    def value(number: float, **how: bool) -> str:
        return percent(number, **how).replace("\u00a0", " ")

    assert page.row("Slowdown δ")[1:] == [value(main.slowdown), said(main.slowdown_interval())]
    assert page.row("Throughput loss")[1:] == [value(main.throughput_loss), said(main.throughput_loss_interval())]
    assert main.minimum_detectable is not None
    assert page.row("Minimum detectable effect")[1] == value(main.minimum_detectable, sign=False)
    null = _estimate(found, Mode.NULL)
    assert page.row("Null run")[1:] == [value(null.slowdown), said(null.slowdown_interval())]
    interleaved = found.part(Mode.INTERLEAVED)
    assert interleaved is not None
    assert interleaved.lifecycle is not None
    assert page.row("Once a run, F")[1] == seconds(interleaved.lifecycle.seconds).replace("\u00a0", " ")
    for name, cost in zip(("A job of 15 min", "A job of 1 h", "A job of 24 h"), interleaved.jobs or (), strict=True):
        assert page.row(name)[1:] == [value(cost.relative), said(cost.interval)]
    sensitivity = interleaved.analysis.sensitivity
    assert sensitivity is not None
    assert sensitivity.bootstrap is not None
    for name in ("plain means", "least squares, block", "least squares, also", "randomisation", "effect of the launch"):
        assert len(page.row(name)) == 3
    low, high = (_slow(end) for end in (sensitivity.bootstrap.interval.low, sensitivity.bootstrap.interval.high))
    assert page.row("block bootstrap")[2] == f"{value(low)} to {value(high)}"
    for of in found.parts:
        assert of.design.seed.hex() in page.text
        assert of.design.sha256.hex() in page.text


def _slow(log_ratio: float) -> float:
    return float(2.718281828459045**log_ratio - 1)


@pytest.mark.parametrize(
    ("kind", "word", "phrases"),
    [
        ("equivalent", Word.EQUIVALENT, ["inside the margin of ±0.50 %", "95 % interval", "assurance level: software"]),
        ("overhead", Word.OVERHEAD, ["slower", "95 % interval", "four runs of five", "assurance level: software"]),
        ("quick", Word.INCONCLUSIVE, ["cannot tell", "conditional on one process pair", "four runs of five"]),
        ("bias", Word.BIAS_SUSPECTED, ["protection cannot cause", "must not be used"]),
        ("one block", Word.INCONCLUSIVE, ["nothing can be claimed", "no interval"]),
    ],
)
def test_the_first_sentence_says_the_claim_and_never_more(kind: str, word: Word, phrases: list[str]) -> None:
    found, source = _told(kind)
    interleaved = found.part(Mode.INTERLEAVED)
    assert interleaved is not None
    assert interleaved.analysis.claim is not None
    assert interleaved.analysis.claim.word is word
    headline = _headline(source)
    assert headline.startswith(word.value.replace("_", " ") + ":")
    for phrase in phrases:
        assert phrase in headline
    for other in set(Word) - {word}:
        assert other.value.replace("_", " ") not in headline


def test_one_leg_after_the_other_is_no_claim_and_names_the_order() -> None:
    headline = _headline(_told("sequential")[1])
    assert headline.startswith("no claim:")
    assert "n=1, no interval" in headline
    assert "the order of the legs alone moves it by ±" in headline


def test_a_null_run_alone_says_that_nothing_was_protected() -> None:
    found, source = _told("null")
    assert found.assurance is None
    assert "protects nothing" in _headline(source)
    assert _Page(source).row("Slowdown δ")[1] == "not measured"


def test_a_null_run_that_is_wider_than_the_margin_is_called_coarse() -> None:
    assert "But it is coarse" not in _Page(_told("equivalent")[1]).text
    noisy = part(World(noise=0.05), design(Mode.NULL, number=2, sessions=2, blocks=2))
    found = measurement(part(World(noise=0.008), design(sessions=12)), noisy)
    told = " ".join(str(cell) for cell in caveats(View(found))).replace("\u00a0", " ")
    assert "It holds 0, as it has to. But it is coarse: a bias of up to" in told


def test_what_was_not_measured_is_said_and_not_drawn() -> None:
    page = _Page(_told("quick")[1])
    assert page.row("Null run")[1] == "not measured"
    assert page.row("Sequential")[1] == "not measured"
    assert "Null run: not measured. Nothing here shows" in page.text
    assert "Not measured: the command glasshouse bench phases does it." in page.text
    assert "Whether the GPU or the host limits the speed: not measured." in page.text
    assert not [attributes for name, attributes in page.elements if name == "svg" and "phase" in str(attributes)]


def test_planted_overhead_is_the_first_thing_that_a_reader_meets() -> None:
    source = _told("planted")[1]
    page = _Page(source)
    assert source.index("Planted overhead") < source.index("<h1>")
    assert "This is not the cost of protection." in page.text
    assert "0.50 % was planted on purpose" in _headline(source)
    assert "Planted overhead" not in _told("overhead")[1]


def test_a_null_run_that_misses_zero_and_arms_that_differ_are_alarms() -> None:
    text = _Page(_told("bias")[1]).text
    assert "The null run does not hold 0" in text
    assert "did not train the same weights" in text
    assert "Direct accounting disagrees" in text
    assert "δ must not be used" in text
    assert "no cost of a job follows from it" in text


def test_failed_attempts_stand_in_the_page_with_their_reasons() -> None:
    found, source = _told("failed")
    page = _Page(source)
    interleaved = found.part(Mode.INTERLEAVED)
    assert interleaved is not None
    counts = interleaved.analysis.attempts
    assert (counts.started, counts.completed, counts.included) == (86, 85, 79)
    assert page.row("Counted, interleaved")[1] == "79 of 86 blocks"
    for label, number in (
        ("never started", 14),
        ("not completed (a worker failed)", 1),
        ("excluded: thermal throttling", 1),
        ("excluded: hypervisor took over 5 % of the CPU", 5),
        ("in sessions with too few", 4),
        ("in the estimate", 75),
    ):
        row = next(row for row in page.rows if len(row) == 3 and row[1].replace("\u00a0", " ") == label)
        assert row[2] == str(number)
    assert "1 × a worker failed (worker-failed)" in page.text
    assert "Not in the estimate: 1 session (2)" in page.text


def test_a_hostile_name_is_text_and_nothing_else(tmp_path: Path) -> None:
    found = measurement(part(World(), design(blocks=5)), name=HOSTILE, facts={"<b>": HOSTILE})
    path = write(found, tmp_path)
    source = path.read_text()
    page = _Page(source)
    assert not {"script", "img", "b>"} & {name for name, _ in page.elements}
    assert "<script>alert(1)</script>" in page.text
    assert "\u202e" not in source
    assert "\x00" not in source
    for drawing in (tmp_path / "figures").glob("*.svg"):
        assert "script" not in {element.tag.rpartition("}")[2] for element in ET.parse(drawing).iter()}


def test_the_same_measurement_gives_the_same_bytes(tmp_path: Path) -> None:
    found = measured("quick")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(found, tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == 1 + 2 * 7
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "report.html").read_text() == _told("quick")[1]


def test_pictures_leave_as_files_that_stand_alone(tmp_path: Path) -> None:
    found = measurement(
        part(World(overhead=0.005, noise=0.01), design(sessions=3, blocks=6)), phases=True, planted_ppm=2000
    )
    write(found, tmp_path)
    for name in FIGURES:
        drawing = ET.parse(tmp_path / "figures" / f"{name}.svg")
        text = " ".join("".join(element.itertext()) for element in drawing.iter() if element.tag.endswith("text"))
        assert "tiny LoRA" in text
        assert "PLANTED OVERHEAD" in text
        assert "var(--" not in (tmp_path / "figures" / f"{name}.svg").read_text()
        picture = (tmp_path / "figures" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(picture[16:20]) == 1800
        assert len(picture) > 10_000


def test_both_themes_name_every_colour_that_the_pictures_use() -> None:
    source = _told("equivalent")[1]
    style = source[source.index("<style>") : source.index("</style>")]
    light, _, dark = style.partition("prefers-color-scheme:dark")
    for name in set(re.findall(r"var\(--([a-z-]+)\)", source)) - {"font"}:
        assert f"--{name}:#" in light
        assert f"--{name}:#" in dark
    assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{6}", source[source.index("<body>") :])


def test_the_interval_narrows_on_prefixes_to_the_one_that_is_reported() -> None:
    for kind in ("equivalent", "quick"):
        found = _told(kind)[0]
        prefixes = View(found).prefixes
        assert prefixes[-1].found == _estimate(found)
        assert [prefix.elapsed_s for prefix in prefixes] == sorted(prefix.elapsed_s for prefix in prefixes)
        assert len(prefixes) == (11 if kind == "equivalent" else 39)


def test_a_long_run_is_thinned_and_says_so() -> None:
    found = measurement(part(World(overhead=0.002, noise=0.01), design(sessions=2, blocks=600)))
    source = build(found)
    assert len(source.encode()) < 1_500_000
    assert re.search(r"One block in \d+ is drawn, and every excluded one\.", _Page(source).text)


def test_published_rows_are_the_facts_and_keep_their_definition() -> None:
    rows = published()
    assert {row.kind for row in rows} == {"mlp", "lora"}
    assert len(rows) == 20
    assert (min(row.throughput_loss for row in rows), max(row.throughput_loss for row in rows)) == (-0.2967, 0.1805)
    for row in rows:
        assert 1 / (1 + row.slowdown) == pytest.approx(1 - row.throughput_loss)
    text = _Page(_told("equivalent")[1]).text
    assert "published pairs for the same code reach from −29.67 % to +18.05 %" in text
    assert "throughput loss, 1 − protected rate / raw rate" in text


def test_the_published_file_agrees_with_itself() -> None:
    source = Path(__file__).parents[3] / "src" / "glasshouse" / "bench" / "report" / "published.json"
    for row in json.loads(source.read_text())["rows"]:
        assert re.fullmatch(r"-?\d+\.\d\d", row["overhead_pct"])
        assert row["order"] in (None, "raw-first", "protected-first")


def test_numbers_are_written_in_one_way() -> None:
    assert percent(0.00083) == "+0.083\u00a0%"
    assert percent(-0.00083) == "\u22120.083\u00a0%"
    assert percent(-0.000001) == "0.000\u00a0%"
    assert duration(86_400) == "24\u00a0h"
    assert duration(900) == "15\u00a0min"
    assert duration(30) == "30\u00a0s"
    assert seconds(0.0124) == "12.4\u00a0ms"
    assert between(None) == "no interval"


def test_a_rounded_interval_never_touches_a_limit_that_it_does_not_reach() -> None:
    close = Interval(low=0.00001, high=0.00499)
    assert digits_for(close) == 2
    assert digits_for(close, 0.0) == 3
    digits = digits_for(close, 0.0, 0.005)
    assert percent(close.low, digits) != percent(0.0, digits)
    assert percent(close.high, digits) != percent(0.005, digits)
