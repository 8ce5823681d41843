"""The Merkle tree against the published test tree of Certificate Transparency and a naive reading of RFC 9162."""

from __future__ import annotations

import hashlib

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire.merkle import EMPTY_ROOT, Tree, leaf_hash, verify_consistency, verify_inclusion

LEAVES = [
    b"",
    b"\x00",
    b"\x10",
    b"\x20\x21",
    b"\x30\x31",
    b"\x40\x41\x42\x43",
    bytes(range(0x50, 0x58)),
    bytes(range(0x60, 0x70)),
]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def naive_root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 9162 section 2.1.1, word for word."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\x01" + naive_root(leaves[:split]) + naive_root(leaves[split:])).digest()


def naive_path(index: int, leaves: list[bytes]) -> list[bytes]:
    """PATH of RFC 9162 section 2.1.3.1, word for word."""
    if len(leaves) == 1:
        return []
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    if index < split:
        return [*naive_path(index, leaves[:split]), naive_root(leaves[split:])]
    return [*naive_path(index - split, leaves[split:]), naive_root(leaves[:split])]


def naive_proof(old: int, leaves: list[bytes], complete: bool = True) -> list[bytes]:
    """SUBPROOF of RFC 9162 section 2.1.4.1, word for word."""
    if old == len(leaves):
        return [] if complete else [naive_root(leaves)]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    if old <= split:
        return [*naive_proof(old, leaves[:split], complete), naive_root(leaves[split:])]
    return [*naive_proof(old - split, leaves[split:], False), naive_root(leaves[:split])]


def tree_of(leaves: list[bytes]) -> Tree:
    tree = Tree()
    for leaf in leaves:
        tree.append(leaf_hash(leaf))
    return tree


def some_leaves(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


def test_the_roots_of_the_published_tree() -> None:
    tree = tree_of(LEAVES)
    assert [tree.root(size).hex() for size in range(9)] == ROOTS
    assert tree.root(0) == EMPTY_ROOT
    assert len(tree) == 8


def test_roots_and_proofs_are_those_of_the_rfc_at_every_size() -> None:
    leaves = some_leaves(33)
    tree = tree_of(leaves)
    for size in range(1, 34):
        assert tree.root(size) == naive_root(leaves[:size])
        for index in range(size):
            assert tree.inclusion_proof(index, size) == naive_path(index, leaves[:size])
        for old in range(1, size + 1):
            assert tree.consistency_proof(old, size) == naive_proof(old, leaves[:size])


def test_every_proof_verifies_for_what_it_proves_and_for_nothing_else() -> None:
    leaves = some_leaves(17)
    tree = tree_of(leaves)
    for size in range(1, 18):
        root = tree.root(size)
        for index in range(size):
            proof = tree.inclusion_proof(index, size)
            leaf = leaf_hash(leaves[index])
            verify_inclusion(leaf=leaf, index=index, size=size, root=root, proof=proof)
            for wrong in range(size + 1):
                if wrong != index:
                    refused_inclusion(leaf, wrong, size, root, proof)
        for old in range(1, size + 1):
            proof = tree.consistency_proof(old, size)
            verify_consistency(old=old, new=size, old_root=tree.root(old), new_root=root, proof=proof)
            for wrong in range(1, size + 1):
                if wrong != old:
                    refused_consistency(wrong, size, tree.root(old), root, proof)


def refused_inclusion(leaf: bytes, index: int, size: int, root: bytes, proof: list[bytes]) -> None:
    with pytest.raises(FormatError) as caught:
        verify_inclusion(leaf=leaf, index=index, size=size, root=root, proof=proof)
    assert caught.value.code is Code.LOG_INVALID


def refused_consistency(old: int, new: int, old_root: bytes, new_root: bytes, proof: list[bytes]) -> None:
    with pytest.raises(FormatError) as caught:
        verify_consistency(old=old, new=new, old_root=old_root, new_root=new_root, proof=proof)
    assert caught.value.code is Code.LOG_INVALID


def altered(proof: list[bytes]) -> list[list[bytes]]:
    """Everything an attacker might do to a proof without a hash collision."""
    found = [[*proof, bytes(32)], [bytes(32), *proof]]
    for at in range(len(proof)):
        found.append(proof[:at] + proof[at + 1 :])
        found.append([*proof[:at], bytes(32), *proof[at + 1 :]])
        found.append([*proof[:at], proof[at], *proof[at:]])
        if at:
            swapped = [*proof]
            swapped[at - 1], swapped[at] = swapped[at], swapped[at - 1]
            found.append(swapped)
    return found


def test_an_altered_proof_proves_nothing() -> None:
    leaves = some_leaves(13)
    tree = tree_of(leaves)
    root = tree.root()
    for index in range(13):
        for proof in altered(tree.inclusion_proof(index, 13)):
            refused_inclusion(leaf_hash(leaves[index]), index, 13, root, proof)
    for old in range(1, 13):
        for proof in altered(tree.consistency_proof(old, 13)):
            refused_consistency(old, 13, tree.root(old), root, proof)


def test_a_rewritten_history_is_not_consistent() -> None:
    honest = tree_of(some_leaves(9))
    leaves = some_leaves(20)
    leaves[4] = b"rewritten"
    forged = tree_of(leaves)
    for old in range(5, 10):
        proof = forged.consistency_proof(old, 20)
        refused_consistency(old, 20, honest.root(old), forged.root(), proof)


def test_an_interior_node_is_not_a_leaf() -> None:
    tree = tree_of([b"a", b"b"])
    pair = leaf_hash(b"a") + leaf_hash(b"b")
    assert leaf_hash(pair) != tree.root()


def test_sizes_that_make_no_sense() -> None:
    tree = tree_of(some_leaves(4))
    for call in (
        lambda: tree.root(5),
        lambda: tree.root(-1),
        lambda: tree.inclusion_proof(4, 4),
        lambda: tree.inclusion_proof(0, 5),
        lambda: tree.consistency_proof(0, 4),
        lambda: tree.consistency_proof(3, 2),
        lambda: tree.consistency_proof(1, 5),
    ):
        with pytest.raises(ValueError, match="no such"):
            call()
    refused_inclusion(bytes(32), 0, 0, EMPTY_ROOT, [])
    refused_inclusion(bytes(32), -1, 1, bytes(32), [])
    refused_consistency(2, 1, bytes(32), bytes(32), [])
    refused_consistency(-1, 1, bytes(32), bytes(32), [])
    refused_consistency(1, 2, bytes(32), bytes(32), [])


def test_from_nothing_and_between_equals_the_proof_is_empty() -> None:
    root = tree_of(some_leaves(3)).root()
    verify_consistency(old=0, new=3, old_root=EMPTY_ROOT, new_root=root, proof=[])
    verify_consistency(old=3, new=3, old_root=root, new_root=root, proof=[])
    refused_consistency(0, 3, bytes(32), root, [])
    refused_consistency(0, 3, EMPTY_ROOT, root, [bytes(32)])
    refused_consistency(3, 3, root, bytes(32), [])
    refused_consistency(3, 3, root, root, [bytes(32)])
