"""`glasshouse prune`: removes runs that ended long ago, after it has said which."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, Yes, locate
from glasshouse.cli.results.rm_command import remove_agreed
from glasshouse.cli.show.output import Output
from glasshouse.errors import Code, UsageError

__all__ = ["command"]


def command(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Of runs that ended so long ago: 12h, 30d.")
    ] = "30d",
    yes: Yes = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.jobs.owner.durations import parse_s
    from glasshouse.jobs.supervise.removal import ended_before

    output, place = Output(as_json), locate(home)
    age_s = parse_s(older_than)
    if age_s is None:
        raise UsageError(Code.USAGE, f"--older-than takes a time such as 12h or 30d, not {older_than[:40]!r}")
    before_us = time.time_ns() // 1000 - age_s * 1_000_000
    return remove_agreed(output, ended_before(place, us=before_us), yes=yes)
