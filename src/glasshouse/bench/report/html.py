"""The little HTML that a report needs: every text is escaped unless it is already `Markup`.

Law: whatever stands in a workload's name or in a machine's description cannot become an element, an attribute or a
direction of writing.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

__all__ = ["Cell", "Markup", "facts", "plain", "table", "tag", "text"]

_LONGEST = 400
_VOID = frozenset({"meta", "br", "link"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Cell = str | Markup


def plain(value: object, *, most: int = _LONGEST) -> str:
    """Return untrusted text without control and direction characters, shortened to `most`."""
    found = "".join(char if char.isprintable() else "�" for char in str(value))
    return found if len(found) <= most else found[: most - 1] + "…"


def text(value: str) -> Markup:
    """Return text as HTML; `Markup` stays as it is."""
    if isinstance(value, Markup):
        return value
    # A unit stays with its number, and a p with its value.
    return Markup(html.escape(value).replace(" %", "\u00a0%").replace("p = ", "p\u00a0=\u00a0"))


def tag(name: str, /, *children: Cell | None, **attributes: str | None) -> Markup:
    """Return an element; a trailing `_` in an attribute's name is dropped and other `_` become `-`."""
    found = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{found}>")
    inside = "".join(text(child) for child in children if child is not None)
    return Markup(f"<{name}{found}>{inside}</{name}>")


def table(headers: Sequence[Cell], rows: Iterable[Sequence[Cell]], *, caption: str, class_: str = "") -> Markup:
    """Return a table whose first column names its rows; it scrolls within itself where it is too wide."""
    head = tag("tr", *(tag("th", name, scope="col") for name in headers))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    found = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_=class_ or None)
    return tag("div", found, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts(pairs: Iterable[tuple[str, Cell]]) -> Markup:
    """Return a list of names and values."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")
