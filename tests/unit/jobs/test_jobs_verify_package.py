"""`verify` on a sealed package: whose it is, and with its key, whether all of it is there."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.jobs.owner.owner_identity import Identity, OwnerPublic
from glasshouse.jobs.verify.documents import PackageVerdict, verify_file, verify_package
from simulators.package_world import FILES, KEY, OWNER, PACKAGE_ID, STRANGER, seal


@pytest.fixture(scope="module")
def sealed() -> bytes:
    return seal()[0]


def refusal(data: bytes, *, owner: bytes = OWNER.public, content: bool = False, key: bytes | None = KEY) -> Code:
    with pytest.raises(GlasshouseError) as caught:
        verify_package(io.BytesIO(data), owner=owner, content=content, package_key=key)
    return caught.value.code


def test_the_public_part_is_verified_without_a_key(sealed: bytes) -> None:
    verdict = verify_package(io.BytesIO(sealed), owner=OWNER.public)
    assert (verdict.package_id, verdict.assets) == (PACKAGE_ID, None)
    assert "assurance software" in verdict.sentence
    assert "not opened" in verdict.sentence


def test_with_its_key_every_byte_is(sealed: bytes) -> None:
    verdict = verify_package(io.BytesIO(sealed), owner=OWNER.public, content=True, package_key=KEY)
    assert (verdict.assets, verdict.content_bytes) == (len(FILES), sum(map(len, FILES.values())))
    assert verdict.to_json()["status"] == "authentic"


def test_a_package_by_another_owner(sealed: bytes) -> None:
    assert refusal(sealed, owner=STRANGER.public) is Code.PACKAGE_OWNER


def test_damage_in_the_content_is_seen_by_content_alone(sealed: bytes) -> None:
    damaged = bytearray(sealed)
    damaged[-20] ^= 1
    assert verify_package(io.BytesIO(bytes(damaged)), owner=OWNER.public).assets is None
    assert refusal(bytes(damaged), content=True) is Code.PACKAGE_TAMPERED


def test_the_wrong_key_and_no_key(sealed: bytes) -> None:
    assert refusal(sealed, content=True, key=bytes(32)) is Code.KEY_COMMITMENT
    with pytest.raises(UsageError):
        verify_package(io.BytesIO(sealed), owner=OWNER.public, content=True)


def test_a_file_is_recognised_as_a_package(sealed: bytes, tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.write_bytes(sealed)
    owner = OwnerPublic(signing=OWNER.public, sealing=Identity.generate().public.sealing)
    assert isinstance(verify_file(path, owner=owner.signing), PackageVerdict)
    verdict = verify_file(path, owner=owner.signing, content=True, package_key=KEY)
    assert isinstance(verdict, PackageVerdict)
    assert verdict.assets == len(FILES)
