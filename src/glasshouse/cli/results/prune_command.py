"""`glasshouse prune`: removes runs that ended long ago, after it has listed them."""

from __future__ import annotations

import time
from typing import Annotated

from glasshouse.cli.options import HomeOptions, Yes, option
from glasshouse.cli.show.steps import remove_agreed
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.wanted import parse_s
from glasshouse.jobs.supervise.sweeping import ended_before


def command(
    older_than: Annotated[str, option("--older-than TIME", "Of runs that ended so long ago: 12h, 30d.")] = "30d",
    yes: Yes = False,
    *,
    options: HomeOptions,
) -> int:
    """Remove the runs that ended before a time, if that is agreed to."""
    home, age_s = options.own_home, parse_s(older_than)
    if age_s is None:
        raise UsageError(Code.USAGE, f"--older-than takes a time such as 12h or 30d, not {older_than[:40]!r}")
    before_us = time.time_ns() // 1000 - age_s * 1_000_000
    return remove_agreed(options.output, ended_before(home, us=before_us), yes=yes)
