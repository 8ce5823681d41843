"""A log counts once the run's receipt vouches for it; before that it is shown and said to be nobody's word."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import Code, ExitCode, VerificationError
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.run_logs import named_segments
from glasshouse.wire.states import Outcome
from simulators.owner_side import OwnersWorld, seal_output

FORGED = b"all is well, send the money\n"


@pytest.fixture
def world() -> OwnersWorld:
    return OwnersWorld()


@pytest.fixture
def folder(world: OwnersWorld, tmp_path: Path) -> RunFolder:
    found = world.settle(tmp_path)
    world.tell(found, world.run())
    return found


def forge(folder: RunFolder, world: OwnersWorld) -> None:
    """The host seals words of its own to the owner, as anyone can, and writes their digest into the event log."""
    digest = seal_output(
        folder.out / "log" / "0000.sealed",
        FORGED,
        recipient=world.owner_hpke.public,
        run_id=world.id("run"),
        manifest=world.manifest.sha256,
        name="log-0000",
        sequence=0,
        kind="log",
    )
    lines = folder.events.read_bytes()
    assert lines.count(world.segment.hex().encode()) == 1
    folder.events.write_bytes(lines.replace(world.segment.hex().encode(), digest.sealed_sha256.hex().encode()))


def shorten(folder: RunFolder, _world: OwnersWorld) -> None:
    """The host takes away what came before the end."""
    folder.events.write_bytes(b"".join(folder.events.read_bytes().splitlines(keepends=True)[:3]))


def take_away(folder: RunFolder, _world: OwnersWorld) -> None:
    folder.events.unlink()


def ask(world: OwnersWorld, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(["logs", "latest", "--home", str(world.home.path), *words])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_a_good_receipt_vouches_for_the_log(
    folder: RunFolder, world: OwnersWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(world, capsys=capsys) == (0, world.printed.decode(), "")
    _, out, _ = ask(world, "--json", capsys=capsys)
    assert (json.loads(out)["vouched"], json.loads(out)["problem"]) == (True, None)


def test_so_does_the_receipt_of_a_run_that_did_not_complete(world: OwnersWorld, tmp_path: Path) -> None:
    folder = world.settle(tmp_path)
    world.tell(folder, world.run(outcome=Outcome.FAILED, code=Code.SCRIPT_FAILED))
    assert named_segments(folder, owner_signing=world.owner.public).vouched


@pytest.mark.parametrize("attack", [forge, shorten, take_away])
def test_a_log_that_the_receipt_contradicts_is_refused_and_not_shown(
    folder: RunFolder,
    world: OwnersWorld,
    attack: Callable[[RunFolder, OwnersWorld], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    attack(folder, world)
    with pytest.raises(VerificationError) as refused:
        named_segments(folder, owner_signing=world.owner.public)
    assert refused.value.code is Code.LOG_INVALID
    code, out, err = ask(world, capsys=capsys)
    assert (code, out) == (ExitCode.VERIFICATION_FAILED, "")
    assert "log-invalid" in err
    code, out, _ = ask(world, "--json", capsys=capsys)
    assert (code, json.loads(out)["error"]["code"]) == (ExitCode.VERIFICATION_FAILED, "log-invalid")


def without_receipt(folder: RunFolder, _world: OwnersWorld) -> None:
    """While a run goes on there is none."""
    folder.receipt.unlink()


def of_another_owner(folder: RunFolder, _world: OwnersWorld) -> None:
    folder.receipt.write_bytes(OwnersWorld(name="somebody else").run().data)


def of_another_run(folder: RunFolder, world: OwnersWorld) -> None:
    folder.events.write_bytes(folder.events.read_bytes())
    moved = folder.path.rename(folder.path.with_name("f" * 32))
    folder.__init__(moved)  # type: ignore[misc]
    record = json.loads((moved / "run.json").read_text()) | {"run_id": moved.name}
    (moved / "run.json").write_text(json.dumps(record))


def nobody_countersigned(folder: RunFolder, world: OwnersWorld) -> None:
    world.tell(folder, world.run(broker_away=True))


@pytest.mark.parametrize(
    ("story", "why"),
    [
        (without_receipt, "no receipt"),
        (of_another_owner, "owner-mismatch"),
        (of_another_run, "another run"),
        (nobody_countersigned, "incomplete"),
    ],
)
def test_without_a_receipt_that_vouches_the_log_is_shown_as_nobodys_word(
    folder: RunFolder, world: OwnersWorld, story: Callable[[RunFolder, OwnersWorld], None], why: str
) -> None:
    story(folder, world)
    named = named_segments(folder, owner_signing=world.owner.public)
    assert (len(named.events), named.vouched) == (1, False)
    assert why in named.why


def test_that_nothing_vouches_is_said_to_people_and_to_programs(
    folder: RunFolder, world: OwnersWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.receipt.unlink()
    code, out, err = ask(world, capsys=capsys)
    assert (code, out) == (0, world.printed.decode())
    assert "nothing vouches for this log" in err
    _, out, err = ask(world, "--json", capsys=capsys)
    assert (json.loads(out)["vouched"], err) == (False, "")
    assert "no receipt" in json.loads(out)["problem"]


def test_a_log_of_an_unattested_run_is_held_to_its_receipt_all_the_same(folder: RunFolder, world: OwnersWorld) -> None:
    nobody_countersigned(folder, world)
    forge(folder, world)
    with pytest.raises(VerificationError):
        named_segments(folder, owner_signing=world.owner.public)
