"""Laws of the evidence: events, logs, bundles and artifacts survive both ways, and hostile bytes are only refused."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import Code, FormatError, GlasshouseError, RefusedError, VerificationError
from glasshouse.evidence.bundle import MAX_SUBMISSION_BYTES, ReceiptSubmission
from glasshouse.evidence.canary import check_canaries, spellings
from glasshouse.evidence.events import BODIES, MAX_EVENT_BYTES, Event, EventType
from glasshouse.evidence.heads import MAX_HEAD_BYTES, Head, countersign
from glasshouse.evidence.log import EventLog, verify_log
from glasshouse.jobs.verify.publish import verify_artifact
from glasshouse.jobs.verify.verdict import Status, verify_bundle
from glasshouse.wire.canonical import MAX_INTEGER, decode, encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.states import NEXT, Outcome, State
from simulators.world import World

KEY, BROKER = SigningKey(b"e" * 32), SigningKey(b"b" * 32)
RUN = "ab" * 16
WORLD = World()
GOOD = WORLD.run()
ASCII = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=200)
COUNTS = st.integers(0, MAX_INTEGER)
HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)
# As C's `%.6g` writes them: a number has one such text.
DECIMALS = st.floats(allow_nan=False, allow_infinity=False).map(lambda loss: f"{loss:.6g}")
WORDS = st.from_regex(r"\A[a-z][a-z0-9-]{0,20}\Z").map(str.strip)

# Every type with bodies that its schema accepts; a type without a row fails `test_an_event_survives_both_ways`.
_SEALED = {"sealed_bytes": COUNTS, "sealed_sha256": HEX, "sequence": COUNTS}
WRITTEN: dict[EventType, st.SearchStrategy[dict[str, Any]]] = {
    EventType.START: st.fixed_dictionaries({"run_id": HEX.map(lambda digest: digest[:32]), "version": st.just(1)}),
    EventType.TRANSITION: st.fixed_dictionaries(
        {
            "code": st.none() | st.sampled_from([code.value for code in Code]),
            "from": st.sampled_from([state.value for state in State]),
            "outcome": st.none() | st.sampled_from(["completed", "failed", "interrupted", "refused"]),
        }
    ),
    EventType.CHECK: st.fixed_dictionaries(
        {
            "name": WORDS,
            "process": st.sampled_from(["agent", "custodian", "sentinel", "worker"]),
            "result": st.sampled_from(["failed", "passed", "unavailable"]),
        }
    ),
    EventType.DIGEST: st.fixed_dictionaries({"sha256": HEX, "subject": st.sampled_from(["ear", "token"])}),
    EventType.PROGRESS: st.fixed_dictionaries(
        {
            "done": COUNTS,
            "elapsed_us": COUNTS,
            "loss": st.none() | DECIMALS,
            "total": st.none() | COUNTS,
            "unit": st.sampled_from(["epoch", "step"]),
        }
    ),
    EventType.OUTPUT: st.fixed_dictionaries(
        {
            "bytes": COUNTS,
            "class": st.sampled_from(["file", "weights"]),
            "kind": st.sampled_from(["checkpoint", "output"]),
            **_SEALED,
        }
    ),
    EventType.CHECKPOINT: st.fixed_dictionaries(
        {"bytes": COUNTS, "digest": st.binary(min_size=32, max_size=32).map(bytes.hex), "seq": COUNTS, "step": COUNTS}
    ),
    EventType.SEGMENT: st.fixed_dictionaries(_SEALED),
    EventType.PROBE: st.fixed_dictionaries(
        {"detail": ASCII, "probe": WORDS, "result": st.sampled_from(["clean", "unverifiable"])}
    ),
    EventType.NOTICE: st.fixed_dictionaries({"code": WORDS, "value": st.none() | COUNTS}),
}
# What may come in any order while it trains.
SOMETHING = st.sampled_from([EventType.PROGRESS, EventType.NOTICE, EventType.DIGEST, EventType.CHECKPOINT]).flatmap(
    lambda kind: WRITTEN[kind].map(lambda body: (kind, body))
)


class Writer:
    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.now = 0
        self.log = EventLog(run_id=RUN, evidence_key=KEY, clock_us=lambda: self.now, sink=self.lines.append)


@given(st.data())
def test_whatever_the_agent_can_write_the_verifier_accepts(data: st.DataObject) -> None:
    """A walk at random along the state table, with events and heads in between."""
    writer, last = Writer(), None
    while writer.log.state is not State.ZEROIZED:
        writer.now = data.draw(st.integers(0, MAX_INTEGER))
        state = data.draw(st.sampled_from(sorted(NEXT[writer.log.state])))
        writer.log.transition(state, outcome=Outcome.REFUSED if state is State.ZEROIZED else None)
        if state is State.RUNNING:
            for kind, body in data.draw(st.lists(SOMETHING, max_size=3)):
                writer.log.append(kind, body)
        if state is State.ZEROIZING:
            writer.log.append(EventType.PROBE, data.draw(WRITTEN[EventType.PROBE]))
        if data.draw(st.booleans()):
            last = countersign(
                writer.log.head(),
                writer.log.consistency(last.head.size if last else 0, writer.log.size),
                run_id=RUN,
                previous=last,
                evidence_public=KEY.public,
                broker_key=BROKER,
                now_us=1,
            )
    head = Head.parse_signed(writer.log.head(), KEY.public)
    assert verify_log(writer.lines, head).outcome is Outcome.REFUSED
    for line in writer.lines:
        # The fast encoder of events is the canonical one.
        assert encode(decode(line[:-1], max_bytes=MAX_EVENT_BYTES)) + b"\n" == line
        assert Event.parse(line[:-1]).encode() + b"\n" == line
    at = data.draw(st.integers(0, len(writer.lines) - 1))
    dropped = writer.lines[:at] + writer.lines[at + 1 :]
    with pytest.raises(VerificationError):
        verify_log(dropped, head)


@pytest.mark.parametrize("kind", EventType)
@given(data=st.data())
def test_an_event_survives_both_ways(kind: EventType, data: st.DataObject) -> None:
    """`parse` and `encode` are each other's inverse for every type, in whatever state it is written."""
    event = Event(
        sequence=data.draw(COUNTS),
        time_us=data.draw(COUNTS),
        state=data.draw(st.sampled_from(State)),
        type=kind,
        body=data.draw(WRITTEN[kind]),
    )
    assert Event.parse(event.encode()) == event


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(list(EventType)),
    st.data(),
)
def test_a_hostile_body_is_refused_or_lawful(kind: EventType, data: st.DataObject) -> None:
    body = {name: data.draw(JSONISH) for name in BODIES[kind]}
    try:
        event = Event(sequence=0, time_us=0, state=State.RUNNING, type=kind, body=body)
    except FormatError:
        return
    assert Event.parse(event.encode()) == event


@given(st.binary(max_size=300) | st.text(alphabet='{}[]":,0aestyp\\', max_size=80).map(str.encode))
def test_hostile_lines_are_only_refused(line: bytes) -> None:
    with pytest.raises(FormatError):
        Event.parse(line)


@given(st.binary(max_size=300))
def test_hostile_heads_are_only_refused(head: bytes) -> None:
    with pytest.raises(RefusedError):
        countersign(head, [], run_id=RUN, previous=None, evidence_public=KEY.public, broker_key=BROKER, now_us=0)


@given(st.data())
def test_damage_anywhere_in_a_bundle_is_refused(data: st.DataObject) -> None:
    damaged = bytearray(GOOD.data)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    if bytes(damaged) == GOOD.data:
        return
    with pytest.raises(GlasshouseError):
        verify_bundle(bytes(damaged), owner=WORLD.owner.public)


@given(st.dictionaries(st.sampled_from(sorted(decode(GOOD.data, max_bytes=1 << 20))), JSONISH, min_size=1))
def test_a_bundle_with_hostile_parts_is_never_good(parts: dict[str, Any]) -> None:
    whole: Any = decode(GOOD.data, max_bytes=1 << 20)
    with contextlib.suppress(FormatError):
        data = encode({**whole, **parts})
        try:
            verdict = verify_bundle(data, owner=WORLD.owner.public)
        except GlasshouseError:
            return
        assert verdict.status is Status.INCOMPLETE
        assert verdict.chain.missing == ("countersignature",)


@given(st.binary(max_size=500))
def test_hostile_artifacts_are_only_refused(data: bytes) -> None:
    with pytest.raises(GlasshouseError):
        verify_artifact(data, owner=WORLD.owner.public)


@given(st.binary(min_size=8, max_size=40), st.text(max_size=10), st.text(max_size=10), st.data())
def test_a_canary_is_found_wherever_it_is_planted(secret: bytes, before: str, after: str, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(spellings(secret))))
    try:
        planted = before + form.decode() + after
        document = encode({"value": planted})
    except (UnicodeDecodeError, FormatError):
        return
    if "\0" in planted:
        return
    with pytest.raises(VerificationError) as caught:
        check_canaries(document, [secret], vocabulary=frozenset({"value"}), max_bytes=10_000)
    assert caught.value.code is Code.ARTIFACT_CANARY


# A submission of a receipt is cut apart without a look into the receipt. `read_whole` is what it must agree with.

MARKS = [
    *'{}[],:" \n',
    "\\",
    '\\"',
    "\\\\",
    "\\u0022",
    "\\u0000",
    "é",
    "=",
    '""',
    '"receipt":',
    ',"receipt":{"payload":"',
]
TRICKY = st.lists(st.sampled_from([*MARKS, "a", "payload", "head", "receipt"]), max_size=6).map("".join)
PAYLOADS = st.binary(max_size=40)
ENVELOPES = st.builds(
    lambda payload, kind, names: Envelope(
        payload_type=kind, payload=payload, signatures=tuple((name, bytes(64)) for name in sorted(names))
    ).to_json(),
    PAYLOADS,
    TRICKY,
    st.sets(TRICKY, min_size=1, max_size=3),
)
LIKE_ENVELOPES = ENVELOPES | st.builds(
    lambda value, more: {**value, **more}, ENVELOPES, st.dictionaries(TRICKY, TRICKY)
)
SUBMISSIONS = st.fixed_dictionaries({"head": LIKE_ENVELOPES, "receipt": LIKE_ENVELOPES})
EDITS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.sampled_from(["", *MARKS])), max_size=3)


def read_whole(data: bytes) -> tuple[bytes, Envelope]:
    """Read the whole submission as one document, as its specification has it."""
    whole = decode(data, max_bytes=MAX_SUBMISSION_BYTES)
    if not isinstance(whole, dict) or whole.keys() != {"head", "receipt"}:
        raise FormatError(Code.SCHEMA, "a submission of other members")
    head, receipt = encode(whole["head"]), encode(whole["receipt"])
    for part in (head, receipt):
        Envelope.from_json(decode(part, max_bytes=MAX_SUBMISSION_BYTES, max_elements=64))
    if len(head) > MAX_HEAD_BYTES:
        raise FormatError(Code.TOO_LARGE, "a head that is too long")
    return head, Envelope.from_json(decode(receipt, max_bytes=MAX_SUBMISSION_BYTES))


def read_in_parts(data: bytes) -> tuple[bytes, Envelope]:
    """Read it as a broker does."""
    submission = ReceiptSubmission.parse(data)
    return submission.head, Envelope.parse(submission.receipt, max_bytes=MAX_SUBMISSION_BYTES)


def check_read_alike(data: bytes) -> bool:
    """Check that both accept these bytes, with the same values, or neither; return whether they do."""
    try:
        whole = read_whole(data)
    except FormatError:
        with pytest.raises(FormatError):
            read_in_parts(data)
        return False
    assert read_in_parts(data) == whole
    assert ReceiptSubmission(receipt=whole[1].encode(), head=whole[0]).encode() == data
    return True


@given(SUBMISSIONS, EDITS)
def test_a_submission_that_is_cut_is_the_one_that_is_read_whole(
    value: Any, edits: list[tuple[float, int, str]]
) -> None:
    try:
        data = encode(value)
    except FormatError:
        return
    for where, length, text in edits:
        at = int(where * len(data))
        data = data[:at] + text.encode() + data[at + length :]
    check_read_alike(data)


def test_a_genuine_submission_has_one_form() -> None:
    head, receipt = GOOD.final_head, GOOD.bundle.receipt.encode()
    good = ReceiptSubmission(receipt=receipt, head=head).encode()
    assert check_read_alike(good)
    members = (b'"head":' + head, b'"receipt":' + receipt)
    name = b'"payloadType":"'
    wrong = [
        good + b" ",
        b" " + good,
        good + b"}",
        good[:-1],
        good.replace(b'"receipt":{', b'"receipt": {'),
        b"{%b,%b}" % (members[1], members[0]),
        b"{%b,%b,%b}" % (members[0], *members),
        b"{%b,%b,%b}" % (*members, members[1]),
        b'{%b,"more":0,%b}' % members,
        b'{%b,%b,"then":0}' % members,
        b"{%b}" % members[1],
        b'{"head":%b}' % good,
        b'{"head":{"head":%b,"receipt":%b},"receipt":%b}' % (head, receipt, receipt),
        good.replace(name, name + b"\\u0061", 1),
        good.replace(name, name + '"é'.encode()[1:], 1),
        good.replace(name, b'"payloadTyp\\u0065":"', 1),
        good.replace(b'"payload":"', b'"payload":"\\u0041', 1),
        good[: len(good) // 2] + b'"' + good[len(good) // 2 :],
    ]
    assert not any(map(check_read_alike, wrong))
    accepted = [
        good.replace(name, name + tricky, 1)
        for tricky in (b"{}[],:", b',\\"receipt\\":{\\"payload\\":\\"', b"\\\\", b"}}")
    ]
    assert all(map(check_read_alike, accepted))
