"""The evidence vectors, read as data: each case is accepted, or refused by its own code."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.heads import CountersignedHead, Head, countersign
from glasshouse.evidence.log import verify_log
from glasshouse.jobs.verify.publish import verify_artifact
from glasshouse.jobs.verify.verdict import verify_bundle
from glasshouse.wire.canonical import b64decode, encode
from glasshouse.wire.crypto import SigningKey
from simulators.world import with_log

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "evidence"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if not CASES:
    raise FileNotFoundError(f"no vectors in {FOLDER}")


def bundle(given: dict[str, Any]) -> dict[str, Any]:
    base = given["bundle"] if "bundle" in given else {**CASES[given["base"]]["input"]["bundle"], **given["parts"]}
    data = {name: value for name, value in base.items() if name not in given.get("without", [])}
    verdict = verify_bundle(encode(data), owner=b64decode(given["owner"]))
    return {
        "assurance": verdict.assurance,
        "code": None,
        "exit_code": int(verdict.exit_code),
        "outcome": verdict.outcome.value,
        "status": verdict.status.value,
    }


def log(given: dict[str, Any]) -> dict[str, Any]:
    verify_log((line.encode() + b"\n" for line in given["lines"]), Head.from_json(given["head"]))
    return {"code": None}


def heads(given: dict[str, Any]) -> dict[str, Any]:
    base = CASES[given["base"]]["input"]["bundle"]
    verdict = verify_bundle(encode(base), owner=b64decode(given["owner"]))
    lines = (line.encode() + b"\n" for line in given["lines"])
    assert with_log(verdict, lines, io.BytesIO(given["heads"].encode())).heads
    return {"code": None}


def countersigned(given: dict[str, Any]) -> dict[str, Any]:
    broker, evidence_public = SigningKey(b64decode(given["broker_seed"])), b64decode(given["evidence_public"])
    previous = given["previous"] and CountersignedHead.parse(
        encode(given["previous"]), broker_public=broker.public, evidence_public=evidence_public
    )
    found = countersign(
        encode(given["head"]),
        [b64decode(step) for step in given["proof"]],
        run_id=given["run_id"],
        previous=previous,
        evidence_public=evidence_public,
        broker_key=broker,
        now_us=given["now_us"],
    )
    return {"code": None, "repeated": found is previous}


def artifact(given: dict[str, Any]) -> dict[str, Any]:
    verify_artifact(encode(given["artifact"]), owner=b64decode(given["owner"]))
    return {"code": None}


KINDS = {"artifact": artifact, "bundle": bundle, "countersign": countersigned, "heads": heads, "log": log}


@pytest.mark.parametrize("name", CASES)
def test_vector(name: str) -> None:
    case = CASES[name]
    try:
        found = KINDS[case["kind"]](case["input"])
    except GlasshouseError as error:
        found = {"code": error.code.value}
    assert found == case["expect"]


def test_every_kind_has_vectors_that_pass_and_vectors_that_fail() -> None:
    for kind in KINDS:
        codes = {case["expect"]["code"] is None for case in CASES.values() if case["kind"] == kind}
        assert codes == {True, False}


def test_every_code_of_the_chain_has_a_vector() -> None:
    told = {case["expect"]["code"] for case in CASES.values()}
    links = {code.value for code in Code if code.name.startswith("CHAIN_")}
    links -= {Code.CHAIN_INCOMPLETE.value, Code.CHAIN_MISSING.value}  # the one of a policy
    codes = {Code.OWNER_UNKNOWN, Code.LOG_INVALID, Code.STATE_ILLEGAL, Code.ARTIFACT_INVALID, Code.HEAD_INCONSISTENT}
    assert links | {code.value for code in codes} <= told


def test_the_generator_writes_the_same_files_again() -> None:
    spec = importlib.util.spec_from_file_location("generate_evidence", ROOT / "spec/vectors/generate_evidence.py")
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
    assert generator.build() == written
