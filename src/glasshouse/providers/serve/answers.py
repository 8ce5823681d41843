"""The requests to a place that are answered at once: about the machine, and about its runs and uploads (spec/place.md).

Law: nothing is written to the channel here; the longest wait is for a child that looks at the machine or measures it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from glasshouse.providers.protocol.messages import MAX_RUNS, MAX_VERSIONS
from glasshouse.providers.serve import facts
from glasshouse.providers.serve.runs import Runs
from glasshouse.providers.serve.uploads import Uploads
from glasshouse.wire.canonical import Json, encode

# A page ends behind the name that passes this; the longest name still fits into a message then.
_PAGE_BYTES = 48 << 10


class Answers:
    """What one connection is answered at once.

    Attributes:
        by_name: takes a request's members and returns those of the answer; `OSError` and `GlasshouseError` refuse it.
    """

    def __init__(self, folder: Path, runs: Runs, uploads: Uploads) -> None:
        self._folder, self._runs, self._uploads = folder, runs, uploads
        self._measured: tuple[Json, dict[str, bytes]] | None = None
        self.by_name: dict[str, Callable[..., Any]] = {
            "hello": lambda: facts.hello(folder),
            "examine": lambda: (facts.examine(folder),),
            "installed": lambda after: (facts.installed(after, MAX_VERSIONS),),
            "measure": self._measure,
            "addresses": lambda count, host: (facts.free_addresses(host or facts.reached_at(), count),),
            "has": lambda digest, size: (min(size, uploads.present(digest)),),
            "stop": self._stop,
            "runs": self._list,
        }

    def _measure(self, after: str | None) -> tuple[dict[str, bytes], Json]:
        if after is None or self._measured is None:
            self._measured = facts.measure(self._folder)
        measurement, files = self._measured
        page: dict[str, bytes] = {}
        size = 0
        for name in sorted(files):
            if after is not None and name > after and size < _PAGE_BYTES:
                page[name] = files[name]
                size += len(encode({name: files[name].hex()}))
        return page, measurement

    def _stop(self, run: str, how: str) -> tuple[()]:
        self._runs[run].stop(signal.SIGTERM if how == "interrupt" else signal.SIGKILL)
        return ()

    def _list(self, after: str) -> tuple[list[tuple[int | None, str, int]]]:
        later = ((name, run) for name, run in self._runs if name > after and run.started)
        return ([(run.ended(), name, run.started_us) for name, run in islice(later, MAX_RUNS)],)
