"""The key file and what rests under it: who may read it, and that nothing opens in the wrong place."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glasshouse.broker.store.key_file import KeyFile, Purpose, private_directory
from glasshouse.errors import Code, UsageError

SECRET = bytes(range(32))


def test_a_new_key_file_is_readable_by_its_owner_alone_and_stays_the_same(tmp_path: Path) -> None:
    path = tmp_path / "key"
    wrapped = KeyFile.open_or_create(path).wrap(Purpose.PACKAGE_KEY, "a", SECRET)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyFile.open_or_create(path).unwrap(Purpose.PACKAGE_KEY, "a", wrapped) == SECRET
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_processes_that_start_together_end_up_with_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: KeyFile.open_or_create(tmp_path / "key"), range(8)))
    wrapped = keys[0].wrap(Purpose.SIGNING_KEY, "a", SECRET)
    assert all(key.unwrap(Purpose.SIGNING_KEY, "a", wrapped) == SECRET for key in keys)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o601, 0o700])
def test_a_key_file_with_another_mode_is_refused_and_the_way_to_mend_it_told(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    KeyFile.open_or_create(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match="not 0600") as caught:
        KeyFile.open_or_create(path)
    assert f"chmod 600 {path}" in caught.value.hint
    assert stat.S_IMODE(path.stat().st_mode) == mode, "it is never mended silently"


def test_a_link_in_place_of_the_key_file_is_refused(tmp_path: Path) -> None:
    KeyFile.open_or_create(tmp_path / "real")
    (tmp_path / "key").symlink_to(tmp_path / "real")
    with pytest.raises(UsageError):
        KeyFile.open_or_create(tmp_path / "key")


def test_a_directory_or_a_pipe_in_place_of_the_key_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("directory", "pipe"):
        with pytest.raises(UsageError, match="not a regular file"):
            KeyFile.open(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"\xff" * 69, b"glasshouse-broker-key-v1 AAAA\n", b"A" * 43 + b"\n"])
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a broker's key file"):
        KeyFile.open(path)


def test_a_missing_key_file_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        KeyFile.open(tmp_path / "key")
    assert caught.value.code is Code.FILE_MISSING


def test_a_wrapped_secret_opens_only_for_its_own_purpose_record_and_key_file(tmp_path: Path) -> None:
    key, other = KeyFile.open_or_create(tmp_path / "a"), KeyFile.open_or_create(tmp_path / "b")
    wrapped = key.wrap(Purpose.PACKAGE_KEY, "one", SECRET)
    assert SECRET not in wrapped
    changed = bytes([wrapped[0] ^ 1]) + wrapped[1:]
    for opener, purpose, name, blob in (
        (key, Purpose.SIGNING_KEY, "one", wrapped),
        (key, Purpose.PACKAGE_KEY, "two", wrapped),
        (other, Purpose.PACKAGE_KEY, "one", wrapped),
        (key, Purpose.PACKAGE_KEY, "one", changed),
        (key, Purpose.PACKAGE_KEY, "one", b""),
    ):
        with pytest.raises(UsageError, match="does not open"):
            opener.unwrap(purpose, name, blob)


def test_a_key_file_does_not_show_its_key(tmp_path: Path) -> None:
    assert repr(KeyFile.open_or_create(tmp_path / "key")) == "KeyFile(...)"
    with pytest.raises(ValueError, match="32 bytes"):
        KeyFile(b"short")


def test_a_private_directory_is_made_private_and_a_looser_one_refused(tmp_path: Path) -> None:
    made = tmp_path / "deep" / "made"
    private_directory(made, what="directory")
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    private_directory(made, what="directory")
    made.chmod(0o750)
    with pytest.raises(UsageError, match="0750") as caught:
        private_directory(made, what="directory")
    assert caught.value.hint == f"chmod 700 {made}"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a directory"):
        private_directory(tmp_path / "file", what="directory")
    with pytest.raises(UsageError, match="cannot be made"):
        private_directory(tmp_path / "file" / "below", what="directory")
