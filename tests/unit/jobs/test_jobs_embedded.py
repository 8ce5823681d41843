"""One broker per home: started once, kept while any run needs it, started again when it died."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.errors import Code, PeerError, UsageError
from glasshouse.jobs.gates.embedded import Embedded, Serving, audit_own
from glasshouse.jobs.gates.revocation import revoke
from glasshouse.jobs.owner.home import Home, locked, socket_folder
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(path=tmp_path / "home").make()
    yield made
    for folder in RunFolder.all(made):
        folder.end(outcome="failed")
    Embedded(made).give_back()


def a_run(home: Home, process: ProcessName) -> RunFolder:
    folder = RunFolder.create(home)
    folder.save(
        RunRecord(
            run_id=folder.run_id,
            name="run",
            workload="script",
            package=folder.package,
            package_id="ab" * 16,
            manifest_sha256="cd" * 32,
            assurance="software",
            profile="standard",
            created_us=1,
            max_duration_s=60,
            phase=Phase.RUNNING,
            supervisor=process,
        )
    )
    return folder


def test_a_broker_lives_as_long_as_a_run_needs_it_and_survives_its_death(home: Home) -> None:
    first, second = a_run(home, ProcessName.of()), a_run(home, ProcessName.of())
    mine, other = Embedded(home), Embedded(home)
    serving = mine.ensure()
    assert serving.client().broker_public() == serving.public
    assert serving.client().store_public() is not None
    assert home.store.stat().st_mode & 0o777 == 0o700
    assert other.ensure() == serving, "a second run finds the first one's broker"
    assert serving.owner_socket.stat().st_mode & 0o777 == 0o600

    os.kill(serving.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while other.serving is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    again = mine.ensure()
    assert again.process != serving.process
    assert (again.public, again.runtime_url) == (serving.public, serving.runtime_url), "a run finds the same broker"

    first.end(outcome="completed")
    assert not mine.give_back(), "the other run still needs it"
    assert other.serving is not None
    second.end(outcome="completed")
    assert other.give_back()
    assert mine.serving is None
    assert not again.owner_socket.exists()
    assert not other.give_back()


def test_two_runs_at_once_start_one_broker(home: Home) -> None:
    a_run(home, ProcessName.of())
    found: list[Serving] = []
    threads = [threading.Thread(target=lambda: found.append(Embedded(home).ensure())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len({one.process for one in found}) == 1


def test_a_broker_that_is_asked_without_a_run_is_not_stopped_by_another_command(home: Home) -> None:
    """As where a run is moved: the command that it ran under gives the broker back while the next leg is asked for."""
    mine = Embedded(home)
    with mine.kept() as serving:
        ending = threading.Thread(target=Embedded(home).give_back)
        ending.start()
        assert not Embedded(home).retire()
        assert serving.client().broker_public() == serving.public
    ending.join()
    assert mine.serving is None


def test_a_dead_runs_record_does_not_keep_the_broker(home: Home) -> None:
    a_run(home, ProcessName(pid=2**22 - 1, started=1))
    broker = Embedded(home)
    broker.ensure()
    assert broker.give_back()


def test_a_broker_lives_as_long_as_a_run_of_any_project_needs_it(home: Home, tmp_path: Path) -> None:
    """Projects share the owner's broker; the end of a run in one of them does not take it from the others."""
    here, there = (Home(path=home.path, project=tmp_path / name) for name in ("here", "there"))
    run = a_run(there, ProcessName.of())
    broker = Embedded(here)
    broker.ensure()
    assert not broker.give_back()
    with pytest.raises(UsageError, match="already serves"), broker.held_off():
        pass
    run.end()
    assert broker.give_back()
    with broker.held_off():
        assert broker.serving is None


def test_a_stale_socket_and_record_are_no_obstacle(home: Home) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(home.broker / "owner.sock"))
    (home.broker / "owner.sock").chmod(0o600)
    stale.close()
    (home.broker / "serving.json").write_text("{damaged")
    broker = Embedded(home)
    assert broker.ensure().client().broker_public()
    assert broker.give_back()


def test_a_broker_that_does_not_start_says_where_its_words_are(home: Home) -> None:
    (home.broker / "data").write_text("not a folder")
    with pytest.raises(PeerError) as refused:
        Embedded(home).ensure()
    assert refused.value.code is Code.BROKER_UNREACHABLE
    assert str(home.broker / "broker.log") in refused.value.hint
    (home.broker / "data").unlink()


def test_a_standing_broker_that_does_not_answer_is_not_replaced(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody runs `broker serve` for this home; a run must not start a second one on the same data."""
    standing = Serving(
        process=ProcessName.of(),
        runtime_url="http://127.0.0.1:1",
        owner_socket=home.broker / "nobody.sock",
        public=bytes(32),
        embedded=False,
    )
    broker = Embedded(home)
    with broker.announced(standing):
        with pytest.raises(UsageError, match="already serves"), broker.announced(standing):
            pass
        monkeypatch.setattr(
            "glasshouse.broker.client.owner_client.OwnerClient.wait_ready", lambda _self, _s: _self.broker_public()
        )
        with pytest.raises(PeerError, match="does not answer"):
            broker.ensure()
        assert not broker.give_back()
    assert broker.serving is None


def test_a_home_with_a_long_name_gets_its_sockets_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for path in (tmp_path / ("long" * 30) / "home", tmp_path / "with space"):
        folder = socket_folder(Home(path=path))
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
    assert socket_folder(Home(path=Path("/short"))) == Path("/short/broker")


def test_revoking_what_was_never_deployed_holds_on_the_owners_side(home: Home) -> None:
    running = a_run(home, ProcessName.of())
    assert revoke("ab" * 16, home) == [running.run_id]
    from glasshouse.jobs.define.package_records import PackageRecord

    assert PackageRecord.load(home, "ab" * 16, workload="script").revoked


@pytest.mark.parametrize("asks", ["audit", "revoke"])
def test_a_broker_that_is_asked_is_not_given_back_by_another_command(
    home: Home, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    called: list[bool] = []

    def asked(client: OwnerClient, *given: Any, **named: Any) -> Any:
        lock = os.open(home.broker / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):  # who gives it back, as a run that ends, waits for this
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(lock)
        called.append(True)
        return ask(client, *given, **named)

    ask = getattr(OwnerClient, asks)
    monkeypatch.setattr(OwnerClient, asks, asked)
    if asks == "audit":
        audit_own(home)
    else:
        revoke("ab" * 16, home)
    assert called
    assert Embedded(home).serving is None, "no run needs it any more"


def test_a_broker_whose_runs_were_killed_ends_by_itself(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    a_run(home, ProcessName.of(supervisor.pid))
    quick = "import sys; from glasshouse.jobs.gates import embedded_broker as broker; broker.LOOK_S = 0.2; "
    quick += "sys.exit(broker.main(sys.argv[1:]))"
    start = subprocess.Popen

    def at_once(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        place = command.index("-m")
        return start([*command[:place], "-c", quick, *command[place + 2 :]], **options)

    monkeypatch.setattr(subprocess, "Popen", at_once)
    serving = Embedded(home).ensure()
    time.sleep(1.0)
    assert serving.process.alive, "its run goes on"
    supervisor.kill()  # -9: it gives nothing back
    supervisor.wait()
    deadline = time.monotonic() + 20
    while serving.process.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not serving.process.alive
    assert Embedded(home).serving is None
    assert not serving.owner_socket.exists()
    a_run(home, ProcessName.of())
    assert Embedded(home).ensure().process != serving.process, "the next run gets one of its own"


def test_a_broker_makes_way_only_where_no_run_needs_it(home: Home) -> None:
    mine = Embedded(home)
    run = a_run(home, ProcessName.of())
    mine.ensure()
    assert not mine.retire()
    run.end(outcome="completed")
    with locked(home.broker / "lock", file=True):
        assert not Embedded(home).retire(), "somebody is starting or stopping it"
