"""Writes the vectors of kind `line` of spec/vectors/checkpoints/ again: whole lines, and each way to forge one.

A leg that is like one of another case names that (`base`: case and number of the leg), and what differs.
Run: python spec/vectors/generate_checkpoints_line.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from glasshouse.jobs.verify.line_verdict import verify_line  # noqa: E402
from glasshouse.wire.canonical import b64encode, decode  # noqa: E402
from simulators.line_world import LINE_STORIES  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "checkpoints"
KIND = "line"


def build() -> dict[str, bytes]:
    """Return the files by name."""
    files: dict[str, bytes] = {}
    bases: dict[tuple[str, int], dict[str, Any]] = {}
    for story in LINE_STORIES:
        line, name = story.forge(), f"{KIND}-{story.name}"
        whole: Any = decode(line.data, max_bytes=1 << 24)
        expect: dict[str, Any] = {"code": story.code}
        if story.code is None:
            verdict = verify_line(line.data, owner=line.owner.public)
            expect |= {"exit_code": int(verdict.exit_code), "not_wiped": list(verdict.not_wiped)}
            expect |= {"status": verdict.status.value}
        case = {
            "description": story.told,
            "expect": expect,
            "input": {
                "legs": [_short(leg, bases) for leg in whole["legs"]],
                "owner": b64encode(line.owner.public),
            },
            "kind": KIND,
        }
        for number, leg in enumerate(whole["legs"], 1):
            bases[name, number] = leg
        files[f"{name}.json"] = json.dumps(case, indent=1, sort_keys=True).encode() + b"\n"
    return files


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


def main() -> None:
    files = build()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob(f"{KIND}-*.json"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    print(f"{len(files)} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
