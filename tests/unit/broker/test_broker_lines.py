"""Lines at the gate: legs one after the other, and stories of those who would have it go on twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.broker.client.owner_client import Reply
from glasshouse.broker.http_api import LineRequest
from glasshouse.errors import Code, GlasshouseError
from glasshouse.wire.crypto import key_id
from simulators.direct_gate import DirectGate, LineOwner


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[DirectGate]:
    running = DirectGate(tmp_path / "data")
    yield running
    running.close()


@pytest.fixture
def owner(gate: DirectGate) -> LineOwner:
    return LineOwner(gate)


def refused(reply: Reply) -> Code:
    assert reply.status != 200
    return reply.problem().code


def test_the_second_leg_begins_when_the_first_is_over_and_does_not_count(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg()
    start = first.opened(first.attest())
    assert (start.leg, start.seq, start.previous) == (1, 0, None)
    assert first.opened(first.attest()) == start, "a lost answer is repeated"
    asked = LineRequest(id=start.id, leg=2)
    asked_with = LineRequest(id=start.id, leg=2, order=owner.order(asked))
    with pytest.raises(GlasshouseError) as caught:
        owner.leg(asked_with)
    assert caught.value.code is Code.LINE_BUSY
    gate.advance(661)
    second = owner.leg(asked_with)
    start = second.opened(second.attest())
    assert (start.leg, start.previous) == (2, key_id(first.actor.evidence.public))
    assert refused(first.attest()) is Code.LINE_FORKED
    assert owner.releases() == 1
