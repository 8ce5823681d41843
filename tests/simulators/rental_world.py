"""A provider of machines in memory, with a clock of its own and every fault of a real one; and an owner that dies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

from glasshouse.errors import Code, PeerError, PlatformError
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.places.rent import Renter
from glasshouse.jobs.places.rental_journal import Attempt, Journal, Rental
from glasshouse.providers.rental.provider import Offer, Options, Rented, RentedState, Start, UncertainError
from glasshouse.providers.rental.start_script import NO_SSHD, READY

OPTIONS = Options(
    gpu=("RTX 4090",),
    gpus=1,
    memory_gb=0,
    disk_gb=40,
    regions=(),
    most_per_hour_usd=Decimal("1.00"),
    spot=False,
    image="example/torch:1",
)
HOST_KEY = "ssh-ed25519 " + "A" * 68


def offer(name: str = "small", price: str = "0.60") -> Offer:
    return Offer(
        id=name,
        gpu="RTX 4090",
        gpus=1,
        gpu_memory_gb=24,
        memory_gb=64,
        disk_gb=40,
        region="EU",
        usd_per_hour=Decimal(price),
        spot=False,
    )


class Killed(BaseException):
    """The owner's process was killed: nothing of it runs any more."""


class WorldClock:
    """Time that passes only when someone waits."""

    def __init__(self) -> None:
        self.us = 1_800_000_000_000_000

    def now_us(self) -> int:
        return self.us

    def sleep(self, seconds: float) -> None:
        self.us += int(seconds * 1e6)


@dataclass(kw_only=True)
class Machine:
    """A machine as it really is."""

    id: str
    start: Start
    offer: Offer
    made_us: int
    gone_us: int | None = None


@dataclass(kw_only=True)
class Faults:
    """What goes wrong."""

    lost_answers: int = 0
    listed_after_s: float = 0.0
    stale_s: float = 0.0
    lies_about_deletion: int = 0
    never_boots: int = 0
    stops_at_boot: int = 0
    no_sshd: bool = False
    no_host_key: bool = False
    gone_offers: int = 0
    dearer: Decimal | None = None
    unpriced: int = 0
    refused_and_made: int = 0
    known_after_s: float = 0.0
    away: int = 0
    refuses_key: bool = False


@dataclass(kw_only=True)
class World:
    """The provider's side: machines, faults, and how often it was asked what.

    Attributes:
        dies_at: the owner is killed at this call, counted from 1: before it is answered, or, with `after`, after.
    """

    clock: WorldClock = field(default_factory=WorldClock)
    faults: Faults = field(default_factory=Faults)
    machines: list[Machine] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    dies_at: int = 0
    after: bool = False
    boot_s: float = 40.0

    @property
    def running(self) -> list[str]:
        return [one.id for one in self.machines if one.gone_us is None]


class WorldProvider:
    """Asks the world; a new one is a new process of the owner's."""

    name = "world"
    settles_s = 90.0
    user = "root"
    has_sshd = True

    def __init__(self, world: World, account: str = "") -> None:
        self._world, self._account = world, account

    def account(self, salt: str) -> str:
        return self._account and f"{self._account} of {salt}"

    def offers(self, options: Options) -> list[Offer]:
        self._asked("offers")
        return [offer(), offer("larger", "0.80")]

    def rent(self, chosen: Offer, start: Start) -> str:
        world, faults = self._world, self._world.faults
        self._asked("rent", before=True)
        if faults.gone_offers:
            faults.gone_offers -= 1
            raise PlatformError(Code.NO_OFFER, f"{chosen.id} was taken by someone else")
        machine = Machine(id=f"m{len(world.machines) + 1}", start=start, offer=chosen, made_us=world.clock.now_us())
        world.machines.append(machine)
        self._asked("rent", before=False)
        if faults.refused_and_made:
            faults.refused_and_made -= 1
            raise UncertainError(self.name, f"it refused and made {machine.id}", machine=machine.id)
        if faults.lost_answers:
            faults.lost_answers -= 1
            raise UncertainError(self.name, "the connection ended")
        return machine.id

    def find(self, machine: str) -> Rented | None:
        self._asked("find")
        if self._account == "other":
            return None
        one = next((one for one in self._world.machines if one.id == machine), None)
        return None if one is None or one.gone_us is not None or self._unknown(one) else self._told(one)

    def _unknown(self, one: Machine) -> bool:
        return self._world.clock.now_us() < one.made_us + self._world.faults.known_after_s * 1e6

    def tagged(self, prefix: str) -> list[Rented]:
        self._asked("tagged")
        if self._account == "other":
            return []
        world, now = self._world, self._world.clock.now_us()
        found = []
        for one in world.machines:
            listed = now >= one.made_us + world.faults.listed_after_s * 1e6
            there = one.gone_us is None or now < one.gone_us + world.faults.stale_s * 1e6
            if one.start.tag.startswith(prefix) and listed and there and not self._unknown(one):
                found.append(self._told(one))
        return found

    def output(self, machine: str) -> str:
        self._asked("output")
        one = next(one for one in self._world.machines if one.id == machine)
        if self._world.faults.no_sshd:
            return f"pulling\n{NO_SSHD} {one.start.nonce}\n"
        if self._world.faults.no_host_key:
            return "pulling\n"
        return f"pulling\n{READY} {one.start.nonce} {HOST_KEY}\nServer listening\n"

    def places(self, machine: str) -> tuple[str, ...]:
        return ()

    def give_back(self, machine: str) -> None:
        self._asked("give_back", before=True)
        faults = self._world.faults
        if faults.lies_about_deletion:
            faults.lies_about_deletion -= 1
            return
        for one in self._world.machines:
            if one.id == machine and one.gone_us is None and not self._unknown(one):
                one.gone_us = self._world.clock.now_us()
        self._asked("give_back", before=False)

    def bill(self, machine: str) -> Decimal | None:
        self._asked("bill")
        one = next(one for one in self._world.machines if one.id == machine)
        assert one.gone_us is not None
        return one.offer.usd_per_hour * (one.gone_us - one.made_us) / 3_600_000_000

    def _told(self, one: Machine) -> Rented:
        world = self._world
        number = world.machines.index(one)
        up = world.clock.now_us() >= one.made_us + world.boot_s * 1e6 and number >= world.faults.never_boots
        told = Rented(
            id=one.id,
            tag=one.start.tag,
            state=RentedState.RUNNING if up else RentedState.STARTING,
            host="127.0.0.1" if up else None,
            port=22 if up else None,
            usd_per_hour=None if number < world.faults.unpriced else world.faults.dearer or one.offer.usd_per_hour,
        )
        if number < world.faults.stops_at_boot:
            return replace(told, state=RentedState.STOPPED, host=None, port=None, why="no such image")
        return told

    def _asked(self, what: str, *, before: bool = True) -> None:
        """Count a call; the owner dies at one, a provider that is away answers none."""
        world = self._world
        if before:
            world.calls.append((what, world.clock.now_us()))
        if len(world.calls) == world.dies_at and world.after is not before:
            world.dies_at = 0
            raise Killed
        if before and world.faults.away:
            world.faults.away -= 1
            raise PeerError(Code.PROVIDER_UNREACHABLE, "world does not answer (timeout)")


OWNER = "gh-abcdefghij-"
CAPS = Caps(usd=Decimal("2.00"), seconds=4 * 3600, boot_s=600)


def begun(tmp_path: Path, world: World, caps: Caps = CAPS) -> Journal:
    """Return the journal of an owner who has decided to rent."""
    tmp_path.chmod(0o700)
    rental = Rental(
        run_id="c0ffee00" * 4,
        provider="world",
        created_us=world.clock.now_us(),
        caps=caps,
        python="python3",
        keeper=ProcessName.of(),
    )
    return Journal.create(Home(path=tmp_path), rental)


def renter(journal: Journal, world: World) -> Renter:
    """Return the owner's process, or a later one that finds the journal."""
    return Renter(journal, WorldProvider(world), clock=world.clock)


def take(journal: Journal, world: World, *, accept: bool = False) -> Attempt:
    """Rent the first offer of the world that comes up."""
    offers = WorldProvider(world).offers(OPTIONS)
    return renter(journal, world).take(offers, OPTIONS, owner=OWNER, ssh_public="ssh-ed25519 AAAA", accept=accept)
