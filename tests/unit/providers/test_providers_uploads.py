"""Files at a place: whole or worth nothing, sent by one at a time, and gone with the run that they were for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import blake3
import pytest

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.providers.serve import uploads
from glasshouse.providers.serve.uploads import Uploads

CONTENT = bytes(range(256)) * 1000
DIGEST = blake3.blake3(CONTENT).hexdigest()
DAYS_AGO_S = 3 * 24 * 3600


def put(kept: Uploads, content: bytes = CONTENT, digest: str = DIGEST) -> Path:
    upload = kept.begin(digest, len(content), 0)
    upload.write(content)
    upload.finish()
    upload.close()
    return kept.path(digest)


def age(path: Path) -> None:
    os.utime(path, (time.time() - DAYS_AGO_S,) * 2)


@pytest.fixture
def kept(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "files", boot="this")


def test_a_file_has_its_name_when_it_is_whole(kept: Uploads) -> None:
    upload = kept.begin(DIGEST, len(CONTENT), 0)
    upload.write(CONTENT[:1000])
    assert not kept.whole(DIGEST, len(CONTENT))
    assert kept.present(DIGEST) == 1000
    upload.close()
    again = kept.begin(DIGEST, len(CONTENT), 1000)
    again.write(CONTENT[1000:])
    again.finish()
    again.close()
    assert kept.whole(DIGEST, len(CONTENT))


def test_a_file_that_a_crash_of_the_machine_cut_short_is_sent_again(kept: Uploads) -> None:
    os.truncate(put(kept), 100)
    assert not kept.whole(DIGEST, len(CONTENT))
    assert kept.present(DIGEST) == 0


@pytest.mark.parametrize("lacking", [False, True])
def test_what_an_earlier_start_of_the_machine_left_is_hashed_before_it_is_used(
    kept: Uploads, tmp_path: Path, lacking: bool
) -> None:
    path = put(kept)
    if lacking:  # the name was on the disk, and of what it names not all
        path.write_bytes(CONTENT[:1000].ljust(len(CONTENT), b"\0"))
    later = Uploads(tmp_path / "files", boot="another")
    assert not later.path(DIGEST).exists()
    assert not later.whole(DIGEST, len(CONTENT))
    assert later.present(DIGEST) == len(CONTENT), "nothing is sent again that may be there"
    upload = later.begin(DIGEST, len(CONTENT), len(CONTENT))
    if lacking:
        with pytest.raises(UsageError) as damaged:
            upload.finish()
        assert damaged.value.code is Code.UPLOAD_DAMAGED
    else:
        upload.finish()
    upload.close()
    assert later.whole(DIGEST, len(CONTENT)) is not lacking
    assert not path.exists()
    later.drop(DIGEST)
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize(("boot", "synced"), [("this", 0), ("", 1)])
def test_where_a_machine_does_not_tell_its_starts_a_name_is_given_to_what_is_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, boot: str, synced: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    put(Uploads(tmp_path / "files", boot=boot))
    assert len(calls) == synced
    assert Uploads(tmp_path / "files", boot=boot).whole(DIGEST, len(CONTENT))


def test_two_connections_do_not_send_one_file_at_once(kept: Uploads) -> None:
    first = kept.begin(DIGEST, len(CONTENT), 0)
    with pytest.raises(UsageError) as busy:
        kept.begin(DIGEST, len(CONTENT), 0)
    assert busy.value.code is Code.UPLOAD_BUSY
    first.close()
    kept.begin(DIGEST, len(CONTENT), 0).close()


def test_room_is_made_of_what_nothing_uses_and_never_of_what_is_being_sent(
    kept: Uploads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, used, new = (blake3.blake3(name).hexdigest() for name in (b"old", b"used", b"new"))
    for name, content in ((old, b"old"), (used, b"used"), (new, b"new")):
        put(kept, content, name)
    os.link(kept.path(used), tmp_path / "a run's")
    for name in (old, used):
        age(kept.path(name))
    half = kept.begin(DIGEST, len(CONTENT), 0)
    half.write(CONTENT[:1000])
    half.close()
    age(tmp_path / "files" / f"{DIGEST}.part")
    monkeypatch.setattr(uploads.Uploads, "_free", lambda self: 0 if kept.path(old).exists() else 1 << 40)
    rest = kept.begin(DIGEST, len(CONTENT), 1000)
    rest.write(CONTENT[1000:])
    rest.finish()
    rest.close()
    assert [kept.path(name).exists() for name in (old, used, new, DIGEST)] == [False, True, True, True]


def test_a_machine_without_room_says_so_before_anything_is_sent(kept: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads.Uploads, "_free", lambda self: 1 << 20)
    with pytest.raises(PlatformError) as full:
        kept.begin(DIGEST, 1 << 30, 0)
    assert full.value.code is Code.DISK_FULL


def test_room_that_was_taken_for_an_upload_is_its_own_when_it_goes_on(
    kept: Uploads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = 1 << 20
    half = kept.begin(DIGEST, size, 0)
    half.write(CONTENT)
    half.close()
    if (tmp_path / "files" / f"{DIGEST}.part").stat().st_blocks * 512 < size:
        pytest.skip("this file system takes no room beforehand")
    assert kept.present(DIGEST) == len(CONTENT), "room is not what came"
    # What is left besides is kept for what the runs write.
    monkeypatch.setattr(uploads.Uploads, "_free", lambda self: 64 << 20)
    kept.begin(DIGEST, size, len(CONTENT)).close()
    with pytest.raises(PlatformError):
        kept.begin(blake3.blake3(b"another").hexdigest(), size, 0)


def test_a_package_goes_with_the_last_run_that_uses_it(kept: Uploads, tmp_path: Path) -> None:
    path = put(kept)
    os.link(path, tmp_path / "another run's")
    kept.drop(DIGEST)
    assert path.exists()
    (tmp_path / "another run's").unlink()
    kept.drop(DIGEST)
    assert not path.exists()
    half = kept.begin(DIGEST, len(CONTENT), 0)
    half.write(CONTENT[:10])
    kept.drop(DIGEST)
    assert kept.present(DIGEST) == 10, "a connection sends it"
    half.close()
    kept.drop(DIGEST)
    kept.drop(DIGEST)
    assert kept.present(DIGEST) == 0


@pytest.mark.parametrize("wrong", ["others write", "a link"])
def test_a_folder_that_others_can_change_is_none_to_keep_files_in(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there").chmod(0o777)
    if wrong == "a link":
        (tmp_path / "there").chmod(0o700)
        (tmp_path / "link").symlink_to(tmp_path / "there")
    with pytest.raises(PlatformError, match="own folder"):
        Uploads(tmp_path / ("link" if wrong == "a link" else "there"), boot="this")


@pytest.mark.parametrize("whole", [True, False])
def test_a_name_is_neither_given_to_nor_taken_from_what_came_in_its_place(kept: Uploads, whole: bool) -> None:
    upload = kept.begin(DIGEST, len(CONTENT), 0)
    upload.write(CONTENT if whole else CONTENT[:10])
    part = kept.path(DIGEST).with_name(f"{DIGEST}.part")
    part.unlink()
    part.write_bytes(b"another's")
    with pytest.raises(UsageError):
        upload.finish()
    upload.close()
    assert part.read_bytes() == b"another's"
    assert not kept.path(DIGEST).exists()
