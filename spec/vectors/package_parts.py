"""Puts packages and outputs together from the specification's text, field by field, for generate_package.py.

It does not use `glasshouse.package`; a test compares what the two make.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64decode, b64encode, encode
from glasshouse.wire.crypto import (
    ChunkCipher,
    RecipientKey,
    SigningKey,
    Suite,
    derive,
    hpke_seal,
    key_id,
    lengths_prefixed,
)

HERE = Path(__file__).parent / "sealed-package"
# HPKE draws its own randomness: messages that were made once are kept, so that the rest is reproducible.
MESSAGES = HERE / "fixed" / "hpke-messages.json"
MANIFEST_TYPE = "application/vnd.glasshouse.manifest+json"
CHUNK = 1024
Edit = Callable[[dict[str, Any]], None]


def fixed(label: str, length: int) -> bytes:
    """Return bytes that look random and never change."""
    return hashlib.shake_256(b"glasshouse vector " + label.encode()).digest(length)


OWNER = SigningKey(fixed("owner", 32))
STRANGER = SigningKey(fixed("stranger", 32))
RECIPIENT = RecipientKey(fixed("recipient", 96))
OTHER_RECIPIENT = RecipientKey(fixed("other recipient", 96))
KEY = fixed("package key", 32)
OTHER_KEY = fixed("other package key", 32)
PACKAGE_ID = fixed("package id", 16).hex()
RUN_ID = fixed("run id", 16).hex()
SALT = fixed("output salt", 32)
JOB = {"epochs": 3, "learning_rate": "0.001"}
FILES = (
    ("data/empty", b""),
    ("data/records", fixed("records", 2 * CHUNK + 300)),
    ("weights", fixed("weights", CHUNK)),
)


def stream(suite: Suite, key: bytes, associated_data: bytes, plain: bytes) -> list[bytes]:
    """Seal a stream; return its chunks."""
    cipher = ChunkCipher(suite=suite, key=key, prefix=bytes(7), associated_data=associated_data)
    count = max(1, -(-len(plain) // CHUNK))
    chunks = []
    for index in range(count):
        piece = plain[index * CHUNK : (index + 1) * CHUNK]
        sealed = bytearray(len(piece) + 16)
        cipher.seal_into(index, last=index == count - 1, plaintext=piece, out=sealed)
        chunks.append(bytes(sealed))
    return chunks


@dataclass
class Package:
    """A package in parts, each of which a vector may spoil before `assemble` signs and joins them."""

    version: int = 2
    suite: Suite = Suite.AES_256_GCM
    files: tuple[tuple[str, bytes], ...] = FILES
    key: bytes = KEY
    package_id: str = PACKAGE_ID
    edit_index: Edit = field(default=lambda _: None)
    edit_index_bytes: Callable[[bytes], bytes] = field(default=lambda data: data)
    edit_sealed_index: Callable[[bytes], bytes] = field(default=lambda data: data)
    edit_manifest: Edit = field(default=lambda _: None)
    edit_envelope: Callable[[bytes], bytes] = field(default=lambda data: data)
    payload_type: str = MANIFEST_TYPE
    signers: tuple[SigningKey, ...] = (OWNER,)

    def __post_init__(self) -> None:
        self.commitment = derive(self.key, b"glasshouse package v1 key commitment", bytes.fromhex(self.package_id))
        self.index = self._index()
        self.assets_bytes = sum(len(data) + 16 * max(1, -(-len(data) // CHUNK)) for _, data in self.files)
        self.index_bytes = len(self.index) + 16 * -(-len(self.index) // CHUNK)
        self.header = self._header(len(self.edit_envelope(self._envelope(bytes(32)))))
        self.header_sha256 = hashlib.sha256(self.header).digest()
        self.sealed_assets = [self.seal(number, data) for number, (_, data) in enumerate(self.files, start=1)]
        sealed = self.edit_sealed_index(b"".join(self.seal(0, self.index)))
        self.envelope = self.edit_envelope(self._envelope(hashlib.sha256(sealed).digest()))
        self.sealed_index = sealed

    def asset_key(self, number: int) -> bytes:
        label, name = b"glasshouse package v1 asset key", self.suite.value.encode()
        return derive(self.key, label, name, self.header_sha256, number.to_bytes(8, "big"))

    def seal(self, number: int, data: bytes) -> list[bytes]:
        return stream(self.suite, self.asset_key(number), self.header_sha256 + number.to_bytes(8, "big"), data)

    def join(self) -> bytes:
        assets = b"".join(b"".join(chunks) for chunks in self.sealed_assets)
        return self.header + self.envelope + self.sealed_index + assets

    def manifest(self, index_sha256: bytes) -> bytes:
        value: dict[str, Any] = {
            "assets_bytes": self.assets_bytes,
            "chunk_bytes": CHUNK,
            "floor": {"assurance": "software", "egress": [], "profile": "standard"},
            "format": f"glasshouse-package/{self.version}",
            "index_bytes": self.index_bytes,
            "index_sha256": index_sha256.hex(),
            "key_commitment": self.commitment.hex(),
            "owner_sealing": b64encode(RECIPIENT.public),
            "owner_signing": b64encode(OWNER.public),
            "package_id": self.package_id,
            "recipients": [b64encode(RECIPIENT.public)],
            "suite": self.suite.value,
            "workload": "mlp",
        }
        self.edit_manifest(value)
        return encode(value)

    def _envelope(self, index_sha256: bytes) -> bytes:
        return dsse.sign(self.payload_type, self.manifest(index_sha256), self.signers).encode()

    def _header(self, envelope_bytes: int) -> bytes:
        return (
            b"\x89GHS\r\n\x1a\n"
            + self.version.to_bytes(2, "big")
            + bytes([1 if self.suite is Suite.AES_256_GCM else 2, 0])
            + CHUNK.to_bytes(4, "big")
            + envelope_bytes.to_bytes(4, "big")
            + self.index_bytes.to_bytes(8, "big")
            + self.assets_bytes.to_bytes(8, "big")
            + bytes.fromhex(self.package_id)
            + self.commitment
        )

    def _index(self) -> bytes:
        assets = [{"bytes": len(data), "path": path} | digest(self.version, data) for path, data in self.files]
        value: dict[str, Any] = {"assets": assets, "format": f"glasshouse-index/{self.version}", "job": JOB}
        self.edit_index(value)
        return self.edit_index_bytes(encode(value))


class Messages:
    """HPKE messages by what they say: those made before are used again."""

    def __init__(self, known: dict[str, str]) -> None:
        self._known = dict(known)
        self.used: dict[str, str] = {}

    def seal(self, plaintext: bytes, *, recipient: bytes, info: bytes) -> bytes:
        name = hashlib.sha256(lengths_prefixed(recipient, info, plaintext)).hexdigest()
        if name not in self._known:
            self._known[name] = b64encode(hpke_seal(plaintext, recipient=recipient, info=info))
        self.used[name] = self._known[name]
        return b64decode(self._known[name])


def output(
    messages: Messages,
    plain: bytes,
    *,
    suite: Suite = Suite.AES_256_GCM,
    name: bytes = b"adapter.safetensors",
    tail: bytes = b"",
    commitment: bytes | None = None,
    edit: Edit = lambda _: None,
    edit_bytes: Callable[[bytes], bytes] = lambda data: data,
) -> tuple[bytes, list[bytes]]:
    """Return a sealed output: its header and its chunks."""
    key, manifest_sha256 = fixed("output key", 32), fixed("manifest hash", 32)
    run, kind, sequence = bytes.fromhex(RUN_ID), b"output", (1).to_bytes(8, "big")
    commit = commitment or derive(key, b"glasshouse output v1 key commitment", run, manifest_sha256)
    info = lengths_prefixed(b"glasshouse output v1 key", run, manifest_sha256, kind, sequence, commit)
    private = (key + SALT + bytes([len(name)]) + name).ljust(320 - len(tail), b"\x00") + tail
    value: dict[str, Any] = {
        "chunk_bytes": CHUNK,
        "format": "glasshouse-output/1",
        "key_commitment": commit.hex(),
        "kind": kind.decode(),
        "manifest_sha256": manifest_sha256.hex(),
        "recipients": [
            {
                "id": key_id(RECIPIENT.public),
                "sealed": b64encode(messages.seal(private, recipient=RECIPIENT.public, info=info)),
            }
        ],
        "run_id": RUN_ID,
        "sequence": 1,
        "suite": suite.value,
    }
    edit(value)
    body = edit_bytes(encode(value))
    header = b"\x89GHO\r\n\x1a\n" + len(body).to_bytes(4, "big") + body
    return header, stream(suite, key, hashlib.sha256(header).digest(), plain)


def digest(version: int, data: bytes) -> dict[str, str]:
    """Return the member of the index, and of a valid vector, that holds an asset's digest."""
    return {"sha256": hashlib.sha256(data).hexdigest()} if version == 1 else {"blake3": blake3(data).hexdigest()}


def render(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def flip(data: bytes, at: int, mask: int = 1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= mask
    return bytes(changed)


def put(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]
