"""The machines that an owner has, by name, and the way to the place on each of them."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.durations import SystemClock
from glasshouse.jobs.owner.home import Home, is_there, read_state, write_state
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.rental_journal import POLL_S, Attempt, Journal, rental_at
from glasshouse.jobs.places.rental_watch import watched
from glasshouse.jobs.places.runtime_bundle import read_bundle
from glasshouse.providers.place.base import Place
from glasshouse.providers.place.local import LocalPlace
from glasshouse.providers.place.ssh import SshPlace
from glasshouse.providers.place.ways import SlurmNode, SshHost, Way
from glasshouse.providers.protocol.messages import OWN_FOLDER
from glasshouse.runtime.run.findings import Finding, Standing
from glasshouse.wire.policy import Profile

LOCAL: str = LocalPlace.name
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}|[0-9A-Fa-f:.]{2,45}")
_GATE_S = 10.0
# For the login to a machine that is up only near its boot deadline.
_LOGIN_US = 60_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine that is reached by SSH, or a node of a Slurm job."""

    url: str  # ``ssh://[user@]host[:port]``, or ``slurm://[[user@]login[:port]]/JOB/NODE``
    python: str = "python3"  # the interpreter there in which Glasshouse is installed, or that a bundle is unpacked for
    # Where runs are kept there while they last; `OWN_FOLDER` for the user's own data folder. Of a node, the folder
    # that its job's batch script was made with; `OWN_FOLDER` for `NODE_FOLDER`.
    folder: str = OWN_FOLDER
    config: str | None = None  # a configuration file of ssh; None for the user's own
    address: str | None = None  # where the other machines of a group reach it; None for where ssh does
    bundle: str | None = None  # of `glasshouse runtime bundle`; None where Glasshouse is installed

    def way(self) -> tuple[Way, str]:
        """Return how it is reached, and the folder of the place there; raises `UsageError`."""
        options = () if self.config is None else ("-F", self.config)
        if self.url.startswith("slurm://"):
            found = SlurmNode.parse(self.url, options=options)
            node = found if self.folder == OWN_FOLDER else replace(found, folder=self.folder)
            return node, node.place
        return replace(SshHost.parse(self.url), options=options), self.folder


def known_machines(home: Home) -> dict[str, Machine]:
    """Return the machines that have a name here; raises `UsageError` for a damaged list."""
    if not is_there(home.machines):
        return {}
    listed = read_state(home.machines, what="list of machines")
    try:
        return {name: Machine(**one) for name, one in sorted(listed.items())}
    except TypeError:
        raise UsageError(Code.USAGE, f"the list of machines {home.machines} is damaged") from None


def add_machine(home: Home, name: str, machine: Machine, *, replace: bool = False) -> None:
    """Give a machine a name; raises `UsageError` for a name or address that is none, or taken."""
    if not _NAME.fullmatch(name) or name == LOCAL:
        raise UsageError(Code.USAGE, f"not a name for a machine: {name!r}")
    machine.way()
    if machine.bundle is not None:
        read_bundle(Path(machine.bundle))
    if machine.address is not None and not _HOST.fullmatch(machine.address):
        raise UsageError(Code.USAGE, f"not an address of a machine: {machine.address!r}")
    known = known_machines(home)
    if name in known and not replace:
        raise UsageError(Code.USAGE, f"{name} is {known[name].url}", hint="--force takes the new address")
    write_state(home.machines, {one: asdict(kept) for one, kept in (known | {name: machine}).items()})


def remove_machine(home: Home, name: str) -> Machine:
    """Forget a machine and return what it was; raises `UsageError`."""
    known = known_machines(home)
    if name not in known:
        raise _unknown(name, known)
    for folder in RunFolder.everywhere(home):
        for one in folder.machines():
            record = one.load()
            if record.place == name and record.phase is not Phase.ENDED:
                run = record.run_id[:8]
                raise UsageError(Code.USAGE, f"run {run} goes on there", hint=f"stop it first: glasshouse stop {run}")
    machine = known.pop(name)
    write_state(home.machines, {one: asdict(kept) for one, kept in known.items()})
    return machine


def place_of(home: Home, name: str) -> Place:
    """Return the place on a machine: `LOCAL`, a name or an address; raises `UsageError` for an unknown one."""
    if name == LOCAL:
        return LocalPlace()
    if (rented := _rented(home, name)) is not None:
        return rented
    known = known_machines(home)
    machine = known.get(name) or (Machine(url=name) if "://" in name else None)
    if machine is None:
        raise _unknown(name, known)
    way, folder = machine.way()
    return SshPlace(
        name,
        way,
        machine.python,
        folder,
        connect=partial(_gate, home),
        address=machine.address,
        bundle=None if machine.bundle is None else Path(machine.bundle),
    )


def _rented(home: Home, name: str) -> SshPlace | None:
    """Return the place on a rented machine; None for another name; raises `UsageError` if it is gone."""
    found = rental_at(home, name)
    if found is None:
        return None
    journal, node = found
    rental = journal.load()
    up = rental.up
    if up is None or (up.host is None and node >= len(up.places)):
        why = f"the machine {name} was given back, or was never up"
        raise UsageError(Code.RUN_UNKNOWN, why, hint="see: glasshouse machine rented")
    way, folder = Machine(url=up.places[node]).way() if up.host is None else (_to_rented(journal, up), OWN_FOLDER)
    return SshPlace(name, way, rental.python, folder, connect=partial(_gate, home), bundle=journal.bundle)


def _to_rented(journal: Journal, up: Attempt) -> SshHost:
    """Return how a rented machine is reached: by this rental's key alone, and its pinned host key."""
    known = "yes" if up.host_key is not None else "accept-new"
    options = (
        *journal.ssh_files(),
        "IdentitiesOnly=yes",
        "IdentityAgent=none",
        "GlobalKnownHostsFile=/dev/null",
        f"StrictHostKeyChecking={known}",
        f"HostKeyAlias={up.tag}",
        "PreferredAuthentications=publickey",
        "LogLevel=ERROR",
    )
    given = (word for option in options for word in ("-o", option))
    return SshHost(host=up.host or "", user="root", port=up.port, options=("-F", "/dev/null", *given))


def examine(home: Home, name: str) -> list[Finding]:
    """Return the findings of a machine about itself; raises `UsageError`, `PeerError` or `PlatformError`."""
    place = place_of(home, name)
    if not isinstance(place, SshPlace):
        raise UsageError(Code.USAGE, f"{name} is this machine")
    with contextlib.closing(place):
        return [
            Finding(feature=feature, standing=Standing(standing), value=value, consequence=consequence)
            for consequence, feature, standing, value in place.examine()
        ]


def log_in(
    home: Home, journal: Journal, *, profile: Profile, interrupt: Callable[[], None], clock: SystemClock | None = None
) -> list[Place]:
    """Log in to the machine that was rented, and return the places on it, examined; nothing of the job is sent yet.

    Args:
        interrupt: called when a cap is reached meanwhile; ends this call.

    Raises:
        PeerError, PlatformError: the machine cannot be reached, or cannot meet the policy.
    """
    clock, rental = clock or SystemClock(), journal.load()
    places = [place_of(home, name) for name in rental.places]
    # One deadline from the request to the login; a machine that came up late in it is tried for a minute.
    asked_us = clock.now_us() if rental.up is None else rental.up.asked_us
    until_us = max(asked_us + rental.caps.boot_s * 1_000_000, clock.now_us() + _LOGIN_US)
    with watched(home, rental.run_id, interrupt, clock=clock):
        for place in places:
            _reach(place, until_us=until_us, clock=clock)
            place.close()
            _look(home, place.name, profile)
    return places


def _reach(place: Place, *, until_us: int, clock: SystemClock) -> None:
    """Wait until a machine that printed its host key answers; raises `PeerError`, `PlatformError`."""
    while True:
        try:
            return place.check()
        except PeerError as error:
            if error.code is not Code.PLACE_UNREACHABLE:
                raise
            if clock.now_us() > until_us:
                raise PlatformError(
                    Code.BOOT_FAILED,
                    f"{place.name} was rented, and cannot be logged in to: {error.message}",
                    hint="its image may end and start over and over: see its log on the provider's page, or take "
                    "another image",
                ) from None
        clock.sleep(POLL_S)


def _look(home: Home, name: str, profile: Profile) -> None:
    """Refuse a machine that cannot meet the policy, before anything is sent; raises `PlatformError`."""
    offered = next((one.value for one in examine(home, name) if one.feature == "profile"), Profile.OFF.value)
    order = [Profile.OFF.value, Profile.STANDARD.value, Profile.STRICT.value]
    if offered not in order or order.index(offered) < order.index(profile.value):
        raise PlatformError(
            Code.HARDENING_MISSING,
            f"{name} offers the profile {offered!r}, and the job's policy demands {profile.value!r}",
            hint='most rented containers offer "standard": set policy.profile, or take another provider',
        )


def _unknown(name: str, known: dict[str, Machine]) -> UsageError:
    names = ", ".join(known) or "none"
    return UsageError(
        Code.USAGE, f"no machine is called {name!r}; known: {names}", hint="glasshouse machine add NAME ssh://user@host"
    )


def _gate(home: Home) -> socket.socket:
    """Connect to a home's broker, for a call of a runtime elsewhere; raises `OSError`."""
    serving = Embedded(home).serving
    if serving is None:
        raise ConnectionRefusedError("no broker serves")
    if serving.runtime_url.startswith("unix:"):
        gate = socket.socket(socket.AF_UNIX)
        gate.settimeout(_GATE_S)
        gate.connect(serving.runtime_url.removeprefix("unix:"))
        return gate
    host, _, port = serving.runtime_url.removeprefix("http://").rstrip("/").rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_GATE_S)
