"""The live view says what passed and how long it took, in a terminal and without one, at 80 and at 120 columns."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from glasshouse.cli.show.ending import say_ended
from glasshouse.cli.show.live_view import RunView
from glasshouse.cli.show.output import CommandOutput
from glasshouse.errors import Code, ExitCode
from glasshouse.evidence.events import Event, EventType
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import conclude, together
from glasshouse.wire.states import Outcome, State
from simulators.group_world import settle_group
from simulators.owner_side import OwnersWorld

STEPS = ("hardened", "measured", "attested", "released", "opened", "started", "trained", "sealed", "zeroized")


def printing(where: Console) -> CommandOutput:
    output = CommandOutput(False)
    output.console = where
    return output


def console(width: int, *, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, color_system=None)


def text_of(where: Console) -> str:
    file = where.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def events(world: OwnersWorld, **story: object) -> Iterator[tuple[Event, Seen]]:
    seen = Seen()
    for line in world.run(**story).lines:
        event = Event.parse(line[:-1])
        seen.take(event)
        yield event, seen


def demanding(machines: int = 1) -> Any:
    """Return what a run's record says of its policy and machines."""
    group = SimpleNamespace(machines=machines) if machines > 1 else None
    return SimpleNamespace(assurance="software", profile="standard", group=group)


def show(where: Console, **story: object) -> str:
    view = RunView(printing(where))
    view.expect(demanding(), None)
    with view:
        for event, seen in events(OwnersWorld(), **story):
            view.event(event, seen)
    return text_of(where)


def test_the_hardening_is_said_in_numbers() -> None:
    where, seen = console(80, terminal=False), Seen()
    seen.checks = {
        ("agent", "watched"): "passed",
        ("agent", "no-swap"): "passed",
        ("worker", "landlock"): "unavailable",
    }
    view = RunView(printing(where))
    view.expect(demanding(), None)
    for event, _ in events(OwnersWorld()):
        if event.state is State.HARDENED and event.type is EventType.TRANSITION:
            view.event(event, seen)
    assert "standard: 2 checks passed, 1 unavailable" in text_of(where)


@pytest.mark.parametrize(("width", "terminal"), [(80, True), (120, True), (80, False)])
def test_every_step_is_shown_with_its_time(width: int, terminal: bool) -> None:
    shown = show(console(width, terminal=terminal))
    for step in STEPS:
        assert shown.count(f"✓ {step}") == 1, step
    assert "key released at assurance software" in shown
    assert "5 steps, loss 0.4" in shown
    assert "2 outputs, 1 log segment" in shown
    assert "4 of 5 probes clean, 1 unverifiable" in shown
    assert "0.01 s" in shown


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in (80, 120):
        shown = show(console(width, terminal=True))
        lines = [line.split("\r")[-1] for line in shown.splitlines()]
        printed = [line for line in lines if "✓" in line]
        assert printed
        assert max(len(line.replace("\x1b[2K", "")) for line in printed) <= width


def test_without_a_terminal_there_is_no_escape() -> None:
    assert "\x1b" not in show(console(80, terminal=False))


def test_a_failed_run_says_why_and_a_residue_cannot_be_overlooked() -> None:
    failed = show(console(80, terminal=False), outcome=Outcome.FAILED, code=Code.NONFINITE_LOSS)
    assert "✗ ended" in failed
    assert "the loss was no finite number" in failed
    residue = show(console(80, terminal=False), outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND)
    assert "1 FOUND SOMETHING" in residue
    assert "✗ zeroized" in residue


def test_progress_has_rate_loss_and_remaining_time() -> None:
    where = console(120, terminal=True)
    view = RunView(printing(where))
    with view:
        for event, seen in events(OwnersWorld()):
            if seen.work is not None and seen.work.done == 3 and event.type.value == "progress":
                view._drawn_s = 0.0  # the view draws at most twice a second; this test is faster
                view.event(event, seen)
    shown = text_of(where)
    for figure in ("3/5 steps", "1/s", "loss 0.6", "ETA 0:02"):
        assert figure in shown, figure


def released_then_opened(world: OwnersWorld, *, imports_s: float, open_s: float) -> list[Event]:
    """The transitions of an opening, with the notice between them that the runtime writes after the imports."""
    found = [
        event
        for event, _ in events(world)
        if event.type is EventType.TRANSITION and event.state in (State.RELEASED, State.OPENED, State.RUNNING)
    ]
    begun, opened, running = found
    loaded_us = begun.time_us + round(imports_s * 1e6)
    opened_us = loaded_us + round(open_s * 1e6)
    notice = replace(begun, type=EventType.NOTICE, body={"code": "observed-again", "value": None}, time_us=loaded_us)
    return [begun, notice, replace(opened, time_us=opened_us), replace(running, time_us=opened_us + 10_000)]


def test_the_workers_imports_are_a_row_of_their_own_and_no_part_of_the_opening() -> None:
    where, seen = console(80, terminal=False), Seen()
    view = RunView(printing(where))
    for event in released_then_opened(OwnersWorld(), imports_s=5.2, open_s=0.25):
        seen.take(event)
        view.event(event, seen)
    lines = {line.split()[1]: line for line in text_of(where).splitlines()}
    assert list(lines) == ["released", "loaded", "opened", "started"]
    assert "frameworks loaded" in lines["loaded"]
    assert "(5.20 s)" in lines["loaded"]
    assert "(0.25 s)" in lines["opened"]
    assert "notice" not in text_of(where)


def test_while_they_load_something_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    where, seen, now = console(80, terminal=True), Seen(), [100.0]
    monkeypatch.setattr("glasshouse.cli.show.live_view.time.monotonic", lambda: now[0])
    with RunView(printing(where)) as view:
        for event in released_then_opened(OwnersWorld(), imports_s=5.2, open_s=0.25)[:1]:
            seen.take(event)
            view.event(event, seen)
        before = len(text_of(where))
        for _ in range(3):
            now[0] += 0.11
            view.tick(seen)
        drawn = text_of(where)[before:]
    assert drawn.count("the worker loads its frameworks") == 3
    assert len({char for char in drawn if char in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"}) == 3


def test_a_script_that_reports_nothing_shows_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    where, seen, now = console(100, terminal=True), Seen(), [100.0]
    monkeypatch.setattr("glasshouse.cli.show.live_view.time.monotonic", lambda: now[0])
    with RunView(printing(where)) as view:
        for event, _ in events(OwnersWorld()):
            if event.state is State.RUNNING and event.type is EventType.TRANSITION:
                seen.take(event)
                view.event(event, seen)
        for step in range(20):
            now[0] = 100.0 + step / 4
            view.tick(seen)
        shown = text_of(where)
    assert "0:03 elapsed" in shown
    assert "0 steps" not in shown
    assert shown.count("elapsed") == 5, "drawn once a second: it costs the training nothing"


def test_it_is_not_said_to_have_trained_no_steps() -> None:
    where, view, seen = console(80, terminal=False), None, Seen()
    view = RunView(printing(where))
    for event, _ in events(OwnersWorld()):
        if event.type is EventType.PROGRESS:
            event = replace(event, body={**event.body, "done": 0, "total": None, "loss": None})
        seen.take(event)
        view.event(event, seen)
    assert "it reported no steps" in text_of(where)
    assert "0 steps" not in text_of(where)


def test_the_last_report_of_a_run_is_not_called_its_end() -> None:
    where, seen = console(80, terminal=False), Seen()
    view = RunView(printing(where))
    for event, _ in events(OwnersWorld()):
        if event.type is EventType.PROGRESS:
            event = replace(event, body={**event.body, "done": 55, "total": 60, "loss": None})
        seen.take(event)
        view.event(event, seen)
    assert "trained    last reported at 55 of 60 steps" in text_of(where)


def test_what_the_log_needs_and_people_do_not_is_not_shown() -> None:
    where, seen = console(80, terminal=False), Seen()
    view, begun = RunView(printing(where)), released_then_opened(OwnersWorld(), imports_s=1, open_s=1)[0]
    for code in ("alive", "alive", "broker-unreachable"):
        event = replace(begun, type=EventType.NOTICE, body={"code": code, "value": None})
        seen.take(event)
        view.event(event, seen)
    assert text_of(where).splitlines() == ["! notice     broker unreachable"]


def test_stopping_says_that_it_zeroizes_and_that_asking_twice_does_not_help() -> None:
    where = console(80, terminal=False)
    view = RunView(printing(where))
    view.stopping(1)
    view.stopping(2)
    assert "keys are wiped" in text_of(where)
    assert "still zeroizing" in text_of(where)


def closing(tmp_path: Path, world: OwnersWorld, monkeypatch: pytest.MonkeyPatch, **story: object) -> tuple[int, str]:
    folder = world.settle(tmp_path)
    world.tell(folder, world.run(**story))
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    ended = Ended(folder=folder, record=folder.load(), seen=Seen.of(folder.events), conclusion=conclusion)
    output = CommandOutput(False)
    where = console(120, terminal=False)
    monkeypatch.setattr(output, "console", where)
    code = say_ended(output, ended, sealing=world.owner_hpke)
    return code, text_of(where)


def test_the_closing_summary_says_all_and_names_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = OwnersWorld()
    code, said = closing(tmp_path, world, monkeypatch)
    assert code == 0
    for fact in (
        "completed, at assurance software",
        "a host with root could read the run's memory",
        "5 steps in 0.01 s",
        "0.8 → 0.4",
        "270,336 parameters",
        "adapter.safetensors",
        "checkpoints/step-5.safetensors",
        "4 of 5 probes clean; cannot be checked here: swap",
        "genuine and complete, at assurance software",
        str(tmp_path / "home" / "runs" / world.id("run")),
        "glasshouse fetch",
    ):
        assert fact in said, fact
    assert "verified" not in said, "that word never stands without the level"


def test_a_run_that_nobody_countersigned_is_not_called_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = closing(tmp_path, OwnersWorld(), monkeypatch, broker_away=True)
    assert code == ExitCode.INCOMPLETE
    assert "incomplete: not countersigned" in said
    assert "genuine and complete" not in said


def test_outputs_that_do_not_match_are_said_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    (folder.out / "outputs" / "0000.sealed").write_bytes(b"exchanged")
    world.tell(folder, world.run())
    conclusion = conclude(folder, owner_signing=world.owner.public, agent_exit=0)
    ended = Ended(folder=folder, record=folder.load(), seen=Seen.of(folder.events), conclusion=conclusion)
    output, where = CommandOutput(False), console(120, terminal=False)
    monkeypatch.setattr(output, "console", where)
    say_ended(output, ended, sealing=world.owner_hpke)
    assert "not the file that the receipt names" in text_of(where)


def test_what_comes_from_outside_is_no_markup() -> None:
    output, where = CommandOutput(False), console(80, terminal=False)
    output.console = where
    output.say("[bold red]not ours[/]")
    output.facts({"name": "[link=http://evil]x[/link]", "nothing": None})
    assert "[bold red]not ours[/]" in text_of(where)
    assert "[link=http://evil]x[/link]" in text_of(where)
    assert "nothing" not in text_of(where)


def test_the_machines_of_a_group_are_told_apart() -> None:
    where = console(100, terminal=False)
    view = RunView(printing(where))
    view.expect(demanding(machines=3), None)
    story = {"outcome": Outcome.INTERRUPTED, "code": Code.INTERRUPTED}
    with view:
        view.machine(1, None, completed=True)
        view.machine(2, Code.WORKER_KILLED, completed=False)
        for event, seen in events(OwnersWorld(), **story):
            view.event(event, seen)
        view.machine(0, Code.INTERRUPTED, completed=False)
    shown = text_of(where)
    assert "evidence accepted by the broker, as that of all 3 machines" in shown
    assert "1 completed" in shown
    assert "2 ended: the worker was killed" in shown
    assert "stopped, because another machine of its group had ended" in shown
    assert "interrupted by its owner" not in shown


def test_a_group_that_its_owner_stops_was_interrupted_by_its_owner() -> None:
    where = console(100, terminal=False)
    view = RunView(printing(where))
    view.stopping(1)
    view.machine(1, Code.INTERRUPTED, completed=False)
    assert "1 ended: interrupted by its owner" in text_of(where)


def test_the_summary_of_a_group_names_the_machine_because_of_which_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worlds, folders = settle_group(tmp_path)
    worlds[0].tell(folder, worlds[0].run(outcome=Outcome.INTERRUPTED, code=Code.INTERRUPTED))
    worlds[1].tell(folders[1], worlds[1].run(outcome=Outcome.FAILED, code=Code.SCRIPT_FAILED))
    ends = [conclude(one, owner_signing=worlds[0].owner.public, agent_exit=None) for one in folders]
    conclusion = together(ends, first=(1, 0))
    ended = Ended(folder=folder, record=folder.load(), seen=Seen.of(folder.events), conclusion=conclusion)
    output, where = CommandOutput(False), console(120, terminal=False)
    monkeypatch.setattr(output, "console", where)
    code = say_ended(output, ended, sealing=worlds[0].owner_hpke, owner_signing=worlds[0].owner.public)
    shown = text_of(where)
    assert code == ExitCode.RUN_FAILED
    assert "2 ranks on each of 2 machines" in shown
    assert "machine 0: interrupted\n" in shown
    assert "machine 1: failed (script-failed); because of it the others ended" in shown
    assert "with a canary" in shown, "the words of the machine to blame"
    assert f"glasshouse logs {folder.run_id[:8]} --machine 1" in shown
