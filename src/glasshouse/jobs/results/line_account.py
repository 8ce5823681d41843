"""What each leg of a run's line did, for people and for programs; what counts is what `verify` finds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from glasshouse.errors import GlasshouseError
from glasshouse.jobs.gates.line_notes import KnownLeg, LineNotes, known_legs
from glasshouse.jobs.owner.home import Home, is_there
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import Phase, RunRecord
from glasshouse.jobs.places.rented_machine import statement_of
from glasshouse.jobs.verify.conclusion import conclude_run
from glasshouse.jobs.verify.verdict import Status
from glasshouse.wire.lines.statements import ResumeOrder, Ticket
from glasshouse.wire.states import Outcome

_WITH_RECEIPT = (Status.GOOD.value, Status.NOT_COMPLETED.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class LegAccount:
    """What one leg did, by its record and by what its gate showed."""

    leg: int
    run_id: str
    place: str  # a rented machine's name begins with its provider's
    seq: int  # of the checkpoint that it began from
    from_step: int | None  # None where that is not known here
    to_step: int | None  # as far as it was seen
    last: int | None  # the number of its last checkpoint that is known
    rewind: bool
    outcome: str | None  # None while it goes on
    code: str | None
    wiped: bool | None  # whether a receipt shows that it wiped itself; None while it goes on
    usd: str | None  # what its machines cost by their price; None where nothing was rented

    @property
    def words(self) -> str:
        """All of it in a line for people."""
        steps = ""
        if self.to_step is not None:
            begun = "" if self.from_step is None else f"{self.from_step} to "
            steps = f", steps {begun}{self.to_step}"
        begun = (
            "the beginning" if not self.seq else f"checkpoint {self.seq}" + (" by your order" if self.rewind else "")
        )
        why = f" ({self.code})" if self.code not in (None, self.outcome) else ""
        shown = {True: "; wiped, by its receipt", False: "; its wiping is not shown", None: ""}[self.wiped]
        cost = "" if self.usd is None else f"; {float(self.usd):.2f} $"
        kept = "" if self.last is None else f", left checkpoint {self.last}"
        ended = "goes on" if self.outcome is None else self.outcome
        return f"leg {self.leg}: {self.place}, from {begun}{steps}{kept}; {ended}{why}{shown}{cost}"

    def to_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "leg": self.leg,
            "run_id": self.run_id,
            "place": self.place,
            "begins": {"seq": self.seq, "step": self.from_step, "rewind": self.rewind},
            "step": self.to_step,
            "last_checkpoint": self.last,
            "outcome": self.outcome,
            "code": self.code,
            "wiping_shown": self.wiped,
            "cost_usd": self.usd,
        }


def line_account(home: Home, record: RunRecord) -> list[LegAccount]:
    """Return what each leg of a run's line that is here did, up to the run's own; nothing for a run of no line."""
    if record.line is None:
        return []
    legs = [leg for leg in known_legs(home, record.line) if leg.number <= (record.leg or 0)]
    steps, found = {0: 0}, list[LegAccount]()
    for leg in legs:
        tickets = [Ticket.parse(envelope.payload) for envelope in LineNotes(leg.folder).tickets()]
        steps |= {ticket.seq: ticket.step for ticket in tickets}
        found.append(_account(home, leg, tickets, steps))
    return found


def _account(home: Home, leg: KnownLeg, tickets: list[Ticket], steps: Mapping[int, int]) -> LegAccount:
    record, order = _ended(home, leg), LineNotes(leg.folder).order
    ordered = None if order is None else ResumeOrder.parse(order.payload)
    seq = 0 if ordered is None else ordered.seq
    done = None if record.progress is None else record.progress.get("done")
    last = max((ticket.seq for ticket in tickets), default=None)
    reached = max([*([done] if isinstance(done, int) else []), *(ticket.step for ticket in tickets)], default=None)
    ended = record.phase is Phase.ENDED
    return LegAccount(
        leg=leg.number,
        run_id=record.run_id,
        place=record.place,
        seq=seq,
        from_step=steps.get(seq),
        to_step=reached,
        last=last,
        rewind=ordered is not None and ordered.rewind,
        outcome=record.outcome,
        code=record.code,
        wiped=(record.verdict in _WITH_RECEIPT and record.outcome != Outcome.RESIDUE) if ended else None,
        usd=_cost(home, leg),
    )


def _ended(home: Home, leg: KnownLeg) -> RunRecord:
    """Return a leg's record; of one that was given up, and whose receipt came later, with the end that this has."""
    record, folder = leg.record, leg.folder
    if record.phase is not Phase.ENDED or record.verdict in _WITH_RECEIPT or not is_there(folder.receipt):
        return record
    found = conclude_run(folder, None, owner_signing=read_public(home.owner_public).signing, home=home)
    code = None if found.code is None else found.code.value
    return replace(record, outcome=found.outcome.value, code=code, verdict=found.verdict)


def _cost(home: Home, leg: KnownLeg) -> str | None:
    try:
        told = statement_of(home, leg.folder, time.time_ns() // 1000)
    except GlasshouseError:
        return None
    return None if told is None else str(told["cost_usd"])
