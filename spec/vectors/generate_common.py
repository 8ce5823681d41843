"""Writes spec/vectors/common/ again: JSON, texts at their limits, owner files, what the listener answers, codes.

Run: python spec/vectors/generate_common.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "spec" / "vectors" / "common"
sys.path.insert(0, str(ROOT / "tests"))

from glasshouse.errors import Code  # noqa: E402
from glasshouse.jobs.owner.owner_identity import OwnerPublic  # noqa: E402
from glasshouse.jobs.results.exported import CERTIFICATE_TYPE  # noqa: E402
from glasshouse.wire import dsse  # noqa: E402
from glasshouse.wire.canonical import (  # noqa: E402
    Json,
    b64encode,
    encode,
)
from simulators.world import World  # noqa: E402

Case = tuple[str, dict[str, Any]]
SCHEMA, CANONICAL = Code.SCHEMA.value, Code.NOT_CANONICAL.value


def case(
    kind: str, description: str, given: dict[str, Any], *, code: str | None = None, **expect: Json
) -> dict[str, Any]:
    return {"description": description, "expect": {"code": code, **expect}, "input": given, "kind": kind}


def json_cases() -> Iterator[Case]:
    """Bytes that are one value's encoding, and bytes that are not."""
    for name, text in (
        ("null", "null"),
        ("largest", "9007199254740991"),
        ("smallest", "-9007199254740991"),
        ("text", '"a/b é  \\u0007\\n\\"\\\\"'),
        ("names-by-utf-16", '{"\U0001f600":1,"\ufb33":2}'),
        ("deep", "[" * 16 + "1" + "]" * 16),
        ("deep-and-empty", "[" * 17 + "]" * 17),
        ("nested", '{"a":[1,{"b":true,"c":null}],"b":"2"}'),
    ):
        value: Any = json.loads(text)
        yield name, case("json", "canonical", given(text.encode()), value=value)
    for name, code, data in (
        ("nothing", SCHEMA, b""),
        ("no-json", SCHEMA, b"{"),
        ("not-utf-8", SCHEMA, b'"\xff"'),
        ("byte-order-mark", SCHEMA, b"\xef\xbb\xbf1"),
        ("two-values", SCHEMA, b"1 2"),
        ("leading-zero", SCHEMA, b"01"),
        ("control-character", SCHEMA, b'"\x01"'),
        ("single-quotes", SCHEMA, b"{'a':1}"),
        ("comma-at-the-end", SCHEMA, b"[1,]"),
        ("name-twice", SCHEMA, b'{"a":1,"a":1}'),
        ("name-twice-within", SCHEMA, b'[{"a":{"b":1,"b":2}}]'),
        ("name-twice-by-an-escape", SCHEMA, b'{"a":1,"\\u0061":1}'),
        ("fraction", SCHEMA, b"1.0"),
        ("exponent", SCHEMA, b"1e3"),
        ("nan", SCHEMA, b"NaN"),
        ("infinity", SCHEMA, b"-Infinity"),
        ("too-great", SCHEMA, b"9007199254740992"),
        ("too-small", SCHEMA, b"-9007199254740992"),
        ("far-too-great", SCHEMA, b"1" * 400),
        ("half-a-pair", SCHEMA, b'"\\ud800"'),
        ("too-deep", SCHEMA, b"[" * 17 + b"1" + b"]" * 17),
        ("far-too-deep", SCHEMA, b"[" * 4000),
        ("space-before", CANONICAL, b" 1"),
        ("line-end", CANONICAL, b"1\n"),
        ("space-between", CANONICAL, b'{"a": 1}'),
        ("members-unsorted", CANONICAL, b'{"b":1,"a":2}'),
        ("members-by-code-points", CANONICAL, '{"\ufb33":2,"\U0001f600":1}'.encode()),
        ("escape-not-needed", CANONICAL, b'"\\u0061"'),
        ("escaped-slash", CANONICAL, b'"\\/"'),
        ("escape-in-upper-case", CANONICAL, b'"\\u001F"'),
        ("long-escape-of-a-line-end", CANONICAL, b'"\\u000a"'),
        ("minus-zero", CANONICAL, b"-0"),
        ("unsorted-and-a-fraction", SCHEMA, b'{"b":1.5,"a":2}'),
    ):
        yield name, case("json", name.replace("-", " "), given(data), code=code)
    yield "limit", case("json", "as long as it may be", given(b'"aaaa"', max_bytes=6), value="aaaa")
    yield "too-large", case("json", "one byte longer", given(b'"aaaaa"', max_bytes=6), code=Code.TOO_LARGE.value)
    yield (
        "too-large-and-no-json",
        case("json", "the limit comes first", given(b"{{{{{{{", 6), code=Code.TOO_LARGE.value),
    )


def given(data: bytes, max_bytes: int = 65536) -> dict[str, Any]:
    return {"hex": data.hex(), "max_bytes": max_bytes}


def owner_cases() -> Iterator[Case]:
    """The public file of an owner."""
    world, other = World(), World("rival")
    owner = OwnerPublic(signing=world.owner.public, sealing=world.owner_hpke.public)
    rival = OwnerPublic(signing=other.owner.public, sealing=other.owner_hpke.public)
    good = owner.encode()
    value = owner.to_json()
    beyond = owner.sealing[:1184] + (2**255 - 19 + 9).to_bytes(32, "little")

    def changed(**members: Json) -> bytes:
        return encode({**value, **members}) + b"\n"

    yield "good", owner_case("an owner's public file", good, fingerprint=owner.fingerprint)
    yield "no-line-end", owner_case("the same without its line end", good[:-1], fingerprint=owner.fingerprint)
    mine, theirs = owner.fingerprint, rival.fingerprint
    for name, code, data in (
        ("two-line-ends", CANONICAL, good + b"\n"),
        ("space", CANONICAL, good.replace(b'","', b'", "', 1)),
        ("another-fingerprint", Code.OWNER_UNKNOWN.value, changed(fingerprint=theirs)),
        ("fingerprint-in-capitals", Code.OWNER_UNKNOWN.value, changed(fingerprint=mine.upper())),
        ("fingerprint-without-dashes", Code.OWNER_UNKNOWN.value, changed(fingerprint=mine.replace("-", ""))),
        ("another-sealing-key", Code.OWNER_UNKNOWN.value, changed(sealing=b64encode(rival.sealing))),
        ("sealing-key-in-another-encoding", SCHEMA, changed(sealing=b64encode(beyond))),
        ("padded", SCHEMA, changed(signing=b64encode(owner.signing) + "=")),
        ("short-key", SCHEMA, changed(signing=b64encode(owner.signing[:31]))),
        ("another-kind", SCHEMA, changed(kind="glasshouse-broker")),
        ("version-2", SCHEMA, changed(version=2)),
        ("member-more", SCHEMA, changed(note="")),
        ("member-less", SCHEMA, encode({name: value[name] for name in value if name != "signing"}) + b"\n"),
    ):
        yield name, owner_case(name.replace("-", " "), data, code=code)


def owner_case(description: str, data: bytes, *, code: str | None = None, **expect: Json) -> dict[str, Any]:
    return case("owner", description, {"hex": data.hex()}, code=code, **expect)


def text_cases() -> Iterator[Case]:
    """Texts of a log's events at and beyond their limits; characters are counted, not bytes."""

    def event(kind: str, state: str, body: dict[str, Json]) -> dict[str, Any]:
        value: Json = {"body": body, "sequence": 5, "state": state, "time_us": 1, "type": kind}
        return {"event": encode(value).decode()}

    def probe(name: str, detail: str = "") -> dict[str, Any]:
        return event("probe", "zeroizing", {"detail": detail, "probe": name, "result": "clean"})

    def loss(text: str) -> dict[str, Any]:
        return event("progress", "running", {"done": 1, "elapsed_us": 1, "loss": text, "total": None, "unit": "step"})

    for name, value in (
        ("detail-longest", probe("swap", "x" * 200)),
        ("detail-empty", probe("swap")),
        ("word-longest", probe("x" * 64)),
        ("decimal", loss("-1.25e-07")),
    ):
        yield name, case("text", name.replace("-", " "), value)
    for name, value in (
        ("detail-too-long", probe("swap", "x" * 201)),
        ("detail-with-a-line-end", probe("swap", "a\nb")),
        ("detail-with-nul", probe("swap", "a\x00b")),
        ("detail-not-ascii", probe("swap", "é")),
        ("word-too-long", probe("x" * 65)),
        ("word-in-capitals", probe("Swap")),
        ("word-of-a-digit", probe("1swap")),
        ("word-empty", probe("")),
        ("decimal-too-long", loss("9" * 19)),
        ("decimal-with-a-leading-zero", loss("01")),
        ("decimal-with-a-plus", loss("+1")),
        ("decimal-with-a-short-exponent", loss("1e-7")),
        ("decimal-not-a-number", loss("nan")),
    ):
        yield name, case("text", name.replace("-", " "), value, code=SCHEMA)


def model_key_cases() -> Iterator[Case]:
    """The owner's statement that a P-256 key signs their exported models (spec/evidence.md section 9.1)."""
    world, rival = World(), World("rival")
    private = ec.derive_private_key(int.from_bytes(world.digest("model key")), ec.SECP256R1())
    public = b64encode(private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    payload: dict[str, Json] = {
        "algorithm": "ecdsa-p256-sha256",
        "created_us": 1_790_000_000_000_000,
        "kind": "https://glasshouse.dev/model-signing-key/v1",
        "public": public,
    }

    def told(signer: World = world, kind: str = CERTIFICATE_TYPE, **changes: Json) -> dict[str, Any]:
        envelope = dsse.sign(kind, encode({**payload, **changes}), [signer.owner])
        return {"envelope": envelope.to_json(), "owner": b64encode(world.owner.public)}

    yield "good", case("model-key", "the owner's statement", told(), public=public)
    for name, code, value in (
        ("another-owner", Code.SIGNATURE.value, told(rival)),
        ("another-type", Code.WRONG_TYPE.value, told(kind="application/vnd.glasshouse.delegation+json")),
        ("another-algorithm", SCHEMA, told(algorithm="ed25519")),
        ("another-curve", SCHEMA, told(algorithm="ecdsa-p384-sha384")),
        ("member-more", SCHEMA, told(note="")),
    ):
        yield name, case("model-key", name.replace("-", " "), value, code=code)


def http_cases() -> Iterator[Case]:
    """What the runtime's listener answers before anything is decided."""
    typed = ["content-type: application/json"]
    invalid, large, usage = Code.MESSAGE_INVALID.value, Code.MESSAGE_TOO_LARGE.value, Code.USAGE.value
    paths = ("challenge", "evidence", "release", "heads", "receipt")
    for path in paths:
        code = SCHEMA if path in ("heads", "receipt") else invalid
        yield f"{path}-empty", http("POST", f"/v1/{path}", typed, "", 400, code)
        yield f"{path}-not-json", http("POST", f"/v1/{path}", typed, "{", 400, code)
        yield f"{path}-by-get", http("GET", f"/v1/{path}", [], "", 405, usage)
    for name, path in (
        ("another", "/v1/keys"),
        ("root", "/"),
        ("trailing-slash", "/v1/challenge/"),
        ("capital", "/V1/challenge"),
    ):
        yield f"path-{name}", http("POST", path, typed, "{}", 404, usage)
    yield "docs", http("GET", "/docs", [], "", 404, usage)
    for method in ("PUT", "DELETE", "OPTIONS"):
        yield f"method-{method.lower()}", http(method, "/v1/challenge", [], "", 405, usage)
    yield "query", http("POST", "/v1/challenge?debug=1", typed, "{}", 422, usage)
    for name, line in (("none", ""), ("other", "content-type: text/plain"), ("charset", f"{typed[0]}; charset=utf-8")):
        yield f"type-{name}", http("POST", "/v1/challenge", [line] if line else [], "{}", 400, invalid)
    yield "length-too-great", http("POST", "/v1/challenge", [*typed, "content-length: 999999999"], None, 413, large)
    body = {"repeat": "x", "times": 32 * 1024 + 1}
    yield "body-too-long", http("POST", "/v1/challenge", typed, body, 413, large)
    yield "query-and-another-type", http("POST", "/v1/heads?a=1", [], "x", 422, usage)


def http(
    method: str, path: str, lines: list[str], body: str | dict[str, Any] | None, status: int, code: str
) -> dict[str, Any]:
    length = body["times"] if isinstance(body, dict) else len(body or "")
    stated = [] if body is None or method in ("GET", "OPTIONS") else [f"content-length: {length}"]
    head = "\r\n".join([f"{method} {path} HTTP/1.1", "host: gate", *lines, *stated, "", ""])
    return case("http", f"{method} {path}", {"request": [head, body or ""]}, code=code, status=status)


def build() -> dict[str, bytes]:
    """Return every file's name and content."""
    files: dict[str, bytes] = {"codes.json": _encoded({"codes": sorted(code.value for code in Code)})}
    for kind, cases in (
        ("json", json_cases()),
        ("owner", owner_cases()),
        ("text", text_cases()),
        ("http", http_cases()),
        ("model-key", model_key_cases()),
    ):
        for name, document in cases:
            if f"{kind}-{name}.json" in files:
                raise ValueError(f"two vectors with the name {kind}-{name}")
            files[f"{kind}-{name}.json"] = _encoded(document)
    return files


def _encoded(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def main() -> None:
    files = build()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    print(f"{len(files)} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
