"""PyTorch's own tests of torch.distributed, all that need no GPU, over `sealed`."""

from __future__ import annotations

from pathlib import Path

from tools import pytorch_suite
from tools.sealed_ranks import in_ranks

LEAST_PASSED = 90


def test_pytorchs_own_tests_pass_over_sealed(tmp_path: Path) -> None:
    every = pytorch_suite.names()
    found: dict[str, list[str]] = {}
    for first in range(0, len(every), 20):
        some = every[first : first + 20]
        answers = in_ranks(pytorch_suite.results, pytorch_suite.RANKS, str(tmp_path), some, backend=None, limit_s=900)
        found |= {name: [answer[name] for answer in answers] for name in some}
    failed = {
        name: results
        for name, results in found.items()
        if not all(one.startswith(("passed", "skipped")) for one in results)
    }
    assert failed == {}
    assert sum(results == ["passed"] * pytorch_suite.RANKS for results in found.values()) >= LEAST_PASSED
