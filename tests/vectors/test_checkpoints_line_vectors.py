"""The vectors of lines, read as data: each is verified, or refused by its own code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError
from glasshouse.jobs.verify.line_verdict import LineVerdict, verify_line
from glasshouse.wire.canonical import b64decode, encode

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "checkpoints"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("line-*.json"))}
if not CASES:
    raise FileNotFoundError(f"no vectors of lines in {FOLDER}")


def leg(given: dict[str, Any]) -> dict[str, Any]:
    """Return a leg's documents, those that it has from another case among them."""
    if "base" not in given:
        return given
    case, number = given["base"]
    base = leg(CASES[case]["input"]["legs"][number - 1])
    own = {name: value for name, value in given.items() if name not in ("base", "without")}
    return {name: value for name, value in base.items() if name not in given.get("without", [])} | own


def verified(given: dict[str, Any]) -> LineVerdict:
    whole = {"format": "glasshouse-line/1", "legs": [leg(one) for one in given["legs"]]}
    return verify_line(encode(whole), owner=b64decode(given["owner"]))


@pytest.mark.parametrize("name", CASES)
def test_a_line_is_verified_or_refused_as_the_vector_says(name: str) -> None:
    given, expected = CASES[name]["input"], CASES[name]["expect"]
    if expected["code"] is None:
        found = verified(given)
        told = {"exit_code": int(found.exit_code), "not_wiped": list(found.not_wiped), "status": found.status.value}
        assert told == {member: value for member, value in expected.items() if member != "code"}
        return
    with pytest.raises(GlasshouseError) as caught:
        verified(given)
    assert caught.value.code is Code(expected["code"])


def test_there_are_lines_that_hold_beside_those_that_do_not() -> None:
    codes = {case["expect"]["code"] for case in CASES.values()}
    assert {None, "line-forked", "checkpoint-foreign", "line-order-missing", "incomplete"} <= codes


def test_the_generator_writes_the_same_files_again() -> None:
    path = ROOT / "spec/vectors/generate_checkpoints_line.py"
    spec = importlib.util.spec_from_file_location("generate_checkpoints_line", path)
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.build() == {path.name: path.read_bytes() for path in FOLDER.glob("line-*.json")}
