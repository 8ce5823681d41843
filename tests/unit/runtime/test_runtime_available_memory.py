"""A run lives within the machine's memory and that of every control group above it, of version 1 and of version 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.runtime.confine import memory_limits
from glasshouse.runtime.confine.memory_limits import available_bytes, ends_together
from glasshouse.runtime.run import start_processes
from tools.forked import in_child

MIB, GIB = 1 << 20, 1 << 30
V1 = Path("/sys/fs/cgroup/memory")
NONE_V1 = 9223372036854771712


def machine(root: Path, *, cgroup: str, mounts: list[str], free: int = 64 * GIB) -> str:
    """Lay out what the kernel would show."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {free // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return str(root)


def group(root: Path, path: str, **files: object) -> None:
    folder = root / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_dot_", ".")).write_text(f"{text}\n")


def v2(root: Path, path: str, limit: object, used: int, cache: int = 0, high: object = "max") -> None:
    files = {"memory_dot_max": limit, "memory_dot_current": used, "memory_dot_high": high}
    group(root, path, **files, memory_dot_stat=f"anon 1\ninactive_file {cache}")


MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"


def test_without_groups_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, cgroup="", mounts=[], free=3 * GIB)) == 3 * GIB


def test_a_machine_that_says_nothing_is_taken_for_a_small_one(tmp_path: Path) -> None:
    assert available_bytes(str(tmp_path)) == GIB


def test_the_least_of_all_ancestors_counts_in_version_2(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/kube/pod/box\n", mounts=[MOUNT_V2])
    v2(tmp_path, "/sys/fs/cgroup/kube/pod/box", "max", 100 * MIB)
    v2(tmp_path, "/sys/fs/cgroup/kube/pod", 2 * GIB, GIB, cache=256 * MIB)
    v2(tmp_path, "/sys/fs/cgroup/kube", 8 * GIB, 2 * GIB)
    assert available_bytes(root) == GIB + 256 * MIB


def test_a_group_that_is_slowed_down_before_it_is_full_counts_too(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/\n", mounts=[MOUNT_V2])
    v2(tmp_path, "/sys/fs/cgroup", 4 * GIB, GIB, high=2 * GIB)
    assert available_bytes(root) == GIB


def test_a_full_group_has_nothing_left_and_the_workspace_its_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, cgroup="0::/\n", mounts=[MOUNT_V2])
    v2(tmp_path, "/sys/fs/cgroup", GIB, GIB + MIB)
    assert available_bytes(root) == 0
    monkeypatch.setattr(memory_limits, "available_bytes", lambda: available_bytes(root))
    assert start_processes._workspace_bytes() == 64 * MIB


@pytest.mark.parametrize(
    ("path", "top"), [("/docker/abc", "/docker/abc"), ("/../../kube/abc", "/"), ("/docker/abc", "/other")]
)
def test_a_container_sees_its_own_group_at_the_top_of_the_mount(tmp_path: Path, path: str, top: str) -> None:
    mount = f"30 23 0:26 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    root = machine(tmp_path, cgroup=f"5:cpu,cpuacct:/x\n4:memory:{path}\n0::/\n", mounts=[mount])
    group(
        tmp_path,
        "/sys/fs/cgroup/memory",
        memory_dot_limit_in_bytes=GIB,
        memory_dot_usage_in_bytes=600 * MIB,
        memory_dot_stat=f"total_inactive_file {100 * MIB}",
    )
    assert available_bytes(root) == GIB - 500 * MIB


def test_both_versions_at_once_and_no_limit_in_version_1(tmp_path: Path) -> None:
    mounts = [
        MOUNT_V2.replace("cgroup rw -", "cgroup/unified rw -"),
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    ]
    root = machine(tmp_path, cgroup="4:memory:/a\n0::/b\n", mounts=mounts)
    group(tmp_path, "/sys/fs/cgroup/memory/a", memory_dot_limit_in_bytes=NONE_V1, memory_dot_usage_in_bytes=5)
    v2(tmp_path, "/sys/fs/cgroup/unified/b", 3 * GIB, GIB)
    assert available_bytes(root) == 2 * GIB


@pytest.fixture
def real_group() -> Iterator[Path]:
    place = V1 / f"glasshouse-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError:
        pytest.skip("this machine lets no control group of version 1 be made")
    yield place
    place.rmdir()


def test_a_real_group_of_version_1_limits_the_workspace(real_group: Path) -> None:
    (real_group / "memory.limit_in_bytes").write_text(str(1200 * MIB))

    def act() -> tuple[int, int]:
        (real_group / "cgroup.procs").write_text("0")
        return available_bytes(), start_processes._workspace_bytes()

    left, workspace = in_child(act)
    assert 900 * MIB < left <= 1200 * MIB
    assert workspace == pytest.approx(left / 2, rel=0.1)


@pytest.mark.parametrize(("path", "together"), [("kube/pod/box", True), ("kube", True), ("other", False)])
def test_a_group_that_is_ended_as_a_whole_is_seen_at_whichever_level(tmp_path: Path, path: str, together: bool) -> None:
    """As of every container of Kubernetes': the agent's score does not save it, nor a supervisor beside it."""
    root = machine(tmp_path, cgroup="0::/kube/pod/box\n", mounts=[MOUNT_V2])
    for folder in ("kube/pod/box", "kube", "other"):
        group(tmp_path, f"/sys/fs/cgroup/{folder}", memory_dot_oom_dot_group=int(folder == path))
    assert ends_together(root) is together
