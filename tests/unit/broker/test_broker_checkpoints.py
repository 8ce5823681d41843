"""The store of checkpoints: what a line leaves there and reads again, and stories of those who would change it."""

from __future__ import annotations

import errno
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import update

from glasshouse.broker.client.owner_client import Reply, request
from glasshouse.broker.decide.checkpoints.kept_parts import ENDED_KEPT_US
from glasshouse.broker.decide.decisions import Effect
from glasshouse.broker.store.database_schema import lines, releases
from glasshouse.broker.store.uploads import KEPT_US, LEAST_BYTES, StoreSpace
from glasshouse.errors import Code, RefusedError, UsageError
from glasshouse.wire import dsse
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.statements import (
    HEADER_PATH,
    HEADER_TYPE,
    MAX_STATEMENT_BYTES,
    PART_PATH,
    READ_PATH,
    PartPiece,
    ReadRequest,
    Stored,
    Ticket,
)
from simulators.direct_gate import LineOwner
from simulators.local_broker import LocalBroker
from simulators.storing_gate import PIECE, Holder, StoringGate, answer, first_leg, group_leg, next_leg


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[StoringGate]:
    running = StoringGate(tmp_path / "data")
    yield running
    running.close()


@pytest.fixture
def owner(gate: StoringGate) -> LineOwner:
    return LineOwner(gate)


def refused(reply: Reply) -> Code:
    assert reply.status != 200
    return reply.problem().code


def checkpoints(gate: StoringGate) -> list[str]:
    """Return the checkpoints that are there whole, and have all of their parts, as leg-number."""
    names = gate.files()
    headers = [name.removesuffix(".header") for name in names if name.endswith(".header")]
    assert {name.rsplit("-", 3)[0] for name in names if name.count("-") == 4} >= set(headers)
    return headers


def test_what_a_leg_leaves_the_next_one_reads_as_it_was(gate: StoringGate, owner: LineOwner) -> None:
    first = first_leg(gate, owner, ranks=2)
    content = [bytes([rank]) * 9000 for rank in (0, 1)]
    parts = [first.seal(rank, content[rank]) for rank in (0, 1)]
    for rank, (part, sealed) in enumerate(parts):
        assert answer(first.send(part, first.claim(sealed.row, rank))) == {"bytes": len(part), "whole": True}
        assert answer(first.piece(first.claim(sealed.row, rank), b"")) == {"bytes": len(part), "whole": True}
    header = first.header(*(sealed.row for _, sealed in parts))
    stated = first.state(header)
    assert first.state(header).body == stated.body, "an answer that was lost is asked for again"
    assert first.count(header).status == 200
    assert refused(first.ask()) is Code.CHECKPOINT_INCOMPLETE, "it began from the beginning"
    second = next_leg(gate, owner, first)
    assert second.fetch() == header.encode()
    assert [second.fetch(rank) for rank in (0, 1)] == [part for part, _ in parts]
    assert {stat.S_IMODE(path.stat().st_mode) for path in gate.folder.rglob("*") if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in gate.folder.rglob("*") if path.is_dir()} == {0o700}


def test_the_machines_of_a_group_send_and_read_their_own_ranks_and_machine_0_states_it(gate: StoringGate) -> None:
    owner = LineOwner(gate, releases=4)
    zero, one = group_leg(gate, owner)
    (row, *_) = one.upload()
    assert refused(zero.piece(zero.claim(row, rank=2), b"x")) is Code.CHECKPOINT_FOREIGN, "another machine's rank"
    assert refused(one.piece(one.claim(row, rank=1), b"x")) is Code.CHECKPOINT_FOREIGN
    header = zero.header(*zero.upload(content=b"0"), *one.upload(content=b"1"))
    assert refused(one.state(header)) is Code.RUN_UNKNOWN
    assert zero.state(header).status == 200
    assert zero.count(header).status == 200
    gate.advance(661)
    later = group_leg(gate, owner, owner.order(owner.next(zero.start.id)))
    for machine, ranks in zip(later, ((0, 1), (2, 3)), strict=True):
        assert machine.fetch() == header.encode()
        assert [sha256(machine.fetch(rank)) for rank in ranks] == [header.parts[rank].sha256 for rank in ranks]
        assert refused(machine.ask((ranks[0] + 2) % 4)) is Code.CHECKPOINT_FOREIGN


def test_two_are_kept_and_an_older_one_goes_only_when_a_newer_is_counted(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner)
    leg.counted()
    leg.counted()
    coming = leg.checkpoint()
    assert checkpoints(gate) == ["1-1", "1-2", "1-3"]
    assert leg.count(coming).status == 200
    assert checkpoints(gate) == ["1-2", "1-3"]


def test_a_rewind_begins_from_the_older_one_which_stays_until_its_leg_counted_two(
    gate: StoringGate, owner: LineOwner
) -> None:
    first = first_leg(gate, owner)
    good, bad = first.counted(), first.counted()
    second = next_leg(gate, owner, first, back_to=good)
    assert second.fetch() == good.encode()
    assert refused(second.state(second.header(*second.upload(), previous=bad.digest))) is Code.CHECKPOINT_STALE
    second.counted()
    assert checkpoints(gate) == ["1-1", "2-3"], "what the line went on from, and not what it left"
    second.counted()
    assert checkpoints(gate) == ["2-3", "2-4"]


def test_an_upload_that_a_crash_of_the_gate_cut_begins_again_and_what_was_whole_stays(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner, ranks=2)
    (whole,) = leg.upload(0)
    part, sealed = leg.seal(1, b"x" * 9000)
    claim = leg.claim(sealed.row, 1)
    assert answer(leg.send(part, claim, until=2 * PIECE)) == {"bytes": 2 * PIECE, "whole": False}
    gate.again()
    assert len(gate.files()) == 1
    assert answer(leg.piece(claim, part[2 * PIECE :], 2 * PIECE)) == {"bytes": 0, "whole": False}
    assert refused(leg.state(leg.header(whole, sealed.row))) is Code.CHECKPOINT_INCOMPLETE
    assert answer(leg.piece(leg.claim(whole), b"")) == {"bytes": whole.bytes, "whole": True}
    leg.send(part, claim)
    header = leg.header(whole, sealed.row)
    stated = leg.state(header).content()
    gate.again()
    assert leg.state(header).content() == stated
    assert leg.count(header).status == 200
    gate.again()
    assert next_leg(gate, owner, leg).fetch(1) == part


def test_no_checkpoint_is_stated_that_is_not_here_whole_as_its_header_says(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner, ranks=2)
    part, sealed = leg.seal(0)
    rows = [sealed.row, leg.seal(1)[1].row]
    header = leg.header(*rows)
    assert refused(leg.state(header)) is Code.CHECKPOINT_INCOMPLETE, "before a part"
    leg.send(part, leg.claim(sealed.row), until=PIECE)
    assert refused(leg.state(header)) is Code.CHECKPOINT_INCOMPLETE, "within a part"
    leg.send(part, leg.claim(sealed.row))
    assert refused(leg.state(header)) is Code.CHECKPOINT_INCOMPLETE, "before the other part"
    rows = leg.upload(0, 1)
    for spoiled in (
        replace(rows[1], bytes=rows[1].bytes + 1),
        replace(rows[1], head_sha256=bytes(32)),
        replace(rows[1], sha256=bytes(32)),
        rows[0],
    ):
        assert refused(leg.state(leg.header(rows[0], spoiled))) is Code.CHECKPOINT_INCOMPLETE
    assert checkpoints(gate) == []
    assert leg.state(leg.header(*rows)).status == 200


@pytest.mark.parametrize("changes", [{"step": 7}, {"previous": bytes(32)}, {"deployment": "00" * 16}, {"ranks": 4}])
def test_parts_that_say_otherwise_than_their_header_are_foreign(
    gate: StoringGate, owner: LineOwner, changes: dict[str, object]
) -> None:
    leg = first_leg(gate, owner)
    rows = leg.upload(**changes)
    assert refused(leg.state(leg.header(*rows))) is Code.CHECKPOINT_FOREIGN


def test_a_header_of_another_package_or_world_is_foreign(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner)
    (row,) = leg.upload()
    for header in (
        leg.header(row, manifest_sha256=bytes(32)),
        leg.header(row, deployment="00" * 16),
        replace(leg.header(row), ranks=2, parts=(row, row)),
    ):
        assert refused(leg.state(header)) is Code.CHECKPOINT_FOREIGN


def test_a_part_of_another_rank_is_none_of_the_rank_that_the_header_gives_it(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner, ranks=2)
    (row,) = leg.upload(1)
    part, sealed = leg.seal(1)
    leg.send(part, leg.claim(sealed.row, 0))  # claimed for rank 0, and sealed for rank 1
    assert refused(leg.state(leg.header(sealed.row, row))) is Code.CHECKPOINT_FOREIGN


def test_the_machine_of_a_leg_that_was_superseded_reaches_nothing_any_more(gate: StoringGate, owner: LineOwner) -> None:
    first = first_leg(gate, owner, ranks=2)
    good = first.counted()
    (whole,) = first.upload(0)
    part, sealed = first.seal(1)
    claim = first.claim(sealed.row, 1)
    first.send(part, claim, until=PIECE)
    late = replace(first.header(whole, sealed.row))
    second = next_leg(gate, owner, first)
    assert gate.files() == [name for name in gate.files() if name.startswith("1-1")], "the uncounted is gone"
    for reply in (first.piece(claim, part[PIECE:], PIECE), first.state(late), first.ask()):
        assert refused(reply) is Code.LINE_SUPERSEDED
    assert second.fetch() == good.encode()
    second.counted()
    assert checkpoints(gate) == ["1-1", "2-2"]


def test_a_leg_that_the_database_has_forgotten_stays_fenced(
    gate: StoringGate, owner: LineOwner, tmp_path: Path
) -> None:
    first = first_leg(gate, owner)
    first.counted()
    backup = tmp_path / "backup"
    gate.close()
    shutil.copytree(gate.directory, backup)
    gate.open()
    newer = first.counted()
    second = next_leg(gate, owner, first)
    gate.close()
    shutil.rmtree(gate.directory)
    shutil.copytree(backup, gate.directory)
    gate.open()
    gate.settle()
    assert gate.memory.header(first.start.id, newer.digest) == newer, "nothing went back with the database"
    part, sealed = first.seal()
    for number in (2, 3):
        claim = first.claim(sealed.row, seq=number)
        assert refused(first.piece(claim, part)) in (Code.LINE_SUPERSEDED, Code.CHECKPOINT_STALE)
    assert refused(second.ask()) is Code.RUN_UNKNOWN, "whose release this database does not have"
    newest = gate.memory.newest(first.start.id)
    assert newest is not None
    assert (newest.leg, newest.ticket is not None) == (2, True)


def test_a_rewind_that_the_database_has_forgotten_stays(gate: StoringGate, owner: LineOwner, tmp_path: Path) -> None:
    first = first_leg(gate, owner)
    old, backup = first.counted(), tmp_path / "backup"
    first.counted()
    gate.close()
    shutil.copytree(gate.directory, backup)
    gate.open()
    second = next_leg(gate, owner, first, back_to=old)
    gate.close()
    shutil.rmtree(gate.directory)
    shutil.copytree(backup, gate.directory)
    gate.open()
    view = owner.client().line(first.start.id)
    assert (view.leg, view.seq, view.head_seq, view.head_step, view.head) == (2, 2, 1, old.step, old.digest)
    gate.advance(661)
    third = Holder(gate, owner.leg(owner.next(first.start.id)))
    assert (third.start.seq, third.start.counted, third.start.previous) == (1, 2, second.evidence.key_id)


def test_what_follows_a_ticket_that_only_the_gate_was_shown_stays_over_a_restart(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner)
    leg.counted()
    old = gate.memory.newest(leg.start.id)
    assert old is not None
    assert old.ticket is not None
    newer = replace(Ticket.parse(old.ticket.payload), seq=5, digest=sha256(b"5")).sign(gate.broker.key).encode()
    change = update(lines).values(ticket=newer, head=sha256(b"5"), head_seq=5)
    gate.broker.database.write(lambda connection: connection.execute(change))
    leg.seq, leg.head = 5, sha256(b"5")
    header = leg.checkpoint()
    gate.again()
    assert gate.memory.header(leg.start.id, header.digest) == header
    assert leg.count(header).status == 200
    assert checkpoints(gate) == ["1-6"]


def test_a_stranger_writes_reads_and_states_nothing(gate: StoringGate, owner: LineOwner) -> None:
    leg, other = first_leg(gate, owner), first_leg(gate, LineOwner(gate))
    part, sealed = leg.seal()
    claim = leg.claim(sealed.row)
    for forged, signer in (
        (claim, SigningKey.generate()),
        (claim, other.evidence),
        (replace(claim, run_id=other.run_id), other.evidence),  # with its own key, into another's line
        (replace(claim, line=other.start.id), leg.evidence),
        (replace(claim, run_id="00" * 16), leg.evidence),
        (replace(claim, leg=2), leg.evidence),
    ):
        assert refused(leg.piece(forged, part[:PIECE], signer=signer)) is Code.RUN_UNKNOWN
    assert refused(leg.piece(leg.claim(sealed.row, rank=1), part[:PIECE])) is Code.CHECKPOINT_FOREIGN
    signed = claim.sign(leg.evidence)
    changed = Envelope(
        payload_type=signed.payload_type,
        payload=replace(claim, bytes=1 << 40).encode(),
        signatures=signed.signatures,
    )
    piece = PartPiece(claim=changed, data=b"", start=0)
    assert refused(gate.send("POST", PART_PATH, piece.encode())) is Code.SIGNATURE
    header = leg.header(*leg.upload())
    for signer in (SigningKey.generate(), other.evidence):
        assert refused(leg.state(header, signer=signer)) is Code.RUN_UNKNOWN
    assert leg.count(leg.checkpoint()).status == 200
    second = next_leg(gate, owner, leg)
    assert refused(second.ask(signer=other.evidence)) is Code.RUN_UNKNOWN
    assert refused(second.ask(line=other.start.id)) is Code.RUN_UNKNOWN
    assert refused(second.ask(rank=1)) is Code.CHECKPOINT_FOREIGN


def test_a_part_is_as_long_as_announced_and_has_its_digest_or_nothing_of_it_is_kept(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner)
    part, sealed = leg.seal()
    short = leg.claim(replace(sealed.row, bytes=PIECE))
    assert refused(leg.piece(short, part[: PIECE + 1])) is Code.MESSAGE_INVALID
    assert refused(leg.piece(short, part[:2], PIECE - 1)) is Code.MESSAGE_INVALID
    assert refused(leg.piece(short, part[:PIECE])) is Code.UPLOAD_DAMAGED
    assert gate.files() == []
    for at in range(0, len(part), 411):
        spoiled = bytearray(part)
        spoiled[at] ^= 1
        leg.send(bytes(spoiled), leg.claim(sealed.row), until=len(part) - 1)
        assert refused(leg.piece(leg.claim(sealed.row), bytes(spoiled[-1:]), len(part) - 1)) is Code.UPLOAD_DAMAGED
    assert gate.files() == []
    for body in (b"", b"{}", b"[" * 1000, b"\xff", b"0" * 300_000):
        for path in (PART_PATH, HEADER_PATH, READ_PATH):
            assert refused(gate.send("POST", path, body)) is Code.MESSAGE_INVALID
    typed = dsse.sign(HEADER_TYPE, leg.claim(sealed.row).encode(), [leg.evidence])
    piece = PartPiece(claim=typed, data=b"", start=0)
    assert refused(gate.send("POST", PART_PATH, piece.encode())) is Code.MESSAGE_INVALID


def test_a_header_of_which_a_byte_was_changed_on_the_way_states_nothing(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner)
    header = leg.header(*leg.upload())
    body = dsse.sign(HEADER_TYPE, header.encode(), [leg.evidence]).encode()
    for at in range(0, len(body), 3):
        spoiled = bytearray(body)
        spoiled[at] ^= 1
        code = refused(gate.send("POST", HEADER_PATH, bytes(spoiled)))
        assert code in (Code.MESSAGE_INVALID, Code.SIGNATURE, Code.RUN_UNKNOWN), at
    assert checkpoints(gate) == []
    assert gate.send("POST", HEADER_PATH, body).status == 200


def test_pieces_out_of_turn_change_nothing(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner)
    part, sealed = leg.seal()
    claim = leg.claim(sealed.row)
    assert answer(leg.piece(claim, part[PIECE:], PIECE)) == {"bytes": 0, "whole": False}
    assert answer(leg.piece(claim, part[:PIECE])) == {"bytes": PIECE, "whole": False}
    assert answer(leg.piece(claim, part[:PIECE])) == {"bytes": PIECE, "whole": False}
    assert answer(leg.piece(claim, part[PIECE + 1 :], PIECE + 1)) == {"bytes": PIECE, "whole": False}
    assert answer(leg.piece(claim, part[PIECE:], PIECE)) == {"bytes": len(part), "whole": True}


def test_what_was_taken_from_beneath_the_store_is_begun_again_and_never_whole(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner)
    part, sealed = leg.seal()
    claim = leg.claim(sealed.row)
    with pytest.raises(UsageError, match="another process"):
        StoreSpace(gate.broker, folder=gate.folder)  # whose start would remove what is not whole
    for harm in (Path.unlink, lambda path: path.write_bytes(b"short")):
        assert answer(leg.piece(claim, part[:PIECE])) == {"bytes": PIECE, "whole": False}
        (begun,) = (gate.folder / "lines").glob("*/*.part")
        harm(begun)
        assert answer(leg.piece(claim, part[PIECE:], PIECE)) == {"bytes": 0, "whole": False}
    assert answer(leg.send(part, claim)) == {"bytes": len(part), "whole": True}
    assert leg.state(leg.header(sealed.row)).status == 200


def test_a_checkpoint_that_its_leg_gave_up_leaves_nothing_of_itself_in_the_next(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner)
    given_up = leg.checkpoint(content=b"first")
    leg.attempt = 2
    part, sealed = leg.seal(content=b"second")
    assert answer(leg.piece(leg.claim(sealed.row), part[:PIECE])) == {"bytes": PIECE, "whole": False}
    assert gate.memory.header(leg.start.id, given_up.digest) is None, "its part was begun again"
    assert refused(leg.state(given_up)) is Code.CHECKPOINT_INCOMPLETE
    assert refused(leg.count(given_up)) is Code.CHECKPOINT_INCOMPLETE, "nothing is counted that is not there"
    leg.attempt = 3
    leg.counted(content=b"third")
    assert len(gate.files()) == 2


@pytest.mark.parametrize("arrived", [True, False], ids=["that arrived", "that was held back"])
def test_a_recorded_piece_of_a_part_that_was_given_up_harms_nothing_that_came_after_it(
    gate: StoringGate, owner: LineOwner, arrived: bool
) -> None:
    leg = first_leg(gate, owner)
    part, sealed = leg.seal(content=b"given up")
    recorded = leg.claim(sealed.row)
    if arrived:
        leg.piece(recorded, part[:PIECE])
    leg.attempt = 2
    header = leg.checkpoint(content=b"in its place")
    for _ in range(2):
        assert refused(leg.piece(recorded, part[:PIECE])) is Code.CHECKPOINT_STALE
        assert refused(leg.piece(recorded, b"")) is Code.CHECKPOINT_STALE
        assert gate.memory.header(leg.start.id, header.digest) == header
        gate.again()
    assert leg.count(header).status == 200
    assert next_leg(gate, owner, leg).fetch() == header.encode()


def test_a_checkpoint_that_was_counted_is_not_begun_again(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner)
    part, sealed = leg.seal()
    decision = gate.store.part(PartPiece(claim=leg.claim(sealed.row).sign(leg.evidence), data=part, start=0).encode())
    header = leg.counted(content=b"counted while that waited")
    with pytest.raises(RefusedError) as refusal:
        decision.decide()
    assert refusal.value.code is Code.CHECKPOINT_STALE
    assert gate.memory.header(leg.start.id, header.digest) == header


@pytest.mark.parametrize("seq", [1, 3, 1 << 50])
def test_a_number_that_does_not_follow_is_stale(gate: StoringGate, owner: LineOwner, seq: int) -> None:
    leg = first_leg(gate, owner)
    last = leg.counted()
    (row,) = leg.upload()
    assert refused(leg.piece(leg.claim(row, seq=seq), b"x")) is Code.CHECKPOINT_STALE
    assert refused(leg.state(leg.header(row, seq=seq))) is Code.CHECKPOINT_STALE
    assert refused(leg.state(last)) is Code.CHECKPOINT_STALE
    assert refused(leg.state(leg.header(row, previous=None))) is Code.CHECKPOINT_STALE


def test_an_owner_s_checkpoints_take_no_more_than_their_share_and_a_full_disk_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = StoringGate(tmp_path / "data", limit_bytes=3 * LEAST_BYTES)
    owner = LineOwner(gate)
    leg = first_leg(gate, owner)
    part, sealed = leg.seal()
    with monkeypatch.context() as full:
        full.setattr("glasshouse.broker.store.uploads.os.open", _no_room)
        assert refused(leg.piece(leg.claim(sealed.row), part)) is Code.DISK_FULL
    (row,) = leg.upload()
    with monkeypatch.context() as full:
        full.setattr("glasshouse.broker.store.uploads.os.open", _no_room)
        assert refused(leg.state(leg.header(row))) is Code.DISK_FULL
    assert gate.space.checkpoints.total() == LEAST_BYTES, "a part that was begun again has no room of its own"
    leg.upload(content=b"another")
    assert gate.space.checkpoints.total() == LEAST_BYTES
    for _ in range(5):
        leg.counted()
        gate.settle()
    assert gate.space.checkpoints.total() == 2 * LEAST_BYTES
    part, sealed = leg.seal()
    assert refused(leg.piece(leg.claim(replace(sealed.row, bytes=LEAST_BYTES + 1)), part[:9])) is Code.OWNER_QUOTA
    other = first_leg(gate, LineOwner(gate))
    other.upload()
    assert refused(leg.piece(leg.claim(sealed.row), part[:9])) is Code.OWNER_QUOTA
    gate.again()
    assert gate.space.checkpoints.total() == 3 * LEAST_BYTES, "counted again from what is on the disk"
    gate.close()


def test_a_machine_that_announces_more_than_the_disk_has_fills_no_disk_of_its_owner(
    gate: StoringGate, owner: LineOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    leg = first_leg(gate, owner, ranks=3)
    rows = [leg.seal(rank)[1].row for rank in range(3)]
    huge = leg.piece(leg.claim(replace(rows[0], bytes=1 << 50)), b"x")
    assert refused(huge) is Code.DISK_FULL
    assert "the disk of this gate's store has room for" in str(huge.problem())
    assert gate.space.checkpoints.total() == 0, "nothing was reserved for it"
    gib, blocks = 1 << 30, {"f_frsize": 4096, "f_blocks": 100 << 18}
    disk = SimpleNamespace(f_bavail=50 << 18, **blocks)
    monkeypatch.setattr("glasshouse.broker.store.uploads.os.statvfs", lambda _folder: disk)

    def claimed(rank: int, size: int) -> int:
        return leg.piece(leg.claim(replace(rows[rank], bytes=size), rank), b"x").status

    assert claimed(0, 30 * gib) == 200
    assert claimed(1, 16 * gib) != 200, "what was announced is on its way, and 5 % are left"
    assert claimed(1, 15 * gib) == 200
    assert claimed(2, gib) != 200
    leg.attempt = 2
    disk.f_bavail = gib // 4096
    assert claimed(0, LEAST_BYTES) != 200, "the other is on its way"
    assert claimed(1, LEAST_BYTES) == 200, "half of what is free may be taken always"


def _no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_no_leg_comes_for_is_dropped_after_a_month_and_its_line_is_still_known(
    gate: StoringGate, owner: LineOwner
) -> None:
    old, young = first_leg(gate, owner), first_leg(gate, LineOwner(gate))
    old.counted()
    young.checkpoint()
    gate.advance(KEPT_US / 1e6 + 1)
    (gate.folder / "lines" / young.start.id.hex() / "now").touch()  # something came
    young.upload(content=b"again")
    assert all(name.startswith("1-1-0") or name == "now" for name in gate.files())
    assert gate.memory.header(old.start.id, old.head or b"") is None
    newest = gate.memory.newest(old.start.id)
    assert newest is not None
    assert newest.ticket is not None


def test_a_training_that_was_completed_leaves_no_checkpoints_a_day_later(gate: StoringGate, owner: LineOwner) -> None:
    done, open_ = first_leg(gate, owner), first_leg(gate, LineOwner(gate))
    done.counted()
    kept = open_.counted()
    for holder, outcome in ((done, "completed"), (open_, "interrupted")):
        change = update(releases).where(releases.c.run_id == holder.run_id).values(outcome=outcome)
        gate.broker.database.write(lambda connection, change=change: connection.execute(change))
    gate.again()
    assert len(gate.files()) == 4
    gate.advance(ENDED_KEPT_US / 1e6 + 1)
    gate.again()
    assert len(gate.files()) == 2
    assert gate.memory.header(open_.start.id, kept.digest) == kept


def test_what_changes_nothing_is_no_sign_of_life(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner)
    part, sealed = leg.seal()
    signed, effects = leg.claim(sealed.row).sign(leg.evidence), []
    for start, end in ((0, 9), (0, 9), (9, 99), (9, 99), (0, 9)):
        body = PartPiece(claim=signed, data=part[start:end], start=start).encode()
        effects.append(gate.store.part(body).effect)
        gate.send("POST", PART_PATH, body)
    assert [effect is Effect.CREDIT for effect in effects] == [False, False, True, False, False]
    header = leg.header(*leg.upload(content=b"x" * 300_000))
    body = dsse.sign(HEADER_TYPE, header.encode(), [leg.evidence]).encode()
    assert gate.store.header(body).effect is Effect.CHARGE
    assert leg.state(header).status == 200
    assert leg.count(header).status == 200
    second, effects = next_leg(gate, owner, leg), []
    size = 0
    for start in (0, 0, size := 176 * 1024, size):
        body = ReadRequest(line=leg.start.id, rank=0, run_id=second.run_id, start=start).sign(second.evidence).encode()
        effects.append(gate.store.read(body).effect)
        gate.send("POST", READ_PATH, body)
    assert [effect is Effect.CREDIT for effect in effects] == [False, False, True, False]


def test_a_gate_does_not_go_on_without_the_note_of_a_line_or_beside_a_damaged_one(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner)
    leg.counted()
    note = gate.folder / "lines" / leg.start.id.hex() / "newest.json"
    good = note.read_bytes()
    gate.settle()
    for bad in (b"", good[:-1], good.replace(b'"leg":1', b'"leg":0.5')):
        note.write_bytes(bad)
        with pytest.raises(UsageError, match="note of a line"):
            gate.again()
        gate.space.close()
    # Gone, it would be a line that was never heard of, whose old machine is fenced no more.
    away = note.parent.parent / "away"
    note.write_bytes(good)
    note.rename(away)
    for left in list(note.parent.iterdir()):
        others = [path for path in note.parent.iterdir() if path != left]
        for path in others:
            path.rename(path.parent.parent / path.name)
        with pytest.raises(UsageError, match=r"note of a line .* is gone"):
            gate.open()
        gate.space.close()
        for path in others:
            (path.parent.parent / path.name).rename(path)
    away.rename(note)
    gate.open()


def test_a_line_whose_first_note_a_crash_cut_is_begun_again(gate: StoringGate, owner: LineOwner) -> None:
    machine = owner.leg()
    folder = gate.folder / "lines" / machine.line.hex()
    folder.mkdir(mode=0o700)
    (folder / "newest.json.0123456789abcdef.part").touch(mode=0o600)
    gate.again()
    assert Holder(gate, machine).counted().seq == 1


def test_who_holds_the_store_s_disk_can_take_away_and_change_nothing_unseen(
    gate: StoringGate, owner: LineOwner
) -> None:
    leg = first_leg(gate, owner)
    header = leg.counted()
    second = next_leg(gate, owner, leg)
    folder = gate.folder / "lines" / leg.start.id.hex()
    (part,) = folder.glob("1-1-0-*")
    content = part.read_bytes()
    part.write_bytes(content[:-1] + b"x")
    assert sha256(second.fetch(0)) != header.parts[0].sha256, "what the custodian and the worker compare"
    part.unlink()
    assert refused(second.ask(0)) is Code.CHECKPOINT_INCOMPLETE
    assert second.fetch() == header.encode()
    for other in (replace(header, step=9).encode(), header.encode()[:-1], b""):
        (folder / "1-1.header").write_bytes(other)
        assert refused(second.ask()) is Code.CHECKPOINT_INCOMPLETE
    gate.again()


def test_a_statement_of_another_key_is_not_the_store_s(gate: StoringGate, owner: LineOwner) -> None:
    leg = first_leg(gate, owner)
    header = leg.header(*leg.upload())
    stated = Envelope.parse(leg.state(header).content(), max_bytes=MAX_STATEMENT_BYTES)
    assert stated.signatures[0][0] == gate.store.key.key_id
    said = Stored.parse(stated.payload)
    assert (said.line, said.leg, said.seq, said.digest) == (leg.start.id, 1, 1, header.digest)
    key = gate.store.key.public
    gate.again()
    assert gate.store.key.public == key, "it follows from the broker's"
    assert key != gate.broker_public


def test_a_gate_answers_for_checkpoints_where_it_keeps_them_and_names_its_store(tmp_path: Path) -> None:
    for folder, store_bytes in (("with", 1 << 20), ("without", None)):
        with LocalBroker(tmp_path / folder, owners=(bytes(32),), store_bytes=store_bytes) as broker:
            status = 400 if store_bytes else 404
            for path in (PART_PATH, HEADER_PATH, READ_PATH):
                assert request(broker.runtime_url, "POST", path, b"{}").status == status
                assert broker.gate(None)._send("POST", path, b"{}").status == status
            public = None if broker.checkpoints is None else broker.checkpoints.key.public
            assert broker.client().store_public() == broker.gate(None).store_public() == public
            assert (public is None) == (store_bytes is None)
