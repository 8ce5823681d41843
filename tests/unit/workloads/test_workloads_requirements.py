"""What another machine has, held against what a job needs: by what it says is installed there."""

from __future__ import annotations

import pytest

from glasshouse.workloads.registry import missing_frameworks
from glasshouse.workloads.requirements import lacking, old_driver

THERE = {"numpy": "2.1.0", "ruamel-yaml": "0.18", "torch": "2.9.0"}


def test_what_is_not_there_is_named() -> None:
    assert missing_frameworks("mlp", THERE) == []
    assert missing_frameworks("lora", THERE) == ["transformers", "peft", "safetensors"]
    assert missing_frameworks("mlp", {}) == ["torch"]
    assert lacking(["numpy>=2", "Ruamel.YAML"], THERE) == []
    assert lacking(["numpy<2", "scipy"], THERE) == [
        "numpy<2 is wanted and 2.1.0 is installed",
        "scipy is not installed",
    ]


@pytest.mark.parametrize(
    ("there", "needs"),
    [
        ({"torch": "2.9.0+cu128", "nvidia-driver": "470.57.02"}, "525"),
        ({"torch": "2.9.0+cu130", "nvidia-driver": "570.86"}, "580"),
        ({"torch": "2.9.0", "nvidia-cuda-runtime-cu12": "12.8.90", "nvidia-driver": "470.57.02"}, "525"),
        ({"torch": "2.10.0", "nvidia-cuda-runtime": "13.0.48", "nvidia-driver": "570"}, "580"),
        ({"torch": "2.9.0+cu128", "nvidia-driver": "525.60.13"}, None),
        ({"torch": "2.9.0+cu128"}, None),
        ({"torch": "2.9.0+cpu", "nvidia-cuda-runtime-cu12": "12.8.90", "nvidia-driver": "470"}, None),
        ({"nvidia-cuda-runtime-cu12": "12.8.90", "nvidia-driver": "470"}, None),
        ({"torch": "2.9.0+cu128", "nvidia-driver": "of our own"}, None),
        ({"torch": "2.9.0", "nvidia-cuda-runtime": "x", "nvidia-driver": "470"}, None),
    ],
)
def test_a_driver_that_is_too_old_for_the_pytorch_there_is_told(there: dict[str, str], needs: str | None) -> None:
    line = old_driver(there)
    assert (line is None) == (needs is None)
    assert needs is None or (line is not None and f"takes driver {needs} or newer" in line)
