"""The owner's private keys do not ride in a package: not by their folder, not by a link, not under another name."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tarfile
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from glasshouse.broker.store.broker_state import open_broker
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.input_files import gather
from glasshouse.jobs.define.package_records import KeyStore
from glasshouse.jobs.define.private import key_kind
from glasshouse.jobs.owner import owner_identity as identities
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.wire.own_state import LOOKED_AT_BYTES

PASSPHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "_SCRYPT_N", 1 << 14)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "train.py").write_text("print()")
    return folder


def make_home(path: Path) -> Home:
    """A home as `init`, `seal` and a broker leave it."""
    home, identity = Home(path=path).make(), Identity.generate()
    identity.save(private=home.owner_private, public=home.owner_public, passphrase=None)
    KeyStore(home.keys).put(
        b"k" * 32, package_id="ab" * 16, manifest_sha256=b"m" * 32, recipients=[identity.sealing.public]
    )
    open_broker(home.broker / "data").database.close()
    return home


def a_run(state: Path) -> None:
    run = state / "runs" / ("cd" * 16)
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "package.sealed").write_bytes(b"ciphertext")


def refusal(folder: Path, inputs: dict[str, str], **options: bool) -> str:
    with pytest.raises(UsageError) as refused:
        gather(folder, inputs, **options)
    assert refused.value.code is Code.JOB_INVALID
    return refused.value.message


@pytest.mark.parametrize("name", [".glasshouse", "state", "src/deep/.glasshouse"])
def test_a_folder_that_contains_a_home_with_keys_is_refused(project: Path, name: str) -> None:
    home = make_home(project / name)
    assert refusal(project, {"p": "."}) == f"inputs.'p' contains a state home with private keys: {home.path}"


def test_a_home_is_known_by_any_key_that_it_holds(project: Path) -> None:
    """Also one without an identity: a broker that serves alone, a key store that was copied."""
    home = make_home(project / "state")
    home.owner_private.unlink()
    assert "private keys" in refusal(project, {"p": "."})
    shutil.rmtree(home.broker)
    assert "private keys" in refusal(project, {"p": "."})
    shutil.rmtree(home.keys)
    assert "p/state/owner.pub" in [source.path for source in gather(project, {"p": "."}).sources]


@pytest.mark.parametrize("path", ["accounts/runpod", "accounts/vast", "rentals/" + "cd" * 16 + "/key"])
def test_a_home_is_known_by_the_keys_of_its_rentals_too(project: Path, path: str) -> None:
    """What is left of a home whose identity moved away: none of these looks like a key."""
    key = project / "state" / path
    key.parent.mkdir(parents=True)
    (key.parent / "rental.json").write_text("{}")
    key.write_text("0123456789")
    assert refusal(project, {"p": "."}) == f"inputs.'p' contains a state home with private keys: {project / 'state'}"
    assert "lies in a state home" in refusal(project, {"p": f"state/{path}"})
    key.unlink()
    assert "p/src/train.py" in [source.path for source in gather(project, {"p": "."}).sources]


def test_a_projects_runs_are_left_out_and_named(project: Path) -> None:
    for state in (".glasshouse", "src/.glasshouse", "moved-away"):
        a_run(project / state)
    (project / "lib").mkdir()
    (project / "lib" / ".glasshouse").symlink_to(project / ".glasshouse")
    (project / "lib" / "a.py").touch()
    gathered = gather(project, {"p": "."})
    assert [source.path for source in gathered.sources] == ["p/lib/a.py", "p/src/train.py"]
    assert gathered.left_out == [".glasshouse/", "lib/.glasshouse", "moved-away/", "src/.glasshouse/"]


@pytest.mark.parametrize("name", [".glasshouse", "state"])
def test_what_lies_inside_a_state_home_is_refused(project: Path, name: str) -> None:
    a_run(project / name)
    (project / name / "adapter").mkdir()
    (project / name / "adapter" / "weights.bin").touch()
    for path in (name, f"{name}/adapter", f"{name}/adapter/weights.bin", f"{name}/runs"):
        assert f"lies in a state home, {project / name}" in refusal(project, {"p": path})
    # The job file itself lies in there, or is reached by a link that leads there.
    assert "lies in a state home" in refusal(project / name, {"p": "adapter"})
    (project.parent / "innocent").symlink_to(project / name)
    assert "lies in a state home" in refusal(project.parent / "innocent", {"p": "adapter/weights.bin"})


def test_a_link_into_a_home_is_refused_where_links_are_followed(project: Path, tmp_path: Path) -> None:
    home = make_home(tmp_path / "elsewhere")
    a_run(home.path)
    for number, target in enumerate(("owner.key", "owner.pub", "runs/" + "cd" * 16 + "/package.sealed")):
        link = project / f"data-{number}"
        link.symlink_to(home.path / target)
        assert "lies in a state home" in refusal(project, {"d": link.name}, follow_links=True)
        assert "is a link" in refusal(project, {"d": link.name})
        link.unlink()


def keys_of_ours(folder: Path) -> dict[str, Path]:
    home, identity = make_home(folder), Identity.generate()
    found = {
        "identity": home.owner_private,
        "package key": home.keys / ("ab" * 16 + ".json"),
        "broker's key": next(path for path in (home.broker / "data").iterdir() if "key" in path.name),
        "broker's database": next(
            path for path in (home.broker / "data").iterdir() if path.read_bytes().startswith(b"SQLite")
        ),
    }
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    clear, locked = serialization.NoEncryption(), serialization.BestAvailableEncryption(b"secret")
    p256 = ec.generate_private_key(ec.SECP256R1())
    texts = {
        "export": identity.encode(PASSPHRASE),
        "indented": json.dumps(json.loads(identity.encode(None)), indent=4).encode(),
        "in a note": b"\xef\xbb\xbfMy key, do not lose:\n\n" + identity.encode(None),
        "launch file": b'{"broker_url":"x", "launch_seed": "' + b"A" * 43 + b'"}',
        "pem": ed25519.Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, clear),
        "pem with a passphrase": ed25519.Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, locked),
        "pem p-256": b"Bag Attributes\r\n" + p256.private_bytes(pem, pkcs8, clear),
        "pem sec1": p256.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, locked),
    }
    for name, data in texts.items():
        found[name] = folder / name
        found[name].write_bytes(data)
    clear_pem = found["pem p-256"].read_bytes().decode()
    carried = {
        "notebook": json.dumps({"cells": [{"outputs": [{"text": [identity.encode(None).decode()]}]}]}),
        "notebook in json": json.dumps(json.dumps({"text": (home.keys / ("ab" * 16 + ".json")).read_text()})),
        "pem in json": json.dumps({"private_key": clear_pem}),
        "pem in yaml": "key: |\n" + "".join(f"  {line}\n" for line in clear_pem.splitlines()),
        "pem in a script": f'KEY = """{clear_pem}"""\n',
        "pem in a comment": "".join(f"# {line}\n" for line in clear_pem.splitlines()),
    }
    for name, text in carried.items():
        found[name] = folder / name
        found[name].write_text(text)
    with tarfile.open(folder / "backup.tar", "w") as tar:
        tar.add(home.owner_private)
    return found | {"tar": folder / "backup.tar"}


def test_a_key_is_known_by_what_it_holds_under_any_name_and_through_a_hard_link(project: Path, tmp_path: Path) -> None:
    for kind, path in keys_of_ours(tmp_path / "elsewhere").items():
        for lay in (os.link, shutil.copyfile):
            lay(path, project / "src" / "model.bin")
            assert "model.bin holds " in refusal(project, {"p": "src"}), kind
            assert "model.bin holds " in refusal(project, {"weights": "src/model.bin"}), kind
            (project / "src" / "model.bin").unlink()


def test_what_is_no_key_of_ours_is_packed(project: Path) -> None:
    """Text about keys, somebody's tables, a test key of another kind in a library."""
    with sqlite3.connect(project / "src" / "features.db") as database:
        database.execute("CREATE TABLE features (wrapped_key TEXT)")
    database.close()
    clear = serialization.NoEncryption()
    others = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    (project / "src" / "server.pem").write_bytes(
        others.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, clear)
    )
    (project / "src" / "fake.pem").write_text("-----BEGIN PRIVATE KEY-----\nnot one\n-----END PRIVATE KEY-----\n")
    (project / "src" / "notes.md").write_text(
        "glasshouse-owner-private, glasshouse-package-key and launch_seed are kinds"
    )
    (project / "src" / "owner.key").write_text("A map's key, drawn by its owner.")
    (project / "src" / "owner.pub").write_bytes(Identity.generate().public.encode())
    shutil.copyfile(identities.__file__, project / "src" / "identity.py")
    assert len(gather(project, {"p": "."}).sources) == 8


def test_a_private_file_that_cannot_be_looked_at_counts_as_a_key(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(project / "state")
    real = os.open

    def refuse(path: object, flags: int, *rest: object, **options: object) -> int:
        if str(path) == str(home.owner_private):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **options)  # type: ignore[arg-type]

    shutil.rmtree(home.keys)
    shutil.rmtree(home.broker)
    monkeypatch.setattr("glasshouse.jobs.define.private.os.open", refuse)
    assert "private keys" in refusal(project, {"p": "."})


def test_a_key_of_ours_is_found_in_what_is_looked_at_and_the_rest_costs_nothing() -> None:
    assert key_kind(b"") is None
    assert key_kind(bytes(range(256)) * 1024) is None


def test_a_file_of_many_beginnings_of_keys_is_looked_at_once() -> None:
    begin = b"-----BEGIN PRIVATE KEY-----\n"
    before = time.process_time()
    assert key_kind(begin * (LOOKED_AT_BYTES // len(begin))) is None
    assert time.process_time() - before < 5, "each beginning was followed to the end of the file: 30 s of work"


def test_a_folder_that_cannot_be_read_is_not_called_a_home(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "lost+found").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "lost+found" not in str(path) and real(path, mode))
    refused = refusal(project, {"p": "."})
    assert "lost+found cannot be read" in refused
    assert "home" not in refused


def test_a_link_into_a_home_is_named(project: Path, tmp_path: Path) -> None:
    home = make_home(tmp_path / "elsewhere")
    (project / "src" / "weights").symlink_to(home.owner_private)
    assert "weights" in refusal(project, {"p": "src"}, follow_links=True)
