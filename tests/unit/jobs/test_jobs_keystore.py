"""A package key rests sealed to its owner and backups, bound to its package."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.package_records import KeyStore
from glasshouse.wire.crypto import RecipientKey

PACKAGE, MANIFEST, KEY = "ab" * 16, bytes(range(32)), bytes(range(100, 132))


@pytest.fixture(scope="module")
def owner() -> RecipientKey:
    return RecipientKey.generate()


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


def test_owner_and_backup_each_open_the_entry(store: KeyStore, owner: RecipientKey) -> None:
    backup = RecipientKey.generate()
    path = store.put(KEY, package_id=PACKAGE, manifest_sha256=MANIFEST, recipients=[owner.public, backup.public])
    for key in (owner, backup):
        assert store.get(PACKAGE, manifest_sha256=MANIFEST, sealing=key) == KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KEY not in path.read_bytes()
    assert KEY.hex().encode() not in path.read_bytes()


def test_a_stranger_gets_nothing(store: KeyStore, owner: RecipientKey) -> None:
    store.put(KEY, package_id=PACKAGE, manifest_sha256=MANIFEST, recipients=[owner.public])
    with pytest.raises(UsageError, match="sealed to another identity"):
        store.get(PACKAGE, manifest_sha256=MANIFEST, sealing=RecipientKey.generate())


def test_an_entry_moved_to_another_package_does_not_open(store: KeyStore, owner: RecipientKey) -> None:
    path = store.put(KEY, package_id=PACKAGE, manifest_sha256=MANIFEST, recipients=[owner.public])
    other = "cd" * 16
    store.path(other).write_bytes(path.read_bytes().replace(PACKAGE.encode(), other.encode()))
    with pytest.raises(UsageError) as refused:
        store.get(other, manifest_sha256=MANIFEST, sealing=owner)
    assert refused.value.code is Code.IDENTITY
    with pytest.raises(UsageError, match="another manifest"):
        store.get(PACKAGE, manifest_sha256=bytes(32), sealing=owner)


def test_a_missing_entry_says_where_it_looked(store: KeyStore, owner: RecipientKey) -> None:
    with pytest.raises(UsageError) as missing:
        store.get(PACKAGE, manifest_sha256=MANIFEST, sealing=owner)
    assert missing.value.code is Code.FILE_MISSING
    assert "stays where the package was sealed" in missing.value.hint


def test_no_entry_is_overwritten(store: KeyStore, owner: RecipientKey) -> None:
    store.put(KEY, package_id=PACKAGE, manifest_sha256=MANIFEST, recipients=[owner.public])
    with pytest.raises(UsageError):
        store.put(bytes(32), package_id=PACKAGE, manifest_sha256=MANIFEST, recipients=[owner.public])
    assert store.get(PACKAGE, manifest_sha256=MANIFEST, sealing=owner) == KEY
