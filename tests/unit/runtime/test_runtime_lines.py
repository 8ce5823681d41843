"""Checkpoints on their way from a worker to the gate: what may come when, and what becomes of it on a bad way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, RefusedError, RunError
from glasshouse.package import outputs
from glasshouse.package.limits import CheckpointLimits
from glasshouse.runtime.keys import outdir
from glasshouse.runtime.lines import checkpoint_keeper
from glasshouse.runtime.lines.part_messages import OtherPart, PartBegins, PartEnds
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.checkpoint import PartHeader, front_length
from glasshouse.wire.lines.statements import COUNT_PATH, HEADER_PATH, PART_PATH, Stored, Ticket
from simulators.line_keeper_bench import LegBench, StoreAndGate, away

PLAIN = bytes(range(256)) * 32
TWO_RANKS = Group(id=bytes(32), machines=1, machine=0, ranks=2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_keeper, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(checkpoint_keeper, "_LONGEST_RETRY_S", 0.02)


Make = Callable[..., LegBench]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes machines, and ends them."""
    made: list[LegBench] = []

    def one(*args: Any, **options: Any) -> LegBench:
        made.append(LegBench(tmp_path / f"out-{len(made)}", *args, **options))
        return made[-1]

    yield one
    for bench in made:
        bench.keeper.close()
        bench.intake.discard()


@pytest.fixture
def bench(make: Make) -> LegBench:
    return make()


def test_a_checkpoint_is_sealed_kept_and_counted_and_the_next_may_come_after_its_interval(bench: LegBench) -> None:
    assert bench.told == [{"type": "line", "left": 5, "previous": None, "seq": 1, "wait_us": 0}]
    kept = bench.part(PLAIN)
    (path,) = bench.folder.iterdir()
    sealed = path.read_bytes()
    header = PartHeader.parse_front(sealed[: front_length(sealed)])
    assert {"type": "part-kept", "rank": 0, "bytes": len(sealed)}.items() <= kept.items()
    assert len(header.recipients) == 2
    assert PLAIN[:512] not in sealed
    bench.there()
    bench.settle()
    (ticket,) = bench.gate.tickets
    assert bench.settled == [(ticket, None)]
    assert bench.gate.asked == [PART_PATH, HEADER_PATH, COUNT_PATH]
    assert list(bench.folder.iterdir()) == []
    assert bench.told[-1] == {
        "type": "line",
        "left": 4,
        "previous": ticket.digest.hex(),
        "seq": 2,
        "wait_us": 60_000_000,
    }
    bench.checkpoint(step=20)
    bench.settle(2)
    assert [ticket.seq for ticket in bench.gate.tickets] == [1, 2]


def test_a_large_part_leaves_in_pieces_and_goes_on_where_the_store_is(bench: LegBench) -> None:
    plain = bytes(1 << 20)
    bench.gate.faults = [away, lambda _path, answer: answer, away]
    bench.checkpoint(plain)
    bench.settle()
    assert bench.gate.asked.count(PART_PATH) >= 7
    assert len(bench.gate.tickets) == 1
    assert bench.troubles == [Code.BROKER_UNREACHABLE]


def test_while_the_gate_is_away_nothing_is_lost_and_the_same_bytes_are_sent_again(bench: LegBench) -> None:
    bench.gate.faults = [away] * 5
    bench.checkpoint()
    bench.settle()
    assert len(set(bench.gate.bodies)) == 3


def test_a_ticket_whose_answer_was_lost_is_asked_for_again_and_is_the_same(bench: LegBench) -> None:
    bench.gate.faults = [lambda _path, answer: answer] * 2 + [away] * 3
    bench.checkpoint()
    bench.settle()
    assert bench.gate.asked.count(COUNT_PATH) == 4
    assert bench.settled == [(bench.gate.tickets[0], None)]
    assert len(bench.gate.tickets) == 1


@pytest.mark.parametrize("requests", [0, 1, 2], ids=["a part", "the header", "the count"])
def test_what_the_gate_refuses_is_given_up_and_the_number_is_used_again(bench: LegBench, requests: int) -> None:
    honest: list[Any] = [lambda _path, answer: answer] * requests
    bench.gate.faults = [*honest, lambda _path, _answer: RefusedError(Code.OWNER_QUOTA, "no room")]
    bench.checkpoint()
    bench.settle()
    assert bench.settled == [(None, Code.OWNER_QUOTA)]
    assert bench.told[-1] == {
        "type": "line",
        "left": 4,
        "previous": None,
        "refused": "owner-quota",
        "seq": 1,
        "wait_us": 60_000_000,
    }
    assert list(bench.folder.iterdir()) == []


def test_one_that_is_refused_while_its_other_parts_still_come_is_given_up_when_they_are_there(make: Make) -> None:
    bench = make(group=TWO_RANKS)
    bench.gate.faults = [lambda _path, _answer: RefusedError(Code.OWNER_QUOTA, "no room")]
    bench.part(PLAIN, rank=1)
    bench.loop.sleep(0.05)
    bench.part(PLAIN, rank=0)
    assert bench.settled == []
    bench.there()
    assert bench.settled == [(None, Code.OWNER_QUOTA)]
    assert bench.gate.asked == [PART_PATH]


def no_room_after(sizes: list[int]) -> Callable[..., object]:
    """Return a part's file on a disk with room for so many writes."""

    def write(*_: object) -> int:
        if not sizes:
            raise OSError(errno.ENOSPC, "no room")
        return sizes.pop()

    return lambda *_args, **_options: SimpleNamespace(write=write, flush=lambda: None, close=lambda: None)


@pytest.mark.parametrize("written", [0, 1], ids=["at its beginning", "within it"])
def test_a_disk_that_is_full_costs_the_checkpoint_and_not_the_training(
    make: Make, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    bench = make(group=TWO_RANKS)
    bench.part(PLAIN, rank=1)
    with monkeypatch.context() as full:
        full.setattr(outdir.os, "fdopen", lambda fd, *_a, **_o: (os.close(fd), no_room_after([1 << 30] * written)())[1])
        full.setattr(outputs, "write_all", lambda out, data: out.write(data))
        kept = bench.part(PLAIN * 100)
    assert kept["bytes"] == 1, "it is not what was sealed"
    bench.there()
    assert bench.settled == [(None, Code.DISK_FULL)]
    assert list(bench.folder.iterdir()) == []
    bench.clock_s += 60
    bench.part(PLAIN, rank=1)
    bench.part(PLAIN)
    bench.there()
    bench.settle(2)
    assert len(bench.gate.tickets) == 1


def test_silence_gives_a_checkpoint_up_but_not_one_that_may_be_counted(make: Make) -> None:
    bench = make(patience_s=0.1)
    bench.gate.faults = [away] * 1000
    bench.checkpoint()
    bench.settle()
    assert bench.settled == [(None, Code.BROKER_UNREACHABLE)]
    bench.gate.faults = [lambda _path, answer: answer] * 2 + [away] * 30
    bench.checkpoint(step=20)
    bench.settle(2)
    assert bench.settled[1] == (bench.gate.tickets[0], None)
    assert bench.gate.asked.count(COUNT_PATH) == 31


@pytest.mark.parametrize("code", [Code.OWNER_QUOTA, Code.CHECKPOINT_STALE, Code.CHECKPOINT_INCOMPLETE])
def test_a_forged_refusal_of_a_count_does_not_end_the_checkpoints_of_a_leg(make: Make, code: Code) -> None:
    bench = make(group=TWO_RANKS)

    def save(step: int) -> None:
        bench.clock_s += 60
        before = len(bench.settled)
        for rank in (1, 0):
            bench.part(PLAIN, rank=rank, step=step)
            bench.loop.sleep(0.05)  # what is refused is so while others come
        bench.there(step=step)
        bench.settle(before + 1)

    def forged_once(path: str, answer: bytes) -> bytes | GlasshouseError:
        if path != COUNT_PATH:
            bench.gate.faults.append(forged_once)
            return answer
        return RefusedError(code, "any hop on the way can send one, although the gate has counted")

    bench.gate.faults = [forged_once]
    save(10)
    (ticket,) = bench.gate.tickets
    if code is Code.OWNER_QUOTA:
        assert bench.settled == [(None, code)]
        save(20)
        assert bench.settled[1:] == [(ticket, Code.CHECKPOINT_STALE)]
        assert bench.told[-1].items() >= {"refused": "checkpoint-stale", "previous": ticket.digest.hex()}.items()
    else:
        assert bench.settled == [(ticket, None)]
    assert bench.told[-1]["seq"] == 2
    save(30)
    assert bench.settled[-1] == (bench.gate.tickets[1], None)
    assert bench.gate.tickets[1].previous == ticket.digest


def test_at_the_end_the_machine_waits_for_the_one_on_its_way_and_not_for_ever(make: Make) -> None:
    bench = make()
    bench.gate.faults = [away] * 5
    bench.checkpoint()
    bench.keeper.finish(5.0)
    assert bench.settled == [(bench.gate.tickets[0], None)]
    silent = make()
    silent.gate.faults = [lambda _path, answer: answer] * 2 + [away] * 1000
    silent.checkpoint()
    silent.keeper.finish(0.1)
    assert silent.settled == [(None, Code.BROKER_UNREACHABLE)]
    unfinished = make()
    unfinished.part(PLAIN)
    unfinished.keeper.finish(5.0)
    assert unfinished.settled == []


def test_a_leg_that_was_superseded_ends(bench: LegBench) -> None:
    bench.gate.faults = [lambda _path, _answer: RefusedError(Code.LINE_SUPERSEDED, "fenced")]
    bench.checkpoint()
    with pytest.raises(RefusedError) as caught:
        bench.settle()
    assert caught.value.code is Code.LINE_SUPERSEDED


def test_a_part_that_was_damaged_in_the_store_is_sent_again(bench: LegBench) -> None:
    def damaged(_path: str, _answer: bytes) -> GlasshouseError:
        bench.gate.parts.clear()
        return RefusedError(Code.UPLOAD_DAMAGED, "damaged")

    bench.gate.faults = [damaged] * 2
    bench.checkpoint()
    bench.settle()
    assert len(bench.gate.tickets) == 1
    bench.gate.faults = [damaged] * 100
    bench.checkpoint(step=20)
    bench.settle(2)
    assert bench.settled[1] == (None, Code.UPLOAD_DAMAGED)


def test_a_part_that_the_store_no_longer_has_is_sent_again(bench: LegBench) -> None:
    def forgotten(_path: str, answer: bytes) -> bytes:
        bench.gate.parts.clear()
        return answer

    bench.gate.faults = [forgotten]
    bench.checkpoint()
    bench.settle()
    assert len(bench.gate.tickets) == 1


def changed(kind: type[Stored] | type[Ticket], **members: Any) -> Callable[[LegBench], Any]:
    """Return a fault: a statement with other members, signed by the key that signs such ones."""

    def fault(bench: LegBench) -> Any:
        key = bench.gate.store if kind is Stored else bench.gate.broker

        def answer(_path: str, honest: bytes) -> bytes:
            found = kind.parse_signed(honest, key.public)
            return replace(found, **members).sign(key).encode()

        return answer

    return fault


def forged(_bench: LegBench) -> Any:
    def answer(_path: str, honest: bytes) -> bytes:
        envelope = Envelope.parse(honest, max_bytes=8192)
        kind = Stored if "stored" in envelope.payload_type else Ticket
        return kind.parse(envelope.payload).sign(SigningKey.generate()).encode()

    return answer


LIES: dict[str, tuple[int, Callable[[LegBench], Any]]] = {
    "stored, by another key": (1, forged),
    "stored, of another digest": (1, changed(Stored, digest=bytes(32))),
    "stored, of another number": (1, changed(Stored, seq=9)),
    "a ticket by another key": (2, forged),
    "a ticket of another digest": (2, changed(Ticket, digest=bytes(32))),
    "a ticket of another step": (2, changed(Ticket, step=9)),
    "a ticket of another holder": (2, changed(Ticket, holder="00" * 16)),
    "a ticket of another package": (2, changed(Ticket, manifest_sha256=bytes(32))),
    "a ticket of another before": (2, changed(Ticket, previous=bytes(32))),
    "a stored statement for a ticket": (2, lambda _bench: lambda _path, _answer: b"{}"),
    "how much of a part, in other words": (0, lambda _bench: lambda _path, _answer: b'{"bytes":-1}'),
    "no progress": (0, lambda _bench: lambda _path, _answer: b'{"bytes":0,"whole":false}'),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_the_store_or_the_gate_did_not_say_counts_nothing_and_is_asked_for_again(
    bench: LegBench, lie: str
) -> None:
    before, fault = LIES[lie]
    bench.gate.faults = [lambda _path, answer: answer] * before + [fault(bench)]  # type: ignore[list-item]
    bench.checkpoint()
    bench.settle()
    assert bench.settled == [(bench.gate.tickets[0], None)]
    assert len(bench.troubles) == 1
    assert bench.troubles[0] in (Code.BROKER_PROTOCOL, Code.BROKER_UNTRUSTED)


def test_machine_0_writes_the_header_when_the_parts_of_the_other_machine_are_there(make: Make) -> None:
    gate, groups = StoreAndGate(), [Group(id=bytes(32), machines=2, machine=one, ranks=1) for one in range(2)]
    first, second = (make(gate, group=group) for group in groups)

    def lost(_path: str, _answer: bytes) -> GlasshouseError:
        gate.parts.clear()
        return away("", b"")

    gate.faults = [lost]
    second.part(PLAIN, rank=1, previous=None)
    kept = second.intake._rows[1]
    first.gate.loop = first.loop
    first.part(PLAIN)
    first.there(others=(OtherPart(bytes=kept.bytes, head_sha256=kept.head_sha256, sha256=kept.sha256, rank=1),))
    first.loop.sleep(0.1)
    assert Code.CHECKPOINT_INCOMPLETE in first.troubles
    gate.loop = second.loop
    second.there()
    second.loop.sleep(0.1)
    assert second.settled == [(None, None)], "it has no header"
    assert second.told[-1]["seq"] == 1, "which were counted it is not told"
    second.clock_s += 60
    assert refused_as(lambda: second.part(PLAIN, rank=1, seq=3)) is Code.WORKER_FAILED, "a number says one bit"
    gate.loop = first.loop
    first.settle()
    assert first.settled == [(gate.tickets[0], None)]


def refused_as(act: Callable[[], object]) -> Code:
    with pytest.raises(RunError) as caught:
        act()
    return caught.value.code


def test_a_checkpoint_before_its_time_or_one_too_many_is_refused(make: Make) -> None:
    bench = make(limits=CheckpointLimits(every_s=60, most=2, bytes=8192))
    bench.checkpoint()
    bench.settle()
    bench.clock_s += 59.9
    assert refused_as(lambda: bench.part(PLAIN)) is Code.CHECKPOINT_REFUSED
    bench.clock_s += 0.1
    bench.checkpoint(step=20)
    bench.settle(2)
    bench.clock_s += 60
    assert bench.told[-1]["left"] == 0
    assert refused_as(lambda: bench.part(PLAIN)) is Code.CHECKPOINT_REFUSED


def test_a_part_that_is_larger_than_the_job_allows_is_refused(make: Make) -> None:
    bench = make(limits=CheckpointLimits(every_s=60, most=2, bytes=8192))
    assert refused_as(lambda: bench.part(bytes(12288))) is Code.CHECKPOINT_REFUSED


def test_a_job_that_is_to_stop_may_begin_its_last_one_at_once_and_no_other(bench: LegBench) -> None:
    bench.checkpoint()
    bench.settle()
    hurried = bench.intake.hurry()
    assert hurried is not None
    assert hurried["wait_us"] == 0
    bench.told.append(hurried)
    bench.checkpoint(step=20)
    bench.settle(2)
    assert bench.told[-1]["wait_us"] == 60_000_000


def begun(bench: LegBench, **changes: Any) -> None:
    bench.intake.begin(PartBegins(**{"previous": None, "rank": 0, "seq": 1, "step": 10, **changes}))


def ended(bench: LegBench, plain: bytes, **changes: Any) -> None:
    begun(bench, rank=1)
    bench.intake.data(memoryview(bytearray(plain)))
    bench.intake.end(PartEnds(**{"size": len(plain), **changes}))


def under_way(bench: LegBench) -> None:
    bench.checkpoint()
    begun(bench)


BREACHES: dict[str, Callable[[LegBench], object]] = {
    "a second part within the first": lambda bench: (begun(bench, rank=1), begun(bench)),
    "a second part of a rank": lambda bench: (bench.part(PLAIN, rank=1), bench.part(PLAIN, rank=1)),
    "a third part of two ranks": lambda bench: (bench.part(PLAIN, rank=1), bench.part(PLAIN), bench.part(PLAIN)),
    "ranks in another order, which would say something": lambda bench: begun(bench, rank=0),
    "a part of a rank elsewhere": lambda bench: begun(bench, rank=2),
    "another number": lambda bench: begun(bench, rank=1, seq=2),
    "another checkpoint before": lambda bench: begun(bench, rank=1, previous=bytes(32)),
    "another step in the second part": lambda bench: (bench.part(PLAIN, rank=1), begun(bench, step=11)),
    "data without a part": lambda bench: bench.intake.data(memoryview(bytearray(9))),
    "an end without a part": lambda bench: bench.intake.end(PartEnds(size=1)),
    "an end at another length": lambda bench: ended(bench, PLAIN, size=len(PLAIN) + 1),
    "a size that is not padded": lambda bench: ended(bench, bytes(4097)),
    "all there without one rank's": lambda bench: (bench.part(PLAIN, rank=1), bench.there()),
    "all there within a part": lambda bench: (bench.part(PLAIN, rank=1), begun(bench), bench.there()),
    "all there at another step": lambda bench: (bench.part(PLAIN, rank=1), bench.part(PLAIN), bench.there(step=9)),
    "a part of a machine that is not there": lambda bench: (
        bench.part(PLAIN, rank=1),
        bench.part(PLAIN),
        bench.there(others=(OtherPart(bytes=1, head_sha256=bytes(32), sha256=bytes(32), rank=2),)),
    ),
    "one without a permission": lambda bench: (
        bench.part(PLAIN, rank=1),
        bench.part(PLAIN),
        bench.there(),
        begun(bench, rank=1),
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_worker_that_breaks_the_order_ends_the_run(make: Make, breach: str) -> None:
    bench = make(group=TWO_RANKS)
    assert refused_as(lambda: BREACHES[breach](bench)) is Code.WORKER_FAILED
    bench.intake.discard()
    assert [path.name for path in bench.folder.iterdir() if path.suffix == ".partial"] == []
