"""What a store of checkpoints keeps: over a restart, a database put back, time, a full disk and a changed one."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import update

from glasshouse.broker.decide.checkpoints.kept_parts import ENDED_KEPT_US
from glasshouse.broker.store.database_schema import lines, releases
from glasshouse.broker.store.uploads import KEPT_US, LEAST_BYTES, StoreSpace
from glasshouse.errors import Code, UsageError
from glasshouse.wire.crypto import sha256
from glasshouse.wire.lines.statements import (
    Ticket,
)
from simulators.direct_gate import LineOwner
from simulators.storing_gate import (
    PIECE,
    Holder,
    StoringGate,
    answer,
    checkpoints,
    first_leg,
    next_leg,
    refused,
)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[StoringGate]:
    running = StoringGate(tmp_path / "data")
    yield running
    running.close()


@pytest.fixture
def owner(gate: StoringGate) -> LineOwner:
    return LineOwner(gate)


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
