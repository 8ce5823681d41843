"""A harness on a machine where a calibration and a session take no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glasshouse.errors import Code
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse_bench.artifact import Arm, Attempt, Ended, Part
from glasshouse_bench.beside import Calibration
from glasshouse_bench.design import Mode
from glasshouse_bench.harness import measure as measuring
from glasshouse_bench.harness.planning import Wish
from glasshouse_bench.harness.stop import Stop
from glasshouse_bench.harness.subject import Subject, owners
from simulators.sealed_design import MACHINE, note
from simulators.slot_measurement import attempt_session

__all__ = ["Bench"]

STEPS = tuple(5_000_000 + 10_000 * (number % 7) for number in range(200))
JOB = (
    'name = "mine"\nworkload = "mlp"\n[inputs]\n"notes.txt" = "notes.txt"\n'
    "[params]\nsynthetic_rows = 64\nsynthetic_features = 4\nwidth = 16\nepochs = 3\n"
    '[policy]\nassurance = "software"\nprofile = "standard"\n'
)


class Bench:
    """Measures on a machine where every session takes no time and leaves nothing but its note.

    Args:
        folder: gets the measurement.
        beside: gets the owner's job file.
        records: whether sessions leave step records too.
    """

    def __init__(self, folder: Path, beside: Path, monkeypatch: pytest.MonkeyPatch, *, records: bool = False) -> None:
        self.folder, self.job, self.records = folder, beside / "job.toml", records
        self.job.write_text(JOB)
        (beside / "notes.txt").write_text("synthetic\n")
        self.owner, self.machine = Identity.generate(), MACHINE
        self.calibrations: list[Calibration] = []
        self.sessions: list[tuple[Mode, int]] = []
        self.fails: Code | None = None
        self.reason = ""
        monkeypatch.setattr(measuring, "calibrated", self._calibrated)
        monkeypatch.setattr(measuring, "run_session", self._session)
        monkeypatch.setattr(measuring, "parity", lambda *_: None)
        monkeypatch.setattr(measuring, "phases", lambda *_, **_named: None)
        monkeypatch.setattr(measuring, "describe", lambda _card: self.machine)

    def measure(self, wish: Wish, *, sessions: int = 3, subject: Subject | None = None, **more: Any) -> list[Part]:
        """Measure until so many sessions have ended, or all."""
        self._left = sessions
        with Stop() as stop:
            return measuring.measure(
                wish,
                lambda _folder: subject or owners(self.job, "mlp"),
                folder=self.folder,
                say=lambda _line: None,
                stop=stop,
                **{"identity": self.owner, "cpus": (1,), **more},
            )

    def _calibrated(self, _stage: object, _stop: Stop, *, device: bool, look: object) -> Calibration:
        found = Calibration(
            raw_ns=STEPS,
            protected_ns=STEPS,
            start_us=3_000_000 + len(self.calibrations),
            between_ppm=18_000,
            device=device,
        )
        self.calibrations.append(found)
        return found

    def _session(self, part: Part, number: int, *_more: object, stop: Stop, **_named: object) -> tuple[Attempt, str]:
        self.sessions.append((part.design.mode, number))
        if self.records:
            attempt_session(part, number, np.random.default_rng(number))
        else:
            part.attempt(note(number))
            arm = Arm() if self.fails is None else Arm(ended=Ended.FAILED, code=self.fails)
            part.keep(note(number, raw=arm))
        self._left -= 1
        if not self._left:
            stop.ask()
        return part.note(number)[0], self.reason
