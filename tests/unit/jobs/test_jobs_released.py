"""Reference values that a release brings: believed by the key that was named for them, and for its parts alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.measurements.measured import Measured, References
from glasshouse.attestation.measurements.measurement import measured_files
from glasshouse.cli import app as cli
from glasshouse.errors import Code, ExitCode, UsageError, VerificationError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.places.runtime_bundle import make_bundle
from glasshouse.jobs.references.known_references import (
    Released,
    accepted,
    add_reference,
    differences,
    known_references,
    parts_of,
    read_released,
    reference,
)
from glasshouse.wire.crypto import SigningKey


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "bundle.zip"
    make_bundle(path)
    return path


@dataclass
class Owner:
    """A home, and the command line in it."""

    home: Home
    capsys: pytest.CaptureFixture[str]

    def ask(self, *words: str) -> tuple[int, dict[str, Any]]:
        self.capsys.readouterr()
        code = cli.run([*words, "--home", str(self.home.path), "--json"])
        told = self.capsys.readouterr()
        return code, json.loads(told.out or told.err)


@pytest.fixture
def owner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Owner:
    made = Owner(Home(path=tmp_path / "home").make(), capsys)
    identity = Identity.generate()
    identity.save(private=made.home.owner_private, public=made.home.owner_public, passphrase=None)
    return made


def test_a_release_is_signed_and_accepted_by_its_makers_key(bundle: Path, owner: Owner, tmp_path: Path) -> None:
    """Its values are what the files measure to where they are installed; the interpreter comes from elsewhere."""
    file = tmp_path / "release.json"
    code, signed = owner.ask("reference", "sign", str(bundle), "-o", str(file))
    assert code == ExitCode.DONE, signed
    ours = measured_files()
    assert signed["parts"] == {part: digest.hex() for part, digest in parts_of(ours).items() if part in signed["parts"]}
    assert set(signed["parts"]) == {"cryptography", "glasshouse"}
    take = ("reference", "add", "release", "--from", str(file))
    code, told = owner.ask(*take, "--signed-by", signed["signed_by"])
    assert (code, told["parts"], told["measurement"]) == (ExitCode.DONE, signed["parts"], None)
    assert owner.ask("reference", "list")[1]["references"][0]["parts"] == signed["parts"]

    with pytest.raises(UsageError, match="has the part interpreter") as refused:
        accepted(owner.home, ["release"])
    assert refused.value.code is Code.POLICY_IMPOSSIBLE
    older = {part: dict(files) for part, files in ours.items()}
    older["glasshouse"]["glasshouse/errors.py"] = bytes(32)
    add_reference(owner.home, "image", older)
    both = accepted(owner.home, ["release", "image"])
    assert both.unknown(Measured.of(ours)) is None
    assert both != References.of(Measured.of(older))
    assert accepted(owner.home, ["image"]).unknown(Measured.of(ours)) == "glasshouse"
    assert [(one.part, one.how) for one in differences(older, reference(owner.home, "release"))] == [
        ("glasshouse", "changed")
    ]


def test_without_the_makers_key_nothing_is_believed(bundle: Path, owner: Owner, tmp_path: Path) -> None:
    maker, thief = SigningKey.generate(), SigningKey.generate()
    file = tmp_path / "release.json"
    file.write_bytes(Released.of_bundle(bundle).sign(thief).encode())
    for words in (
        ("--from", str(file)),
        ("--signed-by", maker.public.hex()),
        ("--from", str(file), "--signed-by", ""),
        ("--from", str(file), "--signed-by", maker.key_id),
        ("--from", str(file), "--signed-by", maker.public.hex(), "--on", "lab"),
        ("--from", str(file), "--signed-by", maker.public.hex(), "--tree", "/"),
        ("--from", str(tmp_path / "nowhere"), "--signed-by", maker.public.hex()),
    ):
        code, told = owner.ask("reference", "add", "release", *words)
        assert code == ExitCode.USAGE, told
    code, told = owner.ask("reference", "add", "release", "--from", str(file), "--signed-by", maker.public.hex())
    assert (code, told["error"]["code"]) == (ExitCode.VERIFICATION_FAILED, Code.SIGNATURE)
    assert known_references(owner.home) == {}


@pytest.mark.parametrize("damage", [b"", b"{}", b"x" * (3 << 20)])
def test_a_file_that_is_none_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "release.json").write_bytes(damage)
    with pytest.raises((UsageError, VerificationError)):
        read_released(tmp_path / "release.json", signed_by="ab" * 32)


def test_a_file_is_signed_again_in_the_same_bytes(bundle: Path) -> None:
    key = SigningKey.generate()
    released = Released.of_bundle(bundle)
    assert Released.verified(released.sign(key).encode(), signed_by=key.public) == released
    assert released.sign(key) == Released.of_bundle(bundle).sign(key)
