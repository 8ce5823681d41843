"""Names that are looked up go to the server of a network file system: which file systems a worker is shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.runtime.confine import mounts, private_root
from glasshouse.runtime.confine.mounts import MountTable
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.run import doctor
from glasshouse.runtime.run.findings import Standing
from glasshouse.runtime.syscalls import KernelError
from tools.fuse import alone, needs_fuse, recorded
from tools.machine import WithoutMounts, WithoutNamespaces, needs_filters, needs_landlock, needs_namespaces, needs_root
from tools.sandboxed import run, specification

LINE = "{number} {parent} 0:1 / {place} ro shared:1 - {kind} source {options}\n"


def table(*lines: tuple[int, int, str, str]) -> MountTable:
    return MountTable(text(*lines))


def text(*lines: tuple[int, int, str, str], options: str = "rw") -> bytes:
    return "".join(
        LINE.format(number=number, parent=parent, place=place, kind=kind, options=options)
        for number, parent, place, kind in lines
    ).encode()


ROOT = (20, 1, "/", "ext4")


class Mounted(Kernel):
    """A machine with a table of mounts of its own, or with something else in the place of one."""

    def __init__(self, content: bytes | None) -> None:
        super().__init__()
        self.content, self.covered = content, list[str]()

    def read(self, path: str) -> bytes:
        if path != "/proc/self/mountinfo":
            return super().read(path)
        if self.content is None:
            raise KernelError("open", 13)
        return self.content

    def cover(self, folder: str) -> None:
        number = 1000 + len(self.covered)
        if folder.endswith(".so"):
            raise KernelError("mount", 20)
        assert self.content is not None
        parent = MountTable(self.content).at(folder)
        assert parent is not None
        self.content += text((number, parent.number, folder, "tmpfs"))
        self.covered.append(folder)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "squashfs", "devtmpfs", "sysfs", "proc"])
def test_a_disk_of_the_machine_and_the_kernels_own_files_are_local(kind: str) -> None:
    assert private_root.cover_remote(Mounted(text((20, 1, "/", kind))), ["/usr"], cover=None) == ([], [])


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("nfs", "nfs"), ("nfs4", "nfs4"), ("cifs", "cifs"), ("smb3", "smb3"), ("9p", "9p"), ("virtiofs", "virtiofs"),
        ("ceph", "ceph"), ("lustre", "lustre"), ("gpfs", "gpfs"), ("afs", "afs"), ("autofs", "autofs"),
        ("none", "none"),
        ("fuse", "fuse"), ("fuseblk", "fuseblk"), ("fuse.sshfs", "fuse"), ("fuse.a\\040secret\"", "fuse"),
        ("ext4.but-not", "ext4"), ("of-tomorrow", "unknown"),
    ],
)  # fmt: skip
def test_what_is_not_known_to_be_local_is_remote_and_named_by_a_word_of_the_kernels(kind: str, word: str) -> None:
    found = private_root.cover_remote(Mounted(text((20, 1, "/", kind))), ["/usr"], cover=None)
    assert found == ([f"shown-remote-{word}"], [])
    assert mounts.is_remote(found[0])


@pytest.mark.parametrize(
    ("place", "options", "remote"),
    [
        ("/proc/sys/fs/binfmt_misc", "rw,fd=29,direct", False),
        ("/proc/sys/fs/binfmt_misc", "rw,indirect", True),
        ("/proc/sys/fs/binfmt_misc/deeper", "rw,fd=29,direct", True),
        ("/opt/models", "rw,fd=29,direct", True),
        ("/opt/models", "rw,indirect", True),
        ("/opt/models", "rw", True),
    ],
)
def test_an_automount_is_what_its_daemon_may_mount_there_but_for_the_kernels_own(
    place: str, options: str, remote: bool
) -> None:
    machine = Mounted(text(ROOT) + text((21, 20, place, "autofs"), options=options))
    notes = ["shown-remote-autofs"] * remote
    assert private_root.cover_remote(machine, ["/usr"], cover=None) == (notes, [])
    assert private_root.cover_remote(machine, ["/usr", f"{place}/x"], cover=machine.cover) == (notes, [])
    covered = [place] * remote
    assert private_root.cover_remote(machine, ["/usr"], cover=machine.cover) == (["covered-remote"] * remote, covered)


@pytest.mark.parametrize(("options", "remote"), [("ro", False), ("ro,domain_id=x,fsid=image", True)])
def test_an_image_whose_pieces_are_fetched_as_they_are_read_is_remote(options: str, remote: bool) -> None:
    found, _ = private_root.cover_remote(Mounted(text((20, 1, "/", "erofs"), options=options)), ["/usr"], cover=None)
    assert found == ["shown-remote-erofs"] * remote


def test_of_an_overlay_it_is_said_that_its_layers_are_not_seen_and_it_is_no_remote_one() -> None:
    found, _ = private_root.cover_remote(Mounted(text((20, 1, "/", "overlay"))), ["/usr"], cover=None)
    assert found == ["shown-overlay"]
    assert not mounts.is_remote(found)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        text((20, 1, "/proc", "proc")),
        b"no table\n",
        b"1 2 3 4 5\n",
        b"20 1 0:1 / /\\0 ro - ext4 a b\n",
        b"\n",
        text(ROOT) * 200_000,
    ],
    ids=["unreadable", "empty", "without a root", "words", "short", "escape", "empty line", "too large"],
)
def test_a_table_that_cannot_be_read_is_no_local_one(content: bytes | None) -> None:
    found, _ = private_root.cover_remote(Mounted(content), ["/usr"], cover=None)
    assert found == ["shown-remote-unknown"]
    assert mounts.is_remote(found)


def test_a_path_leads_to_the_last_mount_at_the_deepest_place() -> None:
    seen = table(
        ROOT, (21, 20, "/opt", "nfs"), (22, 21, "/opt", "xfs"), (23, 22, "/opt/a", "ceph"), (24, 20, "/op", "9p"),
        (25, 20, "/with\\040space", "cifs"), (26, 20, "/deep/er", "nfs"), (27, 20, "/deep", "tmpfs"),
    )  # fmt: skip
    kinds = {
        "/": "ext4", "/opt": "xfs", "/opt/b": "xfs", "/opt/a": "ceph", "/opt/a/b/c": "ceph", "/opt/ab": "xfs",
        "/op/x": "9p",
        "/optional": "ext4", "/with space/x": "cifs", "/with": "ext4", "/deep/er": "tmpfs",
    }  # fmt: skip
    assert {path: getattr(seen.at(path), "kind", None) for path in kinds} == kinds
    # What lies beneath another mount is reached by no name.
    assert sorted(mount.place for mount in seen.uncommon()) == ["/op", "/opt/a", "/with space"]


def test_a_machine_whose_root_is_not_in_the_table_has_unknown_files(tmp_path: Path) -> None:
    seen = table((20, 1, "/proc", "proc"))
    assert seen.at("/usr") is None
    assert seen.remote_at([str(tmp_path), f"{tmp_path}/missing"]) == {"unknown"}


def test_what_lies_beneath_is_covered_and_what_is_needed_or_a_single_file_is_named() -> None:
    machine = Mounted(
        text(
            ROOT, (21, 20, "/usr/share/data", "nfs4"), (22, 20, "/usr/lib/one.so", "fuse"), (23, 20, "/venv", "ceph"),
            (24, 23, "/venv/lib/cache", "9p"), (25, 21, "/usr/share/data/deeper", "cifs"),
        )
    )  # fmt: skip
    found = private_root.cover_remote(machine, ["/usr", "/venv/lib/python/site-packages"], cover=machine.cover)
    assert found == (
        ["covered-remote", "shown-remote-ceph", "shown-remote-fuse"],
        ["/usr/share/data", "/venv/lib/cache", "/usr/share/data/deeper"],
    )


def test_where_all_that_is_remote_could_be_covered_nothing_remote_is_shown() -> None:
    machine = Mounted(text(ROOT, (21, 20, "/usr/share/data", "nfs4")))
    found, _ = private_root.cover_remote(machine, ["/usr"], cover=machine.cover)
    assert found == ["covered-remote"]
    assert not mounts.is_remote(found)


def test_of_a_file_the_mount_is_known_that_it_was_opened_by(tmp_path: Path) -> None:
    with (tmp_path / "package").open("wb") as package:
        number = int(REAL.read(f"/proc/self/fdinfo/{package.fileno()}").split(b"mnt_id:")[1].split()[0])
        for kind, found in (("ext4", None), ("nfs4", "nfs4")):
            assert table((number, 1, "/", kind)).kind_of(REAL.read, package.fileno()) == found
        assert table((number + 1, 1, "/", "ext4")).kind_of(REAL.read, package.fileno()) == "unknown"


class Remote(WithoutNamespaces):
    """A machine without namespaces, one of whose folders is a volume of its provider's."""

    def read(self, path: str) -> bytes:
        content = super().read(path)
        if path != "/proc/self/mountinfo":
            return content
        root = MountTable(content).at("/")
        assert root is not None
        return content + text((999_999, root.number, "/workspace", "fuse.volume"))


@needs_filters
@needs_landlock
def test_where_nothing_can_be_mounted_every_remote_file_system_of_the_machine_counts() -> None:
    there = run("pass", kernel=Remote())
    assert "shown-remote-fuse" in there.report.notes
    assert there.report.observed["landlock"] is CheckResult.UNAVAILABLE
    # What `standard` demands.
    assert there.report.observed["egress-closed"] is CheckResult.PASSED


class PackageOnShare(Kernel):
    """A machine on which the file system was a share when the package was opened, and all else lies on its disk."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def read(self, path: str) -> bytes:
        content = super().read(path)
        if path != "/proc/self/mountinfo":
            return content
        self.reads += 1
        return re.sub(rb" - \S+ ", b" - nfs4 ", content) if self.reads == 1 else content


class CopiedFromShare(PackageOnShare, WithoutNamespaces):
    """The same, where the package has to be copied."""


@needs_filters
@needs_landlock
@needs_root
@needs_namespaces
def test_a_package_that_is_read_from_a_share_is_named_and_one_that_was_copied_is_not(tmp_path: Path) -> None:
    (tmp_path / "package").write_bytes(b"sealed")
    with (tmp_path / "package").open("rb") as package:
        there = run("pass", kernel=PackageOnShare(), package=package.fileno())
        assert "package-remote-nfs4" in there.report.notes
        assert there.report.observed["landlock"] is CheckResult.UNAVAILABLE
        copied = run("pass", kernel=CopiedFromShare(), package=package.fileno())
        assert "sealed-package" in copied.report.notes
        assert not mounts.is_remote(copied.report.notes)


@needs_filters
def test_doctor_names_the_file_systems_and_strict_is_out_of_reach() -> None:
    for kernel, value, standing in (
        (Mounted(text((20, 1, "/", "virtiofs"))), "virtiofs", Standing.WEAKER),
        (Mounted(None), "unknown", Standing.WEAKER),
        (Mounted(text((20, 1, "/", "overlay"))), "overlay", Standing.GOOD),
    ):
        found = {one.feature: one for one in doctor.examine(kernel)}
        assert (found["shown-files"].value, found["shown-files"].standing) == (value, standing)
        assert ("shown-files" in found["profile"].consequence) is (standing is Standing.WEAKER)
        assert ("local disk" in found["shown-files"].consequence) is (standing is Standing.WEAKER)


class MountedForGood(Mounted, WithoutMounts):
    """A machine with shares that nothing can be mounted over."""


@needs_filters
def test_doctor_counts_a_share_aside_only_where_it_would_stay_in_sight() -> None:
    table = text((20, 1, "/", "ext4"), (21, 20, "/srv/share", "nfs4"))
    for kernel, value in ((Mounted(table), "local"), (MountedForGood(table), "nfs4")):
        found = {one.feature: one for one in doctor.examine(kernel)}
        assert found["shown-files"].value == value
        assert ("nothing can be covered" in found["shown-files"].consequence) is (value == "nfs4")


LOOK_UP = """
import os, sys
for number in range(20):
    try:
        os.stat(f'{sys.argv[2]}/GH{number}.' + 'plaintext' * 20)
    except OSError as error:
        print(error.errno)
"""


def argv(folder: Path) -> tuple[str, ...]:
    given = specification(LOOK_UP).argv
    return (*given, str(folder))


@needs_fuse
@needs_filters
@needs_landlock
@needs_root
@needs_namespaces
def test_names_that_a_worker_looks_up_reach_no_server_beneath_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    paths = (*specification("").read_paths, str(tmp_path / "hub"))

    def story() -> None:
        with recorded(tmp_path / "hub" / "models", tmp_path / "told") as folder:
            ran = run("", argv=argv(folder), read_paths=paths)
            assert ran.output == "2\n" * 20
            assert b"plaintext" not in (tmp_path / "told").read_bytes()
        assert "covered-remote" in ran.report.notes
        assert ran.report.observed["landlock"] is CheckResult.PASSED
        assert f"covered, since a server sees each name looked up there: {folder}" in ran.errors

    alone(story)


@needs_fuse
@needs_filters
@needs_landlock
@needs_root
@needs_namespaces
def test_where_a_shown_folder_itself_lies_with_a_server_it_is_named_and_strict_is_out_of_reach(tmp_path: Path) -> None:
    def story() -> None:
        with recorded(tmp_path / "hub", tmp_path / "told") as folder:
            ran = run("", argv=argv(folder), read_paths=(*specification("").read_paths, str(folder)))
            # This is what is not stopped, and why the check does not pass.
            assert (tmp_path / "told").read_bytes().count(b"plaintext") == 20 * 20
        assert "shown-remote-fuse" in ran.report.notes
        assert ran.report.observed["landlock"] is CheckResult.UNAVAILABLE
        assert ran.report.observed["egress-closed"] is CheckResult.PASSED

    alone(story)
