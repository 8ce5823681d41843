"""The gates that an owner has added, by name, each also as the broker of a run.

Laws: a gate is identified by its pinned signing key, and a package key is sent to its pinned certificate alone; after
its preparation a run needs no private key of the owner's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from glasshouse.broker.client.gate_client import GateClient
from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.http_api import GENESIS
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.define.package_records import PackageRecord
from glasshouse.jobs.owner.home import Home, is_there, locked, read_state, socket_folder, write_state
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.providers.protocol.line import GateLine
from glasshouse.providers.protocol.order import RelayOrder
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.record import Record, Sha256, digest, fixed, integer, text

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownGate(Record, name="gate"):
    """A gate that was added, and what of it is pinned."""

    url: Annotated[str, text(4096)]  # ``https://host[:port]``
    public: Sha256  # its signing key
    certificate: Sha256 | None  # SHA-256 of its own certificate; None for one that the system's authorities signed
    # Number and hash of the last record of the audit log that it showed; of none, 0 and zeros.
    audited: Annotated[tuple[int, bytes], fixed(records=integer(), sha256=digest())] = (0, GENESIS)

    def line(self) -> GateLine:
        """Return how it is reached; raises `UsageError` for an address that is none."""
        return GateLine(url=self.url, certificate=None if self.certificate is None else self.certificate.hex())

    def client(self, owner: SigningKey | None = None) -> GateClient:
        """Return the client of an owner, or one without a signature."""
        return GateClient(self.url, self.line().connect, self.public, owner)


def gate_of(url: str, *, key: str, certificate: str | None) -> KnownGate:
    """Return a gate from its URL, its signing key and the SHA-256 of its certificate in hex; raises `UsageError`."""
    hint = "the gate prints both when it starts"
    for what, given in (("key", key), ("certificate", certificate)):
        if given is not None and not _DIGEST.fullmatch(given):
            raise UsageError(Code.USAGE, f"not a gate's {what}: 64 hexadecimal digits", hint=hint)
    pinned = None if certificate is None else bytes.fromhex(certificate)
    gate = KnownGate(url=url, public=bytes.fromhex(key), certificate=pinned)
    gate.line()
    return gate


def known_gates(home: Home) -> dict[str, KnownGate]:
    """Return the gates that have a name here; raises `UsageError` for a damaged list."""
    return {name: gate for name, gate in _listed(home).items() if _NAME.fullmatch(name)}


def gate_by_key(home: Home, public: bytes, *, called: str) -> tuple[str, KnownGate] | None:
    """Return a gate by its signing key, and its name, also after that was removed; `called` chooses among several."""
    listed = _listed(home)
    found = [name for name, gate in listed.items() if gate.public == public]
    if not found:
        return None
    name = min(found, key=lambda one: (one != called, not _NAME.fullmatch(one)))
    return (name if _NAME.fullmatch(name) else called), listed[name]


def _listed(home: Home) -> dict[str, KnownGate]:
    """Return all gates, also those whose name was removed: see `_unnamed`."""
    if not is_there(home.gates):
        return {}
    listed = read_state(home.gates, what="list of gates")
    try:
        return {name: KnownGate.from_json(KnownGate.known(one)) for name, one in sorted(listed.items())}
    except (FormatError, AttributeError):
        raise UsageError(Code.USAGE, f"the list of gates {home.gates} is damaged") from None


def add_gate(home: Home, name: str, gate: KnownGate, *, force: bool = False) -> None:
    """Give a gate a name, once it has answered as it is pinned; raises `UsageError` for the name, else `PeerError`."""
    if not _NAME.fullmatch(name):
        raise UsageError(Code.USAGE, f"not a name for a gate: {name!r}")
    known = known_gates(home)
    if name in known and not force:
        raise UsageError(Code.USAGE, f"{name} is {known[name].url}", hint="--force takes the new one")
    gate.client().check_known()
    with locked(home.path):
        listed = _unnamed(_listed(home), name)
        # What was audited belongs to the gate under all its names: adding it again loses nothing of it.
        audited = _audited(listed, gate)
        listed.pop(_without_name(gate), None)
        _write(home, listed | {name: replace(gate, audited=audited)})


def remove_gate(home: Home, name: str) -> KnownGate:
    """Remove a gate's name and return what it was; raises `UsageError` while a run or a package needs the name."""
    known = known_gates(home)
    gate = gate_named(home, name)
    for folder in RunFolder.everywhere(home):
        record = folder.load()
        if record.gate == name and record.phase is not Phase.ENDED:
            run = record.run_id[:8]
            raise UsageError(Code.USAGE, f"run {run} needs it", hint=f"stop it first: glasshouse stop {run}")
    if not any(one.public == gate.public for other, one in known.items() if other != name):
        for path in sorted(home.packages.glob("*.json")):
            package = PackageRecord.load(home, path.stem, workload="unknown")
            if not package.revoked and any(one.public == gate.public for one in package.gates):
                why = f"{name} has the key of package {package.package_id} ({package.name})"
                raise UsageError(Code.USAGE, why, hint=f"revoke it first: glasshouse revoke {package.package_id}")
    with locked(home.path):
        _write(home, _unnamed(_listed(home), name))
    return gate


def _without_name(gate: KnownGate) -> str:
    return f"-{gate.public.hex()}"


def _unnamed(listed: dict[str, KnownGate], name: str) -> dict[str, KnownGate]:
    """Return the list with a gate under its key, which is no name, in place of its name."""
    return {_without_name(one) if other == name else other: one for other, one in listed.items()}


def gate_named(home: Home, name: str) -> KnownGate:
    """Return a gate by its name; raises `UsageError`."""
    known = known_gates(home)
    if name not in known:
        named = f"; there are {', '.join(known)}" if known else ""
        raise UsageError(
            Code.USAGE,
            f"no gate is called {name[:80]!r} here{named}",
            hint="add it: glasshouse gate add NAME https://HOST:PORT --key KEY --certificate CERTIFICATE",
        )
    return known[name]


def gate_name(home: Home, given: str) -> str:
    """Return the name of a gate given by name or URL; raises `UsageError` for none, or several that differ."""
    if "://" not in given:
        gate_named(home, given)
        return given
    address = GateLine(url=given, certificate=None).address
    found = {name: gate for name, gate in known_gates(home).items() if gate.line().address == address}
    if not found:
        raise UsageError(
            Code.USAGE,
            f"no gate was added here that is reached at {given}: an address alone does not identify a gate, so "
            "its key has to be pinned before it is sent anything",
            hint=f"add it: glasshouse gate add NAME {given} --key KEY --certificate CERTIFICATE; the gate prints both "
            "when it starts",
        )
    if len({(gate.public, gate.certificate) for gate in found.values()}) > 1:
        raise UsageError(
            Code.USAGE,
            f"the gates {', '.join(found)} were all added with {given}, and differ in key or certificate",
            hint="give the name of the one that is meant",
        )
    return min(found)


def audit_gate(home: Home, gate: str | KnownGate, owner: SigningKey, *, newer: bool = False) -> list[Json]:
    """Return this owner's records in a gate's audit log, all or the `newer` ones, verified; record where the log ends.

    Raises:
        UsageError: no such gate.
        PeerError, RefusedError: as `GateClient`.
        VerificationError: `log-invalid`: it does not verify, or does not continue the log of before.
    """
    found = gate_named(home, gate) if isinstance(gate, str) else gate
    records, audited = found.client(owner).own_audit(kept=_audited(_listed(home), found), newer=newer)
    with locked(home.path):
        listed = _listed(home)  # anew: gates may have been added and removed while it answered
        audited = max(audited, _audited(listed, found))  # of two commands at once the one that saw more counts
        same = {name: replace(one, audited=audited) for name, one in listed.items() if one.public == found.public}
        _write(home, listed | same)
    return records


def _audited(listed: dict[str, KnownGate], gate: KnownGate) -> tuple[int, bytes]:
    """Return where a gate's audit log ended last, under any of its names."""
    return max((one.audited for one in listed.values() if one.public == gate.public), default=gate.audited)


def _write(home: Home, gates: dict[str, KnownGate]) -> None:
    write_state(home.gates, {name: one.to_json() for name, one in gates.items()})


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

    @contextlib.contextmanager
    def kept(self) -> Iterator[GateBroker]:
        """Return the gate as `ensure` does: what others do does not stop it."""
        yield self.ensure()

    def stores(self) -> bool:
        """Return whether it stores what a run elsewhere leaves after its machine is gone; raises `PeerError`."""
        return self._gate.client().stores()

    def give_back(self) -> bool:
        """Leave the gate as it is: it serves others too."""
        return False


def check_keeps(home: Home, gate: str) -> None:
    """Refuse a gate that keeps no checkpoints; raises `UsageError`, `PeerError`."""
    if gate_named(home, gate).client().store_public() is None:
        raise keeps_none(gate)


def keeps_none(gate: str | None) -> UsageError:
    """Return the error of a broker without a store for checkpoints."""
    return UsageError(
        Code.USAGE,
        f"{'the broker here' if gate is None else f'the gate {gate}'} keeps no checkpoints, and the job has a table "
        "[checkpoints]",
        hint="name a gate that does (glasshouse broker serve --store DIR) with --gate, or take [checkpoints] out",
    )


def relay_of(home: Home, gate: str | None, run_id: str) -> RelayOrder | None:
    """Return where a runtime's keeper relays its calls; None for the embedded broker, which is called directly."""
    if gate is None:
        return None
    line = gate_named(home, gate).line()
    path = socket_folder(home) / f"g-{run_id[:12]}"
    return RelayOrder(url=line.url, certificate=line.certificate, socket=str(path))
