"""The vectors of spec/checkpoints.md: each case gives what it says, or is refused with its code."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.jobs.verify.line_verdict import verify_line
from glasshouse.package.checkpoints.part_content import PartReader
from glasshouse.package.checkpoints.resume_parts import open_header, unwrap
from glasshouse.package.streams import Positioned
from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64decode, b64encode, encode
from glasshouse.wire.crypto import sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines import statements
from glasshouse.wire.lines.checkpoint import (
    FRONT_BYTES,
    CheckpointHeader,
    front_length,
    is_padded,
    padded,
    resume_key,
)
from glasshouse.wire.lines.line_start import LineStart
from simulators.gate_rule_cases import read_count, read_launch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "checkpoints"
CASES = {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))}
if len(CASES) < 200:
    raise RuntimeError(f"only {len(CASES)} vectors in {FOLDER}")

DOCUMENTS: dict[str, type[dsse.Signed]] = {
    "checkpoint": statements.CheckpointMessage,
    "checkpoint-part": statements.PartClaim,
    "checkpoint-read": statements.ReadRequest,
    "checkpoint-stored": statements.Stored,
    "leg-abandoned": statements.LegAbandoned,
    "leg-lost": statements.LegLost,
    "resume-order": statements.ResumeOrder,
    "ticket": statements.Ticket,
}


def read_resume_key(given: dict[str, Any]) -> dict[str, Any]:
    line, package_key = bytes.fromhex(given["line"]), bytes.fromhex(given["package_key"])
    key = resume_key(package_key, deployment=given["deployment"], line=line)
    return {"private": key.private().hex(), "public": b64encode(key.public)}


def read_padded(given: dict[str, Any]) -> dict[str, Any]:
    if not is_padded(given["bytes"]):
        raise RunError(Code.WORKER_FAILED, "not padded")  # as the sealer does, whose own test that is
    return {"padded": padded(given["bytes"])}


def header_in(given: dict[str, Any]) -> CheckpointHeader:
    return open_header(
        base64.b64decode(given["header"], validate=True),
        LineStart.from_json(given["line"]),
        deployment=given["deployment"],
        manifest_sha256=bytes.fromhex(given["manifest_sha256"]),
        machines=given["machines"],
        ranks=given["ranks"],
    )


def read_header(given: dict[str, Any]) -> dict[str, Any]:
    header = header_in(given)
    assert header.encode() == base64.b64decode(given["header"])
    return {"digest": header.digest.hex()}


def read_part(given: dict[str, Any]) -> dict[str, Any]:
    """Do what runtime, custodian and worker do with a part, one after the other."""
    header, part = header_in(given), base64.b64decode(given["part"], validate=True)
    line, package_key = bytes.fromhex(given["line"]["id"]), bytes.fromhex(given["package_key"])
    front = part[: front_length(part[:FRONT_BYTES])]
    key = resume_key(package_key, deployment=given["deployment"], line=line)
    granted = unwrap(front, header, key, rank=given["rank"], offset=len(front))
    reader = PartReader(Positioned(io.BytesIO(part)), granted)
    reader.verify()
    if sha256(part) != header.parts[given["rank"]].sha256:  # which the runtime compares as the part comes
        raise GlasshouseError(Code.CHECKPOINT_TAMPERED, "another part")
    files = []
    for file in reader.files.values():
        out = io.BytesIO()
        reader.copy_to(file, out)
        files.append({"content": base64.b64encode(out.getvalue()).decode(), "path": file.path})
    return {"files": files, "key": granted.key.hex()}


def read_statement(given: dict[str, Any]) -> dict[str, Any]:
    data, public = given["envelope"].encode(), bytes.fromhex(given["public"])
    if given["document"] == "checkpoint-header":
        envelope = Envelope.parse(data, max_bytes=statements.MAX_SIGNED_HEADER_BYTES)
        header = CheckpointHeader.parse(envelope.verify(statements.HEADER_TYPE, public))
        assert header.encode() == envelope.payload
    else:
        kind = DOCUMENTS[given["document"]]
        envelope = Envelope.parse(data, max_bytes=statements.MAX_SIGNED_HEADER_BYTES)
        assert kind.from_envelope(envelope, public).encode() == envelope.payload
    return {}


def leg_in(given: dict[str, Any]) -> dict[str, Any]:
    """Return a leg's documents, those that it has from another case among them."""
    if "base" not in given:
        return given
    case, number = given["base"]
    base = leg_in(CASES[case]["input"]["legs"][number - 1])
    own = {name: value for name, value in given.items() if name not in ("base", "without")}
    return {name: value for name, value in base.items() if name not in given.get("without", [])} | own


def read_line(given: dict[str, Any]) -> dict[str, Any]:
    whole = {"format": "glasshouse-line/1", "legs": [leg_in(one) for one in given["legs"]]}
    found = verify_line(encode(whole), owner=b64decode(given["owner"]))
    return {"exit_code": int(found.exit_code), "not_wiped": list(found.not_wiped), "status": found.status.value}


READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "count": read_count,
    "header": read_header,
    "launch": read_launch,
    "line": read_line,
    "padded": read_padded,
    "part": read_part,
    "resume-key": read_resume_key,
    "statement": read_statement,
}


@pytest.mark.parametrize("name", CASES)
def test_a_case_gives_what_it_says_or_is_refused_with_its_code(name: str) -> None:
    case, expected = CASES[name], dict(CASES[name]["expect"])
    assert name.startswith(case["kind"])
    code = expected.pop("code")
    if code is None:
        assert READERS[case["kind"]](case["input"]) == expected
        return
    with pytest.raises(GlasshouseError) as refusal:
        READERS[case["kind"]](case["input"])
    assert refusal.value.code is Code(code)


def test_every_kind_has_a_valid_case_and_refusals() -> None:
    for kind in READERS.keys() - {"resume-key"}:
        codes = {case["expect"]["code"] for case in CASES.values() if case["kind"] == kind}
        assert None in codes, f"no valid vector of the kind {kind}"
        assert codes - {None}, f"no refusal of the kind {kind}"


def test_the_generator_writes_the_same_files_again() -> None:
    generator = _generator()
    messages = generator.kept()
    assert generator.build(messages) == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
    assert messages.used == json.loads(generator.MESSAGES.read_bytes())


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_checkpoints", ROOT / "spec" / "vectors" / "generate_checkpoints.py"
    )
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    return generator
