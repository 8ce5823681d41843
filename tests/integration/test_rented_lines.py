"""A rented machine dies under a run with checkpoints: the next offer goes on, and neither machine nor bill is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from simulators.line_user import add_checkpoints, wait_for_checkpoint
from simulators.rental_users import WAYS, Account, bare_image, serving_account
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
