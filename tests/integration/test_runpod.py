"""Pods of a RunPod of one's own, which are real machines: logged in to, ended by their own hand, and gone."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.providers.rental.provider import RentedState, Start
from glasshouse.providers.rental.runpod import RunPod
from glasshouse.providers.rental.start_script import host_key
from simulators.fake_runpod import FakeRunPod, fake_runpod
from simulators.rented_host import pinned
from simulators.runpod_market import OPTIONS as ASKED
from tools.machine import needs_namespaces, needs_root
from tools.sshd import needs_sshd
from tools.waiting import wait_for

pytestmark = [needs_root, needs_namespaces, needs_sshd]

NONCE = "0123456789abcdef" * 2
OPTIONS = replace(ASKED, most_per_hour_usd=Decimal(1))


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeRunPod]:
    with fake_runpod(tmp_path / "pods") as made:
        yield made


@pytest.fixture
def runpod(fake: FakeRunPod) -> RunPod:
    made = RunPod(fake.key, fake.url)
    made.quiet_s = 0.1
    return made


@pytest.fixture
def user(tmp_path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", tmp_path / "user"], check=True)
    return tmp_path


def rent(runpod: RunPod, user: Path, *, ends_s: int = 600) -> str:
    start = Start(
        tag="gh-olga-blue-1",
        nonce=NONCE,
        ssh_public=(user / "user.pub").read_text().strip(),
        ends_s=ends_s,
        ends_at_s=int(time.time()) + ends_s,
        options=OPTIONS,
    )
    return runpod.rent(runpod.offers(OPTIONS)[0], start)


def test_a_rented_pod_is_logged_in_to_and_gone_when_it_is_given_back(
    fake: FakeRunPod, runpod: RunPod, user: Path
) -> None:
    machine = rent(runpod, user)
    wait_for(lambda: host_key(runpod.output(machine), NONCE))
    rented, key = runpod.find(machine), host_key(runpod.output(machine), NONCE)
    assert rented is not None
    assert key is not None
    assert (rented.state, rented.host, rented.port) == (RentedState.RUNNING, "127.0.0.1", fake.pods[machine].host.port)
    host = pinned(user, rented.port, key)
    wait_for(lambda: "listening on" in runpod.output(machine))
    command = host.command(["sh", "-c", "cat $HOME/.ssh/authorized_keys; env"], connect_s=20)
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[0] == (user / "user.pub").read_text().strip()
    # Neither the account's key nor the pod's is in what a run there is started with.
    assert not any(key in line for line in told for key in (fake.key, fake.pods[machine].key))
    (user / "known").write_text(f"[127.0.0.1]:{rented.port} {key[:-4]}AAAA\n")
    assert subprocess.run(command, capture_output=True).returncode == 255
    runpod.give_back(machine)
    assert (runpod.find(machine), runpod.tagged("gh-"), fake.left()) == (None, [], [])
    assert not fake.pods[machine].host.runs()
    assert runpod.bill(machine) is not None


@pytest.mark.parametrize("lacks", [None, "runpodctl", "sshd"])
def test_a_pod_without_an_owner_ends_itself_when_its_time_is_over(
    fake: FakeRunPod, runpod: RunPod, user: Path, lacks: str | None
) -> None:
    fake.troubles.no_runpodctl, fake.troubles.no_sshd = lacks == "runpodctl", lacks == "sshd"
    machine = rent(runpod, user, ends_s=3)
    wait_for(lambda: fake.requests()["DELETE /v2/pods/{id}"])
    assert fake.left() == []
    assert not fake.pods[machine].host.runs()
    assert (runpod.find(machine), runpod.tagged("gh-")) == (None, [])


def test_a_pod_whose_image_has_no_sshd_says_so(fake: FakeRunPod, runpod: RunPod, user: Path) -> None:
    fake.troubles.no_sshd = True
    machine = rent(runpod, user)
    wait_for(lambda: runpod.output(machine))
    with pytest.raises(ValueError, match="glasshouse-no-sshd"):
        host_key(runpod.output(machine), NONCE)
    runpod.give_back(machine)
    assert fake.left() == []


def test_a_pod_that_died_is_told_of_as_stopped_and_is_given_back_all_the_same(
    fake: FakeRunPod, runpod: RunPod, user: Path
) -> None:
    machine = rent(runpod, user)
    fake.dies(fake.pods[machine])
    rented = runpod.find(machine)
    assert rented is not None
    assert (rented.state, rented.host) == (RentedState.STOPPED, None)
    assert runpod.tagged("gh-") == [rented]
    runpod.give_back(machine)
    assert runpod.tagged("gh-") == []


def test_a_pod_that_boots_into_a_loop_ends_itself_all_the_same(fake: FakeRunPod, runpod: RunPod, user: Path) -> None:
    fake.troubles.loops = 1.5
    machine = rent(runpod, user, ends_s=3)
    assert runpod.find(machine) is not None
    wait_for(lambda: fake.requests()["DELETE /v2/pods/{id}"])
    assert fake.pods[machine].host.boots > 1
    assert (runpod.find(machine), fake.left()) == (None, [])
    assert not fake.pods[machine].host.runs()
