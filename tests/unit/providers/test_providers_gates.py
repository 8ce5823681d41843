"""The socket that a runtime calls: the same name for every connection, and this user's alone."""

from __future__ import annotations

import os
import selectors
import socket
import stat
from pathlib import Path

import pytest

from glasshouse.providers.serve.gate_sockets import GateSockets

RUN = "ab" * 16


def calls(url: str) -> bool:
    with socket.socket(socket.AF_UNIX) as runtime:
        try:
            runtime.connect(url.removeprefix("unix:"))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("deep", ["", "a folder whose name is long " * 8])
def test_a_later_connection_takes_its_place_and_the_earlier_ones_end_leaves_it(
    tmp_path: Path, deep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / deep
    folder.mkdir(mode=0o700, exist_ok=True)
    first, second = (GateSockets(folder, selectors.DefaultSelector(), lambda _call: None) for _ in range(2))
    # Two threads that set the umask and set it back may leave the other's.
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
    url = first.open(RUN)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "another login's"))
    assert second.open(RUN) == url
    first.close()
    assert calls(url)
    found = Path(url.removeprefix("unix:"))
    assert stat.S_IMODE(found.stat().st_mode) == 0o600
    assert stat.S_IMODE(found.parent.stat().st_mode) == 0o700
    second.close()
    assert not calls(url)
    assert not found.exists()
    if deep:
        found.parent.rmdir()
