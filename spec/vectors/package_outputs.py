"""The vectors of sealed outputs, for generate_package.py."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Any

from package_parts import CHUNK, OTHER_RECIPIENT, RECIPIENT, RUN_ID, SALT, Messages, b64, fixed, flip, output, put

from glasshouse.wire.crypto import Suite

Vector = tuple[str, dict[str, Any]]


def outputs(messages: Messages) -> Iterator[Vector]:
    plain = fixed("output", 2 * CHUNK + 7)

    def vector(name: str, description: str, expect: str, data: bytes, /, **more: object) -> Vector:
        value: dict[str, Any] = {
            "description": description,
            "expect": expect,
            "manifest_sha256": fixed("manifest hash", 32).hex(),
            "output": b64(data),
            "recipient_private": RECIPIENT.private().hex(),
            "run_id": RUN_ID,
        }
        return f"output-{name}", value | more

    def opened(content: bytes, file_name: str) -> dict[str, object]:
        return {
            "content": b64(content),
            "kind": "output",
            "name": file_name,
            "plaintext_hmac_sha256": hmac.digest(SALT, hashlib.sha256(content).digest(), "sha256").hex(),
            "salt": SALT.hex(),
            "sequence": 1,
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    for suite in Suite:
        header, chunks = output(messages, plain, suite=suite)
        name = f"valid-{suite.value.lower()}"
        yield vector(name, "opens", "valid", header + b"".join(chunks), **opened(plain, "adapter.safetensors"))
    header, chunks = output(messages, b"")
    yield vector("valid-empty", "an empty file", "valid", header + chunks[0], **opened(b"", "adapter.safetensors"))

    header, chunks = output(messages, plain)
    good = header + b"".join(chunks)
    for name, description, expect, data in (
        ("magic-wrong", "a package's magic", "package-not-recognised", put(good, 3, b"S")),
        ("header-truncated", "ends within the header", "output-tampered", good[:100]),
        ("header-large", "a header of 4 GiB", "package-limit", put(good, 8, b"\xff" * 4)),
        (
            "header-flipped",
            "another sequence number",
            "output-tampered",
            good.replace(b'"sequence":1', b'"sequence":2'),
        ),
        (
            "kind-changed",
            "a result made a log",
            "output-tampered",
            put(good, 8, (len(header) - 15).to_bytes(4, "big")).replace(b'"kind":"output"', b'"kind":"log"'),
        ),
        ("chunk-flipped", "one bit of a chunk", "output-tampered", flip(good, len(header) + 1100)),
        (
            "chunks-swapped",
            "two chunks in the other order",
            "output-tampered",
            header + chunks[1] + chunks[0] + chunks[2],
        ),
        ("cut-at-chunk", "the last chunk is missing", "output-tampered", header + chunks[0] + chunks[1]),
        ("cut-in-tag", "ends within a tag", "output-tampered", good[:-20]),
        ("no-chunk", "nothing but a header", "output-tampered", header),
    ):
        yield vector(name, description, expect, data)
    yield vector("other-run", "expected of another run", "output-tampered", good, run_id=fixed("run two", 16).hex())
    yield vector("other-package", "expected of another package", "output-tampered", good, manifest_sha256="00" * 32)
    stranger = OTHER_RECIPIENT.private().hex()
    yield vector(
        "not-a-recipient", "a key that it is not sealed to", "package-owner-mismatch", good, recipient_private=stranger
    )
    for name, description, expect, crafted in (
        ("path-parent", "a name that leaves its folder", "package-path", output(messages, plain, name=b"../x")),
        ("path-not-utf8", "a name that is not UTF-8", "package-path", output(messages, plain, name=b"\xff\xfe")),
        ("path-empty", "no name", "package-path", output(messages, plain, name=b"")),
        ("padding", "a byte behind the name's end", "output-tampered", output(messages, plain, tail=b"\x01")),
        (
            "commitment",
            "commits to another key",
            "key-commitment-mismatch",
            output(messages, plain, commitment=bytes(32)),
        ),
        (
            "unknown-field",
            "a field more",
            "schema-invalid",
            output(messages, plain, edit=lambda value: value.update(note=1)),
        ),
        (
            "no-recipient",
            "sealed to nobody",
            "schema-invalid",
            output(messages, plain, edit=lambda value: value.update(recipients=[])),
        ),
        (
            "not-canonical",
            "a space after a comma",
            "not-canonical",
            output(messages, plain, edit_bytes=lambda data: data.replace(b",", b", ", 1)),
        ),
    ):
        yield vector(name, description, expect, crafted[0] + b"".join(crafted[1]))
