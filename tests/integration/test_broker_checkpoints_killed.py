"""A real gate that is killed while checkpoints come: what is whole stays, what is not begins again, nothing is half."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.client.owner_client import OwnerClient, Reply, request
from glasshouse.broker.store.broker_state import system_clock_us
from glasshouse.wire.lines.statements import MAX_DATA_BYTES
from simulators import storing_gate
from simulators.direct_gate import LineOwner
from simulators.storing_gate import Holder, StoringGate, answer


class _KilledGate:
    """A gate's process, over HTTP; it is killed and started again on what it left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start()
        self.store_key: Any = SimpleNamespace(public=self.client().store_public())

    def _start(self) -> None:
        self.process = BrokerProcess(self._folder, "--store", str(self._folder / "store"))
        self.runtime_url, self.broker_public = self.process.runtime_url, self.process.broker_public

    def kill(self) -> None:
        self.process.kill()
        self._start()

    def client(self) -> OwnerClient:
        return self.process.client()

    def clock_us(self) -> int:
        return system_clock_us()

    def send(self, method: str, path: str, body: bytes | None) -> Reply:
        return request(self.runtime_url, method, path, body)


def test_a_gate_that_is_killed_over_and_over_keeps_whole_checkpoints_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing_gate, "PIECE", MAX_DATA_BYTES)
    killed = _KilledGate(tmp_path)
    try:
        gate = cast(StoringGate, killed)
        owner = LineOwner(gate)
        leg = Holder(gate, owner.leg())
        first = leg.counted(content=b"first" * 100_000)
        part, sealed = leg.seal(content=b"second" * 500_000)
        claim = leg.claim(sealed.row)
        leg.send(part, claim, until=5 * MAX_DATA_BYTES)
        killed.kill()
        assert answer(leg.piece(claim, b"")) == {"bytes": 0, "whole": False}
        assert answer(leg.send(part, claim)) == {"bytes": len(part), "whole": True}
        header = leg.header(sealed.row)
        stated = leg.state(header).content()
        killed.kill()
        assert answer(leg.piece(claim, b"")) == {"bytes": len(part), "whole": True}
        assert leg.state(header).content() == stated
        assert leg.count(header).status == 200
        owner.lost(leg.start.id, 1)
        second = Holder(gate, owner.leg(owner.next(leg.start.id)))
        killed.kill()
        assert second.fetch() == header.encode()
        assert second.fetch(0) == part
        assert second.place.previous == header.digest != first.digest
    finally:
        killed.process.stop()
