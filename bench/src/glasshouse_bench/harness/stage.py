"""Where a measurement happens: a state home that is thrown away, and one broker for all sessions.

Law: whatever happens, the home, its plain inputs and its broker are gone at the end; what is kept lies in the
measurement's own folder.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from glasshouse.errors import GlasshouseError
from glasshouse.jobs.define.seal_job import seal
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.owner.home import Home, private_folder, write_private
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.wire.canonical import Json
from glasshouse.workloads.measurement.slots import Plan
from glasshouse_bench.design import Design, Mode, Planted
from glasshouse_bench.harness.arms import ProtectedArm, RawArm, Worker
from glasshouse_bench.harness.session import Makes
from glasshouse_bench.harness.subject import Subject

__all__ = ["Stage"]

_BROKER_LEAVES_S = 10.0


class Stage:
    """Makes arms of the subject that `make` makes in a folder; the owner's key signs packages and delegations."""

    def __init__(self, make: Callable[[Path], Subject], *, identity: Identity) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="glasshouse-bench-"))
        self._identity = identity
        self._cpus: tuple[int, ...] = ()
        try:
            self.home = Home(path=self._path / "home").make()
            # The private half stays in memory: what follows a run needs the public one alone.
            write_private(self.home.owner_public, identity.public.encode())
            self._broker = Embedded(self.home)
            self.subject = make(private_folder(self._path / "job"))
        except BaseException:
            shutil.rmtree(self._path, ignore_errors=True)
            raise

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(GlasshouseError, OSError):
            # Asked of a broker whose last run has just ended: its record may say so a moment later.
            deadline = time.monotonic() + _BROKER_LEAVES_S
            while self._broker.serving is not None and not self._broker.give_back() and time.monotonic() < deadline:
                time.sleep(0.1)
        shutil.rmtree(self._path, ignore_errors=True)

    def pin(self, cpus: tuple[int, ...]) -> None:
        """Let both arms run on some processors only; on all for none."""
        self._cpus = cpus

    def raw(self, plan: Plan, *, planted: Planted | None = None, **targets: Json) -> Worker:
        """Return a fresh raw arm; raises `UsageError`."""
        plain = self.subject.plain(plan, **targets)
        return RawArm(plain, home=self.home, cpus=self._cpus, planted=planted)

    def protected(self, plan: Plan, **targets: Json) -> Worker:
        """Seal the job under a plan, and return a fresh protected arm; raises `UsageError`."""
        out = self.home.path / f"{secrets.token_hex(8)}.sealed"
        sealed = seal(self.subject.planned(plan, **targets), out=out, home=self.home, identity=self._identity)
        return ProtectedArm(sealed.path, home=self.home, identity=self._identity, broker=self._broker, cpus=self._cpus)

    def arms(self, design: Design, number: int) -> Makes:
        """Return what makes the arms of one session; in a null measurement both are raw."""
        targets = self.subject.timed(design.length_ns / 1e9) if design.mode.whole else {}

        def make(arm: str, end_ns: int) -> Worker:
            plan = design.plan(number, arm, end_ns=end_ns)
            if arm == "P" and design.mode is not Mode.NULL:
                return self.protected(plan, **targets)
            return self.raw(plan, planted=design.planted if arm == "P" else None, **targets)

        return make
