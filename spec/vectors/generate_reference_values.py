"""Writes spec/vectors/reference-values/ again: what a release measures to, signed, and all that is wrong.

Run: python spec/vectors/generate_reference_values.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glasshouse.attestation.measurements.measured import digest_of_part
from glasshouse.errors import Code
from glasshouse.jobs.references.known_references import RELEASED_TYPE, Released
from glasshouse.wire import dsse
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import SigningKey, sha256

FOLDER = Path(__file__).resolve().parent / "reference-values"
MAKER, OTHER = (SigningKey(bytes([number]) * 32) for number in (1, 2))
CIPHERS = (
    "_cffi_backend.cpython-311-x86_64-linux-gnu.so",
    "blake3/__init__.py",
    "blake3/blake3.cpython-311-x86_64-linux-gnu.so",
    "cryptography/hazmat/bindings/_rust.abi3.so",
)
GOOD = Released(
    python="3.11",
    machine="x86_64",
    distributions={"blake3": "1.0.8", "cffi": "2.0.0", "cryptography": "46.0.3", "glasshouse-train": "0.1.0"},
    files={
        "cryptography": {name: sha256(name.encode()) for name in CIPHERS},
        "glasshouse": {f"glasshouse/{name}.py": sha256(name.encode()) for name in ("__init__", "runtime/agent")},
    },
)
PAYLOAD: dict[str, Any] = json.loads(GOOD.sign(MAKER).payload)


def signed(payload: object, *keys: SigningKey, kind: str = RELEASED_TYPE) -> bytes:
    raw = payload if isinstance(payload, bytes) else encode(payload)  # type: ignore[arg-type]
    return dsse.sign(kind, raw, keys or [MAKER]).encode()


def of(description: str, envelope: bytes, code: Code | None = None, **found: Any) -> dict[str, Any]:
    expect = {"code": None, **found} if code is None else {"code": code.value}
    return {
        "description": description,
        "expect": expect,
        "input": {"envelope": envelope.decode(), "signed_by": MAKER.public.hex()},
    }


def parts(*names: str) -> dict[str, str]:
    return {name: digest_of_part(name, GOOD.files[name]).hex() for name in names}


def files(**changes: Any) -> dict[str, Any]:
    """Return a payload with other files; None takes a part away."""
    changed = {**PAYLOAD["files"], **changes}
    return PAYLOAD | {"files": {part: names for part, names in changed.items() if names is not None}}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    digest = sha256(b"x").hex()
    yield "both", of("two parts", signed(PAYLOAD), parts=parts("cryptography", "glasshouse"))
    yield "own", of("ours alone", signed(files(cryptography=None)), parts=parts("glasshouse"))
    yield "other-signer", of("signed by another key", signed(PAYLOAD, OTHER), Code.SIGNATURE)
    yield "two-signers", of("signed by one more", signed(PAYLOAD, MAKER, OTHER), Code.SIGNATURE)
    damaged = signed(files(cryptography=None)).replace(b'"sig":"', b'"sig":"AAAA', 1)
    yield "cut", of("a signature of another length", damaged, Code.SCHEMA)
    moved = dsse.Envelope.parse(signed(PAYLOAD), max_bytes=1 << 20)
    other = dsse.Envelope(
        payload_type=RELEASED_TYPE, payload=encode(files(cryptography=None)), signatures=moved.signatures
    )
    yield "moved", of("a signature of other values", other.encode(), Code.SIGNATURE)
    kind = "application/vnd.glasshouse.manifest+json"
    yield "wrong-type", of("as a manifest", signed(PAYLOAD, kind=kind), Code.WRONG_TYPE)
    yield "spaces", of("not canonical", signed(json.dumps(PAYLOAD).encode()), Code.NOT_CANONICAL)
    for part in ("interpreter", "start_up", "torch"):
        name = f"{part.replace('_', '-')}-part"
        yield name, of(f"a part {part}", signed(files(**{part: {"python": digest}})), Code.SCHEMA)
    yield "no-own", of("without ours", signed(files(glasshouse=None)), Code.SCHEMA)
    yield "empty", of("a part without files", signed(files(cryptography={})), Code.SCHEMA)
    for name, file in (
        ("beside", "glassdoor/x.py"),
        ("cipher", "cryptography/x.py"),
        ("above", "glasshouse/../x.py"),
        ("hidden", "glasshouse/.x.py"),
        ("bare", "glasshouse"),
        ("line-end", "glasshouse/x.py\n"),
        ("long", "glasshouse/" + "x" * 500),
    ):
        yield f"file-{name}", of(f"of ours: {file[:40]!r}", signed(files(glasshouse={file: digest})), Code.SCHEMA)
    upper = files(glasshouse={"glasshouse/x.py": digest.upper()})
    yield "upper-case", of("a digest in capital letters", signed(upper), Code.SCHEMA)
    yield "further", of("a further field", signed(PAYLOAD | {"expires": 1}), Code.SCHEMA)
    yield "lacking", of("a field less", signed({k: v for k, v in PAYLOAD.items() if k != "machine"}), Code.SCHEMA)
    many = PAYLOAD | {"distributions": {f"d{number}": "1" for number in range(17)}}
    yield "many", of("seventeen distributions", signed(many), Code.SCHEMA)


def build() -> dict[str, bytes]:
    """Return the files by name."""
    made: dict[str, bytes] = {}
    for name, document in cases():
        if f"{name}.json" in made:
            raise ValueError(f"two vectors with the name {name}")
        made[f"{name}.json"] = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
    return made


def main() -> None:
    made = build()
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        if old.name not in made:
            old.unlink()
    for name, content in made.items():
        (FOLDER / name).write_bytes(content)
    print(f"{len(made)} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
