"""The real gate, its database and its decisions, with one line and all that may befall it, in any order."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glasshouse.errors import Code, FormatError, GlasshouseError, RefusedError
from glasshouse.wire.lines.statements import Ticket
from simulators.direct_gate import LEASE_S, DirectGate, LineOwner, Machine
from simulators.line_model import forks

ATTESTS = ("now", "now", "unanswered", "later")


class LineUnderFire(RuleBasedStateMachine):
    """The real gate, its database and its decisions, with one line and everybody who has a part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.gate = DirectGate(Path(self.folder.name) / "data")
        self.owner = LineOwner(self.gate)
        self.machines = [self.owner.leg().begin()]
        self.launched: list[Machine] = []
        self.line = self.machines[0].line
        self.tickets: set[Ticket] = set()
        self.releases = {(one.key_id, one.start) for one in self.machines}
        self.leg = self.seq = 0
        self.head: tuple[int, bytes | None] = (0, None)
        self.refusals: set[Code] = set()
        self._copy("data", "backup")

    def teardown(self) -> None:
        self.gate.close()
        self.folder.cleanup()

    def _copy(self, source: str, target: str) -> None:
        self.gate.close()
        folder = Path(self.folder.name)
        shutil.rmtree(folder / target, ignore_errors=True)
        shutil.copytree(folder / source, folder / target)
        self.gate.open()

    @rule(which=st.integers(0, 3), answered=st.booleans())
    def a_machine_counts(self, which: int, answered: bool) -> None:
        machine = self.machines[-1 - which % len(self.machines)]
        view = self.owner.client().line(self.line)
        reply = machine.count()
        if reply.status != 200:
            return
        ticket = Ticket.parse_signed(reply.content(), self.gate.broker_public)
        self.tickets.add(ticket)
        self.head = ticket.seq, ticket.digest
        assert ticket.leg == view.leg, "a fenced leg counts nothing"
        if answered:
            machine.ticket(reply)

    @rule(how=st.sampled_from(("lost", "lost", "waited", "rewound", "behind")), then=st.sampled_from(ATTESTS))
    def a_leg_is_launched(self, how: str, then: str) -> None:
        view = self.owner.client().line(self.line)
        if how in ("lost", "rewound"):
            self.owner.lost(self.line, view.leg)
        asked = self.owner.next(self.line)
        if how == "rewound" and self.tickets:
            old = min(self.tickets, key=lambda ticket: ticket.seq)
            asked = self.owner.next(self.line, seq=old.seq, checkpoint=old.digest, rewind=True)
        if how == "behind":
            asked = self.owner.next(self.line, leg=max(1, view.leg))
        try:
            machine = self.owner.leg(self.owner.order(asked))
        except RefusedError as refusal:
            self.refusals.add(refusal.code)
        except FormatError:
            pass  # a rewind to the head
        else:
            self._attests(machine, then)

    @precondition(lambda self: self.launched)
    @rule(which=st.integers(0, 3), then=st.sampled_from(ATTESTS))
    def a_machine_attests(self, which: int, then: str) -> None:
        self._attests(self.launched.pop(which % len(self.launched)), then)

    def _attests(self, machine: Machine, then: str) -> None:
        if then == "later":
            self.launched.append(machine)
            return
        try:
            reply = machine.attest()
        except GlasshouseError:  # its launch is of after the backup that was put back
            return
        if reply.status == 200:
            self.releases.add((machine.key_id, machine.start))
            self.head = machine.start.seq, machine.start.checkpoint
            if then == "now":
                machine.opened(reply)
                self.machines.append(machine)
            else:
                self.launched.append(machine)  # its answer was lost

    @rule(which=st.integers(0, 3))
    def a_machine_reports(self, which: int) -> None:
        machine = self.machines[-1 - which % len(self.machines)]
        current = self.owner.client().line(self.line).leg
        reply = machine.reports()
        assert reply.status != 200 or machine.start.leg == current, "a fenced leg gets no lease"

    @rule(seconds=st.sampled_from((1, LEASE_S, LEASE_S + 61)))
    def time_passes(self, seconds: int) -> None:
        self.gate.advance(seconds)

    @rule()
    def a_backup_is_made(self) -> None:
        self._copy("data", "backup")

    @rule()
    def the_backup_is_put_back(self) -> None:
        self._copy("backup", "data")

    @invariant()
    def the_line_does_not_fork_or_go_back(self) -> None:
        assert list(forks(self.tickets, self.releases)) == []
        view = self.owner.client().line(self.line)
        assert view.leg >= self.leg
        assert view.seq >= self.seq
        assert (view.head_seq, view.head) == self.head, "what was counted last, or where its owner had it go back to"
        self.leg, self.seq = view.leg, view.seq
        assert self.owner.releases() == 1
        assert self.refusals <= {Code.LINE_BUSY, Code.LINE_FORKED, Code.CHECKPOINT_STALE}
