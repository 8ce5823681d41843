"""Where a measurement happens: a state home that is thrown away, the job in both forms, one broker for all sessions.

Law: whatever happens, the home, its plain inputs and its broker are gone at the end; what is kept lies in the
measurement's own folder.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from glasshouse.bench.harness.arms import ProtectedArm, RawArm, Runner
from glasshouse.bench.harness.stop import Stop
from glasshouse.bench.harness.subject import Subject
from glasshouse.bench.overhead.design import Arm, Mode
from glasshouse.errors import GlasshouseError
from glasshouse.jobs.embedded import Embedded
from glasshouse.jobs.files import private_folder, write_private
from glasshouse.jobs.home import Home
from glasshouse.jobs.identity import Identity
from glasshouse.jobs.raw import Plain

__all__ = ["Stage"]

_BROKER_LEAVES_S = 10.0


class Stage:
    """Makes arms.

    Args:
        make: makes the subject; is given a folder for its data.
        identity: the owner, whose key signs the package and the delegations.
        stop: ends every wait.
    """

    def __init__(self, make: Callable[[Path], Subject], *, identity: Identity, stop: Stop) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="glasshouse-bench-"))
        self._identity, self._stop = identity, stop
        self._package: Path | None = None
        try:
            self.home = Home(path=self._path / "home").make()
            # The private half stays in memory: what follows a run needs the public one alone.
            write_private(self.home.owner_public, identity.public.encode())
            self._broker = Embedded(self.home)
            self.subject = make(private_folder(self._path / "job"))
            self._plain: Plain = self.subject.plain
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

    def raw(self) -> Runner:
        """Return a fresh raw arm."""
        return RawArm(self._plain, home=self.home, stop=self._stop)

    def protected(self) -> Runner:
        """Return a fresh protected arm; raises `GlasshouseError` when the job cannot be sealed."""
        if self._package is None:
            self._package = self.subject.sealed(self.home, self._identity)
        return ProtectedArm(
            self._package, home=self.home, identity=self._identity, broker=self._broker, stop=self._stop
        )

    def arms(self, mode: Mode) -> Callable[[Arm], Runner]:
        """Return what makes the arms of a mode: both are raw in a null run."""

        def make(arm: Arm) -> Runner:
            return self.raw() if arm is Arm.RAW or mode is Mode.NULL else self.protected()

        return make
