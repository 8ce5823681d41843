"""Following a run at a place: what comes, in which order, and what a receipt that is here shows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.providers.place.place_channel import PlaceChannel
from glasshouse.providers.place.placed import RemotePlaced
from tools.waiting import wait_for

RUN = "ab" * 16
# As a place serves, with pages of two files, so that a run has several of them.
SERVE = """
import sys
from glasshouse.providers.serve import runs
from glasshouse.providers.serve import server as serve
from glasshouse.providers.serve.__main__ import main as place_main
runs.MOST_FILES = serve.MOST_FILES = 2
sys.exit(place_main(sys.argv[1:]))
"""
LEFT = {"events.log": b"events", "heads.log": b"heads", "receipt.json": b"{}", "runtime.log": b""} | {
    f"outputs/{number:04d}.sealed": b"%d" % number * 1000 for number in range(7)
}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run at a place, which has left all that it leaves and has not ended."""
    run = tmp_path / "place" / "runs" / RUN
    for name, content in LEFT.items():
        path = run / name if name == "runtime.log" else run / "out" / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
    (run / "order.json").write_text("{}")
    return run


@pytest.fixture
def placed(tmp_path: Path, there: Path) -> Iterator[RemotePlaced]:
    def channel() -> PlaceChannel:
        command = [sys.executable, "-I", "-B", "-c", SERVE, str(there.parent.parent)]
        return PlaceChannel(command, connect=lambda: pytest.fail("a call"))

    made = RemotePlaced(channel, RUN, lambda name: tmp_path / "kept" / name)
    yield made
    made.close()


def test_a_receipt_that_is_here_shows_that_all_of_its_run_is(placed: RemotePlaced, there: Path, tmp_path: Path) -> None:
    """A sweep takes it for that, also where the one before broke off after any of its steps."""
    kept = tmp_path / "kept"

    def lacking() -> set[str]:
        return {name for name, content in LEFT.items() if not (kept / name).exists() or len(content) > size(name)}

    def size(name: str) -> int:
        return (kept / name).stat().st_size

    def followed() -> int | None:
        exit_code = placed.wait(0)
        assert "receipt.json" in lacking() or lacking() == set()
        return exit_code

    wait_for(lambda: followed() is not None or lacking() == {"receipt.json"}, told=lambda: placed.problem)
    for _ in range(20):
        assert followed() is None
    assert lacking() == {"receipt.json"}, "more may come of a run that has not ended"
    (there / "ended").write_text("0")
    wait_for(lambda: followed() == 0, told=lambda: placed.problem)
    assert {name: (kept / name).read_bytes() for name in LEFT} == LEFT
