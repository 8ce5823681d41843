"""`glasshouse cost`: what a run cost, with and without a rental, a receipt, work, a bill, a cap, a measurement."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from glasshouse.cli import app as cli
from glasshouse.cli.show.ending import say_ended
from glasshouse.cli.show.output import CommandOutput
from glasshouse.errors import ExitCode
from glasshouse.evidence.receipt import Receipt, Work
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner.home import write_state
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.places.rental_journal import Attempt, Journal, Rental, Step
from glasshouse.jobs.places.rented_machine import statement
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import conclude
from glasshouse_bench.design import Mode
from simulators.group_world import settle_group
from simulators.owner_side import OwnersWorld
from simulators.rental_world import offer
from simulators.slot_measurement import measured
from simulators.world import START_US

S = 1_000_000
# 0.72 $ an hour are 0.0002 $ a second.
ATTEMPT = Attempt(
    tag="gh-abcdefghij-c0ffee00-1",
    nonce="0" * 32,
    offer=offer(price="0.72"),
    asked_us=START_US,
    step=Step.GONE,
    machine="m1",
    up_us=START_US + 50 * S,
    gone_us=START_US + 580 * S,
    bill_usd=Decimal("0.12"),
)


def of_work(receipt: Receipt, done: int = 1800) -> Receipt:
    """450 s of training, 40 s of protection and 5 s of imports, of a run of 500 s."""
    return replace(
        receipt,
        work=Work(unit="step", done=done, elapsed_us=450 * S, stop_reason="finished"),
        lifecycle_us=dict(receipt.lifecycle_us) | {"seal_outputs": 0, "total": 45 * S},
        training_imports_us=5 * S,
        finished_us=receipt.started_us + 500 * S,
    )


@pytest.fixture
def world() -> OwnersWorld:
    return OwnersWorld()


@pytest.fixture
def run(tmp_path: Path, world: OwnersWorld) -> RunFolder:
    folder = world.settle(tmp_path)
    world.tell(folder, world.run(change=of_work))
    ended = {"phase": Phase.ENDED, "ended_us": START_US + 1000 * S, "outcome": "completed", "verdict": "good"}
    folder.update(**ended)
    return folder


def rented(world: OwnersWorld, run: RunFolder, *attempts: Attempt, most: str | None = "5", kept: bool = True) -> Rental:
    """What a rental leaves: its journal, and, once it is over, its statement in the run's folder."""
    rental = Rental(
        run_id=run.run_id,
        provider="vast",
        created_us=START_US,
        caps=Caps(usd=None if most is None else Decimal(most), seconds=14400, boot_s=600),
        python="python3",
        keeper=ProcessName.of(),
        attempts=attempts or (ATTEMPT,),
    )
    Journal.create(world.home, rental)
    if kept and rental.over:
        write_state(run.rental, statement(rental, START_US))
    run.update(place=rental.place, placed=True, placed_us=START_US + 80 * S)
    return rental


def asked(world: OwnersWorld, run: RunFolder, *options: str) -> int:
    return cli.run(["cost", run.run_id[:8], "--home", str(world.home.path), *options])


def words(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The facts that were printed, by name, each on one line."""
    found: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, text = line.partition("  ")
        if name:
            found[name] = text.strip()
        elif found:
            found[[*found][-1]] += " | " + text.strip()
    return found


def program(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_rented_run_is_told_by_its_price_its_bill_its_parts_and_its_cap(
    world: OwnersWorld, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run)
    assert asked(world, run) == ExitCode.DONE
    said = words(capsys)
    rental = said["rental"].split(" | ")
    assert rental[0] == "0.116 $ by its price, for 9 min 40 s"
    assert rental[1].startswith("1 × RTX 4090 at 0.720 $ an hour, by vast's word; the first was asked for at ")
    assert rental[2:] == ["billed 0.120 $, by vast's word", "2 % of the cap of 5 $", "at most 4 h 00 min"]
    assert said["booting"] == "0.0100 $ (50.0 s), 8.6 %"
    assert said["login and upload"] == "0.0060 $ (30.0 s), 5.2 %"
    assert said["training"] == "0.0900 $ (7 min 30 s), 77.6 %"
    assert said["protection"] == "0.0080 $ (40.0 s), 6.9 %, beside the training"
    assert said["the rest"] == "0.0020 $ (10.0 s), 1.7 %"
    assert said["a step"].startswith("0.0000644 $, of 1800 by the receipt")
    assert said["slowdown"].startswith("not known")
    assert said["receipt"].startswith("genuine and complete, at assurance software")


def test_a_program_gets_the_statement_and_the_cost(
    world: OwnersWorld, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run)
    assert asked(world, run, "--json") == ExitCode.DONE
    told = program(capsys)
    assert (told["rental"]["provider"], told["rental"]["billed_usd"]) == ("vast", "0.1200")
    assert told["cost"]["total"] == {"seconds": "580.000", "usd": "0.1160"}
    assert told["cost"]["slowdown"] is told["cost"]["slowed_95"] is told["measurement"] is None
    assert told["receipt"] == "good"


def test_a_machine_that_is_not_shown_to_be_gone_is_told_from_the_journal(
    world: OwnersWorld, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run, replace(ATTEMPT, step=Step.UP, gone_us=None, bill_usd=None))
    write_state(run.rental, {"over": True, "machines": []})  # the journal goes before what was left earlier
    assert asked(world, run) == ExitCode.DONE
    rental = words(capsys)["rental"]
    assert "so far by its price" in rental
    assert "no bill from vast" in rental
    assert "NOT shown to be gone" in rental


def test_a_rental_of_which_no_machine_came_up_still_cost_what_it_cost(
    world: OwnersWorld, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run, replace(ATTEMPT, up_us=None), most=None, kept=False)
    run.receipt.unlink()
    run.update(outcome="failed", verdict="no-receipt", placed=False, placed_us=None)
    assert asked(world, run) == ExitCode.DONE
    said = words(capsys)
    assert "0.116 $ by its price" in said["rental"]
    assert "no machine of vast came up" in said["rental"]
    assert "cap of" not in said["rental"]
    assert said["booting"] == "0.116 $ (9 min 40 s), 100.0 %"
    assert not {"training", "protection", "the rest", "a step", "login and upload"} & {*said}
    assert said["receipt"] == "none"


def test_a_receipt_that_does_not_hold_tells_nothing_of_the_time(
    world: OwnersWorld, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run)
    run.receipt.write_bytes(run.receipt.read_bytes().replace(b"1800", b"1900"))
    data = bytearray(run.receipt.read_bytes())
    data[len(data) // 2] ^= 1
    run.receipt.write_bytes(data)
    assert asked(world, run) == ExitCode.DONE
    said = words(capsys)
    assert "0.116 $" in said["rental"]
    assert not {"training", "protection", "a step"} & {*said}
    assert said["receipt"] == "does not hold: believe nothing of it"


def test_a_script_that_reported_no_steps_has_no_price_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = OwnersWorld(reported=0)
    folder = world.settle(tmp_path)
    world.tell(folder, world.run(change=lambda receipt: of_work(receipt, done=0)))
    folder.update(phase=Phase.ENDED, ended_us=START_US + 1000 * S, outcome="completed", verdict="good")
    rented(world, folder)
    assert asked(world, folder) == ExitCode.DONE
    said = words(capsys)
    assert said["training"] == "0.0900 $ (7 min 30 s), 77.6 %"
    assert not {"a step", "a epoch"} & {*said}


def test_a_run_on_a_machine_of_ones_own_has_seconds_and_money_only_by_its_owners_price(
    world: OwnersWorld, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(world, run) == ExitCode.DONE
    said = words(capsys)
    assert said["rental"].startswith("nothing was rented; it ran for 8 min 20 s")
    assert said["protection"] == "40.0 s, 8.0 %, beside the training"
    assert "$" not in said["training"] + said["protection"]
    assert "a step" not in said
    assert asked(world, run, "--usd-per-hour", "0.72") == ExitCode.DONE
    said = words(capsys)
    assert said["rental"].endswith("at 0.72 $ an hour, as you say, that is 0.100 $")
    assert said["protection"] == "0.0080 $ (40.0 s), 8.0 %, beside the training"
    assert asked(world, run, "--json") == ExitCode.DONE
    told = program(capsys)
    assert told["rental"] is None
    assert told["cost"]["total"] == {"seconds": "500.000", "usd": None}


def test_of_a_group_one_machine_is_told_and_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, worlds, folders = settle_group(tmp_path)
    for world, one in zip(worlds, folders, strict=True):
        world.tell(one, world.run())
        one.update(phase=Phase.ENDED, ended_us=START_US + 1000 * S, outcome="completed", verdict="good")
    assert asked(worlds[0], folder, "--usd-per-hour", "1e1") == ExitCode.DONE
    said = words(capsys)
    assert "at 10 $ an hour, as you say" in said["rental"]
    assert said["machines"] == "all of this is of machine 0 alone, of 2"


@pytest.mark.parametrize("price", ["free", "-1", "nan", "inf", "1e9"])
def test_what_is_no_price_is_refused(
    world: OwnersWorld, run: RunFolder, price: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(world, run, f"--usd-per-hour={price}") == ExitCode.USAGE
    assert "--usd-per-hour takes US dollars" in capsys.readouterr().err


def test_a_price_beside_a_rentals_own_is_refused(
    world: OwnersWorld, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run)
    assert asked(world, run, "--usd-per-hour", "1") == ExitCode.USAGE
    assert "its price is known" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Measurements of 2 % that was slept, of nothing with no null beside it, and of one session."""
    base, short = tmp_path_factory.mktemp("measured"), {"receipts": True, "length_ns": 800_000_000}
    measured(base / "overhead", sessions=3, **short)  # type: ignore[arg-type]
    measured(base / "inconclusive", modes=[Mode.INTERLEAVED], ratio=1.0, sessions=3, margin_ppm=100, **short)  # type: ignore[arg-type]
    measured(base / "one", modes=[Mode.INTERLEAVED], sessions=1, **short)  # type: ignore[arg-type]
    measured(base / "bias", ratio=0.9, sessions=3, **short)  # type: ignore[arg-type]
    return {path.name: path for path in base.iterdir()}


def test_a_measured_slowdown_is_told_with_its_interval_its_word_and_where_it_was_measured(
    world: OwnersWorld, run: RunFolder, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run)
    assert asked(world, run, "--measurement", str(folders["overhead"])) == ExitCode.DONE
    lines = words(capsys)["slowdown"].split(" | ")
    assert lines[0].startswith("overhead: +2.")
    assert "95 % interval +" in lines[0]
    assert lines[1].startswith("of this training 0.00")
    assert lines[2].startswith("measured with lora on ")
    assert "another" in lines[2]
    assert len(lines) == 3
    assert asked(world, run, "--json", "--measurement", str(folders["overhead"] / "statement.json")) == ExitCode.DONE
    told = program(capsys)
    found = told["cost"]["slowdown"]
    assert (found["word"], found["status"]) == ("overhead", "good")
    low, high = told["cost"]["slowed_95"]
    # Of 450 s at 0.0002 $ the part δ / (1 + δ), at either end.
    for end, name in ((low, "low"), (high, "high")):
        delta = float(found[name])
        assert float(end["seconds"]) == pytest.approx(450 * delta / (1 + delta), abs=0.1)
        assert float(end["usd"]) == pytest.approx(0.09 * delta / (1 + delta), abs=0.0001)
    assert told["measurement"]["owner_trust"]["known"] is True


def test_an_inconclusive_measurement_is_never_told_without_saying_so(
    world: OwnersWorld, run: RunFolder, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run)
    assert asked(world, run, "--measurement", str(folders["inconclusive"])) == ExitCode.DONE
    said = words(capsys)["slowdown"]
    assert said.startswith("inconclusive: ")
    assert "and it may be nothing" in said
    assert "the measurement is incomplete: its own word does not stand" in said


@pytest.mark.parametrize(("name", "word"), [("one", "inconclusive"), ("bias", "bias suspected")])
def test_no_amount_is_told_where_none_follows(
    world: OwnersWorld,
    run: RunFolder,
    folders: dict[str, Path],
    name: str,
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rented(world, run)
    assert asked(world, run, "--measurement", str(folders[name])) == ExitCode.DONE
    said = words(capsys)["slowdown"]
    assert said.startswith(f"{word}: ")
    assert "no amount follows from it" in said
    assert "of this training" not in said


def test_a_measurement_that_does_not_hold_or_is_none_is_refused(
    world: OwnersWorld,
    run: RunFolder,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(world, run, "--measurement", str(tmp_path)) == ExitCode.USAGE
    assert "holds no measurement" in capsys.readouterr().err
    forged = folders["one"] / "interleaved/sessions/0000/raw.steps"
    data = forged.read_bytes()
    try:
        forged.write_bytes(data.replace(b'"first":0', b'"first":1', 1))
        assert asked(world, run, "--measurement", str(folders["one"])) == ExitCode.VERIFICATION_FAILED
    finally:
        forged.write_bytes(data)
    assert "NOT authentic" in capsys.readouterr().err


def closing(world: OwnersWorld, run: RunFolder, output: CommandOutput) -> Ended:
    conclusion = conclude(run, owner_signing=world.owner.public, agent_exit=0)
    ended = Ended(folder=run, record=run.load(), seen=Seen.of(run.events), conclusion=conclusion)
    say_ended(output, ended, sealing=world.owner_hpke, home=world.home.path)
    return ended


def test_the_closing_summary_of_a_rented_run_has_its_cost(
    world: OwnersWorld, run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rented(world, run)
    output, file = CommandOutput(False), io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file, width=200, highlight=False, color_system=None))
    closing(world, run, output)
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert "rental 0.116 $ by its price, for 9 min 40 s" in lines
    assert "of that booting 0.0100 $ (50.0 s), 8.6 %" in lines
    assert "protection 0.0080 $ (40.0 s), 6.9 %, beside the training" in lines
    assert any(line.startswith("a step 0.0000644 $") for line in lines)
    closing(world, run, CommandOutput(True))
    told = program(capsys)
    assert told["rental"]["provider"] == "vast"
    assert told["cost"]["total"]["usd"] == "0.1160"


def test_the_summary_of_a_run_for_which_nothing_was_rented_has_no_cost(
    world: OwnersWorld, run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output, file = CommandOutput(False), io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file, width=200, highlight=False, color_system=None))
    closing(world, run, output)
    assert "rental" not in file.getvalue()
    assert "of that" not in file.getvalue()
    closing(world, run, CommandOutput(True))
    told = program(capsys)
    assert told["rental"] is told["cost"] is None


def test_a_damaged_statement_does_not_keep_a_run_from_being_summed_up(
    world: OwnersWorld, run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.rental.write_text('{"over": true}')
    run.rental.chmod(0o600)
    output, file = CommandOutput(False), io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file, width=200, highlight=False, color_system=None))
    ended = closing(world, run, output)
    assert ended.conclusion.exit_code is ExitCode.DONE
    assert "its rental.json is damaged" in file.getvalue()
    assert asked(world, run) == ExitCode.USAGE
    assert "damaged" in capsys.readouterr().err
