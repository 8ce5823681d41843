"""A rental at Vast.ai from its offer to its end, with a machine that starts as it was asked to, behind a real sshd."""

from __future__ import annotations

import subprocess
import time as real_time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.providers.place.ways import SshHost
from glasshouse.providers.rental.provider import Options, Rented, RentedState, Start
from glasshouse.providers.rental.start_script import host_key
from glasshouse.providers.rental.vast import Vast
from simulators.fake_api import quick
from simulators.fake_vast import FakeVast, fake_vast
from simulators.vast_market import Time
from tools.machine import needs_namespaces, needs_root
from tools.sshd import needs_sshd
from tools.waiting import wait_for

pytestmark = [needs_root, needs_namespaces, needs_sshd]

NONCE = "0123456789abcdef" * 2
OPTIONS = Options(
    gpu=("RTX 3060",),
    gpus=1,
    memory_gb=8,
    disk_gb=20,
    regions=(),
    most_per_hour_usd=Decimal(1),
    spot=False,
    image="pytorch/pytorch",
)
NO_CURL = {"curl": "#!/bin/sh\nexit 127\n"}


@pytest.fixture
def there(tmp_path: Path) -> Iterator[FakeVast]:
    with fake_vast(tmp_path / "vast", clock=Time()) as there:
        yield there


@pytest.fixture
def vast(there: FakeVast) -> Vast:
    assert isinstance(there.clock, Time)
    return quick(Vast(there.key, there.url), there.clock)


@pytest.fixture
def public(tmp_path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", tmp_path / "user"], check=True)
    return (tmp_path / "user.pub").read_text().strip()


def rent(there: FakeVast, vast: Vast, public: str, ends_s: int = 3600) -> str:
    assert isinstance(there.clock, Time)
    start = Start(
        tag="gh-aa-bb-1",
        nonce=NONCE,
        ssh_public=public,
        ends_s=ends_s,
        ends_at_s=int(real_time.time()) + ends_s,
        options=OPTIONS,
    )
    machine = vast.rent(vast.offers(OPTIONS)[0], start)
    there.clock.sleep(10)
    return machine


def shown(there: FakeVast, vast: Vast, machine: str) -> Rented:
    """Return what is found of it, ten seconds after the last look."""
    assert isinstance(there.clock, Time)
    there.clock.sleep(10)
    found = vast.find(machine)
    assert found is not None
    return found


def printed(there: FakeVast, vast: Vast, machine: str) -> str:
    """Return its output once it has printed its host key, or that it has no sshd."""
    wait_for(lambda: "glasshouse-" in there.instances[int(machine)].output(), told=lambda: str(there.left()))
    return vast.output(machine)


def test_a_machine_is_rented_logged_in_to_by_the_key_that_it_printed_and_given_back(
    tmp_path: Path, there: FakeVast, vast: Vast, public: str
) -> None:
    machine = rent(there, vast, public)
    found = shown(there, vast, machine)
    key = host_key(printed(there, vast, machine), NONCE)
    assert key is not None
    wait_for(lambda: "listening on" in there.instances[int(machine)].output())
    (tmp_path / "known").write_text(f"[{found.host}]:{found.port} {key}\n")
    (tmp_path / "client").write_text(
        f"IdentityFile {tmp_path}/user\nUserKnownHostsFile {tmp_path}/known\nControlPath none\n"
    )
    assert found.host is not None
    host = SshHost(user=vast.user, host=found.host, port=found.port, options=("-F", str(tmp_path / "client")))
    done = subprocess.run(host.command(["sh", "-c", "cat /proc/1/comm"], connect_s=20), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "sshd\n"), done.stderr
    vast.give_back(machine)
    assert vast.find(machine) is None
    assert vast.tagged("gh-") == []
    assert there.left() == []


@pytest.mark.parametrize("programs", [{}, NO_CURL], ids=["curl", "no curl"])
def test_a_machine_whose_time_is_over_ends_itself_by_its_own_key(
    there: FakeVast, vast: Vast, public: str, programs: dict[str, str]
) -> None:
    there.troubles.programs = programs
    machine = rent(there, vast, public, ends_s=2)
    wait_for(lambda: there.requests()["destroy"])
    assert (there.ended_by, there.left()) == ([f"instance {machine}"], [])
    assert vast.find(machine) is None


def test_a_machine_without_a_key_to_end_itself_by_stops_before_anyone_can_log_in(
    there: FakeVast, vast: Vast, public: str
) -> None:
    there.troubles.no_key = True
    machine = rent(there, vast, public)
    wait_for(lambda: shown(there, vast, machine).state is RentedState.STOPPED)
    output = vast.output(machine)
    assert output == "glasshouse: Vast gave this machine no key to end itself by\n"
    vast.give_back(machine)
    assert there.left() == []


def test_an_image_without_an_sshd_says_so(there: FakeVast, vast: Vast, public: str) -> None:
    there.troubles.no_sshd = True
    machine = rent(there, vast, public)
    with pytest.raises(ValueError, match="glasshouse-no-sshd"):
        host_key(printed(there, vast, machine), NONCE)
    vast.give_back(machine)
    assert there.left() == []


def test_a_machine_that_boots_into_a_loop_is_given_back(there: FakeVast, vast: Vast, public: str) -> None:
    there.troubles.loops = 0.3
    machine = rent(there, vast, public)
    wait_for(lambda: there.instances[int(machine)].output().count(NONCE) > 1)
    vast.give_back(machine)
    assert vast.find(machine) is None
    assert there.left() == []


def test_a_machine_that_dies_in_the_middle_has_stopped_and_costs_until_it_is_given_back(
    there: FakeVast, vast: Vast, public: str
) -> None:
    machine = rent(there, vast, public)
    printed(there, vast, machine)
    host = there.instances[int(machine)].host
    assert host is not None
    host.die()
    assert shown(there, vast, machine).state is RentedState.STOPPED
    assert len(there.left()) == 1
    vast.give_back(machine)
    assert there.left() == []
