"""The Merkle tree of RFC 9162 section 2.1: roots, inclusion proofs, consistency proofs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from glasshouse.errors import Code, FormatError

EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(data: bytes) -> bytes:
    """Return the hash of a leaf (RFC 9162 section 2.1.1)."""
    return hashlib.sha256(b"\x00" + data).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class Tree:
    """An append-only tree that keeps every complete subtree's hash.

    Appending costs amortised O(1) hashes, a root or proof O(log n); memory is 64 bytes a leaf.
    """

    def __init__(self) -> None:
        self._levels: list[list[bytes]] = [[]]

    def __len__(self) -> int:
        return len(self._levels[0])

    def append(self, leaf: bytes) -> int:
        """Append a leaf **hash** and return its index."""
        index = len(self)
        level = 0
        self._levels[0].append(leaf)
        while len(self._levels[level]) % 2 == 0:
            node = _node(self._levels[level][-2], self._levels[level][-1])
            level += 1
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(node)
        return index

    def root(self, size: int | None = None) -> bytes:
        """Return the root over the first `size` leaves (all by default)."""
        count = len(self) if size is None else size
        if not 0 <= count <= len(self):
            raise ValueError("no such tree size")
        return self._range(0, count) if count else EMPTY_ROOT

    def inclusion_proof(self, index: int, size: int) -> list[bytes]:
        """Return PATH(index, D[size]) of RFC 9162 section 2.1.3.1."""
        if not 0 <= index < size <= len(self):
            raise ValueError("no such leaf")
        proof: list[bytes] = []
        low, high = 0, size
        while high - low > 1:
            middle = low + _split(high - low)
            if index < middle:
                proof.append(self._range(middle, high))
                high = middle
            else:
                proof.append(self._range(low, middle))
                low = middle
        return proof[::-1]

    def consistency_proof(self, old: int, new: int) -> list[bytes]:
        """Return PROOF(old, D[new]) of RFC 9162 section 2.1.4.1."""
        if not 0 < old <= new <= len(self):
            raise ValueError("no such tree sizes")
        proof: list[bytes] = []
        low, high, complete = 0, new, True
        while old != high:
            middle = low + _split(high - low)
            if old <= middle:
                proof.append(self._range(middle, high))
                high = middle
            else:
                proof.append(self._range(low, middle))
                low, complete = middle, False
        if not complete:
            proof.append(self._range(low, high))
        return proof[::-1]

    def _range(self, low: int, high: int) -> bytes:
        width = high - low
        level = width.bit_length() - 1
        if width == 1 << level and low % width == 0 and low >> level < len(self._levels[level]):
            return self._levels[level][low >> level]
        middle = low + _split(width)
        return _node(self._range(low, middle), self._range(middle, high))


def _split(width: int) -> int:
    return 1 << (width - 1).bit_length() - 1


def root_of(leaves: Iterable[bytes]) -> tuple[int, bytes]:
    """Return size and root of the tree over leaf **hashes**; memory is O(log n)."""
    count, complete = 0, list[bytes]()
    for leaf in leaves:
        count, node = count + 1, leaf
        for _ in range((count & -count).bit_length() - 1):
            node = _node(complete.pop(), node)
        complete.append(node)
    if not complete:
        return 0, EMPTY_ROOT
    root = complete.pop()
    while complete:
        root = _node(complete.pop(), root)
    return count, root


def verify_inclusion(*, leaf: bytes, index: int, size: int, root: bytes, proof: Sequence[bytes]) -> None:
    """Check that a leaf hash is at `index` of the tree (RFC 9162 section 2.1.3.2).

    Raises:
        FormatError: `log-invalid`.
    """
    if not 0 <= index < size:
        raise _broken("inclusion")
    node = leaf
    for step, is_left in _sides(index, size - 1, proof, "inclusion"):
        node = _node(step, node) if is_left else _node(node, step)
    if node != root:
        raise _broken("inclusion")


def verify_consistency(*, old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Check that the larger tree extends the smaller one (RFC 9162 section 2.1.4.2).

    Raises:
        FormatError: `log-invalid`.
    """
    if not 0 <= old <= new:
        raise _broken("consistency")
    if old == 0 or old == new:
        if proof or (old == new and old_root != new_root) or (old == 0 and old_root != EMPTY_ROOT):
            raise _broken("consistency")
        return
    steps = list(proof)
    if old & (old - 1) == 0:
        steps.insert(0, old_root)
    if not steps:
        raise _broken("consistency")
    position, last = old - 1, new - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    first = second = steps[0]
    for step, is_left in _sides(position, last, steps[1:], "consistency"):
        if is_left:
            first, second = _node(step, first), _node(step, second)
        else:
            second = _node(second, step)
    if first != old_root or second != new_root:
        raise _broken("consistency")


def _sides(position: int, last: int, steps: Sequence[bytes], kind: str) -> Iterator[tuple[bytes, bool]]:
    """Yield each step of a proof and whether it is a left sibling; refuse more or fewer steps than lead to the root."""
    for step in steps:
        if last == 0:
            raise _broken(kind)
        is_left = bool(position & 1) or position == last
        yield step, is_left
        while is_left and not position & 1 and position:
            position, last = position >> 1, last >> 1
        position, last = position >> 1, last >> 1
    if last:
        raise _broken(kind)


def _broken(kind: str) -> FormatError:
    return FormatError(Code.LOG_INVALID, f"a Merkle {kind} proof that does not hold")
