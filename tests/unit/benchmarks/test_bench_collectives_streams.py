"""The cipher that is none keeps the frames' order, the counted one changes nothing, and neither can be asked for."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict

import pytest

from benchmarks.collectives.cells import Cell, Kind, Way
from benchmarks.collectives.groups import Counted, Plain
from benchmarks.collectives.rank import Exchange
from glasshouse.collectives.engine import engine
from glasshouse.collectives.protocol.group_keys import Lane
from glasshouse.collectives.protocol.headers import HEADER_BYTES, TAG_BYTES
from glasshouse.collectives.torch_backend import entry, process_group


def exchange(streams: Plain | Counted, payload: bytes) -> bytes:
    header, out, got = bytearray(HEADER_BYTES), bytearray(len(payload) + TAG_BYTES), bytearray(len(payload))
    streams.sealer(Lane.COLLECTIVE, 1).seal_into(header, payload, out)
    streams.opener(Lane.COLLECTIVE, 1).open_into(header, out, got)
    return bytes(got)


def test_frames_without_a_cipher_carry_what_they_are_given_and_refuse_another_order() -> None:
    plain, payload = Plain(), os.urandom(100)
    assert [exchange(plain, payload) for _ in range(3)] == [payload] * 3
    header, out = bytearray(HEADER_BYTES), bytearray(TAG_BYTES + 4)
    plain.sealer(Lane.COLLECTIVE, 2).seal_into(header, b"late", out)
    with pytest.raises(ValueError, match="out of its order"):
        plain.opener(Lane.COLLECTIVE, 1).open_into(header, out, bytearray(4))


def test_counting_counts_every_call_and_byte_and_passes_on_what_came() -> None:
    tally = defaultdict[str, float](float)
    counted, payload = Counted(Plain(), tally), os.urandom(1_000)
    assert [exchange(counted, payload) for _ in range(4)] == [payload] * 4
    assert tally["seal_s"] >= 0
    assert {name: tally[name] for name in ("seal_calls", "open_calls", "seal_bytes", "open_bytes")} == {
        "seal_calls": 4, "open_calls": 4, "seal_bytes": 4_000, "open_bytes": 4_000,
    }  # fmt: skip


class Idle:
    """A group whose all-reduces return at once, and sum nothing."""

    def allreduce(self, _tensors: object, _options: object = None) -> Idle:
        return self

    def wait(self) -> None:
        pass


@pytest.mark.parametrize(
    "cell",
    [
        Cell(kind=Kind.ALL_REDUCE, ranks=2, bytes=4_096),
        Cell(kind=Kind.REPLAY, ranks=2, model="resnet-50", cap_mib=250, dtype="bfloat16"),
    ],
    ids=lambda cell: cell.kind.value,
)
def test_a_wrong_sum_is_found_before_anything_is_timed(cell: Cell) -> None:
    with pytest.raises(ValueError, match="ring gave a wrong sum: nothing of it is measured"):
        Exchange(cell, rank=1).check(Way.RING, Idle())


def test_what_torch_or_a_script_can_call_never_names_other_streams_or_the_bench() -> None:
    """Without AEAD is for whoever constructs an engine by hand; the ways that torch takes do not lead there."""
    for module in (entry, process_group):
        source = inspect.getsource(module)
        assert "streams" not in source
        assert "benchmarks" not in source
    assert "environ" not in inspect.getsource(engine)
