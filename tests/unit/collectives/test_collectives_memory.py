"""Tensors seen as bytes: what is read and written lies where it should, and nobody's storage is held."""

from __future__ import annotations

import pytest
import torch

from glasshouse.collectives.operations.regions import HostRegion, Span, flat
from glasshouse.collectives.protocol.frame_memory import Buffers, allocate, bytes_of


def test_a_view_of_a_tensor_leaves_its_storage_resizable() -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    view = bytes_of(tensor)
    view[4:8] = (7).to_bytes(4, "little")
    assert tensor.tolist() == [0, 7, 2, 3]
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().size() == 0


def test_only_contiguous_tensors_in_host_memory_are_seen() -> None:
    for tensor in (torch.zeros(4, 4).t()[1:], torch.zeros(3, device="meta")):
        with pytest.raises(ValueError, match="contiguous"):
            bytes_of(tensor)
    with pytest.raises(ValueError, match="contiguous"):
        flat(torch.zeros(4, 4)[:, 1])
    assert len(bytes_of(torch.empty(0))) == 0


def test_several_tensors_are_one_run_of_bytes_that_pieces_are_read_from_and_written_to() -> None:
    tensors = [torch.arange(3.0), torch.empty(0), torch.arange(3.0, 10.0).view(7, 1), torch.tensor(10.0)]
    region = HostRegion(tensors)
    assert region.nbytes == 44
    assert region.read(8, 20).tolist() == [2, 3, 4]
    assert region.direct(8, 20) is None
    assert region.direct(12, 40).tolist() == list(range(3, 10))
    region.write(36, 44, torch.tensor([-1.0, -2.0]))
    assert tensors[2][-1].item() == -1
    assert tensors[3].item() == -2
    region.zero()
    assert all((tensor == 0).all() for tensor in tensors)


def test_a_span_is_cut_into_chunks_and_an_empty_one_has_none() -> None:
    region = HostRegion([torch.zeros(100)])
    span = Span(region, 40, 400, 128)
    assert [span.bounds(chunk) for chunk in range(span.count)] == [(40, 168), (168, 296), (296, 400)]
    assert span.size(2) == 104
    assert Span(region, 40, 40, 128).count == 0


def test_buffers_are_bounded_and_the_last_one_used_is_used_next() -> None:
    buffers = Buffers(100, 2)
    first, second = buffers.take(), buffers.take()
    assert first is not None
    assert second is not None
    assert not buffers.available
    assert buffers.take() is None
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.take() is second


def test_fresh_memory_is_zero_and_writable() -> None:
    for size in (1, 3 << 20):
        memory = allocate(size)
        assert len(memory) == size
        assert memory[-1] == 0
        memory[-1] = 1
