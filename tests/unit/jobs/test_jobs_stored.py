"""What comes from a gate that stored what a run left: what is lacking here, and nothing that does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PackageError, UsageError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.results import fetching
from glasshouse.jobs.verify import download
from glasshouse.jobs.verify.documents import verify_file
from glasshouse.jobs.verify.download import forget_stored, is_whole, take_stored
from glasshouse.wire.crypto import SigningKey, sha256
from simulators.owner_side import OwnersWorld

OWNER = SigningKey.generate()
CLOSING = ("events.log", "heads.log", "receipt.json")


class LyingGate:
    """Says that it has files, and gives what it likes for each."""

    def __init__(self, files: dict[str, bytes], given: Callable[[bytes], bytes] = lambda content: content) -> None:
        self.files = files
        self.given = given
        self.lengths: dict[str, int] = {}
        self.asked: list[str] = []
        self.forgotten = 0

    def client(self, _owner: SigningKey) -> LyingGate:
        return self

    def stored(self, _run_id: str) -> dict[str, tuple[int, bytes]]:
        return {name: (self.lengths.get(name, len(content)), sha256(content)) for name, content in self.files.items()}

    def stored_piece(self, _run_id: str, digest: bytes, after: int) -> bytes:
        [(name, content)] = [(name, one) for name, one in self.files.items() if sha256(one) == digest]
        self.asked.append(name)
        return self.given(content)[after : after + 1000]

    def stores(self) -> bool:
        return True

    def forget_stored(self, _run_id: str) -> None:
        self.forgotten += 1


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(path=tmp_path / "home").make()


@pytest.fixture
def folder(home: Home) -> RunFolder:
    made = RunFolder.create(home)
    known: dict[str, Any] = dict.fromkeys(("name", "workload", "package_id", "manifest_sha256", "assurance"), "x")
    record = RunRecord(
        run_id=made.run_id, package=made.path, profile="standard", created_us=1, max_duration_s=1, gate="small", **known
    )
    made.save(record)
    return made


def take(monkeypatch: pytest.MonkeyPatch, home: Home, folder: RunFolder, gate: LyingGate, called: list[bool]) -> bool:
    class Public:
        signing = OWNER.public

    monkeypatch.setattr(download, "gate_named", lambda *_: gate)
    monkeypatch.setattr(download, "read_public", lambda _: Public)
    return take_stored(home, folder, OWNER, verified=lambda: called.append(True))


def left(folder: RunFolder) -> list[str]:
    return sorted(str(path.relative_to(folder.path)) for path in folder.path.rglob("*") if path.is_file())


def test_without_a_receipt_nothing_is_taken(monkeypatch: pytest.MonkeyPatch, home: Home, folder: RunFolder) -> None:
    called: list[bool] = []
    gate = LyingGate({"outputs/0000.sealed": b"x", "events.log": b"y", "heads.log": b"z"})
    assert not take(monkeypatch, home, folder, gate, called)
    assert left(folder) == ["run.json"]
    assert not called


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (lambda content: content, None),  # whatever it is, it is no receipt of this owner's
        (lambda content: content[:-1], Code.OUTPUT_TAMPERED),
        (lambda content: content + b"more", Code.OUTPUT_TAMPERED),
        (lambda content: bytes(len(content)), Code.OUTPUT_TAMPERED),
        (lambda _content: b"", Code.OUTPUT_TAMPERED),
    ],
)
def test_what_does_not_hold_is_not_taken_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
    home: Home,
    folder: RunFolder,
    given: Callable[[bytes], bytes],
    code: Code | None,
) -> None:
    called: list[bool] = []
    gate = LyingGate({name: name.encode() * 200 for name in (*CLOSING, "../../escape", "outputs/0000.sealed")}, given)
    with pytest.raises(GlasshouseError) as caught:
        take(monkeypatch, home, folder, gate, called)
    assert code is None or (caught.value.code is code and isinstance(caught.value, PackageError))
    assert left(folder) == ["run.json"]
    assert not called, "what waits for the machine goes on waiting"


class Left:
    """A run of another machine that has ended, all of it here and at its gate."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = OwnersWorld()
        self.folder = self.world.settle(root)
        self.world.tell(self.folder, self.world.run())
        self.folder.save(replace(self.folder.load(), gate="small", place="lab", phase=Phase.ENDED, ended_us=1))
        self.gate = LyingGate({name: (self.folder.out / name).read_bytes() for name in self.names()})
        monkeypatch.setattr(download, "gate_named", lambda *_: self.gate)

    def names(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder.out)) for path in self.folder.out.rglob("*") if path.is_file())

    def lose(self, *names: str) -> None:
        for name in names:
            (self.folder.out / name).unlink()

    def take(self) -> bool:
        return fetching.take(self.folder, self.world.home, self.world.owner)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    return Left(tmp_path, monkeypatch)


def test_sealed_files_that_were_lost_here_come_from_the_gate_and_nothing_else_does(run: Left) -> None:
    before, record = run.names(), run.folder.load()
    assert is_whole(run.folder, run.world.owner.public)
    run.lose("outputs/0001.sealed", "log/0000.sealed")
    assert not is_whole(run.folder, run.world.owner.public)
    assert run.take()
    assert run.names() == before
    assert {name: (run.folder.out / name).read_bytes() for name in before} == run.gate.files
    assert set(run.gate.asked) == {"outputs/0001.sealed", "log/0000.sealed"}, "receipt and logs are here"
    assert run.folder.load() == record, "the end of the run was recorded before"
    assert not run.take(), "nothing is lacking now"


def test_what_the_gate_has_of_what_was_lost_comes_though_it_has_not_all(run: Left) -> None:
    run.lose("outputs/0000.sealed", "outputs/0001.sealed")
    del run.gate.files["outputs/0000.sealed"]
    assert run.take()
    assert "outputs/0001.sealed" in run.names()
    assert not run.take()
    assert "outputs/0000.sealed" not in run.names()


def test_a_lost_file_comes_back_only_with_the_digest_of_the_receipt(run: Left) -> None:
    run.lose("outputs/0001.sealed")
    left = run.names()
    genuine = run.gate.files["outputs/0001.sealed"]
    run.gate.files["outputs/0001.sealed"] = bytes(len(genuine))
    assert not run.take(), "the gate has another file of that name"
    run.gate.files["outputs/0001.sealed"], run.gate.given = genuine, lambda content: bytes(len(content))
    with pytest.raises(PackageError) as caught:
        run.take()
    assert caught.value.code is Code.OUTPUT_TAMPERED
    assert run.names() == left


@pytest.mark.parametrize("lost", [CLOSING, CLOSING[:1], CLOSING[1:2]])
def test_where_receipt_or_log_were_lost_everything_comes_and_the_end_is_recorded(
    run: Left, lost: tuple[str, ...]
) -> None:
    run.lose(*lost)
    assert run.take()
    assert {name: (run.folder.out / name).read_bytes() for name in run.names()} == run.gate.files
    assert verify_file(run.folder.receipt, owner=run.world.owner.public, whole=True).exit_code == 0
    assert (run.folder.load().outcome is not None) is ("receipt.json" in lost)


@pytest.mark.parametrize(
    ("name", "length", "asked"),
    [
        ("receipt.json", 1 << 40, set()),
        ("events.log", 1 << 32, {"receipt.json"}),
        ("heads.log", 1 << 32, {"receipt.json", "events.log"}),
    ],
)
def test_the_receipt_bounds_what_is_read_after_it(run: Left, name: str, length: int, asked: set[str]) -> None:
    run.lose(*CLOSING)
    run.gate.lengths[name] = length
    with pytest.raises(GlasshouseError, match=rf"lists {name} with {length} bytes"):
        run.take()
    assert set(run.gate.asked) == asked
    assert not run.folder.receipt.exists()


def test_no_log_is_read_beneath_a_receipt_that_does_not_hold(run: Left) -> None:
    run.lose(*CLOSING)
    run.gate.files["receipt.json"] = OwnersWorld(name="mallory").run().data
    with pytest.raises(GlasshouseError) as caught:
        run.take()
    assert caught.value.code is Code.OWNER_UNKNOWN
    assert set(run.gate.asked) == {"receipt.json"}


def test_a_receipt_without_one_of_its_outputs_is_not_taken(run: Left) -> None:
    run.lose(*CLOSING)
    del run.gate.files["outputs/0001.sealed"]
    with pytest.raises(UsageError) as caught:
        run.take()
    assert caught.value.code is Code.FILE_MISSING
    assert not run.folder.receipt.exists()


def test_the_gate_keeps_what_is_lacking_here(run: Left) -> None:
    run.lose("log/0000.sealed")
    forget_stored(run.world.home, run.folder, run.world.owner)
    assert not run.gate.forgotten
    assert run.take()
    forget_stored(run.world.home, run.folder, run.world.owner)
    assert run.gate.forgotten == 1
