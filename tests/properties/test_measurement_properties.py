"""Whatever is put in place of one member of a measurement, its verifier refuses it, and fails in no other way."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from glasshouse.errors import VerificationError
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import sha256
from glasshouse_bench.verify import verify_measurement
from simulators.slot_measurement import OWNER, measured
from tools.artifact_stories import fitted, payload, sign

INTEGERS = st.sampled_from([0, -1, 1, 2**40, 2**53 - 1, 1 - 2**53])
TEXTS = st.sampled_from(["", "0", "-1", "9" * 19, "nan", "1e400", "00" * 32, "x" * 97, "../..", "A"])
ODD = st.one_of(INTEGERS, TEXTS, st.sampled_from([None, True, [], {}, [None], {"a": 1}]))


@cache
def folder() -> Path:
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root)
    return measured(root / "measured", receipts=True, parity=True, sessions=2, length_ns=400_000_000)


@cache
def names() -> list[str]:
    return sorted(str(path.relative_to(folder())) for path in folder().rglob("*") if path.is_file())


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*above, key)
            yield from places(value[key], (*above, key))


def altered(data: bytes, draw: st.DataObject) -> bytes:
    value = json.loads(data)
    place = draw.draw(st.sampled_from(list(places(value))))
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    if draw.draw(st.booleans()):
        inner[place[-1]] = draw.draw(ODD)
    else:
        del inner[place[-1]]
    return encode(value)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_one_member_of_one_file_is_altered(draw: st.DataObject) -> None:
    path = folder() / draw.draw(st.sampled_from(names()))
    note = path.parent / "session.json"
    kept = {one: one.read_bytes() for one in {path, note, folder() / "statement.json"} if one.exists()}
    data = kept[path]
    if path.suffix == ".steps":
        lines = data.splitlines(keepends=True)
        line = draw.draw(st.integers(0, len(lines) - 1))
        changed = b"".join([*lines[:line], altered(lines[line], draw) + b"\n", *lines[line + 1 :]])
        # The note goes with it, so that the record itself is read.
        told = json.loads(kept[note])
        told[path.stem]["record_sha256"] = sha256(changed).hex()
        note.write_bytes(encode(told))
    else:
        changed = altered(data, draw)
    path.write_bytes(changed)
    try:
        assert refused() is (changed != data)
        if path.name != "statement.json":
            # The owner may sign what they like: it is refused, or it is a measurement, and nothing else happens.
            sign(folder(), fitted(folder(), payload(folder())))
            refused()
    finally:
        for one, content in kept.items():
            one.write_bytes(content)


def refused() -> bool:
    try:
        verify_measurement(folder(), owner=OWNER.public)
    except VerificationError:
        return True
    return False
