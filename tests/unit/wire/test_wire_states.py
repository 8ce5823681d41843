"""The state table, levels, floors and derived keys: small tables that everything else rests on."""

from __future__ import annotations

import hashlib
import hmac
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire.crypto import derive, lengths_prefixed, sha256
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.wire.states import NEXT, Outcome, State, is_legal

ROOT = Path(__file__).resolve().parents[3]


def test_a_run_goes_forward_step_by_step_or_gives_up() -> None:
    way = list(State)
    for before in State:
        for after in State:
            step = way.index(after) == way.index(before) + 1
            gives_up = after is State.ZEROIZING and way.index(before) < way.index(State.ZEROIZING)
            assert is_legal(before, after) is (step or gives_up)


def test_every_state_leads_to_the_end_and_the_end_leads_nowhere() -> None:
    assert NEXT[State.ZEROIZED] == frozenset()
    assert NEXT.keys() == set(State)
    for state in State:
        while state is not State.ZEROIZED:
            assert State.ZEROIZING in NEXT[state] or state is State.ZEROIZING
            state = State.ZEROIZING if state is not State.ZEROIZING else State.ZEROIZED


def test_the_specification_prints_the_same_table() -> None:
    text = (ROOT / "spec" / "evidence.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, flags=re.MULTILINE)
    table = {name: set(re.findall(r"`(\w+)`", cells)) for name, cells in rows if name in set(State)}
    assert table == {state.value: {after.value for after in NEXT[state]} for state in State}
    assert " → ".join(state.value for state in State if state is not State.ZEROIZED) in text


def test_outcomes_are_those_of_the_specification() -> None:
    text = (ROOT / "spec" / "evidence.md").read_text()
    assert all(f"`{outcome.value}`" in text for outcome in Outcome)


@pytest.mark.parametrize("levels", [Assurance, Profile])
def test_levels_are_ordered_from_weak_to_strong(levels: Any) -> None:
    for weaker, stronger in pairwise(levels):
        assert stronger.at_least(weaker)
        assert not weaker.at_least(stronger)
        assert weaker.at_least(weaker)


def floor(**changes: Any) -> Floor:
    return Floor(**{"assurance": Assurance.SOFTWARE, "profile": Profile.STANDARD, "egress": (), **changes})


def test_a_floor_survives_its_round_trip() -> None:
    for one in (floor(), floor(profile=Profile.STRICT, egress=("10.0.0.1:443", "[::1]:80", "hub.example:8443"))):
        assert Floor.from_json(one.to_json()) == one
        assert one.sha256 == Floor.from_json(one.to_json()).sha256
    assert floor().sha256 != floor(profile=Profile.STRICT).sha256


def test_no_floor_switches_hardening_off() -> None:
    with pytest.raises(FormatError) as caught:
        floor(profile=Profile.OFF)
    assert caught.value.code is Code.POLICY_IMPOSSIBLE


@pytest.mark.parametrize(
    "egress",
    [("b:1", "a:1"), ("a:1", "a:1"), ("host",), ("host:",), (":1",), ("a b:1",), ("*:1",), ("http://a:1",), ("é:1",)],
    ids=str,
)
def test_egress_names_hosts_and_ports_and_nothing_else(egress: tuple[str, ...]) -> None:
    with pytest.raises(FormatError) as caught:
        floor(egress=egress)
    assert caught.value.code is Code.SCHEMA


def test_egress_is_bounded() -> None:
    peers = tuple(sorted(f"host-{number}:1" for number in range(17)))
    assert floor(egress=peers[:16]).egress == peers[:16]
    with pytest.raises(FormatError):
        floor(egress=peers)


@pytest.mark.parametrize("name", ["assurance", "profile", "egress"])
def test_a_floor_without_a_demand_is_none(name: str) -> None:
    document = {key: value for key, value in floor().to_json().items() if key != name}
    with pytest.raises(FormatError):
        Floor.from_json(document)


def test_different_parts_never_give_the_same_bytes() -> None:
    assert lengths_prefixed(b"ab", b"c") != lengths_prefixed(b"a", b"bc")
    assert lengths_prefixed(b"") != lengths_prefixed()
    assert lengths_prefixed(b"a" * 3) == (3).to_bytes(8, "big") + b"aaa"


def test_derive_is_hkdf_of_rfc_5869_over_the_joined_parts() -> None:
    key, info = b"k" * 32, (b"label", b"bound to")
    unsalted = hmac.digest(bytes(32), key, hashlib.sha256)
    expected = hmac.digest(unsalted, lengths_prefixed(*info) + b"\x01", hashlib.sha256)
    assert derive(key, *info) == expected
    assert derive(key, b"label", b"other") != derive(key, b"labelother")
    assert sha256(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
