"""Safetensors: where the tensors lie, and no header that lies about it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.task.tensors import DTYPES, MAX_HEADER_BYTES, TensorSpan, tensor_spans
from simulators.package_world import CHUNK, reader, seal


def file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def parse(content: bytes) -> tuple[TensorSpan, ...]:
    return tensor_spans(reader(seal({"w": content})[0], "w"))


def tensor(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = {"b": tensor("F32", [2, 2], 6, 22), "a": tensor("BF16", [3], 0, 6), "e": tensor("I8", [0, 4], 22, 22)}
    spans = parse(file(header | {"__metadata__": {"format": "pt"}}, bytes(22)))
    begin = 8 + len(json.dumps(header | {"__metadata__": {"format": "pt"}}))
    assert [(span.name, span.offset, span.bytes, span.shape) for span in spans] == [
        ("a", begin, 6, (3,)),
        ("b", begin + 6, 16, (2, 2)),
        ("e", begin + 22, 0, (0, 4)),
    ]


def test_a_file_that_torch_wrote_lands_in_new_tensors() -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save
    weights = {
        "half": torch.randn(33, 7).to(torch.bfloat16),
        "full": torch.randn(CHUNK),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "none": torch.zeros(0, 5),
    }
    asset = reader(seal({"w": save(weights, metadata={"format": "pt"})})[0], "w")
    spans = tensor_spans(asset)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}
    found = {span.name: torch.empty(span.shape, dtype=dtypes[span.dtype]) for span in spans}
    for span in spans:
        asset.read_into(span.offset, found[span.name].reshape(-1).view(torch.uint8).numpy())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


EMPTY = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
BAD: dict[str, Any] = {
    "empty file": b"",
    "seven bytes": b"1234567",
    "header longer than the file": file({}, length=50),
    "not json": file(b"{"),
    "not utf-8": file(b'{"\xff":1}'),
    "a list": file([]),
    "deep": file(b"[" * 100_000),
    "repeated name": file(b"{%s,%s}" % (EMPTY, EMPTY)),
    "entry is text": file({"a": "b"}),
    "a field more": file({"a": tensor("U8", [0], 0, 0) | {"x": 1}}),
    "float offset": file({"a": tensor("U8", [1], 0, 1.0)}, b"x"),
    "true as a number": file({"a": tensor("U8", [True], 0, 1)}, b"x"),
    "negative": file({"a": tensor("U8", [-1], 0, -1)}),
    "huge number": file(b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}}' % (b"9" * 5000)),
    "too many elements": file({"a": tensor("U8", [1 << 40, 1 << 40], 0, 0)}),
    "wrong length": file({"a": tensor("F32", [2], 0, 4)}, bytes(4)),
    "hole": file({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 2, 3)}, bytes(3)),
    "overlap": file({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)}, bytes(3)),
    "tail": file({"a": tensor("U8", [1], 0, 1)}, bytes(2)),
    "beyond the end": file({"a": tensor("U8", [4], 0, 4)}, bytes(2)),
    "metadata not text": file({"__metadata__": {"a": 1}}),
    "metadata a list": file({"__metadata__": []}),
    "not a number": file(b'{"a":NaN}'),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_header_that_lies_is_refused(name: str) -> None:
    with pytest.raises(FormatError) as refusal:
        parse(BAD[name])
    assert refusal.value.code is Code.SCHEMA


def test_limits_and_unknown_types_have_their_own_codes() -> None:
    with pytest.raises(FormatError) as refusal:
        parse(file({}, length=MAX_HEADER_BYTES + 1))
    assert refusal.value.code is Code.TOO_LARGE
    many = {str(number): tensor("U8", [0], 0, 0) for number in range((1 << 15) + 1)}
    with pytest.raises(FormatError) as refusal:
        parse(file(many))
    assert refusal.value.code is Code.TOO_LARGE
    with pytest.raises(FormatError) as refusal:
        parse(file({"a": tensor("F4", [2], 0, 1)}, b"x"))
    assert refusal.value.code is Code.UNSUPPORTED
    assert all(size in (1, 2, 4, 8) for size, _ in DTYPES.values())


def test_a_plain_file_is_read_the_same_way() -> None:
    content = file({"a": tensor("U8", [4], 0, 4)}, b"abcd")

    class Plain:
        size = len(content)

        def read_into(self, offset: int, destination: Any, /) -> int:
            stream = io.BytesIO(content)
            stream.seek(offset)
            return stream.readinto(destination)

    (span,) = tensor_spans(Plain())
    assert content[span.offset :] == b"abcd"
