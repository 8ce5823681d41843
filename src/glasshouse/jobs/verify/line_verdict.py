"""What `verify` found of a line, in words for people and for machines: of each leg where, which steps, and its end."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.errors import ExitCode, GlasshouseError
from glasshouse.jobs.verify.line_chain import WalkedLeg, walk_line
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.wire.canonical import Json
from glasshouse.wire.states import Outcome

NO_RECEIPT, NOT_ENDED, INVALID, NEVER_PLACED = "none", "not-ended", "invalid", "never-placed"
"""What there is instead of a receipt that holds, beside `verified` and `incomplete`."""
_WHY = {"lease": "nothing was heard of it for its lease", "lost": "its owner reported its machines gone"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LegRun:
    """A run that its owner has of a leg, on one machine, and what its receipt is worth."""

    leg: int
    run_id: str
    machine: int  # of its group, from 0
    receipt: str  # `verified`, `incomplete`, or what there is instead
    verdict: Verdict | None = None  # on the receipt, where it holds
    refused: GlasshouseError | None = None  # why it does not
    next: str = ""  # what to do about it

    @property
    def left(self) -> str:
        """What it left, in words."""
        name = f"run {self.run_id[:8]}" + (f", machine {self.machine}" if self.machine else "")
        if self.refused is not None:
            return f"{name}: its receipt does NOT HOLD: {self.refused.message} [{self.refused.code}]"
        told = {
            NO_RECEIPT: "it left no receipt, and its wiping is NOT SHOWN",
            NOT_ENDED: "it has not ended, as far as is known here",
            NEVER_PLACED: "no runtime was started for it, and no key was released",
        }
        text = told.get(self.receipt)
        if text is None:
            assert self.verdict is not None  # noqa: S101 - its receipt holds
            lacks = "" if not self.verdict.lacks else f"its receipt lacks {self.verdict.lacks}; its own word: "
            text = lacks + self.verdict.how
        return f"{name}: {text}"

    @property
    def words(self) -> str:
        """What it left, for people, and what to do about it."""
        return self.left + (f"; {self.next}" if self.next else "")

    def to_json(self) -> dict[str, Json]:
        """Return it for programs."""
        return {
            "code": None if self.refused is None else self.refused.code.value,
            "leg": self.leg,
            "machine": self.machine,
            "receipt": self.receipt,
            "run_id": self.run_id,
            "says": self.words,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class LineVerdict:
    """A line all of whose documents hold, from the first machine to the last."""

    line: bytes  # its id
    legs: tuple[WalkedLeg, ...]
    runs: tuple[LegRun, ...] = ()  # all that its owner has of it; none where its file alone was verified

    @property
    def last(self) -> WalkedLeg:
        """The last leg."""
        return self.legs[-1]

    @property
    def beyond(self) -> tuple[LegRun, ...]:
        """The runs that no leg here is the word on: of a leg after the last, or of one that another was released."""
        walked = {one.chain.receipt.run_id for leg in self.legs for one in leg.machines}
        walked |= {run_id for leg in self.legs if leg.abandoned is not None for run_id in leg.abandoned.run_ids}
        walked |= {ticket.run_id for leg in self.legs for ticket in leg.tickets}
        return tuple(run for run in self.runs if run.run_id not in walked)

    @property
    def status(self) -> Status:
        """What the weakest receipt is worth, and how the last leg ended; one that left nothing did not end well."""
        if not self.last.whole or any(one.status is Status.INCOMPLETE for leg in self.legs for one in leg.machines):
            return Status.INCOMPLETE
        # Without anything of its gate, it is not known whether a leg after the last was released.
        if any(run.leg > self.last.number and run.receipt != NEVER_PLACED for run in self.runs):
            return Status.INCOMPLETE
        good = all(one.status is Status.GOOD for one in self.last.machines)
        return Status.GOOD if good else Status.NOT_COMPLETED

    @property
    def not_wiped(self) -> tuple[int, ...]:
        """The legs of which nothing shows that every machine wiped itself."""
        return tuple(leg.number for leg in self.legs if not is_wiped(leg))

    @property
    def assurance(self) -> str:
        """The level, where all legs have the same."""
        return " and ".join(sorted({one.assurance for leg in self.legs for one in leg.machines}))

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command with this verdict: that of how the last leg ended."""
        if self.status is Status.INCOMPLETE:
            return ExitCode.INCOMPLETE
        worst = [one for one in self.last.machines if one.outcome is not Outcome.COMPLETED]
        return worst[0].exit_code if worst else ExitCode.DONE

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level, and what is not shown."""
        legs = "one leg" if len(self.legs) == 1 else f"{len(self.legs)} legs"
        whole = f"line {self.line.hex()[:8]}, {legs} (assurance {self.assurance})"
        text = {
            Status.GOOD: f"Authentic and complete: {whole}: the training completed in the last.",
            Status.NOT_COMPLETED: f"Authentic: {whole}: the training did not complete.",
            Status.INCOMPLETE: f"Incomplete: {whole}: nothing contradicts it, but a receipt lacks what would vouch "
            "for it, or the last leg left none.",
        }[self.status]
        for run in self.beyond:
            text += f" Leg {run.leg}, {run.left}."
        if self.not_wiped:
            named = ", ".join(map(str, self.not_wiped))
            text += f" That the machines of leg {named} wiped themselves is NOT SHOWN."
        if early := [str(leg.number) for leg in self.legs if leg.completed_too_soon]:
            text += f" A receipt of leg {', '.join(early)} says completed, and the line WENT ON after it."
        return f"{text} {min(self._receipts, key=lambda one: one.strength).proves}"

    @property
    def _receipts(self) -> list[Verdict]:
        return [one for leg in self.legs for one in leg.machines]

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        return {
            "assurance": self.assurance,
            "kind": "line",
            "legs": [_leg(leg) for leg in self.legs],
            "line": self.line.hex(),
            "not_wiped": list(self.not_wiped),
            "runs": [run.to_json() for run in self.runs],
            "status": self.status.value,
            "verdict": self.sentence,
        }


def is_wiped(leg: WalkedLeg) -> bool:
    """Return whether receipts show that every machine of a leg ended by wiping itself."""
    return leg.whole and all(one.outcome is not Outcome.RESIDUE and not one.lacks for one in leg.machines)


def leg_words(leg: WalkedLeg) -> str:
    """Return a leg for people: where, which steps, how it ended, and whether its wiping is shown."""
    stated = () if leg.abandoned is None else leg.abandoned.run_ids  # of all its machines
    runs = stated or [one.chain.receipt.run_id for one in leg.machines] or [ticket.run_id for ticket in leg.tickets[:1]]
    where = "run " + ", ".join(run[:8] for run in runs) if runs else "a run that its gate had forgotten"
    back = ", an older one by its owner's order" if leg.rewind else ""
    begun = "the beginning" if not leg.seq else f"checkpoint {leg.seq}{_at(leg.step)}{back}"
    last = "" if leg.last is None else f", left checkpoint {leg.last.seq}{_at(leg.last.step)}"
    why = "" if leg.abandoned is None else f"abandoned: {_WHY[leg.abandoned.why]}; "
    if leg.whole:
        ends = " and ".join(dict.fromkeys(one.outcome.value for one in leg.machines))
        lacks = ", ".join(dict.fromkeys(one.lacks for one in leg.machines if one.lacks))
        not_shown = f"its wiping is NOT SHOWN: its receipt lacks {lacks}" if lacks else "something was FOUND after it"
        ended = f"{why}{ends}; " + ("wiped, by its receipt" if is_wiped(leg) else not_shown)
    else:
        ended = f"{why}its wiping is NOT SHOWN"
    if leg.completed_too_soon:
        ended += "; its receipt says completed, and the line WENT ON after it: its outputs are not the line's"
    return f"{where}: from {begun}{last}; {ended}"


def _at(step: int | None) -> str:
    return "" if step is None else f" (step {step})"


def _leg(leg: WalkedLeg) -> dict[str, Json]:
    last = leg.last
    return {
        "abandoned": None
        if leg.abandoned is None
        else {"run_ids": list(leg.abandoned.run_ids), "why": leg.abandoned.why, "time_us": leg.abandoned.time_us},
        "begins": {"rewind": leg.rewind, "seq": leg.seq, "step": leg.step},
        "last": None if last is None else {"digest": last.digest.hex(), "seq": last.seq, "step": last.step},
        "leg": leg.number,
        "receipts": [one.to_json() for one in leg.machines],
        "wiped": is_wiped(leg),
    }


def verify_line(data: bytes, *, owner: bytes, now_us: int | None = None, open_end: bool = False) -> LineVerdict:
    """Verify a line file; `open_end` and what it raises are as of `walk_line`."""
    line, legs = walk_line(data, owner=owner, now_us=now_us, open_end=open_end)
    return LineVerdict(line=line, legs=legs)
