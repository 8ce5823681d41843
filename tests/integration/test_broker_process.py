"""The broker as a process: how it starts, refuses to start, ends, and what it costs to keep."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.client.owner_client import request
from glasshouse.errors import Code, PeerError
from glasshouse.tamper.stage import Actor, Owner
from simulators.reporting import release_to

MAX_PSS_MIB = 70


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def pss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(sys.platform != "linux", reason="this machine has no Linux /proc to read memory and time from")
def test_a_broker_is_small_and_sleeps_when_nobody_asks(directory: Path) -> None:
    with BrokerProcess(directory) as broker:
        owner = Owner(broker, releases=30)
        for _ in range(30):
            release_to(Actor.enter(owner))
        assert pss_mib(broker.pid) <= MAX_PSS_MIB
        before = cpu_s(broker.pid)
        time.sleep(2)
        assert cpu_s(broker.pid) - before <= 0.01, "at most one tick in two seconds"
        assert len(list(Path(f"/proc/{broker.pid}/task").iterdir())) <= 3


class Held:
    """Holds the database's write lock, as a slow disk or another process would."""

    def __init__(self, directory: Path) -> None:
        self._connection = sqlite3.connect(directory / "data" / "broker.sqlite3", isolation_level=None)
        self._connection.execute("BEGIN IMMEDIATE")

    def let_go(self) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_broker_that_is_told_to_stop_finishes_what_it_began(directory: Path, number: signal.Signals) -> None:
    broker = BrokerProcess(directory)
    try:
        owner = Owner(broker)
        actor = Actor.enter(owner)
        challenge = actor.challenge()
        evidence = actor.sign(actor.claims(challenge))
        held = Held(directory)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(actor.send, evidence)
            time.sleep(0.3)
            os.kill(broker.pid, number)
            time.sleep(0.3)
            assert not pending.done()
            held.let_go()
            assert actor.open(pending.result(10).content(), challenge, evidence) == owner.package_key
    finally:
        assert broker.stop() == 0
    with pytest.raises(PeerError):
        request(broker.runtime_url, "POST", "/v1/evidence", b"{}")
    assert list((directory / "sockets").iterdir()) == []


def start(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glasshouse.broker.serving", "--data", str(directory / "data")]
    command += ["--owner-socket", str(directory / "sockets" / "owner"), "--stop-at-eof", *options]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)


def test_a_broker_whose_starter_is_gone_ends(directory: Path) -> None:
    ended = start(directory)
    assert ended.returncode == 0
    assert ended.stdout.count("\n") == 1, "one line: it was ready"


def test_what_cannot_be_used_is_said_with_how_to_mend_it(directory: Path) -> None:
    assert start(directory).returncode == 0
    key_file = directory / "data" / "broker.key"
    key_file.chmod(0o644)
    refused = start(directory)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert f"chmod 600 {key_file}" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_nothing_that_a_client_sends_is_printed(directory: Path) -> None:
    command = [sys.executable, "-m", "glasshouse.broker.serving", "--data", str(directory / "data"), "--stop-at-eof"]
    command += ["--owner-socket", str(directory / "sockets" / "owner")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        url = re.search(r"http://[0-9.:]+", process.stdout.readline().decode())
        assert url
        secret = b"s3cr3t-in-a-body"
        for body in (secret, b'{"payload":"' + secret + b'"}'):
            for path in ("/v1/challenge", "/v1/evidence", "/v1/heads", "/v1/receipt", f"/{secret.decode()}"):
                assert request(url[0], "POST", path, body).status >= 400
        process.terminate()
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert (out, err) == (b"", b"")


@pytest.fixture
def quiet_threads() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.usefixtures("quiet_threads")
def test_a_broker_that_does_not_start_is_reported(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (directory / "data").mkdir(mode=0o755)
    with pytest.raises(PeerError) as caught:
        BrokerProcess(directory)
    assert caught.value.code is Code.BROKER_UNREACHABLE
    assert "chmod 700" in capfd.readouterr().err
