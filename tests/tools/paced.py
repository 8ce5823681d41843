"""Whoever measures, played: one end of a pacing channel, and raw and protected arms that hold the other."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glasshouse.wire import pacing
from glasshouse.wire.pacing import End, Go, Parked, Report, Slice

PATIENCE_S = 60.0


class Measurer:
    """One end of a pacing channel; the other, `theirs`, is for the process that is measured.

    Args:
        theirs: closed here by `given`, once the process has it.
    """

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(PATIENCE_S)
        self.origin_ns = time.perf_counter_ns()

    @property
    def fd(self) -> int:
        return self.theirs.fileno()

    def given(self) -> None:
        self.theirs.close()

    def hear(self) -> Report:
        data = self.ours.recv(pacing.MAX_BYTES + 1)
        assert data, "the arm hung up"
        return pacing.report(data)

    def parked(self) -> int:
        report = self.hear()
        assert isinstance(report, Parked)
        return report.done

    def order(self, **changed: Any) -> Go:
        plain: dict[str, Any] = {
            "origin_ns": self.origin_ns,
            "until": 0,
            "steps": 5,
            "least_ns": None,
            "guard_ns": 0,
            "burn_ns": 0,
            "stamps": False,
        }
        return Go(**plain | changed)

    def slice(self, **changed: Any) -> Slice:
        """Let the arm run a slice and return its report."""
        self.ours.send(pacing.encode(self.order(**changed)))
        report = self.hear()
        assert isinstance(report, Slice)
        return report

    def end(self, until: int) -> None:
        self.ours.send(pacing.encode(End(until=until)))

    def hung_up(self) -> bool:
        """Wait for the end of the other end."""
        try:
            return self.ours.recv(1) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


class RawArm:
    """A raw worker that holds a pacing channel.

    Args:
        folder: an empty folder.
        measurer: None for a worker that gets no channel.
    """

    def __init__(
        self, kind: str, params: Mapping[str, Any], files: Mapping[str, bytes], folder: Path, measurer: Measurer | None
    ) -> None:
        self.folder = folder
        for name, data in files.items():
            (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "in" / name).write_bytes(data)
        (folder / "in").mkdir(parents=True, exist_ok=True)
        (folder / "params.json").write_text(json.dumps(dict(params)))
        inherited = () if measurer is None else (measurer.fd,)
        self._errors = (folder / "errors").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-m", "glasshouse.workloads.worker", "--raw", "--workload", kind),
                *("--params", str(folder / "params.json"), "--inputs", str(folder / "in")),
                *("--outputs", str(folder / "out"), "--events", str(folder / "events")),
                *(() if measurer is None else ("--pace-fd", str(measurer.fd))),
            ],
            pass_fds=inherited,
            stderr=self._errors,
            stdout=self._errors,
            stdin=subprocess.DEVNULL,
        )
        if measurer is not None:
            measurer.given()

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "events").read_text().splitlines()]

    def one(self, kind: str) -> dict[str, Any]:
        [found] = [event for event in self.events() if event["type"] == kind]
        return found

    def said(self) -> str:
        return (self.folder / "errors").read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._errors.close()
