"""Colours, and how a drawing becomes an SVG that follows the page's theme.

A figure is drawn once with the light colours. Each of them has a name, and no two are equal, so that in the page every
colour can be replaced by the CSS variable of that name; files for export keep the light ones. Laws: the same
drawing gives the same bytes; nothing in the result points outside it; identifiers of two drawings in a page differ.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.layout_engine import ConstrainedLayoutEngine

__all__ = ["DARK", "LIGHT", "Drawing", "Exported", "Sheet", "css_variables", "export", "inline", "safe_words"]

# Raw and protected differ in hue, in lightness (they stay apart in grey) and, in the drawings, in shape.
LIGHT = {
    "paper": "#fefefd",
    "ink": "#1b1f24",
    "muted": "#5b6470",
    "rule": "#d5d9de",
    "raw": "#1d4f91",
    "protected": "#d97706",
    "protected-ink": "#9a4f00",
    "margin": "#d9efe3",
    "margin-edge": "#2e7d5b",
    "warm": "#f1efe8",
    "excluded": "#b4233a",
    "published": "#7a5ba6",
    "null": "#66707d",
}
DARK = {
    "paper": "#14171b",
    "ink": "#e8eaed",
    "muted": "#a3abb6",
    "rule": "#363c44",
    "raw": "#9cc4ff",
    "protected": "#e88a1a",
    "protected-ink": "#f3a94f",
    "margin": "#17392c",
    "margin-edge": "#6fcf9f",
    "warm": "#23262b",
    "excluded": "#ff7b8a",
    "published": "#bfa3ea",
    "null": "#939daa",
}
FONT_STACK = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
WIDE_PX = 900
NARROW_PX = 350
_DPI = 72  # one unit of the SVG is one CSS pixel
_PNG_DPI = 144
_NAMES = {value: name for name, value in LIGHT.items()}
_ATTRIBUTE = re.compile(r'="[^"]*"')
_LONG_NUMBER = re.compile(r"(\d\.\d\d)\d+")
_COLOUR = re.compile("|".join(LIGHT.values()))
_FONT = re.compile(r"(?<=px )(?:'[^']*'|[A-Za-z-]+)(?:, (?:'[^']*'|[A-Za-z-]+))*")


@dataclass(slots=True)
class Sheet:
    """What a drawing gets to draw on: `figure`, wide or for a phone, a part of `whole`, with room for a title above."""

    _: KW_ONLY
    narrow: bool
    height_px: float
    above_px: float = 0.0
    whole: Figure = field(init=False)
    figure: FigureBase = field(init=False)

    def __post_init__(self) -> None:
        width = NARROW_PX if self.narrow else WIDE_PX
        layout = ConstrainedLayoutEngine(w_pad=2 / _DPI, h_pad=3 / _DPI)
        height = self.height_px + self.above_px
        self.whole = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout=layout)
        self.figure = self.whole
        if self.above_px:
            self.figure = self.whole.subfigures(2, 1, squeeze=False, height_ratios=(self.above_px, self.height_px))[
                1, 0
            ]

    def axes(self, *, grid: str = "both") -> Axes:
        """Return the one plot of this figure, without the frame's upper and right sides."""
        axes = self.figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        if grid:
            axes.grid(axis=grid, color=LIGHT["rule"], linewidth=0.7)  # type: ignore[arg-type]
        axes.set_axisbelow(True)
        return axes

    def legend(self, axes: Axes, *, columns: int = 4) -> None:
        """Put the legend above the plot, where it covers nothing."""
        handles, labels = axes.get_legend_handles_labels()
        found = dict(zip(labels, handles, strict=True))
        self.figure.legend(
            found.values(),
            found.keys(),
            loc="outside upper left",
            ncols=2 if self.narrow else columns,
            frameon=False,
            columnspacing=1.2,
            handletextpad=0.5,
            borderaxespad=0.1,
        )

    @property
    def size(self) -> float:
        """The size of the main text, in pixels."""
        return 11.0 if self.narrow else 12.5


@dataclass(frozen=True, slots=True)
class Drawing:
    """How to draw something, and how high it is."""

    _: KW_ONLY
    draw: Callable[[Sheet], None]
    height_px: float
    narrow_px: float


@dataclass(frozen=True, slots=True)
class Exported:
    """A drawing as files in light colours."""

    _: KW_ONLY
    svg: bytes
    png: bytes


def css_variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


def inline(name: str, drawing: Drawing, *, alt: str, narrow: bool) -> str:
    """Return a drawing as an element of the page, with its colours as CSS variables.

    Args:
        name: of the figure, unique in the page.
        drawing: what to draw.
        alt: what it shows, for those who do not see it; plain text.
        narrow: draw it for a phone.
    """
    prefix = f"{name}-{'n' if narrow else 'w'}-"
    with rc_context(_settings(name, narrow=narrow)):
        sheet = Sheet(narrow=narrow, height_px=drawing.narrow_px if narrow else drawing.height_px)
        drawing.draw(sheet)
        source = _svg(sheet.whole)
    body = source[source.index("<svg") :].split(">", 1)[1]
    body = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", body, flags=re.S)
    body = _ATTRIBUTE.sub(lambda found: _theme(found.group()), body)
    body = body.replace("xlink:href=", "href=").replace('href="#', f'href="#{prefix}')
    body = body.replace("url(#", f"url(#{prefix}").replace(' id="', f' id="{prefix}')
    width = NARROW_PX if narrow else WIDE_PX
    view = f"0 0 {width} {sheet.height_px:g}"
    head = f'<svg viewBox="{view}" width="{width}" role="img" aria-label="{_attribute(alt)}">'
    return head + re.sub(r">\s+<", "><", body)


def export(name: str, drawing: Drawing, *, title: str, source: str) -> Exported:
    """Return the wide drawing with its title and where it is from, so that it can stand alone."""
    with rc_context(_settings(name, narrow=False)):
        lines = textwrap.wrap(title, 92)
        sheet = Sheet(narrow=False, height_px=drawing.height_px, above_px=22 * len(lines) + 24)
        height = sheet.height_px + sheet.above_px
        below = (8 + 22 * len(lines)) / height
        sheet.whole.text(0.008, 1 - 8 / height, "\n".join(lines), va="top", size=15, weight="bold", in_layout=False)
        sheet.whole.text(0.008, 1 - below, source, va="top", color=LIGHT["muted"], in_layout=False)
        drawing.draw(sheet)
        svg = _FONT.sub(FONT_STACK, _svg(sheet.whole))
        png = io.BytesIO()
        sheet.whole.savefig(png, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return Exported(svg=svg.encode(), png=png.getvalue())


def safe_words(value: str, *, most: int = 60) -> str:
    """Return untrusted text with the characters that the drawings' font has."""
    found = "".join(char if char.isprintable() and ord(char) < 0x250 else "?" for char in value)
    return found if len(found) <= most else found[: most - 1] + "…"


def _svg(figure: Figure) -> str:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue().decode()


def _theme(attribute: str) -> str:
    attribute = _LONG_NUMBER.sub(r"\1", attribute)
    attribute = _FONT.sub("var(--font)", attribute)
    return _COLOUR.sub(lambda found: f"var(--{_NAMES[found.group()]})", attribute)


def _attribute(words: str) -> str:
    return words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def _settings(name: str, *, narrow: bool) -> Any:
    """Return Matplotlib's settings, all of which decide about the bytes; its own type for them is a list of names."""
    size = 11.0 if narrow else 12.5
    ink, muted = LIGHT["ink"], LIGHT["muted"]
    return {
        "svg.hashsalt": f"glasshouse-{name}",
        "svg.fonttype": "none",
        "font.family": ["DejaVu Sans"],
        "font.size": size,
        "text.parse_math": False,
        "axes.unicode_minus": True,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": muted,
        "axes.facecolor": "none",
        "figure.facecolor": LIGHT["paper"],
        "savefig.facecolor": LIGHT["paper"],
        "xtick.color": muted,
        "ytick.color": muted,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
        "axes.linewidth": 0.8,
        "lines.linewidth": 1.4,
        "path.simplify": False,
        "axes.formatter.use_mathtext": False,
    }
