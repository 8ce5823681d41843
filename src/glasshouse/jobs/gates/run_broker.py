"""The broker of a run: a gate that its owner added, or the embedded one.

Law: after its preparation a run needs no private key of the owner's.
"""

from __future__ import annotations

from typing import TypeAlias

from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.gates.embedded import Embedded, Serving, socket_folder
from glasshouse.jobs.gates.known_gates import gate_named
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.providers.protocol.order import RelayOrder
from glasshouse.wire.crypto import SigningKey


class GateBroker:
    """A gate as the broker of a run; `owner` signs the requests. Raises `UsageError` for an unknown gate."""

    runtime_url = ""  # a runtime calls its keeper: see `relay_of`
    owner_socket = None

    def __init__(self, home: Home, name: str, owner: SigningKey | None = None) -> None:
        self._gate, self._owner = gate_named(home, name), owner
        self.public = self._gate.public
        self.serving = self

    def client(self) -> OwnerClient:
        """Return a client of the owner; raises `UsageError` without the owner's key."""
        if self._owner is None:
            raise UsageError(Code.IDENTITY, "requests to this gate are signed by its owner, whose key is not here")
        return self._gate.client(self._owner)

    def ensure(self) -> GateBroker:
        """Return the gate once it answers as it was pinned; raises `PeerError`."""
        self._gate.client().check_known()
        return self

    def stores(self) -> bool:
        """Return whether it stores what a run elsewhere leaves after its machine is gone; raises `PeerError`."""
        return self._gate.client().stores()

    def give_back(self) -> bool:
        """Leave the gate as it is: it serves others too."""
        return False


Broker: TypeAlias = Embedded | GateBroker
"""What a run needs of its broker: whether it serves, that it does, and giving it back."""
Reached: TypeAlias = Serving | GateBroker
"""A broker that can be called."""


def broker_of(home: Home, folder: RunFolder) -> Broker:
    """Return the broker of a run that was prepared; raises `UsageError`."""
    gate = folder.load().gate
    return Embedded(home) if gate is None else GateBroker(home, gate)


def relay_of(home: Home, gate: str | None, run_id: str) -> RelayOrder | None:
    """Return where a runtime's keeper relays its calls; None for the embedded broker, which is called directly."""
    if gate is None:
        return None
    line = gate_named(home, gate).line()
    path = socket_folder(home) / f"g-{run_id[:12]}"
    return RelayOrder(url=line.url, certificate=line.certificate, socket=str(path))
