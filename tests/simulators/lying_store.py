"""A rendezvous store that sends a rank to a stranger, who stands between it and the others and forges what passes."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Between", "LyingStore"]

_LARGE_BYTES = 4096


class Between:
    """Listens for one rank, passes everything on to where it wanted to go, and forges one byte when told to."""

    def __init__(self) -> None:
        self._armed = threading.Event()
        self.forged = threading.Event()
        self._outward: list[threading.Thread] = []

    def forge(self) -> None:
        """Flip a bit of the next large piece that comes from the other rank; barriers go by."""
        self._armed.set()

    def pass_the_rest(self) -> None:
        """Wait until what the rank said before it closed its connections has gone on."""
        for thread in self._outward:
            thread.join(10)

    def stand_before(self, host: str, port: int) -> int:
        """Return a port of this machine at which `host`:`port` seems to be."""
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, host, port), daemon=True).start()
        return int(listener.getsockname()[1])

    def _serve(self, listener: socket.socket, host: str, port: int) -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection((host, port))
            outward = threading.Thread(target=self._pass, args=(near, far, False), daemon=True)
            outward.start()
            self._outward.append(outward)
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, forging: bool) -> None:
        try:
            while data := bytearray(source.recv(1 << 16)):
                if forging and len(data) >= _LARGE_BYTES and self._armed.is_set() and not self.forged.is_set():
                    data[len(data) // 2] ^= 1
                    self.forged.set()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            target.close()


class LyingStore(dist.Store):  # type: ignore[misc]
    """Passes everything on, but for addresses: those lead to somebody between."""

    def __init__(self, store: dist.Store, between: Between) -> None:
        super().__init__()
        self._store = store
        self._between = between
        self._led: dict[str, bytes] = {}

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        words = value.decode(errors="replace").split(" ")
        if "sealed/" not in key or len(words) < 2 or not words[1].isdigit():
            return value
        host, port = words[:2]  # and no word of the name by which ranks of one machine meet
        if key not in self._led:
            self._led[key] = f"127.0.0.1 {self._between.stand_before(host, int(port))}".encode()
        return self._led[key]

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store.wait(keys)
        else:
            self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))
