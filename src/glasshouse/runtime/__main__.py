"""``python -I -B -X pycache_prefix=DIR -m glasshouse.runtime --package FILE --out DIR``: see `agent`."""

from __future__ import annotations

import sys

from glasshouse.runtime.measured_imports import allow_measured_only

if __name__ == "__main__":
    allow_measured_only()
    from glasshouse.runtime.confine.shown_search import Look
    from glasshouse.runtime.worker.shown_paths import default_read_paths

    # First of all: it takes about as long as this process takes to import the rest, and another core.
    look = Look.start(default_read_paths())
    from glasshouse.runtime.agent import main

    sys.exit(main(sys.argv[1:], sys.stdin.buffer, look=look))
