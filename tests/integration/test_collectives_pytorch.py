"""Some of PyTorch's own tests of torch.distributed over `sealed`; all of them are in `make test-long`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import pytorch_suite
from tools.sealed_ranks import in_ranks

SLICE = [
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_full_group",
    "test_all_gather_coalesced_simple",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_sum",
    "test_all_to_all_single_unequal_split",
    "test_barrier_timeout_full_group",
    "test_gather_full_group",
    "test_irecv",
    "test_scatter_full_group",
    "test_send_recv_any_source",
]


@pytest.mark.smoke
def test_a_slice_of_pytorchs_own_tests_passes_over_sealed(tmp_path: Path) -> None:
    answers = in_ranks(pytorch_suite.results, pytorch_suite.RANKS, str(tmp_path), SLICE, backend=None)
    assert answers == [dict.fromkeys(SLICE, "passed")] * pytorch_suite.RANKS
