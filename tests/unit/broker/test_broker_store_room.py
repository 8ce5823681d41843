"""What runs leave, kept at a gate: for whom, how much, and how long."""

from __future__ import annotations

import errno
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.broker.decide.decisions import Effect
from glasshouse.broker.decide.stored_files import MOST_PARTIAL, RunStore
from glasshouse.broker.store.uploads import KEPT_US, LEAST_BYTES, StoreSpace
from glasshouse.errors import Code, PeerError, UsageError
from glasshouse.evidence.stored import StoredPart
from glasshouse.providers.serve.storing import Storing
from glasshouse.wire.crypto import SigningKey, sha256
from simulators.gate_store import (
    ALICE,
    MALLORY,
    MIB,
    OWNERS,
    answered,
    files_in,
    part_of,
    post,
    refused,
    run_of,
    storing,
)
from simulators.left_run import noise
from simulators.local_broker import LocalBroker


def test_an_owner_who_fills_their_part_takes_nothing_of_another_s(tmp_path: Path) -> None:
    with LocalBroker(tmp_path, owners=OWNERS, store_bytes=2 * MIB) as gate:
        mallory, alice = run_of(gate, MALLORY, tmp_path), run_of(gate, ALICE, tmp_path)
        for _ in range(20):
            mallory.output(noise(1))
        mallory.output(noise(600_000))
        head = mallory.countersign()
        sends = storing(gate, mallory)
        assert not sends.look(ended=False)
        small = MIB // LEAST_BYTES
        assert len(gate.gate(MALLORY).stored(mallory.run_id)) == small, (
            "a small file counts as much as its keeping costs"
        )
        refusal = post(gate, part_of(mallory, "outputs/0020.sealed", head).encode())
        assert refused(refusal) is Code.OWNER_QUOTA
        alice.output(noise(MIB))
        alice.countersign()
        assert storing(gate, alice).look(ended=False)
        gate.gate(MALLORY).forget_stored(mallory.run_id)
        # Their room is theirs again, for another run.
        later = run_of(gate, MALLORY, tmp_path)
        later.output(noise(MIB))
        later.countersign()
        assert storing(gate, later).look(ended=False)


def test_files_that_one_owner_begins_and_leaves_interrupt_no_other_s(gate: LocalBroker, tmp_path: Path) -> None:
    mallory, alice = run_of(gate, MALLORY, tmp_path), run_of(gate, ALICE, tmp_path)
    alice.output(noise(1000))
    begun = part_of(alice, "outputs/0000.sealed", alice.countersign(), size=10)
    assert answered(post(gate, begun.encode())) == {"bytes": 10, "whole": False}
    for _ in range(MOST_PARTIAL + 3):
        mallory.output(noise(1000))
    head, many = mallory.countersign(), len(mallory.outputs)
    for number in range(many):
        part = part_of(mallory, f"outputs/{number:04d}.sealed", head, event=number - many, size=10)
        assert answered(post(gate, part.encode())) == {"bytes": 10, "whole": False}
    assert answered(post(gate, begun.encode())) == {"bytes": 10, "whole": False}
    [(partial,)] = gate.rows("SELECT count(*) FROM stored WHERE NOT whole")
    assert partial == MOST_PARTIAL + 1


def test_what_another_owner_s_run_left_does_not_exist(gate: LocalBroker, tmp_path: Path) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.output(noise(1000))
    run.countersign()
    assert storing(gate, run).look(ended=False)
    [(_, digest)] = gate.gate(ALICE).stored(run.run_id).values()
    mallory, before = gate.gate(MALLORY), gate.rows("SELECT * FROM stored")
    for method, path, body in (
        ("GET", "/v1/runs/{}/stored", None),
        ("GET", f"/v1/runs/{{}}/stored/{digest.hex()}?after=0", None),
        ("POST", "/v1/runs/{}/stored/forget", b"{}"),
    ):
        theirs, unknown = (
            mallory._send(method, path.format(run_id), body) for run_id in (run.run_id, secrets.token_hex(16))
        )
        assert (theirs.status, theirs.body) == (unknown.status, unknown.body)
        assert theirs.problem().code is Code.RUN_UNKNOWN
    assert gate.rows("SELECT * FROM stored") == before
    assert refused(gate.gate(None)._send("GET", f"/v1/runs/{run.run_id}/stored", None)) is Code.OWNER_REQUEST
    with pytest.raises(UsageError):
        gate.gate(ALICE).stored_piece(run.run_id, bytes(32), 0)


def test_what_no_owner_fetches_is_forgotten_after_a_month(gate: LocalBroker, tmp_path: Path) -> None:
    run, later = run_of(gate, ALICE, tmp_path), run_of(gate, ALICE, tmp_path)
    for one in (run, later):
        one.output(noise(1000))
        one.countersign()
    assert storing(gate, run).look(ended=False)
    gate.advance(KEPT_US / 1e6 + 1)
    assert storing(gate, later).look(ended=False)
    assert gate.rows("SELECT DISTINCT run_id FROM stored") == [(later.run_id,)]
    assert {path.parent.name for path in files_in(gate.store)} == {later.run_id}


def test_a_gate_that_lists_what_is_no_list_is_not_believed(
    gate: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = gate.gate(ALICE)
    monkeypatch.setattr(client, "_ask", lambda *_: {"store": True, "files": [{"name": "a"}], "data": "*"})
    with pytest.raises(PeerError):
        client.stored("0" * 32)
    with pytest.raises(PeerError):
        client.stored_piece("0" * 32, bytes(32), 0)


@pytest.mark.parametrize(
    "answer",
    [
        OSError("the line is down"),
        (200, b"<html>"),
        (200, b"{}"),
        (200, b'{"bytes":7,"whole":false}'),
        (503, b"{}"),
        (503, b"[]"),
        (503, b"[" * 60_000),
        (404, b'"usage"'),
        (429, b'{"code":"owner-quota"}'),
        (404, b'{"code":"run-unknown"}'),
    ],
)
def test_what_sends_goes_on_whatever_answers_it_and_sends_nothing_but_what_is_signed_and_sealed(
    gate: LocalBroker, tmp_path: Path, answer: OSError | tuple[int, bytes]
) -> None:
    run = run_of(gate, ALICE, tmp_path)
    (run.out.parent / "runtime.log").write_text("what a runtime writes for people")
    (run.out / "outputs" / "0007.partial").write_bytes(noise(100))
    run.output(noise(400_000))
    run.end()
    sent: list[bytes] = []
    answers: list[OSError | tuple[int, bytes] | None] = [answer]

    def send(body: bytes) -> tuple[int, bytes]:
        sent.append(body)
        if answers[0] is None:
            reply = post(gate, body)
            return reply.status, reply.body
        if isinstance(answers[0], OSError):
            raise answers[0]
        return answers[0]

    sends = Storing(run.out, send)
    assert not sends.look(ended=True)
    assert not sends.done
    assert len(sent) <= 3 * 4, "an answer that brings nothing on is not asked for again and again"
    answers[0] = None
    assert sends.look(ended=True)
    assert sends.done
    names = {StoredPart.parse(body).name for body in sent}
    assert names == {"receipt.json", "heads.log", "events.log", "outputs/0000.sealed"}


def test_a_disk_that_is_full_is_said_to_be_and_keeps_nothing_half(
    gate: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.output(noise(1000))
    part = part_of(run, "outputs/0000.sealed", run.countersign())
    with monkeypatch.context() as full:
        full.setattr("glasshouse.broker.store.uploads.os.open", _no_room)
        assert refused(post(gate, part.encode())) is Code.DISK_FULL
    assert gate.gate(ALICE).stored(run.run_id) == {}
    assert answered(post(gate, part.encode())) == {"bytes": 1000, "whole": True}


def _no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_with_files_of_its_owner_s_is_no_store_and_loses_nothing(gate: LocalBroker, tmp_path: Path) -> None:
    def begin() -> None:
        space = StoreSpace(gate.opened, folder=home, limit_bytes=MIB)
        RunStore(gate.opened, space)
        space.close()

    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    home.chmod(0o700)
    (home / ".ssh" / "id_ed25519").write_text("a key")
    for mark in (None, SigningKey.generate().public):
        if mark is not None:
            (home / "gate.public").touch(mode=0o600)
            (home / "gate.public").write_bytes(mark.hex().encode())
        with pytest.raises(UsageError, match="store"):
            begin()
        assert (home / ".ssh" / "id_ed25519").read_text() == "a key"
    # Also in a store of its own a gate removes only what it can have made.
    (home / "gate.public").write_bytes(gate.broker_public.hex().encode())
    (home / ("ab" * 16)).symlink_to(home / ".ssh")
    for run, name in ((".ssh", "receipt.json"), ("cd" * 16, "notes.txt")):
        (home / run).mkdir(exist_ok=True)
        (home / run / name).write_text("mine")
    (home / ("cd" * 16) / "events.log").mkdir()
    before = sorted(home.rglob("*"))
    begin()
    assert sorted(home.rglob("*")) == before


def test_a_run_that_ended_takes_no_room_and_stores_no_bytes_that_its_log_has_not(
    gate: LocalBroker, tmp_path: Path
) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.end()
    head = (run.out / "heads.log").read_bytes().splitlines()[-1]
    log, heads = (part_of(run, name, head) for name in ("events.log", "heads.log"))
    for part in (log, heads):
        assert refused(post(gate, replace(part, size=3 * MIB).encode())) is Code.HEAD_INCONSISTENT
        assert answered(post(gate, replace(part, data=b"").encode())) == {"bytes": 0, "whole": False}
    assert gate.count("stored") == 0, "what brings nothing reserves nothing"
    lines = log.data.splitlines(keepends=True)
    for other in (noise(len(log.data)), b"".join(lines[:-1]), log.data[:-1], log.data + lines[0]):
        forged = replace(log, data=other, size=len(other), sha256=sha256(other))
        assert refused(post(gate, forged.encode())) is Code.UPLOAD_DAMAGED
    assert gate.count("stored") == 0
    assert files_in(gate.store) == []
    assert answered(post(gate, log.encode())) == {"bytes": len(log.data), "whole": True}


def test_heads_are_those_that_the_gate_countersigned_for_the_run_and_take_no_more_room(
    gate: LocalBroker, tmp_path: Path
) -> None:
    run, other = run_of(gate, ALICE, tmp_path), run_of(gate, ALICE, tmp_path)
    for one in (run, other):
        for _ in range(40):
            one.segment(noise(10))
        one.countersign()
        one.output(noise(100))
        one.end()
    first, last = (run.out / "heads.log").read_bytes().splitlines(keepends=True)
    theirs = (other.out / "heads.log").read_bytes().splitlines(keepends=True)[0]
    heads = part_of(run, "heads.log", last.strip())
    assert refused(post(gate, replace(heads, size=3 * 8193, data=heads.data).encode())) is Code.HEAD_INCONSISTENT, (
        "two heads were signed, of more events"
    )
    for lines in (
        noise(len(heads.data)),
        first,
        last + first,
        first + first + last,
        theirs + last,
        first + last + last,
        first + last[:-1],
        first + b"\n" + last,
    ):
        forged = replace(heads, data=lines, size=len(lines), sha256=sha256(lines))
        assert refused(post(gate, forged.encode())) is Code.UPLOAD_DAMAGED
    assert gate.count("stored") == 0
    assert files_in(gate.store) == []
    assert answered(post(gate, heads.encode())) == {"bytes": len(heads.data), "whole": True}


def test_a_part_that_changes_nothing_is_no_sign_of_life(gate: LocalBroker, tmp_path: Path) -> None:
    run = run_of(gate, ALICE, tmp_path)
    run.output(noise(1000))
    part = part_of(run, "outputs/0000.sealed", run.countersign())
    begun, rest = replace(part, data=part.data[:10]), replace(part, start=10, data=part.data[10:])
    assert gate._keeps is not None
    effects = []
    for one in (begun, begun, rest, rest, begun):
        effects.append(gate._keeps.take(one.encode()).effect)
        post(gate, one.encode())
    assert [effect is Effect.CREDIT for effect in effects] == [False, False, True, False, False]


def test_files_of_a_run_stay_where_forgetting_it_is_not_committed(
    gate: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, later = run_of(gate, ALICE, tmp_path), run_of(gate, ALICE, tmp_path)
    for one in (run, later):
        one.output(noise(1000))
    run.countersign()
    part = part_of(later, "outputs/0000.sealed", later.countersign())
    assert storing(gate, run).look(ended=False)
    gate.advance(KEPT_US / 1e6 + 1)
    with monkeypatch.context() as full:
        full.setattr("glasshouse.broker.store.uploads.LEAST_BYTES", 8 * MIB)
        assert refused(post(gate, part.encode())) is Code.OWNER_QUOTA
    assert len(files_in(gate.store)) == gate.count("stored") == 1


def test_what_was_reserved_and_could_not_be_written_is_dropped_like_what_was_begun(
    gate: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(gate, ALICE, tmp_path)
    for _ in range(MOST_PARTIAL + 3):
        run.output(noise(1000))
    head, many = run.countersign(), len(run.outputs)
    with monkeypatch.context() as full:
        full.setattr("glasshouse.broker.store.uploads.os.open", _no_room)
        for number in range(many):
            part = part_of(run, f"outputs/{number:04d}.sealed", head, event=number - many)
            assert refused(post(gate, part.encode())) is Code.DISK_FULL
    assert gate.count("stored") == MOST_PARTIAL
