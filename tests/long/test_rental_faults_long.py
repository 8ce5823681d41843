"""Every fault of a provider, under a user's whole rental: a result or a clear error, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import ExitCode
from simulators.fake_api import Reply
from simulators.rental_users import WAYS, Account, bare_image, serving_account
from tools.sshd import needs_sshd

pytestmark = [
    needs_sshd,
    pytest.mark.skipif(os.geteuid() != 0, reason="machines of their own need root"),
]

GOOD = None
LOOPED = "boot-failed place-unreachable"
Set = Callable[[Account], None]


def trouble(**values: Any) -> Set:
    """Have these things go wrong at the provider."""

    def put(account: Account) -> None:
        for name, value in values.items():
            assert hasattr(account.fake.troubles, name), name
            setattr(account.fake.troubles, name, value)

    return put


def after_offers(**values: Any) -> Set:
    """Have these things go wrong once offers were shown."""

    def put(account: Account) -> None:
        real = account.fake.answer

        def answer(*request: Any) -> Reply:
            reply: Reply = real(*request)
            if "offers" in reply.call or "cloud=COMMUNITY" in request[1]:  # the last question before the preview
                trouble(**values)(account)
            return reply

        account.fake.answer = answer

    return put


def job(old: str, new: str) -> Set:
    """Have the job ask for something else."""

    def put(account: Account) -> None:
        path = account.shell.folder / "short.toml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return put


def key(text: str | None) -> Set:
    """Have another key of the account here, or none."""

    def put(account: Account) -> None:
        path = account.shell.home / "accounts" / account.name
        path.unlink() if text is None else path.write_text(text)

    return put


LISTS, MAKES = "GET /v2/pods", "POST /v2/pods"
HOURS_S = 6 * 3600.0
# What is set, and the code of the error that the user reads; `GOOD` for a run that completes all the same.
BOTH: dict[str, tuple[Set, str | None]] = {
    "no capacity": (trouble(no_capacity=True), "no-offer"),
    "vanishing offers": (trouble(vanishes=True), "no-offer"),
    "lost answer": (trouble(lose_creates=1), GOOD),
    "never boots": (trouble(never_boots=True), "boot-failed"),
    "no sshd": (trouble(no_sshd=True), "boot-failed"),
    # One ends before it can be logged in to, the other while it is sent to.
    "boots in a loop": (trouble(loops=0.5), LOOPED),
    "boots in a slow loop": (trouble(loops=2.0), LOOPED),
    "lies about deletion": (trouble(lies=1), GOOD),
    "dearer than shown": (trouble(dearer_once_made=1.5), "boot-failed"),
    "dearer since the preview": (after_offers(dearer=1.5), "no-offer"),
    "a clock that is ahead": (trouble(ahead_s=HOURS_S), GOOD),
    "a clock that is behind": (trouble(ahead_s=-HOURS_S), GOOD),
    "another version": (trouble(other_version=True), "provider-protocol"),
    "no key": (key(None), "provider-key"),
    "another key": (key("0" * 40), "provider-key"),
    "an unknown GPU": (job('gpu = ["RTX 4090"]', 'gpu = ["RTX 4900"]'), "usage"),
    "a cap below every price": (job("most_per_hour = 5", "most_per_hour = 0.1"), "no-offer"),
    "a cap below a quarter of an hour": (job("most_usd = 3", "most_usd = 0.01"), "cap-reached"),
}
RUNPOD = BOTH | {
    "busy": (trouble(answers={MAKES: [(429, 1)], LISTS: [(429, None)]}), GOOD),
    "failing": (trouble(answers={LISTS: [(503, None), (502, None)]}), GOOD),
    "lost and listed late": (trouble(lose_creates=1, listed_after_s=2.0), GOOD),
    "stale listings": (trouble(stale_s=4.0), GOOD),
    "times without a zone": (trouble(ahead_s=HOURS_S, zone=""), GOOD),
    "times of another zone": (trouble(ahead_s=-HOURS_S, zone="+05:45"), GOOD),
    "401": (trouble(refused=401), "provider-key"),
    "403": (trouble(refused=403), "provider-key"),
    "402": (trouble(refused=402), "provider-money"),
    "402 once it was shown": (after_offers(refused=402), "provider-money"),
}
VAST = BOTH | {
    "busy": (trouble(busy={"create": (1, 1), "list": (1, None)}), GOOD),
    "failing": (trouble(fails={"list": 2, "find": 1}), GOOD),
    # The stand-in's clock runs a hundredfold.
    "lost and listed late": (trouble(lose_creates=1, listed_after_s=200.0), GOOD),
    "refused, and made all the same": (trouble(fails_with_contract=400), "provider-protocol"),
    "no key of its own": (trouble(no_key=True), "boot-failed"),
    "stale listings": (trouble(stale_s=300.0), GOOD),
    "rows that are null": (trouble(null_rows=2), GOOD),
    "a log that is late": (trouble(log_late=3), GOOD),
    "401": (trouble(refuses=(401, "auth_error", "Invalid user key")), "provider-key"),
    "403": (trouble(refuses=(403, "not_authorized", "This action requires login.")), "provider-key"),
    "402": (trouble(refuses=(402, "insufficient_credit", "Insufficient credit")), "provider-money"),
    "402 once it was shown": (
        after_offers(refuses=(400, "insufficient_credit", "Your account lacks credit")),
        "provider-money",
    ),
}
# What an error says where its code says little.
NAMED = {
    "an unknown GPU": "RTX 4090",
    "a cap below every price": "0.1 $ an hour",
    "a cap below a quarter of an hour": "most_usd",
    "402 once it was shown": "add credit",
    "dearer since the preview": "an hour now",
    "no sshd": "has no sshd",
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
    shell, fake = account.shell, account.fake
    path = shell.job("short", "5")
    path.write_text(path.read_text().replace('boot = "2m"', 'boot = "12s"'))
    put(account)
    ended = shell.ask("run", "short.toml", "--on", account.name, "--yes", "--json", timeout_s=300)
    if code is GOOD:
        assert ended.code == ExitCode.DONE, ended.err + ended.out
        assert ended.object["receipt"]["verdict"] == "good"
    elif code is LOOPED and ended.code == ExitCode.RUN_FAILED and "error" not in ended.object:
        assert ended.object["outcome"] == "lost", ended.out  # it came as far as a run, which a start of its host ends
    else:
        assert ended.code not in (ExitCode.DONE, ExitCode.INTERNAL)
        assert ended.error["code"] in code.split(), ended.out
        assert ended.error["hint"], ended.out
        assert NAMED.get(fault, "") in f"{ended.error['message']}\n{ended.error['hint']}", ended.out
    assert fake.left() == []
    if fault.startswith("boots in a"):
        (machine,) = fake.made
        assert machine.host.boots > 1
    fake.troubles = type(fake.troubles)()
    (shell.home / "accounts" / account.name).write_text(fake.key)
    (shell.home / "accounts" / account.name).chmod(0o600)
    assert shell.ask("machine", "rented", "--json").object["rentals"] == []
