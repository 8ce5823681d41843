"""Rented machines die under runs with checkpoints: others go on, and neither machine nor bill is left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import ExitCode
from simulators.line_user import add_checkpoints, wait_for_checkpoint
from simulators.rental_users import WAYS, Account, bare_image, serving_account, serving_accounts
from tools.sshd import needs_sshd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    needs_sshd,
    pytest.mark.skipif(os.geteuid() != 0, reason="machines of their own need root"),
]


@pytest.fixture(params=sorted(WAYS))
def account(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Account]:
    with serving_account(request.param, tmp_path, bare_image(tmp_path / "python")) as account:
        yield account


def test_a_machine_that_dies_is_replaced_by_the_next_offer_within_the_caps(account: Account) -> None:
    shell, fake = account.shell, account.fake
    job = add_checkpoints(shell, shell.job("job", "40"), retries=1)
    job.write_text(job.read_text().replace('gpu = ["RTX 4090"]', "gpu = []"))  # of the cheapest kind there is one
    running = shell.start("run", "job.toml", "--on", account.name, "--yes", "--json")
    run = str(shell.wait_until_running()["run_id"])
    wait_for_checkpoint(shell, run)
    (machine,) = fake.left()
    fake.dies(machine)
    ended = shell.end(running)
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert fake.left() == []
    legs = ended.object["line"]["legs"]
    assert [(leg["outcome"], leg["wiping_shown"]) for leg in legs] == [("lost", False), ("completed", True)]
    assert all(float(leg["cost_usd"]) > 0 for leg in legs), "each machine's money is its own"
    assert ended.object["rental"]["most_usd"] < "3", "what the first one cost is gone from the caps"
    assert shell.ask("verify", "latest").code == ExitCode.DONE
    assert shell.ask("machine", "rented", "--json").object["rentals"] == []


def test_a_run_over_three_machines_of_two_providers_is_accounted_for_where_nothing_but_its_file_is(
    tmp_path: Path,
) -> None:
    with serving_accounts(tmp_path, bare_image(tmp_path / "python"), "runpod", "vast") as (runpod, vast):
        shell = runpod.shell
        job = add_checkpoints(shell, shell.job("job", "240"))
        job.write_text(job.read_text().replace('gpu = ["RTX 4090"]', "gpu = []"))  # what both have
        running = shell.start("run", "job.toml", "--on", "runpod", "--yes", "--json")
        first = str(shell.wait_until_running()["run_id"])
        wait_for_checkpoint(shell, first)
        (machine,) = runpod.fake.left()
        runpod.fake.dies(machine)
        died = shell.end(running)
        assert died.object["outcome"] == "lost", died.out + died.err
        assert (runpod.fake.left(), vast.fake.left()) == ([], [])

        before = shell.known()
        running = shell.start("resume", "latest", "--on", "vast", "--yes", "--json")
        second = str(shell.wait_until_running(before)["run_id"])
        wait_for_checkpoint(shell, second)
        assert (runpod.fake.left(), len(vast.fake.left())) == ([], 1)
        moved = shell.end(shell.start("migrate", second, "--on", "runpod", "--yes", "--json"))
        assert moved.code == ExitCode.DONE, moved.out + moved.err
        assert shell.end(running).object["outcome"] == "interrupted"
        third = moved.object["run_id"]
        told = shell.ask("status", third, "--json").object["line"]["legs"]
        assert shell.ask("fetch", third, "-o", str(tmp_path / "out")).code == ExitCode.DONE
        assert shell.ask("export", third, "-o", str(tmp_path / "export"), "--pem").code == ExitCode.DONE

    assert [(leg["place"].split(":")[0], leg["outcome"], leg["wiping_shown"]) for leg in told] == [
        ("runpod", "lost", False),
        ("vast", "interrupted", True),
        ("runpod", "completed", True),
    ]
    assert all(float(leg["cost_usd"]) > 0 for leg in told), told
    assert len({leg["place"] for leg in told}) == 3
    # Gate, providers and the user's home are gone: what an auditor has is a file, a public key, and no network.
    shutil.copy(shell.home / "owner.pub", tmp_path / "export")
    shutil.rmtree(shell.home)
    verdict = audited(tmp_path)
    assert (verdict["status"], verdict["not_wiped"]) == ("good", [1]), verdict
    lost, left, ended = verdict["legs"]
    assert (lost["abandoned"]["run_ids"], lost["abandoned"]["why"], lost["receipts"]) == ([first], "lost", [])
    assert [[one["run_id"] for one in leg["receipts"]] for leg in (left, ended)] == [[second], [third]]
    assert [leg["receipts"][0]["outcome"] for leg in (left, ended)] == ["interrupted", "completed"]
    assert [leg["wiped"] for leg in (lost, left, ended)] == [False, True, True]
    assert (lost["begins"], left["abandoned"], ended["abandoned"]) == (
        {"rewind": False, "seq": 0, "step": 0},
        None,
        None,
    )
    for earlier, later in ((lost, left), (left, ended)):
        assert later["begins"] == {"rewind": False, "seq": earlier["last"]["seq"], "step": earlier["last"]["step"]}
        assert later["last"]["step"] > earlier["last"]["step"] > 0
    # Where the last one began is in its output too, as the training itself says.
    assert (tmp_path / "out" / "result.txt").read_text() == f"{ended['begins']['step']} 240"


def audited(folder: Path) -> dict[str, Any]:
    """Return what `verify` says of an exported line, in a network namespace of its own that has nothing."""
    (folder / "auditor").mkdir()
    offline = ("unshare", "--net", sys.executable, "-m", "glasshouse.cli", "verify", "line.json")
    ended = subprocess.run(
        [*offline, "--owner", "owner.pub", "--home", str(folder / "auditor"), "--json"],
        cwd=folder / "export",
        capture_output=True,
        text=True,
    )
    assert ended.returncode == ExitCode.DONE, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found
