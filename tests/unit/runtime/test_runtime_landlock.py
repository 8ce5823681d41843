"""Landlock: what is asked of each version of the kernel, and what it does to files here."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.runtime.confine import landlock
from glasshouse.runtime.kernel import PR_SET_NO_NEW_PRIVS, REAL, Kernel
from glasshouse.runtime.syscalls import KernelError
from tools.forked import in_child
from tools.machine import WithoutLandlock, needs_landlock


class Recording(Kernel):
    """A kernel of a given Landlock version that only writes down what it is asked."""

    def __init__(self, abi: int) -> None:
        super().__init__()
        self.abi = abi
        self.rulesets: list[bytes] = []
        self.rules: list[tuple[str, int]] = []
        self.restricted = False

    def landlock_abi(self) -> int:
        return self.abi

    def call(self, name: str, *arguments: Any) -> int:
        match name, *arguments:
            case "landlock_create_ruleset", attributes, length, 0:
                assert len(attributes) == length
                self.rulesets.append(attributes)
                return os.open(os.devnull, os.O_RDONLY)
            case "landlock_add_rule", _ruleset, 1, attributes, 0:
                allowed, descriptor = struct.unpack("<Qi", attributes)
                self.rules.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), allowed))
            case "landlock_restrict_self", _ruleset, 0:
                self.restricted = True
            case _:
                raise AssertionError(name)
        return 0


@pytest.mark.parametrize(
    ("abi", "size", "files"),
    [
        (1, 8, 0x1FFF),
        (2, 8, 0x3FFF),
        (3, 8, 0x7FFF),
        (4, 16, 0x7FFF),
        (5, 16, 0xFFFF),
        (6, 24, 0xFFFF),
        (7, 24, 0xFFFF),
    ],
)
def test_each_version_is_asked_for_all_that_it_can_take_away(abi: int, size: int, files: int) -> None:
    kernel = Recording(abi)
    assert landlock.restrict(kernel, read=[], write=[], devices=[], names=[]) == abi
    assert [len(ruleset) for ruleset in kernel.rulesets] == [size]
    words = struct.unpack(f"<{size // 8}Q", kernel.rulesets[0])
    assert words == (files, 0b11, 0b11)[: size // 8]
    assert kernel.restricted


@pytest.mark.parametrize("abi", range(1, 8))
def test_a_rule_never_allows_more_than_the_version_knows(abi: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    kernel = Recording(abi)
    landlock.restrict(
        kernel, read=["/usr", str(tmp_path / "file")], write=[str(tmp_path)], devices=[os.devnull], names=["/"]
    )
    rules = dict(kernel.rules)
    assert all(not allowed & ~landlock.rights(abi) for allowed in rules.values())
    assert rules["/usr"] == 0b1101  # execute, read files, list; never write
    assert rules[str(tmp_path / "file")] == 0b101  # of a file, only what a file has
    assert rules[str(tmp_path)] == landlock.rights(abi) & ~(1 << 15)
    assert rules[os.devnull] & 0b110 == 0b110
    assert rules["/"] == 0b1000


def test_a_kernel_without_landlock_restricts_nothing_and_says_so() -> None:
    assert landlock.restrict(WithoutLandlock(), read=[], write=[], devices=[], names=[]) == 0


def test_a_kernel_that_has_it_and_refuses_is_an_error_and_not_an_absence() -> None:
    class Refusing(Recording):
        def call(self, name: str, *arguments: Any) -> int:
            if name == "landlock_restrict_self":
                raise KernelError(name, errno.E2BIG)
            return super().call(name, *arguments)

    with pytest.raises(KernelError, match="landlock_restrict_self"):
        landlock.restrict(Refusing(7), read=[], write=[], devices=[], names=[])


def test_a_path_that_is_not_there_is_an_error_and_not_an_omission(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        landlock.restrict(Recording(7), read=[str(tmp_path / "gone")], write=[], devices=[], names=[])


def tried(path: Path, flags: int) -> str:
    try:
        os.close(os.open(path, flags, 0o600))
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def restricted(action: Callable[[], list[str]], *, read: list[str], write: list[str]) -> list[str]:
    def story() -> list[str]:
        REAL.prctl(PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict(REAL, read=read, write=write, devices=[os.devnull], names=[])
        return action()

    return in_child(story)


@needs_landlock
def test_only_what_is_listed_can_be_opened(tmp_path: Path) -> None:
    seen, work, hidden = (tmp_path / name for name in ("seen", "work", "hidden"))
    for folder in (seen, work, hidden):
        folder.mkdir()
        (folder / "file").write_bytes(b"content")

    def action() -> list[str]:
        return [
            tried(seen / "file", os.O_RDONLY),
            tried(seen / "file", os.O_WRONLY),
            tried(seen / "new", os.O_CREAT | os.O_WRONLY),
            tried(work / "new", os.O_CREAT | os.O_RDWR),
            tried(hidden / "file", os.O_RDONLY),
            tried(hidden / "file", os.O_WRONLY),
            tried(Path(os.devnull), os.O_RDWR),
        ]

    denied = "EACCES"
    expected = ["done", denied, denied, "done", denied, denied, "done"]
    assert restricted(action, read=[str(seen)], write=[str(work)]) == expected


@needs_landlock
def test_a_link_out_of_the_workspace_leads_nowhere(tmp_path: Path) -> None:
    work, hidden = tmp_path / "work", tmp_path / "hidden"
    work.mkdir()
    hidden.write_bytes(b"content")

    def action() -> list[str]:
        (work / "link").symlink_to(hidden)
        return [tried(work / "link", os.O_RDONLY)]

    assert restricted(action, read=[], write=[str(work)]) == ["EACCES"]
