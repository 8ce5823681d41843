"""A rented machine may end itself early once its gate has all of its run, and its owner is not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from glasshouse.providers.serve.keepers import ENDED, RENTED, STORED
from glasshouse.providers.serve.runs import Run
from glasshouse.providers.serve.storing import GRACE_S, let_machine_end

NONCE = "ab" * 16 + "\n"


class Ended:
    """A run that has ended on a machine, and time that passes only when someone waits."""

    def __init__(self, home: Path) -> None:
        self.home, self.waited_s = home, 0.0
        self.folder = home / "runs" / ("c0ffee00" * 4)
        self.folder.mkdir(parents=True)
        (self.folder / ENDED).write_text("0")
        (home / RENTED).write_text(NONCE)
        self.then: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds
        self.then()

    def let(self) -> bool:
        return let_machine_end(self.folder, self.home, self.sleep)

    @property
    def stored(self) -> bool:
        return (self.home / STORED).exists()


@pytest.fixture
def ended(tmp_path: Path) -> Ended:
    return Ended(tmp_path)


def test_a_machine_whose_owner_does_not_come_may_end_after_a_while(ended: Ended) -> None:
    assert ended.let()
    assert (ended.home / STORED).read_text() == NONCE
    assert ended.waited_s >= GRACE_S


def test_a_machine_whose_owner_fetches_slowly_waits(ended: Ended) -> None:
    def fetch() -> None:
        if ended.waited_s < 5 * GRACE_S and ended.waited_s % 60 == 0:
            Run(ended.folder).asked()

    ended.then = fetch
    assert ended.let()
    assert ended.waited_s >= 6 * GRACE_S - 60


def test_a_machine_whose_owner_has_fetched_all_is_given_back_by_its_owner(ended: Ended) -> None:
    ended.then = lambda: shutil.rmtree(ended.folder, ignore_errors=True)
    assert not ended.let()
    assert not ended.stored


def test_a_machine_that_is_not_rented_is_left_alone(ended: Ended) -> None:
    (ended.home / RENTED).unlink()
    assert not ended.let()
    assert not ended.stored


def test_a_machine_with_another_run_is_left_to_its_caps(ended: Ended) -> None:
    (ended.folder.parent / ("d" * 32)).mkdir()
    assert not ended.let()
    assert not ended.stored
