"""What a place says of its machine: true of that machine alone, and before anything is sent there."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from importlib import metadata
from pathlib import Path

import pytest

from glasshouse.errors import PeerError, PlatformError
from glasshouse.providers.place.place_channel import PlaceChannel
from glasshouse.providers.serve import facts
from glasshouse.providers.serve.keepers import KEEPER, boot, started_ticks
from glasshouse.providers.serve.runs import Run


def test_a_folder_of_this_machine_alone_is_one_to_keep_runs_in(tmp_path: Path) -> None:
    told = facts.hello(tmp_path)
    assert told.system == "Linux"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "named"), [(0x6969, "NFS"), (0xFF534D42, "SMB"), (0x0BD00BD0, "Lustre")])
def test_a_home_that_other_machines_see_too_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, named: str
) -> None:
    """Two machines with one folder would each take the other's processes for their own."""
    monkeypatch.setattr(facts, "_file_system", lambda _folder: kind)
    with pytest.raises(PlatformError, match=f"on {named}, which other machines") as refused:
        facts.hello(tmp_path)
    assert "--folder" in refused.value.hint


def test_the_kind_of_a_file_system_is_the_kernels_own_word() -> None:
    assert facts._file_system(Path("/proc")) == 0x9FA0
    assert facts._file_system(Path("/nowhere")) == 0


def test_a_file_system_without_hard_links_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_names: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(PlatformError, match="without hard links"):
        facts.hello(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_installed_is_named_as_requirements_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "version"
    monkeypatch.setattr(facts, "_NVIDIA", module)
    found = facts.installed("", 10_000)
    assert found["pytest-xdist"] == metadata.version("pytest_xdist")
    assert "nvidia-driver" not in found
    assert list(facts.installed("pytest", 1)) == [min(name for name in found if name > "pytest")]
    for said in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 2021",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  470.57.02  Release Build",
    ):
        module.write_text(said)
        assert facts.installed("", 10_000)["nvidia-driver"] == "470.57.02"


def test_a_run_whose_machine_was_started_anew_has_ended_whoever_has_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, began = os.getpid(), started_ticks(os.getpid())
    kept = {"boot": boot(), "pid": ours, "runtime": ours, "runtime_started": began, "started": began}
    (tmp_path / "order.json").write_text("{}")
    (tmp_path / KEEPER).write_text(json.dumps(kept))
    assert Run(tmp_path).ended() is None
    (tmp_path / KEEPER).write_text(json.dumps(kept | {"boot": "another"}))
    assert Run(tmp_path).ended() == -9
    Run(tmp_path).stop(9)  # type: ignore[arg-type] # not to us
    Run(tmp_path).remove()
    assert not tmp_path.exists()


def test_a_folder_that_cannot_be_is_a_sentence() -> None:
    command = [sys.executable, "-I", "-B", "-m", "glasshouse.providers.serve", "/proc/nowhere"]
    channel = PlaceChannel(command, connect=socket.socket)
    with pytest.raises(PeerError, match="the folder /proc/nowhere there cannot be used") as refused:
        channel.ask("hello")
    channel.close()
    assert "--folder" in refused.value.hint
