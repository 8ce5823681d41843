"""The vectors of spec/common.md: read by the house, and by a small reader that knows the page and nothing else."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glasshouse.broker.http_api import PROBLEM_TYPE, Problem
from glasshouse.errors import Code, GlasshouseError
from glasshouse.evidence.events import Event
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.jobs.results.exported import certified_key
from glasshouse.wire.canonical import b64decode, b64encode, decode, encode
from glasshouse.wire.dsse import Envelope
from simulators.local_broker import LocalBroker

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "common"
PAGE = (ROOT / "spec" / "common.md").read_text(encoding="utf-8")
CODES: list[str] = json.loads((FOLDER / "codes.json").read_bytes())["codes"]
CASES = {
    path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json")) if path.name != "codes.json"
}
if len(CASES) < 100:
    raise RuntimeError(f"only {len(CASES)} vectors in {FOLDER}")


def of_kind(kind: str) -> list[str]:
    return [name for name, case in CASES.items() if case["kind"] == kind]


# ---- the house


def read_json(given: dict[str, Any]) -> dict[str, Any]:
    return {"value": decode(bytes.fromhex(given["hex"]), max_bytes=given["max_bytes"])}


def read_owner(given: dict[str, Any]) -> dict[str, Any]:
    return {"fingerprint": OwnerPublic.parse(bytes.fromhex(given["hex"])).fingerprint}


def read_text(given: dict[str, Any]) -> dict[str, Any]:
    Event.parse(given["event"].encode())
    return {}


def read_model_key(given: dict[str, Any]) -> dict[str, Any]:
    envelope = Envelope.parse(encode(given["envelope"]), max_bytes=1 << 16)
    return {"public": b64encode(certified_key(envelope, owner=b64decode(given["owner"])))}


HOUSE = {"model-key": read_model_key, "json": read_json, "owner": read_owner, "text": read_text}


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["kind"] in HOUSE])
def test_vector(name: str) -> None:
    case = CASES[name]
    try:
        found = {"code": None, **HOUSE[case["kind"]](case["input"])}
    except GlasshouseError as error:
        found = {"code": error.code.value}
    assert found == case["expect"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path_factory.mktemp("gate")) as running:
        yield running


def sent(part: str | dict[str, Any]) -> bytes:
    return (part if isinstance(part, str) else part["repeat"] * part["times"]).encode()


@pytest.mark.parametrize("name", of_kind("http"))
def test_the_listener_answers_as_the_vector_says(name: str, broker: LocalBroker) -> None:
    case = CASES[name]
    host, _, port = broker.runtime_url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        received = b""
        try:
            connection.sendall(b"".join(map(sent, case["input"]["request"])))
            while part := connection.recv(65536):
                received += part
        except ConnectionError:  # it answers as soon as it has read enough
            pass
    top, _, body = received.partition(b"\r\n\r\n")
    head = top.decode().lower().split("\r\n")
    problem = Problem.parse(body)
    assert head[0].split()[1] == str(problem.status)
    assert {"code": problem.code.value, "status": problem.status} == case["expect"]
    wanted = {f"content-type: {PROBLEM_TYPE}", "connection: close", "cache-control: no-store"}
    assert wanted <= set(head)
    assert ("allow: post" in head) == (problem.status == 405)


# ---- a reader that was written from the page alone


class RefusedError(Exception):
    """A code of the page."""


def canonical(value: Any) -> str:
    """RFC 8785 without floats, by hand."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return "{" + ",".join(f"{canonical(name)}:{canonical(value[name])}" for name in names) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
        return '"' + "".join(short.get(ord(c), c if ord(c) > 31 else f"\\u{ord(c):04x}") for c in value) + '"'
    return "null" if value is None else "true" if value is True else "false" if value is False else str(value)


def deep(value: Any, within: int = 0) -> bool:
    if within > 16:
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(deep(one, within + 1) for one in inner)


def strict(data: bytes, max_bytes: int) -> Any:
    def refuse(*_: Any) -> Any:
        raise RefusedError("schema-invalid")

    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(pairs) if len(dict(pairs)) == len(pairs) else refuse()

    def integer(digits: str) -> int:
        return int(digits) if len(digits) < 18 and abs(int(digits)) < 2**53 else refuse()

    if len(data) > max_bytes:
        raise RefusedError("too-large")
    try:
        text = data.decode("utf-8")
        value = json.JSONDecoder(
            object_pairs_hook=whole, parse_float=refuse, parse_constant=refuse, parse_int=integer
        ).decode(text)
        again = canonical(value)
        again.encode("utf-8")
    except (ValueError, RecursionError):
        raise RefusedError("schema-invalid") from None
    if deep(value):
        raise RefusedError("schema-invalid")
    if again != text:
        raise RefusedError("not-canonical")
    return value


def octets(value: Any, length: int) -> bytes:
    if not isinstance(value, str):
        raise RefusedError("schema-invalid")
    data = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)) if re.fullmatch("[A-Za-z0-9_-]*", value) else b""
    if len(data) != length or base64.urlsafe_b64encode(data).decode().rstrip("=") != value:
        raise RefusedError("schema-invalid")
    return data


def owner_file(data: bytes) -> str:
    value = strict(data[:-1] if data.endswith(b"\n") else data, 16384)
    if set(value) != {"fingerprint", "kind", "sealing", "signing", "version"}:
        raise RefusedError("schema-invalid")
    if (value["kind"], value["version"]) != ("glasshouse-owner", 1):
        raise RefusedError("schema-invalid")
    parts = [b"glasshouse owner v1", octets(value["signing"], 32), octets(value["sealing"], 1216)]
    if int.from_bytes(parts[2][1184:], "little") >= 2**255 - 19:
        raise RefusedError("schema-invalid")
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()[:40]
    fingerprint = "-".join(re.findall("....", digest))
    if value["fingerprint"] != fingerprint:
        raise RefusedError("owner-mismatch")
    return fingerprint


def event_texts(given: dict[str, Any]) -> None:
    """As much of an event as is text, by the forms of the table in section 2."""
    body = strict(given["event"].encode(), 4096)["body"]
    texts = [("detail", r"[\x20-\x7e]{0,200}"), ("probe", "[a-z][a-z0-9-]{0,63}"), ("loss", DECIMAL)]
    if not all(re.fullmatch(form, body[name]) for name, form in texts if name in body):
        raise RefusedError("schema-invalid")


def signed(envelope: dict[str, Any], kind: str, public: bytes) -> Any:
    """The payload of a DSSE envelope that this key alone signed."""
    if envelope["payloadType"] != kind:
        raise RefusedError("wrong-type")
    (signature,) = envelope["signatures"]
    payload = base64.b64decode(envelope["payload"])
    message = b"DSSEv1 %d %b %d %b" % (len(kind), kind.encode(), len(payload), payload)
    try:
        if signature["keyid"] != hashlib.sha256(public).hexdigest()[:32]:
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(public).verify(base64.b64decode(signature["sig"]), message)
    except InvalidSignature:
        raise RefusedError("signature-invalid") from None
    return strict(payload, 1 << 20)


def model_key(given: dict[str, Any]) -> str:
    kind = "application/vnd.glasshouse.model-signing-key+json"
    value = signed(given["envelope"], kind, octets(given["owner"], 32))
    fixed = {"algorithm": "ecdsa-p256-sha256", "kind": "https://glasshouse.dev/model-signing-key/v1"}
    if set(value) != {*fixed, "created_us", "public"} or any(value[name] != text for name, text in fixed.items()):
        raise RefusedError("schema-invalid")
    return str(value["public"])


(DECIMAL,) = (line.split("`")[3].replace("\\|", "|") for line in PAGE.splitlines() if line.startswith("| `decimal`"))
ANYBODY = {
    "model-key": lambda given: {"public": model_key(given)},
    "json": lambda given: {"value": strict(bytes.fromhex(given["hex"]), given["max_bytes"])},
    "owner": lambda given: {"fingerprint": owner_file(bytes.fromhex(given["hex"]))},
    "text": lambda given: event_texts(given) or {},
}


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]["kind"] in ANYBODY])
def test_whoever_has_only_the_page_finds_the_same(name: str) -> None:
    case = CASES[name]
    try:
        found = {"code": None, **ANYBODY[case["kind"]](case["input"])}
    except RefusedError as refused:
        found = {"code": str(refused)}
    assert found == case["expect"]


# ---- heads.log, by the same reader (spec/evidence.md sections 3, 4 and 8.1)

EVIDENCE = {path.stem: json.loads(path.read_bytes()) for path in sorted((FOLDER.parent / "evidence").glob("*.json"))}


def root_of(leaves: list[bytes]) -> bytes:
    """RFC 9162 section 2.1.1."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + root_of(leaves[:split]) + root_of(leaves[split:])).digest()


def heads_log(given: dict[str, Any]) -> None:
    bundle = EVIDENCE[given["base"]]["input"]["bundle"]
    evidence = json.loads(base64.b64decode(bundle["receipt"]["payload"]))["predicate"]["evidence_public"]
    delegated = signed(bundle["delegation"], "application/vnd.glasshouse.delegation+json", octets(given["owner"], 32))
    broker = octets(delegated["broker_public"], 32)
    leaves = [line.encode() for line in given["lines"]]
    size = time_us = 0
    sequence, last = -1, None
    for line in given["heads"].splitlines(keepends=True):
        if not line.endswith("\n"):
            raise RefusedError("log-invalid")
        try:
            last = strict(line[:-1].encode(), 8192)
            found = signed(last, "application/vnd.glasshouse.countersigned-head+json", broker)
            head = signed(found["head"], "application/vnd.glasshouse.head+json", octets(evidence, 32))
        except RefusedError:
            raise RefusedError("log-invalid") from None
        grown = head["size"] > size and head["sequence"] > sequence and head["size"] <= len(leaves)
        follows = found["previous_size"] == size and found["time_us"] >= time_us
        if not grown or not follows or root_of(leaves[: head["size"]]).hex() != head["root"]:
            raise RefusedError("log-invalid")
        size, sequence, time_us = head["size"], head["sequence"], found["time_us"]
    if last != bundle["head"]:
        raise RefusedError("log-invalid")


@pytest.mark.parametrize("name", [name for name, case in EVIDENCE.items() if case["kind"] == "heads"])
def test_heads_are_judged_alike_by_a_reader_of_the_page(name: str) -> None:
    found = None
    try:
        heads_log(EVIDENCE[name]["input"])
    except RefusedError as refused:
        found = str(refused)
    assert {"code": found} == EVIDENCE[name]["expect"]


# ---- the page itself


def test_the_list_of_codes_is_that_of_the_house_and_of_the_vectors() -> None:
    table = PAGE.split("## 4. Codes")[1].split("## 5.")[0]
    listed = re.findall(r"^\| `([a-z0-9-]+)` \| .+ \|$", table, re.MULTILINE)
    assert sorted(listed) == CODES == sorted(code.value for code in Code)


def test_every_code_in_a_specification_or_vector_is_in_the_list() -> None:
    vectors = [path for path in FOLDER.parent.rglob("*.json") if path.parent.name not in ("fixed", "fuzz", "common")]
    named = set()
    for path in vectors:
        expect = json.loads(path.read_bytes()).get("expect")
        code = expect if isinstance(expect, str) else (expect or {}).get("code")
        if code not in (None, "valid"):
            named.add(code)
    assert len(named) > 40
    assert named <= set(CODES)


def test_every_kind_has_vectors_that_pass_and_vectors_that_fail() -> None:
    for kind in HOUSE:
        assert {CASES[name]["expect"]["code"] is None for name in of_kind(kind)} == {True, False}


def test_the_generator_writes_the_same_files_again() -> None:
    spec = importlib.util.spec_from_file_location("generate_common", ROOT / "spec/vectors/generate_common.py")
    assert spec
    assert spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.build() == {path.name: path.read_bytes() for path in FOLDER.glob("*.json")}
