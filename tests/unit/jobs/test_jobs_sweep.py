"""Sweeping a machine that lies: nothing is added to what is kept here of a run that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.supervise import sweeping
from glasshouse.providers.place.ssh import SshPlace
from glasshouse.providers.place.ways import SshHost


class Listing(SshPlace):
    """A machine that says of all runs that they go on, or that they have ended, and what was asked of it."""

    def __init__(self, runs: list[str], *, goes_on: bool = True, wiping: bool = False, slow: bool = False) -> None:
        super().__init__("lab", SshHost(host="nowhere"), "python3", "-", connect=lambda: pytest.fail("a call"))
        self.asked: list[str] = []
        self.bounds: list[int | None] = []
        self._listed = dict.fromkeys(runs, goes_on)
        self._wiping, self.slow = wiping, slow

    def runs(self) -> dict[str, bool]:
        return dict(self._listed)

    def run(self, folder: Path, *, max_bytes: int | None = None, relayed: bool = False) -> Any:
        self.bounds.append(max_bytes)
        return Asked(self.asked, folder / "out", wiping=self._wiping, slow=self.slow)


class Asked:
    """A run of which more comes whenever it is followed."""

    problem = "the link is down"

    def __init__(self, asked: list[str], out: Path, *, wiping: bool, slow: bool) -> None:
        self._asked, self._out, self._wiping, self._slow = asked, out, wiping, slow

    def connect(self) -> None:
        self._asked.append("connect")

    def stop(self) -> None:
        self._asked.append("stop")

    def interrupt(self) -> None:
        self._asked.append("interrupt")

    def kill(self) -> None:
        self._asked.append("kill")

    def wait(self, _timeout_s: float) -> int | None:
        self._asked.append("wait")
        with (self._out / "events.log").open("ab") as log:
            log.write(b"more")
        return None if self._slow else 0

    def remove(self, _package: str | None) -> None:
        self._asked.append("remove")
        if self._wiping:
            raise UsageError(Code.USAGE, "the run has not ended: stop it first")

    def close(self) -> None:
        pass


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setattr(Embedded, "ensure", lambda _self: None)
    return Home(path=tmp_path / "home").make()


def ended(home: Home, code: Code | None) -> RunFolder:
    folder = RunFolder.create(home)
    folder.out.mkdir()
    folder.events.write_bytes(b"what came")
    folder.save(
        RunRecord(
            run_id=folder.run_id,
            name="clinic",
            workload="lora",
            package=Path("/nowhere/job.sealed"),
            package_id="ab" * 16,
            manifest_sha256="cd" * 32,
            assurance="software",
            profile="standard",
            created_us=1,
            max_duration_s=60,
            phase=Phase.ENDED,
            outcome="lost",
            code=None if code is None else code.value,
            place="lab",
            placed=True,
            max_output_bytes=4711,
        )
    )
    return folder


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("receipt", [True, False])
@pytest.mark.parametrize("code", [None, Code.WORKER_KILLED, Code.PLACE_UNREACHABLE])
def test_only_a_run_that_was_given_up_is_followed_and_only_until_its_receipt_is_here(
    home: Home, monkeypatch: pytest.MonkeyPatch, code: Code | None, receipt: bool, goes_on: bool
) -> None:
    folder = ended(home, code)
    if receipt:
        folder.receipt.write_bytes(b"{}")
    lab = Listing([folder.run_id], goes_on=goes_on)
    monkeypatch.setattr(sweeping, "place_of", lambda _home, _name: lab)
    assert sweeping.sweep_machine(home, "lab") == (1, {})
    followed = code is Code.PLACE_UNREACHABLE and not receipt
    stopped = (["interrupt"] if followed else ["connect", "stop"]) if goes_on else []
    assert lab.asked == [*stopped, *(["wait"] if followed else []), "remove"]
    assert folder.events.read_bytes() == (b"what camemore" if followed else b"what came")
    assert lab.bounds == [4711], "what it may leave is bounded as while it ran"


@pytest.mark.parametrize("goes_on", [True, False])
def test_one_that_was_given_up_is_removed_there_once_it_is_here_whole(
    home: Home, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    folder = ended(home, Code.PLACE_UNREACHABLE)
    lab = Listing([folder.run_id], goes_on=goes_on, slow=True)
    monkeypatch.setattr(sweeping, "place_of", lambda _home, _name: lab)
    assert sweeping.sweep_machine(home, "lab") == (0, {folder.run_id: "is not here whole yet: the link is down"})
    assert "remove" not in lab.asked
    lab.slow = False
    assert sweeping.sweep_machine(home, "lab") == (1, {})
    assert lab.asked[-2:] == ["wait", "remove"]


def test_one_of_which_the_machine_has_nothing_is_not_waited_for(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(home, Code.PLACE_UNREACHABLE)
    lab = Listing([])
    monkeypatch.setattr(sweeping, "place_of", lambda _home, _name: lab)
    assert sweeping.sweep_machine(home, "lab") == (0, {})
    assert lab.asked == ["remove"]


def test_one_that_takes_its_time_to_end_is_listed_and_left_to_the_next_sweep(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = ended(home, None)
    lab = Listing([slow.run_id], wiping=True)
    monkeypatch.setattr(sweeping, "place_of", lambda _home, _name: lab)
    assert sweeping.sweep_machine(home, "lab") == (
        0,
        {slow.run_id: "is stopping, and still wipes itself"},
    )


def test_each_run_that_is_left_is_told_with_its_reason_and_nothing_is_asked_of_it(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, elsewhere = ended(home, None), ended(home, None)
    running.update(phase=Phase.RUNNING)
    elsewhere.update(place="the same machine")
    lab = Listing([running.run_id, elsewhere.run_id, "cd" * 16])
    monkeypatch.setattr(sweeping, "place_of", lambda _home, _name: lab)
    assert sweeping.sweep_machine(home, "lab") == (
        0,
        {
            running.run_id: "goes on",
            elsewhere.run_id: "was placed by another name: the same machine",
            "cd" * 16: "is no run of yours",
        },
    )
    assert lab.asked == []
