"""An old home moves to the user's data folder, and a crash at any moment of the move loses nothing."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.broker.store.broker_state import open_broker
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.package_records import KeyStore
from glasshouse.jobs.define.private import holds_keys
from glasshouse.jobs.define.wanted import Caps
from glasshouse.jobs.owner import home as files
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.jobs.places import relocate
from glasshouse.jobs.places.rental_journal import Attempt, Journal, Rental, Step
from simulators.rental_world import offer

KEYS = {"ab" * 16: b"1" * 32, "cd" * 16: b"2" * 32}


@pytest.fixture
def identity() -> Identity:
    return Identity.generate()


@pytest.fixture
def old(tmp_path: Path, identity: Identity) -> Home:
    home = Home(path=tmp_path / "project" / ".glasshouse").make()
    identity.save(private=home.owner_private, public=home.owner_public, passphrase=None)
    for package_id, key in KEYS.items():
        KeyStore(home.keys).put(
            key, package_id=package_id, manifest_sha256=b"m" * 32, recipients=[identity.sealing.public]
        )
    open_broker(home.broker / "data").database.close()
    RunFolder.create(home)
    return home


@pytest.fixture
def new(tmp_path: Path, old: Home) -> Home:
    return Home(path=tmp_path / "data" / "glasshouse", project=old.path)


def is_whole(home: Home, identity: Identity) -> bool:
    """Whether a home opens every package."""
    try:
        found = Identity.parse(home.owner_private.read_bytes(), None)
        store = KeyStore(home.require().keys)
        keys = {name: store.get(name, manifest_sha256=b"m" * 32, sealing=found.sealing) for name in KEYS}
        open_broker(home.broker / "data").database.close()
    except (OSError, UsageError):
        return False
    return found.public == identity.public and keys == KEYS


def test_the_old_home_is_found_and_named_and_moved_on_request(old: Home, new: Home, identity: Identity) -> None:
    for ask in (new.require, new.refuse_old):
        with pytest.raises(UsageError) as found:
            ask()
        assert found.value.code is Code.IDENTITY
        assert str(old.path) in found.value.message
        assert "glasshouse identity move" in found.value.hint
    before = {path.name: path.read_bytes() for path in (old.broker / "data").iterdir()}
    moved = relocate.relocate(old.path, new)
    assert (moved.fingerprint, moved.kept) == (identity.public.fingerprint, ())
    assert {path.name: path.read_bytes() for path in (new.broker / "data").iterdir()} == before
    assert is_whole(new, identity)
    assert not holds_keys(old.path)
    assert new.old is None
    assert sorted(path.name for path in old.path.iterdir()) == [".gitignore", "broker", "runs"]
    assert list(new.runs.iterdir()), "runs stay in the project, where they are found"
    for path in new.path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_crash_at_any_moment_leaves_a_home_that_is_whole_and_the_move_can_be_finished(
    tmp_path: Path, old: Home, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before the first, the second, ... file that it adds or removes, until it gets through."""
    put, unlink = files._put, Path.unlink
    for survived in itertools.count():
        here = Home(path=tmp_path / f"old-{survived}")
        there = Home(path=tmp_path / f"new-{survived}", project=here.path)
        shutil.copytree(old.path, here.path)
        left = iter(range(survived))

        def dying_put(*arguments: Any, left: Iterator[int] = left) -> None:
            next(left, None) is not None or die()
            put(*arguments)

        def dying_unlink(path: Path, left: Iterator[int] = left, **options: Any) -> None:
            path.suffix == ".part" or next(left, None) is not None or die()
            unlink(path, **options)

        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(files, "_put", dying_put)
            patched.setattr(Path, "unlink", dying_unlink)
            relocate.relocate(here.path, there)
            break
        assert is_whole(here, identity) or is_whole(there, identity), f"it died after {survived} steps"
        relocate.relocate(here.path, there)
        assert is_whole(there, identity)
        assert not holds_keys(here.path)
    assert survived >= 12, "every file is added once and removed once"


def test_a_home_that_was_used_since_a_move_was_cut_off_is_not_set_back(
    old: Home, new: Home, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink
    with monkeypatch.context() as patched:
        patched.setattr(
            Path, "unlink", lambda path, **given: unlink(path, **given) if path.suffix == ".part" else die()
        )
        with pytest.raises(KeyboardInterrupt):
            relocate.relocate(old.path, new)
    database = next(path for path in (new.broker / "data").iterdir() if path.read_bytes().startswith(b"SQLite"))
    database.write_bytes(database.read_bytes() + b"newer")
    newer = database.read_bytes()
    moved = relocate.relocate(old.path, new)
    assert database.read_bytes() == newer
    assert moved.kept == (old.broker / "data" / database.name,), "what differs is removed nowhere"


def die() -> None:
    raise KeyboardInterrupt


def test_nothing_is_moved_onto_another_identity_or_another_homes_files(old: Home, new: Home, tmp_path: Path) -> None:
    other = Identity.generate()
    busy = Home(path=tmp_path / "busy").make()
    (busy.keys / ("ab" * 16 + ".json")).write_text("another's")
    with pytest.raises(UsageError, match="in the way"):
        relocate.relocate(old.path, busy)
    assert not busy.owner_private.exists()
    other.save(private=new.make().owner_private, public=new.owner_public, passphrase=None)
    with pytest.raises(UsageError, match="another identity") as refused:
        relocate.relocate(old.path, new)
    assert f"--home {old.path}" in refused.value.hint
    assert holds_keys(old.path)
    with pytest.raises(UsageError, match="that home already"):
        relocate.relocate(old.path, old)
    with pytest.raises(UsageError, match="no identity to move"):
        relocate.relocate(tmp_path / "nothing", new)


def test_an_identity_that_came_with_a_repository_is_not_taken_for_the_users(old: Home, new: Home) -> None:
    old.owner_private.chmod(0o644)  # git keeps no mode of 0600
    with pytest.raises(UsageError, match="others may open"):
        relocate.relocate(old.path, new)


def test_a_home_that_a_run_needs_is_not_moved(old: Home, new: Home) -> None:
    folder = next(path for path in old.runs.iterdir())
    run = RunRecord(
        run_id=folder.name,
        name="clinic",
        workload="script",
        package=Path("/job.sealed"),
        package_id="ab" * 16,
        manifest_sha256="cd" * 32,
        assurance="software",
        profile="standard",
        created_us=1,
        max_duration_s=60,
        supervisor=ProcessName.of(),
    )
    RunFolder(folder).save(run)
    with pytest.raises(UsageError, match="a run still needs"):
        relocate.relocate(old.path, new)
    RunFolder(folder).save(replace(run, supervisor=None))
    assert relocate.relocate(old.path, new).kept == ()


@pytest.mark.parametrize("name", ["keys", "packages", "broker/data"])
def test_a_home_whose_folder_is_a_link_moves_nothing_out_of_the_folder_behind_it(
    old: Home, new: Home, tmp_path: Path, name: str
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "id_ed25519").write_text("mine")
    shutil.rmtree(old.path / name)
    (old.path / name).symlink_to(others)
    with pytest.raises(UsageError, match="is a link"):
        relocate.relocate(old.path, new)
    assert (others / "id_ed25519").read_text() == "mine"
    assert not (new.path / name / "id_ed25519").exists()


def a_rental(home: Home, step: Step) -> Journal:
    attempt = Attempt(
        tag="gh-abcdefghij-c0ffee00-1", nonce="0" * 32, offer=offer(), asked_us=1, step=step, machine="m1"
    )
    caps = Caps(usd=None, seconds=3600, boot_s=60)
    rental = Rental(
        run_id="cd" * 16, provider="vast", created_us=1, caps=caps, python="p", keeper=None, attempts=(attempt,)
    )
    return Journal.create(home, rental)


def test_a_home_from_which_a_machine_is_rented_stays_until_that_is_gone(
    old: Home, new: Home, identity: Identity
) -> None:
    journal = a_rental(old, Step.UP)
    with pytest.raises(UsageError, match="not shown to be gone") as refused:
        relocate.relocate(old.path, new)
    assert "glasshouse sweep --home" in refused.value.hint
    assert not new.owner_public.exists()
    journal.note("gh-abcdefghij-c0ffee00-1", step=Step.GONE, gone_us=2)
    relocate.relocate(old.path, new)
    assert is_whole(new, identity)


def test_the_keys_of_accounts_move_with_the_identity(old: Home, new: Home) -> None:
    old.accounts.mkdir(mode=0o700)
    (old.accounts / "vast").write_text("0123456789")
    relocate.relocate(old.path, new)
    assert (new.accounts / "vast").read_text() == "0123456789"
    assert (new.accounts / "vast").stat().st_mode & 0o777 == 0o600
    assert not old.accounts.exists()
    assert not holds_keys(old.path)
