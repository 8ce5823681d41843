"""Removal of a folder with all that a worker left in it: any depth, any mode, links, very many names.

Laws: nothing elsewhere is touched: no link is followed, and no mount is entered; what lies deep is moved up to the top
before it is looked into, so that no path grows, and few descriptors are open; what cannot be removed raises nothing,
and keeps nothing else from being removed.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
from __future__ import annotations

import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable

# A million files take seven of them. A process that still adds some would have us remove forever.
GIVE_UP_S = 60.0
_ATTEMPTS = 2
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_LOCKED_FLAGS = 0x10 | 0x20  # immutable, append-only
_WORD_BYTES = 8


def removed(path: str, *, give_up_s: float = GIVE_UP_S) -> bool:
    """Remove a folder with all that is in it; return whether nothing has that name any more.

    One that is not there, or is a link, is left as it is; after `give_up_s` seconds the rest stays.
    """
    deadline = time.monotonic() + give_up_s
    for _ in range(_ATTEMPTS):
        try:
            top = opened(path)
        except OSError:
            break
        try:
            _empty(top, deadline)
        finally:
            os.close(top)
        if _done(os.rmdir, path):
            break
    return not os.path.lexists(path)


def opened(name: str, within: int | None = None) -> int:
    """Open a folder so that it can be listed and emptied, whatever mode and flags its owner gave it; raises `OSError`.

    It lies in the folder of the descriptor `within`, if there is one.
    """
    handle = os.open(name, os.O_PATH | _FOLDER, dir_fd=within)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
            _done(os.chmod, f"/proc/self/fd/{handle}", stat.S_IRWXU)
        folder = os.open(".", os.O_RDONLY | _FOLDER, dir_fd=handle)
    finally:
        os.close(handle)
    if _unlock(folder):
        _done(os.fchmod, folder, stat.S_IRWXU)
    return folder


def _empty(top: int, deadline: float) -> None:
    """Remove what is in a folder, each folder in it emptied under a name of its own directly beneath it."""
    mark = os.urandom(16).hex() + "-"
    device = os.fstat(top).st_dev
    moved, done = _clear(top, top, mark, 0, deadline), 0
    while done < moved and time.monotonic() < deadline:
        name = f"{mark}{done}"
        done += 1
        try:
            folder = opened(name, top)
        except OSError:
            continue
        try:
            if os.fstat(folder).st_dev == device:
                moved = _clear(folder, top, mark, moved, deadline)
        finally:
            os.close(folder)
        _done(os.rmdir, name, dir_fd=top)


def _clear(folder: int, top: int, mark: str, moved: int, deadline: float) -> int:
    """Remove the files in a folder, and move the folders in it to the top, by the mark and a number.

    Return how many have such a name now; `moved` had one already.
    """
    try:
        # Never listed as a whole: a hundred thousand names take memory.
        with os.scandir(folder) as entries:
            for entry in entries:
                if time.monotonic() >= deadline:
                    break
                if entry.name.startswith(mark):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    _unlink(entry.name, folder)
                # A folder on which something is mounted can be neither removed nor moved.
                elif not _done(os.rmdir, entry.name, dir_fd=folder):
                    moved += _move(entry.name, folder, f"{mark}{moved}", top)
    except OSError:
        pass  # what is left of it keeps the folder from being removed
    return moved


def _unlink(name: str, folder: int) -> None:
    if _done(os.unlink, name, dir_fd=folder):
        return
    try:
        # Nothing is waited for, should it be a pipe, and nothing is begun, should it be a device.
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return
    try:
        if _unlock(file):
            _done(os.unlink, name, dir_fd=folder)
    finally:
        os.close(file)


def _move(name: str, folder: int, new: str, top: int) -> bool:
    if _done(os.rename, name, new, src_dir_fd=folder, dst_dir_fd=top):
        return True
    try:
        os.close(opened(name, folder))  # a folder that its owner may not write cannot be moved
    except OSError:
        return False
    return _done(os.rename, name, new, src_dir_fd=folder, dst_dir_fd=top)


def _unlock(descriptor: int) -> bool:
    """Take immutable and append-only from a file or folder; return whether it had one of them and has none now."""
    try:
        flags = int.from_bytes(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(_WORD_BYTES))[:4], sys.byteorder)
        if not flags & _LOCKED_FLAGS:
            return False
        fcntl.ioctl(descriptor, _SET_FLAGS, (flags & ~_LOCKED_FLAGS).to_bytes(_WORD_BYTES, sys.byteorder))
    except OSError:
        return False  # this file system has none, or they are not ours to change
    return True


def _done(call: Callable[..., None], *arguments: str | int, **folders: int) -> bool:
    """Make a call; return whether it succeeded."""
    try:
        call(*arguments, **folders)
    except OSError:
        return False
    return True
