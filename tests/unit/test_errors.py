"""Errors go from one process to another as they are."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from glasshouse.errors import Code, CollectiveError, GlasshouseError, PlatformError, UsageError


def lose_a_rank() -> None:
    raise CollectiveError(Code.RANK_LOST, "rank 3 is gone", hint="start it again", rank=3)


def test_an_error_of_another_process_arrives_with_all_that_it_says() -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes,
        pytest.raises(CollectiveError, match=r"rank 3 is gone \[rank-lost\]") as raised,
    ):
        processes.submit(lose_a_rank).result()
    error = raised.value
    assert (error.code, error.hint, error.rank, error.fault) == (Code.RANK_LOST, "start it again", 3, "peer")
    assert error.__notes__ == ["start it again"]


@pytest.mark.parametrize("kind", [GlasshouseError, UsageError, PlatformError, CollectiveError])
def test_every_kind_can_be_copied_and_pickled(kind: type[GlasshouseError]) -> None:
    error = kind(Code.USAGE, "what happened", hint="what to do")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == str(error)
        assert vars(again) == vars(error)
