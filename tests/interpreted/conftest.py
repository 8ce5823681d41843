"""Tests of GPU kernels run as Python by Triton's interpreter, which must be on before Triton is imported.

`make test` starts a process for them (tests/unit/collectives/test_collectives_kernels.py). By hand:
``TRITON_INTERPRET=1 pytest tests/interpreted``.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
