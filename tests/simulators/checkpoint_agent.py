"""Plays the agent of a leg to a real worker: seals the parts that it sends, counts, and hands a checkpoint back.

Parts are sealed and unwrapped by what agent and custodian have; only store and gate are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glasshouse.package.checkpoints.part_sealer import PartSealer
from glasshouse.package.grant import Grant, Resume, ResumePart
from glasshouse.wire import frames
from glasshouse.wire.crypto import RecipientKey, key_id, sha256
from glasshouse.wire.lines.checkpoint import FRONT_BYTES, PartHeader, Place, front_length
from tools.fake_agent import FakeAgent, memory_file

LIMITS = {"bytes": 1 << 26, "every_s": 10, "most": 100}
Parts = Mapping[int, bytes]
"""A checkpoint: the sealed part of each rank."""


class Line:
    """One line: its key, and the checkpoints that were counted, by step."""

    def __init__(self, ranks: int = 1) -> None:
        self.key, self.ranks = RecipientKey.generate(), ranks
        self.counted: dict[int, Parts] = {}
        self.seq, self.head = 0, None

    def seal(self, plaintext: bytes, header: Mapping[str, Any]) -> bytes:
        place = Place(
            deployment="00" * 16,
            environment_sha256=bytes(32),
            leg=1,
            line=bytes(32),
            machines=1,
            manifest_sha256=bytes(32),
            ranks=self.ranks,
            seq=header["seq"],
            step=header["step"],
        )
        out = io.BytesIO()
        sealer = PartSealer(out, place=place, rank=header["rank"], recipients=[self.key.public])
        sealer.update(plaintext)
        sealer.finish()
        return out.getvalue()

    def resume(self, step: int, damage: Callable[[bytes], bytes] = lambda chunks: chunks) -> tuple[Resume, bytes]:
        """Return what a grant says of a checkpoint, and the file of its parts."""
        file, parts = b"", []
        for rank, sealed in sorted(self.counted[step].items()):
            front = sealed[: front_length(sealed[:FRONT_BYTES])]
            header, chunks = PartHeader.parse_front(front), damage(sealed[len(front) :])
            key = self.key.open(dict(header.recipients)[key_id(self.key.public)], info=header.info)
            size = len(chunks) - 16 * -(-len(chunks) // (header.chunk_bytes + 16))
            parts.append(
                ResumePart(
                    bytes=size,
                    chunk_bytes=header.chunk_bytes,
                    front_sha256=sha256(front),
                    key=key,
                    offset=len(file),
                    rank=rank,
                    suite=header.suite,
                )
            )
            file += chunks
        return Resume(parts=tuple(parts), seq=max(1, self.seq), step=step), file


class CheckpointAgent(FakeAgent):
    """The agent of one leg of a line.

    Args:
        line: whose checkpoints it counts.
        resume: the step of the checkpoint that the leg goes on from.
        damage: what a store does to the parts before.
    """

    def __init__(
        self,
        line: Line,
        kind: str,
        params: Mapping[str, Any],
        files: Mapping[str, bytes],
        workspace: Path,
        *,
        ranks: int | None = None,
        resume: int | None = None,
        damage: Callable[[bytes], bytes] = lambda chunks: chunks,
    ) -> None:
        workspace.mkdir(parents=True, exist_ok=True)
        super().__init__(kind, {**params, "checkpoints": LIMITS}, files, workspace, ranks=ranks)
        self.line, self.between = line, []
        grant = Grant.parse(self._grant)
        if ranks is not None:
            grant = replace(grant, group_secret=secrets.token_bytes(32))
        self._resume = b""
        if resume is not None:
            found, self._resume = line.resume(resume, damage)
            grant = replace(grant, resume=found)
        self._grant = grant.encode()
        self._part: dict[str, Any] | None = None
        self._plain = b""
        self._parts: dict[int, bytes] = {}

    def give_grant(self) -> None:
        descriptors = [memory_file("grant", self._grant), memory_file("package", self._package)]
        message: dict[str, Any] = {"type": "grant", "bytes": len(self._grant)}
        if self._resume:
            descriptors.append(memory_file("parts", self._resume))
            message["resume"] = True
        socket.send_fds(self.link, [frames.control(message)], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self.permit()

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # a worker that has ended after its last checkpoint
            super().send(message)

    def next(self) -> dict[str, Any] | bytearray | None:
        try:
            return super().next()
        except ConnectionResetError:  # it ended before it had read all
            return None

    def permit(self, *, wait_us: int = 0, left: int = 10) -> None:
        self.send(
            {"type": "line", "left": left, "previous": self.line.head, "seq": self.line.seq + 1, "wait_us": wait_us}
        )

    def _record(self, value: dict[str, Any] | bytearray) -> None:
        if isinstance(value, bytearray):
            if self._part is None:
                super()._record(value)
            else:
                self._plain += bytes(value)
            return
        if self._part is not None and value["type"] == "progress":
            self.between.append(value)
        if value["type"] not in ("part", "part-end", "checkpoint"):
            super()._record(value)
            return
        self.ended.messages.append(value)
        if value["type"] == "part":
            assert self._part is None
            assert value["rank"] == self.line.ranks - 1 - len(self._parts)
            assert (value["seq"], value["previous"]) == (self.line.seq + 1, self.line.head)
            self._part, self._plain = value, b""
        elif value["type"] == "part-end":
            assert self._part is not None
            assert value["bytes"] == len(self._plain)
            sealed = self.line.seal(self._plain, self._part)
            self._parts[self._part["rank"]] = sealed
            row = {"rank": self._part["rank"], "bytes": len(sealed), "sha256": hashlib.sha256(sealed).hexdigest()}
            self._part = None
            self.send({"type": "part-kept", "head_sha256": "00" * 32, **row})
        else:
            assert value["others"] == []
            assert sorted(self._parts) == list(range(self.line.ranks))
            self.line.counted[value["step"]], self._parts = self._parts, {}
            self.line.seq += 1
            self.line.head = secrets.token_hex(32)
            self.permit()


def kinds(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [message["type"] for message in messages if message["type"] != "progress"]
