"""The collateral pack of a home: whole or absent, private, bounded, and never half of one in place of the last."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from glasshouse.attestation.roots.collateral import MAX_PACK_BYTES, Item, Pack
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.kept_pack import keep_pack, kept_pack, needed_pack

PACK = Pack(items=(Item(name="amd/crl/Milan", data=b"crl"),))


def test_what_was_kept_is_read_again_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    home = Home(path=tmp_path / "home")
    assert kept_pack(home) is None
    keep_pack(home, PACK)
    assert kept_pack(home) == needed_pack(home) == PACK
    assert stat.S_IMODE(home.collateral.stat().st_mode) == 0o600
    assert [path.name for path in home.path.iterdir()] == ["collateral.json"]


def test_without_a_pack_the_owner_is_told_how_to_fetch_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as missing:
        needed_pack(Home(path=tmp_path))
    assert missing.value.code is Code.COLLATERAL_MISSING
    assert "glasshouse collateral fetch" in missing.value.hint


@pytest.mark.parametrize("data", [b"", PACK.encode()[:-1], PACK.encode() + b"\n", b"[]"])
def test_a_damaged_pack_is_no_pack(tmp_path: Path, data: bytes) -> None:
    home = Home(path=tmp_path)
    home.collateral.write_bytes(data)
    with pytest.raises(UsageError) as damaged:
        kept_pack(home)
    assert damaged.value.code is Code.COLLATERAL_INVALID
    assert "--only" in damaged.value.hint, "without it the damaged one is read first"


def test_a_file_without_end_is_not_read_whole(tmp_path: Path) -> None:
    home = Home(path=tmp_path)
    home.collateral.write_bytes(bytes(MAX_PACK_BYTES + 1))
    with pytest.raises(UsageError) as large:
        kept_pack(home)
    assert large.value.code is Code.TOO_LARGE


def test_where_the_new_one_cannot_be_written_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(path=tmp_path)
    keep_pack(home, PACK)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(UsageError):
        keep_pack(home, Pack(items=()))
    assert kept_pack(home) == PACK
    assert [path.name for path in tmp_path.iterdir()] == ["collateral.json"]
