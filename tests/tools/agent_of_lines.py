"""The real agent, whose checkpoints may come as soon as the last was counted, under content keys that a test knows."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from dataclasses import replace

from glasshouse.custodian.exchange import Opened, Request
from glasshouse.package.checkpoints import part_sealer
from glasshouse.runtime.__main__ import main
from glasshouse.runtime.keys.custodian import Custodian
from glasshouse.runtime.run import lifecycle

ENVIRONMENT = "GLASSHOUSE_TEST_ENVIRONMENT"
"""Names the variable that stands for what else is installed on the machine."""
_made = 0


def content_key(number: int) -> bytes:
    """Return the key of a leg's part, by its number from 0."""
    return hashlib.sha256(b"a content key that only tests know, " + bytes([number])).digest()


def _next_key() -> bytearray:
    global _made
    made = content_key(_made)
    key = bytearray(made)
    ctypes.memset(id(made) + bytes.__basicsize__ - 1, 0, len(made))  # a copy here would be this program's residue
    _made += 1
    return key


def _open_impatiently(custodian: Custodian, request: Request) -> Opened:
    opened = _OPEN(custodian, request)
    limits = opened.checkpoints
    return opened if limits is None else replace(opened, checkpoints=replace(limits, every_s=0))


_OPEN = Custodian.open

if __name__ == "__main__":
    if ENVIRONMENT in os.environ:
        lifecycle.measure_environment = lambda: hashlib.sha256(os.environ[ENVIRONMENT].encode()).digest()
    part_sealer.fresh_key = _next_key
    Custodian.open = _open_impatiently  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:], sys.stdin.buffer))
