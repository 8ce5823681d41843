"""The vectors of spec/measurement.md, read as data."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.measurement_cases import files_of, outcome

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "measurement"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if not CASES:
    raise FileNotFoundError(f"no vectors in {FOLDER}")

NUMBERS = {
    "contention",
    "contrast",
    "high",
    "log_ratio",
    "low",
    "minimum_detectable",
    "processor",
    "randomisation_p",
} | {
    "standard_error",
    "steady_p",
    "tost_p",
    "trimmed",
}


def read(expected: dict[str, Any]) -> dict[str, Any]:
    """What is expected, with numbers as far as libraries agree on them."""
    return {
        name: pytest.approx(float(value), rel=1e-8, abs=1e-12)
        if name in NUMBERS and value is not None
        else pytest.approx(value, abs=1000)
        if name == "length_ns"
        else value
        for name, value in expected.items()
    }


def found(case: dict[str, Any]) -> dict[str, Any]:
    given = case["input"]
    if case["kind"] == "artifact":
        base = CASES[given["base"]]["input"] if "base" in given else None
        given = {"files": files_of(given, base), "owner": given["owner"]}
    return {
        name: float(value) if name in NUMBERS and value is not None else value
        for name, value in outcome(case["kind"], given).items()
    }


@pytest.mark.parametrize("name", CASES)
def test_vector(name: str) -> None:
    assert found(CASES[name]) == read(CASES[name]["expect"])


def test_every_kind_is_there_with_its_refusals() -> None:
    kinds = {case["kind"] for case in CASES.values()}
    assert kinds == {
        "calibration",
        "commitment",
        "schedule",
        "record",
        "session",
        "estimate",
        "sensitivity",
        "artifact",
    }
    codes = {case["expect"]["code"] for case in CASES.values()}
    assert {None, "artifact-invalid", "schema-invalid", "usage", "not-canonical"} <= codes


def test_every_member_of_an_analysis_is_on_its_page() -> None:
    page = (ROOT / "spec" / "measurement.md").read_text(encoding="utf-8")
    section = page.split("\n## 10. ")[1].split("\n## 11. ")[0]
    files = CASES["artifact-good"]["input"]["files"]
    members = set()
    for part in ("interleaved", "null"):
        members |= set(members_of(json.loads(files[f"{part}/analysis.json"])))
    assert len(members) > 40
    assert {name for name in members if f'"{name}"' not in section} == set()


def members_of(value: Any) -> Iterator[str]:
    """Yield the name of every member; what counts rules, outcomes or parts has names that other sections list."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield name
        if name not in ("excluded", "excluded_blocks", "outcomes", "parts_s"):
            yield from members_of(inner)
    for inner in value if isinstance(value, list) else ():
        yield from members_of(inner)


def test_the_generator_makes_the_same_inputs() -> None:
    spec = importlib.util.spec_from_file_location("generator", ROOT / "spec/vectors/generate_measurement.py")
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    built = {name.removesuffix(".json"): json.loads(data) for name, data in generator.build().items()}
    assert {name: inputs(case) for name, case in built.items()} == {name: inputs(case) for name, case in CASES.items()}


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    """What a case is given; of an artifact the files' names, for its numbers' last digits are the library's."""
    return {name: sorted(value) if name in ("files", "put") else value for name, value in case["input"].items()}
