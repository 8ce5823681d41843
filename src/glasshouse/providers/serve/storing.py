"""Sends what a run leaves to its gate, meanwhile and afterwards: ``python -m glasshouse.providers.serve.storing``.

Argument: the run's folder, whose order names the gate. Only what lies outside of the runtime is read: sealed files, the
signed log, the receipt. It has no key: with each file goes the line of the log that names it, its proof, and a head
that the gate countersigned (spec/owner-api.md section 7).

Laws: the run does not wait for it, nor depend on it; it ends when all is there, when the gate keeps nothing, when the
folder is gone, or when the run has long been over. A rented machine it lets end early, only where the gate has
confirmed all of it and no owner has asked for the run for a while (`providers.rental.start_script`).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, FormatError
from glasshouse.providers.protocol.line import GateLine
from glasshouse.providers.serve.keepers import ENDED, ORDER, RENTED, STORED, relay_of
from glasshouse.providers.serve.runs import OUT, RUN, numbered
from glasshouse.wire.canonical import Json, b64encode, decode, encode
from glasshouse.wire.merkle import Tree, leaf_hash

PART_BYTES = 176 * 1024
LOOK_S, LONGEST_S = 2.0, 60.0
AFTER_S = 24 * 3600.0
GRACE_S = 900.0
_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 8192
_NAMED_BY = {"output": "outputs", "segment": "log"}
_CLOSING = ("receipt.json", "heads.log", "events.log")

Send = Callable[[bytes], tuple[int, bytes]]


class _NotKeptError(Exception):
    """The gate keeps nothing."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file and the event that names it, with its size and digest where the event has them."""

    name: str
    event: bytes
    index: int
    sealed: tuple[int, str] | None = None


class Storing:
    """What of one run is at its gate.

    Args:
        out: the runtime's folder.
        send: makes a call with a body, and returns status and answer; raises `OSError` or `http.client.HTTPException`.

    Attributes:
        done: whether all is there that ever will be, once the run has ended.
        whole: whether the gate has confirmed all of it: log, heads, receipt, and each sealed file that the log names.
    """

    def __init__(self, out: Path, send: Send) -> None:
        self._out = out
        self._send = send
        self._tree = Tree()
        self._read_bytes = 0
        self._last = b""
        self._open: dict[str, _File] = {}
        self._over: set[str] = set()  # is there, or will never be taken
        self._refusals = 0
        self.done = False

    @property
    def whole(self) -> bool:
        return self.done and not self._open and not self._refusals and self._over.issuperset(_CLOSING)

    def look(self, *, ended: bool) -> bool:
        """Send what is new and named by a head that was countersigned.

        Args:
            ended: whether the runtime had ended before this call.

        Returns:
            Whether nothing failed that may go better later.
        """
        self._read_log()
        is_last, well = b'"state":"zeroized"' in self._last, True
        head, size = self._head() if self._open or is_last else (None, 0)
        if is_last and size == len(self._tree):
            for name in _CLOSING:  # first: without them nothing else counts
                if name not in self._over:
                    self._open.setdefault(name, _File(name, self._last, size - 1))
        order = sorted(self._open.values(), key=lambda file: (file.name not in _CLOSING, file.index))
        for file in order:
            if file.index < size and not self._sent(file, head, size):
                well = False
        if ended and well:
            self.done = all(file.index >= size for file in self._open.values())
        return well

    def _read_log(self) -> None:
        """Take the lines that are new, each once it is whole."""
        with contextlib.suppress(OSError), (self._out / "events.log").open("rb") as log:
            log.seek(self._read_bytes)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                self._last = line[:-1]
                index = self._tree.append(leaf_hash(self._last))
                for kind, folder in _NAMED_BY.items():
                    if f'"type":"{kind}"'.encode() in line:
                        body = json.loads(line)["body"]
                        name = numbered(folder, body["sequence"])
                        sealed = body["sealed_bytes"], body["sealed_sha256"]
                        self._open[name] = _File(name, self._last, index, sealed)

    def _head(self) -> tuple[Json, int]:
        """Return the last countersigned head whose events were read, and how many these are; without one, 0."""
        with contextlib.suppress(OSError, FormatError, ValueError, KeyError, TypeError):
            with (self._out / "heads.log").open("rb") as heads:
                heads.seek(max(0, heads.seek(0, os.SEEK_END) - 4 * _MAX_HEAD_BYTES))
                lines = heads.read().split(b"\n")[:-1]
            for line in reversed(lines):
                size = int(_payload(_payload(json.loads(line))["head"])["size"])  # which it states itself
                if size <= len(self._tree):
                    return decode(line, max_bytes=_MAX_HEAD_BYTES), size
        return None, 0

    def _sent(self, file: _File, head: Json, size: int) -> bool:
        """Send a file from where the gate has it; return whether it is over with that file."""
        try:
            with (self._out / file.name).open("rb") as content:
                size_bytes, sha256 = file.sealed or (
                    os.fstat(content.fileno()).st_size,
                    file_digest(content, "sha256").hexdigest(),
                )
                about: dict[str, Json] = {
                    "bytes": size_bytes,
                    "event": decode(file.event, max_bytes=4096),
                    "head": head,
                    "name": file.name,
                    "proof": [b64encode(step) for step in self._tree.inclusion_proof(file.index, size)],
                    "sha256": sha256,
                }
                at, stood_still = 0, 0
                while stood_still < 2:
                    data = os.pread(content.fileno(), PART_BYTES, at)
                    status, answer = self._send(encode(about | {"data": b64encode(data), "from": at}))
                    if status != http.client.OK:
                        return self._refused(file, status, answer)
                    there = json.loads(answer)
                    if there["whole"] is True:
                        return self._is_over(file)
                    stood_still = stood_still + 1 if int(there["bytes"]) == at else 0
                    at = int(there["bytes"])
        except (OSError, http.client.HTTPException, FormatError, ValueError, KeyError, TypeError, RecursionError):
            pass  # the file, the line or the answer: all may be better at the next look
        return False

    def _refused(self, file: _File, status: int, answer: bytes) -> bool:
        code = json.loads(answer)["code"]
        if (status, code) == (http.client.NOT_FOUND, Code.USAGE):
            raise _NotKeptError
        if code != Code.HEAD_INCONSISTENT:
            return False
        self._refusals += 1
        return self._is_over(file)

    def _is_over(self, file: _File) -> bool:
        self._over.add(file.name)
        del self._open[file.name]
        return True


def _payload(envelope: Any) -> Any:
    return json.loads(base64.b64decode(envelope["payload"]))


class _Connection(http.client.HTTPConnection):
    """A call over a line whose other end is known to be the gate."""

    def __init__(self, line: GateLine) -> None:
        super().__init__(line.address[0])
        self._line = line

    def connect(self) -> None:
        self.sock = self._line.connect()
        self.sock.settimeout(_TIMEOUT_S)


def _send(line: GateLine, body: bytes) -> tuple[int, bytes]:
    with contextlib.closing(_Connection(line)) as connection:
        named = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/store", body, named)
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_ANSWER_BYTES)


def let_machine_end(folder: Path, home: Path, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Let a rented machine end itself once its owner has not asked for the run for a while; return whether it was let.

    Args:
        folder: the run's, of which all is at its gate.
        home: the user's, where a rented machine's start command has left its nonce; on another machine nothing is done.
    """
    waited_s, asked = 0.0, -1
    while waited_s < GRACE_S:
        try:
            nonce, now = (home / RENTED).read_text(), (folder / ENDED).stat().st_mtime_ns
        except OSError:
            return False  # not rented; or fetched, and removed by its owner
        waited_s, asked = waited_s + LOOK_S if now == asked else 0.0, now
        sleep(LOOK_S)
    if any(one != folder and RUN.fullmatch(one.name) for one in folder.parent.iterdir()):
        return False  # another run's machine too
    (home / STORED).write_text(nonce)
    return True


def main(arguments: list[str]) -> int:
    """Send what a run leaves until all of it is at its gate."""
    folder = Path(arguments[0])
    relay = relay_of(folder)
    if relay is None:
        return 0
    until_s = time.monotonic() + int(json.loads((folder / ORDER).read_text())["max_seconds"]) + AFTER_S
    line = GateLine(url=relay["url"], certificate=relay["certificate"])
    storing = Storing(folder / OUT, partial(_send, line))
    wait_s = LOOK_S
    with contextlib.suppress(_NotKeptError):
        while folder.exists() and not storing.done and time.monotonic() < until_s:
            well = storing.look(ended=(folder / ENDED).exists())
            wait_s = LOOK_S if well else min(2 * wait_s, LONGEST_S)
            again_s = time.monotonic() + (0 if storing.done else wait_s)
            while folder.exists() and time.monotonic() < again_s:  # it ends soon after what it reads is removed
                time.sleep(LOOK_S)
    if storing.whole:
        let_machine_end(folder, Path.home())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
