"""A run's delegation: it counts at its broker, also where another run of the same owner came in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.handshake.delegation import Delegation
from glasshouse.jobs.supervise import launching
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope

OWNER, BROKER, STORE = SigningKey.generate(), SigningKey.generate(), bytes(32)
NOW_US = 1_900_000_000_000_000


class Keeps:
    """A broker that has a delegation already."""

    def __init__(self, serial_us: int) -> None:
        self.serial_us = serial_us

    def put_delegation(self, envelope: Envelope, owner: bytes) -> int:
        given = Delegation.from_envelope(envelope, owner)
        self.serial_us = max(self.serial_us, given.serial_us)
        return self.serial_us


def delegate(broker: Any, monkeypatch: pytest.MonkeyPatch) -> Delegation:
    monkeypatch.setattr(launching, "now_us", lambda: NOW_US)
    identity: Any = SimpleNamespace(signing=OWNER)
    signed = launching.delegate(broker, identity, BROKER.public, store=STORE, not_after_us=NOW_US + 10**9)
    return Delegation.from_envelope(signed, OWNER.public)


@pytest.mark.parametrize("kept_us", [0, NOW_US - 1, NOW_US + 5_000_000])
def test_a_run_has_the_newest_delegation(monkeypatch: pytest.MonkeyPatch, kept_us: int) -> None:
    broker = Keeps(kept_us)
    assert delegate(broker, monkeypatch).serial_us == broker.serial_us > kept_us


def test_a_delegation_of_the_future_is_not_outbid(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Keeps(NOW_US + 10**12)
    with pytest.raises(UsageError) as caught:
        delegate(broker, monkeypatch)
    assert caught.value.code is Code.CHAIN_DELEGATION
    assert broker.serial_us == NOW_US + 10**12
