"""Laws of packages and outputs over many inputs; and parsers that only ever refuse, whatever they are fed."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from glasshouse.errors import FormatError, GlasshouseError, PackageError
from glasshouse.package.checkpoints.part_content import PartReader, PartWriter
from glasshouse.package.checkpoints.part_sealer import PartSealer
from glasshouse.package.checkpoints.resume_parts import unwrap
from glasshouse.package.content import open_stream, verify_content
from glasshouse.package.grant import Grant
from glasshouse.package.index import Index
from glasshouse.package.layout import HEADER_BYTES, Header
from glasshouse.package.manifest import Manifest, parse_signed
from glasshouse.package.output_header import OutputHeader
from glasshouse.package.outputs import open_output
from glasshouse.package.paths import check_path, check_paths
from glasshouse.package.read import Package
from glasshouse.package.streams import Positioned
from glasshouse.task.tensors import tensor_spans
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import RecipientKey, Suite
from glasshouse.wire.lines.checkpoint import CheckpointHeader, Place, front_length, is_padded, padded, resume_key
from simulators.package_world import CHUNK, KEY, OWNER, reader, seal, unlock

BOUNDED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
FOLDER = Path(__file__).parents[2] / "spec" / "vectors" / "sealed-package"
NAMES = st.text(st.sampled_from("abcxyz0129._-é"), min_size=1, max_size=12).filter(lambda text: text not in (".", ".."))
# Lengths around the chunk borders, where mistakes live.
SIZES = st.one_of(
    st.integers(0, 5),
    st.integers(CHUNK - 2, CHUNK + 2),
    st.integers(2 * CHUNK - 1, 2 * CHUNK + 1),
    st.integers(0, 4000),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


RESUME = resume_key(KEY, deployment="00" * 16, line=bytes(32))
PLACE: dict[str, Any] = {
    "deployment": "00" * 16,
    "environment_sha256": bytes(32),
    "leg": 1,
    "line": bytes(32),
    "machines": 1,
    "manifest_sha256": bytes(32),
    "ranks": 1,
    "seq": 1,
    "step": 0,
}


def pattern(length: int) -> bytes:
    return bytes(index * 31 % 251 for index in range(length))


@BOUNDED
@given(size=st.integers(0, 1 << 50))
def test_a_padded_size_is_the_least_that_is_enough_and_wastes_a_sixteenth_at_most(size: int) -> None:
    found = padded(size)
    assert is_padded(found)
    assert size <= found < size + max(4096, size // 16) + 1 or found == 4096
    assert padded(found) == found


@BOUNDED
@given(
    files=st.dictionaries(NAMES, SIZES, max_size=5),
    piece=st.integers(1, 3 * CHUNK),
    suite=st.sampled_from(list(Suite)),
)
def test_whatever_a_script_saves_comes_back_file_by_file(files: dict[str, int], piece: int, suite: Suite) -> None:
    out, place = io.BytesIO(), Place(**PLACE)
    sealer = PartSealer(out, place=place, rank=0, recipients=[RESUME.public], suite=suite, chunk_bytes=CHUNK)
    writer = PartWriter(sealer.update)
    for path, size in files.items():
        try:
            writer.begin(path)
        except PackageError as error:
            assert error.code == "package-path"  # noqa: PT017 - not in normal form
            return
        for at in range(0, size, piece):
            writer.update(pattern(size)[at : at + piece])
    writer.finish()
    row, part = sealer.finish().row, out.getvalue()
    header = CheckpointHeader(**PLACE, parts=(row,))
    front = part[: front_length(part)]
    found = PartReader(Positioned(io.BytesIO(part)), unwrap(front, header, RESUME, rank=0, offset=len(front)))
    found.verify()
    for path, size in files.items():
        content = io.BytesIO()
        found.copy_to(found.files[path], content)
        assert content.getvalue() == pattern(size)


@BOUNDED
@given(files=st.dictionaries(NAMES, SIZES, max_size=5), job=st.dictionaries(st.text(max_size=8), JSON, max_size=4))
def test_everything_that_can_be_sealed_opens_again(files: dict[str, int], job: dict[str, Any]) -> None:
    contents = {path: pattern(size) for path, size in files.items()}
    try:
        data, _ = seal(contents, job=job, suite=list(Suite)[len(files) % 2])
    except PackageError as error:
        assert error.code == "package-path"  # noqa: PT017 - names that collide in case
        return
    package, index = unlock(data)
    assert index.job == json.loads(encode(job))
    assert {entry.path: entry.bytes for entry in index.assets} == files
    offset = package.header.assets_offset
    assert Index.parse(index.encode(), chunk_bytes=CHUNK, assets_offset=offset, version=index.version) == index
    for path, content in contents.items():
        asset = reader(data, path)
        verify_content(asset)
        assert open_stream(asset).read() == content


@BOUNDED
@given(size=SIZES, reads=st.lists(st.tuples(st.integers(0, 4200), st.integers(0, 4200)), min_size=1, max_size=8))
def test_any_sequence_of_reads_gives_what_slices_give(size: int, reads: list[tuple[int, int]]) -> None:
    content = pattern(size)
    asset = reader(seal({"x": content})[0], "x")
    for offset, length in reads:
        out = bytearray(b"\xcc" * length)
        count = asset.read_into(offset, out)
        assert out[:count] == content[offset : offset + length]
        assert count == len(content[offset : offset + length])
        assert out[count:] == b"\xcc" * (length - count)  # what was not read is not touched


WHOLE, _SEALED = seal({"x": pattern(2 * CHUNK + 9)})


@BOUNDED
@given(at=st.integers(0, len(WHOLE) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_nothing_that_is_read(at: int, bit: int) -> None:
    spoiled = bytearray(WHOLE)
    spoiled[at] ^= 1 << bit
    with pytest.raises(GlasshouseError):
        go_through(bytes(spoiled))


@BOUNDED
@given(at=st.integers(0, len(WHOLE)), length=st.integers(0, 200), put=st.binary(max_size=200))
def test_a_replaced_span_is_refused_unless_it_is_the_same(at: int, length: int, put: bytes) -> None:
    spoiled = WHOLE[:at] + put + WHOLE[at + length :]
    if spoiled == WHOLE:
        return
    with pytest.raises(GlasshouseError):
        go_through(spoiled)


def go_through(data: bytes) -> None:
    package, index = unlock(data)
    for entry in index.assets:
        verify_content(package.asset(entry, KEY))


@BOUNDED
@given(data=st.binary(max_size=300))
@example(b"\x89GHS\r\n\x1a\n")
@example(b"\x89GHO\r\n\x1a\n\x00\x00\x00\x02{}")
def test_parsers_refuse_noise_and_never_crash(data: bytes) -> None:
    key = RecipientKey(bytes(96))
    for act in (
        lambda: Package.open(io.BytesIO(data)),
        lambda: Header.parse(data),
        lambda: Manifest.parse(data),
        lambda: parse_signed(data),
        lambda: Index.parse(data, chunk_bytes=CHUNK, assets_offset=0, version=2),
        lambda: Grant.parse(data),
        lambda: OutputHeader.parse(data),
        lambda: open_output(io.BytesIO(data), key, run_id="00" * 16, manifest_sha256=bytes(32)),
        lambda: tensor_spans(reader(seal({"x": data})[0], "x")),
    ):
        with pytest.raises(GlasshouseError):
            act()


@BOUNDED
@given(fields=st.binary(min_size=HEADER_BYTES - 8, max_size=HEADER_BYTES - 8))
def test_a_header_that_parses_has_one_encoding(fields: bytes) -> None:
    data = WHOLE[:12] + fields[4:]
    try:
        header = Header.parse(data)
    except GlasshouseError:
        return
    assert header.encode() == data


def wrong_values(document: dict[str, Any]) -> Any:
    """Return a strategy that spoils one field of a good document, or adds or removes one."""
    return st.tuples(st.sampled_from([*document, "new"]), st.one_of(JSON, st.just(...)))


MANIFEST = _SEALED.manifest.to_json()


@BOUNDED
@given(change=wrong_values(dict(MANIFEST)))
def test_a_manifest_with_a_strange_field_is_refused_or_reads_as_it_is_written(change: tuple[str, Any]) -> None:
    document = dict(MANIFEST)
    name, value = change
    if value is ...:
        document.pop(name, None)
    else:
        document[name] = value
    data = encode(document)
    try:
        found = Manifest.parse(data)
    except GlasshouseError:
        return
    assert found.encode() == data


@BOUNDED
@given(
    entry=st.dictionaries(st.sampled_from(["blake3", "bytes", "path", "sha256", "x"]), JSON, max_size=4),
    job=JSON,
    written=st.integers(1, 3),
    expected=st.integers(1, 2),
)
def test_an_index_with_strange_entries_is_refused_or_reads_as_it_is_written(
    entry: dict[str, Any], job: Any, written: int, expected: int
) -> None:
    data = encode({"assets": [entry] if entry else [], "format": f"glasshouse-index/{written}", "job": job})
    try:
        found = Index.parse(data, chunk_bytes=CHUNK, assets_offset=84, version=expected)
    except GlasshouseError:
        return
    assert found.encode() == data


@BOUNDED
@given(path=st.text(max_size=40))
@example("a/../b")
@example("a/./b")
@example("\ud800")
def test_a_path_that_is_accepted_stays_below_its_folder(path: str) -> None:
    try:
        check_path(path)
    except PackageError:
        return
    below = Path("/top/of/all") / path
    assert below.parts[:4] == ("/", "top", "of", "all")
    assert ".." not in below.parts
    assert "/".join(below.parts[4:]) == path


@BOUNDED
@given(paths=st.lists(st.text(st.sampled_from("aAb/é"), min_size=1, max_size=5), max_size=6))
def test_paths_that_are_accepted_together_can_all_be_created_anywhere(paths: list[str]) -> None:
    try:
        check_paths(paths)
    except PackageError:
        return
    folded = [path.casefold() for path in paths]
    assert len(set(folded)) == len(paths)
    assert not any(other.startswith(path + "/") for path in folded for other in folded)


@BOUNDED
@given(document=JSON)
def test_a_safetensors_header_of_any_json_is_refused_or_fills_the_file(document: Any) -> None:
    text = json.dumps(document).encode()
    content = len(text).to_bytes(8, "little") + text
    try:
        spans = tensor_spans(reader(seal({"x": content})[0], "x"))
    except FormatError:
        return
    assert sum(span.bytes for span in spans) == 0


CORPUS: list[tuple[str, str, int, str]] = json.loads((FOLDER / "fuzz" / "edits.json").read_text(encoding="utf-8"))
if len(CORPUS) < 200:
    raise RuntimeError("the fuzz corpus is missing")
BASES = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in {row[0] for row in CORPUS}}


def edited(data: bytes, operation: str, at: int, operand: bytes) -> bytes:
    at %= len(data)
    if operation == "cut":
        return data[:at]
    if operation == "insert":
        return data[:at] + operand + data[at:]
    if operation == "remove":
        return data[:at] + data[at + len(operand) :]
    if operation == "flip":
        operand = bytes(left ^ (right or 1) for left, right in zip(data[at:], operand, strict=False))
    return data[:at] + operand + data[at + len(operand) :]


def test_every_edit_of_the_fuzz_corpus_is_refused() -> None:
    for base, operation, at, operand in CORPUS:
        vector = BASES[base]
        good = base64.b64decode(vector.get("package") or vector["output"])
        data = edited(good, operation, at, bytes.fromhex(operand))
        if data == good:
            continue
        with pytest.raises(GlasshouseError):
            open_vector(vector, data)


def open_vector(vector: dict[str, Any], data: bytes) -> None:
    if "package" in vector:
        package = Package.open(io.BytesIO(data), owner_signing=bytes.fromhex(vector["owner_signing"]))
        key = bytes.fromhex(vector["package_key"])
        for entry in package.unlock(key).assets:
            verify_content(package.asset(entry, key))
        return
    recipient = RecipientKey(bytes.fromhex(vector["recipient_private"]))
    manifest_sha256 = bytes.fromhex(vector["manifest_sha256"])
    found = open_output(io.BytesIO(data), recipient, run_id=vector["run_id"], manifest_sha256=manifest_sha256)
    found.copy_to(io.BytesIO())


def test_the_owner_in_these_tests_is_the_one_who_signs() -> None:
    assert _SEALED.manifest.owner_signing == OWNER.public
