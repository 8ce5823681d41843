"""A rank's part of a checkpoint: sealed as it comes, unwrapped for one leg, laid out whole or not at all."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PackageError, RunError
from glasshouse.package.checkpoints import part_sealer
from glasshouse.package.checkpoints.part_content import PartReader, PartWriter
from glasshouse.package.checkpoints.part_sealer import PartSealer
from glasshouse.package.checkpoints.resume_parts import open_header, unwrap
from glasshouse.package.grant import Resume
from glasshouse.package.streams import Positioned
from glasshouse.wire.crypto import Suite, hpke_seal, key_id
from glasshouse.wire.lines.checkpoint import CheckpointHeader, PartHeader, PartRow, Place, front_length, is_padded
from glasshouse.wire.lines.checkpoint import resume_key as line_key
from glasshouse.wire.lines.line_start import LineStart
from simulators.package_world import CHUNK, KEY, RECIPIENT, fixed

LINE, MANIFEST, DEPLOYMENT = fixed("line", 32), fixed("manifest", 32), fixed("deployment", 16).hex()
RESUME = line_key(KEY, deployment=DEPLOYMENT, line=LINE)
PLACE = Place(
    deployment=DEPLOYMENT,
    environment_sha256=fixed("environment", 32),
    leg=2,
    line=LINE,
    machines=1,
    manifest_sha256=MANIFEST,
    ranks=2,
    seq=5,
    step=120,
    previous=fixed("previous", 32),
)
FILES = {
    "checkpoint-120/trainer_state.json": b"{}",
    "checkpoint-120/empty": b"",
    "checkpoint-120/Optimizer.pt": fixed("optimizer", 3 * CHUNK + 100),
    "checkpoint-120/optimizer.pt": fixed("other", CHUNK),
}


def content(files: dict[str, bytes], piece: int = 700) -> bytes:
    out = bytearray()
    writer = PartWriter(out.extend)
    for path, data in files.items():
        writer.begin(path)
        for at in range(0, len(data), piece):
            writer.update(data[at : at + piece])
    assert writer.finish() == len(out)
    return bytes(out)


def seal(plain: bytes, *, rank: int = 0, place: Place = PLACE, **changes: Any) -> tuple[bytes, PartRow]:
    out = io.BytesIO()
    options = {"recipients": [RECIPIENT.public, RESUME.public], "chunk_bytes": CHUNK}
    sealer = PartSealer(out, place=place, rank=rank, **(options | changes))  # type: ignore[arg-type]
    for at in range(0, len(plain), 3000):
        sealer.update(plain[at : at + 3000])
    done = sealer.finish()
    assert done.plain_bytes == len(plain)
    return out.getvalue(), done.row


def header_of(*rows: PartRow, place: Place = PLACE) -> CheckpointHeader:
    return CheckpointHeader(**place.shared(), environment_sha256=place.environment_sha256, parts=rows)


def opened(part: bytes, row: PartRow, **changes: Any) -> PartReader:
    front = part[: front_length(part)]
    given = unwrap(front, header_of(row, row), RESUME, rank=0, offset=len(front))
    return PartReader(Positioned(io.BytesIO(part)), replace(given, **changes))


@pytest.fixture(scope="module")
def whole() -> tuple[bytes, PartRow]:
    return seal(content(FILES))


@pytest.mark.parametrize("suite", list(Suite))
def test_files_written_one_after_the_other_come_back_on_another_machine(suite: Suite) -> None:
    part, row = seal(content(FILES), suite=suite)
    assert (row.bytes, row.sha256) == (len(part), hashlib.sha256(part).digest())
    reader = opened(part, row)
    reader.verify()
    assert list(reader.files) == list(FILES), "in the order of the script, also where names differ only in case"
    for path, data in FILES.items():
        out = io.BytesIO()
        reader.copy_to(reader.files[path], out)
        assert out.getvalue() == data
    middle = bytearray(CHUNK)
    assert reader.read_into(reader.files["checkpoint-120/Optimizer.pt"], 2500, middle) == 3 * CHUNK + 100 - 2500
    assert bytes(middle[:600]) == FILES["checkpoint-120/Optimizer.pt"][2500:3100]
    reader.close()


def test_parts_lie_one_behind_the_other_in_the_file_of_a_machine() -> None:
    parts = [seal(content({"state": fixed(f"rank {rank}", 5000)}), rank=rank) for rank in (0, 1)]
    header, laid, given = header_of(*(row for _, row in parts)), bytearray(), []
    for rank, (part, _) in enumerate(parts):
        front = part[: front_length(part)]
        given.append(unwrap(front, header, RESUME, rank=rank, offset=len(laid)))
        laid += part[len(front) :]
    resume = Resume(parts=tuple(given), seq=header.seq, step=header.step)
    assert Resume.from_json(resume.to_json()) == resume
    assert given[0].key.hex() not in repr(resume)
    for rank, one in enumerate(resume.parts):
        reader, out = PartReader(Positioned(io.BytesIO(laid)), one), io.BytesIO()
        reader.copy_to(reader.files["state"], out)
        assert out.getvalue() == fixed(f"rank {rank}", 5000)


def test_the_leg_that_sealed_a_part_keeps_no_key_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytearray] = []
    fresh = part_sealer.fresh_key
    monkeypatch.setattr(part_sealer, "fresh_key", lambda: keys.append(fresh()) or keys[-1])
    sealer = PartSealer(io.BytesIO(), place=PLACE, rank=0, recipients=[RESUME.public], chunk_bytes=CHUNK)
    assert keys == [bytearray(32)]
    sealer.update(b"secret" * 100)
    plain = sealer._plain
    sealer.wipe()
    assert not any(plain)


@pytest.mark.parametrize("length", [0, 1, 4095, 4097, 1 << 20 | 4096])
def test_a_size_that_says_more_than_it_may_is_refused_where_it_is_sealed(length: int) -> None:
    assert not is_padded(length)
    with pytest.raises(RunError) as refusal:
        seal(bytes(length))
    assert refusal.value.code is Code.WORKER_FAILED


def test_the_owner_opens_it_too_and_the_same_plaintext_is_another_part_each_time(whole: tuple[bytes, PartRow]) -> None:
    front = whole[0][: front_length(whole[0])]
    part = PartHeader.parse_front(front)
    key = RECIPIENT.open(dict(part.recipients)[key_id(RECIPIENT.public)], info=part.info)
    assert key == unwrap(front, header_of(whole[1], whole[1]), RESUME, rank=0, offset=0).key
    assert seal(content(FILES))[0][-5000:] != whole[0][-5000:]


def code_of(act: Callable[[], object]) -> Code | None:
    try:
        act()
    except GlasshouseError as error:
        return error.code
    return None


def test_every_changed_byte_of_a_part_is_refused() -> None:
    part, row = seal(content({"state": b"small"}))
    given = unwrap(part[: front_length(part)], header_of(row, row), RESUME, rank=0, offset=front_length(part))
    begin = front_length(part)
    for at in range(len(part)):
        spoiled = bytearray(part)
        spoiled[at] ^= 0x10
        if at < begin:  # as the custodian sees it
            found = code_of(
                lambda front=bytes(spoiled[:begin]): unwrap(front, header_of(row, row), RESUME, rank=0, offset=0)
            )
        else:
            found = code_of(lambda spoiled=spoiled: PartReader(Positioned(io.BytesIO(spoiled)), given).verify())
        assert found is Code.CHECKPOINT_TAMPERED, at


def test_a_part_that_is_cut_is_refused(whole: tuple[bytes, PartRow]) -> None:
    part, row = whole
    given = unwrap(part[: front_length(part)], header_of(row, row), RESUME, rank=0, offset=front_length(part))
    for length in (len(part) - 1, len(part) - CHUNK - 16, front_length(part)):
        cut = Positioned(io.BytesIO(part[:length]))
        assert code_of(lambda cut=cut: PartReader(cut, given).verify()) is Code.CHECKPOINT_TAMPERED


@pytest.mark.parametrize(
    "changes",
    [{"leg": 3}, {"line": bytes(32)}, {"seq": 6}, {"step": 1}, {"previous": None}, {"manifest_sha256": bytes(32)}],
)
def test_a_part_of_another_checkpoint_does_not_open_beside_this_header(changes: dict[str, Any]) -> None:
    part, row = seal(content({"x": b"1"}), place=replace(PLACE, **changes))
    front = part[: front_length(part)]
    assert code_of(lambda: unwrap(front, header_of(row, row), RESUME, rank=0, offset=0)) is Code.CHECKPOINT_FOREIGN, (
        "although the header names its digest"
    )


def test_a_part_of_another_rank_or_under_another_key_is_refused(whole: tuple[bytes, PartRow]) -> None:
    part, row = whole
    front = part[: front_length(part)]
    header = header_of(row, row)
    assert code_of(lambda: unwrap(front, header, RESUME, rank=1, offset=0)) is Code.CHECKPOINT_TAMPERED
    other = line_key(KEY, deployment=DEPLOYMENT, line=fixed("other line", 32))
    assert code_of(lambda: unwrap(front, header, other, rank=0, offset=0)) is Code.CHECKPOINT_TAMPERED
    # A writer that commits to one key and wraps another, so that two recipients open two contents.
    lying = PartHeader.parse_front(front)
    lying = replace(lying, key_commitment=bytes(32), recipients=())
    sealed = {key_id(RESUME.public): hpke_seal(bytes(32), recipient=RESUME.public, info=lying.info)}
    front = lying.with_recipients(sealed).front()
    row = replace(row, head_sha256=hashlib.sha256(front).digest())
    assert code_of(lambda: unwrap(front, header_of(row, row), RESUME, rank=0, offset=0)) is Code.CHECKPOINT_TAMPERED


def test_a_leg_opens_the_checkpoint_of_its_release_and_no_other(whole: tuple[bytes, PartRow]) -> None:
    header = header_of(whole[1], whole[1])
    start = LineStart(id=LINE, leg=3, seq=5, checkpoint=header.digest)
    release: dict[str, Any] = {"deployment": DEPLOYMENT, "manifest_sha256": MANIFEST, "machines": 1, "ranks": 2}
    assert open_header(header.encode(), start, **release) == header
    earlier = replace(header, seq=4).encode()
    assert code_of(lambda: open_header(earlier, start, **release)) is Code.CHECKPOINT_TAMPERED
    for at in range(len(header.encode())):
        spoiled = bytearray(header.encode())
        spoiled[at] ^= 1
        assert code_of(lambda spoiled=bytes(spoiled): open_header(spoiled, start, **release)) is (
            Code.CHECKPOINT_TAMPERED
        )
    for other in ({"deployment": "00" * 16}, {"manifest_sha256": bytes(32)}, {"machines": 2, "ranks": 1}):
        assert code_of(lambda other=other: open_header(header.encode(), start, **(release | other))) is (
            Code.CHECKPOINT_FOREIGN
        )
    for wrong in (replace(start, id=bytes(32)), replace(start, seq=6)):
        assert code_of(lambda wrong=wrong: open_header(header.encode(), wrong, **release)) is Code.CHECKPOINT_FOREIGN


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a\\b", ""])
def test_a_path_that_leaves_the_folder_is_refused_when_it_begins(path: str) -> None:
    with pytest.raises(PackageError) as refusal:
        PartWriter(lambda _: None).begin(path)
    assert refusal.value.code is Code.PACKAGE_PATH


def _plain(index: bytes, data: bytes = b"", *, at: int | None = None, pad: bytes = b"\0") -> bytes:
    end = (len(data) if at is None else at).to_bytes(8, "big") + len(index).to_bytes(8, "big")
    return data + index + pad * (4096 - len(data) - len(index) - 16) + end


@pytest.mark.parametrize(
    "plain",
    [
        _plain(b'{"files":[]}', at=5000),
        _plain(b'{"files":[]}', at=1 << 63),
        _plain(b'{"files":[]}', b"xy"),
        _plain(b'{"files":[]}', pad=b"\1"),
        _plain(b'{"files":[{"bytes":2,"path":"../x"}]}', b"xy"),
        _plain(b'{"files":[{"bytes":1,"path":"x"},{"bytes":1,"path":"x"}]}', b"xy"),
        _plain(b'{"files":[{"bytes":1,"path":"x"},{"bytes":1,"path":"x/y"}]}', b"xy"),
        _plain(b'{"files":[{"bytes":3,"path":"x"}]}', b"xy"),
        _plain(b'{"files": []}'),
        bytes(4096),
    ],
    ids=["beyond", "far", "short", "padding", "outside", "twice", "folder", "long", "spaces", "zeros"],
)
def test_a_plaintext_that_is_not_files_and_an_index_is_refused(plain: bytes) -> None:
    part, row = seal(plain)
    assert code_of(lambda: opened(part, row).verify()) is Code.CHECKPOINT_TAMPERED


def test_a_part_of_a_length_that_no_part_has_is_not_unwrapped(whole: tuple[bytes, PartRow]) -> None:
    part, row = whole
    front = part[: front_length(part)]
    for size in (1, len(part) - 1, len(part) + 16):
        header = header_of(replace(row, bytes=size), row)
        assert (
            code_of(lambda header=header: unwrap(front, header, RESUME, rank=0, offset=0)) is Code.CHECKPOINT_TAMPERED
        )
