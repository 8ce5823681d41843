"""What lies beneath the paths that a worker is shown and must not: sockets and pipes, through which other processes are
reached whatever the mount, and an owner's state, which a training script has no business with.

A process of its own looks (`Look`), beside all else that happens at a run's start. Laws: it is gone before anything is
released; what it found is read before the worker's own code begins; an answer that is not whole, or does not come, is
no clean one.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH110
from __future__ import annotations

# The C modules beneath `signal` and `socket`, which cost 40 and 50 ms to import without compiled bytecode.
import _signal  # type: ignore[import-not-found]
import _socket
import errno
import marshal
import os
import select
import stat
import time

from glasshouse.runtime.kernel import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, REAL, Kernel, close_all_but, end_child
from glasshouse.wire import own_state

# Warm, 250,000 entries take half a second; on a cold disk several. The agent waits for a minute.
GIVE_UP_S = 40.0
# The note where not everything was looked at.
IN_PART = "shown-searched-in-part"
_GRACE_S = 5.0
_PIECE_BYTES = 1 << 16

# What a folder is met with that is exchanged or removed between the listing of its name and its opening.
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)

_TELLING = own_state.NAMES | {"run.json"}
_KEY_FOLDERS = tuple(f"/{folder}/" for folder in own_state.KEY_FOLDERS)


def bound_beneath(kernel: Kernel, paths: tuple[str, ...]) -> list[str]:
    """Return the Unix sockets of this machine that are bound to absolute names beneath `paths`, however deep.

    The kernel lists those of this process's network namespace, by the names that they were bound with; `search` finds
    the others. This is for a refusal that names at once what is wrong.
    """
    try:
        lines = kernel.read("/proc/net/unix").decode("utf-8", "surrogateescape").splitlines()[1:]
    except OSError:
        return []
    roots = tuple({os.path.realpath(path) + "/" for path in paths})
    names = {fields[7] for line in lines if len(fields := line.split(" ", 7)) == 8 and fields[7].startswith("/")}
    real = {name: os.path.realpath(name) for name in names}
    return sorted(name for name, place in real.items() if place.startswith(roots) and os.path.lexists(place))


class Look:
    """A process that looks at everything beneath some paths, seen from the process that started it.

    It is forked, executes nothing and holds nothing but its end of a socket: unlike a pipe, that is opened by no name
    beneath /proc, so that no other process can answer in its place. `reader` is the descriptor that the answer is read
    from (`answer`); -1 once it was handed on.
    """

    def __init__(self, paths: tuple[str, ...], pid: int, reader: int) -> None:
        self.paths, self.reader = paths, reader
        self._pid = pid

    @classmethod
    def start(cls, paths: tuple[str, ...]) -> Look:
        """Begin to look; raises `OSError` where no process can be started."""
        ours, theirs = _socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _look(list(paths), parent, theirs)
        theirs.close()
        return cls(paths, pid, ours.detach())

    def hand_on(self) -> None:
        """Close this process's descriptor of the answer, once another process has it."""
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def end(self, *, patience_s: float = 2.0) -> bool:
        """Kill and reap it, as far as it is still there; return whether it is gone. May be called twice.

        One that is traced may not be, `patience_s` later.
        """
        self.hand_on()
        if self._pid and end_child(self._pid, patience_s):
            self._pid = 0
        return not self._pid


def answer(reader: int, *, patience_s: float = GIVE_UP_S + _GRACE_S) -> tuple[list[tuple[str, str]], bool]:
    """Return what a `Look` found, as `search` does; of one that failed, was ended or is late nothing, and not whole."""
    deadline, pieces = time.monotonic() + patience_s, []
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if piece := os.read(reader, _PIECE_BYTES):
            pieces.append(piece)
            continue
        try:
            found, whole = marshal.loads(b"".join(pieces))  # noqa: S302 - written by our own process; json costs 80 ms
        except (EOFError, TypeError, ValueError):
            break
        return found, whole is True
    return [], False


def _look(paths: list[str], parent: int, writer: _socket.socket) -> None:
    """Look, answer and end, as a child of `parent`."""
    try:
        close_all_but({writer.fileno()})
        REAL.prctl(PR_SET_DUMPABLE, 0)
        REAL.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        if os.getppid() == parent:
            writer.sendall(marshal.dumps(search(paths)))
    finally:
        os._exit(0)  # nothing of the parent's is run, and no error printed: the answer is missing then


def search(paths: list[str], *, give_up_s: float = GIVE_UP_S) -> tuple[list[tuple[str, str]], bool]:
    """Look at everything beneath `paths`.

    Of links, where they lead to is looked at; after `give_up_s` seconds no further folder is looked into.

    Returns:
        ``socket``, ``pipe`` or ``state`` and one of `paths` or a path beneath, for each that was found (of a path that
        leads through a state home, by its own name or by its links, the path itself), and ``closed`` for each folder
        that can be passed through but not looked into; and whether everything else was looked at.
    """
    deadline = time.monotonic() + give_up_s
    found: list[tuple[str, str]] = []
    whole, last = True, ""
    names = [(path, os.path.realpath(path).rstrip("/")) for path in paths if os.path.exists(path)]
    states = [("state", name) for name, real in names if _is_of_state(name) or _is_of_state(real) or _is_key(real)]
    for path in sorted({f"{real}/" for _, real in names}):
        if last and path.startswith(last):
            continue  # it lies beneath one that was looked at
        last, top = path, path.rstrip("/") or "/"
        kind = _special(top)
        found += [(kind, top)] if kind else []
        whole = _beneath(top, deadline, found) and whole
    # Named as the worker does: where a link led there, its private root has the link's name alone.
    shown = [
        (kind, name + path[len(real) :])
        for kind, path in found
        for name, real in names
        if f"{path}/".startswith(f"{real}/")
    ]
    return list(dict.fromkeys(states + shown)), whole


def _is_of_state(path: str) -> bool:
    """Return whether a path is that of an owner's state, or leads through it."""
    parts = path.split("/")
    records = ["/".join((*parts[:end], "run.json")) for end in range(1, len(parts) + 1)]
    in_a_run = any(own_state.is_run_record(record) and os.path.lexists(record) for record in records)
    return in_a_run or not own_state.NAMES.isdisjoint(parts)


def _is_key(path: str) -> bool:
    """Return whether a file is a key of ours, under whatever name; one that fails to be read counts as such."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return own_state.is_key(file.read(own_state.LOOKED_AT_BYTES))
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT)  # nor does the worker read it


def _beneath(path: str, deadline: float, found: list[tuple[str, str]]) -> bool:
    """Add what lies beneath one path; return whether all of it was looked at."""
    folders, whole = [path], True
    while folders:
        folder = folders.pop()
        keys = f"{folder}/".endswith(_KEY_FOLDERS)
        if time.monotonic() >= deadline:
            return False
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if (
                        entry.name in _TELLING and (entry.name != "run.json" or own_state.is_run_record(entry.path))
                    ) or (keys and _is_key(entry.path)):
                        found.append(("state", entry.path))
                    if entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif kind := _special(entry.path):
                        found.append((kind, entry.path))
        except OSError as error:
            if error.errno in _CHANGED:
                # Gone, a file that is shown by itself, or put in its place just now: that is looked into as well.
                folders += [folder] if _is_folder(folder) else []
            elif error.errno not in (errno.EACCES, errno.EPERM):
                whole = False
            elif os.access(folder, os.X_OK):
                found.append(("closed", folder))
    return whole


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        return error.errno == errno.ESTALE  # asked again, while there is time


def _special(path: str) -> str | None:
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None  # gone, or in a folder that nothing is reached through; any other error is no answer
    return "socket" if stat.S_ISSOCK(mode) else "pipe" if stat.S_ISFIFO(mode) else None
