"""The doctor: what a machine offers, what is missing and what follows, in words that do not flatter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.kernel import REAL, Kernel
from glasshouse.runtime.run import checks, doctor, findings
from glasshouse.runtime.run.findings import Finding, Standing
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.wire.canonical import decode, encode
from tools.forked import in_child
from tools.machine import (
    HALF_ISOLATED,
    Lacks,
    WithoutLandlock,
    WithoutMemoryLock,
    WithoutNamespaces,
    WithoutNoswap,
    WithoutSeccomp,
    WithoutSecretMemory,
    WithSwap,
    needs_filters,
    needs_landlock,
    needs_namespaces,
    needs_root,
    needs_secret_memory,
)

pytestmark = needs_filters

HOST_SEES = {"host-sees-memory", "host-sees-measurements", "host-sees-gpu", "host-sees-traffic"}


def examined(kernel: Kernel = REAL, devices: Path = Path("/dev")) -> dict[str, Finding]:
    found = in_child(lambda: doctor.examine(kernel, devices=devices))
    assert len({finding.feature for finding in found}) == len(found)
    return {finding.feature: finding for finding in found}


@needs_root
@needs_namespaces
@needs_landlock
@needs_secret_memory
def test_a_machine_with_everything_can_reach_strict_and_software_and_no_more() -> None:
    found = examined()
    if found["swap"].standing is Standing.GOOD:
        assert (found["profile"].value, found["profile"].standing) == ("strict", Standing.GOOD)
    assert found["assurance"].value == "software"
    assert found["landlock"].value == f"abi {REAL.landlock_abi()}"


@pytest.mark.parametrize(
    ("kernel", "feature", "value"),
    [
        (WithoutLandlock(), "landlock", "none"),
        (WithoutSecretMemory(), "secret-memory", "locked-memory"),
        (WithoutNamespaces(), "workspace", "directory"),
        (WithoutMemoryLock(), "locked-memory", None),
        (WithSwap(), "swap", "1 devices"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, Kernel) else None,
)
def test_whatever_is_missing_is_named_and_puts_strict_out_of_reach(
    kernel: Kernel, feature: str, value: str | None
) -> None:
    found = examined(kernel)
    assert found[feature].standing is Standing.WEAKER
    assert value is None or found[feature].value == value
    assert (found["profile"].value, found["profile"].standing) == ("standard", Standing.WEAKER)
    assert feature in found["profile"].consequence


@needs_root
@needs_namespaces
@pytest.mark.parametrize("lacking", [lacking for lacking in HALF_ISOLATED if lacking.endswith("-namespace")])
def test_a_namespace_that_is_missing_is_named_with_what_scripts_lose(lacking: str) -> None:
    found, feature = examined(HALF_ISOLATED[lacking]), lacking.removeprefix("no-")
    assert (found[feature].standing, found[feature].value) == (Standing.WEAKER, "none")
    assert "DataLoader workers" in found[feature].consequence
    assert found["ranks"].standing is Standing.WEAKER
    # The filter stands in for all but the mounts.
    assert (feature in found["profile"].consequence) is (feature == "mount-namespace")


@needs_namespaces
def test_it_says_whether_a_job_can_have_ranks_which_no_profile_needs() -> None:
    with_, without = examined(), examined(WithoutNamespaces())
    assert (with_["ranks"].standing, with_["ranks"].value) == (Standing.GOOD, "loopback")
    assert (without["ranks"].standing, without["ranks"].value) == (Standing.WEAKER, "inherited")
    assert "--machines" in without["ranks"].consequence
    assert "ranks" not in without["profile"].consequence


@needs_namespaces
def test_without_landlock_a_run_needs_a_root_and_a_view_of_processes_of_its_own() -> None:
    class Older(Lacks, WithoutLandlock):
        """Without Landlock, and without one namespace."""

    for flag, profile in ((linux.CLONE_NEWPID, "off"), (linux.CLONE_NEWNS, "off"), (linux.CLONE_NEWNET, "standard")):
        assert examined(Older(flag))["profile"].value == profile


def test_without_filters_no_protected_run_is_possible() -> None:
    found = examined(WithoutSeccomp())
    assert found["seccomp"].standing is Standing.MISSING
    assert (found["profile"].value, found["profile"].standing) == ("off", Standing.MISSING)


@needs_root
@needs_namespaces
def test_before_linux_6_4_the_workspace_is_said_to_be_swappable() -> None:
    workspace = examined(WithoutNoswap())["workspace"]
    assert (workspace.value, workspace.standing) == ("tmpfs", Standing.GOOD)
    assert "swap" in workspace.consequence


def test_hardware_roots_are_seen_and_what_they_lack_is_said(tmp_path: Path) -> None:
    for node in ("tpmrm0", "sev-guest", "tdx_guest", "nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / node).touch()
    found = examined(devices=tmp_path)
    for name in ("tpm", "sev-snp", "tdx", "nvidia"):
        assert found[f"root-{name}"].standing is Standing.NOTE
        assert found[f"root-{name}"].consequence.startswith("gives no evidence here: ")
    assert found["gpus"].value == "2"
    assert found["assurance"].value == "software"


def test_a_root_that_gives_evidence_is_what_the_machine_can_be_attested_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tpmrm0").touch()
    offers = {"tpm": "", "azure": "it is no machine of Azure's"}
    monkeypatch.setattr(findings, "collector_of", lambda kind: SimpleNamespace(look=lambda: offers[kind]))
    found = examined(devices=tmp_path)
    assert (found["root-tpm"].standing, found["root-azure"].standing) == (Standing.GOOD, Standing.NOTE)
    assert "tpm" in found["root-tpm"].consequence
    assert "image" in found["root-tpm"].consequence
    assert found["assurance"].value == "tpm"
    assert "host-sees-memory" in found
    assert "host-sees-measurements" not in found


def test_a_bare_machine_has_no_roots(tmp_path: Path) -> None:
    found = examined(devices=tmp_path)
    assert not [feature for feature in found if feature.startswith("root-")]
    assert found["gpus"].value == "0"


def test_what_the_host_can_see_is_always_said() -> None:
    found = examined()
    assert {feature for feature in found if feature.startswith("host-sees-")} == HOST_SEES
    assert "leaves no trace" in found["host-sees-memory"].consequence


@pytest.mark.parametrize(("scope", "said"), [("0", "watched"), ("1", "parents"), ("3", "no process"), ("9", "unknown")])
def test_the_limits_on_attaching_are_read(scope: str, said: str) -> None:
    class Yama(Kernel):
        def read(self, path: str) -> bytes:
            return f"{scope}\n".encode() if path.endswith("ptrace_scope") else super().read(path)

    assert said in examined(Yama())["ptrace-scope"].consequence


@pytest.mark.parametrize(
    ("pattern", "standing"),
    [
        (b"core", Standing.GOOD),
        (b"|/usr/lib/systemd/systemd-coredump %P", Standing.GOOD),
        (b"@@/run/systemd/coredump", Standing.MISSING),
        (None, Standing.MISSING),
    ],
)
def test_a_machine_whose_core_dumps_no_limit_stops_is_found_before_a_run_is_refused_there(
    pattern: bytes | None, standing: Standing
) -> None:
    class Machine(Kernel):
        def read(self, path: str) -> bytes:
            if path != "/proc/sys/kernel/core_pattern":
                return super().read(path)
            if pattern is None:
                raise PermissionError(path)
            return pattern

    found = examined(Machine())
    assert found["core-dumps"].standing is standing
    assert ("kernel.core_pattern" in found["core-dumps"].consequence) is (standing is Standing.MISSING)
    assert (found["profile"].standing is Standing.MISSING) is (standing is Standing.MISSING)


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ("22 21 0:21 / /proc rw,relatime - proc proc rw", "open"),
        ("22 21 0:21 / /proc rw,relatime shared:5 - proc proc rw,hidepid=off", "open"),
        ("22 21 0:21 / /proc rw,relatime - proc proc rw,gid=4,hidepid=1", "hidden"),
        ("22 21 0:21 / /proc rw,relatime shared:5 - proc proc rw,hidepid=invisible", "hidden"),
        ("22 21 0:21 / /proc rw - proc proc rw,hidepid=2\n30 22 0:9 / /proc rw - proc proc rw", "open"),
        ("22 21 0:21 / /proc rw - proc proc rw\n30 22 0:9 / /proc rw - proc proc rw,hidepid=ptraceable", "hidden"),
        ("22 21 0:21 / /other rw - proc proc rw,hidepid=2", "open"),
        ("22 21 0:21 / /proc rw - tmpfs hidepid=2 rw,hidepid=2", "open"),
        (None, "open"),
    ],
)
def test_it_says_whether_other_users_read_the_command_lines_of_a_scripts_processes(
    mounts: str | None, said: str
) -> None:
    class Machine(Kernel):
        def read(self, path: str) -> bytes:
            if path != "/proc/self/mountinfo":
                return super().read(path)
            if mounts is None:
                raise PermissionError(path)
            return f"21 1 8:1 / / rw - ext4 /dev/sda rw\n{mounts}\n".encode()

    finding = doctor._processes(Machine())
    assert (finding.feature, finding.value, finding.standing) == ("process-list", said, Standing.NOTE)
    worker = cast("Worker", SimpleNamespace(report=None))
    assert ("processes-visible" in checks.details(worker, Machine())) is (said == "open")


@needs_root
@needs_namespaces
@pytest.mark.parametrize(
    ("options", "value", "standing"),
    [
        ("hidepid=0", "open", Standing.NOTE),
        ("hidepid=2,gid=4711", "hidden", Standing.NOTE),
        ("hidepid=2", "hidden", Standing.MISSING),
    ],
)
def test_a_proc_that_hides_the_runs_own_processes_from_an_ordinary_user_is_found_before_the_run(
    options: str, value: str, standing: Standing
) -> None:
    def story() -> tuple[str, Standing]:
        REAL.unshare(linux.CLONE_NEWNS)
        REAL.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        REAL.mount("proc", "/proc", "proc", 0, options)
        os.setgroups([])
        os.setgid(4711)
        os.setuid(4711)
        found = doctor._processes(REAL)
        return found.value, found.standing

    assert in_child(story) == (value, standing)


def test_findings_travel_as_json() -> None:
    listed = [finding.to_json() for finding in examined().values()]
    assert decode(encode(listed), max_bytes=1 << 16) == listed
    assert {"consequence", "feature", "standing", "value"} == set(listed[0])
    assert json.dumps(listed)


def test_looking_changes_nothing_here() -> None:
    def state() -> object:
        names = ("NoNewPrivs", "Seccomp", "CapEff", "TracerPid")
        spaces = [Path(f"/proc/self/ns/{name}").readlink() for name in ("mnt", "net", "pid", "user")]
        return [REAL.status("self")[name] for name in names], spaces, len(list(Path("/proc/self/fd").iterdir()))

    def story() -> bool:
        before = state()
        doctor.examine()
        return state() == before

    assert in_child(story)


def test_what_a_training_needs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examined(devices=tmp_path)
    assert (found["gpu-driver"].value, found["gpu-driver"].standing) == ("none", Standing.NOTE)
    for feature in ("memory", "disk"):
        assert found[feature].value.endswith(" GB free")
    (tmp_path / "nvidia0").touch()
    silent = doctor.examine(devices=tmp_path, library="libnone.so")
    (driver,) = (one for one in silent if one.feature == "gpu-driver")
    assert (driver.value, driver.standing) == ("no answer", Standing.WEAKER)


def test_a_machine_without_torch_memory_or_disk_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class LittleMemory(Kernel):
        def read(self, path: str) -> bytes:
            return b"MemTotal: 900000 kB\nMemAvailable: 500000 kB\n"

    def missing(name: str) -> str:
        raise findings.importlib.metadata.PackageNotFoundError(name)

    assert (findings._memory(LittleMemory()).value, findings._memory(LittleMemory()).standing) == (
        "0.5 of 0.9 GB free",
        Standing.WEAKER,
    )
    monkeypatch.setattr("glasshouse.runtime.run.findings.importlib.metadata.version", lambda _name: "2.11.0+cpu")
    assert (findings._torch().value, findings._torch().consequence) == ("2.11.0+cpu", "built for the CPU alone")
    monkeypatch.setattr("glasshouse.runtime.run.findings.importlib.metadata.version", missing)
    assert (findings._torch().value, findings._torch().standing) == ("none", Standing.WEAKER)
    monkeypatch.setattr(
        "glasshouse.runtime.run.findings.shutil.disk_usage", lambda _place: SimpleNamespace(total=10**7, free=10**6)
    )
    assert findings._disk(tmp_path / "nowhere").standing is Standing.WEAKER
