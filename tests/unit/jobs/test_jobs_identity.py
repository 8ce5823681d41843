"""An identity is one pair of keys under one fingerprint; a passphrase is all that opens an encrypted one."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.owner import owner_identity as identities
from glasshouse.jobs.owner.owner_identity import Identity, OwnerPublic, is_encrypted, read_private, read_public

PASSPHRASE = "correct horse battery"


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest cost that a file may name: these tests are about who gets in, not about how long it takes."""
    monkeypatch.setattr(identities, "_SCRYPT_N", 1 << 14)


def test_the_public_file_round_trips_and_a_changed_key_does_not(tmp_path: Path) -> None:
    owner = Identity.generate().public
    assert OwnerPublic.parse(owner.encode()) == owner
    forged = json.loads(owner.encode()) | {"signing": json.loads(Identity.generate().public.encode())["signing"]}
    with pytest.raises(FormatError) as mismatch:
        OwnerPublic.parse(json.dumps(forged, separators=(",", ":"), sort_keys=True).encode())
    assert mismatch.value.code is Code.OWNER_UNKNOWN
    (tmp_path / "owner.pub").write_bytes(b"{}")
    with pytest.raises(UsageError, match="not an owner file"):
        read_public(tmp_path / "owner.pub")


def test_two_identities_have_two_fingerprints() -> None:
    assert Identity.generate().public.fingerprint != Identity.generate().public.fingerprint


@pytest.mark.parametrize("passphrase", [None, PASSPHRASE])
def test_what_was_saved_is_what_is_read(tmp_path: Path, passphrase: str | None) -> None:
    made = Identity.generate()
    private, public = tmp_path / "owner.key", tmp_path / "owner.pub"
    made.save(private=private, public=public, passphrase=passphrase)
    found = Identity.parse(private.read_bytes(), passphrase)
    assert found.public == made.public == read_public(public)
    assert found.signing.seed() == made.signing.seed()
    assert found.sealing.private() == made.sealing.private()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert is_encrypted(private.read_bytes()) is (passphrase is not None)


def test_an_encrypted_file_holds_no_private_key_in_any_spelling() -> None:
    made = Identity.generate()
    data = made.encode(PASSPHRASE)
    from glasshouse.wire.canonical import b64encode

    for secret in (made.signing.seed(), made.sealing.private(), PASSPHRASE.encode()):
        for form in (secret, secret.hex().encode(), b64encode(secret).encode()):
            assert form not in data


def test_a_wrong_or_missing_passphrase_opens_nothing() -> None:
    data = Identity.generate().encode(PASSPHRASE)
    for wrong in (None, "correct horse batter", PASSPHRASE + " "):
        with pytest.raises(UsageError) as refused:
            Identity.parse(data, wrong)
        assert refused.value.code is Code.IDENTITY


def test_a_public_key_exchanged_in_an_encrypted_file_is_noticed() -> None:
    """An attacker who cannot decrypt the file could still swap what it says is its public half."""
    mine, theirs = (
        json.loads(Identity.generate().encode(PASSPHRASE)),
        json.loads(Identity.generate().encode(PASSPHRASE)),
    )
    mine["owner"] = theirs["owner"]
    with pytest.raises(UsageError, match="wrong, or the identity file was changed"):
        Identity.parse(json.dumps(mine, separators=(",", ":"), sort_keys=True).encode(), PASSPHRASE)


def test_a_file_may_not_ask_for_all_memory() -> None:
    value = json.loads(Identity.generate().encode(PASSPHRASE))
    for cost in (1 << 30, (1 << 15) + 1, 1):
        value["lock"]["n"] = cost
        with pytest.raises(UsageError) as refused:
            Identity.parse(json.dumps(value, separators=(",", ":"), sort_keys=True).encode(), PASSPHRASE)
        assert refused.value.code is Code.IDENTITY


def test_the_largest_cost_that_a_file_may_name_takes_256_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    value = json.loads(Identity.generate().encode(PASSPHRASE))
    asked: list[int] = []
    monkeypatch.setattr(identities, "_stretch", lambda _passphrase, _salt, cost: asked.append(cost) or bytes(32))
    for exponent in (18, 19, 20):
        value["lock"]["n"] = 1 << exponent
        with pytest.raises(UsageError) as refused:
            Identity.parse(json.dumps(value, separators=(",", ":"), sort_keys=True).encode(), PASSPHRASE)
        assert refused.value.code is Code.IDENTITY
    assert [128 * 8 * cost >> 20 for cost in asked] == [256]


@pytest.mark.parametrize(("field", "wrong"), [("r", 16), ("p", 2), ("r", 0), ("p", 1 << 30)])
def test_the_other_costs_are_not_the_files_to_name(field: str, wrong: int) -> None:
    value = json.loads(Identity.generate().encode(PASSPHRASE))
    value["lock"][field] = wrong
    with pytest.raises(UsageError) as refused:
        Identity.parse(json.dumps(value, separators=(",", ":"), sort_keys=True).encode(), PASSPHRASE)
    assert refused.value.code is Code.IDENTITY


def test_a_machine_without_the_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Identity.generate().encode(PASSPHRASE)

    class Starved:
        def __init__(self, **_cost: object) -> None:
            pass

        def derive(self, _passphrase: bytes) -> bytes:
            raise MemoryError

    monkeypatch.setattr(identities, "Scrypt", Starved)
    with pytest.raises(UsageError, match="16 MiB of memory"):
        Identity.parse(data, PASSPHRASE)


@pytest.mark.parametrize("passphrase", [None, PASSPHRASE])
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_private_file_that_others_may_open_is_not_read(tmp_path: Path, passphrase: str | None, mode: int) -> None:
    path = tmp_path / "owner key"
    Identity.generate().save(private=path, public=tmp_path / "owner.pub", passphrase=passphrase)
    assert read_private(path) == path.read_bytes()
    path.chmod(mode)
    with pytest.raises(UsageError) as refused:
        read_private(path)
    assert refused.value.code is Code.IDENTITY
    assert refused.value.hint == f"chmod 600 '{path}'"


def test_a_short_passphrase_is_refused() -> None:
    with pytest.raises(UsageError, match="fewer than"):
        Identity.generate().encode("short")


def test_a_second_identity_does_not_replace_the_first(tmp_path: Path) -> None:
    private, public = tmp_path / "owner.key", tmp_path / "owner.pub"
    first = Identity.generate()
    first.save(private=private, public=public, passphrase=None)
    with pytest.raises(UsageError, match="there already"):
        Identity.generate().save(private=private, public=public, passphrase=None)
    assert read_public(public) == first.public


def test_no_secret_shows_in_a_representation() -> None:
    made = Identity.generate()
    assert made.signing.seed().hex() not in repr(made)
    assert made.public.fingerprint in repr(made)


@pytest.mark.parametrize("damage", [b"", b"{}", b"nonsense", b'{"kind":"glasshouse-owner-private"}', b"\x00" * 20000])
def test_hostile_bytes_are_a_clear_error(damage: bytes) -> None:
    with pytest.raises(UsageError) as refused:
        Identity.parse(damage, None)
    assert refused.value.code is Code.IDENTITY
