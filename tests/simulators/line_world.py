"""A line in memory: legs of one world, each a whole run with its receipt, and what owner and gate sign about them.

Told by the tests of `verify` and written down as vectors by spec/vectors/generate_checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from glasshouse.errors import Code
from glasshouse.evidence.receipt import LastCheckpoint, Leg
from glasshouse.handshake.launch import TokenClaims
from glasshouse.jobs.verify.line_file import LegDocuments, LineFile
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import LegAbandoned, ResumeOrder, Ticket
from glasshouse.wire.states import Outcome
from simulators.world import START_US, Run, World

__all__ = ["LINE", "LINE_STORIES", "LegWorld", "Line", "LineStory", "checkpoint", "good_line"]

LINE = bytes(range(32))
_STEPS = 50


def checkpoint(seq: int, fork: str = "") -> bytes:
    """Return the digest of a checkpoint of the line."""
    return sha256(f"checkpoint {seq} {fork}".encode())


@dataclass
class LegWorld(World):
    """One leg: another run, runtime and launch of the same owner, gate, package and deployment.

    Attributes:
        leg: which.
        start: where it begins; None for a run of no line.
        last: the last checkpoint that its receipt names.
    """

    leg: int = 1
    start: LineStart | None = None
    last: int | None = None
    attempt: str = ""
    ranks: int = 1
    machines: int = 1
    machine: int = 0
    group: str = "group"

    def id(self, label: str) -> str:
        return super().id(f"{label} of leg {self.leg}{self.attempt}" if label in ("run", "token") else label)

    def key(self, label: str) -> SigningKey:
        mine = label in ("launch", "evidence")
        return super().key(f"{label} of leg {self.leg}{self.attempt}" if mine else label)

    def token_claims(self, **changes: object) -> TokenClaims:
        start = None if self.start is None else replace(self.start, previous=None)
        place = {"machines": self.machines, "machine": self.machine, "ranks": self.ranks}
        group = None if self.machines * self.ranks == 1 else Group(id=self.digest(self.group), **place)
        return super().token_claims(**{"line": start, "group": group, **changes})

    def begins(self) -> LineStart | None:
        return self.start

    def run(self, **how: Any) -> Run:
        change = how.pop("change", lambda receipt: receipt)
        return super().run(**how, change=lambda receipt: change(replace(receipt, line=self._line())))

    def _line(self) -> Leg | None:
        if self.start is None:
            return None
        last = self.last and LastCheckpoint(digest=checkpoint(self.last), seq=self.last, step=_STEPS * self.last)
        names = ("id", "leg", "seq", "checkpoint", "rewind", "counted")
        return Leg(**{name: getattr(self.start, name) for name in names}, last=last or None)


@dataclass
class Line:
    """A line that is told leg by leg; `legs` are what its file has."""

    world: LegWorld = field(default_factory=LegWorld)
    legs: list[LegDocuments] = field(default_factory=list)
    seq: int = 0  # of its head
    greatest: int = 0
    holder: str | None = None

    def __post_init__(self) -> None:
        self.owner, self.broker = self.world.owner, self.world.broker
        self.about: dict[str, Any] = {"deployment": self.world.record.deployment, "line": LINE}

    def start(self, **changes: Any) -> LineStart:
        """Return where the next leg begins."""
        given = {
            "id": LINE,
            "leg": len(self.legs) + 1,
            "seq": self.seq,
            "checkpoint": checkpoint(self.seq) if self.seq else None,
            "counted": self.greatest if self.greatest > self.seq else 0,
            "previous": self.holder,
        }
        return LineStart(**(given | changes))

    def leg(
        self,
        counted: Sequence[int] = (),
        *,
        abandoned: str = "",
        rewind: int | None = None,
        attempt: str = "",
        **how: Any,
    ) -> LegWorld:
        """Tell the next leg, which counts some checkpoints and leaves a receipt, unless it is abandoned."""
        number, order = len(self.legs) + 1, None
        if rewind is not None:
            self.seq = rewind
            order = self.order(number, rewind)
        start = self.start(rewind=rewind is not None)
        last = counted[-1] if counted else None
        world = replace(self.world, leg=number, start=start, last=last, attempt=attempt)
        tickets = []
        for seq in counted:
            tickets.append(self.ticket(world, seq))
            self.seq = self.greatest = seq
        self.holder = world.evidence_key.key_id
        run = None if abandoned else world.run(**how)
        self.legs.append(
            LegDocuments(
                abandoned=self.abandoned(world, abandoned) if abandoned else None,
                bundles=() if run is None else (run.bundle.to_json(),),
                order=order,
                tickets=tuple(tickets),
            )
        )
        return world

    def order(self, leg: int, seq: int) -> Envelope:
        order = ResumeOrder(
            **self.about, leg=leg, seq=seq, digest=checkpoint(seq), rewind=True, serial_us=START_US + leg
        )
        return order.sign(self.owner)

    def ticket(self, world: LegWorld, seq: int, *, fork: str = "", **changes: Any) -> Envelope:
        ticket = Ticket(
            **self.about,
            counted_us=START_US + seq,
            digest=checkpoint(seq, fork),
            holder=world.evidence_key.key_id,
            leg=world.leg,
            manifest_sha256=world.manifest.sha256,
            previous=checkpoint(self.seq) if self.seq else None,
            run_id=world.id("run"),
            seq=seq,
            step=_STEPS * seq,
        )
        return replace(ticket, **changes).sign(self.broker)

    def abandoned(self, world: LegWorld, why: str, **changes: Any) -> Envelope:
        said = LegAbandoned(
            **self.about,
            leg=world.leg,
            evidence=(world.evidence_key.key_id,),
            manifest_sha256=world.manifest.sha256,
            run_ids=(world.id("run"),),
            seq=self.greatest,
            digest=checkpoint(self.greatest) if self.greatest else None,
            time_us=START_US,
            why=why,
        )
        return replace(said, **changes).sign(self.broker)

    def change(self, leg: int, **changes: Any) -> None:
        """Exchange documents of a leg."""
        self.legs[leg - 1] = replace(self.legs[leg - 1], **changes)

    @property
    def data(self) -> bytes:
        return LineFile(legs=tuple(self.legs)).encode()


STOPPED: dict[str, Any] = {"outcome": Outcome.INTERRUPTED, "code": Code.INTERRUPTED}


def good_line() -> Line:
    """A machine that was stopped, one that was lost, and one on which the training completed."""
    line = Line()
    line.leg((1, 2), **STOPPED)
    line.leg((3,), abandoned="lost")
    line.leg((4,))
    return line


def rewound_line() -> Line:
    """A line that its owner had go back."""
    line = Line()
    line.leg((1, 2, 3), **STOPPED)
    line.leg((), rewind=2, **STOPPED)
    line.leg((4,))
    return line


@dataclass(frozen=True)
class LineStory:
    """What is wrong with a line, and the code that it gets; None for nothing."""

    told: str
    code: Code | None
    forge: Callable[[], Line]
    name: str


def _with(change: Callable[[Line], object], line: Callable[[], Line] = good_line) -> Callable[[], Line]:
    def forge() -> Line:
        made = line()
        change(made)
        return made

    return forge


def _second_ticket(line: Line) -> None:
    world = LegWorld(leg=1)
    twice = line.ticket(world, 2, fork="other", previous=checkpoint(1))
    line.change(1, tickets=(*line.legs[0].tickets, twice))


def _second_release(line: Line) -> None:
    other = Line()
    other.leg((1, 2), attempt=" again", **STOPPED)
    line.change(1, bundles=(*line.legs[0].bundles, *other.legs[0].bundles))


def _abandoned_and_released() -> Line:
    line, other = Line(), Line()
    other.leg((1,), attempt=" again", **STOPPED)
    line.leg((1,), abandoned="lease")
    line.change(1, bundles=other.legs[0].bundles)
    line.leg(())
    return line


def _forgot_a_ticket() -> Line:
    line = Line()
    line.leg((1, 2), **STOPPED)
    line.seq = line.greatest = 1
    line.leg(())
    return line


def _went_back_unasked(line: Line) -> None:
    line.change(2, order=None)


def _order_of_another(line: Line) -> None:
    line.change(2, order=line.order(2, 1))


def _foreign() -> Line:
    line, other = good_line(), Line()
    for leg in (1, 2):
        other.leg((leg,), **STOPPED)
    foreign = LegWorld(leg=3, start=replace(line.start(leg=3, seq=3, checkpoint=checkpoint(3)), id=bytes(32)))
    line.change(3, bundles=(foreign.run().bundle.to_json(),))
    return line


def _other_machine() -> Line:
    line = Line()
    line.leg((1,), **STOPPED)
    line.holder = LegWorld(leg=7).evidence_key.key_id
    line.leg(())
    return line


def _without(leg: int, *members: str) -> Callable[[Line], None]:
    empty: dict[str, Any] = {"abandoned": None, "bundles": (), "order": None, "tickets": ()}
    return lambda line: line.change(leg, **{name: empty[name] for name in members})


def _completed_first() -> Line:
    line = Line()
    line.leg((1,))
    return line


def _lost_last() -> Line:
    line = good_line()
    line.change(3, bundles=())
    return line


def _gate_put_back() -> Line:
    """A gate that had forgotten leg 2, whose machine was lost, and does not know its holder."""
    line = Line()
    line.leg((1,), **STOPPED)
    lost = line.leg((), abandoned="lost")
    line.change(2, abandoned=line.abandoned(lost, "lost", evidence=(), run_ids=()))
    line.holder = "0" * 32
    line.leg(())
    return line


def _holder_noted() -> Line:
    """A gate that had forgotten leg 2, and that its store's note told the holder of."""
    line = Line()
    line.leg((1,), **STOPPED)
    lost = line.leg((), abandoned="lost")
    line.change(2, abandoned=line.abandoned(lost, "lost", run_ids=()))
    line.leg(())
    return line


def _two_machines(*groups: str) -> Line:
    """A leg on two machines that its gate had forgotten but for the holder; both receipts came later."""
    line = Line()
    worlds = [
        LegWorld(leg=1, start=line.start(), attempt=f" on {machine}", machines=2, machine=machine, group=group)
        for machine, group in enumerate(groups)
    ]
    line.legs.append(
        LegDocuments(
            abandoned=line.abandoned(worlds[0], "lost", run_ids=()),
            bundles=tuple(world.run().bundle.to_json() for world in worlds),
        )
    )
    return line


def _two_ranks() -> Line:
    line = Line()
    line.leg((1,), **STOPPED)
    world = LegWorld(leg=2, start=line.start(), ranks=2)
    line.legs.append(LegDocuments(bundles=(world.run().bundle.to_json(),)))
    return line


def _lying_receipt() -> Line:
    line = Line()
    line.leg((1,), **STOPPED)
    line.leg((2,), change=lambda receipt: replace(receipt, line=replace(receipt.line, seq=0, checkpoint=None)))
    return line


LINE_STORIES = [
    LineStory("three machines, of which the second was lost", None, good_line, "good"),
    LineStory("one leg", None, _completed_first, "one-leg"),
    LineStory("a rewind that its owner ordered", None, rewound_line, "rewind"),
    LineStory("a gate that was put back from a backup of before leg 2", None, _gate_put_back, "gate-put-back"),
    LineStory("a gate that was put back from such a backup beside its store, whose note names the holder", None,
              _holder_noted, "holder-noted"),
    LineStory("two receipts of a leg on two machines, of which its gate had forgotten all but the holder", None,
              lambda: _two_machines("group", "group"), "holder-noted-group"),
    LineStory("receipts of two groups for one leg that its gate had forgotten", Code.GROUP_MISMATCH,
              lambda: _two_machines("group", "other"), "two-groups"),
    LineStory("a receipt that came after its leg was abandoned", None,
              _with(lambda line: line.change(1, abandoned=line.abandoned(
                  LegWorld(leg=1), "lease", seq=2, digest=checkpoint(2)))), "receipt-came-late"),
    LineStory("two tickets with one number", Code.LINE_FORKED, _with(_second_ticket), "two-tickets"),
    LineStory("two releases of one leg", Code.LINE_FORKED, _with(_second_release), "two-releases"),
    LineStory("one machine left a receipt, and another of the same leg was abandoned", Code.LINE_FORKED,
              _abandoned_and_released, "abandoned-and-released"),
    LineStory("a leg that begins before what the one before it counted", Code.LINE_FORKED, _forgot_a_ticket,
              "went-back"),
    LineStory("a leg that follows another machine than the one before it", Code.LINE_FORKED, _other_machine,
              "other-machine"),
    LineStory("a ticket for another machine than the leg's", Code.LINE_FORKED,
              _with(lambda line: line.change(1, tickets=(line.ticket(
                  LegWorld(leg=1), 1, holder="0" * 32, previous=None), line.legs[0].tickets[1]))), "ticket-of-another"),
    LineStory("a ticket that the broker did not sign", Code.SIGNATURE,
              _with(lambda line: line.change(1, tickets=(Ticket.parse(line.legs[0].tickets[0].payload).sign(
                  line.owner), line.legs[0].tickets[1]))), "ticket-unsigned"),
    LineStory("a leg that its gate abandoned before a checkpoint that it had counted", Code.LINE_FORKED,
              _with(lambda line: line.change(2, abandoned=line.abandoned(
                  LegWorld(leg=2), "lost", seq=2, digest=checkpoint(2)))), "abandoned-before"),
    LineStory("a leg that its gate abandoned with another checkpoint than it had counted", Code.LINE_FORKED,
              _with(lambda line: line.change(2, abandoned=line.abandoned(
                  LegWorld(leg=2), "lost", seq=3, digest=checkpoint(3, "other")))), "abandoned-with-another"),
    LineStory("a leg on two ranks after one on one", Code.RESUME_WORLD, _two_ranks, "another-world"),
    LineStory("a leg is missing", Code.CHAIN_INCOMPLETE,
              _with(_without(2, "abandoned", "bundles", "order", "tickets")), "leg-missing"),
    LineStory("the first leg is not there", Code.CHAIN_INCOMPLETE, _with(lambda line: line.legs.pop(0)),
              "first-missing"),
    LineStory("a ticket is missing", Code.CHAIN_INCOMPLETE,
              _with(lambda line: line.change(1, tickets=line.legs[0].tickets[:1])), "ticket-missing"),
    LineStory("a rewind without an order", Code.LINE_ORDER, _with(_went_back_unasked, rewound_line),
              "rewind-unordered"),
    LineStory("a rewind to another checkpoint than was ordered", Code.LINE_ORDER,
              _with(_order_of_another, rewound_line), "rewind-other"),
    LineStory("a leg of another line", Code.CHECKPOINT_FOREIGN, _foreign, "foreign"),
    LineStory("a receipt that names another beginning than its token", Code.CHAIN_RECEIPT, _lying_receipt,
              "receipt-begins-elsewhere"),
    LineStory("no receipt at all", Code.CHAIN_INCOMPLETE,
              _with(lambda line: [line.change(leg, bundles=()) for leg in (1, 3)]), "no-receipt"),
    LineStory("a last leg without a receipt", Code.CHAIN_INCOMPLETE, _lost_last, "last-missing"),
]  # fmt: skip
