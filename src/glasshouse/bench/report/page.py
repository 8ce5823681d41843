"""The page: the answer, the numbers, the pictures, and what stands behind them, as one file without references."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

from glasshouse.bench.overhead.artifact import Measurement
from glasshouse.bench.report.caveats import caveats
from glasshouse.bench.report.figures import Missing, Picture, pictures
from glasshouse.bench.report.html import Markup, plain, table, tag
from glasshouse.bench.report.sections import SECTIONS
from glasshouse.bench.report.summary import summary
from glasshouse.bench.report.theme import DARK, LIGHT, css_variables, export, inline, safe_words
from glasshouse.bench.report.view import View
from glasshouse.bench.report.words import answer, planted

__all__ = ["build", "document", "figure", "write"]

# Nothing may be fetched and nothing may run, whatever a name in the measurement says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def build(measurement: Measurement) -> str:
    """Return `report.html`: self-contained, without a script, the same bytes for the same measurement."""
    view = View(measurement)
    return _page(view, pictures(view))


def write(measurement: Measurement, folder: Path) -> Path:
    """Write `report.html` and `figures/` into the folder of a measurement, and return the page's path.

    Raises:
        OSError: the folder cannot be written.
    """
    view = View(measurement)
    found = pictures(view)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    source = f"{safe_words(view.workload)} · {_date(view)} · Glasshouse"
    if measurement.planted_ppm:
        source += " · PLANTED OVERHEAD, not the cost of protection"
    for picture in found:
        if isinstance(picture, Picture):
            drawn = export(picture.name, picture.drawing, title=picture.title, source=source)
            (folder / "figures" / f"{picture.name}.svg").write_bytes(drawn.svg)
            (folder / "figures" / f"{picture.name}.png").write_bytes(drawn.png)
    path = folder / "report.html"
    path.write_text(_page(view, found), encoding="utf-8")
    return path


def _page(view: View, found: tuple[Picture | Missing, ...]) -> str:
    name = plain(view.workload, most=96)
    body = tag(
        "main",
        _header(view, name),
        tag("section", tag("h2", "The numbers"), summary(view), id="numbers"),
        tag("section", tag("h2", "Pictures"), *(figure(picture) for picture in found), id="pictures"),
        *(tag("section", tag("h2", title), *make(view), id=anchor) for anchor, title, make in SECTIONS),
        tag(
            "footer",
            "Made by ",
            tag("code", "glasshouse bench overhead"),
            ". This file refers to nothing outside itself and runs no script.",
        ),
    )
    return document(f"What protection costs: {name}", body)


def document(title: str, body: Markup) -> str:
    """Return a whole page in the house's theme: self-contained, and nothing in it can run or be fetched.

    Args:
        title: of the window; untrusted text has been through `plain`.
        body: one `main` element.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", _style()),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en") + "\n"


def _header(view: View, name: str) -> Markup:
    said, warning = answer(view), planted(view)
    links = [("numbers", "Numbers"), ("pictures", "Pictures"), *((anchor, title) for anchor, title, _ in SECTIONS)]
    return tag(
        "header",
        tag("p", "What protection costs · ", tag("bdi", name), f" · {_date(view)}", class_="eyebrow"),
        tag("p", tag("strong", warning), class_="planted", role="alert") if warning else None,
        tag(
            "h1", tag("span", said.word, class_=f"word {said.tone}"), tag("span", ": ", class_="unseen"), said.sentence
        ),
        tag("ul", *(tag("li", words) for words in caveats(view)), class_="caveats"),
        tag("nav", *(tag("a", title, href=f"#{anchor}") for anchor, title in links), aria_label="Sections"),
    )


def figure(picture: Picture | Missing) -> Markup:
    """Return a picture with its caption and its numbers as a table, or why there is none."""
    anchor = f"figure-{picture.name}"
    if isinstance(picture, Missing):
        return tag(
            "div",
            tag("h3", picture.title),
            tag("p", picture.why),
            class_="missing",
            id=anchor,
        )
    drawn = (
        tag("div", Markup(inline(picture.name, picture.drawing, alt=picture.alt, narrow=narrow)), class_=size)
        for narrow, size in ((False, "wide"), (True, "narrow"))
    )
    numbers = table(picture.headers, picture.rows, caption=f"Numbers: {picture.title}")
    return tag(
        "figure",
        tag("h3", picture.title),
        *drawn,
        tag("figcaption", picture.caption),
        tag("details", tag("summary", "The same as a table"), numbers),
        id=anchor,
    )


def _date(view: View) -> str:
    when = datetime.fromtimestamp(view.measurement.created_us / 1e6, UTC)
    return when.strftime("%d %B %Y, %H:%M UTC").lstrip("0")


def _style() -> Markup:
    source = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    source = source.replace("/*light*/", css_variables(LIGHT)).replace("/*dark*/", css_variables(DARK))
    return Markup(re.sub(r"\s*\n\s*", "", source))
