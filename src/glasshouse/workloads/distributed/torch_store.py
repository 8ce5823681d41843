"""torch's store for a rank without a network: each question goes to the worker over the rank's own channel.

Laws: as TCPStore, but for the size of a value (`rank_store.MAX_VALUE_BYTES`); a question has the limit in time of its
store; threads may ask side by side.
Source: `rank_store`; the names are those by which torch's C++ calls a store written in Python.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from glasshouse.task.channel import Message
from glasshouse.wire.canonical import b64decode, b64encode
from glasshouse.workloads.distributed.rank_channel import RankChannel
from glasshouse.workloads.distributed.rank_store import MAX_KEY_CHARS, MAX_KEYS, MAX_VALUE_BYTES


class ChannelStore(dist.Store):  # type: ignore[misc]  # torch is not typed
    """The store of one start of all ranks."""

    def __init__(self, channel: RankChannel) -> None:
        super().__init__()
        self._channel = channel

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value."""
        self._ask("set", [key], value=_text(value))

    def get(self, key: str) -> bytes:
        """Return the value, once there is one; raises `DistStoreError` where there is none in time."""
        return b64decode(str(self._ask("get", [key])["value"]))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 where there is none, and return the sum."""
        return _count(self._ask("add", [key], amount=amount))

    def append(self, key: str, value: str | bytes) -> None:
        """Put a value behind the one that is there."""
        self._ask("append", [key], value=_text(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put a value where the expected one is; return the one that is there then."""
        answer = self._ask("compare", [key], expected=_text(expected), value=_text(desired))
        return b64decode(str(answer["value"]))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether every key is there."""
        return all(_count(self._ask("check", some)) == len(some) for some in _portions(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when every key is there; raises `DistStoreError` where one is not in time."""
        for some in _portions(keys):
            self._ask("wait", some, timeout=timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return _count(self._ask("delete", [key])) > 0

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return _count(self._ask("count", []))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values, each as `get`."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Put several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return that there are `append` and the two for several."""
        return True

    def clone(self) -> ChannelStore:
        """Return this store, which several threads may use."""
        return self

    deleteKey = delete_key  # noqa: N815 - as torch's C++ calls it, and those below
    getNumKeys = num_keys  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815
    multiGet = multi_get  # noqa: N815
    multiSet = multi_set  # noqa: N815

    def _ask(self, what: str, keys: Sequence[str], *, timeout: timedelta | None = None, **words: Any) -> Message:
        for key in keys:
            if len(key) > MAX_KEY_CHARS or "\x00" in key:
                raise ValueError(f"a name in the store has at most {MAX_KEY_CHARS} characters, and no NUL among them")
        limit: timedelta = self.timeout if timeout is None else timeout
        try:
            answer = self._channel.ask_store({"keys": list(keys), "what": what, **words}, limit.total_seconds())
        except queue.Empty:
            shown = ", ".join(keys)[:MAX_KEY_CHARS]
            raise dist.DistStoreError(f"wait timeout after {limit.total_seconds():g} s, keys: {shown}") from None
        except OSError:
            raise dist.DistNetworkError("the worker that keeps the store of the ranks is gone") from None
        if "refused" in answer:
            raise ValueError(str(answer["refused"]))
        return answer


def _text(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MAX_VALUE_BYTES:
        raise ValueError(
            f"a value of {len(data)} bytes: the store of ranks without a network takes {MAX_VALUE_BYTES}; send it by a "
            "collective"
        )
    return b64encode(data)


def _count(answer: Message) -> int:
    count = answer["count"]
    assert isinstance(count, int)  # noqa: S101 - written by the worker
    return count


def _portions(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[low : low + MAX_KEYS]) for low in range(0, len(keys), MAX_KEYS)]
