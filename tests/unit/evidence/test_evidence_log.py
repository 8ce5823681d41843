"""The log: what the agent can write, the verifier accepts; what somebody changed afterwards, it does not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable

import pytest

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.events import BODIES, MAX_EVENT_BYTES, Event, EventType
from glasshouse.evidence.heads import Head
from glasshouse.evidence.log import EventLog, VerifiedLog, read_lines, verify_heads, verify_log
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.merkle import Tree, leaf_hash, verify_consistency
from glasshouse.wire.states import Outcome, State
from simulators.world import World

KEY = SigningKey(b"e" * 32)
RUN = "0123456789abcdef" * 2
PROGRESS = {"done": 1, "elapsed_us": 5, "loss": "0.5", "total": None, "unit": "step"}
PROBE = {"detail": "", "probe": "workspace", "result": "clean"}


class Writer:
    """A log in memory with a clock that a test can set."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.time_us = 1000
        self.log = EventLog(run_id=RUN, evidence_key=KEY, clock_us=lambda: self.time_us, sink=self.lines.append)

    def reach(self, state: State) -> EventLog:
        order = list(State)
        while self.log.state is not state:
            self.log.transition(order[order.index(self.log.state) + 1])
        return self.log

    def finish(self, outcome: Outcome = Outcome.COMPLETED) -> Head:
        if self.log.state is not State.ZEROIZING:
            self.log.transition(State.ZEROIZING)
        self.log.append(EventType.PROBE, PROBE)
        self.log.transition(State.ZEROIZED, outcome=outcome)
        return self.head()

    def head(self) -> Head:
        return Head.parse_signed(self.log.head(), KEY.public)


@pytest.fixture
def writer() -> Writer:
    return Writer()


def whole_run(writer: Writer) -> Head:
    writer.reach(State.RUNNING).append(EventType.PROGRESS, PROGRESS)
    writer.reach(State.SEALED)
    return writer.finish()


def head_over(lines: Iterable[bytes], head: Head) -> Head:
    """What an attacker with the evidence key signs over changed lines."""
    tree = Tree()
    for line in lines:
        tree.append(leaf_hash(line.rstrip(b"\n")))
    return Head(
        run_id=head.run_id,
        sequence=head.sequence,
        size=len(tree),
        root=tree.root(),
        state=head.state,
        time_us=head.time_us,
    )


def refused(lines: Iterable[bytes], head: Head) -> Code:
    with pytest.raises(VerificationError) as caught:
        verify_log(lines, head)
    return caught.value.code


def changed(line: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    value = json.loads(line)
    change(value)
    return encode(value) + b"\n"


def test_a_run_that_was_logged_verifies_against_its_final_head(writer: Writer) -> None:
    head = whole_run(writer)
    found = verify_log(writer.lines, head)
    assert (found.outcome, found.code) == (Outcome.COMPLETED, None)
    assert [event.body["probe"] for event in found.of(EventType.PROBE)] == ["workspace"]
    assert found.states[0] == (1, State.CREATED)
    assert found.states[-1] == (head.size, State.ZEROIZED)


def test_every_line_is_canonical_json_and_a_merkle_leaf(writer: Writer) -> None:
    whole_run(writer)
    tree = Tree()
    for line in writer.lines:
        assert encode(decode(line[:-1], max_bytes=MAX_EVENT_BYTES)) + b"\n" == line
        tree.append(leaf_hash(line[:-1]))
    assert tree.root() == writer.log.root


def test_a_clock_that_steps_back_is_held_at_the_last_time(writer: Writer) -> None:
    writer.time_us = 5000
    writer.log.transition(State.HARDENED)
    writer.time_us = 10
    writer.log.transition(State.MEASURED)
    assert json.loads(writer.lines[-1])["time_us"] == 5000


@pytest.mark.parametrize("state", [state for state in State if state is not State.ZEROIZED])
def test_every_state_can_give_up_and_zeroize(state: State) -> None:
    writer = Writer()
    writer.reach(state)
    head = writer.finish(Outcome.FAILED)
    assert verify_log(writer.lines, head).head.state is State.ZEROIZED


def test_the_agent_cannot_write_an_illegal_transition(writer: Writer) -> None:
    with pytest.raises(VerificationError) as caught:
        writer.log.transition(State.RUNNING)
    assert caught.value.code is Code.STATE_ILLEGAL
    assert writer.log.size == len(writer.lines) == 1


@pytest.mark.parametrize(
    ("state", "kind", "body"),
    [
        (State.OPENED, EventType.PROGRESS, PROGRESS),
        (State.RUNNING, EventType.PROBE, PROBE),
        (State.HARDENED, EventType.START, {"run_id": RUN, "version": 1}),
        (
            State.OPENED,
            EventType.OUTPUT,
            {
                "bytes": 1,
                "class": "file",
                "kind": "output",
                "sealed_bytes": 2,
                "sealed_sha256": "0" * 64,
                "sequence": 0,
            },
        ),
    ],
)
def test_an_event_in_the_wrong_state_is_not_written(
    writer: Writer, state: State, kind: EventType, body: dict[str, object]
) -> None:
    log = writer.reach(state)
    before = log.size
    with pytest.raises(VerificationError) as caught:
        log.append(kind, body)
    assert caught.value.code is Code.LOG_INVALID
    assert log.size == len(writer.lines) == before


def test_nothing_follows_the_end_of_a_run(writer: Writer) -> None:
    whole_run(writer)
    with pytest.raises(VerificationError, match="after the end"):
        writer.log.append(EventType.NOTICE, {"code": "late", "value": None})


def test_the_end_needs_an_outcome_and_only_the_end_has_one(writer: Writer) -> None:
    with pytest.raises(VerificationError, match="outcome"):
        writer.log.transition(State.HARDENED, outcome=Outcome.COMPLETED)
    writer.log.transition(State.ZEROIZING, code=Code.WORKER_KILLED)
    with pytest.raises(VerificationError, match="outcome"):
        writer.log.transition(State.ZEROIZED)
    with pytest.raises(VerificationError, match="reason"):
        writer.log.transition(State.ZEROIZED, outcome=Outcome.COMPLETED, code=Code.WORKER_KILLED)
    writer.log.transition(State.ZEROIZED, outcome=Outcome.FAILED, code=Code.WORKER_KILLED)
    found = verify_log(writer.lines, writer.head())
    assert (found.outcome, found.code) == (Outcome.FAILED, Code.WORKER_KILLED)


@pytest.mark.parametrize("reached", [State.CREATED, State.ATTESTED, State.RUNNING])
def test_a_run_that_never_sealed_its_results_did_not_complete(writer: Writer, reached: State) -> None:
    writer.reach(reached)
    with pytest.raises(VerificationError, match="did not complete"):
        writer.finish()


def test_a_full_disk_leaves_log_and_tree_at_the_same_size() -> None:
    room = [True]
    lines: list[bytes] = []

    def sink(line: bytes) -> None:
        if not room[0]:
            raise OSError(28, "No space left on device")
        lines.append(line)

    log = EventLog(run_id=RUN, evidence_key=KEY, clock_us=lambda: 1, sink=sink)
    room[0] = False
    with pytest.raises(OSError, match="No space"):
        log.transition(State.HARDENED)
    assert (log.size, log.state) == (1, State.CREATED)
    room[0] = True
    log.transition(State.HARDENED)
    verify_log(lines, Head.parse_signed(log.head(), KEY.public))


# What an attacker does to a log: without the evidence key the root gives it away; with the key, the rules do.


def test_a_dropped_event(writer: Writer) -> None:
    head = whole_run(writer)
    lines = writer.lines[:5] + writer.lines[6:]
    assert refused(lines, head) is Code.LOG_INVALID
    assert refused(lines, head_over(lines, head)) is Code.LOG_INVALID


def test_a_repeated_event(writer: Writer) -> None:
    head = whole_run(writer)
    lines = writer.lines[:6] + writer.lines[5:]
    assert refused(lines, head) is Code.LOG_INVALID
    assert refused(lines, head_over(lines, head)) is Code.LOG_INVALID


def test_reordered_events(writer: Writer) -> None:
    head = whole_run(writer)
    lines = list(writer.lines)
    lines[3], lines[4] = lines[4], lines[3]
    assert refused(lines, head) is Code.LOG_INVALID
    assert refused(lines, head_over(lines, head)) is Code.LOG_INVALID


def test_a_log_without_its_end_or_with_more_than_its_head_names(writer: Writer) -> None:
    head = whole_run(writer)
    assert refused(writer.lines[:-1], head) is Code.LOG_INVALID
    short = head_over(writer.lines[:-1], head)
    assert refused(writer.lines, short) is Code.LOG_INVALID


def test_an_event_that_somebody_improved(writer: Writer) -> None:
    head = whole_run(writer)
    at = next(n for n, line in enumerate(writer.lines) if b'"progress"' in line)
    lines = [*writer.lines]
    lines[at] = lines[at].replace(b"0.5", b"0.1")
    assert refused(lines, head) is Code.LOG_INVALID


def test_an_illegal_transition_signed_by_the_evidence_key(writer: Writer) -> None:
    head = whole_run(writer)
    lines = [*writer.lines]
    lines[1] = changed(lines[1], lambda event: event.update(state="released"))
    assert refused(lines, head_over(lines, head)) is Code.STATE_ILLEGAL


def test_a_transition_that_lies_about_where_it_came_from(writer: Writer) -> None:
    head = whole_run(writer)
    lines = [*writer.lines]
    lines[2] = changed(lines[2], lambda event: event["body"].update({"from": "created"}))
    assert refused(lines, head_over(lines, head)) is Code.STATE_ILLEGAL


def test_an_event_that_claims_another_state_than_the_runs(writer: Writer) -> None:
    head = whole_run(writer)
    lines = [*writer.lines]
    at = next(n for n, line in enumerate(lines) if b'"progress"' in line)
    lines[at] = changed(lines[at], lambda event: event.update(state="sealed"))
    assert refused(lines, head_over(lines, head)) is Code.STATE_ILLEGAL


def test_time_that_goes_back(writer: Writer) -> None:
    head = whole_run(writer)
    lines = [*writer.lines]
    lines[4] = changed(lines[4], lambda event: event.update(time_us=1))
    assert refused(lines, head_over(lines, head)) is Code.LOG_INVALID


def test_outputs_that_do_not_count_up(writer: Writer) -> None:
    log = writer.reach(State.RUNNING)
    body = {"sealed_bytes": 2, "sealed_sha256": "0" * 64, "sequence": 1}
    with pytest.raises(VerificationError, match="count up"):
        log.append(EventType.SEGMENT, body)


def test_a_log_of_another_run_does_not_pass_for_this_one(writer: Writer) -> None:
    head = whole_run(writer)
    other = head_over(writer.lines, head)
    other = Head.from_json({**other.to_json(), "run_id": "ff" * 16})
    assert refused(writer.lines, other) is Code.LOG_INVALID


def test_a_head_that_names_another_state(writer: Writer) -> None:
    head = whole_run(writer)
    other = Head.from_json({**head.to_json(), "state": "sealed"})
    assert refused(writer.lines, other) is Code.LOG_INVALID


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[1]\n",
        b'{"body":{},"sequence":0,"state":"created","time_us":1,"type":"start"}\n',
        b"\xff\xfe\n",
        b"x" * (MAX_EVENT_BYTES + 100) + b"\n",
        b'{"body":{"run_id":"'
        + b"0" * 32
        + b'","version":true},"sequence":0,"state":"created","time_us":1,"type":"start"}\n',
        b'{"body":{"run_id":"'
        + b"0" * 32
        + b'","version":1},"sequence":0.0,"state":"created","time_us":1,"type":"start"}\n',
        b'{"body":{"run_id":"'
        + b"0" * 32
        + b'","version":1},"sequence":0,"state":"created","time_us":1,"type":"rumour"}\n',
        b'{"sequence":0,"body":{"run_id":"'
        + b"0" * 32
        + b'","version":1},"state":"created","time_us":1,"type":"start"}\n',
        b'{"body":{"run_id":"'
        + b"0" * 32
        + b'","version":1},"sequence":0,"sequence":0,"state":"created","time_us":1,"type":"start"}\n',
        b"[" * 4000 + b"\n",
    ],
)
def test_a_line_that_is_no_event_is_refused_and_never_crashes(writer: Writer, line: bytes) -> None:
    head = whole_run(writer)
    assert refused([line, *writer.lines[1:]], head) is Code.LOG_INVALID


def test_a_file_that_is_one_endless_line_is_not_read_into_memory(writer: Writer) -> None:
    class Endless(io.RawIOBase):
        taken = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:
            Endless.taken += len(buffer)
            buffer[:] = b"x" * len(buffer)
            return len(buffer)

    with io.BufferedReader(Endless(), 8192) as stream:
        assert refused(read_lines(stream), whole_run(writer)) is Code.LOG_INVALID
    assert Endless.taken < 100_000


def test_bodies_are_closed() -> None:
    for kind, fields in BODIES.items():
        with pytest.raises(FormatError):
            Event(sequence=0, time_us=0, state=State.CREATED, type=kind, body={})
        with pytest.raises(FormatError):
            Event(sequence=0, time_us=0, state=State.CREATED, type=kind, body={**dict.fromkeys(fields), "note": "hi"})


@pytest.mark.parametrize(
    "loss",
    [
        "1.0",
        "0.1234567",
        "1e+5",
        "1e+999",
        "00",
        "1234567",
        "0.00001",
        "nan",
        "inf",
        "1.",
        ".5",
        "0x1",
        "1e5",
        "١",
        "0.5 ",
        0.5,
        1,
        True,
    ],
)
def test_a_loss_is_a_decimal_string_and_nothing_else(writer: Writer, loss: object) -> None:
    log = writer.reach(State.RUNNING)
    with pytest.raises(FormatError):
        log.append(EventType.PROGRESS, {**PROGRESS, "loss": loss})


def test_no_free_text_finds_its_way_into_a_log(writer: Writer) -> None:
    log = writer.reach(State.ZEROIZING)
    for detail in ("naïve", "two\nlines", "x" * 201):
        with pytest.raises(FormatError):
            log.append(EventType.PROBE, {**PROBE, "detail": detail})
    with pytest.raises(FormatError):
        log.append(EventType.NOTICE, {"code": "/home/alice", "value": None})


def test_consistency_between_any_two_heads(writer: Writer) -> None:
    first = writer.head()
    writer.reach(State.RUNNING)
    second = writer.head()
    proof = writer.log.consistency(first.size, writer.log.size)
    writer.log.append(EventType.PROGRESS, PROGRESS)  # what comes after the head does not disturb its proof
    verify_consistency(old=first.size, new=second.size, old_root=first.root, new_root=second.root, proof=proof)
    assert writer.log.consistency(0, writer.log.size) == []


def verified_run() -> tuple[VerifiedLog, list[Head]]:
    run = World().run()
    heads = [head.head for head in run.heads]
    return verify_log(run.lines, heads[-1]), heads


def test_earlier_heads_name_beginnings_of_the_log() -> None:
    log, heads = verified_run()
    assert len(heads) > 3
    verify_heads(heads, log)


def test_heads_rolled_back_repeated_or_of_another_history() -> None:
    log, heads = verified_run()
    for wrong in (heads[::-1], [heads[0], heads[0]], [heads[1], heads[0], heads[2]]):
        with pytest.raises(VerificationError) as caught:
            verify_heads(wrong, log)
        assert caught.value.code is Code.LOG_INVALID
    forked = Head.from_json({**heads[1].to_json(), "root": "00" * 32})
    with pytest.raises(VerificationError, match="not of this log"):
        verify_heads([heads[0], forked], log)
    other_state = Head.from_json({**heads[1].to_json(), "state": "created"})
    with pytest.raises(VerificationError, match="not of this log"):
        verify_heads([heads[0], other_state], log)
