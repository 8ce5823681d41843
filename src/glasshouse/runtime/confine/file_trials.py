"""What the launcher tries on files: beside its workspace, of the kernel, and all that the worker can see; see `trials`.

Bits of plaintext can be left in the times, mode or attributes of a file that cannot be written to. Whether a call did
something is read back: an answer alone would prove nothing. All of it is tried with the values that are there already.
"""

from __future__ import annotations

import _socket
import ctypes
import errno
import os
import stat
import time

from glasshouse.runtime.confine import read_only_package
from glasshouse.runtime.kernel import Kernel
from glasshouse.runtime.syscalls import KernelError

_MAX_TOLD = 20  # less than a pipe holds: it is not read while this process tries
# Another process may change a folder that is shown, in the same moment; not in each of so many.
_MOMENTS = 20
# Before Linux 6.13, and on many file systems since, times of changes are those of a clock that ticks every few
# milliseconds, or every second: of two changes in one tick the second is not seen.
_TICK_S, _LONG_TICK_S = 0.02, 1.1
_XATTR = "user.glasshouse-trial"
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_FS_IOC_FSGETXATTR, _FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
# A number of ext4's own for what FS_IOC_SETVERSION is too.
_EXT4_IOC_SETVERSION_OLD, _NO_ADDRESS = 0x40086604, 0
_F_SETFL, _MADV_COLLAPSE = 4, 25
_F_SETLEASE, _F_RDLCK, _F_UNLCK, _F_SET_RW_HINT = 1024, 0, 2, 1036


def files(base: str, outside: list[str]) -> list[str]:
    """Try to read and write what no rule covers: the probe in `base`, the files `outside`, and a file of its init's."""
    tried = (("read", os.O_RDONLY), ("write", os.O_WRONLY))
    paths = (base + "/probe", *outside)
    found = [f"{name}-outside" for path in paths for name, flags in tried if not _refusal(path, flags)]
    for path in ("/glasshouse-trial", base + "/trial", "/dev/trial", "/etc/trial", "/usr/trial", "/var/trial"):
        if not _refusal(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY):
            found.append("create-outside")
            os.unlink(path)  # noqa: PTH108 - pathlib is slow to import
    # A keeper's score for when memory runs out, and its priority, are its files.
    return found if _refusal(f"/proc/{os.getppid()}/oom_score_adj", os.O_WRONLY) else [*found, "write-keeper"]


def network_files() -> bool:
    """Return whether a file of this process's network in /proc can be opened for writing (of NFS, of a firewall)."""
    # By the name beneath which the files of threads may be written; nothing is.
    found = [f"{place}/{name}" for place, _, names in os.walk("/proc/thread-self/net") for name in names]
    return any(not _refusal(path, os.O_WRONLY | os.O_NONBLOCK) for path in found)


def kernel_files(names: tuple[str, ...]) -> list[str]:
    """Try to read files of /proc that show the kernel's memory; an empty one shows nothing."""
    found = []
    for name in names:
        try:
            descriptor = os.open(f"/proc/{name}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found += [f"proc-{name.replace('_', '-')}"] if os.read(descriptor, 1) else []
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return found


def metadata(kernel: Kernel, *, package: int | None, paths: list[str]) -> list[str]:
    """Try to leave something on a disk beside what files hold; return what succeeded, as ``package-times`` or ``sync``.

    Args:
        package: the descriptor that the worker will be handed; None where it is handed none.
        paths: what the worker can see of the machine: files, folders and device nodes.
    """
    found = {f"stdio-{how}" for descriptor in (0, 1, 2) for how in _left_on(kernel, descriptor)}
    found |= {f"shown-{how}" for path in paths if os.path.lexists(path) for how in _left_at(kernel, path)}
    # Of no file: an answer that it was done comes from the filter. What is worse would flush the machine's disks.
    found |= {"sync" for name in ("fdatasync", "fsync", "syncfs") if not _answers(kernel, name, -1)}
    if _answers(kernel, "madvise", 0, 0, _MADV_COLLAPSE):
        found.add("collapse")
    # In this folder, the workspace; elsewhere it is made before a refusal.
    if _refusal(".", os.O_TMPFILE | os.O_RDWR) != errno.EOPNOTSUPP:
        found.add("unnamed")
    if package is not None:
        found |= {f"package-{how}" for how in (*_left_on(kernel, package), *_written(package))}
        if _answers(kernel, "fcntl", package, _F_SETFL, os.O_DIRECT):
            kernel.call("fcntl", package, _F_SETFL, 0)
            found.add("package-direct")
        if read_only_package.kind(kernel, package) is None:
            found.add("package-descriptor")
    return sorted(found)


def ways_out(found: list[tuple[str, str]], *, private_root: bool) -> list[str]:
    """Try what was found beneath all that is shown (`shown_search.search`), and look for other processes' roots.

    Return what the worker can reach, in small words. Where it was found goes to the log, which only the owner reads.
    With a private root, names lead only to what is shown.
    """
    reached = [(kind, path) for kind, path in found if _is_reached(kind, path)]
    if private_root:
        names = [name for name in os.listdir("/proc") if name.isdigit() and _stranger(name)]  # noqa: PTH208
        reached += [("process", f"/proc/{name}/root") for name in names]
    for kind, path in reached[:_MAX_TOLD]:
        os.write(2, b"launcher: the worker would see a " + os.fsencode(f"{kind}: {path}\n"))
    return sorted({f"shown-{kind}" for kind, _ in reached})


def is_alone(kernel: Kernel) -> bool:
    """Return whether /proc shows no process but this sandbox's own: a fresh one, of a process namespace of its own."""
    # In a namespace's own /proc a process has one number, and of several levels it has more.
    return os.getppid() == 1 and len(kernel.status("self").get("NSpid", "").split()) == 1


def _is_reached(kind: str, path: str) -> bool:
    if kind == "socket":
        return _is_called(path)
    if kind == "pipe":
        # Reading takes something away, which the other end sees.
        return _opens(path, os.O_RDONLY) or _opens(path, os.O_WRONLY)
    return _opens(path, os.O_RDONLY) or os.access(path, os.X_OK)  # the names in a home are known without a look


def _opens(path: str, how: int) -> bool:
    """Return whether a file can be opened, as far as its own mode and the rules of this sandbox go."""
    # ENXIO: nothing reads that pipe now, as later something may.
    refused = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS, errno.ELOOP)
    return _refusal(path, how | os.O_NONBLOCK) not in refused


def _refusal(path: str, flags: int) -> int:
    """Try to open a file; return the number of the error, 0 where it opened."""
    try:
        os.close(os.open(path, flags | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _is_called(path: str) -> bool:
    """Return whether a socket can be called; one at which nothing listens now may have a listener later."""
    for kind in (_socket.SOCK_STREAM, _socket.SOCK_DGRAM, _socket.SOCK_SEQPACKET):
        caller = _socket.socket(_socket.AF_UNIX, kind)
        try:
            caller.connect(path)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                return False
        finally:
            caller.close()
    return True


def _stranger(pid: str) -> bool:
    """Return whether the root of a process outside of this sandbox is open to this one."""
    try:
        return not os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))  # noqa: PTH116
    except OSError:
        return False


def _left_on(kernel: Kernel, descriptor: int) -> list[str]:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        return []  # of no file system that lies on a disk
    found = _attribute(descriptor)
    if read_only_package.kind(kernel, descriptor) != read_only_package.MEMORY:
        found += _times_and_mode(descriptor)  # else they are memory, like the file
    for name, get, put in (
        ("flags", _FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS),
        ("project", _FS_IOC_FSGETXATTR, _FS_IOC_FSSETXATTR),
    ):
        held = ctypes.create_string_buffer(64)
        if _answers(kernel, "ioctl", descriptor, get, held) and _answers(kernel, "ioctl", descriptor, put, held):
            found.append(name)
    if _answers(kernel, "fcntl", descriptor, _F_SETLEASE, _F_RDLCK):
        kernel.call("fcntl", descriptor, _F_SETLEASE, _F_UNLCK)
        found.append("lease")
    if _answers(kernel, "fcntl", descriptor, _F_SET_RW_HINT, bytes(8)):
        found.append("hint")
    return found


def _left_at(kernel: Kernel, path: str) -> list[str]:
    found = _times_and_mode(path) + _attribute(path)
    mode = os.stat(path).st_mode  # noqa: PTH116
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return found  # opening a GPU's node starts the GPU
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        # Another version of the file is asked for, and none given: the file system looks for it where it would set it.
        kernel.call("ioctl", descriptor, _EXT4_IOC_SETVERSION_OLD, _NO_ADDRESS)
        found.append("version")
    except KernelError as error:
        found += ["version"] if error.errno == errno.EFAULT else []
    finally:
        os.close(descriptor)
    if stat.S_ISREG(mode) and not _refusal(path, os.O_RDONLY | os.O_DIRECT):  # past the cache; nothing is read
        found.append("direct")
    return found


def _times_and_mode(target: str | int) -> list[str]:
    """Set times, mode and owner to what they are: the kernel notes when, each time, if it does."""
    return ["times"] if all(_noted(target) for _ in range(_MOMENTS)) else []


def _noted(target: str | int) -> bool:
    before = os.stat(target)  # noqa: PTH116 - pathlib is slow to import
    tick_s = _TICK_S if before.st_ctime_ns % 10**9 else _LONG_TICK_S
    if time.time_ns() - before.st_ctime_ns < tick_s * 10**9:
        time.sleep(tick_s)
    for what in ("times", "mode", "owner"):
        try:
            if what == "times":
                os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
            elif what == "mode":
                os.chmod(target, stat.S_IMODE(before.st_mode))  # noqa: PTH101
            else:
                os.chown(target, before.st_uid, before.st_gid)
        except OSError:
            continue
    return os.stat(target).st_ctime_ns != before.st_ctime_ns  # noqa: PTH116


def _attribute(target: str | int) -> list[str]:
    try:
        os.setxattr(target, _XATTR, b"")
        os.removexattr(target, _XATTR)
    except OSError:
        return []
    return ["attribute"]


def _written(descriptor: int) -> list[str]:
    """Try to get a descriptor for writing out of one for reading, and to write back what is there."""
    try:
        writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        os.pwrite(writable, os.pread(descriptor, 1, 0), 0)
    except OSError:
        return []
    finally:
        os.close(writable)
    return ["write"]


def _answers(kernel: Kernel, name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char]) -> bool:
    words = [ctypes.addressof(word) if isinstance(word, ctypes.Array) else word for word in arguments]
    try:
        kernel.call(name, *words)
    except KernelError:
        return False
    return True
