"""A floor is what an owner can sign, and nothing that protects nothing."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, FormatError
from glasshouse.wire.policy import Assurance, Floor, Profile


def floor(**changes: object) -> Floor:
    values: dict[str, object] = {"assurance": Assurance.SOFTWARE, "profile": Profile.STANDARD, "egress": ()}
    return Floor(**(values | changes))  # type: ignore[arg-type]


def test_levels_are_ordered_from_weak_to_strong() -> None:
    for levels in (Assurance, Profile):
        ordered = list(levels)
        for low, weaker in enumerate(ordered):
            for high, stronger in enumerate(ordered):
                assert stronger.at_least(weaker) == (high >= low)


@pytest.mark.parametrize("egress", [(), ("hub.example:443",), ("10.0.0.1:80", "[::1]:8443"), ("group",)])
def test_a_floor_comes_back_as_it_was_written(egress: tuple[str, ...]) -> None:
    written = floor(egress=egress)
    assert Floor.from_json(written.to_json()) == written


def test_hardening_off_is_no_floor() -> None:
    with pytest.raises(FormatError) as caught:
        floor(profile=Profile.OFF)
    assert caught.value.code is Code.POLICY_IMPOSSIBLE


@pytest.mark.parametrize(
    "egress",
    [
        ("host",),
        ("groups",),
        ("group", "group"),
        ("host:0",),
        ("host:65536",),
        ("host:99999",),
        ("host:",),
        (":80",),
        ("ho st:80",),
        ("b:1", "a:1"),
        ("a:1", "a:1"),
        tuple(f"h{number:02}:1" for number in range(17)),
    ],
)
def test_egress_that_is_not_a_short_sorted_list_of_peers_is_refused(egress: tuple[str, ...]) -> None:
    with pytest.raises(FormatError) as caught:
        floor(egress=egress)
    assert caught.value.code is Code.SCHEMA


def test_every_demand_is_in_the_digest() -> None:
    digests = {
        floor().sha256,
        floor(assurance=Assurance.TPM).sha256,
        floor(profile=Profile.STRICT).sha256,
        floor(egress=("a:1",)).sha256,
        floor(disk=True).sha256,
    }
    assert len(digests) == 5


def test_that_files_may_lie_on_a_disk_is_said_and_that_they_may_not_is_left_out() -> None:
    assert Floor.from_json(floor(disk=True).to_json()) == floor(disk=True)
    assert floor(disk=True).to_json()["workspace"] == "disk"
    assert "workspace" not in floor().to_json()
    for word in ("memory", "", None, True):
        with pytest.raises(FormatError, match=r"floor\.workspace"):
            Floor.from_json({**floor().to_json(), "workspace": word})


@pytest.mark.parametrize("change", [{"assurance": "none"}, {"profile": "paranoid"}, {"more": 1}, {"egress": None}])
def test_a_floor_with_words_that_nobody_knows_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        Floor.from_json(floor().to_json() | change)  # type: ignore[operator, arg-type]
