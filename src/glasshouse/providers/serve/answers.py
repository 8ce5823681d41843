"""The requests to a place that are answered at once: about the machine, and about its runs and uploads (spec/place.md).

Law: nothing is written to the channel here; the longest wait is for a child that looks at the machine or measures it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from glasshouse.providers.serve import facts
from glasshouse.providers.serve.facts import free_addresses
from glasshouse.providers.serve.runs import RUN, Runs
from glasshouse.providers.serve.uploads import Uploads
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.fields import Fields

__all__ = ["MAX_MACHINES", "Answer", "Answers", "run_field"]

MAX_MACHINES = 64
_MAX_RUNS = 256
# Each takes at most 262 bytes of a message of 64 KiB.
_MAX_INSTALLED = 200
_MAX_NAME_CHARS = 4096
# A page ends behind the name that passes this; the longest name still fits into a message then.
_PAGE_BYTES = 48 << 10

Answer = dict[str, Json]


class Answers:
    """What one connection is answered at once.

    Args:
        folder: the place's.
        runs, uploads: what is in it.

    Attributes:
        by_name: the requests, each of which takes its fields to its end, and raises `FormatError` for others;
            `OSError` and `GlasshouseError` refuse the request.
    """

    def __init__(self, folder: Path, runs: Runs, uploads: Uploads) -> None:
        self._folder, self._runs, self._uploads = folder, runs, uploads
        self._measured: tuple[Json, dict[str, Json]] | None = None
        self.by_name: dict[str, Callable[[Fields], Answer]] = {
            "hello": self._hello,
            "examine": self._examine,
            "installed": self._installed,
            "measure": self._measure,
            "addresses": self._addresses,
            "has": self._has,
            "stop": self._stop,
            "runs": self._list,
        }

    def _hello(self, fields: Fields) -> Answer:
        fields.end()
        return facts.hello(self._folder)

    def _examine(self, fields: Fields) -> Answer:
        fields.end()
        return {"findings": facts.examine(self._folder)}

    def _installed(self, fields: Fields) -> Answer:
        after = fields.text("after", max_chars=128)
        fields.end()
        return {"versions": facts.installed(after, _MAX_INSTALLED)}

    def _measure(self, fields: Fields) -> Answer:
        after = None if fields.null("after") else fields.text("after", max_chars=_MAX_NAME_CHARS)
        fields.end()
        if after is None or self._measured is None:
            self._measured = facts.measure(self._folder)
        measurement, files = self._measured
        page: Answer = {}
        size = 0
        for name in sorted(files):
            if after is not None and name > after and size < _PAGE_BYTES:
                page[name] = files[name]
                size += len(encode({name: files[name]}))
        return {"files": page, "measurement": measurement}

    def _addresses(self, fields: Fields) -> Answer:
        count = fields.integer("count", low=1, high=MAX_MACHINES)
        host = None if fields.null("host") else fields.text("host", max_chars=255)
        fields.end()
        return {"addresses": list(free_addresses(host or facts.reached_at(), count))}

    def _has(self, fields: Fields) -> Answer:
        digest, size = fields.digest("blake3").hex(), fields.integer("bytes")
        fields.end()
        return {"bytes": min(size, self._uploads.present(digest))}

    def _stop(self, fields: Fields) -> Answer:
        run, how = run_field(fields), fields.choice("how", ("interrupt", "kill"))
        fields.end()
        self._runs[run].stop(signal.SIGTERM if how == "interrupt" else signal.SIGKILL)
        return {}

    def _list(self, fields: Fields) -> Answer:
        after = fields.text("after", max_chars=32)
        fields.end()
        later = ((name, run) for name, run in self._runs if name > after and run.started)
        return {
            "runs": [
                {"ended": run.ended(), "run": name, "started_us": run.started_us}
                for name, run in islice(later, _MAX_RUNS)
            ]
        }


def run_field(fields: Fields) -> str:
    """Take the id of a run; raises `FormatError`."""
    return fields.text("run", pattern=RUN)
