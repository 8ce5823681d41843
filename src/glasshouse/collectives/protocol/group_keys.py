"""Membership of a group, and every key derived from its secret (spec/sealed-collectives.md, sections 2 and 4).

Laws: each key is bound to group name, ordered ranks, world size, incarnation and the fresh contribution of every rank,
so no two initialisations share one; a sealing key is given out once, so its nonces are never counted from zero again;
keys are forgotten in forked children.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from glasshouse.wire.crypto import Suite, derive, lengths_prefixed, sha256, zero

SECRET_BYTES = CONTRIBUTION_BYTES = 32
MAX_RANKS = 4096
MAX_NAME_BYTES = 1024
ALL = 0xFFFF  # the destination of frames that are sealed once for every other rank

_LABEL = b"glasshouse collectives v1 "


class Lane(IntEnum):
    """The two connections between a pair of ranks."""

    COLLECTIVE = 1
    P2P = 2


class _KeyHolder(Protocol):
    def forget(self) -> None: ...


_holders: weakref.WeakSet[_KeyHolder] = weakref.WeakSet()


def forget_in_children(holder: _KeyHolder) -> None:
    """Call `holder.forget()` in every process forked from this one, before anything else runs there.

    A child with the parent's keys and counters would seal different data under the same nonces.
    """
    _holders.add(holder)


def _forget() -> None:
    with contextlib.ExitStack() as every:  # a failure of one keeps no other from forgetting
        for holder in list(_holders):
            every.callback(holder.forget)


if hasattr(os, "register_at_fork"):  # pragma: no branch - every system with fork has it
    os.register_at_fork(after_in_child=_forget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One rank's place in one initialisation of a group."""

    group: str  # the group's name, as torch gives it
    ranks: tuple[int, ...]  # global ranks in the group's order; their number is the world size
    rank: int  # this process's index into `ranks`
    incarnation: int  # distinguishes this initialisation of the group from earlier ones; below 2^64

    def __post_init__(self) -> None:
        if not 1 <= len(self.ranks) <= MAX_RANKS:
            raise ValueError(f"a group has 1 to {MAX_RANKS} ranks, not {len(self.ranks)}")
        if not 0 <= self.rank < len(self.ranks):
            raise ValueError(f"rank {self.rank} is not in a group of {len(self.ranks)}")
        if len(set(self.ranks)) != len(self.ranks) or not all(0 <= rank < 2**32 for rank in self.ranks):
            raise ValueError("the global ranks of a group are different and below 2^32")
        if not 0 <= self.incarnation < 2**64:
            raise ValueError(f"incarnation {self.incarnation} is not below 2^64")
        if len(self.group.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"a group's name has at most {MAX_NAME_BYTES} bytes")

    @property
    def size(self) -> int:
        """The world size."""
        return len(self.ranks)

    @property
    def peers(self) -> tuple[int, ...]:
        """The indices of the other ranks, ascending."""
        return tuple(index for index in range(self.size) if index != self.rank)

    def called(self, index: int) -> str:
        """Return a rank's name in an error: its index, and its global rank where that differs."""
        same = not 0 <= index < self.size or self.ranks[index] == index
        return f"rank {index}" if same else f"rank {index} (global rank {self.ranks[index]})"

    def digest(self) -> bytes:
        """Return the 32 bytes that name group and ordered ranks, but neither incarnation nor the own rank."""
        ranks = b"".join(rank.to_bytes(4, "big") for rank in self.ranks)
        return sha256(lengths_prefixed(_LABEL + b"membership", self.group.encode(), ranks))


def hello_key(secret: bytes | bytearray | memoryview) -> bytes:
    """Return the key that authenticates hellos."""
    return derive(secret, _LABEL + b"hello")


def next_key(key: bytes | bytearray, suite: Suite) -> bytes:
    """Return the traffic key after `key`, from which `key` cannot be derived."""
    return derive(key, _LABEL + b"rekey", suite.value.encode())


class Schedule:
    """The keys of one rank in one initialisation of one group, whose ranks have compared their memberships.

    They follow from the group secret, 32 bytes, and the fresh 32 bytes of every rank, in rank order.

    Raises:
        ValueError: other lengths, or two ranks with the same contribution.
    """

    def __init__(
        self, membership: Membership, secret: bytes | bytearray | memoryview, contributions: Sequence[bytes]
    ) -> None:
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"a group secret has {SECRET_BYTES} bytes")
        if len(contributions) != membership.size or any(len(part) != CONTRIBUTION_BYTES for part in contributions):
            raise ValueError("one contribution of 32 bytes a rank")
        if len(set(contributions)) != len(contributions):
            raise ValueError("two ranks with the same contribution: one of them is an echo")
        self.membership = membership
        self.transcript = sha256(
            lengths_prefixed(
                _LABEL + b"transcript",
                membership.digest(),
                membership.size.to_bytes(4, "big"),
                membership.incarnation.to_bytes(8, "big"),
                b"".join(contributions),
            )
        )
        self._root = bytearray(derive(secret, _LABEL + b"group", self.transcript))
        self._confirmation = bytearray(derive(self._root, _LABEL + b"confirm"))
        self._given: set[tuple[Suite, Lane, int]] = set()
        forget_in_children(self)

    def confirmation(self, lane: Lane, source: int, destination: int) -> bytes:
        """Return the 32 bytes that prove to `destination` that `source` derived the same keys."""
        self._check()
        parts = lengths_prefixed(_LABEL + b"confirm", self.transcript, _place(lane, source, destination))
        return hmac.digest(self._confirmation, parts, "sha256")

    def confirms(self, lane: Lane, source: int, data: bytes | bytearray | memoryview) -> bool:
        """Return whether `data` is the confirmation that `source` owes this rank, in constant time."""
        return hmac.compare_digest(self.confirmation(lane, source, self.membership.rank), bytes(data))

    def traffic_key(self, suite: Suite, lane: Lane, source: int, destination: int) -> bytearray:
        """Return the first key of one stream, 32 bytes that the caller owns and zeroes.

        Raises:
            ValueError: no such stream; or this rank's own sealing key for the second time: a second count of its
                nonces would begin.
        """
        self._check()
        size, rank = self.membership.size, self.membership.rank
        if not 0 <= source < size or not (0 <= destination < size or (destination, lane) == (ALL, Lane.COLLECTIVE)):
            raise ValueError("no such stream")
        if source == destination or (source != rank and destination not in (rank, ALL)):
            raise ValueError("a stream that this rank neither seals nor opens")
        if source == rank:
            if (stream := (suite, lane, destination)) in self._given:
                raise ValueError("a sealing key is given out once")
            self._given.add(stream)
        place = _place(lane, source, destination)
        return bytearray(derive(self._root, _LABEL + b"traffic", suite.value.encode(), place))

    def forget(self) -> None:
        """Zero the keys that others are derived from; derived keys are their holders' to forget."""
        zero(self._root)
        zero(self._confirmation)
        self._root = bytearray()

    def __reduce__(self) -> str:
        raise TypeError("keys are not copied")

    def _check(self) -> None:
        if not self._root:
            raise ValueError("these keys were forgotten: the group was closed, or the process forked")


def _place(lane: Lane, source: int, destination: int) -> bytes:
    return bytes([lane]) + source.to_bytes(2, "big") + destination.to_bytes(2, "big")
