"""Plays the agent to a real worker process: socketpair, memory file for the grant, a really sealed package."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glasshouse.package.read import Package
from glasshouse.package.write import Source, write
from glasshouse.wire import frames
from glasshouse.wire.crypto import RecipientKey, SigningKey
from glasshouse.wire.policy import Assurance, Floor, Profile
from glasshouse.workloads.registry import canonical
from tools.waiting import wait_for


@dataclass
class Ended:
    """What a worker did, seen from the agent's end."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    outputs: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    log: str = ""

    def types(self) -> list[str]:
        return [message["type"] for message in self.messages if message["type"] != "progress"]

    def one(self, kind: str) -> dict[str, Any]:
        found = [message for message in self.messages if message["type"] == kind]
        assert len(found) == 1, f"{len(found)} messages of type {kind}; the log says:\n{self.log}"
        return found[0]


def sealed_package(
    files: Mapping[str, bytes], job: dict[str, Any], workload: str, **options: Any
) -> tuple[bytes, bytes]:
    """Return a package and its encoded grant; `options` are those of `package.write.write`."""
    owner, key = SigningKey.generate(), secrets.token_bytes(32)
    sealing = RecipientKey.generate().public
    out = io.BytesIO()
    write(
        out,
        sources=[
            Source(path=path, bytes=len(data), open=lambda data=data: io.BytesIO(data)) for path, data in files.items()
        ],
        job=job,
        workload=workload,
        floor=Floor(assurance=Assurance.SOFTWARE, profile=Profile.STANDARD),
        owner=owner,
        owner_sealing=sealing,
        recipients=[sealing],
        package_key=key,
        package_id=secrets.token_hex(16),
        **options,
    )
    package = Package.open(io.BytesIO(out.getvalue()))
    return out.getvalue(), package.grant(key, package.unlock(key)).encode()


class FakeAgent:
    """One worker under the agent's protocol.

    Args:
        kind: the workload.
        params: the job file's `[params]`.
        files: the inputs.
        workspace: an empty folder.
        ranks: how many the worker is told to start; the grant has no group secret for them.
    """

    def __init__(
        self,
        kind: str,
        params: Mapping[str, Any],
        files: Mapping[str, bytes],
        workspace: Path,
        *,
        ranks: int | None = None,
    ) -> None:
        self._package, self._grant = sealed_package(files, canonical(kind, params), kind)
        self.link, theirs = socket.socketpair()
        self.link.settimeout(300)
        self._decoder = frames.Decoder()
        self._waiting: list[Any] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # A rank is handed nothing that the worker could read: as root, it could.
        drop = ["setpriv", "--bounding-set=-all"] if ranks is not None and os.geteuid() == 0 else []
        command = [*drop, sys.executable, "-I", "-m", "glasshouse.workloads.worker", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(
            [
                *(*command, "--workload", kind, "--workspace", str(workspace)),
                *(() if ranks is None else ("--ranks", str(ranks))),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=workspace,
        )
        theirs.close()
        self.ended = Ended()

    def send(self, message: dict[str, Any]) -> None:
        self.link.sendall(frames.control(message))

    def give_grant(self) -> None:
        """Hand over the grant and the package as the agent does: as two descriptors."""
        descriptors = [memory_file("grant", self._grant), memory_file("package", self._package)]
        message = frames.control({"type": "grant", "bytes": len(self._grant)})
        socket.send_fds(self.link, [message], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def next(self) -> dict[str, Any] | bytearray | None:
        """Return the worker's next message or piece of data; None at its end."""
        while not self._waiting:
            received = self.link.recv(1 << 16)
            if not received:
                return None
            self._waiting += [value for _kind, value in self._decoder.feed(received)]
        return self._waiting.pop(0)

    def until(self, kind: str) -> dict[str, Any]:
        """Follow the worker until it sends a message of this type."""
        while (value := self.next()) is not None:
            self._record(value)
            if isinstance(value, dict) and value["type"] == kind:
                return value
        raise AssertionError(f"the worker ended before {kind!r}:\n{self.finish().log}")

    def finish(self, *, on_message: Callable[[dict[str, Any]], None] | None = None) -> Ended:
        """Follow the worker to its end."""
        while (value := self.next()) is not None:
            self._record(value)
            if on_message is not None and isinstance(value, dict):
                on_message(value)
        self.ended.exit_code = self.process.wait(timeout=30)
        self.link.close()
        if not self._log.closed:
            self._log.seek(0)
            self.ended.log = self._log.read().decode()
            self._log.close()
        return self.ended

    def run(self) -> Ended:
        """Play the whole story."""
        self.until("ready")
        self.send({"type": "prepare"})
        self.until("imported")
        self.give_grant()
        return self.finish()

    def wait_for_log(self, text: str) -> None:
        """Wait until the worker has printed `text`."""
        wait_for(lambda: text.encode() in os.pread(self._log.fileno(), 1 << 16, 0))

    def kill(self) -> None:
        """End the worker if it still lives, and close what is open."""
        self.process.kill()
        self.process.wait()
        self.link.close()
        self._log.close()

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _record(self, value: dict[str, Any] | bytearray) -> None:
        if isinstance(value, bytearray):
            self.ended.outputs[self._open_output] += bytes(value)
            return
        self.ended.messages.append(value)
        if value["type"] == "output":
            self._open_output = value["name"]
            self._declared = value["bytes"]
            self.ended.outputs[value["name"]] = b""
        if value["type"] == "output-end":
            data = self.ended.outputs[self._open_output]
            assert len(data) == self._declared
            assert hashlib.sha256(data).hexdigest() == value["sha256"]


def memory_file(name: str, data: bytes) -> int:
    descriptor = os.memfd_create(name)
    os.write(descriptor, data) if data else None
    return descriptor


def run_raw(
    kind: str, params: Mapping[str, Any], files: Mapping[str, bytes], folder: Path, *, ranks: int | None = None
) -> Ended:
    """Run the raw leg with the same inputs."""
    import json

    inputs, outputs = folder / "raw-inputs", folder / "raw-outputs"
    for name, data in files.items():
        (inputs / name).parent.mkdir(parents=True, exist_ok=True)
        (inputs / name).write_bytes(data)
    inputs.mkdir(exist_ok=True)
    (folder / "events").unlink(missing_ok=True)
    (folder / "params.json").write_text(json.dumps(dict(params)))
    command = [sys.executable, "-I", "-m", "glasshouse.workloads.worker", "--raw", "--workload", kind]
    command += [] if ranks is None else ["--ranks", str(ranks)]
    command += ["--params", str(folder / "params.json"), "--inputs", str(inputs), "--outputs", str(outputs)]
    done = subprocess.run(
        [*command, "--events", str(folder / "events")], capture_output=True, text=True, timeout=120, check=False
    )
    lines = (folder / "events").read_text().splitlines()
    ended = Ended(
        exit_code=done.returncode, log=done.stdout + done.stderr, messages=[json.loads(line) for line in lines]
    )
    if outputs.exists():
        ended.outputs = {
            path.relative_to(outputs).as_posix(): path.read_bytes() for path in outputs.rglob("*") if path.is_file()
        }
    return ended
