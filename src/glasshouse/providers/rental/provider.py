"""What every provider of rented machines offers: offers, a machine, its way back, and what shows that it is gone.

Laws: the tag of a machine is in the request that creates it, so a machine whose creation was never answered can be
found; a call that may have created one and was not answered raises `UncertainError` and nothing else; prices and
states are the provider's word.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Protocol

from glasshouse.errors import Code, PeerError

__all__ = [
    "Offer",
    "Options",
    "Provider",
    "Rented",
    "RentedState",
    "Start",
    "UncertainError",
]


class UncertainError(PeerError):
    """A machine was asked for, and whether it was made, or is gone again, is not known.

    Attributes:
        machine: its id, where one was named: it was made, is not to be used, and may still be there.
    """

    def __init__(self, provider: str, why: str, *, machine: str | None = None) -> None:
        super().__init__(
            Code.RENTAL_UNCERTAIN,
            f"{provider} did not say whether it made the machine that was asked for: {why}",
            hint="glasshouse sweep looks for it, and gives it back",
        )
        self.machine = machine


class RentedState(StrEnum):
    """Where a machine is, by its provider's word."""

    STARTING = "starting"
    RUNNING = "running"
    # Its process ended or it was stopped: it trains no more, and its disk is billed until it is given back.
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What a machine must have; `[machine]` of a job file.

    Attributes:
        gpu: kinds that will do, as people write them (``RTX 4090``, ``A100 80GB``); empty for any, or for none.
        gpus: how many of one kind; 0 for a machine without.
        memory_gb: the machine's memory, at least; 0 for any. Gigabytes are 10^9 bytes.
        disk_gb: room for image, package and outputs, at least.
        regions: where it may stand, in the provider's words; empty for anywhere.
        most_per_hour_usd: the most that it may cost.
        spot: whether one will do that its provider may take back at any moment.
        image: the container image.
    """

    gpu: tuple[str, ...]
    gpus: int
    memory_gb: int
    disk_gb: int
    regions: tuple[str, ...]
    most_per_hour_usd: Decimal
    spot: bool
    image: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A machine that could be rented now.

    Attributes:
        id: what `rent` names; the provider's.
        gpu: its kind of GPU, in the provider's words; empty for none.
        gpus: how many.
        gpu_memory_gb: of each.
        memory_gb, disk_gb: what it comes with.
        region: where it stands, in the provider's words; empty where it does not say.
        usd_per_hour: all of it together: GPUs, disk and what else is billed by time.
        spot: whether the provider may take it back at any moment.
    """

    id: str
    gpu: str
    gpus: int
    gpu_memory_gb: int
    memory_gb: int
    disk_gb: int
    region: str
    usd_per_hour: Decimal
    spot: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a machine is made with; nothing of it is secret.

    Attributes:
        tag: its name at the provider, ``gh-OWNER-RUN-N``: letters, digits and hyphens.
        nonce: what the machine repeats beside its host key, 32 hex characters.
        ssh_public: the key that may log in, one line in the form of ``authorized_keys``.
        ends_s: the machine ends itself after so long, with or without its owner.
        ends_at_s: and at this time by its own clock, however often it was started anew; seconds since 1970.
        options: what it was chosen by.
    """

    tag: str
    nonce: str
    ssh_public: str
    ends_s: int
    ends_at_s: int
    options: Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Rented:
    """A machine at its provider, by the provider's word.

    Attributes:
        id: the provider's.
        tag: as of `Start`.
        state: where it is.
        host, port: where its sshd answers; None until that is known, or where it is reached otherwise.
        usd_per_hour: what it costs; None where that is not said.
        why: what the provider says of its state, for people; may be empty.
    """

    id: str
    tag: str
    state: RentedState
    host: str | None = None
    port: int | None = None
    usd_per_hour: Decimal | None = None
    why: str = ""


class Provider(Protocol):
    """Whom machines are rented from.

    Every method may raise, beside what it names: `PeerError` `provider-unreachable` (no answer, too many requests or
    its own failure, after some tries), `provider-protocol` (an answer that its description does not allow); and
    `UsageError` `provider-key` (401 and 403) and `provider-money` (402: the account has none).

    Attributes:
        name: as people write it: ``runpod``, ``vast``.
        settles_s: a machine that was made is in listings after so long at the latest.
        user: who logs in.
        has_sshd: whether its machines run an sshd of their own, whose host key they print; those of others are reached
            at what `places` returns.
    """

    name: str
    settles_s: float
    user: str
    has_sshd: bool

    def account(self, salt: str) -> str:
        """Return what tells this key and address from others, and not what they are; empty where there is none."""

    def offers(self, options: Options) -> list[Offer]:
        """Return what fits, the cheapest first.

        Raises:
            UsageError: `usage` for a kind of GPU or region that the provider does not have; names the nearest.
        """

    def rent(self, offer: Offer, start: Start) -> str:
        """Make a machine, and return its id.

        Raises:
            UncertainError: whether it was made is not known.
            PlatformError: `no-offer`: it has gone meanwhile, or costs more now; nothing was made.
        """

    def find(self, machine: str) -> Rented | None:
        """Return a machine by its id; None once it does not exist any more."""

    def tagged(self, prefix: str) -> list[Rented]:
        """Return all machines of this account whose tags begin so: every page of every kind of listing."""

    def output(self, machine: str) -> str:
        """Return what the machine's start command printed, at most its first 64 KiB; empty while there is nothing."""

    def places(self, machine: str) -> tuple[str, ...]:
        """Return the addresses of the places on a machine without an sshd of its own; none before all are up."""

    def give_back(self, machine: str) -> None:
        """Destroy a machine, its disk too; one that does not exist any more is fine."""

    def bill(self, machine: str) -> Decimal | None:
        """Return what it cost, in US dollars; None where the provider does not say, or not yet."""
