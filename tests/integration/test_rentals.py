"""A user rents a machine, trains there, and has it gone: over each provider's interface, behind a real sshd."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.home import Home
from simulators.command_line import CANARY
from simulators.rental_users import WAYS, Account, Renting, bare_image, serving_account
from tools.sshd import needs_sshd
from tools.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    needs_sshd,
    pytest.mark.skipif(os.geteuid() != 0, reason="machines of their own need root"),
]

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "rent.md"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare_image(tmp_path_factory.mktemp("image") / "python")


@pytest.fixture(params=sorted(WAYS))
def account(request: pytest.FixtureRequest, tmp_path: Path, image: Path) -> Iterator[Account]:
    with serving_account(request.param, tmp_path, image) as account:
        yield account


def test_a_machine_is_rented_trained_on_and_shown_to_be_gone_as_the_how_to_says(account: Account) -> None:
    shell, name = account.shell, account.name
    shell.job("job", "24")
    typed = re.findall(r"^\$ (glasshouse .*)\n((?:[^$`].*\n)*)", HOW_TO.read_text(), re.MULTILINE)
    assert [command.split()[1] for command, _ in typed] == ["offers", "run", "verify", "fetch", "machine", "sweep"]
    assert shell.ask("offers", "job.toml", "--json").object["offers"][0]["provider"] == name
    for command, shown in typed:
        ran = shell.ask(*command.replace("runpod", name).split()[1:])
        assert ran.code == ExitCode.DONE, f"{command}\n{ran.out}\n{ran.err}"
        assert shown.replace("runpod", name) in ran.out, ran.out
        if " run " in command:
            assert account.fake.left() == []
            assert "genuine and complete" in ran.out
            assert f"{name}:{shell.newest_id()[:8]} is gone, by id and in two listings" in ran.out
    told = (shell.home / "runs" / shell.newest_id() / "rental.json").read_text()
    assert '"over":true' in told.replace(" ", "")
    assert "printed by its start command" in told
    # Neither the account's key nor anything of the job went where it should not have.
    key = account.fake.key.encode()
    for path in (path for path in shell.home.rglob("*") if path.is_file() and path.parent.name != "accounts"):
        assert key not in path.read_bytes(), path
    for exchange in account.fake.exchanges:
        assert account.fake.key not in str(exchange.body)
        assert CANARY not in str(exchange.body)


def test_the_machine_of_the_how_to_is_one_that_a_job_may_name(account: Account) -> None:
    [machine] = re.findall(r"```toml\n(\[machine\].*?)```", HOW_TO.read_text(), re.DOTALL)
    job = account.shell.job("job", "24")
    job.write_text(job.read_text().partition("[machine]")[0] + machine)
    offered = account.shell.ask("offers", "job.toml", "--json")
    assert offered.code == ExitCode.DONE, offered.err


def test_nothing_is_rented_without_a_yes(account: Account) -> None:
    shell = account.shell
    shell.job("short", "24")
    refused = shell.ask("run", "short.toml", "--on", account.name, "--json")
    assert refused.code == ExitCode.USAGE
    assert "without a yes" in refused.error["message"]
    assert "at most" in shell.ask("run", "short.toml", "--on", account.name).out
    assert account.fake.exchanges
    assert account.fake.left() == []
    assert shell.known() == set()


@pytest.mark.long
def test_an_owner_who_is_killed_while_it_trains_gives_it_back_by_a_sweep(account: Account) -> None:
    shell = account.shell
    shell.job("long", "1200")
    running = shell.start("run", "long.toml", "--on", account.name, "--yes", "--json")
    record = shell.wait_until_running()
    running.send_signal(signal.SIGKILL)
    running.communicate()
    assert len(account.fake.left()) == 1
    assert shell.ask("machine", "rented", "--json").object["rentals"][0]["kept"] is False
    swept = shell.ask("sweep", "--json")
    assert swept.code == ExitCode.DONE, swept.err + swept.out
    assert swept.object["returned"] == 1
    assert account.fake.left() == []
    told = shell.ask("status", record["run_id"], "--json").object
    assert told["outcome"] == "interrupted", told
    assert shell.ask("verify", record["run_id"]).code != ExitCode.VERIFICATION_FAILED


@pytest.mark.long
def test_a_machine_that_dies_under_a_run_is_lost_and_given_back(account: Account) -> None:
    shell, fake = account.shell, account.fake
    shell.job("long", "1200")
    running = shell.start("run", "long.toml", "--on", account.name, "--yes", "--json")
    shell.wait_until_running()
    (machine,) = fake.left()
    fake.dies(machine)
    ended = shell.end(running)
    assert ended.code not in (ExitCode.DONE, ExitCode.INTERNAL), ended.err
    assert ended.object["outcome"] == "lost", ended.object
    assert fake.left() == []


@pytest.mark.long
def test_a_machine_that_is_started_anew_under_a_run_has_lost_it_and_is_given_back(account: Account) -> None:
    shell, fake = account.shell, account.fake
    shell.job("long", "1200")
    running = shell.start("run", "long.toml", "--on", account.name, "--yes", "--json")
    shell.wait_until_running()
    (machine,) = fake.left()
    machine.host.restart()
    ended = shell.end(running)
    assert ended.object["outcome"] == "lost", ended.object
    assert fake.left() == []


@pytest.mark.long
def test_an_answer_that_was_lost_is_found_and_used(account: Account) -> None:
    shell, fake = account.shell, account.fake
    fake.troubles.lose_creates = 1
    shell.job("short", "24")
    ended = shell.ask("run", "short.toml", "--on", account.name, "--yes", "--json")
    assert ended.code == ExitCode.DONE, ended.err
    assert fake.left() == []


def test_the_dead_mans_switch_ends_a_machine_whose_owner_never_comes_back(account: Account) -> None:
    """Not by a run: what it is made with is short, and the owner is gone at once."""
    from decimal import Decimal

    from glasshouse.providers.rental.provider import Options, Start

    shell, fake = account.shell, account.fake
    provider = WAYS[account.name]
    os.environ[provider.url] = fake.url
    try:
        from glasshouse.jobs.places.accounts import provider_of

        asked = provider_of(Home(path=shell.home), account.name)
        options = Options(
            gpu=(), gpus=1, memory_gb=0, disk_gb=20, regions=(), most_per_hour_usd=Decimal(5), spot=False, image="a/b"
        )
        start = Start(
            tag="gh-test-1",
            nonce="ab" * 16,
            ssh_public="ssh-ed25519 AAAA",
            ends_s=3,
            ends_at_s=int(time.time()) + 3,
            options=options,
        )
        asked.rent(asked.offers(options)[0], start)
        assert len(fake.left()) == 1
        wait_for(lambda: not fake.left())
    finally:
        del os.environ[provider.url]


def steps_of(shell: Renting) -> list[str]:
    """Return where the attempts of the newest rental are, by its journal."""
    records = sorted((shell.home / "rentals").glob("*/rental.json"), key=lambda path: path.stat().st_mtime_ns)
    return [one["step"] for one in json.loads(records[-1].read_text())["attempts"]] if records else []


def releases(shell: Renting) -> list[str]:
    """Return the runs that the broker released a key to, one entry for each time."""
    told = shell.ask("broker", "audit", "--json")
    if told.code != ExitCode.DONE:
        return []  # no broker was ever started
    return [
        one["facts"]["run_id"]
        for one in told.object["records"]
        if one["event"] == "release" and one["facts"]["counted"]
    ]


def swept_clean(account: Account) -> None:
    """A sweep leaves nothing at the provider, and what is said of runs is true."""
    shell, fake = account.shell, account.fake
    swept = shell.ask("sweep", "--json")
    assert swept.code == ExitCode.DONE, swept.err + swept.out
    assert fake.left() == [], swept.out
    told = shell.ask("machine", "rented", "--json").object
    assert told == {"rentals": [], "elsewhere": [], "asked": [account.name], "problems": []}
    for run in shell.known():
        if not (shell.home / "runs" / run / "run.json").exists():
            continue  # it was killed before the run had a record
        told = shell.ask("status", run, "--json")
        assert told.code == ExitCode.DONE, told.err
        assert told.object["outcome"] in ("completed", "interrupted", "failed", "lost"), told.object
        if told.object["outcome"] == "completed":
            assert shell.ask("verify", run).code == ExitCode.DONE
    released = releases(shell)
    assert len(released) == len(set(released))


@pytest.mark.long
def test_an_owner_killed_at_any_journalled_step_leaves_nothing_after_a_sweep(account: Account) -> None:
    shell = account.shell
    shell.job("short", "24")
    for step in ("asked", "made", "up", "returning", "gone"):
        before = len(list((shell.home / "rentals").glob("*/rental.json")))
        running = shell.start("run", "short.toml", "--on", account.name, "--yes", "--json")

        def reached(step: str = step, before: int = before, running: subprocess.Popen[str] = running) -> bool:
            records = list((shell.home / "rentals").glob("*/rental.json"))
            return running.poll() is not None or (len(records) > before and step in steps_of(shell)[-1:])

        wait_for(reached)
        running.kill()
        running.communicate()
        swept_clean(account)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_an_owner_killed_at_random_moments_leaves_nothing_after_a_sweep(account: Account, seed: int) -> None:
    shell, moments = account.shell, random.Random(seed)
    shell.job("short", "24")
    for _ in range(10):
        running = shell.start("run", "short.toml", "--on", account.name, "--yes", "--json")
        time.sleep(moments.uniform(0.5, 14.0))
        running.kill()
        running.communicate()
        swept_clean(account)
