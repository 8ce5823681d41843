"""What runs leave, kept at a gate: what is taken, and what is not."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.errors import Code
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.stored import MAX_PART_BYTES
from glasshouse.providers.serve.storing import _NotKeptError
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from simulators.gate_store import (
    ALICE,
    MALLORY,
    MIB,
    OWNERS,
    answered,
    content_of,
    files_in,
    part_of,
    post,
    refused,
    run_of,
    storing,
)
from simulators.left_run import noise
from simulators.local_broker import LocalBroker
from tools.raw_http import head, problem


def test_what_a_run_leaves_is_at_its_gate_while_it_goes_on_and_after_its_machine_is_gone(
    gate: LocalBroker, tmp_path: Path
) -> None:
    run = run_of(gate, ALICE, tmp_path)
    sends, alice = storing(gate, run), gate.gate(ALICE)
    assert alice.stores()
    first, second = noise(3 * MAX_PART_BYTES + 17), noise(2 * MIB)
    run.output(first)
    run.segment(noise(500))
    assert sends.look(ended=False)
    assert alice.stored(run.run_id) == {}, "no head that was countersigned covers it yet"
    run.countersign()
    assert sends.look(ended=False)
    assert set(alice.stored(run.run_id)) == {"outputs/0000.sealed", "log/0000.sealed"}
    run.output(second)
    run.end()
    assert not sends.whole
    assert sends.look(ended=True)
    assert sends.done
    assert sends.whole
    there = {name: (run.out / name).read_bytes() for name in alice.stored(run.run_id)}
    assert len(there) == 6
    assert {name: content_of(alice, run, name) for name in there} == there
    modes = {stat.S_IMODE(path.stat().st_mode) for path in gate.store.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert alice.forget_stored(run.run_id) == 6
    assert alice.stored(run.run_id) == {}
    again = storing(gate, run)
    again.look(ended=True)
    assert alice.stored(run.run_id) == {}, "its owner has it"
    assert not again.whole
    assert files_in(gate.store) == []


def test_what_a_run_without_a_receipt_left_is_not_whole_at_its_gate(gate: LocalBroker, tmp_path: Path) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.output(noise(1000))
    run.countersign()
    sends = storing(gate, run)
    assert sends.look(ended=True)
    assert sends.done, "there is nothing more to send"
    assert not sends.whole


def test_a_gate_that_keeps_nothing_says_so_and_is_not_asked_again(tmp_path: Path) -> None:
    with LocalBroker(tmp_path, owners=OWNERS) as gate:
        run = run_of(gate, ALICE, tmp_path)
        run.output(noise(10))
        run.countersign()
        assert not gate.gate(ALICE).stores()
        assert gate.gate(ALICE).stored(run.run_id) == {}
        with pytest.raises(_NotKeptError):
            storing(gate, run).look(ended=False)


def test_who_has_the_run_s_log_cannot_store_anything_else_with_it(gate: LocalBroker, tmp_path: Path) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.output(noise(100))
    head = run.countersign()
    good = part_of(run, "outputs/0000.sealed", head)
    other = noise(100)
    (run.out / "outputs" / "0001.sealed").write_bytes(other)
    log = part_of(run, "events.log", head)
    stranger = part_of(run, "outputs/0000.sealed", head, event=0)
    for forged in (
        replace(good, data=other, sha256=sha256(other)),  # another content than the log names
        replace(good, size=99, data=good.data[:99]),
        replace(good, name="log/0000.sealed"),
        replace(good, name="outputs/0001.sealed"),
        replace(good, name="outputs/00000.sealed"),
        replace(good, proof=good.proof[:-1]),
        replace(good, proof=(bytes(32), *good.proof[1:])),
        replace(good, event=replace(good.event, time_us=good.event.time_us + 1)),
        replace(good, event=stranger.event, proof=stranger.proof),
        log,  # of a run that has not ended
    ):
        assert refused(post(gate, forged.encode())) is Code.HEAD_INCONSISTENT
    assert gate.count("stored") == 0
    assert files_in(gate.store) == []


def test_a_head_that_this_gate_did_not_countersign_for_that_run_opens_nothing(
    gate: LocalBroker, tmp_path: Path
) -> None:
    run, theirs = run_of(gate, ALICE, tmp_path), run_of(gate, MALLORY, tmp_path)
    run.output(noise(100))
    theirs.output(noise(100))
    head, other = run.countersign(), theirs.countersign()
    good = part_of(run, "outputs/0000.sealed", head)
    assert refused(post(gate, replace(good, head=Envelope.parse(other, max_bytes=8192)).encode())) is (
        Code.HEAD_INCONSISTENT
    )
    signed_alone = Envelope.parse(run.reporter.final, max_bytes=8192)
    payload = decode(good.head.payload, max_bytes=8192)
    assert isinstance(payload, dict)
    by_another = SigningKey.generate()
    forged = dsse.sign(good.head.payload_type, encode(payload), [by_another])
    for wrong in (signed_alone, forged):
        assert refused(post(gate, replace(good, head=wrong).encode())) is Code.RUN_UNKNOWN
    assert gate.count("stored") == 0


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("name", "../receipt.json"),
        ("name", "outputs/../receipt.json"),
        ("name", "runtime.log"),
        ("bytes", 0),
        ("from", 1),
        ("proof", ["AA"]),
        ("event", {}),
        ("more", 1),
    ],
)
def test_what_is_no_part_of_a_file_is_refused_unread(
    gate: LocalBroker, tmp_path: Path, member: str, value: object
) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.output(noise(100))
    said = decode(part_of(run, "outputs/0000.sealed", run.countersign()).encode(), max_bytes=1 << 18)
    assert isinstance(said, dict)
    body = encode({**said, member: value})  # type: ignore[dict-item]
    assert refused(post(gate, body)) is Code.MESSAGE_INVALID


def test_what_is_too_long_for_a_part_is_refused_by_its_length_alone(gate: LocalBroker) -> None:
    """Nothing of it is sent: an answer that comes before the end of what is sent may be lost with the connection."""
    with gate.gate(None)._connect() as line:
        line.sendall(head("/v1/store", f"Content-Length: {256 * 1024 + 1}", "Content-Type: application/json"))
        answer = b"".join(iter(lambda: line.recv(65536), b""))
    assert problem(answer).code is Code.MESSAGE_TOO_LARGE


def test_a_file_goes_on_where_it_stopped_and_anew_where_the_gate_was_restarted(tmp_path: Path) -> None:
    with LocalBroker(tmp_path, owners=OWNERS, store_bytes=8 * MIB) as gate:
        run = run_of(gate, ALICE, tmp_path)
        run.output(noise(300_000))
        head = run.countersign()
        name = "outputs/0000.sealed"
        first = part_of(run, name, head, size=1000)
        assert answered(post(gate, first.encode())) == {"bytes": 1000, "whole": False}
        assert answered(post(gate, first.encode())) == {"bytes": 1000, "whole": False}
        beyond = part_of(run, name, head, start=2000)
        assert answered(post(gate, beyond.encode())) == {"bytes": 1000, "whole": False}
        rows = gate.rows("SELECT bytes, whole FROM stored")
        assert rows == [(300_000, 0)], "all of it is reserved"
        data = gate.data
    lost = tmp_path / "store" / ("ab" * 16)
    lost.mkdir()
    for stray in ("outputs-0000.sealed", "log-0003.sealed.part", "events.log"):
        (lost / stray).write_bytes(b"of no run that is recorded")
    with LocalBroker(tmp_path, owners=OWNERS, store_bytes=8 * MIB) as gate:
        assert gate.data == data
        assert gate.count("stored") == 0
        assert files_in(gate.store) == []
        assert answered(post(gate, beyond.encode())) == {"bytes": 0, "whole": False}
        assert storing(gate, run).look(ended=False)
        assert content_of(gate.gate(ALICE), run, name) == (run.out / name).read_bytes()
        assert answered(post(gate, first.encode())) == {"bytes": 300_000, "whole": True}


def test_bytes_that_arrive_damaged_are_not_kept(gate: LocalBroker, tmp_path: Path) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.output(noise(1000))
    good = part_of(run, "outputs/0000.sealed", run.countersign())
    assert refused(post(gate, replace(good, data=noise(1000)).encode())) is Code.UPLOAD_DAMAGED
    assert gate.count("stored") == 0
    assert answered(post(gate, good.encode())) == {"bytes": 1000, "whole": True}


def test_the_receipt_decides_which_outputs_stay(gate: LocalBroker, tmp_path: Path) -> None:
    run = run_of(gate, ALICE, tmp_path)
    kept = run.output(noise(1000))
    run.output(noise(1000))
    head = run.countersign()
    sends = storing(gate, run)
    assert sends.look(ended=False)
    assert len(gate.gate(ALICE).stored(run.run_id)) == 2
    late = part_of(run, "outputs/0001.sealed", head)
    run.end(named=[kept])
    assert sends.look(ended=True)
    assert "outputs/0001.sealed" not in gate.gate(ALICE).stored(run.run_id)
    assert refused(post(gate, late.encode())) is Code.HEAD_INCONSISTENT
    assert not list(gate.store.rglob("outputs-0001*"))


def test_a_receipt_that_was_not_countersigned_for_the_run_is_not_kept(gate: LocalBroker, tmp_path: Path) -> None:
    run, other = run_of(gate, ALICE, tmp_path), run_of(gate, ALICE, tmp_path)
    run.end()
    other.end()
    head = (run.out / "heads.log").read_bytes().splitlines()[-1]
    genuine = (run.out / "receipt.json").read_bytes()
    swapped = Bundle.parse((other.out / "receipt.json").read_bytes()).receipt
    for wrong in (replace(Bundle.parse(genuine), receipt=swapped).encode(), b"{}", noise(500)):
        (run.out / "receipt.json").write_bytes(wrong)
        assert refused(post(gate, part_of(run, "receipt.json", head).encode())) is Code.UPLOAD_DAMAGED
    (run.out / "receipt.json").write_bytes(genuine)
    assert answered(post(gate, part_of(run, "receipt.json", head).encode())) == {"bytes": len(genuine), "whole": True}
    (run.out / "receipt.json").write_bytes(b"{}")
    assert answered(post(gate, part_of(run, "receipt.json", head).encode())) == {"bytes": len(genuine), "whole": True}
    assert content_of(gate.gate(ALICE), run, "receipt.json") == genuine, "a file that is whole is never replaced"
