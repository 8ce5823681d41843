"""The journal of rentals: what was requested of a provider, what it cost, and whether it is shown to be gone.

```
rentals/RUN/           0700
  rental.json          this module's record; each step is in it before it is taken
  key                  the key that logs in there, 0600; made for this rental alone
  known_hosts          the host keys that the machines printed
  bundle               what Glasshouse was brought along as
  lock                 held by the process that looks after it
```

Law: a machine that may exist at a provider has an attempt here that is not over; an attempt is over only when certainly
no machine was made, or when its machine is shown to be gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.define.wanted import Caps, Cluster
from glasshouse.jobs.owner.home import Home, is_folder, private_folder, read_state, write_state
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.providers.place.ways import file_option
from glasshouse.providers.rental.provider import Offer
from glasshouse.providers.serve.keepers import boot

POLL_S = 15.0
"""Between two questions about a machine that is awaited, or shall be gone."""
HOUR_S = 3600
RESERVE_S = 300
"""Between the order to stop and the cap: for sealing, wiping, fetching and giving back."""
_HOUR_US = HOUR_S * 1_000_000
_PLACE = re.compile(r"(?P<provider>[a-z]+):(?P<run>[0-9a-f]{8})(\.(?P<node>[1-9][0-9]{0,2}))?")


class Step(StrEnum):
    """Where an attempt to rent a machine is."""

    # The request that makes the machine is about to be sent, or was and has no answer.
    ASKED = "asked"
    MADE = "made"
    # It can be logged in to, by the host key that it printed.
    UP = "up"
    RETURNING = "returning"
    GONE = "gone"
    NEVER = "never"

    @property
    def over(self) -> bool:
        """Whether certainly no machine is there."""
        return self in (Step.GONE, Step.NEVER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One machine that was asked for."""

    tag: str  # its name at the provider
    nonce: str  # what it repeats beside its host key
    offer: Offer  # what was shown before it was asked for
    asked_us: int  # when
    step: Step = Step.ASKED  # where it is
    machine: str | None = None  # the provider's id, once there is one
    host: str | None = None  # where its sshd answers
    port: int | None = None
    places: tuple[str, ...] = ()  # where its places are, if it has no sshd of its own: one for each node
    host_key: str | None = None  # that it printed; None where it was accepted without
    up_us: int | None = None  # when it could be logged in to
    gone_us: int | None = None  # when it was shown to be gone; what it costs ends at the latest then
    bill_usd: Decimal | None = None  # by the provider's word; None where it has none
    why: str = ""  # why it was given back, if not at the end of the run

    def cost_usd(self, now_us: int) -> Decimal:
        """Return what it costs by its price, from when it was asked for until now or until it was gone."""
        if self.step is Step.NEVER:
            return Decimal(0)
        until_us = now_us if self.gone_us is None else self.gone_us
        return self.offer.usd_per_hour * max(0, until_us - self.asked_us) / _HOUR_US


@dataclass(frozen=True, kw_only=True, slots=True)
class Rental:
    """The record in `rental.json`."""

    run_id: str  # whose run it is for
    provider: str  # from whom
    created_us: int  # when it was decided
    caps: Caps  # what ends it
    python: str  # the interpreter on the machine
    keeper: ProcessName | None  # gives it back at the end of its run; when it is gone, another that claims it does
    keeper_host: str = ""  # where that runs, and since which start of that machine
    keeper_boot: str = ""
    cluster: Cluster | None = None  # of a provider that is one; None for others
    account: str = ""  # as of `Provider.account`: another account does not find the machine
    stopped_by: str = ""  # the cap that ended the run, in words; empty where none did
    attempts: tuple[Attempt, ...] = ()  # the machines that were asked for, in order

    @property
    def place(self) -> str:
        """The name of the place on its machine, as a run's record has it; of further nodes with ``.1`` and so on."""
        return f"{self.provider}:{self.run_id[:8]}"

    @property
    def places(self) -> tuple[str, ...]:
        """The names of all its places."""
        nodes = 1 if self.cluster is None else self.cluster.nodes
        return (self.place, *(f"{self.place}.{number}" for number in range(1, nodes)))

    @property
    def over(self) -> bool:
        """Whether all its machines are shown to be gone."""
        return all(attempt.step.over for attempt in self.attempts)

    @property
    def up(self) -> Attempt | None:
        """The machine that the run is on."""
        return next((attempt for attempt in self.attempts if attempt.step is Step.UP), None)

    @property
    def kept_elsewhere(self) -> bool:
        """Whether its keeper runs, or ran, on another machine: what became of it is not seen from here."""
        return self.keeper is not None and self.keeper_host not in ("", socket.gethostname())

    @property
    def kept(self) -> bool:
        """Whether a process looks after it; one on another machine is taken to."""
        if self.keeper is None or self.kept_elsewhere:
            return self.keeper is not None
        return self.keeper_boot in ("", boot()) and self.keeper.alive

    def cost_usd(self, now_us: int) -> Decimal:
        """Return what all its machines cost by their prices until now."""
        return sum((attempt.cost_usd(now_us) for attempt in self.attempts), Decimal(0))

    @property
    def billed_usd(self) -> Decimal | None:
        """What the provider billed for all machines that were made; None unless there is a bill of each."""
        bills = [one.bill_usd for one in self.attempts if one.step is not Step.NEVER]
        known = [bill for bill in bills if bill is not None]
        return sum(known, Decimal(0)) if bills and len(known) == len(bills) else None

    def to_json(self) -> dict[str, Any]:
        """Return the object in `rental.json`, with amounts of money as decimal text."""
        value: dict[str, Any] = json.loads(json.dumps(asdict(self), default="{:f}".format))
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Rental:
        """Inverse of `to_json`; raises FormatError, KeyError, TypeError, ValueError or InvalidOperation."""
        caps, cluster = value["caps"], value.get("cluster")
        read = {
            "caps": Caps(**caps | {"usd": _amount(caps["usd"])}),
            "cluster": cluster and Cluster(**cluster | {"sbatch": tuple(cluster["sbatch"])}),
            "keeper": value["keeper"] and ProcessName.from_json(value["keeper"]),
            "attempts": tuple(_attempt(one) for one in value["attempts"]),
        }
        return cls(**value | read)


class Journal:
    """One rental's folder, whose name is the run's id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = path / "key"
        self.known_hosts = path / "known_hosts"
        self.bundle = path / "bundle"
        self._record = path / "rental.json"

    @classmethod
    def of(cls, home: Home, run_id: str) -> Journal:
        """Return the journal of a run's rental, which may not exist."""
        return cls(home.rentals / run_id)

    @classmethod
    def create(cls, home: Home, rental: Rental) -> Journal:
        """Begin a rental's journal; raises `UsageError`."""
        private_folder(home.rentals)
        journal = cls(private_folder(home.rentals / rental.run_id))
        journal.save(_here(rental))
        with contextlib.suppress(OSError), journal.claimed():
            pass  # its lock is there: a disk without room keeps no other process from it later
        return journal

    @property
    def exists(self) -> bool:
        """Whether anything was rented."""
        return self._record.is_file()

    def load(self) -> Rental:
        """Return the record; raises `UsageError` for a damaged one."""
        value = read_state(self._record, what="rental")
        try:
            return Rental.from_json(value)
        except (FormatError, KeyError, TypeError, ValueError, InvalidOperation):
            raise UsageError(
                Code.USAGE,
                f"the record of a rental {self._record} is damaged",
                hint="look at the provider's own page for machines whose names begin with gh-, and end them there",
            ) from None

    def save(self, rental: Rental) -> Rental:
        """Write the record and return it; raises `UsageError`."""
        write_state(self._record, rental.to_json())
        return rental

    def update(self, **changes: Any) -> Rental:
        """Change fields of the record; raises `UsageError`."""
        changed = replace(self.load(), **changes)
        return self.save(_here(changed) if "keeper" in changes else changed)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Yield whether this process holds the rental's lock while the block lasts; raises `OSError`.

        A process claims a rental before it looks after it or ends it, and then reads the keeper in the record: a keeper
        that was named by another process may have no claim yet. The kernel drops the lock with the process.
        """
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
        finally:
            os.close(lock)

    def add(self, attempt: Attempt) -> None:
        """Note that a machine is about to be requested."""
        self.update(attempts=(*self.load().attempts, attempt))

    def note(self, tag: str, **changes: Any) -> Attempt:
        """Change an attempt and return it."""
        rental = self.load()
        changed = {one.tag: replace(one, **changes) if one.tag == tag else one for one in rental.attempts}
        self.save(replace(rental, attempts=tuple(changed.values())))
        return changed[tag]

    def ssh_files(self) -> tuple[str, str]:
        """Return ssh's options for key and host keys; raises `UsageError` for a path that ssh cannot take."""
        return file_option("IdentityFile", self.key), file_option("UserKnownHostsFile", self.known_hosts)

    def forget_key(self) -> None:
        """Remove key, host keys and bundle, which are of use for a machine that exists."""
        for path in (self.key, self.known_hosts, self.bundle):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)


def provider_at(place: str) -> str | None:
    """Return the provider of the rented machine that a place's name is of; None for any other name."""
    match = _PLACE.fullmatch(place)
    return None if match is None else match["provider"]


def rental_at(home: Home, place: str) -> tuple[Journal, int] | None:
    """Return the rental whose place has a name, and which of its nodes that is; None for any other name."""
    match = _PLACE.fullmatch(place)
    if match is None or not is_folder(home.rentals):
        return None
    for path in home.rentals.glob(f"{match['run']}*"):
        journal = Journal(path)
        if journal.exists and journal.load().provider == match["provider"]:
            return journal, int(match["node"] or 0)
    return None


def rentals(home: Home) -> Iterator[Journal]:
    """Yield the journals of all rentals of a home, in no order."""
    if is_folder(home.rentals):
        for path in home.rentals.iterdir():
            if (journal := Journal(path)).exists:
                yield journal


def _here(rental: Rental) -> Rental:
    return replace(rental, keeper_host=socket.gethostname(), keeper_boot=boot())


def _attempt(value: dict[str, Any]) -> Attempt:
    offer = value["offer"]
    read = {
        "offer": Offer(**offer | {"usd_per_hour": Decimal(offer["usd_per_hour"])}),
        "step": Step(value["step"]),
        "places": tuple(value.get("places", ())),
        "bill_usd": _amount(value["bill_usd"]),
    }
    return Attempt(**value | read)


def _amount(text: str | None) -> Decimal | None:
    return None if text is None else Decimal(text)


def deadline_us(rental: Rental) -> tuple[int, str]:
    """Return when a run on a rented machine is asked to end, in time to give it back, and by which cap."""
    by_time_us = rental.created_us + (rental.caps.seconds - RESERVE_S) * 1_000_000
    attempt = next(one for one in reversed(rental.attempts) if not one.step.over)
    price = attempt.offer.usd_per_hour
    if rental.caps.usd is None or not price:
        return by_time_us, "time"
    spent = sum((one.cost_usd(attempt.asked_us) for one in rental.attempts if one.tag != attempt.tag), Decimal(0))
    by_money_us = attempt.asked_us + (int((rental.caps.usd - spent) / price * HOUR_S) - RESERVE_S) * 1_000_000
    return min((by_time_us, "time"), (by_money_us, "money"))
