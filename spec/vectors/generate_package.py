"""Writes spec/vectors/sealed-package/ again: fixed keys and contents, so the same bytes every time.

Run: python spec/vectors/generate_package.py
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

from package_outputs import outputs
from package_parts import (
    CHUNK,
    FILES,
    HERE,
    KEY,
    MESSAGES,
    OTHER_KEY,
    OWNER,
    RECIPIENT,
    STRANGER,
    Messages,
    Package,
    b64,
    digest,
    fixed,
    flip,
    put,
    render,
)

from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64encode
from glasshouse.wire.crypto import Suite

Vector = tuple[str, dict[str, Any]]
SEALED_CHUNK = CHUNK + 16
# No locale: a dotless i is no i, a dotted capital I is more than one; full-width forms stay apart from the others.
FOLD_APART = ("I", "f\u00ed", "\u0130", "\u0131", "\uff46\uff49")


def refused(
    name: str,
    description: str,
    expect: str,
    stage: str,
    data: bytes,
    *,
    key: bytes = KEY,
    owner: bytes | None = None,
    path: str | None = None,
) -> Vector:
    value: dict[str, Any] = {
        "description": description,
        "expect": expect,
        "package": b64(data),
        "package_key": key.hex(),
        "stage": stage,
    }
    if owner is not None:
        value["owner_signing"] = owner.hex()
    if path is not None:
        value["path"] = path
    return name, value


def valid_packages() -> Iterator[Vector]:
    empty: tuple[tuple[str, bytes], ...] = ()
    for name, package in (
        ("valid-aes-256-gcm", Package()),
        ("valid-chacha20-poly1305", Package(suite=Suite.CHACHA20_POLY1305)),
        ("valid-without-assets", Package(files=empty)),
        ("valid-names-that-fold-apart", Package(files=tuple((name, b"") for name in FOLD_APART))),
        ("valid-version-1", Package(version=1)),
        ("valid-version-1-chacha20-poly1305", Package(version=1, suite=Suite.CHACHA20_POLY1305)),
    ):
        assets = [
            {
                "asset_key": package.asset_key(number).hex(),
                "bytes": len(data),
                "content": b64(data),
                "path": path,
            }
            | digest(package.version, data)
            for number, (path, data) in enumerate(package.files, start=1)
        ]
        yield (
            name,
            {
                "assets": assets,
                "description": "opens, and gives this",
                "expect": "valid",
                "header_sha256": package.header_sha256.hex(),
                "job": {"epochs": 3, "learning_rate": "0.001"},
                "manifest_sha256": hashlib.sha256(
                    dsse.Envelope.parse(package.envelope, max_bytes=1 << 16).payload
                ).hexdigest(),
                "owner_seed": fixed("owner", 32).hex(),
                "owner_signing": OWNER.public.hex(),
                "package": b64(package.join()),
                "package_key": KEY.hex(),
                "stage": "verify",
            },
        )


def hostile_headers() -> Iterator[Vector]:
    data = Package().join()
    cases = (
        ("magic-wrong", "the first byte is another", "package-not-recognised", flip(data, 0)),
        ("magic-line-ends", "a transfer rewrote CR LF", "package-not-recognised", data.replace(b"\r\n", b"\n", 1)),
        ("file-empty", "no bytes at all", "package-not-recognised", b""),
        ("header-truncated", "ends within the header", "package-truncated", data[:83]),
        ("version-unknown", "version 3", "unsupported", put(data, 8, b"\x00\x03")),
        ("version-none", "version 0", "unsupported", put(data, 8, b"\x00\x00")),
        ("version-of-another", "the header of version 1, all else of 2", "package-tampered", put(data, 8, b"\x00\x01")),
        ("suite-unknown", "suite 3", "unsupported", put(data, 10, b"\x03")),
        ("header-zero-byte", "the zero byte is 1", "unsupported", put(data, 11, b"\x01")),
        ("chunk-odd", "a chunk size of 1025", "package-limit", put(data, 12, (1025).to_bytes(4, "big"))),
        ("chunk-small", "a chunk size of 512", "package-limit", put(data, 12, (512).to_bytes(4, "big"))),
        ("chunk-large", "a chunk size of 2^25", "package-limit", put(data, 12, (1 << 25).to_bytes(4, "big"))),
        ("envelope-none", "an envelope of 0 bytes", "package-limit", put(data, 16, bytes(4))),
        ("envelope-large", "an envelope of 4 GiB", "package-limit", put(data, 16, b"\xff" * 4)),
        ("index-short", "an index of 15 bytes", "package-limit", put(data, 20, (15).to_bytes(8, "big"))),
        (
            "index-large",
            "an index of 2^22 + 1 bytes",
            "package-limit",
            put(data, 20, ((1 << 22) + 1).to_bytes(8, "big")),
        ),
        ("assets-large", "an asset area of 2^64 - 1 bytes", "package-limit", put(data, 28, b"\xff" * 8)),
        ("file-truncated", "one byte is missing", "package-truncated", data[:-1]),
        ("file-longer", "one byte too many", "package-tampered", data + b"\x00"),
    )
    for name, description, expect, changed in cases:
        yield refused(name, description, expect, "open", changed)


def hostile_manifests() -> Iterator[Vector]:
    def changing(**fields: object) -> bytes:
        return Package(edit_manifest=lambda value: value.update(fields)).join()

    def without_comma_space(data: bytes) -> bytes:
        return data.replace(b'","', b'", "', 1)

    repeated = [b64encode(RECIPIENT.public)] * 2
    weak = {"assurance": "software", "egress": [], "profile": "off"}
    signed = Package()
    envelope = dsse.Envelope.parse(signed.envelope, max_bytes=1 << 16)
    looser = dsse.Envelope(
        payload_type=envelope.payload_type,
        payload=envelope.payload.replace(b'"profile":"standard"', b'"profile":"strict"'),
        signatures=envelope.signatures,
    ).encode()
    foreign = Package(signers=(STRANGER,)).join()
    cases = (
        (
            "envelope-not-canonical",
            "a space after a comma",
            "not-canonical",
            Package(edit_envelope=without_comma_space).join(),
        ),
        (
            "envelope-other-type",
            "a delegation's type",
            "wrong-type",
            Package(payload_type="application/vnd.glasshouse.delegation+json").join(),
        ),
        (
            "manifest-changed-after-signing",
            "a stricter profile, the old signature",
            "signature-invalid",
            Package(edit_envelope=lambda _: looser).join(),
        ),
        ("manifest-signed-by-another", "the owner's name, a stranger's signature", "signature-invalid", foreign),
        (
            "manifest-signed-by-two",
            "a stranger has signed too",
            "signature-invalid",
            Package(signers=(OWNER, STRANGER)).join(),
        ),
        ("manifest-unknown-field", "a field more", "schema-invalid", changing(note="")),
        ("manifest-other-format", "glasshouse-package/3", "schema-invalid", changing(format="glasshouse-package/3")),
        (
            "manifest-of-version-1",
            "a manifest of version 1 behind a header of 2",
            "package-tampered",
            changing(format="glasshouse-package/1"),
        ),
        ("manifest-no-recipient", "results sealed to nobody", "schema-invalid", changing(recipients=[])),
        ("manifest-recipient-twice", "one recipient twice", "schema-invalid", changing(recipients=repeated)),
        (
            "manifest-recipient-short",
            "a recipient of 32 bytes",
            "schema-invalid",
            changing(recipients=[b64encode(bytes(32))]),
        ),
        ("manifest-workload-unknown", "a workload nobody knows", "schema-invalid", changing(workload="gpt")),
        ("manifest-floor-off", "a floor that demands nothing", "policy-impossible", changing(floor=weak)),
        (
            "manifest-floor-memory",
            "a workspace in memory, which is said by no word",
            "schema-invalid",
            changing(floor={**weak, "profile": "standard", "workspace": "memory"}),
        ),
        ("manifest-digest-upper-case", "hex in upper case", "schema-invalid", changing(index_sha256="AB" * 32)),
        ("manifest-float", "a length that is not an integer", "schema-invalid", float_length()),
        (
            "header-other-package-id",
            "the header's package id is not the manifest's",
            "package-tampered",
            flip(signed.join(), 40),
        ),
        (
            "header-other-commitment",
            "the header's commitment is not the manifest's",
            "package-tampered",
            flip(signed.join(), 60),
        ),
    )
    for name, description, expect, data in cases:
        yield refused(name, description, expect, "open", data)
    yield refused(
        "owner-unexpected", "a good package of another owner than expected", "package-owner-mismatch", "open",
        signed.join(), owner=STRANGER.public,
    )  # fmt: skip


def float_length() -> bytes:
    """Return a package whose signed manifest holds 1e3 for 1000: no canonical encoder writes that."""
    package = Package()

    def sign(_: bytes) -> bytes:
        payload = dsse.Envelope.parse(package.envelope, max_bytes=1 << 16).payload
        return dsse.sign(
            "application/vnd.glasshouse.manifest+json", payload.replace(b":1024,", b":1.024e3,", 1), [OWNER]
        ).encode()

    return Package(edit_envelope=sign).join()


def hostile_indexes() -> Iterator[Vector]:
    good = Package().join()
    at = 84 + len(Package().envelope)
    yield refused("key-wrong", "another package's key", "key-commitment-mismatch", "unlock", good, key=OTHER_KEY)
    yield refused("key-short", "a key of 31 bytes", "key-commitment-mismatch", "unlock", good, key=KEY[:31])
    yield refused("index-flipped", "one bit of the sealed index", "package-tampered", "unlock", flip(good, at + 5))
    resigned = Package(edit_sealed_index=lambda data: flip(data, 5)).join()
    yield refused(
        "index-flipped-and-signed", "the same, and the owner signed it", "package-tampered", "unlock", resigned
    )

    def paths(*names: str) -> Package:
        return Package(files=tuple((name, b"") for name in names))

    long = "/".join(["a" * 200] * 6)
    for name, description, package in (
        ("absolute", "absolute", paths("/etc/passwd")),
        ("parent", "leaves its folder", paths("data/../../x")),
        ("dot", "a component that is a dot", paths("./x")),
        ("empty", "no name", paths("")),
        ("empty-component", "two slashes", paths("a//b")),
        ("trailing-slash", "a folder", paths("a/")),
        ("backslash", "another system's separator", paths("a\\b")),
        ("nul", "a NUL", paths("a\x00b")),
        ("control", "a terminal's escape", paths("a\x1b[2J")),
        ("format", "a character that turns text round", paths("photo\u202egpj.exe")),
        ("not-nfc", "e and a combining accent", paths("cafe\u0301")),
        ("long", "1205 bytes", paths(long)),
        ("long-component", "a component of 256 bytes", paths("a" * 256)),
        ("twice", "one name twice", paths("a", "a")),
        ("unsorted", "out of order", paths("b", "a")),
        ("case", "equal but for case", paths("Model", "model")),
        ("case-full", "full folding: sharp s is two letters s", paths("strasse", "stra\u00dfe")),
        ("case-capital-sharp-s", "and so is its capital", paths("STRASSE", "stra\u1e9ee")),
        ("case-kelvin", "NFC makes the sign for kelvin a letter K first", paths("k", "\u212a")),
        ("case-cherokee", "Cherokee folds to its capitals", paths("\u13a0", "\uab70")),
        ("case-final-sigma", "both small sigmas are one", paths("\u03c2", "\u03c3")),
        ("case-composed-after-folding", "NFC once more after folding", paths("\u01f0", "J\u030c")),
        ("not-assigned", "a code point that no version of Unicode assigns", paths("a\U0001ffff")),
        ("file-and-folder", "a file and a folder", paths("a", "a/b")),
    ):
        yield refused(f"path-{name}", description, "package-path", "unlock", package.join())
    for name, description, expect, edit in (
        ("index-unknown-field", "a field more", "schema-invalid", {"note": 1}),
        ("index-job-list", "a job that is no object", "schema-invalid", {"job": []}),
        ("index-other-format", "glasshouse-index/3", "schema-invalid", {"format": "glasshouse-index/3"}),
    ):
        data = Package(edit_index=lambda value, edit=edit: value.update(edit)).join()  # type: ignore[misc]
        yield refused(name, description, expect, "unlock", data)
    older = Package(edit_index=downgrade).join()
    yield refused("index-of-version-1", "an index of version 1 in a package of 2", "schema-invalid", "unlock", older)
    newer = Package(version=1, edit_index=upgrade).join()
    yield refused("index-of-version-2", "an index of version 2 in a package of 1", "schema-invalid", "unlock", newer)
    spaced = Package(edit_index_bytes=lambda data: data.replace(b",", b", ", 1)).join()
    yield refused("index-not-canonical", "a space after a comma", "not-canonical", "unlock", spaced)
    doubled = Package(edit_index_bytes=lambda data: data.replace(b'"job":', b'"job":{},"job":', 1)).join()
    yield refused("index-field-twice", "two jobs", "schema-invalid", "unlock", doubled)

    def shorter(value: dict[str, Any]) -> None:
        value["assets"][1]["bytes"] -= 1

    yield refused(
        "index-short-of-area",
        "assets one byte shorter than their area",
        "package-tampered",
        "unlock",
        Package(edit_index=shorter).join(),
    )


def downgrade(index: dict[str, Any]) -> None:
    """Make the index what version 1 says, SHA-256 digests included."""
    index["format"] = "glasshouse-index/1"
    index["assets"] = [{"bytes": len(data), "path": path} | digest(1, data) for path, data in FILES]


def upgrade(index: dict[str, Any]) -> None:
    index["format"] = "glasshouse-index/2"
    index["assets"] = [{"bytes": len(data), "path": path} | digest(2, data) for path, data in FILES]


Assets = list[list[bytes]]  # each asset's sealed chunks
LONGER = (FILES[0], FILES[1], ("weights", fixed("weights", 2 * CHUNK)))


def swap(assets: Assets) -> None:
    assets[1][0], assets[1][1] = assets[1][1], assets[1][0]


def repeat(assets: Assets) -> None:
    assets[1][1] = assets[1][0]


def splice(assets: Assets) -> None:
    assets[1][0] = assets[2][0]


def flip_content(assets: Assets) -> None:
    assets[1][1] = flip(assets[1][1], 500)


def flip_tag(assets: Assets) -> None:
    assets[1][2] = flip(assets[1][2], -1, 0x80)


def flip_empty(assets: Assets) -> None:
    assets[0][0] = flip(assets[0][0], 0)


def transplant(assets: Assets) -> None:
    assets[1] = Package(package_id=fixed("second package id", 16).hex()).sealed_assets[1]


def cut(assets: Assets) -> None:
    assets[2] = Package(files=LONGER).seal(3, LONGER[2][1])[:1]


def renumber(assets: Assets) -> None:
    assets[2] = Package().seal(2, FILES[2][1])


def hostile_assets() -> Iterator[Vector]:
    """Packages that are all the owner's, but for sealed bytes that a host moved or changed."""
    for name, description, path, change in (
        ("chunk-flipped", "one bit of a chunk", "data/records", flip_content),
        ("chunk-tag-flipped", "one bit of a tag", "data/records", flip_tag),
        ("chunk-empty-flipped", "one bit of an empty asset's tag", "data/empty", flip_empty),
        ("chunks-swapped", "two chunks in the other order", "data/records", swap),
        ("chunk-repeated", "a chunk in place of the next", "data/records", repeat),
        ("chunk-from-another-asset", "a chunk of another asset", "data/records", splice),
        ("asset-from-another-package", "the same asset under another package id", "data/records", transplant),
        ("asset-cut", "the first chunk of a longer asset", "weights", cut),
        ("asset-renumbered", "sealed under another asset's number", "weights", renumber),
    ):
        package = Package()
        change(package.sealed_assets)
        yield refused(name, description, "package-tampered", "verify", package.join(), path=path)

    def lie(value: dict[str, Any]) -> None:
        (member,) = value["assets"][2].keys() & {"sha256", "blake3"}
        value["assets"][2][member] = "00" * 32

    for version, name in ((2, "asset-digest-wrong"), (1, "asset-digest-wrong-version-1")):
        data = Package(version=version, edit_index=lie).join()
        yield refused(name, "the index names another digest", "asset-digest-mismatch", "verify", data, path="weights")
    good = Package().join()
    yield refused("asset-unknown", "a name that is not in the index", "asset-unknown", "verify", good, path="other")


def fuzz_corpus() -> str:
    """Return edits of the valid vectors, as [base, operation, offset, hex]: none may do more than be refused."""
    choose = random.Random(20)  # noqa: S311 - a fixed sequence is the point
    bases = ("valid-aes-256-gcm", "valid-chacha20-poly1305", "output-valid-aes-256-gcm")
    corpus: list[list[object]] = []
    for _ in range(240):
        base = choose.choice(bases)
        # The front is where lengths and structure are: half of all edits go there.
        at = choose.randrange(100) if choose.random() < 0.5 else choose.randrange(8000)
        operation = choose.choice(("flip", "put", "cut", "insert", "remove"))
        corpus.append([base, operation, at, choose.randbytes(choose.choice((1, 1, 2, 4, 8, 33))).hex()])
    return json.dumps(corpus, separators=(",", ":")).replace("],[", "],\n[") + "\n"


def build(messages: Messages) -> dict[str, str]:
    """Return every vector's file name and content."""
    found: dict[str, str] = {}
    for group in (
        valid_packages(),
        hostile_headers(),
        hostile_manifests(),
        hostile_indexes(),
        hostile_assets(),
        outputs(messages),
    ):
        for name, value in group:
            if f"{name}.json" in found:
                raise ValueError(f"two vectors are called {name}")
            found[f"{name}.json"] = render(value)
    found["fuzz/edits.json"] = fuzz_corpus()
    return found


def main() -> None:
    messages = Messages(json.loads(MESSAGES.read_text()) if MESSAGES.exists() else {})
    wanted = build(messages)
    for folder in (MESSAGES.parent, HERE / "fuzz"):
        folder.mkdir(parents=True, exist_ok=True)
    for old in HERE.glob("*.json"):
        old.unlink()
    for name, text in wanted.items():
        (HERE / name).write_text(text, encoding="utf-8")
    MESSAGES.write_text(render(messages.used), encoding="utf-8")
    print(f"{len(wanted)} vectors in {HERE}")


if __name__ == "__main__":
    main()
