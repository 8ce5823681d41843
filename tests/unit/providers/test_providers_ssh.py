"""A machine is looked at before anything is sent: what it lacks is a sentence, and a dead line holds nobody up."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError
from glasshouse.providers.place import place_channel as channel
from glasshouse.providers.place import ssh
from glasshouse.providers.place.ssh import SshPlace
from glasshouse.providers.place.ways import SshHost
from simulators.lying_place import Step, liar

HANGS = [sys.executable, "-c", "import time; time.sleep(60)"]
Ways = Callable[..., SshPlace]


def hello(**other: Any) -> list[Step]:
    told = {
        "boot": "x",
        "clock_us": time.time_ns() // 1000,
        "free_bytes": 1 << 40,
        "machine": "x86_64",
        "memory_bytes": 1 << 40,
        "python": platform.python_version(),
        "release": "6.1",
        "system": "Linux",
    }
    return [{"id": "ID", "ok": told | other}]


class Logins:
    """How often, and how, somebody logged in."""

    def __init__(self) -> None:
        self.alone: list[bool] = []
        self.connect_s: list[int] = []


@pytest.fixture
def logins() -> Logins:
    return Logins()


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, logins: Logins) -> Iterator[Ways]:
    """Places behind commands of a test's own."""
    made: list[SshPlace] = []

    def way(shared: list[str], own: list[str] | None = None) -> SshPlace:
        def command(_host: SshHost, _remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
            logins.alone.append(alone)
            logins.connect_s.append(connect_s)
            return own if alone and own is not None else shared

        monkeypatch.setattr(SshHost, "command", command)
        made.append(SshPlace("lab", SshHost(host="lab"), "python3", "-", connect=socket.socket))
        return made[-1]

    yield way
    for place in made:
        place.close()


def test_a_machine_that_is_as_it_should_be_is_connected_to_once(ways: Ways, logins: Logins) -> None:
    versions: list[Step] = [{"id": "ID", "ok": {"versions": {"peft": "0.1", "torch": "2.9.0"}}}]
    place = ways(liar(hello(), hello(), versions, [{"id": "ID", "ok": {"versions": {}}}]))
    place.check()
    place.check(1 << 30)
    assert place.installed() == {"peft": "0.1", "torch": "2.9.0"}
    assert logins.alone == [False]


def test_a_kept_connection_that_ended_meanwhile_is_opened_anew(ways: Ways, logins: Logins) -> None:
    place = ways(liar(hello()))
    place.check()
    assert place._kept is not None
    place._kept[1]._process.kill()
    place.check()
    assert len(logins.alone) == 2


@pytest.mark.parametrize(
    ("other", "said", "code"),
    [
        ({"system": "Darwin"}, "no Linux machine", Code.PLATFORM),
        ({"python": "3.9.2"}, "has Python 3.9.2, and Glasshouse needs 3.11", Code.PLATFORM),
        ({"python": "\x1b[31m"}, "has Python ?, and", Code.PLATFORM),
        ({"clock_us": (int(time.time()) + 3600) * 1_000_000}, "ahead of this one", Code.PLATFORM),
        ({"clock_us": (int(time.time()) - 3600) * 1_000_000}, "behind this one", Code.PLATFORM),
        ({"free_bytes": 1 << 20}, "has 1 MiB of room", Code.DISK_FULL),
        ({"memory_bytes": 1 << 29}, "has 512 MiB of memory", Code.PLATFORM),
    ],
)
def test_what_a_machine_lacks_is_a_sentence_with_what_to_do(
    ways: Ways, other: dict[str, Any], said: str, code: Code
) -> None:
    with pytest.raises(PlatformError) as refused:
        ways(liar(hello(**other))).check(1 << 30)
    assert refused.value.code is code
    assert said in refused.value.message
    assert refused.value.message.isprintable()
    assert refused.value.hint or code is Code.PLATFORM


def test_what_a_place_refuses_itself_is_told_as_it_says_it(ways: Ways) -> None:
    said = "/home/trainer there is on NFS, which other machines see too (name a folder on a disk of that machine)"
    with pytest.raises(PlatformError, match="on NFS"):
        ways(liar([{"code": "platform-unsupported", "id": "ID", "message": said}])).check()


@pytest.mark.parametrize(
    "lists",
    [
        [{"a": "1", "b": "1"}, {"b": "1"}],
        [["a"]],
        [{f"{page:03}": "1"} for page in range(60)],
        [{"a" * 129: "1"}, {}],
    ],
    ids=["again and again", "no list", "without end", "a long name"],
)
def test_a_list_of_what_is_installed_ends(ways: Ways, lists: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_INSTALLED_CHARS", 50 * 67)
    with pytest.raises(GlasshouseError, match="versions"):
        ways(liar(*([{"id": "ID", "ok": {"versions": one}}] for one in lists))).installed()


def test_a_list_that_comes_drop_by_drop_has_one_limit_in_time(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = iter(range(0, 100_000, 25))
    monkeypatch.setattr(ssh, "time", SimpleNamespace(monotonic=lambda: float(next(passed_s)), time=time.time))
    pages: list[list[Step]] = [[{"id": "ID", "ok": {"versions": {f"{page:03}": "1"}}}] for page in range(60)]
    with pytest.raises(PeerError, match="no answer within 0 s"):
        ways(liar(*pages)).installed()
    runs: list[list[Step]] = [
        [{"id": "ID", "ok": {"runs": [{"ended": None, "run": f"{page:032x}", "started_us": 1}]}}] for page in range(60)
    ]
    with pytest.raises(PeerError, match="no answer within 0 s"):
        ways(liar(*runs)).runs()


def test_a_list_of_runs_ends(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "_RUNS_CHARS", 3 * 96)
    runs: list[list[Step]] = [
        [{"id": "ID", "ok": {"runs": [{"ended": None, "run": f"{page:032x}", "started_us": 1}]}}] for page in range(9)
    ]
    with pytest.raises(PeerError, match="more runs than a machine has"):
        ways(liar(*runs)).runs()


def test_a_shared_connection_whose_line_is_dead_holds_nobody_up(
    ways: Ways, logins: Logins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_GREETING_S", 1.0)
    ways(HANGS, liar(hello())).check()
    assert logins.alone == [False, True]
    with pytest.raises(PeerError) as silent:
        ways(HANGS).check()
    assert "ssh -O exit" in silent.value.hint


def test_after_a_failure_both_ways_are_tried_quickly_and_then_with_patience(ways: Ways, logins: Logins) -> None:
    place = ways([sys.executable, "-c", "import sys; sys.exit('Connection timed out')"])
    for _ in range(6):
        with pytest.raises(PeerError) as refused:
            place.check()
        assert "see that the machine is up" in refused.value.hint
    assert logins.alone == [False, True, False, True, False, True]
    assert logins.connect_s == [10, 3, 3, 10, 10, 3]


def test_a_machine_that_ends_without_a_word_is_said_with_what_to_do(ways: Ways) -> None:
    with pytest.raises(PeerError, match="the command ended") as refused:
        ways([sys.executable, "-c", ""]).check()
    assert "stays up" in refused.value.hint


def test_only_a_connection_of_its_own_goes_past_the_users_shared_one() -> None:
    host = SshHost.parse("ssh://trainer@lab:2222")
    assert "ControlPath=none" in host.command(["true"], connect_s=3, alone=True)
    assert "ControlPath=none" not in host.command(["true"], connect_s=3)
