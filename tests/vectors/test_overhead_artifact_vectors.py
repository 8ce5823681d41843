"""The vectors of a measurement, read as data: each folder is accepted for what it is, or refused by its own code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from glasshouse.bench.overhead.verify import verify_measurement
from glasshouse.errors import GlasshouseError
from glasshouse.wire.fields import b64decode

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "overhead-artifact"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if not CASES:
    raise FileNotFoundError(f"no vectors in {FOLDER}")


def files(given: dict[str, Any]) -> dict[str, str]:
    if "files" in given:
        return dict(given["files"])
    found = files(CASES[given["base"]]["input"])
    for edit in given["edits"]:
        assert found[edit["path"]].count(edit["old"]) == 1
        found[edit["path"]] = found[edit["path"]].replace(edit["old"], edit["new"])
    for path in given["removed"]:
        del found[path]
    return found | given["put"]


@pytest.mark.parametrize("name", CASES)
def test_vector(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for path, text in files(case["input"]).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text.encode())
    try:
        verdict = verify_measurement(tmp_path, owner=b64decode(case["input"]["owner"]))
    except GlasshouseError as error:
        found: dict[str, Any] = {"code": error.code.value}
    else:
        found = {
            "assurance": verdict.assurance,
            "code": None,
            "lacks": [lack.value for lack in verdict.lacks],
            "status": verdict.status.value,
        }
    assert found == case["expect"]


def test_the_generator_tells_the_same_cases_of_the_same_slices() -> None:
    """Byte for byte but for the numbers, whose last digits are the mathematical library's."""
    spec = importlib.util.spec_from_file_location("generator", ROOT / "spec/vectors/generate_overhead_artifact.py")
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    built = {name.removesuffix(".json"): json.loads(data) for name, data in generator.build().items()}
    assert built.keys() == CASES.keys()
    assert {name: case["expect"] for name, case in built.items()} == {
        name: case["expect"] for name, case in CASES.items()
    }
    computed = ("statement.json", "analysis.json", "phases.json")
    whole = [cases["good"]["input"]["files"] for cases in (built, CASES)]
    recorded = [{path: text for path, text in one.items() if not path.endswith(computed)} for one in whole]
    assert recorded[0] == recorded[1]
