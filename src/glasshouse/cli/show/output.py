"""What a command prints: one JSON object for programs, or words for people; and how an error looks to each.

Law: what comes from outside (names of outputs, paths, what a peer said) can be read on a terminal and cannot command
it: no escape sequence, no text that turns round, no bytes that are no text. `printable` sees to that.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glasshouse.errors import GlasshouseError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["Output", "error_object", "printable"]

# Control characters; format characters, which reorder or hide text; surrogates: bytes of a name that are no text;
# separators of lines and paragraphs.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, *, keep: str = "\n") -> str:
    """Return a text with every character that a terminal would obey or hide written as its escape.

    Args:
        text: from anywhere.
        keep: characters that stay as they are.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _escape(char) if char not in keep and unicodedata.category(char) in _UNSEEN else char for char in text
    )


def _escape(char: str) -> str:
    """Return an escape that JSON reads back as the same character."""
    return "".join(f"\\u{unit:04x}" for unit in _units(char))


def _units(char: str) -> list[int]:
    data = char.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[place : place + 2]) for place in range(0, len(data), 2)]


class Output:
    """Where a command's words go.

    Args:
        as_json: print one object and nothing else.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._console: Console | None = None

    @property
    def console(self) -> Console:
        """The console for people."""
        if self._console is None:
            from glasshouse.cli.show.terminal import Terminal

            self._console = Terminal(highlight=False, soft_wrap=False)
        return self._console

    def result(self, value: Mapping[str, Any]) -> None:
        """Give a program its object; people get theirs by `say`."""
        if self.as_json:
            # Within JSON these escapes mean the character itself: a program loses nothing.
            sys.stdout.write(printable(json.dumps(value, ensure_ascii=False), keep="") + "\n")
            sys.stdout.flush()

    def say(self, *words: RenderableType, style: str | None = None) -> None:
        """Tell people; what comes from outside is printed as it is, never as markup."""
        if not self.as_json:
            # Not wrapped by us: a digest or a path that is cut in two cannot be copied or searched for.
            shown = [printable(word) if isinstance(word, str) else word for word in words]
            self.console.print(*shown, style=style, markup=False, emoji=False, soft_wrap=True)

    def facts(self, facts: Mapping[str, object]) -> None:
        """Tell people some facts, one a line, names aligned; a fact that is None is left out."""
        known = {name: value for name, value in facts.items() if value is not None}
        if self.as_json or not known:
            return
        from rich.text import Text

        indent = max(map(len, known)) + 2
        for name, value in known.items():
            # A line within a path is its maker's, and never one of ours.
            keep = "" if isinstance(value, Path) else "\n"
            text = value if isinstance(value, Text) else Text(printable(str(value), keep=keep))
            lines = list(text.split("\n"))
            if self.console.is_terminal:
                lines = [part for line in lines for part in line.wrap(self.console, self.console.width - indent - 1)]
            label = name
            for line in lines:
                line.rstrip()
                self.console.print(Text.assemble((label.ljust(indent), "dim"), line), soft_wrap=True)
                label = ""

    def warn(self, text: str) -> None:
        """Tell people what they should not overlook, on standard error."""
        if not self.as_json:
            sys.stderr.write(f"note: {printable(text)}\n")


def error_object(error: GlasshouseError) -> dict[str, Any]:
    """Return an error as programs see it."""
    return {
        "error": {"code": error.code.value, "message": error.message, "hint": error.hint, "fault": error.fault},
    }
