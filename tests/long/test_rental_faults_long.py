"""Every fault of a provider, under a user's whole rental: a result or a clear error, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import ExitCode
from simulators.rental_users import WAYS, Account, bare_image, serving_account
from tools.sshd import needs_sshd

pytestmark = [
    pytest.mark.long,
    needs_sshd,
    pytest.mark.skipif(os.geteuid() != 0, reason="machines of their own need root"),
]

GOOD = None
Set = Callable[[Any], None]


def trouble(**values: Any) -> Set:
    """Have these things go wrong."""

    def put(fake: Any) -> None:
        for name, value in values.items():
            assert hasattr(fake.troubles, name), name
            setattr(fake.troubles, name, value)

    return put


LISTS, MAKES = "GET /v2/pods", "POST /v2/pods"
# What is set, and the code of the error that the user reads; `GOOD` for a run that completes all the same.
RUNPOD: dict[str, tuple[Set, str | None]] = {
    "no capacity": (trouble(no_capacity=True), "no-offer"),
    "vanishing offers": (trouble(vanish=True), "no-offer"),
    "busy": (trouble(answers={MAKES: [(429, 1)], LISTS: [(429, None)]}), GOOD),
    "failing": (trouble(answers={LISTS: [(503, None), (502, None)]}), GOOD),
    "lost answer": (trouble(lose_creates=1), GOOD),
    "lost and listed late": (trouble(lose_creates=1, listed_after_s=2.0), GOOD),
    "never boots": (trouble(never_boots=True), "boot-failed"),
    "no sshd": (trouble(no_sshd=True), "boot-failed"),
    "lies about deletion": (trouble(lies=1), GOOD),
    "stale listings": (trouble(stale_s=4.0), GOOD),
    "dearer than shown": (trouble(dearer_once_made=1.5), "boot-failed"),
    "401": (trouble(refused=401), "provider-key"),
    "403": (trouble(refused=403), "provider-key"),
    "402": (trouble(refused=402), "provider-money"),
    "another version": (trouble(other_version=True), "provider-protocol"),
}
VAST: dict[str, tuple[Set, str | None]] = {
    "no capacity": (trouble(no_capacity=True), "no-offer"),
    "vanishing offers": (trouble(vanishes=True), "no-offer"),
    "busy": (trouble(busy={"create": (1, 1), "list": (1, None)}), GOOD),
    "failing": (trouble(fails={"list": 2, "find": 1}), GOOD),
    "lost answer": (trouble(unanswered=1), GOOD),
    "lost and listed late": (trouble(unanswered=1, listed_after_s=200.0), GOOD),
    "never boots": (trouble(never_boots=True), "boot-failed"),
    "no sshd": (trouble(no_sshd=True), "boot-failed"),
    "no key of its own": (trouble(no_key=True), "boot-failed"),
    "lies about deletion": (trouble(lies=1), GOOD),
    "stale listings": (trouble(stale_s=300.0), GOOD),
    "rows that are null": (trouble(null_rows=2), GOOD),
    "a log that is late": (trouble(log_late=3), GOOD),
    "401": (trouble(refuses=(401, "auth_error", "Invalid user key")), "provider-key"),
    "another version": (trouble(other_version=True), "provider-protocol"),
}
MATRIX = [(name, fault) for name, faults in (("runpod", RUNPOD), ("vast", VAST)) for fault in faults]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_image(tmp_path_factory.mktemp("image") / "python")


@pytest.fixture
def account(request: pytest.FixtureRequest, tmp_path: Path, image: Path) -> Iterator[Account]:
    with serving_account(request.param, tmp_path, image) as account:
        yield account


@pytest.mark.parametrize(("account", "fault"), MATRIX, indirect=["account"])
def test_a_fault_ends_in_a_result_or_a_clear_error_and_nothing_is_left(account: Account, fault: str) -> None:
    put, code = {"runpod": RUNPOD, "vast": VAST}[account.name][fault]
    assert set(WAYS) == {"runpod", "vast"}
    shell = account.shell
    job = shell.job("short", "5")
    job.write_text(job.read_text().replace('boot = "2m"', 'boot = "12s"'))
    put(account.fake)
    ended = shell.ask("run", "short.toml", "--on", account.name, "--yes", "--json", timeout_s=300)
    if code is GOOD:
        assert ended.code == ExitCode.DONE, ended.err + ended.out
        assert ended.object["receipt"]["verdict"] == "good"
    else:
        assert ended.code not in (ExitCode.DONE, ExitCode.INTERNAL)
        assert ended.error["code"] == code, ended.out
        assert ended.error["hint"], ended.out
    assert account.fake.left() == []
    account.fake.troubles = type(account.fake.troubles)()
    assert shell.ask("machine", "rented", "--json").object["rentals"] == []
