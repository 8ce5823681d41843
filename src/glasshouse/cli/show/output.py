"""What a command prints: one JSON object for programs, or text for people; and an error, levels, sizes for each.

Law: what comes from outside (names of outputs, paths, messages of a peer) can be read on a terminal and cannot command
it: no escape sequence, no text that turns round, no bytes that are no text. `printable` ensures that.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glasshouse.errors import GlasshouseError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# Control characters; format characters, which reorder or hide text; surrogates: bytes of a name that are no text;
# separators of lines and paragraphs.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
OUTCOME = {
    "completed": "completed",
    "refused": "refused: the gate did not release the key",
    "failed": "failed",
    "interrupted": "interrupted",
    "residue": "residue: something of yours was found after zeroization",
    "superseded": "superseded: another machine goes on with its training",
    "lost": "lost: what stayed behind is not known",
}

_SHOWN_LEFT_OUT = 6


def printable(text: str, *, keep: str = "\n") -> str:
    """Return a text in which every character that a terminal would obey or hide, but those to `keep`, is an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        # An escape that JSON reads back as the same character.
        re.sub("....", r"\\u\g<0>", char.encode("utf-16-be", "surrogatepass").hex())
        if char not in keep and unicodedata.category(char) in _UNSEEN
        else char
        for char in text
    )


class CommandOutput:
    """Prints for a command: text for people, or (`as_json`) one object and nothing else."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @functools.cached_property
    def console(self) -> Console:
        """The console for people."""
        from rich.console import Console

        class Terminal(Console):
            """Leaves to the command what the end of its reader means; the framework's own ends the process."""

            def on_broken_pipe(self) -> None:
                raise  # the error that is being handled where this is called

        return Terminal(highlight=False, soft_wrap=False)

    @property
    def can_ask(self) -> bool:
        """Whether there is a person at a terminal to answer a question."""
        return not self.as_json and sys.stdin.isatty() and sys.stdout.isatty()

    def result(self, value: Mapping[str, Any]) -> None:
        """Print the object for programs."""
        if self.as_json:
            # Within JSON these escapes mean the character itself: a program loses nothing.
            sys.stdout.write(printable(json.dumps(value, ensure_ascii=False), keep="") + "\n")
            sys.stdout.flush()

    def say(self, *words: RenderableType, style: str | None = None) -> None:
        """Print for people; what comes from outside is printed as it is, never as markup."""
        if not self.as_json:
            # Not wrapped by us: a digest or a path that is cut in two cannot be copied or searched for.
            shown = [printable(word) if isinstance(word, str) else word for word in words]
            self.console.print(*shown, style=style, markup=False, emoji=False, soft_wrap=True)

    def facts(self, facts: Mapping[str, object]) -> None:
        """Print facts for people, one a line, names aligned; a fact that is None is left out."""
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
        """Print for people what they should not overlook, on standard error."""
        if not self.as_json:
            sys.stderr.write(f"note: {printable(text)}\n")


def error_object(error: GlasshouseError) -> dict[str, Any]:
    """Return an error as programs see it."""
    return {"error": {"code": error.code.value, "message": error.message, "hint": error.hint, "fault": error.fault}}


def verdict_words(verdict: str | None, assurance: str | None) -> str:
    """Return what verification of a receipt came to, and at which level."""
    level = assurance or "none"
    return {
        "good": f"genuine and complete, at assurance {level}",
        "incomplete": "incomplete: not countersigned by the broker, or without what its hardware is appraised by; "
        f"authentic at assurance {level}, not good",
        "not-completed": f"genuine, of a run that did not complete; assurance {level}",
        "invalid": "does not hold: believe nothing of it",
        "no-receipt": "none",
    }.get(verdict or "", "unknown")


def network_words(egress: Sequence[str]) -> str:
    """Return which addresses a worker may reach."""
    return ", ".join("its own group's machines, sealed" if peer == "group" else peer for peer in egress) or "none"


def files_words(disk: bool) -> str:
    """Return where a worker's files may lie."""
    return "memory, or the machine's disk where memory has too little room" if disk else "memory alone"


def left_out_words(left_out: Sequence[str]) -> str | None:
    """Return what of the inputs' folders is not packed, the first few of many; None for nothing."""
    shown = ", ".join(left_out[:_SHOWN_LEFT_OUT])
    more = len(left_out) - _SHOWN_LEFT_OUT
    return (shown + (f" and {more} more" if more > 0 else "")) or None


def asked_words(providers: Sequence[str]) -> str:
    """Return which providers were asked beside the journals here."""
    return f" and by {', '.join(providers)}" if providers else "; no provider was asked, which takes an account's key"


def again(home: Path | None) -> str:
    """Return what a proposed command repeats to use the same state home: ` --home DIR`, or nothing."""
    return "" if home is None else f" --home {shlex.quote(str(home))}"


def counted(number: int, noun: str) -> str:
    """Return a number of things: `1 file`, `2 files`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def bytes_text(count: int) -> str:
    """Return a size for people, in powers of 1000."""
    if count < 1000:
        return f"{count} B"
    power = min(3, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {' kMG'[power]}B"


def clock(seconds: float) -> str:
    """Return a remaining time as a clock shows it."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
