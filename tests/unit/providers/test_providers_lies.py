"""A machine that lies to its owner: the owner's memory, disk, descriptors and files are not the machine's to fill."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, FormatError, PeerError
from glasshouse.providers.place import kept_files
from glasshouse.providers.place.place_channel import PlaceChannel
from glasshouse.providers.place.placed import RemotePlaced
from glasshouse.providers.place.ssh import SshPlace
from glasshouse.providers.place.ways import SshHost
from simulators.lying_place import Step, liar

PREPARED: list[Step] = [{"id": "ID", "ok": {"gate": "unix:/there"}}]


class Lies:
    def __init__(self) -> None:
        self.channels: list[PlaceChannel] = []
        self.calls: list[socket.socket] = []

    def channel(self, *story: list[Step]) -> PlaceChannel:
        self.channels.append(PlaceChannel(liar(*story), connect=self.connect))
        return self.channels[-1]

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.calls.append(theirs)
        return ours


@pytest.fixture
def lies() -> Iterator[Lies]:
    made = Lies()
    yield made
    for channel in made.channels:
        channel.close()
    for call in made.calls:
        call.close()


@pytest.mark.parametrize(
    "story",
    [
        [{"stream": 77, "data": 10}],
        [{"data": 10}],
        [{"id": 77, "ok": {}}],
        [{"id": 77, "go": True}],
        [{"call": 1 << 31}, {"call": 1 << 31}],
        [{"call": (1 << 31) + number} for number in range(17)],
        [{"id": "ID", "ok": []}],
        [{"neither": 1}],
    ],
    ids=["bytes of nothing", "bytes", "an answer", "a go", "a call twice", "too many calls", "no object", "no message"],
)
def test_what_was_not_asked_for_ends_the_channel(lies: Lies, story: list[Step]) -> None:
    with pytest.raises(PeerError) as ended:
        lies.channel(story).ask("hello", within_s=20)
    assert ended.value.code is Code.PLACE_UNREACHABLE
    assert "no answer within" not in ended.value.message


def news(files: dict[str, Any], ended: Any = None) -> list[Step]:
    return [{"id": "ID", "ok": {"ended": ended, "files": files, "more": False, "serial": 1}}]


@pytest.mark.parametrize(
    ("looks", "why"),
    [
        ([news({"../../.ssh/authorized_keys": 10})], "is not text of the form"),
        ([news({"events.log": -1})], "is not an integer"),
        ([news({"events.log": True})], "is not an integer"),
        ([news({"receipt.json": 1 << 30})], "more bytes of receipt.json"),
        ([news({"outputs/0000.sealed": 2000})], "more bytes of outputs"),
        ([news({"outputs/0000.sealed": 600, "log/0000.sealed": 600})], "than the run may leave"),
        ([news({}, ended=True)], "ended is not an integer"),
        ([news({}, ended=4096)], "ended is not an integer"),
        ([news({"events.log": 3}), news({"events.log": 2})], "shrunk"),
        # The next question is for more news, and the one after it for the bytes.
        ([news({"events.log": 3}), [], [{"data": 1}, {"id": "ID", "ok": {"bytes": 3}}]], "other bytes"),
    ],
)
def test_a_run_is_not_followed_into_what_it_cannot_have_left(
    lies: Lies, tmp_path: Path, looks: list[list[Step]], why: str
) -> None:
    told = iter([[PREPARED, *looks]])
    placed = RemotePlaced(
        lambda: lies.channel(*next(told, [PREPARED])), "ab" * 16, lambda name: tmp_path / "kept" / name, max_bytes=1000
    )
    problems = set()
    for _ in range(200):
        assert placed.wait(0.1) is None
        problems.add(placed.problem)
        if any(why in problem for problem in problems):
            break
    else:
        raise AssertionError(problems)
    placed.close()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"events.log"}


@pytest.mark.parametrize("kept", ["outputs/0000.sealed", "log/0000.sealed.partial"])
def test_what_an_earlier_process_took_counts_too(lies: Lies, tmp_path: Path, kept: str) -> None:
    (tmp_path / kept).parent.mkdir()
    (tmp_path / kept).write_bytes(bytes(600))
    more = news({"outputs/0001.sealed": 600})
    placed = RemotePlaced(lambda: lies.channel(PREPARED, more), "ab" * 16, lambda name: tmp_path / name, max_bytes=1000)
    for _ in range(200):
        assert placed.wait(0.1) is None
        if "more bytes than the run may leave" in placed.problem:
            break
    else:
        raise AssertionError(placed.problem)
    placed.close()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(kept).name]


def test_files_that_are_named_without_end_are_not_kept(
    lies: Lies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_files, "_MOST_FILES", 2)
    looks = [news({f"log/{number:04d}.sealed": 0}) for number in range(4)]
    placed = RemotePlaced(lambda: lies.channel(PREPARED, *looks), "ab" * 16, lambda name: tmp_path / name)
    for _ in range(200):
        assert placed.wait(0.1) is None
        if "more files than a run leaves" in placed.problem:
            break
    else:
        raise AssertionError(placed.problem)
    placed.close()


def test_a_machine_that_was_started_anew_takes_nothing_from_what_is_here(lies: Lies, tmp_path: Path) -> None:
    """Its disk lost the end of a log that had come already; the run has ended, and its owner is told so."""
    (after,) = news({"events.log": 1, "heads.log": 0, "receipt.json": 0}, ended=-9)
    story = [PREPARED, news({"events.log": 3}), [], [{"data": 3}, {"id": "ID", "ok": {"bytes": 3}}, after | {"id": 3}]]
    placed = RemotePlaced(lambda: lies.channel(*story), "ab" * 16, lambda name: tmp_path / name)
    assert -9 in [placed.wait(0.1) for _ in range(100)]
    assert (tmp_path / "events.log").read_bytes() == b"xxx"
    assert (tmp_path / "heads.log").read_bytes() == b"", "that there is none of the broker's is told too"
    placed.close()


def test_a_runtime_whose_calls_would_come_elsewhere_is_not_taken_for_followed(lies: Lies, tmp_path: Path) -> None:
    gates = iter(["unix:/there", "unix:/elsewhere"])
    placed = RemotePlaced(
        lambda: lies.channel([{"id": "ID", "ok": {"gate": next(gates)}}]), "ab" * 16, lambda name: tmp_path / name
    )
    assert placed.connect() == "unix:/there"
    with pytest.raises(PeerError, match="elsewhere"):
        placed.connect()
    placed.close()


class Listing(SshPlace):
    """A machine whose channel is a liar's."""

    def __init__(self, lies: Lies, *story: list[Step]) -> None:
        super().__init__("lab", SshHost(host="nowhere"), "python3", "-", connect=lies.connect)
        self._lies, self._story = lies, story

    def _channel(self) -> PlaceChannel:
        return self._lies.channel(*self._story)


def page(*names: str, digest: Any = "00" * 32) -> list[Step]:
    return [{"id": "ID", "ok": {"files": dict.fromkeys(names, digest), "measurement": {}}}]


def test_a_machine_lists_its_files_page_by_page(lies: Lies) -> None:
    place = Listing(lies, page("a/b", "a/c"), page("b/a"), page())
    assert place.measured_files() == dict.fromkeys(("a/b", "a/c", "b/a"), bytes(32))


@pytest.mark.parametrize(
    "story",
    [
        [page("a/b"), page("a/b")],
        [page("a/b"), page("a/a", "a/c")],
        [page("")],
        [page("a/b", digest="00" * 31)],
        [page("a/" + "b" * 4095)],
        [page("a/b", digest=7)],
        [[{"id": "ID", "ok": {"files": ["a/b"]}}]],
        [[{"id": "ID", "ok": {}}]],
    ],
    ids=[
        "the same again",
        "one before",
        "no name",
        "a short digest",
        "a long name",
        "a number",
        "no object",
        "nothing",
    ],
)
def test_a_list_of_files_that_is_none_or_without_end(lies: Lies, story: list[list[Step]]) -> None:
    with pytest.raises((PeerError, FormatError)):
        Listing(lies, *story, page()).measured_files()
