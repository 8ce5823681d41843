"""A file system whose server writes down each name that is looked up: FUSE, by hand.

Source: the Linux kernel's include/uapi/linux/fuse.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["alone", "needs_fuse", "recorded"]

_LOOKUP, _GETATTR, _STATFS, _INIT, _OPENDIR, _READDIR = 1, 3, 17, 26, 27, 28
_WITHOUT_ANSWER = (2, 42)  # forget
_FOLDER = struct.pack("<QII", 60, 0, 0) + struct.pack("<6Q10I", 1, *[0] * 5, *[0] * 3, 0o40755, 2, *[0] * 5)
_ANSWERS = {
    _GETATTR: _FOLDER,
    _STATFS: bytes(80),
    _INIT: struct.pack(
        "<IIIIHHI", 7, 17, 1 << 16, 0, 12, 10, 1 << 17
    ),  # before 7.18 no control of a folder is asked for
    _OPENDIR: bytes(16),
    _READDIR: b"",
}

needs_fuse = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="this machine's user is not root, or it has no FUSE"
)


def alone(action: Callable[[], object], limit_s: float = 90.0) -> None:
    """Do it where no other test sees the mounts: some count all that there are, as a run without mounts does."""
    from glasshouse.runtime.kernel import CLONE_NEWNS, MS_PRIVATE, MS_REC, REAL
    from tools.forked import in_child  # the server below runs this file alone

    def act() -> None:
        REAL.unshare(CLONE_NEWNS)
        REAL.mount("none", "/", None, MS_REC | MS_PRIVATE)
        action()

    in_child(act, limit_s=limit_s)


@contextmanager
def recorded(place: Path, log: Path) -> Iterator[Path]:
    """Mount an empty folder at `place`, whose server writes those names to `log`, as long as the block runs."""
    place.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, __file__, str(place), str(log)], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"mounted\n"
            yield place
        finally:
            subprocess.run(["umount", "-l", place], check=False)
            server.kill()


def _serve(place: str, log: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0,allow_other"
    if libc.mount(b"recorded", place.encode(), b"fuse.recorded", 6, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    os.write(1, b"mounted\n")
    with Path(log).open("wb", buffering=0) as told:
        while request := _next(device):
            _length, what, number = struct.unpack_from("<IIQ", request)
            if what in _WITHOUT_ANSWER:
                continue
            if what == _LOOKUP:
                told.write(request[40:])
            answer = _ANSWERS.get(what, b"")
            error = 0 if what in _ANSWERS else -2 if what == _LOOKUP else -38
            os.write(device, struct.pack("<IiQ", 16 + len(answer), error, number) + answer)


def _next(device: int) -> bytes:
    """Return the next request, empty once nothing is mounted any more."""
    try:
        return os.read(device, 1 << 20)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return b""


if __name__ == "__main__":
    _serve(*sys.argv[1:])
