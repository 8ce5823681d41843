"""Parts, headers, resume keys and padded sizes, from the text of the specification and not by `glasshouse.package`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from package_parts import CHUNK, OTHER_RECIPIENT, RECIPIENT, Edit, Messages, b64, fixed, flip, stream

from checkpoint_cases.common import DEPLOYMENT, LINE, MANIFEST, PACKAGE_KEY, Case, case, place
from glasshouse.wire.canonical import b64encode, encode
from glasshouse.wire.crypto import RecipientKey, Suite, derive, key_id, lengths_prefixed

MAGIC = b"\x89GHK\r\n\x1a\n"
FILES = (
    ("glasshouse-checkpoint.json", b'{"paths":["checkpoint-120","adapter.bin"]}'),
    ("checkpoint-120/state.json", b"{}"),
    ("checkpoint-120/empty", b""),
    ("adapter.bin", fixed("adapter", 2000)),
)
TAMPERED, FOREIGN = "checkpoint-tampered", "checkpoint-foreign"


def private_of(package_key: bytes, deployment: str, line: str) -> bytes:
    """Return the 96 bytes of a resume key."""
    seed = derive(package_key, b"glasshouse resume v1", bytes.fromhex(deployment), bytes.fromhex(line))
    return hashlib.shake_256(seed).digest(96)


RESUME = RecipientKey(private_of(PACKAGE_KEY, DEPLOYMENT, LINE))


def padded(size: int) -> int:
    step = 2 ** max(12, len(f"{size:b}") - 5)
    return -(-max(size, 1) // step) * step


def plaintext(
    files: Sequence[tuple[str, bytes]] = FILES,
    *,
    index: bytes | None = None,
    at: int | None = None,
    length: int | None = None,
    zero: bytes = b"\x00",
    size: int | None = None,
) -> bytes:
    """Return files, index, zeros and what finds the index, with what a vector has wrong in it."""
    content = b"".join(data for _, data in files)
    if index is None:
        index = encode({"files": [{"bytes": len(data), "path": path} for path, data in files]})
    whole = content + index
    size = padded(len(whole) + 16) if size is None else size
    place_of = (len(content) if at is None else at), (len(index) if length is None else length)
    return whole + zero * (size - len(whole) - 16) + b"".join(number.to_bytes(8, "big") for number in place_of)


@dataclass
class Part:
    """A part, each piece of which a vector may spoil."""

    messages: Messages
    plain: bytes = field(default_factory=plaintext)
    suite: Suite = Suite.AES_256_GCM
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the place
    rank: int = 0
    commitment: bytes | None = None
    recipients: tuple[RecipientKey, ...] = (RECIPIENT, RESUME)
    key: bytes = fixed("content key", 32)
    wrapped: bytes | None = None  # in the place of the key
    label: bytes = b"glasshouse checkpoint v1 key"
    edit: Edit = lambda _: None  # of the part header, once its keys are wrapped
    edit_body: Callable[[bytes], bytes] = lambda body: body
    edit_chunks: Callable[[list[bytes]], list[bytes]] = lambda chunks: chunks

    def build(self) -> tuple[bytes, int]:
        """Return the sealed part, and where its chunks begin."""
        where = place(**self.changes)
        numbers = (where["leg"], where["seq"], self.rank)
        bound = (bytes.fromhex(where["line"]), *(number.to_bytes(8, "big") for number in numbers))
        commitment = self.commitment or derive(self.key, b"glasshouse checkpoint v1 key commitment", *bound)
        header: dict[str, Any] = where | {
            "chunk_bytes": CHUNK,
            "format": "glasshouse-checkpoint-part/1",
            "key_commitment": commitment.hex(),
            "rank": self.rank,
            "suite": self.suite.value,
        }
        info = lengths_prefixed(self.label, encode(header))
        header["recipients"] = [
            {
                "id": key_id(one.public),
                "sealed": b64encode(self.messages.seal(self.wrapped or self.key, recipient=one.public, info=info)),
            }
            for one in sorted(self.recipients, key=lambda one: key_id(one.public))
        ]
        self.edit(header)
        body = self.edit_body(encode(header))
        front = MAGIC + len(body).to_bytes(4, "big") + body
        chunks = stream(self.suite, self.key, hashlib.sha256(front).digest(), self.plain)
        return front + b"".join(self.edit_chunks(chunks)), len(front)


def row_of(part: bytes, front: int, **changes: Any) -> dict[str, Any]:
    row = {
        "bytes": len(part),
        "head_sha256": hashlib.sha256(part[:front]).hexdigest(),
        "sha256": hashlib.sha256(part).hexdigest(),
    }
    return row | changes


def header_of(*rows: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return place(**changes) | {"format": "glasshouse-checkpoint/1", "parts": [dict(row) for row in rows]}


def release(header: bytes, **changes: Any) -> dict[str, Any]:
    """Return what a release has of a line, and the header beside it."""
    start = {
        "checkpoint": hashlib.sha256(header).hexdigest(),
        "id": LINE,
        "leg": 3,
        "previous": fixed("holder", 16).hex(),
        "seq": 5,
    }
    value = {
        "deployment": DEPLOYMENT,
        "header": b64(header),
        "line": start | changes.pop("line", {}),
        "machines": 1,
        "manifest_sha256": MANIFEST,
        "ranks": 1,
    }
    return value | changes


def resume_key_cases() -> Iterator[Case]:
    for name, description, package_key, deployment, line in (
        ("valid", "of a package, a deployment and a line", PACKAGE_KEY, DEPLOYMENT, LINE),
        ("other-line", "another line of the same deployment", PACKAGE_KEY, DEPLOYMENT, "00" * 32),
        ("other-deployment", "the same line in another deployment", PACKAGE_KEY, "00" * 16, LINE),
        ("other-package", "the same line of another package", bytes(32), DEPLOYMENT, LINE),
    ):
        private = private_of(package_key, deployment, line)
        given = {"deployment": deployment, "line": line, "package_key": package_key.hex()}
        public = b64encode(RecipientKey(private).public)
        yield case(f"resume-key--{name}", description, given, private=private.hex(), public=public)


def padded_cases() -> Iterator[Case]:
    for name, description, size in (
        ("least", "the least that there is", 4096),
        ("second", "the second", 8192),
        ("small-steps", "the last whose step is 4,096", (1 << 17) - 4096),
        ("larger-steps", "18 bits, steps of 8,192", (1 << 17) + 8192),
        ("power", "a power of two", 1 << 30),
        ("31-bits", "31 bits, steps of 2^26", (1 << 30) + (1 << 26)),
        ("zero", "nothing", 0),
        ("one", "a byte", 1),
        ("one-less", "a byte less than the least", 4095),
        ("one-more", "a byte more than the least", 4097),
        ("small-step-late", "18 bits, and a multiple of 4,096 alone", (1 << 17) + 4096),
        ("half-step", "31 bits, and half a step", (1 << 30) + (1 << 25)),
    ):
        code = None if size and padded(size) == size else "worker-failed"
        yield case(f"padded--{name}", description, {"bytes": size}, code=code, padded=padded(size))


def part_cases(messages: Messages) -> Iterator[Case]:
    def of(
        name: str,
        description: str,
        part: Part | tuple[bytes, int],
        code: str | None = None,
        *,
        header: dict[str, Any] | None = None,
        row: Mapping[str, Any] | None = None,
        rank: int = 0,
        **given: Any,
    ) -> Case:
        data, front = part if isinstance(part, tuple) else part.build()
        encoded = encode(header or header_of(row_of(data, front, **(row or {}))))
        value = release(encoded, **given) | {"package_key": PACKAGE_KEY.hex(), "part": b64(data), "rank": rank}
        if code is None and isinstance(part, Part):
            expect = {"files": [{"content": b64(data), "path": path} for path, data in FILES], "key": part.key.hex()}
            return case(f"part--{name}", description, value, **expect)
        return case(f"part--{name}", description, value, code=code)

    yield of("valid-aes-256-gcm", "opens", Part(messages))
    yield of("valid-chacha20-poly1305", "opens", Part(messages, suite=Suite.CHACHA20_POLY1305))
    large = Part(messages, plain=plaintext(size=12288))
    yield of("valid-larger", "a padded size that is not the least", large)
    alone = Part(messages, recipients=(RESUME,))
    yield of("valid-one-recipient", "for the resume key alone", alone)
    two = [Part(messages, rank=rank, changes={"ranks": 2}) for rank in (0, 1)]
    both = header_of(*(row_of(*one.build()) for one in two), ranks=2)
    yield of("valid-second-rank", "of two", two[1], header=both, rank=1, ranks=2)
    other = Part(messages, changes={"environment_sha256": "00" * 32})
    yield of("valid-other-environment", "of a machine that measured otherwise than machine 0", other)

    data, front = Part(messages).build()
    good = row_of(data, front)
    for name, description, spoiled in (
        ("magic-wrong", "an output's magic", data[:3] + b"O" + data[4:]),
        ("length-more", "a length of one byte more", data[:11] + bytes([data[11] + 1]) + data[12:]),
        ("length-large", "a header of 4 GiB", data[:8] + b"\xff" * 4 + data[12:]),
        ("header-flipped", "another step", data.replace(b'"step":120', b'"step":121')),
        ("recipient-flipped", "a bit of a wrapped key", flip(data, data.find(b'"sealed":"') + 40)),
        ("chunk-flipped", "a bit of a chunk", flip(data, front + 9)),
        ("tag-flipped", "a bit of the last tag", flip(data, len(data) - 1)),
        ("truncated", "a byte is missing", data[:-1]),
        ("chunk-missing", "without its last chunk", data[: -(CHUNK + 16)]),
        ("longer", "a byte more", data + b"\x00"),
    ):
        yield of(
            f"changed-{name}",
            f"{description}; the header names the part as it was",
            (spoiled, front),
            TAMPERED,
            header=header_of(good),
        )
    for name, description, spoiled in (
        ("magic-wrong", "an output's magic", data[:3] + b"O" + data[4:]),
        ("length-more", "a length of one byte more", data[:11] + bytes([data[11] + 1]) + data[12:]),
        ("chunk-flipped", "a bit of a chunk", flip(data, front + 9)),
        ("chunk-missing", "without its last chunk", data[: -(CHUNK + 16)]),
    ):
        yield of(f"written-{name}", f"{description}; the header names the part as it is", (spoiled, front), TAMPERED)

    def swap(chunks: list[bytes]) -> list[bytes]:
        return [chunks[1], chunks[0], *chunks[2:]]

    def unsort(header: dict[str, Any]) -> None:
        header["recipients"].reverse()

    def extend(header: dict[str, Any]) -> None:
        header["extra"] = 1

    def odd(header: dict[str, Any]) -> None:
        header["chunk_bytes"] = CHUNK - 1

    for name, description, part in (
        ("chunks-swapped", "two chunks in each other's place", Part(messages, edit_chunks=swap)),
        ("commitment-wrong", "the commitment of another key", Part(messages, commitment=bytes(32))),
        ("key-other", "another key is wrapped than the chunks have", Part(messages, wrapped=fixed("other key", 32))),
        ("key-short", "a wrapped key of 31 bytes", Part(messages, wrapped=fixed("content key", 31))),
        ("label-wrong", "keys that are wrapped for outputs", Part(messages, label=b"glasshouse output v1 key")),
        ("not-for-the-line", "not for the resume key", Part(messages, recipients=(RECIPIENT, OTHER_RECIPIENT))),
        ("recipients-unsorted", "recipients by no order", Part(messages, edit=unsort)),
        ("member-unknown", "a member too many", Part(messages, edit=extend)),
        ("chunk-size-odd", "a chunk size that is no power of two", Part(messages, edit=odd)),
        ("not-canonical", "a space in the header", Part(messages, edit_body=lambda body: body.replace(b":", b": ", 1))),
        ("size-not-padded", "4,097 bytes of plaintext", Part(messages, plain=plaintext(size=4097))),
    ):
        yield of(name, description, part, TAMPERED)
    yield of(
        "rank-other",
        "rank 1 in the place of rank 0",
        two[1],
        TAMPERED,
        ranks=2,
        header=header_of(*[row_of(*two[1].build())] * 2, ranks=2),
    )
    yield of("size-other", "the header names another length", Part(messages), TAMPERED, row={"bytes": len(data) - 16})

    one = (("a", b"x"),)
    for name, description, plain in (
        ("beyond", "an index behind the end", plaintext(at=4096)),
        ("far", "an index at 2^63", plaintext(at=1 << 63)),
        ("long", "an index of 2^63 bytes", plaintext(length=1 << 63)),
        ("not-canonical", "an index with a space", plaintext(one, index=b'{"files": [{"bytes":1,"path":"a"}]}')),
        ("short", "files that end before the index", plaintext(one, index=b'{"files":[]}')),
        ("over", "a file that reaches into the index", plaintext(one, index=b'{"files":[{"bytes":2,"path":"a"}]}')),
        ("outside", "a path above the folder", plaintext((("../a", b"x"),))),
        ("absolute", "a path from the root", plaintext((("/a", b"x"),))),
        ("twice", "a path twice", plaintext((("a", b"x"), ("a", b"y")))),
        ("folder", "a file that is a folder too", plaintext((("a", b"x"), ("a/b", b"y")))),
        ("padding", "padding that is not zero", plaintext(zero=b"\x01")),
        ("none", "zeros alone", bytes(4096)),
    ):
        yield of(f"index-{name}", description, Part(messages, plain=plain), TAMPERED)

    for name, changes in (
        ("line", {"line": "00" * 32}),
        ("deployment", {"deployment": "00" * 16}),
        ("manifest", {"manifest_sha256": "00" * 32}),
        ("leg", {"leg": 1}),
        ("seq", {"seq": 4}),
        ("step", {"step": 119}),
        ("previous", {"previous": None}),
        ("world", {"machines": 2}),
    ):
        yield of(
            f"foreign-{name}", f"a part of another {name} than its header's", Part(messages, changes=changes), FOREIGN
        )


def header_cases(messages: Messages) -> Iterator[Case]:
    row = row_of(*Part(messages).build())

    def of(name: str, description: str, header: bytes, code: str | None = None, **given: Any) -> Case:
        expect = {} if code else {"digest": hashlib.sha256(header).hexdigest()}
        return case(f"header--{name}", description, release(header, **given), code=code, **expect)

    good = header_of(row)
    yield of("valid", "the checkpoint of the release", encode(good))
    first = header_of(row, seq=1, previous=None)
    yield of("valid-first", "the first of its line", encode(first), line={"seq": 1})
    world = header_of(*[row] * 4, machines=2, ranks=2)
    yield of("valid-world", "of four ranks on two machines", encode(world), machines=2, ranks=2)
    for name, description, header in (
        ("not-canonical", "a space in it", encode(good).replace(b":", b": ", 1)),
        ("member-unknown", "a member too many", encode(good | {"extra": 1})),
        ("member-missing", "without its step", encode({n: v for n, v in good.items() if n != "step"})),
        ("format-other", "another format", encode(good | {"format": "glasshouse-checkpoint/2"})),
        ("part-missing", "one part for two ranks", encode(header_of(row, ranks=2))),
        ("parts-none", "without parts", encode(header_of())),
        ("not-json", "no JSON", b"checkpoint"),
    ):
        yield of(name, description, header, TAMPERED)
    yield of(
        "digest-other",
        "another checkpoint than the release names",
        encode(good),
        TAMPERED,
        line={"checkpoint": fixed("checkpoint 4", 32).hex()},
    )
    for name, given in (
        ("line", {"line": {"id": "00" * 32}}),
        ("deployment", {"deployment": "00" * 16}),
        ("manifest", {"manifest_sha256": "00" * 32}),
        ("seq", {"line": {"seq": 6}}),
        ("machines", {"machines": 2}),
        ("ranks", {"ranks": 2}),
    ):
        yield of(f"foreign-{name}", f"of another {name} than the release", encode(good), FOREIGN, **given)
