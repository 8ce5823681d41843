"""The characterisation as a page for people: `report.html`, and its pictures as SVG and PNG files.

Laws: the page shows what the measurement holds and estimates nothing by other means; it is self-contained, runs no
script, and the same measurement gives the same bytes; what was not measured is said to be so.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from glasshouse.bench.collectives.figures import pictures
from glasshouse.bench.collectives.measurement import Measurement, bars
from glasshouse.bench.collectives.paper import PUBLISHED
from glasshouse.bench.collectives.words import WAYS, cell_words, size_words, time_words
from glasshouse.bench.report.figures.picture import Missing, Picture
from glasshouse.bench.report.html import Markup, facts, plain, table, tag
from glasshouse.bench.report.page import document, figure
from glasshouse.bench.report.theme import export

__all__ = ["build", "write"]

TITLE = "What sealed collectives cost"
FOREIGN = 0.1


def build(measurement: Measurement) -> str:
    """Return `report.html`."""
    return _page(measurement, pictures(measurement))


def write(measurement: Measurement, folder: Path) -> Path:
    """Write `report.html` and `figures/` into a folder, and return the page's path.

    Raises:
        OSError: the folder cannot be written.
    """
    found = pictures(measurement)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for picture in found:
        if isinstance(picture, Picture):
            source = f"{_machine(measurement)} · {_date(measurement)} · Glasshouse"
            drawn = export(picture.name, picture.drawing, title=picture.title, source=source)
            (folder / "figures" / f"{picture.name}.svg").write_bytes(drawn.svg)
            (folder / "figures" / f"{picture.name}.png").write_bytes(drawn.png)
    path = folder / "report.html"
    path.write_text(_page(measurement, found), encoding="utf-8")
    return path


def _page(measurement: Measurement, found: tuple[Picture | Missing, ...]) -> str:
    body = tag(
        "main",
        _header(measurement),
        tag("section", tag("h2", "The bars"), *_bars(measurement), id="bars"),
        tag("section", tag("h2", "Pictures"), *(figure(picture) for picture in found), id="pictures"),
        tag("section", tag("h2", "Every cell"), _cells(measurement), id="cells"),
        tag("section", tag("h2", "Beside the paper"), *_published(), id="paper"),
        tag("section", tag("h2", "How it was measured"), *_method(measurement), id="method"),
        tag(
            "footer",
            "Made by ",
            tag("code", "glasshouse bench collectives"),
            ". This file refers to nothing outside itself and runs no script.",
        ),
    )
    return document(TITLE, body)


def _header(measurement: Measurement) -> Markup:
    judged = bars(measurement)
    missed = [bar.what for bar in judged if not bar.met]
    if measurement.quick:
        tone, word, sentence = "open", "a trial", "A few rounds of each: nothing is judged by it."
    elif not judged:
        tone, word, sentence = "open", "no bar", "No bar speaks of what was measured here."
    elif missed:
        tone, word, sentence = "cost", "missed", f"{len(missed)} of {len(judged)} bars were missed."
    else:
        tone, word, sentence = "good", "met", f"All {len(judged)} bars were met on this machine."
    links = (("bars", "Bars"), ("pictures", "Pictures"), ("cells", "Cells"), ("paper", "Paper"), ("method", "Method"))
    return tag(
        "header",
        tag("p", f"{TITLE} · ", tag("bdi", _machine(measurement)), f" · {_date(measurement)}", class_="eyebrow"),
        tag("h1", tag("span", word, class_=f"word {tone}"), tag("span", ": ", class_="unseen"), sentence),
        tag("ul", *(tag("li", words) for words in _caveats(measurement)), class_="caveats"),
        tag("nav", *(tag("a", title, href=f"#{anchor}") for anchor, title in links), aria_label="Sections"),
    )


def _caveats(measurement: Measurement) -> list[str]:
    found = [
        "One host: the ranks share its processors and talk over its loopback, sealed and in plaintext alike; "
        "`sealed` alone also through shared memory, as it does between ranks of one machine."
    ]
    busy = [one for one in measurement.found if (one.foreign_cpu or 0) > FOREIGN]
    if busy:
        most = max(one.foreign_cpu or 0 for one in busy)
        found.append(
            f"Other programs kept up to {most:.1f} processors busy during {len(busy)} of {len(measurement.found)} "
            "cells: their times are too long, and their ratios less certain than the intervals say."
        )
    if measurement.failed is not None:
        found.append(f"It ended early: {plain(measurement.failed)}.")
    if measurement.not_measured:
        found.append(
            f"{len(measurement.not_measured)} planned cells were not measured; they stand below with the reason."
        )
    return found


def _bars(measurement: Measurement) -> list[Markup]:
    judged = bars(measurement)
    if not judged:
        return [tag("p", "No bar speaks of what was measured here.")]
    rows = [
        (
            bar.what,
            f"{bar.found:.3f} {bar.unit}",
            "–" if bar.low is None or bar.high is None else f"{bar.low:.3f} to {bar.high:.3f}",
            f"{bar.at_most:g} {bar.unit}",
            "met" if bar.met else "missed",
        )
        for bar in judged
    ]
    return [table(("What", "Found", "95 % interval", "At most", "Verdict"), rows, caption="Bars")]


def _cells(measurement: Measurement) -> Markup:
    rows = [
        (
            cell_words(found.cell),
            way.value,
            time_words(found.seconds(way)),
            time_words(found.cpu_s(way)),
            f"{100 * found.idle(way):.0f} %",
            str(found.rounds),
            f"{100 * found.share:.0f} %",
        )
        for found in measurement.found
        for way in found.samples
    ]
    rows += [(cell_words(one.cell), "–", "not measured", one.why, "–", "–", "–") for one in measurement.not_measured]
    headers = ("Cell", "Way", "Median", "CPU, all ranks", "Idle", "Rounds", "Exchanged")
    return table(headers, rows, caption="Times, processor time (user and system) and idleness by cell and way")


def _published() -> list[Markup]:
    rows = [(one.what, one.shown, one.testbed, one.source) for one in PUBLISHED]
    words = "Their testbeds and ours differ in everything but the question. What compares is the pattern: serial, ring."
    return [table(("What", "Published", "Testbed", "Source"), rows, caption="Published figures"), tag("p", words)]


def _method(measurement: Measurement) -> list[Markup]:
    system = measurement.system
    ways = facts((way.value, words) for way, words in WAYS.items())
    rows = [
        ("processor", plain(system.get("cpu") or "unknown")),
        ("processors", plain(system.get("logical_cpus") or "unknown")),
        ("virtual machine", {True: "yes", False: "no"}.get(system.get("virtualised"), "unknown")),  # type: ignore[arg-type]
        ("system", plain(system.get("kernel") or "unknown")),
        ("torch", plain(system.get("torch") or "unknown")),
        ("seed of the orders", str(measurement.seed)),
        ("took", time_words(measurement.took_s)),
    ]
    if measurement.start is not None:
        start = measurement.start
        rows.append((f"a group of {start.ranks} ranks, gloo", ", ".join(time_words(one) for one in start.raw_s)))
        rows.append((f"a group of {start.ranks} ranks, sealed", ", ".join(time_words(one) for one in start.sealed_s)))
    for memory in measurement.memory:
        where = f"peak extra memory, {memory.way.value}, {size_words(memory.bytes)}, {memory.ranks} ranks"
        rows.append((where, size_words(memory.extra_bytes)))
    text = (
        "The ranks were started once and made every group once. A round holds each way once, in an order drawn anew; "
        "every repetition begins behind a barrier, and lasts from the first rank's begin to the last one's end. The "
        "first round was thrown away. Before anything was timed, every way had to give the right sum."
    )
    return [tag("p", text), ways, facts(rows)]


def _machine(measurement: Measurement) -> str:
    cpu = plain(measurement.system.get("cpu") or "unknown processor", most=60)
    return f"{measurement.system.get('logical_cpus') or '?'} × {cpu}"


def _date(measurement: Measurement) -> str:
    when = datetime.fromtimestamp(measurement.created_us / 1e6, UTC)
    return when.strftime("%d %B %Y, %H:%M UTC").lstrip("0")
