"""Which file systems names lead to, and whether this kernel alone answers for them (proc(5), /proc/PID/mountinfo).

A name that is looked up on a network file system, in FUSE or in a hypervisor's share goes to its server, though nothing
has that name and nothing may be written: up to 255 bytes each. So do reads, locks and controls. Law: what is
not known to be local is remote, and so is what cannot be read or found in the table of mounts.
"""

# pathlib costs 30 ms at every start, when nothing is compiled beforehand.
# ruff: noqa: PTH110
from __future__ import annotations

import os
from collections.abc import Callable, Iterable

# Returns the whole of a file of /proc, or raises `OSError`.
Read = Callable[[str], bytes]

OVERLAY = "overlay"
# Their lookups end in this kernel: on a disk, in memory, or in the kernel's own tables.
_LOCAL = frozenset(
    (
        "bcachefs", "binfmt_misc", "bpf", "btrfs", "cgroup", "cgroup2", "configfs", "cramfs", "debugfs", "devpts",
        "devtmpfs", "efivarfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "fusectl", "hugetlbfs", "iso9660",
        "jfs", "mqueue", "nilfs2", "nsfs", "ntfs3", OVERLAY, "proc", "pstore", "ramfs", "rootfs", "securityfs",
        "squashfs", "sysfs", "tmpfs", "tracefs", "udf", "vfat", "xfs", "zfs",
    )
)  # fmt: skip
UNKNOWN = "unknown"
# On every machine with systemd a direct automount lies here, which mounts the kernel's own binfmt_misc.
_OF_THE_KERNEL = "/proc/sys/fs/binfmt_misc"
# The kernel allows 100,000 mounts in a namespace; a machine with so many counts as unreadable.
_MAX_TABLE_BYTES = 8 << 20
_VISIBLE = (b"hidepid=0", b"hidepid=off")


class Mount:
    """One line of the table: a mount at `place`, on the one with the number `parent`.

    Its `kind` is the kernel's word, without a subtype that its server chose; where it is `remote`, something besides
    this kernel may answer.
    """

    __slots__ = ("kind", "number", "options", "parent", "place", "remote")

    def __init__(self, line: bytes) -> None:
        """Read a line; raises `ValueError`."""
        before, _, after = line.partition(b" - ")
        number, parent, _device, _root, place = before.split(b" ")[:5]
        kind, _source, options = after.split(b" ", 2)
        self.number, self.parent = int(number), int(parent)
        self.place = os.fsdecode(_unescaped(place))
        self.options = options.split(b",")
        whole = kind.decode("ascii", "replace")
        name = whole.partition(".")[0]
        self.kind = name if name.replace("_", "").isalnum() and name.isascii() and len(name) <= 32 else UNKNOWN
        # A direct automount is asked for no name, but for all that is known its daemon mounts a server's files.
        idle = whole == "autofs" and b"direct" in self.options and self.place == _OF_THE_KERNEL
        # An image that is mounted on demand has its pieces fetched by a daemon, as they are read.
        fetched = whole == "erofs" and any(option.startswith(b"fsid=") for option in self.options)
        self.remote = fetched or (whole not in _LOCAL and not idle)


class MountTable:
    """The mounts that this process can see."""

    def __init__(self, text: bytes) -> None:
        """Read a table; raises `ValueError` where it is too large, or no table."""
        if len(text) > _MAX_TABLE_BYTES:
            raise ValueError(f"a table of mounts of {len(text)} bytes")
        self._mounts = {mount.number: mount for mount in map(Mount, text.splitlines())}
        self._on: dict[tuple[int | None, str], Mount] = {}
        for mount in self._mounts.values():
            rooted = mount.parent == mount.number or mount.parent not in self._mounts
            self._on[None if rooted else mount.parent, mount.place] = mount  # of two at one place the last is met

    @classmethod
    def read(cls, read: Read) -> MountTable:
        """Read this process's; raises `OSError` or `ValueError`."""
        return cls(read("/proc/self/mountinfo"))

    def at(self, path: str) -> Mount | None:
        """Return the mount that a path without links leads to; None where the table has none."""
        found, names = None, path.rstrip("/").split("/")
        for count in range(len(names)):
            place = "/".join(names[: count + 1]) or "/"
            # What is mounted on what was mounted here lies above it.
            while above := self._on.get((None if found is None else found.number, place)):
                found = above
        return found

    def places(self, kind: str) -> list[str]:
        """Return where file systems of a kind are mounted, as far as their names lead there."""
        return [mount.place for mount in self._mounts.values() if mount.kind == kind and self.at(mount.place) is mount]

    def uncommon(self) -> list[Mount]:
        """Return remote file systems and overlays that a name leads to: what lies beneath another mount is not seen."""
        mounts = [mount for mount in self._mounts.values() if mount.remote or mount.kind == OVERLAY]
        return [mount for mount in mounts if self.at(mount.place) is mount]

    def kind_of(self, read: Read, descriptor: int) -> str | None:
        """Return the kind of the remote file system that a file opened here lies on; None where it is local."""
        try:
            for line in read(f"/proc/self/fdinfo/{descriptor}").splitlines():
                if line.startswith(b"mnt_id:"):
                    mount = self._mounts[int(line.split()[1])]
                    return mount.kind if mount.remote else None
        except (OSError, KeyError, ValueError):
            pass
        return UNKNOWN

    def remote_at(self, paths: list[str]) -> set[str]:
        """Return the kinds of the remote file systems that paths themselves lie on, as far as they exist."""
        found = [self.at(os.path.realpath(path)) for path in paths if os.path.exists(path)]
        return {UNKNOWN if mount is None else mount.kind for mount in found if mount is None or mount.remote}


def is_memory(read: Read, directory: str) -> tuple[bool, bool]:
    """Read back whether `directory` is itself a tmpfs mount, and whether that never goes to swap."""
    mount = MountTable.read(read).at(directory)
    if mount is None or mount.place != directory:
        return False, False
    return mount.kind == "tmpfs", b"noswap" in mount.options


def is_remote(notes: Iterable[str]) -> bool:
    """Return whether notes name a remote file system that a worker is shown, or that its package lies on."""
    return any(note.startswith(("shown-remote-", "package-remote-")) for note in notes)


def beneath(path: str, folder: str) -> bool:
    """Return whether a path is a folder's or leads into it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def processes_are_visible(read: Read) -> bool:
    """Return whether /proc, as this process sees it, shows every user the processes of others (proc(5), hidepid).

    A training script chooses the command lines of what it starts. No filter sees what a pointer leads to, and a process
    namespace hides what is outside from the worker, not the worker from there.
    """
    try:
        mount = MountTable.read(read).at("/proc")
    except (OSError, ValueError):
        return True
    if mount is None or (mount.place, mount.kind) != ("/proc", "proc"):
        return True
    return not any(option.startswith(b"hidepid=") and option not in _VISIBLE for option in mount.options)


def _unescaped(text: bytes) -> bytes:
    """Undo the three octal digits behind a backslash that the kernel writes for white space and a backslash."""
    first, *pieces = text.split(b"\\")
    if any(len(piece) < 3 for piece in pieces):
        raise ValueError("an escape in a table of mounts that is cut short")
    return first + b"".join(bytes([int(piece[:3], 8)]) + piece[3:] for piece in pieces)
