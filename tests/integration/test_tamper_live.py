"""All stories against a live broker process, as `glasshouse tamper` tells them."""

from __future__ import annotations

import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glasshouse.tamper import stage
from glasshouse.tamper.attacks import run_attacks

NAMES = [
    "composite hash mismatch",
    "manifest hash mismatch",
    "container id mismatch",
    "stale timestamp",
    "anti-debug disabled",
    "runtime state spoofed",
    "anti-debug profile downgrade",
    "nonce replay",
    "JWT claim mismatch",
    "group: a patched machine",
    "group: a missing machine",
    "group: another's place",
    "group: another group's token",
    "group: one runtime as two",
    "line: rollback",
    "line: fork",
    "line: an old leg counts",
    "line: an old leg stores",
    "line: another's line",
    "line: another package",
    "line: torn",
    "line: an altered part",
    "line: a replayed statement",
    "line: not the holder",
    "line: a store that lies",
    "hardware: another machine's",
    "hardware: another run's",
    "hardware: another kernel",
    "hardware: another maker",
    "hardware: a key that signs all",
    "hardware: not activated",
    "hardware: a byte behind",
    "hardware: a byte short",
    "hardware: another byte",
    "hardware: none",
    "hardware: one too many",
    "hardware: a weaker level",
    "valid control",
    "valid group",
    "valid line",
    "valid TPM",
]


def test_each_story_is_refused_by_its_own_check_and_only_the_controls_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Path] = []

    class Recorded(TemporaryDirectory[str]):
        def __enter__(self) -> str:
            used.append(Path(self.name))
            assert stat.S_IMODE(used[0].stat().st_mode) == 0o700
            return super().__enter__()

    monkeypatch.setattr(stage, "TemporaryDirectory", Recorded)
    rows = run_attacks()
    assert [row.attack.name for row in rows] == NAMES
    assert all(row.held for row in rows), [row.to_json() for row in rows if not row.held]
    assert [row.released for row in rows] == [False] * 37 + [True] * 4
    # A line begins with a first leg that is released; nothing that is refused after it counts.
    moved = [row.counter_after - row.counter_before for row in rows]
    assert moved == [0] * 14 + [1] * 4 + [2] + [1] * 6 + [0] * 12 + [1, 2, 1, 1]
    assert len({row.actual for row in rows}) == 30
    assert [path.exists() for path in used] == [False], "the broker's directory is gone"
