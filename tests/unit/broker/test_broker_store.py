"""What runs leave, kept at a gate: what is taken, what is not, for whom, and how much."""

from __future__ import annotations

import errno
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from glasshouse.broker.client.gate_client import GateClient
from glasshouse.broker.client.owner_client import Reply
from glasshouse.broker.decide.decisions import Effect
from glasshouse.broker.decide.stored_files import KEPT_US, LEAST_BYTES, MOST_PARTIAL, RunStore
from glasshouse.errors import Code, PeerError, UsageError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.events import Event
from glasshouse.evidence.stored import MAX_PART_BYTES, StoredPart
from glasshouse.providers.serve.storing import Storing, _NotKeptError
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.merkle import Tree, leaf_hash
from simulators.left_run import LeftRun, noise
from simulators.local_broker import LocalBroker
from tools.raw_http import head, problem

ALICE, MALLORY = SigningKey.generate(), SigningKey.generate()
OWNERS = (ALICE.public, MALLORY.public)
MIB = 1 << 20


@dataclass(frozen=True)
class AtGate:
    """A gate as one owner reaches it."""

    broker: LocalBroker
    key: SigningKey

    @property
    def runtime_url(self) -> str:
        return self.broker.runtime_url

    @property
    def broker_public(self) -> bytes:
        return self.broker.broker_public

    def client(self) -> GateClient:
        return self.broker.gate(self.key)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path, owners=OWNERS, store_bytes=8 * MIB) as running:
        yield running


def run_of(gate: LocalBroker, key: SigningKey, folder: Path) -> LeftRun:
    owner = Owner(AtGate(gate, key), signing=key, releases=3)
    return LeftRun(Actor.enter(owner), folder / secrets.token_hex(4))


def post(gate: LocalBroker, body: bytes) -> Reply:
    return gate.gate(None)._send("POST", "/v1/store", body)


def storing(gate: LocalBroker, run: LeftRun) -> Storing:
    def send(body: bytes) -> tuple[int, bytes]:
        reply = post(gate, body)
        return reply.status, reply.body

    return Storing(run.out, send)


def part_of(
    run: LeftRun, name: str, head: bytes, *, event: int = -1, start: int = 0, size: int = 1 << 30
) -> StoredPart:
    """Return a part of a file as the house sends it, with the line of the log that has that number."""
    lines = (run.out / "events.log").read_bytes().splitlines()
    tree = Tree()
    for line in lines:
        tree.append(leaf_hash(line))
    content, index = (run.out / name).read_bytes(), event % len(lines)
    return StoredPart(
        name=name,
        size=len(content),
        sha256=sha256(content),
        start=start,
        data=content[start : start + min(size, MAX_PART_BYTES)],
        event=Event.parse(lines[index]),
        head=Envelope.parse(head, max_bytes=8192),
        proof=tuple(tree.inclusion_proof(index, len(lines))),
    )


def files_in(folder: Path) -> list[Path]:
    """Return the files of runs that are in a store."""
    return [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]


def content_of(client: GateClient, run: LeftRun, name: str) -> bytes:
    size, digest = client.stored(run.run_id)[name]
    content = b""
    while piece := client.stored_piece(run.run_id, digest, len(content)):
        content += piece
    assert len(content) == size
    return content


def answered(reply: Reply) -> object:
    assert reply.status == 200, reply.body
    return decode(reply.body, max_bytes=1024)


def refused(reply: Reply) -> Code:
    assert reply.status != 200
    return reply.problem().code


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
        full.setattr("glasshouse.broker.decide.stored_files.os.open", _no_room)
        assert refused(post(gate, part.encode())) is Code.DISK_FULL
    assert gate.gate(ALICE).stored(run.run_id) == {}
    assert answered(post(gate, part.encode())) == {"bytes": 1000, "whole": True}


def _no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_with_files_of_its_owner_s_is_no_store_and_loses_nothing(gate: LocalBroker, tmp_path: Path) -> None:
    def begin() -> None:
        RunStore(gate.opened, folder=home, limit_bytes=MIB, owners=1).close()

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
        full.setattr("glasshouse.broker.decide.stored_files.LEAST_BYTES", 8 * MIB)
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
        full.setattr("glasshouse.broker.decide.stored_files.os.open", _no_room)
        for number in range(many):
            part = part_of(run, f"outputs/{number:04d}.sealed", head, event=number - many)
            assert refused(post(gate, part.encode())) is Code.DISK_FULL
    assert gate.count("stored") == MOST_PARTIAL
