"""Revokes a package's key: the broker releases it to no further runtime. What runs already keeps its key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.errors import Code, GlasshouseError, PeerError, UsageError
from glasshouse.jobs.define.package_records import PackageRecord, public_part
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.gates.known_gates import KnownGate, audit_gate, gate_by_key, gate_named
from glasshouse.jobs.owner.home import Home, is_file, is_there
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.wire.crypto import SigningKey

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyHolder:
    """A gate that may have a package's key."""

    name: str  # as it is called, or was
    gate: KnownGate | None  # None where its record is gone
    deployed: bool  # whether it confirmed that it has the key


def holders(package_id: str, home: Home, *, also: str | None = None) -> tuple[KeyHolder, ...]:
    """Return every gate that was given a package's key, and the one named by `also`; raises `UsageError`."""
    found = {}
    for given in PackageRecord.load(home, package_id, workload="unknown").gates:
        name, gate = gate_by_key(home, given.public, called=given.name) or (given.name, None)
        found[given.public] = KeyHolder(name=name, gate=gate, deployed=given.deployed)
    if also is not None:
        gate = gate_named(home, also)
        found.setdefault(gate.public, KeyHolder(name=also, gate=gate, deployed=False))
    return tuple(sorted(found.values(), key=lambda one: one.name))


def resolve(name: str, home: Home) -> str:
    """Return the package id that a path, package id or run names; raises `UsageError`, or as `Package.open`."""
    path = Path(name)
    if is_file(path):
        return public_part(path)[0].package_id
    if _ID.fullmatch(name) and any(is_there(folder / f"{name}.json") for folder in (home.packages, home.keys)):
        return name
    try:
        return RunFolder.find(home, name).load().package_id
    except UsageError:
        why = f"{name[:80]!r} is no sealed package, package id or run of {home.path}"
        raise UsageError(Code.RUN_UNKNOWN, why) from None


def revoke(
    package_id: str,
    home: Home,
    *,
    gates: Sequence[KeyHolder] = (),
    owner: SigningKey | None = None,
    running: bool = False,
) -> list[str]:
    """Revoke at the home's own broker, started if need be, and at gates; record it; return the runs that had the key.

    Args:
        gates: all that may have its key: see `holders`. Each is tried, whatever comes of the others.
        running: let the leases of runs that have the key run out, too.

    Raises:
        PeerError: names all that did not revoke it, with the code of the first: `broker-unreachable`, or
            `deployment-unknown` of a gate that had the key. Nothing is recorded then.
    """
    failed: list[tuple[str, GlasshouseError]] = []
    for holder in gates:
        try:
            if holder.gate is None:
                raise PeerError(Code.BROKER_UNREACHABLE, "its record is gone from here")
            _revoke_at(holder.gate.client(owner), package_id, running=running, deployed=holder.deployed)
            if owner is not None:
                # A log without the revocation is refused from here on; the next run refuses one that does not verify.
                with contextlib.suppress(GlasshouseError):
                    audit_gate(home, holder.gate, owner, newer=True)
        except GlasshouseError as error:
            failed.append((holder.name, error))
    broker = Embedded(home)
    try:
        with broker.kept() as serving:
            _revoke_at(serving.client(), package_id, running=running, deployed=False)
    except GlasshouseError as error:
        failed.append(("this machine's own broker", error))
    finally:
        broker.give_back()
    if failed:
        reasons = "; ".join(f"{name}: {error.message}" for name, error in failed)
        raise PeerError(
            failed[0][1].code,
            f"not revoked everywhere, and so not remembered as revoked: {reasons}",
            hint="everywhere else it is; revoke it again when they answer, and ask the operator of one that lacks it",
        )
    record = PackageRecord.load(home, package_id, workload="unknown")
    replace(record, revoked=True).save(home)
    return sorted(run.run_id for run in RunFolder.records(home) if run.package_id == package_id and run.active)


def _revoke_at(client: OwnerClient, package_id: str, *, running: bool, deployed: bool) -> None:
    try:
        client.revoke(package_id, running=running)
    except UsageError as error:
        # A package that was never deployed has no key there, nor will it; a gate that lost a deployment may lose this.
        if deployed or error.code is not Code.DEPLOYMENT_UNKNOWN:
            raise
