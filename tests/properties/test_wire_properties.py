"""Laws of the wire: what is encoded decodes, what is decoded encodes, and hostile bytes are only refused."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from glasshouse.errors import FormatError, PackageError
from glasshouse.wire import dsse, jwt
from glasshouse.wire.canonical import MAX_INTEGER, b64decode, b64encode, decode, encode
from glasshouse.wire.crypto import TAG_BYTES, ChunkCipher, SigningKey, Suite, lengths_prefixed
from glasshouse.wire.frames import DATA, Decoder, control, data_header
from glasshouse.wire.merkle import Tree, leaf_hash, verify_consistency, verify_inclusion

KEY = SigningKey(b"k" * 32)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=20
)
JSONISH = st.text(alphabet='{}[]":,0123456789.eE+-truefalsn \\u\n', max_size=60).map(str.encode) | st.binary(
    max_size=60
)


@given(VALUES)
def test_canonical_json_survives_both_ways(value: Any) -> None:
    data = encode(value)
    assert decode(data, max_bytes=len(data)) == value
    assert json.loads(data) == value
    assert encode(json.loads(json.dumps(value, indent=2, sort_keys=False))) == data


@given(JSONISH)
def test_hostile_json_is_refused_or_canonical(data: bytes) -> None:
    try:
        value = decode(data, max_bytes=1000)
    except FormatError:
        return
    assert encode(value) == data


@given(st.binary(max_size=80))
def test_base64url_survives_both_ways(data: bytes) -> None:
    assert b64decode(b64encode(data)) == data


@given(st.text(max_size=20))
def test_hostile_base64url_is_refused_or_the_one_spelling(text: str) -> None:
    try:
        data = b64decode(text)
    except FormatError:
        return
    assert b64encode(data) == text


@given(st.lists(st.binary(max_size=10), max_size=5), st.lists(st.binary(max_size=10), max_size=5))
def test_joined_parts_are_unambiguous(one: list[bytes], two: list[bytes]) -> None:
    assert (lengths_prefixed(*one) == lengths_prefixed(*two)) == (one == two)


@given(st.binary(max_size=200), st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=40))
def test_an_envelope_survives_both_ways(payload: bytes, kind: str) -> None:
    envelope = dsse.sign(kind, payload, [KEY])
    again = dsse.Envelope.parse(envelope.encode(), max_bytes=10_000)
    assert again == envelope
    assert again.verify(kind, KEY.public) == payload


@given(VALUES)
def test_hostile_envelopes_are_only_refused(value: Any) -> None:
    data = encode(value)
    try:
        dsse.Envelope.parse(data, max_bytes=len(data))
    except FormatError:
        return
    raise AssertionError("an arbitrary document became an envelope")


@given(st.text(max_size=200) | st.from_regex(r"[A-Za-z0-9_-]{0,40}(\.[A-Za-z0-9_-]{0,40}){0,4}", fullmatch=True))
def test_hostile_tokens_are_only_refused(text: str) -> None:
    try:
        token = jwt.parse(text)
        token.verify(public=KEY.public, typ="t", audience="a", now_s=0)
    except FormatError:
        return
    raise AssertionError("an arbitrary text became a token")


@given(st.lists(VALUES, max_size=5), st.lists(st.binary(min_size=1, max_size=100), max_size=5), st.data())
def test_frames_arrive_however_they_are_cut(messages: list[Any], bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(control, messages)) + b"".join(data_header(len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder, found = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += [bytes(value) if kind == DATA else value for kind, value in decoder.feed(stream[start:end])]
    assert found == [*messages, *bodies]


@given(st.binary(max_size=200))
def test_hostile_frames_are_only_refused(data: bytes) -> None:
    try:
        for _ in Decoder().feed(data):
            pass
    except FormatError:
        return


@given(st.integers(1, 80), st.data())
def test_merkle_proofs_hold_at_any_size(size: int, data: st.DataObject) -> None:
    tree = Tree()
    for number in range(size):
        tree.append(leaf_hash(number.to_bytes(2, "big")))
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size))
    leaf = leaf_hash(index.to_bytes(2, "big"))
    proof = tree.inclusion_proof(index, size)
    verify_inclusion(leaf=leaf, index=index, size=size, root=tree.root(), proof=proof)
    proof = tree.consistency_proof(old, size) if old else []
    verify_consistency(old=old, new=size, old_root=tree.root(old), new_root=tree.root(), proof=proof)


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.lists(st.binary(min_size=32, max_size=32), max_size=10),
)
def test_hostile_proofs_are_only_refused(old: int, new: int, one: bytes, two: bytes, proof: list[bytes]) -> None:
    assume(one != two)
    for verify in (
        lambda: verify_consistency(old=old, new=new, old_root=one, new_root=two, proof=proof),
        lambda: verify_inclusion(leaf=one, index=old, size=new, root=two, proof=proof),
    ):
        try:
            verify()
        except FormatError:
            continue
        raise AssertionError("random hashes proved something")


@given(
    st.sampled_from(list(Suite)),
    st.lists(st.binary(max_size=50), min_size=1, max_size=5),
    st.data(),
)
def test_a_damaged_stream_never_opens_whole(suite: Suite, chunks: list[bytes], data: st.DataObject) -> None:
    cipher = ChunkCipher(suite=suite, key=b"k" * 32, prefix=bytes(7), associated_data=b"x")
    sealed: list[bytes] = []
    for index, chunk in enumerate(chunks):
        out = bytearray(len(chunk) + TAG_BYTES)
        cipher.seal_into(index, last=index == len(chunks) - 1, plaintext=chunk, out=out)
        sealed.append(bytes(out))
    damaged = data.draw(st.permutations(sealed))[: data.draw(st.integers(1, len(sealed)))]
    assume(damaged != sealed)
    opened = 0
    for index, chunk in enumerate(damaged):
        out = bytearray(len(chunk) - TAG_BYTES)
        try:
            cipher.open_into(index, last=index == len(damaged) - 1, sealed=chunk, out=out)
            opened += 1
        except PackageError:
            assert not any(out)
    assert opened < len(damaged)
