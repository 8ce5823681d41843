"""The vectors of spec/key-release.md, 5.7: reference values of a release, and one for each thing that is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.jobs.references.known_references import Released, parts_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "reference-values"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if len(CASES) < 20:
    raise RuntimeError(f"only {len(CASES)} vectors in {FOLDER}")


@pytest.mark.parametrize("name", CASES)
def test_reference_values_are_read_or_refused_as_the_vector_says(name: str) -> None:
    given, expected = CASES[name]["input"], CASES[name]["expect"]
    data, signed_by = given["envelope"].encode(), bytes.fromhex(given["signed_by"])
    if expected["code"] is None:
        found = parts_of(Released.verified(data, signed_by=signed_by).files)
        assert {part: digest.hex() for part, digest in found.items()} == expected["parts"]
        return
    with pytest.raises(FormatError) as caught:
        Released.verified(data, signed_by=signed_by)
    assert caught.value.code is Code(expected["code"])


def test_the_generator_writes_the_same_files_again() -> None:
    path = ROOT / "spec/vectors/generate_reference_values.py"
    spec = importlib.util.spec_from_file_location("generate_reference_values", path)
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.build() == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
