"""A signed request that is changed anywhere, by anyone on the way, is nobody's."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, RefusedError
from glasshouse.handshake.owner_api import StaleRequestError, authenticate, sign_request
from glasshouse.wire.crypto import SigningKey, key_id

OWNER, GATE = SigningKey(b"\x01" * 32), SigningKey(b"\x02" * 32)
NOW_US = 1_900_000_000_000_000
TARGET = "/v1/groups"


def taken(authorization: str, *, now_us: int = NOW_US) -> bytes:
    request = authenticate(
        authorization,
        owners={key_id(OWNER.public): OWNER.public},
        gate_public=GATE.public,
        method="POST",
        target=TARGET,
        now_us=now_us,
    )
    return request.owner


def signed(target: str = TARGET) -> str:
    return sign_request(OWNER, gate_public=GATE.public, method="POST", target=target, body=b"{}", serial_us=NOW_US)


def test_no_character_of_it_can_be_changed() -> None:
    good = signed()
    assert taken(good) == OWNER.public
    for place, letter in enumerate(good):
        other = "A" if letter != "A" else "B"
        with pytest.raises(RefusedError) as caught:
            taken(good[:place] + other + good[place + 1 :])
        assert caught.value.code is Code.OWNER_REQUEST


def test_a_forged_one_learns_nothing_of_the_gates_clock() -> None:
    late = NOW_US + 3_600_000_000
    with pytest.raises(StaleRequestError):
        taken(signed(), now_us=late)
    forged = signed().rpartition(".")[0] + "." + "A" * 86
    with pytest.raises(RefusedError) as caught:
        taken(forged, now_us=late)
    assert caught.value.code is Code.OWNER_REQUEST


@pytest.mark.parametrize("target", ["/v1/groups/../broker", "/v1/Groups", "//v1/groups", "/v1/groups?after=x", "/v1/"])
def test_what_no_gate_has_is_not_signed(target: str) -> None:
    with pytest.raises(ValueError, match="no gate has"):
        signed(target)
