"""``python -I -B -X pycache_prefix=DIR -m glasshouse.runtime --package FILE --out DIR``: see `agent`."""

from __future__ import annotations

import sys

from glasshouse.runtime.agent import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdin.buffer))
