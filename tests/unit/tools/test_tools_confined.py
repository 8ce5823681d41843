"""The stand-in for a container: what a container refuses is refused, and what it gives is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.machine import needs_filters, needs_root

pytestmark = needs_filters

CONFINED = Path(__file__).parents[2] / "tools" / "confined.py"

TRIES = """
import ctypes, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
for name, call in {
    "user": lambda: libc.unshare(0x10000000), "network": lambda: libc.unshare(0x40000000),
    "mount": lambda: libc.mount(b"none", b"/mnt", b"tmpfs", 0, None), "clone3": lambda: libc.syscall(435, 0, 0),
    "keyctl": lambda: libc.syscall(250, 0, -3, 1),
}.items():
    ctypes.set_errno(0)
    print(name, call(), ctypes.get_errno())
print("starts", subprocess.run(["true"]).returncode)
print("capabilities", [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")][0])
print("shared", os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_bsize)
"""


def said(*words: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-I", str(CONFINED), *words, sys.executable, "-I", "-c", TRIES],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="this machine has other numbers for the calls")
def test_a_confined_command_gets_no_namespace_no_mount_and_no_keyring() -> None:
    found = said()
    assert {found[name] for name in ("user", "network", "mount", "keyctl")} == {"-1 1"}  # EPERM
    assert found["clone3"] == "-1 38"  # ENOSYS: the C library takes clone
    assert found["starts"] == "0"


@needs_root
def test_root_keeps_the_capabilities_that_docker_leaves_it_and_a_small_shared_memory() -> None:
    found = said("SHM=64m")
    assert found["capabilities"] == "00000000a80425fb"
    assert found["shared"] == str(64 << 20)
