"""Whose key it is: a key that came along proves nobody, and is never taken in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glasshouse.cli import app as cli
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.jobs.verify.publish import make_artifact
from glasshouse.wire.canonical import decode
from simulators import package_world
from simulators.owner_side import OwnersWorld
from simulators.slot_measurement import OWNER, measured
from simulators.world import World

WARNING = "THE OWNER IS NOT KNOWN"


@dataclass
class Verifier:
    """Somebody who was sent things by an owner, at a shell with a home of their own.

    Attributes:
        sent: the folder that they were sent.
        theirs: the sender.
        home: the options that name their home.
    """

    sent: Path
    theirs: World
    home: tuple[str, str]
    capsys: pytest.CaptureFixture[str]

    @property
    def owner(self) -> OwnerPublic:
        return OwnerPublic(signing=self.theirs.owner.public, sealing=self.theirs.owner_hpke.public)

    def ask(self, *words: str) -> tuple[int, str, str]:
        code = cli.run([*words, *self.home])
        said = self.capsys.readouterr()
        return code, said.out.replace("\n", " "), said.err

    def object(self, *words: str) -> dict[str, Any]:
        _, out, _ = self.ask(*words, "--json")
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture
def verifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verifier:
    world = World()
    sent = tmp_path / "sent"
    sent.mkdir()
    made = Verifier(sent=sent, theirs=world, home=("--home", str(tmp_path / "home")), capsys=capsys)
    run = world.run()
    (sent / "receipt.json").write_bytes(run.data)
    (sent / "artifact.json").write_bytes(make_artifact(run.data, owner=world.owner, canaries=[]))
    (sent / "owner.pub").write_bytes(made.owner.encode())
    return made


@pytest.mark.parametrize("document", ["receipt.json", "artifact.json"])
def test_a_key_that_came_along_is_said_loudly_and_is_no_known_owner(verifier: Verifier, document: str) -> None:
    path, key = str(verifier.sent / document), str(verifier.sent / "owner.pub")
    code, out, _ = verifier.ask("verify", path, "--owner", key)
    assert (code, WARNING in out) == (ExitCode.DONE, True)
    assert verifier.owner.fingerprint in out
    found = verifier.object("verify", path, "--owner", key)
    assert found["owner_trust"] == {"anchor": "came-along", "known": False, "name": None}
    elsewhere = verifier.sent.parent / "their.pub"
    elsewhere.write_bytes(verifier.owner.encode())
    found = verifier.object("verify", path, "--owner", str(elsewhere))
    assert (found["owner_trust"]["anchor"], found["owner_trust"]["known"]) == ("file", False)


def test_a_measurement_brings_no_owner_either(verifier: Verifier) -> None:
    measured(verifier.sent / "out", sessions=3, length_ns=800_000_000)
    key = verifier.sent / "out" / "owner.pub"
    key.write_bytes(OwnerPublic(signing=OWNER.public, sealing=verifier.theirs.owner_hpke.public).encode())
    words = ("verify", str(verifier.sent / "out"), "--owner", str(key))
    assert verifier.object(*words)["owner_trust"]["anchor"] == "came-along"
    assert WARNING in verifier.ask(*words)[1]
    verifier.ask("owners", "add", str(key), "--name", "clinic")
    assert verifier.object("verify", str(verifier.sent / "out"))["owner_trust"]["name"] == "clinic"


def test_the_owner_in_a_package_is_only_what_the_package_says(verifier: Verifier) -> None:
    package, key = verifier.sent / "job.sealed", verifier.sent / "packer.pub"
    package.write_bytes(package_world.seal()[0])
    key.write_bytes(OwnerPublic(signing=package_world.OWNER.public, sealing=package_world.RECIPIENT.public).encode())
    code, out, _ = verifier.ask("inspect", str(package))
    assert (code, WARNING in out) == (ExitCode.DONE, True)
    assert not verifier.object("inspect", str(package))["owner"]["trust"]["known"]
    verifier.ask("owners", "add", str(key), "--name", "packer")
    assert verifier.object("inspect", str(package))["owner"]["trust"]["name"] == "packer"
    assert WARNING not in verifier.ask("inspect", str(package))[1]
    assert verifier.object("verify", str(package))["owner_trust"]["name"] == "packer"


def test_an_owner_is_added_once_and_recognised_by_what_they_signed(verifier: Verifier) -> None:
    assert verifier.ask("verify", str(verifier.sent / "receipt.json"))[0] == ExitCode.USAGE
    key = str(verifier.sent / "owner.pub")
    code, _, err = verifier.ask("owners", "add", key, "--name", "clinic")
    assert (code, "compare this fingerprint" in err) == (ExitCode.DONE, True)
    assert verifier.object("owners", "list")["owners"] == [
        {"name": "clinic", "fingerprint": verifier.owner.fingerprint}
    ]
    for document in ("receipt.json", "artifact.json"):
        for named in ((), ("--owner", "clinic"), ("--owner", verifier.owner.fingerprint), ("--owner", key)):
            words = ("verify", str(verifier.sent / document), *named)
            assert verifier.object(*words)["owner_trust"] == {"anchor": "known", "known": True, "name": "clinic"}
            assert WARNING not in verifier.ask(*words)[1]
    assert verifier.ask("owners", "remove", "clinic")[0] == ExitCode.DONE
    assert verifier.object("owners", "list")["owners"] == []
    assert verifier.ask("verify", str(verifier.sent / "receipt.json"))[0] == ExitCode.USAGE


def test_a_fingerprint_that_was_compared_makes_a_key_count_and_another_is_refused(verifier: Verifier) -> None:
    text = verifier.owner.fingerprint
    receipt, key = str(verifier.sent / "receipt.json"), str(verifier.sent / "owner.pub")
    for written in (text, text.upper().replace("-", ""), text.replace("-", ":")):
        # A bundle brings the owner's keys: with the fingerprint alone nothing else is needed.
        for named in (("--owner", key), ()):
            found = verifier.object("verify", receipt, *named, "--fingerprint", written)
            assert found["owner_trust"] == {"anchor": "fingerprint", "known": True, "name": None}
    other = World("stranger")
    wrong = OwnerPublic(signing=other.owner.public, sealing=other.owner_hpke.public).fingerprint
    code, _, err = verifier.ask("verify", receipt, "--owner", key, "--fingerprint", wrong)
    assert (code, "[owner-mismatch]" in err) == (ExitCode.VERIFICATION_FAILED, True)
    assert verifier.ask("verify", receipt, "--fingerprint", wrong)[0] == ExitCode.VERIFICATION_FAILED
    # The beginning of one can be forged in an afternoon.
    assert verifier.ask("verify", receipt, "--owner", key, "--fingerprint", text[:9])[0] == ExitCode.USAGE
    assert verifier.ask("owners", "add", key, "--fingerprint", wrong)[0] == ExitCode.VERIFICATION_FAILED
    assert verifier.object("owners", "list")["owners"] == []


def other_sealing_key(verifier: Verifier) -> bytes:
    """The owner's signing key with a sealing key of the forger's: another fingerprint."""
    return OwnerPublic(signing=verifier.theirs.owner.public, sealing=World("forger").owner_hpke.public).encode()


def other_owner(verifier: Verifier) -> bytes:
    forger = World("forger")
    return OwnerPublic(signing=forger.owner.public, sealing=forger.owner_hpke.public).encode()


@pytest.mark.parametrize("forged", [other_sealing_key, other_owner])
def test_a_known_owners_name_is_not_taken_over(verifier: Verifier, forged: Callable[[Verifier], bytes]) -> None:
    verifier.ask("owners", "add", str(verifier.sent / "owner.pub"), "--name", "clinic")
    path = verifier.sent / "forged.pub"
    path.write_bytes(forged(verifier))
    assert verifier.ask("owners", "add", str(path), "--name", "clinic")[0] == ExitCode.USAGE
    found = verifier.object("verify", str(verifier.sent / "receipt.json"), "--owner", str(path))
    assert not found.get("owner_trust", {}).get("known")


def test_a_file_of_the_working_folder_never_stands_for_a_known_owner(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier.ask("owners", "add", str(verifier.sent / "owner.pub"), "--name", "clinic")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinic").write_bytes(other_owner(verifier))
    assert verifier.object("verify", str(verifier.sent / "receipt.json"), "--owner", "clinic")["owner_trust"]["known"]


def test_your_own_runs_need_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = OwnersWorld()
    folder = world.settle(tmp_path)
    world.tell(folder, world.run())
    assert cli.run(["verify", "latest", "--home", str(world.home.path), "--json"]) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["owner_trust"] == {"anchor": "yours", "known": True, "name": None}
    named = ("--owner", str(Home(path=world.home.path).owner_public))
    assert cli.run(["verify", str(folder.receipt), *named, "--home", str(world.home.path), "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["owner_trust"]["anchor"] == "yours"


@pytest.mark.parametrize("name", ["", "../owner", "Clinic", "a/b", "x" * 65, ".hidden"])
def test_a_name_is_no_path(verifier: Verifier, name: str) -> None:
    code, _, err = verifier.ask("owners", "add", str(verifier.sent / "owner.pub"), "--name", name or " ")
    assert (code, "[usage]" in err) == (ExitCode.USAGE, True)


def test_what_is_kept_is_the_file_that_was_given(verifier: Verifier, tmp_path: Path) -> None:
    verifier.ask("owners", "add", str(verifier.sent / "owner.pub"), "--name", "clinic")
    kept = tmp_path / "home" / "owners" / "clinic.pub"
    assert decode(kept.read_bytes()[:-1], max_bytes=4096) == verifier.owner.to_json()
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_key_in_the_working_folder_is_never_taken_unasked(
    verifier: Verifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repository that somebody cloned can bring a state home with a whole identity in it."""
    cloned = OwnersWorld()
    cloned.settle(tmp_path / "cloned")
    cloned.home.path.rename(tmp_path / "cloned" / ".glasshouse")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("GLASSHOUSE_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "cloned")
    (tmp_path / "cloned" / "receipt.json").write_bytes((verifier.sent / "receipt.json").read_bytes())
    assert cli.run(["verify", "receipt.json"]) == ExitCode.USAGE
    assert "no key of this owner is known here" in capsys.readouterr().err
    assert cli.run(["verify", "receipt.json", "--owner", ".glasshouse/owner.pub", "--json"]) == ExitCode.DONE
    assert not json.loads(capsys.readouterr().out)["owner_trust"]["known"]
