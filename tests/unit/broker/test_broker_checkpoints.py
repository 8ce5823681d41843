"""The store of checkpoints: what a line leaves there and reads again, and what it takes of no leg or stranger."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.broker.client.owner_client import request
from glasshouse.broker.decide.decisions import Effect
from glasshouse.errors import Code, RefusedError
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
)
from simulators.direct_gate import LineOwner
from simulators.local_broker import LocalBroker
from simulators.storing_gate import (
    PIECE,
    StoringGate,
    answer,
    checkpoints,
    first_leg,
    group_leg,
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
