"""The gates that an owner has added, by name, and a run's broker: such a gate, or the embedded one.

Laws: a gate is identified by its pinned signing key, and a package key is sent to its pinned certificate alone; what a
run needs after its beginning needs no private key of the owner's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from glasshouse.broker.api.audit_chain import GENESIS, verify_chain
from glasshouse.broker.client.gate_client import GateClient
from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.package_records import PackageRecord
from glasshouse.jobs.gates.embedded import Embedded, socket_folder
from glasshouse.jobs.owner.files import is_there, read_state, write_state
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.providers.protocol.line import GateLine
from glasshouse.providers.protocol.order import RelayOrder
from glasshouse.wire.canonical import Json
from glasshouse.wire.signing import SigningKey

__all__ = [
    "Broker",
    "Gate",
    "Reached",
    "Standing",
    "add_gate",
    "audit_gate",
    "audit_own",
    "broker_of",
    "gate_by_key",
    "gate_name",
    "gate_named",
    "gate_of",
    "known_gates",
    "relay_of",
    "remove_gate",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Reached(Protocol):
    """A broker that can be called."""

    @property
    def runtime_url(self) -> str: ...

    @property
    def public(self) -> bytes: ...

    @property
    def owner_socket(self) -> Path | None: ...

    def client(self) -> OwnerClient: ...


class Broker(Protocol):
    """What a run needs of its broker: `Embedded`, or `Standing`."""

    @property
    def serving(self) -> Reached | None: ...

    def ensure(self) -> Reached: ...

    def give_back(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A gate that was added, and what of it is pinned."""

    url: str  # ``https://host[:port]``
    public: bytes  # its signing key
    certificate: bytes | None  # SHA-256 of its own certificate; None for one that the system's authorities signed
    # Number and hash of the last record of the audit log that it showed; of none, 0 and zeros.
    audited: tuple[int, bytes] = (0, GENESIS)

    def line(self) -> GateLine:
        """Return how it is reached; raises `UsageError` for an address that is none."""
        return GateLine(url=self.url, certificate=self.certificate)

    def client(self, owner: SigningKey | None = None) -> GateClient:
        """Return the client of an owner, or one without a signature."""
        return GateClient(self.url, self.line().connect, self.public, owner)

    def to_json(self) -> dict[str, Any]:
        certificate = None if self.certificate is None else self.certificate.hex()
        audited = {"records": self.audited[0], "sha256": self.audited[1].hex()}
        return {"audited": audited, "certificate": certificate, "public": self.public.hex(), "url": self.url}


def gate_of(url: str, *, key: str, certificate: str | None) -> Gate:
    """Return a gate as it is written on a command line.

    Args:
        url: its address.
        key: its signing key, in hex.
        certificate: SHA-256 of its certificate, in hex.

    Raises:
        UsageError: `usage`.
    """
    for what, text in (("key", key), ("certificate", certificate)):
        if text is not None and not _DIGEST.fullmatch(text):
            raise UsageError(
                Code.USAGE, f"not a gate's {what}: 64 hexadecimal digits", hint="the gate prints both when it starts"
            )
    gate = Gate(
        url=url, public=bytes.fromhex(key), certificate=None if certificate is None else bytes.fromhex(certificate)
    )
    gate.line()
    return gate


def known_gates(home: Home) -> dict[str, Gate]:
    """Return the gates that have a name here; raises `UsageError` for a damaged list."""
    return {name: gate for name, gate in _listed(home).items() if _NAME.fullmatch(name)}


def gate_by_key(home: Home, public: bytes, *, called: str) -> tuple[str, Gate] | None:
    """Return the gate with a signing key, and its name; also one that has none any more, as it was last recorded.

    Args:
        home: the state home.
        public: the key.
        called: its name if it has several.

    Raises:
        UsageError: a damaged list.
    """
    listed = _listed(home)
    found = [name for name, gate in listed.items() if gate.public == public]
    if not found:
        return None
    name = min(found, key=lambda one: (one != called, not _NAME.fullmatch(one)))
    return (name if _NAME.fullmatch(name) else called), listed[name]


def _listed(home: Home) -> dict[str, Gate]:
    """Return all gates, also those that have no name any more: see `_unnamed`."""
    if not is_there(home.gates):
        return {}
    listed = read_state(home.gates, what="list of gates")
    try:
        return {
            name: replace(
                gate_of(one["url"], key=one["public"], certificate=one["certificate"]),
                audited=(int(one["audited"]["records"]), bytes.fromhex(one["audited"]["sha256"])),
            )
            for name, one in sorted(listed.items())
        }
    except (KeyError, TypeError, ValueError):
        raise UsageError(Code.USAGE, f"the list of gates {home.gates} is damaged") from None


def add_gate(home: Home, name: str, gate: Gate, *, force: bool = False) -> None:
    """Give a gate a name, once it has answered with the key and the certificate that are pinned.

    Raises:
        UsageError: a name that is none, or taken.
        PeerError: `broker-unreachable`, or `broker-untrusted` for another key or certificate.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(Code.USAGE, f"not a name for a gate: {name!r}")
    known = known_gates(home)
    if name in known and not force:
        raise UsageError(Code.USAGE, f"{name} is {known[name].url}", hint="--force takes the new one")
    gate.client().check_known()
    with _locked(home):
        listed = _unnamed(_listed(home), name)
        # What it showed of its audit log is the gate's, whatever its name: to add it again loses nothing of it.
        audited = _audited(listed, gate)
        listed.pop(_without_name(gate), None)
        _write(home, listed | {name: replace(gate, audited=audited)})


def remove_gate(home: Home, name: str) -> Gate:
    """Remove a gate's name and return what it was.

    Raises:
        UsageError: no such gate; or one that a run that goes on needs, or that has the key of a package that is not
            revoked and no other name by which it could be.
    """
    known = known_gates(home)
    gate = gate_named(home, name)
    for folder in RunFolder.everywhere(home):
        record = folder.load()
        if record.gate == name and record.phase is not Phase.ENDED:
            raise UsageError(
                Code.USAGE,
                f"run {record.run_id[:8]} needs it",
                hint=f"stop it first: glasshouse stop {record.run_id[:8]}",
            )
    if not any(one.public == gate.public for other, one in known.items() if other != name):
        for path in sorted(home.packages.glob("*.json")):
            package = PackageRecord.load(home, path.stem, workload="unknown")
            if not package.revoked and any(one.public == gate.public for one in package.gates):
                raise UsageError(
                    Code.USAGE,
                    f"{name} has the key of package {package.package_id} ({package.name})",
                    hint=f"revoke it first: glasshouse revoke {package.package_id}",
                )
    with _locked(home):
        _write(home, _unnamed(_listed(home), name))
    return gate


def _without_name(gate: Gate) -> str:
    return f"-{gate.public.hex()}"


def _unnamed(listed: dict[str, Gate], name: str) -> dict[str, Gate]:
    """Return the list without a name: under its key, which is no name, its last gate is kept."""
    others = {other: one for other, one in listed.items() if other != name}
    if name not in listed:
        return others
    gate = listed[name]
    return others | {_without_name(gate): gate}


def gate_named(home: Home, name: str) -> Gate:
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
    """Return the name of the gate that a command line or a job file means.

    Args:
        home: the state home.
        given: its name, or its URL.

    Raises:
        UsageError: none that was added is called so, or reached there; or several are that differ in what is pinned.
    """
    if "://" not in given:
        gate_named(home, given)
        return given
    address = GateLine(url=given, certificate=None).address
    found = {name: gate for name, gate in known_gates(home).items() if gate.line().address == address}
    if not found:
        raise UsageError(
            Code.USAGE,
            f"no gate was added here that is reached at {given}: an address alone does not show who answers there, so "
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


def audit_gate(home: Home, gate: str | Gate, owner: SigningKey, *, newer: bool = False) -> list[Json]:
    """Return what a gate's audit log has of this owner, verified, and record where it ends.

    Args:
        home: the state home.
        gate: its name, or the gate.
        owner: asks it.
        newer: whether to request only what was not recorded before.

    Raises:
        UsageError: no such gate.
        PeerError, RefusedError: as `GateClient`.
        VerificationError: `log-invalid`: it does not hold, or is not the one that the gate showed before.
    """
    found = gate_named(home, gate) if isinstance(gate, str) else gate
    # What it showed is the gate's, by whichever of its names it was called.
    records, audited = found.client(owner).own_audit(kept=_audited(_listed(home), found), newer=newer)
    with _locked(home):
        listed = _listed(home)  # anew: gates may have been added and removed while it answered
        audited = max(audited, _audited(listed, found))  # of two commands at once the one that saw more counts
        same = {name: replace(one, audited=audited) for name, one in listed.items() if one.public == found.public}
        _write(home, listed | same)
    return records


def audit_own(home: Home) -> list[Json]:
    """Return the audit log of this home's own broker, verified; it is started if need be.

    Raises:
        PeerError: `broker-unreachable`.
        VerificationError: `log-invalid`.
    """
    broker = Embedded(home)
    try:
        client, records = broker.ensure().client(), list[Json]()
        while page := client.audit(len(records)):
            records += page
    finally:
        broker.give_back()
    verify_chain(records)
    return records


@dataclass(frozen=True, kw_only=True, slots=True)
class _AtGate:
    """A gate, as a run's broker."""

    gate: Gate
    owner: SigningKey | None
    runtime_url: str = ""  # a runtime calls its keeper: see `relay_of`
    owner_socket: None = None

    @property
    def public(self) -> bytes:
        return self.gate.public

    def client(self) -> OwnerClient:
        if self.owner is None:
            raise UsageError(Code.IDENTITY, "requests to this gate are signed by its owner, whose key is not here")
        return self.gate.client(self.owner)


class Standing:
    """A gate that stays, as the broker of one run.

    Args:
        home: the state home.
        name: of the gate.
        owner: signs the requests; None where there are none.

    Raises:
        UsageError: no such gate.
    """

    def __init__(self, home: Home, name: str, owner: SigningKey | None = None) -> None:
        self._gate = gate_named(home, name)
        self.serving = _AtGate(gate=self._gate, owner=owner)

    def ensure(self) -> Reached:
        """Return the gate, which answers.

        Raises:
            PeerError: `broker-unreachable`, or `broker-untrusted` for another than was added.
        """
        self._gate.client().check_known()
        return self.serving

    def stores(self) -> bool:
        """Return whether it keeps what runs on other machines leave: a run that outlives its machine needs that.

        Raises:
            PeerError: `broker-unreachable`, or `broker-untrusted` for another certificate.
        """
        return self._gate.client().stores()

    def give_back(self) -> bool:
        """Leave it running: it serves others too."""
        return False


def broker_of(home: Home, folder: RunFolder) -> Broker:
    """Return the broker of a run that was prepared; raises `UsageError`."""
    gate = folder.load().gate
    return Embedded(home) if gate is None else Standing(home, gate)


def relay_of(home: Home, gate: str | None, run_id: str) -> RelayOrder | None:
    """Return where the keeper of a runtime carries its calls; None for the embedded broker, which it calls itself.

    Args:
        home: the state home.
        gate: the run's, by name.
        run_id: of the runtime's machine; on this machine its socket is called after it.

    Raises:
        UsageError: no such gate.
    """
    if gate is None:
        return None
    found = gate_named(home, gate)
    certificate = None if found.certificate is None else found.certificate.hex()
    path = socket_folder(home) / f"g-{run_id[:12]}"
    return RelayOrder(url=found.url, certificate=certificate, socket=str(path))


def _audited(listed: dict[str, Gate], gate: Gate) -> tuple[int, bytes]:
    """Return the most that a gate showed of its audit log by any of its names."""
    return max((one.audited for one in listed.values() if one.public == gate.public), default=gate.audited)


@contextlib.contextmanager
def _locked(home: Home) -> Iterator[None]:
    """Let no other command change the list of gates in between."""
    try:
        descriptor = os.open(home.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(Code.USAGE, f"{home.path} cannot be opened: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(home: Home, gates: dict[str, Gate]) -> None:
    write_state(home.gates, {name: one.to_json() for name, one in gates.items()})
