"""Lets tests import the simulators and tools that live beside them: `from simulators.world import ...`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from hypothesis import settings

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

# The same examples on every machine, no matter how slow it is, and no database in the working tree.
settings.register_profile("glasshouse", deadline=None, derandomize=True, database=None)
settings.load_profile("glasshouse")

# A suite that runs in the background, or under nohup, inherits that Ctrl-C or a hang-up is ignored; every command under
# test would inherit it too.
for _number, _usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)
