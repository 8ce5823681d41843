"""Vectors of whole lines: those that hold, and each way to forge one or to leave something out.

A leg that is like one of another case names that (`base`: case and number of the leg), what differs, and `without`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from glasshouse.jobs.verify.line_verdict import verify_line
from glasshouse.wire.canonical import b64encode, decode
from simulators.line_world import LINE_STORIES

KIND = "line"


def line_cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each case's file name and document."""
    bases: dict[tuple[str, int], dict[str, Any]] = {}
    for story in LINE_STORIES:
        line, name = story.forge(), f"{KIND}-{story.name}"
        whole: Any = decode(line.data, max_bytes=1 << 24)
        expect: dict[str, Any] = {"code": story.code}
        if story.code is None:
            verdict = verify_line(line.data, owner=line.owner.public)
            expect |= {"exit_code": int(verdict.exit_code), "not_wiped": list(verdict.not_wiped)}
            expect |= {"status": verdict.status.value}
        legs = [_short(leg, bases) for leg in whole["legs"]]
        bases |= {(name, number): leg for number, leg in enumerate(whole["legs"], 1)}
        given = {"legs": legs, "owner": b64encode(line.owner.public)}
        yield f"{name}.json", {"description": story.told, "expect": expect, "input": given, "kind": KIND}


def _short(leg: dict[str, Any], bases: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    def alike(base: tuple[str, int]) -> int:
        same = [name for name, value in leg.items() if bases[base].get(name) == value]
        return sum(len(json.dumps(leg[name])) for name in same)

    best = max(bases, key=alike, default=None)
    if best is None or not alike(best):
        return leg
    changed = {name: value for name, value in leg.items() if bases[best].get(name) != value}
    without = sorted(set(bases[best]) - set(leg))
    return {"base": list(best), **changed} | ({"without": without} if without else {})
