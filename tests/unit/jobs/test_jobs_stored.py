"""A gate that stored what a run left, and lies about it: nothing of that comes into the run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PackageError
from glasshouse.jobs import stored
from glasshouse.jobs.home import Home
from glasshouse.jobs.rundir import RunFolder, RunRecord
from glasshouse.jobs.stored import take_stored
from glasshouse.wire.kdf import sha256
from glasshouse.wire.signing import SigningKey

OWNER = SigningKey.generate()
CLOSING = ("events.log", "heads.log", "receipt.json")


class LyingGate:
    """Says that it has files, and gives what it likes for each."""

    def __init__(self, files: dict[str, bytes], given: Callable[[bytes], bytes] = lambda content: content) -> None:
        self.files = files
        self.given = given

    def client(self, _owner: SigningKey) -> LyingGate:
        return self

    def stored(self, _run_id: str) -> dict[str, tuple[int, bytes]]:
        return {name: (len(content), sha256(content)) for name, content in self.files.items()}

    def stored_piece(self, _run_id: str, digest: bytes, after: int) -> bytes:
        [content] = [one for one in self.files.values() if sha256(one) == digest]
        return self.given(content)[after : after + 1000]


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

    monkeypatch.setattr(stored, "gate_named", lambda *_: gate)
    monkeypatch.setattr(stored, "read_public", lambda _: Public)
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
