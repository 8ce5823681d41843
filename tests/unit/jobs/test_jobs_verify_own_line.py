"""`verify RUN` of a line, at its owner's: every run that they have of it is in the verdict, whatever it left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import Code, ExitCode
from glasshouse.jobs.gates.line_notes import LineNotes
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.wire.lines.statements import Ticket
from glasshouse.wire.states import Outcome, State
from simulators.line_world import LINE, STOPPED, LegWorld, Line
from simulators.owner_side import OwnersWorld

REFUSED: dict[str, Any] = {
    "attested": False,
    "evidence_made": False,
    "reach": State.HARDENED,
    "outcome": Outcome.REFUSED,
    "code": Code.HARDENING_MISSING,
    "change": lambda receipt: replace(receipt, line=None),
}


@dataclass
class OwnLeg(LegWorld, OwnersWorld):
    """A leg whose run has a folder at its owner's."""

    root: Path = Path()
    folder: RunFolder | None = field(default=None, init=False)

    def begin(self) -> RunFolder:
        if self.folder is None:
            self.folder = self.settle(self.root / self.id("run"))
        return self.folder

    def run(self, **how: Any) -> Any:
        folder = self.begin()
        run = super().run(**how)
        self.tell(folder, run)
        return run


class Desk:
    """An owner at a shell, who has runs of one line."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.line, self._capsys = Line(world=OwnLeg(root=root)), capsys
        self.home: Home | None = None

    def leg(
        self, counted: tuple[int, ...] = (), *, word: bool = True, ended: bool = True, placed: bool = True, **how: Any
    ) -> RunFolder:
        """Have a leg; one that is `abandoned` leaves no receipt, and no `word` of its gate's if not asked for."""
        world = self.line.leg(counted, **how)
        assert isinstance(world, OwnLeg)
        folder, documents = world.begin(), self.line.legs[-1]
        if self.home is None:
            self.home = world.home
        else:
            folder = RunFolder(Path(shutil.move(folder.path, self.home.runs / folder.run_id)))
        folder.update(line=LINE.hex(), leg=world.leg, created_us=world.leg)
        if placed:
            folder.events.parent.mkdir(exist_ok=True)
            folder.events.touch()
        if ended:
            folder.end(outcome="completed" if documents.bundles else "lost", exit_code=0)
        notes = LineNotes(folder)
        if documents.abandoned is not None and word:
            notes.keep_abandoned(documents.abandoned)
        if documents.order is not None:
            notes.keep_order(documents.order)
        for ticket in documents.tickets:
            notes.keep_ticket(Ticket.parse(ticket.payload), ticket)
        return folder

    def verify(self, run: RunFolder) -> tuple[int, str, dict[str, Any]]:
        """Return the exit code, what is shown to people, and to programs."""
        assert self.home is not None
        words = ["verify", run.run_id, "--home", str(self.home.path)]
        code, said = cli.run(words), self._capsys.readouterr()
        assert cli.run([*words, "--json"]) == code
        return code, said.out + said.err, json.loads(self._capsys.readouterr().out)


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


def receipts(told: dict[str, Any]) -> list[tuple[int, str, str | None]]:
    return [(run["leg"], run["receipt"], run["code"]) for run in told["runs"]]


def lost(desk: Desk) -> RunFolder:
    return desk.leg(abandoned="lost", word=False)


@pytest.mark.parametrize(
    ("after", "found", "said"),
    [
        (lost, "none", "it left no receipt, and its wiping is NOT SHOWN; see: glasshouse status"),
        (lambda desk: desk.leg((2,), abandoned="lost", word=False), "none", "its wiping is NOT SHOWN"),
        (lambda desk: desk.leg(**REFUSED), "incomplete", "its own word: refused (hardening-missing)"),
        (lambda desk: desk.leg(broker_away=True), "incomplete", "the broker's countersignature on the receipt"),
        (lambda desk: desk.leg(abandoned="lost", word=False, ended=False), "not-ended", "it has not ended"),
    ],
    ids=["lost", "lost after a checkpoint", "refused the key", "not countersigned", "goes on"],
)
def test_a_leg_before_that_completed_does_not_stand_for_a_line_whose_last_is_not_shown(
    desk: Desk, after: Callable[[Desk], RunFolder], found: str, said: str
) -> None:
    first = desk.leg((1,))
    assert desk.verify(first)[0] == ExitCode.DONE
    second = after(desk)
    code, shown, told = desk.verify(first)
    assert (code, told["status"]) == (ExitCode.INCOMPLETE, "incomplete"), shown
    assert receipts(told) == [(1, "verified", None), (2, found, None)]
    assert (said in shown, f"run {second.run_id[:8]}" in told["verdict"] + told["runs"][1]["says"]) == (True, True)
    assert told["not_wiped"] in ([], [2])
    assert "✗ leg 2" in shown


def test_a_run_without_a_receipt_says_what_to_do(desk: Desk) -> None:
    desk.leg((1,), **STOPPED)
    second = lost(desk)
    code, shown, told = desk.verify(second)
    assert (code, told["error"]["code"]) == (ExitCode.USAGE, "file-missing")
    assert "left no receipt: nothing shows that it wiped itself" in shown
    assert f"glasshouse status {second.run_id[:8]}" in told["error"]["hint"]
    assert f"to go on: glasshouse resume {second.run_id[:8]}" in told["error"]["hint"]
    assert str(second.runtime_log) in told["error"]["hint"]
    LineNotes(second).keep_abandoned(desk.line.legs[1].abandoned)  # type: ignore[arg-type]
    third = desk.leg((2,))
    assert f"it went on as {third.run_id[:8]}: glasshouse verify {third.run_id[:8]}" in desk.verify(second)[1]
    code, shown, told = desk.verify(third)
    assert (code, told["not_wiped"]) == (ExitCode.DONE, [2]), shown
    assert receipts(told) == [(1, "verified", None), (2, "none", None), (3, "verified", None)]


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_receipt_that_does_not_hold_is_named_whichever_run_is_asked_for(desk: Desk, asked: int) -> None:
    runs = [desk.leg((1,), **STOPPED), desk.leg((2,), **STOPPED), desk.leg((3,))]
    (runs[1].out / "outputs" / "0000.sealed").write_bytes(b"another's")
    code, shown, told = desk.verify(runs[asked])
    assert (code, told["error"]["code"]) == (ExitCode.VERIFICATION_FAILED, "output-tampered")
    assert receipts(told) == [(1, "verified", None), (2, "invalid", "output-tampered"), (3, "verified", None)]
    assert f"run {runs[1].run_id[:8]}: its receipt does NOT HOLD" in shown
    assert "Authentic" not in shown


def test_a_leg_in_between_without_its_gates_word_is_named(desk: Desk) -> None:
    desk.leg((1,), **STOPPED)
    lost(desk)
    third = desk.leg((2,))
    code, shown, told = desk.verify(third)
    assert (code, told["error"]["code"]) == (ExitCode.VERIFICATION_FAILED, "incomplete")
    assert receipts(told) == [(1, "verified", None), (2, "none", None), (3, "verified", None)]
    assert "it left no receipt" in shown


def test_what_was_never_begun_takes_nothing_from_a_line_and_is_shown(desk: Desk) -> None:
    first = desk.leg((1,))
    desk.leg(abandoned="lost", word=False, placed=False)
    code, shown, told = desk.verify(first)
    assert (code, told["status"]) == (ExitCode.DONE, "good"), shown
    assert receipts(told) == [(1, "verified", None), (2, "never-placed", None)]
    assert "no runtime was started for it, and no key was released" in shown
    # The same leg, begun again: that the gate released it to another is its word on the first.
    desk.line.legs.pop()
    desk.line.holder = desk.line.world.key("evidence of leg 1").key_id
    again = desk.leg((2,), attempt=" again")
    assert desk.verify(again)[0] == ExitCode.DONE
