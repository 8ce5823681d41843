"""What a machine must give before anything is asked for: ranks that are kept in, and room for the worker's files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from glasshouse.attestation.claims import CheckResult, WorkspaceKind
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.run import demands
from glasshouse.runtime.worker import named_directory
from glasshouse.runtime.worker.sandbox import Worker
from glasshouse.runtime.worker.sandbox_spec import SandboxReport

CLOSED = {"egress-closed": CheckResult.PASSED, "seccomp-filter": CheckResult.PASSED}
CONTAINER = ("named-workspace", "no-mount-namespace", "no-network-namespace")


def worker(
    *notes: str, observed: dict[str, CheckResult] | None = None, kind: WorkspaceKind = WorkspaceKind.TMPFS
) -> Worker:
    report = SandboxReport(observed=CLOSED if observed is None else observed, workspace=kind, base="/b", notes=notes)
    return cast(Worker, SimpleNamespace(report=report, named_path="/somewhere/named"))


@pytest.mark.parametrize("machines", [1, 3])
def test_ranks_with_a_loopback_of_their_own_run_anywhere(machines: int) -> None:
    demands.demand_ranks(worker("loopback"), machines)


@pytest.mark.parametrize("notes", [CONTAINER, ("no-loopback",)], ids=["container", "no loopback"])
def test_ranks_without_one_run_on_one_machine_where_they_are_kept_in(notes: tuple[str, ...]) -> None:
    demands.demand_ranks(worker(*notes), 1)
    with pytest.raises(PlatformError, match="those of other machines") as caught:
        demands.demand_ranks(worker(*notes), 2)
    assert caught.value.code is Code.PLATFORM
    assert caught.value.hint.endswith("run the job on one machine, or elsewhere")


@pytest.mark.parametrize("name", list(CLOSED))
@pytest.mark.parametrize("result", [CheckResult.FAILED, CheckResult.UNAVAILABLE, None])
def test_ranks_that_nothing_keeps_in_are_refused_at_every_profile(name: str, result: CheckResult | None) -> None:
    """Without the filter they would meet on the machine's own loopback, as torchelastic does."""
    observed = {other: held for other, held in CLOSED.items() if other != name} | ({name: result} if result else {})
    with pytest.raises(PlatformError, match="nothing keeps them off the machine's") as caught:
        demands.demand_ranks(worker(*CONTAINER, observed=observed), 1)
    assert "network-namespace" in caught.value.hint
    nothing: Any = SimpleNamespace(report=None)
    with pytest.raises(PlatformError):
        demands.demand_ranks(nothing, 1)


@pytest.mark.parametrize(
    ("found", "disk", "said"),
    [
        ((True, 100), False, None),
        ((True, 99), False, "memory that is there has 0 MB"),
        ((False, 10**9), False, "memory that is there has nothing"),
        ((False, 10**9), True, None),
        ((False, 99), True, "memory that is there and its disk has 0 MB"),
        ((False, 0), False, "has nothing"),
    ],
)
def test_files_with_a_name_want_memory_that_has_room_or_the_owners_word(
    found: tuple[bool, int], disk: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_directory, "room", lambda _path: found)
    named = worker(*CONTAINER, kind=WorkspaceKind.DIRECTORY)
    if said is None:
        demands.demand_workspace(named, 100, disk=disk)
        return
    with pytest.raises(PlatformError) as caught:
        demands.demand_workspace(named, 100, disk=disk)
    assert caught.value.code is Code.PLATFORM
    assert said in caught.value.hint
    assert "another offer or more GPUs" in caught.value.hint
    assert ('workspace = "disk"' in caught.value.hint) is not disk


def test_files_in_a_mount_of_their_own_have_the_room_that_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_directory, "room", lambda _path: (False, 0))
    demands.demand_workspace(worker("loopback"), 1 << 40, disk=False)
