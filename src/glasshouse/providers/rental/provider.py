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
    """What a machine must have; `[machine]` of a job file. Gigabytes are 10^9 bytes."""

    gpu: tuple[str, ...]  # kinds that will do, as people write them (RTX 4090, A100 80GB); empty for any, or for none
    gpus: int  # of one kind; 0 for a machine without
    memory_gb: int  # the machine's memory, at least; 0 for any
    disk_gb: int  # room for image, package and outputs, at least
    regions: tuple[str, ...]  # where it may stand, in the provider's words; empty for anywhere
    most_per_hour_usd: Decimal
    spot: bool  # whether one will do that its provider may take back at any moment
    image: str  # the container image


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A machine that could be rented now; its words are the provider's."""

    id: str  # what `rent` names
    gpu: str  # the kind; empty for none
    gpus: int
    gpu_memory_gb: int = 0  # of each
    memory_gb: int
    disk_gb: int
    region: str  # empty where the provider does not say
    usd_per_hour: Decimal  # all of it together: GPUs, disk and what else is billed by time
    spot: bool = False  # whether the provider may take it back at any moment


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a machine is made with; nothing of it is secret."""

    tag: str  # its name at the provider, gh-OWNER-RUN-N: letters, digits and hyphens
    nonce: str  # what the machine repeats beside its host key, 32 hex characters
    ssh_public: str  # the key that may log in, one line in the form of authorized_keys
    ends_s: int  # the machine ends itself after so long, with or without its owner
    ends_at_s: int  # and at this time by its own clock, however often it was started anew; seconds since 1970
    options: Options  # what it was chosen by


@dataclass(frozen=True, kw_only=True, slots=True)
class Rented:
    """A machine at its provider, by the provider's word."""

    id: str
    tag: str  # as of `Start`
    state: RentedState
    host: str | None = None  # where its sshd answers; None until that is known, or where it is reached otherwise
    port: int | None = None
    usd_per_hour: Decimal | None = None  # None where the provider does not state it
    why: str = ""  # the provider's words for its state, for people


class Provider(Protocol):
    """An account at a provider.

    Every method may raise, beside what it names: `PeerError` `provider-unreachable` (no answer, too many requests or
    its own failure, after some tries), `provider-protocol` (an answer that its description does not allow); and
    `UsageError` `provider-key` (401 and 403) and `provider-money` (402: the account has none).
    """

    name: str  # as people write it: runpod, vast
    settles_s: float  # a machine that was made is in listings after so long at the latest
    user: str  # who logs in
    # Whether its machines run an sshd of their own, whose host key they print; others are reached at `places`.
    has_sshd: bool

    def account(self, salt: str) -> str:
        """Return what differs between keys and addresses, and does not show them; empty where there is none."""
        return ""

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
        return ()

    def give_back(self, machine: str) -> None:
        """Destroy a machine, its disk too; one that does not exist any more is fine."""

    def bill(self, machine: str) -> Decimal | None:
        """Return what it cost, in US dollars; None where the provider does not say, or not yet."""
