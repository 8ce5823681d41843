"""The console for people."""

from __future__ import annotations

from rich.console import Console


class Terminal(Console):
    """A console that leaves to the command what the end of its reader means; the framework's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled where this is called
