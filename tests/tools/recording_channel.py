"""A way out of a worker that keeps what came."""

from __future__ import annotations

import hashlib
from typing import Any, BinaryIO


class Recorded:
    """Messages and outputs, in the order in which they came."""

    def __init__(self) -> None:
        self.stopping = False
        self.messages: list[dict[str, Any]] = []
        self.outputs: dict[str, bytes] = {}

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def output(self, header: dict[str, Any], source: BinaryIO) -> str:
        self.outputs[header["name"]] = data = source.read(header["bytes"])
        return hashlib.sha256(data).hexdigest()
