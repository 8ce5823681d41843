"""The console for people, and what to do when its reader has gone."""

from __future__ import annotations

import errno

from rich.console import Console


class Terminal(Console):
    """A console that leaves to the command what the end of its reader means; the framework's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled where this is called


def is_reader_gone(error: OSError) -> bool:
    """Return whether an error means that our output has lost its reader: a closed pipe, a closed terminal."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO
