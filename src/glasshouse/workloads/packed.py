"""Which files of a packed folder are its model; needs no framework."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import BinaryIO

from glasshouse.errors import Code, UsageError

__all__ = ["SIDE_FILES", "weight_files"]

SIDE_FILES = (".json", ".txt", ".model", ".jinja")
"""Endings of what belongs to a model beside its weights."""
_MAX_INDEX_BYTES = 64 << 20
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def weight_files(open_file: Callable[[str], BinaryIO], prefix: str, names: list[str]) -> list[str]:
    """Return the names of a model's weights, in the order in which they are read.

    Args:
        open_file: opens one of `names`.
        prefix: of the model's folder, with a slash at its end.
        names: everything in it.

    Raises:
        UsageError: `file-missing` where there are none, or not all that its index names; `job-invalid` for an index
            that is none.
    """
    index = prefix + "model.safetensors.index.json"
    if index in names:
        with open_file(index) as stream:
            wanted = [prefix + shard for shard in _shards(stream, index)]
    else:
        wanted = [name for name in names if _WEIGHTS.fullmatch(PurePosixPath(name).name)]
    missing = [name for name in wanted if name not in names]
    if missing or not wanted:
        raise UsageError(
            Code.FILE_MISSING,
            f"the package holds no weights named {missing[0] if missing else prefix + 'model.safetensors'!r}",
            hint="add the model's folder to [inputs]; weights as torch pickles are not loaded",
        )
    return wanted


def _shards(stream: BinaryIO, index: str) -> list[str]:
    try:
        shards = set(json.loads(stream.read(_MAX_INDEX_BYTES))["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise UsageError(Code.JOB_INVALID, f"{index} is no index of weights") from None
    return sorted(map(str, shards))
