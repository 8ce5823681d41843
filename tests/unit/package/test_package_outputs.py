"""Outputs: sealed as they arrive, opened by a recipient of this run alone, and no plaintext left in the agent."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, InternalError, PackageError
from glasshouse.package import outputs
from glasshouse.package.output_header import OutputHeader, OutputKind
from glasshouse.package.outputs import OpenedOutput, OutputSealer, SealedOutput, open_output
from glasshouse.wire.crypto import RecipientKey, Suite, salted
from simulators.package_world import BACKUP, CHUNK, RECIPIENT, RUN_ID, fixed

MANIFEST = fixed("manifest", 32)


def sealer(out: Any, **changes: Any) -> OutputSealer:
    options: dict[str, Any] = {
        "recipients": [RECIPIENT.public],
        "run_id": RUN_ID,
        "manifest_sha256": MANIFEST,
        "name": "adapter.safetensors",
        "sequence": 4,
        "kind": "output",
        "chunk_bytes": CHUNK,
    }
    return OutputSealer(out, **(options | changes))


def seal(plain: bytes, piece: int = 700, **changes: Any) -> tuple[bytes, SealedOutput]:
    out = io.BytesIO()
    sealing = sealer(out, **changes)
    for at in range(0, len(plain), piece):
        sealing.update(plain[at : at + piece])
    done = sealing.finish()
    return out.getvalue(), done


def opened(data: bytes, key: RecipientKey = RECIPIENT) -> OpenedOutput:
    return open_output(io.BytesIO(data), key, run_id=RUN_ID, manifest_sha256=MANIFEST)


def code_of(data: bytes) -> Code | None:
    try:
        opened(data).copy_to(io.BytesIO())
    except GlasshouseError as error:
        return error.code
    return None


@pytest.mark.parametrize("suite", list(Suite))
@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 77])
@pytest.mark.parametrize("piece", [1 << 20, 333])
def test_an_output_comes_back_whole(suite: Suite, length: int, piece: int) -> None:
    plain = fixed("output", length)
    data, done = seal(plain, piece, suite=suite)
    found, out = opened(data), io.BytesIO()
    assert (found.name, found.kind, found.sequence, found.bytes) == ("adapter.safetensors", "output", 4, length)
    assert found.copy_to(out) == done.sha256 == hashlib.sha256(plain).digest()
    assert out.getvalue() == plain
    assert (done.bytes, done.sealed_bytes) == (length, len(data))
    assert done.sealed_sha256 == hashlib.sha256(data).digest()


def test_the_salt_that_is_sealed_with_it_makes_its_commitment_comparable_and_nothing_else_does() -> None:
    plain = b'{"r": 16}'
    data, done = seal(plain)
    salt = opened(data).salt
    assert salted(salt, hashlib.sha256(plain).digest()) == done.plain_hmac
    assert salt not in data
    again, other = seal(plain)
    assert other.plain_hmac != done.plain_hmac  # two runs of one job: nothing shows that they made the same
    assert opened(again).salt != salt


def test_any_recipient_opens_it_and_nobody_else() -> None:
    data, _ = seal(b"result", recipients=[RECIPIENT.public, BACKUP.public])
    for key in (RECIPIENT, BACKUP):
        out = io.BytesIO()
        opened(data, key).copy_to(out)
        assert out.getvalue() == b"result"
    with pytest.raises(PackageError) as refusal:
        opened(data, RecipientKey.generate())
    assert refusal.value.code is Code.PACKAGE_OWNER


def test_the_host_reads_no_name_and_no_content() -> None:
    plain = b"the weights of Mrs. Miller" * 99
    data, _ = seal(plain, name="miller/adapter.bin")
    assert b"miller" not in data
    assert b"Miller" not in data
    short, _ = seal(plain, name="a")
    assert len(short) == len(data)  # nor the length of the name


def test_every_output_has_its_own_key() -> None:
    first, second = seal(b"same" * 999)[0], seal(b"same" * 999)[0]
    assert (
        OutputHeader.parse(first[: header_length(first)]).key_commitment
        != OutputHeader.parse(second[: header_length(second)]).key_commitment
    )
    assert first[-900:] != second[-900:]


def header_length(data: bytes) -> int:
    return 12 + int.from_bytes(data[8:12], "big")


def test_an_output_of_another_run_or_package_is_refused() -> None:
    data, _ = seal(b"x")
    for run_id, manifest in ((fixed("other", 16).hex(), MANIFEST), (RUN_ID, bytes(32))):
        with pytest.raises(PackageError) as refusal:
            open_output(io.BytesIO(data), RECIPIENT, run_id=run_id, manifest_sha256=manifest)
        assert refusal.value.code is Code.OUTPUT_TAMPERED


def test_a_flipped_bit_anywhere_is_refused() -> None:
    data, _ = seal(fixed("output", 2 * CHUNK + 5))
    for at in [*range(0, header_length(data), 7), *range(header_length(data), len(data), 31)]:
        spoiled = bytearray(data)
        spoiled[at] ^= 0x10
        assert code_of(bytes(spoiled)) is not None, at


def test_an_output_cut_anywhere_is_refused() -> None:
    data, _ = seal(fixed("output", 3 * CHUNK))
    header = header_length(data)
    for length in [
        0,
        5,
        11,
        12,
        100,
        header,
        header + 5,
        header + CHUNK + 16,
        header + 2 * (CHUNK + 16),
        len(data) - 1,
    ]:
        assert code_of(data[:length]) in (Code.PACKAGE_MAGIC, Code.OUTPUT_TAMPERED), length
    assert code_of(data + b"\x00" * 20) is Code.OUTPUT_TAMPERED


def test_two_outputs_under_one_header_do_not_mix() -> None:
    first, second = seal(fixed("a", 2 * CHUNK))[0], seal(fixed("b", 2 * CHUNK))[0]
    mixed = first[: header_length(first)] + second[header_length(second) :]
    assert code_of(mixed) is Code.OUTPUT_TAMPERED


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "a" * 256, "a\x00b", "a//b"])
def test_a_hostile_name_is_refused_at_sealing(name: str) -> None:
    out = io.BytesIO()
    with pytest.raises(PackageError) as refusal:
        sealer(out, name=name)
    assert refusal.value.code is Code.PACKAGE_PATH
    assert out.getvalue() == b""


@pytest.mark.parametrize(
    "changes", [{"recipients": []}, {"recipients": [b"\x00" * 5]}, {"run_id": "short"}, {"chunk_bytes": 1000}]
)
def test_what_cannot_be_sealed_is_refused_before_a_byte_is_written(changes: dict[str, Any]) -> None:
    out = io.BytesIO()
    with pytest.raises((GlasshouseError, ValueError)):
        sealer(out, **changes)
    assert out.getvalue() == b""


def test_plaintext_and_key_are_wiped_when_an_output_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytearray] = []
    blocks: list[bytearray] = []
    fresh, block = outputs.fresh_key, outputs.private_block

    def new_key() -> bytearray:
        keys.append(fresh())
        return keys[-1]

    def new_block(key: Any, salt: Any, name: str) -> bytearray:
        blocks.append(block(key, salt, name))
        return blocks[-1]

    monkeypatch.setattr(outputs, "fresh_key", new_key)
    monkeypatch.setattr(outputs, "private_block", new_block)
    sealing = sealer(io.BytesIO())
    assert (keys[0], blocks) == (bytearray(32), [bytearray(320)])  # wiped before the first byte of plaintext
    sealing.update(b"secret" * 500)
    plain = sealing._plain
    assert any(plain)
    sealing.finish()
    assert not any(plain)
    assert keys == [bytearray(32)] * 2  # the salt, too, when there is nothing left to commit to


def test_a_wiped_output_takes_no_more() -> None:
    sealing = sealer(io.BytesIO())
    sealing.update(b"secret")
    sealing.wipe()
    sealing.wipe()
    assert not any(sealing._plain)
    for act in (lambda: sealing.update(b"more"), sealing.finish):
        with pytest.raises(InternalError):
            act()


def test_a_disk_that_fills_wipes_too() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any, /) -> int:
            if self.tell() > 2000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    sealing = sealer(Full())
    sealing.update(b"secret")
    plain = sealing._plain
    with pytest.raises(OSError, match="No space"):
        sealing.finish()
    assert not any(plain)


def test_a_header_has_one_encoding() -> None:
    data, _ = seal(b"x", kind=OutputKind.LOG)
    header = data[: header_length(data)]
    assert OutputHeader.parse(header).encode() == header
    assert OutputHeader.parse(header).kind is OutputKind.LOG
    with pytest.raises(PackageError):
        OutputHeader.parse(header + b" ")
