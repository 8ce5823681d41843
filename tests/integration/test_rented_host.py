"""The machine that fakes of providers rent: it starts as its start command says, and ends by its own hand."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.providers.rental.provider import Options, Start
from glasshouse.providers.rental.start_script import host_key, start_script
from simulators.rented_host import RentedHost, pinned
from tools.machine import needs_namespaces, needs_root
from tools.sshd import needs_sshd
from tools.waiting import wait_for

pytestmark = [needs_root, needs_namespaces, needs_sshd]

NONCE = "0123456789abcdef" * 2
OPTIONS = Options(
    gpu=(), gpus=0, memory_gb=0, disk_gb=10, regions=(), most_per_hour_usd=Decimal(1), spot=False, image="debian"
)


@pytest.fixture
def public(tmp_path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", tmp_path / "user"], check=True)
    return (tmp_path / "user.pub").read_text().strip()


@pytest.fixture
def start(public: str) -> Callable[[int], Start]:
    def make(ends_s: int) -> Start:
        ends_at_s = int(time.time()) + ends_s
        return Start(
            tag="gh-a-b-1", nonce=NONCE, ssh_public=public, ends_s=ends_s, ends_at_s=ends_at_s, options=OPTIONS
        )

    return make


def logged_in(machine: RentedHost, folder: Path, *command: str) -> str:
    """Run a command there, with the host key that it printed pinned."""
    wait_for(lambda: host_key(machine.output(), NONCE), told=machine.output)
    wait_for(lambda: "listening on" in machine.output(), told=machine.output)
    key = host_key(machine.output(), NONCE)
    assert key is not None
    host = pinned(folder, machine.port, key)
    done = subprocess.run(host.command(command, connect_s=20), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + machine.output()
    return done.stdout


def test_a_rented_machine_is_logged_in_to_and_touches_nothing_outside_it(
    tmp_path: Path, start: Callable[[int], Start]
) -> None:
    ours = (Path("/etc/ssh"), Path.home() / ".ssh")
    before = [sorted(folder.glob("**/*")) for folder in ours]
    machine = RentedHost(tmp_path / "machine", start_script(start(600), end="true"))
    try:
        told = logged_in(machine, tmp_path, "sh", "-c", "echo $HOME; ls /etc/ssh")
        assert told.splitlines()[0] == str(tmp_path / "machine" / "home")
        assert f"glasshouse_host_key_{NONCE}.pub" in told
        unshared = logged_in(machine, tmp_path, "sh", "-c", "unshare --mount true || echo refused")
        assert unshared == "refused\n"
        assert "sshd" in machine.left()
    finally:
        machine.destroy()
    assert machine.left() == []
    assert not (tmp_path / "machine").exists()
    assert before == [sorted(folder.glob("**/*")) for folder in ours]


class Ending(http.server.BaseHTTPRequestHandler):
    """A provider's interface that ends a machine by its word."""

    machine: RentedHost
    asked: list[str]

    def do_DELETE(self) -> None:
        self.asked.append(self.path)
        self.send_response(204)
        self.end_headers()
        self.machine.die()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def ending() -> Iterator[type[Ending]]:
    class Own(Ending):
        asked: list[str] = []  # noqa: RUF012

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Own.server_port = server.server_port  # type: ignore[attr-defined]
        yield Own
        server.shutdown()


REMOVE = """#!/bin/sh
exec python3 -c 'import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1], method="DELETE"))' "$URL/$1"
"""


@pytest.mark.parametrize("has_sshd", [True, False])
def test_a_machine_ends_itself_through_its_provider_when_its_time_is_over(
    tmp_path: Path, start: Callable[[int], Start], ending: type[Ending], has_sshd: bool
) -> None:
    url = f"http://127.0.0.1:{ending.server_port}"  # type: ignore[attr-defined]
    ending.machine = machine = RentedHost(
        tmp_path / "machine",
        start_script(start(2), end='remove "$POD"'),
        environment={"POD": "7", "URL": url},
        programs={"remove": REMOVE},
        has_sshd=has_sshd,
    )
    try:
        wait_for(lambda: not machine.runs(), told=machine.output)
        assert ending.asked == ["/7"]
        assert machine.left() == []
        if has_sshd:
            assert host_key(machine.output(), NONCE) is not None
        else:
            with pytest.raises(ValueError, match="glasshouse-no-sshd"):
                host_key(machine.output(), NONCE)
    finally:
        machine.destroy()


def test_a_machine_that_cannot_be_reached_hangs_and_comes_back(tmp_path: Path, start: Callable[[int], Start]) -> None:
    machine = RentedHost(tmp_path / "machine", start_script(start(600), end="true"))
    try:
        assert logged_in(machine, tmp_path, "echo", "here") == "here\n"
        machine.unreachable()
        with socket.create_connection(("127.0.0.1", machine.port), timeout=5) as line:
            line.settimeout(0.5)
            with pytest.raises(TimeoutError):
                line.recv(1)
        machine.unreachable(False)
        assert logged_in(machine, tmp_path, "echo", "here") == "here\n"
    finally:
        machine.destroy()


def test_a_machine_that_is_started_anew_has_its_disk_and_its_host_key(
    tmp_path: Path, start: Callable[[int], Start]
) -> None:
    machine = RentedHost(tmp_path / "machine", start_script(start(600), end="true"))
    try:
        logged_in(machine, tmp_path, "touch", "kept")
        machine.restart()
        wait_for(lambda: machine.output().count("listening on") == 2, told=machine.output)
        printed = [line for line in machine.output().splitlines() if f"glasshouse-host-key {NONCE}" in line]
        assert len(printed) == 2
        assert printed[0] == printed[1]
        assert logged_in(machine, tmp_path, "echo", "here") == "here\n"
        assert (tmp_path / "machine" / "home" / "kept").exists()
    finally:
        machine.destroy()


def test_a_machine_that_boots_into_a_loop_does_so_until_it_is_ended(
    tmp_path: Path, start: Callable[[int], Start]
) -> None:
    machine = RentedHost(tmp_path / "machine", start_script(start(600), end="true"), loops=0.2)
    wait_for(lambda: machine.boots > 2)
    machine.destroy()
    assert not machine.runs()
    assert machine.left() == []


def test_a_machine_ends_with_the_fake_that_made_it(tmp_path: Path) -> None:
    made = """
import sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from simulators.rented_host import RentedHost, pinned
machine = RentedHost(Path(sys.argv[3]), "echo started; exec sleep 600")
print(machine._machine.pid, flush=True)
sys.stdin.read()
"""
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", made, str(tests), str(tests.parent), str(tmp_path / "machine")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as fake:
        assert fake.stdout is not None
        guard = int(fake.stdout.readline())
        fake.kill()
    wait_for(lambda: not Path(f"/proc/{guard}").exists() or "Z" in Path(f"/proc/{guard}/stat").read_text().split()[2])
