"""Revokes a package's key: the broker releases it to no further runtime. What runs already keeps its key."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.broker.client import OwnerClient
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.embedded import Embedded
from glasshouse.jobs.files import is_file, is_there
from glasshouse.jobs.home import Home
from glasshouse.jobs.packages import PackageRecord
from glasshouse.jobs.run import public_part
from glasshouse.jobs.rundir import RunFolder

__all__ = ["Revoked", "resolve", "revoke"]

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoked:
    """A package whose key is no longer released.

    Attributes:
        package_id: which.
        running: ids of runs that already had the key.
    """

    package_id: str
    running: tuple[str, ...]


def resolve(name: str, home: Home) -> str:
    """Return the package id that a path, package id or run names.

    Raises:
        UsageError: `run-unknown` when it names none of them.
        PackageError, FormatError: a file that is no package.
    """
    path = Path(name)
    if is_file(path):
        return public_part(path)[0].package_id
    if _ID.fullmatch(name) and any(is_there(folder / f"{name}.json") for folder in (home.packages, home.keys)):
        return name
    try:
        return RunFolder.find(home, name).load().package_id
    except UsageError:
        raise UsageError(
            Code.RUN_UNKNOWN, f"{name[:80]!r} is no sealed package, package id or run of {home.path}"
        ) from None


def revoke(package_id: str, home: Home, *, gates: Sequence[OwnerClient] = (), running: bool = False) -> Revoked:
    """Revoke at the home's own broker, which is started if need be, and at gates, and remember it here.

    Args:
        package_id: which package.
        home: the state home.
        gates: clients of all gates that may have its key: see `PackageRecord.gates`.
        running: whether runs that have the key already are ended too: their leases run out.

    Raises:
        PeerError: `broker-unreachable`, of any of them; nothing was remembered then.
    """
    broker = Embedded(home)
    try:
        for client in (*gates, broker.ensure().client()):
            _revoke_at(client, package_id, running=running)
    finally:
        broker.give_back()
    record = PackageRecord.load(home, package_id, workload="unknown")
    replace(record, revoked=True).save(home)
    going: list[str] = []
    for folder in RunFolder.everywhere(home):
        with contextlib.suppress(UsageError):  # a damaged record is no run that goes on
            run = folder.load()
            if run.package_id == package_id and run.active:
                going.append(run.run_id)
    return Revoked(package_id=package_id, running=tuple(sorted(going)))


def _revoke_at(client: OwnerClient, package_id: str, *, running: bool) -> None:
    try:
        client.revoke(package_id, running=running)
    except UsageError as error:
        # A package that was never deployed has no key there; from here on it is not deployed either.
        if error.code is not Code.DEPLOYMENT_UNKNOWN:
            raise
