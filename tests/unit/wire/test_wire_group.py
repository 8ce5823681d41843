"""Which ranks train together, and the secret that they share."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from glasshouse.errors import Code, FormatError
from glasshouse.wire.group import MAX_MACHINES, MAX_RANKS, Group

GROUP = Group(id=bytes(range(32)), machines=3, machine=2, ranks=4)


def test_a_group_travels_whole_and_counts_its_ranks() -> None:
    assert Group.from_json(GROUP.to_json()) == GROUP
    assert (GROUP.world_size, GROUP.first_rank) == (12, 8)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "00" * 31},
        {"id": "AB" * 32},
        {"machines": 0},
        {"machines": MAX_MACHINES + 1},
        {"machine": 3},
        {"machine": -1},
        {"ranks": 0},
        {"ranks": MAX_RANKS + 1},
        {"ranks": True},
        {"rank": 1},
    ],
)
def test_what_is_no_group_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as refusal:
        Group.from_json({**GROUP.to_json(), **change})
    assert refusal.value.code is Code.SCHEMA


def test_the_secret_is_hkdf_over_the_package_key_bound_to_group_and_world() -> None:
    """As spec/key-release.md, section 5.4, has it, computed without our own code."""
    key = secrets.token_bytes(32)
    parts = (b"glasshouse group v1", GROUP.id, (12).to_bytes(4, "big"))
    info = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    expected = HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(key)
    assert GROUP.secret(key) == expected
    # Every machine of the group derives the same; another group, world or package another.
    assert replace(GROUP, machine=0).secret(key) == expected
    others = [
        replace(GROUP, id=bytes(32)).secret(key),
        replace(GROUP, ranks=5).secret(key),
        GROUP.secret(secrets.token_bytes(32)),
    ]
    assert len({expected, *others}) == 4
