"""A raw worker, played: what its process is given, what it says, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0


class RawArm:
    """A raw worker over a plain folder.

    Args:
        folder: an empty folder.
    """

    def __init__(self, kind: str, params: Mapping[str, Any], files: Mapping[str, bytes], folder: Path) -> None:
        self.folder = folder
        for name, data in files.items():
            (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "in" / name).write_bytes(data)
        (folder / "in").mkdir(parents=True, exist_ok=True)
        (folder / "params.json").write_text(json.dumps(dict(params)))
        self._errors = (folder / "errors").open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-m", "glasshouse.workloads.worker", "--raw", "--workload", kind),
                *("--params", str(folder / "params.json"), "--inputs", str(folder / "in")),
                *("--outputs", str(folder / "out"), "--events", str(folder / "events")),
            ],
            stderr=self._errors,
            stdout=self._errors,
            stdin=subprocess.DEVNULL,
        )

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
