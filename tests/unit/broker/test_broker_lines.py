"""Lines at the gate: legs one after the other, and stories of those who would have a training go on twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, text

from glasshouse.broker.client.owner_client import Reply
from glasshouse.broker.decide.decisions import Effect
from glasshouse.broker.decide.lines.counting import CheckpointCounter
from glasshouse.broker.http_api import LineRequest, LineView, verify_chain
from glasshouse.broker.store.database_schema import abandoned as table_of_abandoned
from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.handshake.delegation import RUN_USES
from glasshouse.handshake.lines import UNKNOWN_HOLDER
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import challenge_request
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.canonical import encode
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from glasshouse.wire.lines.statements import MAX_STATEMENT_BYTES, CheckpointMessage, LegAbandoned
from simulators.direct_gate import LEASE_S, DirectGate, LineOwner, Machine, StoreMemory

OVER_S = LEASE_S + 61


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[DirectGate]:
    running = DirectGate(tmp_path / "data")
    yield running
    running.close()


@pytest.fixture
def owner(gate: DirectGate) -> LineOwner:
    return LineOwner(gate)


def refused(reply: Reply) -> Code:
    assert reply.status != 200
    return reply.problem().code


def not_launched(launch: Callable[[], object]) -> Code:
    with pytest.raises(GlasshouseError) as caught:
        launch()
    return caught.value.code


def second(owner: LineOwner, first: Machine) -> Machine:
    """Report the first leg lost, and begin the next."""
    owner.lost(first.line, first.start.leg)
    return owner.leg(owner.next(first.line)).begin()


def abandoned(owner: LineOwner, line: bytes) -> list[LegAbandoned]:
    public = owner.gate.broker_public
    return [LegAbandoned.from_envelope(one, public) for one in owner.client().line(line).abandoned]


def test_a_training_goes_on_from_its_last_checkpoint_on_another_machine(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg()
    start = first.opened(first.attest())
    assert start == LineStart(id=first.line, leg=1, seq=0)
    tickets = [first.checkpoint(), first.checkpoint()]
    assert [(ticket.seq, ticket.leg, ticket.holder) for ticket in tickets] == [
        (1, 1, first.key_id),
        (2, 1, first.key_id),
    ]
    assert tickets[1].previous == tickets[0].digest
    first.ends().content()
    view = owner.client().line(first.line)
    assert (view.over, view.leg, view.seq, view.head_seq, view.head_step) == ("receipt", 1, 2, 2, 200)
    later = owner.leg(owner.next(first.line))
    start = later.opened(later.attest())
    assert (start.seq, start.checkpoint, start.previous) == (2, tickets[1].digest, first.key_id)
    assert later.checkpoint().previous == tickets[1].digest
    assert abandoned(owner, first.line) == []
    assert owner.releases() == 1, "later legs are bounded by max_legs and orders"
    records = owner.client().audit()
    verify_chain(records)
    released = [record for record in map(encode, records) if b'"event":"release"' in record]
    assert [b'"leg":%d,' % (leg + 1) in record for leg, record in enumerate(released)] == [True, True]


def test_what_was_answered_and_lost_is_answered_again_and_counts_once(gate: DirectGate, owner: LineOwner) -> None:
    machine = owner.leg()
    start = machine.opened(machine.attest())
    assert machine.opened(machine.attest()) == start
    message, counter = machine.message(), CheckpointCounter(gate.broker, gate.memory)
    assert counter.count(message).effect is Effect.CREDIT
    ticket = machine.ticket(machine.count(message))
    assert counter.count(message).effect is Effect.CHARGE, "a recording of it earns its address nothing"
    gate.advance(5)
    assert machine.ticket(machine.count(message)) == ticket
    later = second(owner, machine)
    assert later.opened(later.attest()).previous == machine.key_id
    assert refused(machine.count(message)) is Code.LINE_SUPERSEDED
    assert refused(machine.attest()) is Code.LINE_FORKED, "nor does an old leg get its key again"


def test_a_leg_waits_for_the_one_before(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg().begin()
    asked = LineRequest(id=first.line, leg=2)
    assert not_launched(lambda: owner.leg(asked)) is Code.LINE_BUSY
    gate.advance(LEASE_S)
    first.reports().content()
    gate.advance(LEASE_S + 59)
    assert not_launched(lambda: owner.leg(asked)) is Code.LINE_BUSY, "it may be on its way out"
    gate.advance(2)
    assert owner.client().line(first.line).over == "lease"
    owner.leg(asked).begin()
    [statement] = abandoned(owner, first.line)
    assert (statement.why, statement.leg, statement.evidence) == ("lease", 1, (first.key_id,))
    assert statement.run_ids == (first.actor.launch.run_id,)
    assert statement.head is not None


def test_a_machine_that_is_heard_from_again_before_its_successor_attests_keeps_its_leg(
    gate: DirectGate, owner: LineOwner
) -> None:
    first = owner.leg().begin()
    gate.advance(OVER_S)
    later = owner.leg(LineRequest(id=first.line, leg=2))
    first.reports().content()
    assert refused(later.attest()) is Code.LINE_BUSY
    assert owner.client().line(first.line).leg == 1


def test_a_release_that_failed_fences_nothing(
    gate: DirectGate, owner: LineOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = owner.leg().begin()
    owner.lost(first.line, 1)
    later = owner.leg(owner.next(first.line))

    def full(_line: bytes, _newest: object) -> None:
        raise UsageError(Code.DISK_FULL, "no room")

    with monkeypatch.context() as patched:
        patched.setattr(gate.memory, "keep", full)
        assert refused(later.attest()) is Code.INTERNAL
    assert owner.client().line(first.line).leg == 1
    gate.close()
    gate.open()
    first.reports().content()
    assert first.checkpoint().seq == 1
    assert refused(later.attest()) is Code.CHECKPOINT_STALE


def test_of_two_who_resume_at_once_one_is_released_to(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg().begin()
    owner.lost(first.line, 1)
    one, other = owner.leg(owner.next(first.line)), owner.leg(owner.next(first.line))
    one.begin()
    assert refused(other.attest()) is Code.LINE_FORKED
    assert not_launched(lambda: owner.leg(LineRequest(id=first.line, leg=2))) is Code.LINE_FORKED
    assert not_launched(lambda: owner.leg(LineRequest(id=first.line, leg=4))) is Code.CHECKPOINT_STALE


def test_an_old_leg_that_comes_back_is_told_to_wipe_and_its_receipt_is_taken(
    gate: DirectGate, owner: LineOwner
) -> None:
    first = owner.leg().begin()
    first.checkpoint()
    last = first.reporter.submission()
    first.reporter.send(last).content()
    later = second(owner, first)
    assert refused(first.reporter.send(last)) is Code.LINE_SUPERSEDED, "the answer would renew its lease"
    assert refused(first.reports()) is Code.LINE_SUPERSEDED
    assert refused(first.count()) is Code.LINE_SUPERSEDED
    first.ends().content()
    later.reports().content()
    later.checkpoint()


def test_no_leg_begins_from_another_checkpoint_than_the_last(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg().begin()
    old, last = first.checkpoint(), first.checkpoint()
    owner.lost(first.line, 1)
    for seq, digest in ((1, old.digest), (2, old.digest), (0, None), (3, bytes(32))):
        asked = owner.next(first.line, seq=seq, checkpoint=digest)
        assert not_launched(lambda asked=asked: owner.leg(asked)) is Code.CHECKPOINT_STALE
    # Launched in time, and then the old machine, which was not lost after all, went on once more.
    later = owner.leg(owner.next(first.line))
    assert later.start.checkpoint == last.digest
    first.checkpoint()
    assert refused(later.attest()) is Code.CHECKPOINT_STALE


def test_a_rewind_is_the_owners_and_gives_no_number_twice(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg().begin()
    old, last = first.checkpoint(), first.checkpoint()
    owner.lost(first.line, 1)
    asked = owner.next(first.line, seq=1, checkpoint=old.digest, rewind=True)
    assert not_launched(lambda: owner.leg(asked)) is Code.LINE_ORDER
    unmeant = owner.order(asked, rewind=False)
    assert not_launched(lambda: owner.leg(unmeant)) is Code.LINE_ORDER
    later = owner.leg(owner.order(asked))
    start = later.opened(later.attest())
    assert (start.seq, start.counted, start.rewind, start.next_seq) == (1, 2, True, 3)
    assert owner.client().line(first.line).head_step == 100
    assert not_launched(lambda: owner.leg(owner.next(first.line, seq=2, checkpoint=last.digest))) is Code.LINE_BUSY
    # The leg counts none: the next begins from where it did, with the same number.
    third = second(owner, later)
    assert (third.start.seq, third.start.counted, third.start.rewind) == (1, 2, False)
    ticket = third.checkpoint()
    assert (ticket.seq, ticket.previous) == (3, old.digest)
    owner.lost(first.line, 3)
    gone = owner.order(owner.next(first.line, seq=1, checkpoint=bytes(32), rewind=True))
    assert not_launched(lambda: owner.leg(gone)) is Code.CHECKPOINT_STALE, "the store has no such checkpoint"
    from_the_beginning = owner.order(owner.next(first.line, seq=0, checkpoint=None, rewind=True))
    assert owner.leg(from_the_beginning).begin().checkpoint().seq == 4


def test_legs_beyond_the_policys_need_an_order_of_the_owners_for_just_this(gate: DirectGate) -> None:
    owner = LineOwner(gate, max_legs=2)
    first = owner.leg().begin()
    ticket = first.checkpoint()
    second(owner, first)
    owner.lost(first.line, 2)
    asked = owner.next(first.line)
    bad = [
        asked,
        owner.order(asked, signer=SigningKey.generate()),
        owner.order(asked, leg=2),
        owner.order(asked, seq=0, digest=None),
        owner.order(asked, line=bytes(32)),
        owner.order(asked, deployment="0" * 32),
    ]
    for one in bad:
        assert not_launched(lambda one=one: owner.leg(one)) is Code.LINE_ORDER
    good = owner.order(asked)
    third = owner.leg(good).begin()
    assert third.start.checkpoint == ticket.digest
    owner.lost(first.line, 3)
    asked = owner.next(first.line)
    assert not_launched(lambda: owner.leg(owner.order(asked, serial_us=1))) is Code.LINE_ORDER, "older than the last"
    assert good.order is not None
    replayed = owner.next(first.line, order=good.order)
    assert not_launched(lambda: owner.leg(replayed)) is Code.LINE_ORDER, "it was for another leg"
    owner.leg(owner.order(asked)).begin()


def test_another_owner_or_package_has_no_such_line(gate: DirectGate, owner: LineOwner) -> None:
    machine = owner.leg().begin()
    ticket = machine.checkpoint()
    owner.lost(machine.line, 1)
    stranger = LineOwner(gate)
    asked = owner.next(machine.line)
    assert not_launched(lambda: stranger.leg(asked)) is Code.RUN_UNKNOWN
    assert not_launched(lambda: owner.client().line(bytes(32))) is Code.RUN_UNKNOWN
    # A signature of another owner's is none of the package's owner, whoever brings it.
    assert not_launched(lambda: owner.lost(machine.line, 1, signer=stranger.signing)) is Code.SIGNATURE
    theirs = stranger.leg().begin()
    assert refused(theirs.count(theirs.message(line=machine.line, previous=ticket.digest))) is Code.RUN_UNKNOWN
    owner.redeploy(max_legs=100)
    assert not_launched(lambda: owner.leg(asked)) is Code.RUN_UNKNOWN, "a line is of one deployment"


def test_tickets_of_others_and_of_other_lines_move_nothing(gate: DirectGate, owner: LineOwner) -> None:
    machine, other = owner.leg().begin(), LineOwner(gate).leg().begin()
    machine.checkpoint()
    for _ in range(3):
        foreign = other.checkpoint()
    owner.lost(machine.line, 1)
    asked = owner.next(machine.line)
    before = owner.client().line(machine.line)
    shown = LineRequest(id=machine.line, leg=2, seq=3, checkpoint=foreign.digest, ticket=foreign.sign(gate.broker.key))
    assert not_launched(lambda: owner.leg(shown)) is Code.CHECKPOINT_FOREIGN
    for signer, code in ((SigningKey.generate(), Code.SIGNATURE), (gate.broker.key, Code.CHECKPOINT_STALE)):
        old = machine.tickets[0].sign(signer)
        again = LineRequest(id=machine.line, leg=2, ticket=old)
        assert not_launched(lambda again=again: owner.leg(again)) is code
    assert owner.client().line(machine.line) == before
    owner.leg(asked).begin()


def test_only_what_the_named_store_has_whole_counts_and_only_for_machine_0(gate: DirectGate, owner: LineOwner) -> None:
    machine = owner.leg().begin()
    stranger = SigningKey.generate()
    for store in (stranger, gate.broker.key):
        assert refused(machine.count(machine.message(store=store))) is Code.CHAIN_DELEGATION
    machine.checkpoint()
    of_another = CheckpointMessage.parse(
        Envelope.parse(machine.message(digest=bytes(32)), max_bytes=4096).payload
    ).stored
    assert refused(machine.count(machine.message(stored=of_another))) is Code.CHECKPOINT_INCOMPLETE
    assert refused(machine.count(machine.message(signer=stranger))) is Code.RUN_UNKNOWN
    for seq, previous in ((1, None), (3, machine.head), (2, None), (2, bytes(32))):
        assert refused(machine.count(machine.message(seq=seq, previous=previous))) is Code.CHECKPOINT_STALE
    assert refused(machine.count(machine.message(leg=2))) is Code.LINE_FORKED
    damaged = machine.message().replace(b'"sig":"', b'"sig":"AAAA')
    assert refused(machine.count(damaged)) is Code.MESSAGE_INVALID
    assert refused(machine.count(bytes(MAX_STATEMENT_BYTES + 1))) is Code.MESSAGE_TOO_LARGE
    owner.delegate(uses=RUN_USES)
    assert refused(machine.count()) is Code.CHAIN_DELEGATION
    assert not_launched(owner.leg) is Code.CHAIN_DELEGATION, "told before anything is rented"


def test_a_leg_of_several_machines_is_released_to_all_or_none_and_ends_with_all(gate: DirectGate) -> None:
    owner = LineOwner(gate, releases=2)
    places = owner.client().add_group(owner.deployment, machines=2, ranks=2)
    with_no_line = not_launched(lambda: owner.leg(group=places[1]))
    assert with_no_line is Code.USAGE, "machine 0 makes the line"
    zero = owner.leg(group=places[0])
    assert not_launched(lambda: owner.launch(group=places[1])) is Code.USAGE, "machines of one group, one of no line"
    one = owner.leg(LineRequest(id=zero.line), group=places[1])
    assert zero.attest().status == 202
    assert owner.client().line(zero.line).leg == 0
    assert one.opened(one.attest()) == zero.opened(zero.actor.ask(zero.challenge, zero.evidence))
    ticket = zero.checkpoint()
    assert refused(one.count(one.message(digest=bytes(32)))) is Code.LINE_FORKED, "only machine 0 counts"
    zero.ends().content()
    assert owner.client().line(zero.line).over == "", "the other goes on"
    another_world = [owner.client().add_group(owner.deployment, machines=1, ranks=2)[0], None]
    gate.advance(OVER_S)
    for place in another_world:
        asked = owner.next(zero.line)
        assert not_launched(lambda asked=asked, place=place: owner.leg(asked, group=place)) is Code.RESUME_WORLD
    places = owner.client().add_group(owner.deployment, machines=2, ranks=2)
    later = [owner.leg(owner.next(zero.line), group=place) for place in places]
    assert later[0].attest().status == 202
    later[1].opened(later[1].attest())
    assert later[1].start.checkpoint == ticket.digest
    assert owner.releases() == 2
    [statement] = abandoned(owner, zero.line)
    assert statement.run_ids == (zero.actor.launch.run_id, one.actor.launch.run_id)
    # A machine of the first leg that asks for its release once more has been overtaken.
    assert refused(one.actor.ask(one.challenge, one.evidence)) is Code.LINE_FORKED


@pytest.fixture
def backup(gate: DirectGate, tmp_path: Path) -> Callable[[], Callable[[], None]]:
    """Return what copies the gate's folder, and returns what puts the copy back."""

    def back_up() -> Callable[[], None]:
        gate.close()
        shutil.copytree(gate.directory, tmp_path / "backup")
        gate.open()

        def restore() -> None:
            gate.close()
            shutil.rmtree(gate.directory)
            shutil.copytree(tmp_path / "backup", gate.directory)
            gate.open()

        return restore

    return back_up


def test_a_gate_that_is_put_back_goes_on_where_its_store_is(
    gate: DirectGate, owner: LineOwner, backup: Callable[[], Callable[[], None]]
) -> None:
    first = owner.leg().begin()
    first.checkpoint()
    restore = backup()
    first.checkpoint()
    later = second(owner, first)
    last = later.checkpoint()
    restore()
    view = owner.client().line(first.line)
    assert (view.leg, view.seq, view.head, view.run_ids) == (2, 3, last.digest, ())
    assert refused(first.count()) is Code.LINE_SUPERSEDED
    assert refused(first.reports()) is Code.LINE_SUPERSEDED
    assert refused(later.count()) is Code.RUN_UNKNOWN, "it does not know that machine any more"
    assert not_launched(lambda: owner.leg(owner.next(first.line))) is Code.LINE_BUSY, "but it may be there"
    gate.advance(OVER_S)
    third = owner.leg(owner.next(first.line))
    assert third.opened(third.attest()).previous == later.key_id
    assert third.checkpoint().seq == 4
    stated = abandoned(owner, first.line)
    assert [(one.leg, one.evidence) for one in stated] == [(1, (first.key_id,)), (2, (later.key_id,))]
    assert stated[1].run_ids == (), "the store's note names the holder; its run is forgotten"


def test_a_gate_that_is_put_back_whole_goes_on_where_its_owner_is(
    gate: DirectGate, owner: LineOwner, backup: Callable[[], Callable[[], None]]
) -> None:
    first = owner.leg().begin()
    first.checkpoint()
    restore = backup()
    first.checkpoint()
    later = second(owner, first)
    shown = owner.client().line(first.line)
    gate.memory, headers = StoreMemory(), gate.memory.headers
    restore()
    # A rollback: what the gate has is not what its owner has seen.
    assert owner.client().line(first.line).seq == 1
    assert shown.ticket is not None
    asked = LineRequest(id=first.line, leg=3, seq=2, checkpoint=shown.head, ticket=shown.ticket)
    assert not_launched(lambda: owner.leg(asked)) is Code.CHECKPOINT_STALE, "leg 2 is not known here"
    owner.lost(first.line, 2)
    assert not_launched(lambda: owner.leg(asked)) is Code.CHECKPOINT_INCOMPLETE, "nor is the checkpoint stored"
    gate.memory.headers.update(headers)
    third = owner.leg(asked)
    assert third.opened(third.attest()).previous == UNKNOWN_HOLDER
    assert not_launched(later.attest) is Code.DEPLOYMENT_UNKNOWN, "its launch is forgotten too"
    assert third.checkpoint().seq == 3
    assert [(one.leg, len(one.evidence), one.why) for one in abandoned(owner, first.line)] == [
        (1, 1, "lost"),
        (2, 0, "lost"),
    ]


def test_a_ticket_names_the_holder_of_a_leg_that_was_forgotten(
    gate: DirectGate, owner: LineOwner, backup: Callable[[], Callable[[], None]]
) -> None:
    first = owner.leg().begin()
    restore = backup()
    later = second(owner, first)
    ticket = later.checkpoint()
    gate.memory, headers = StoreMemory(), gate.memory.headers
    gate.memory.headers.update(headers)
    restore()
    owner.lost(first.line, 2)
    shown = ticket.sign(gate.broker.key)
    third = owner.leg(LineRequest(id=first.line, leg=3, seq=1, checkpoint=ticket.digest, ticket=shown))
    assert third.opened(third.attest()).previous == later.key_id


def test_a_line_of_many_large_legs_that_were_lost_can_still_be_looked_at(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg().begin()
    ids = tuple(f"{machine:032x}" for machine in range(64))
    said = LegAbandoned(
        deployment=owner.deployment,
        leg=1,
        line=first.line,
        evidence=ids,
        manifest_sha256=owner.manifest.sha256,
        run_ids=ids,
        seq=0,
        time_us=0,
        why="lost",
    )
    rows = [
        {"line": first.line, "leg": leg, "envelope": replace(said, leg=leg).sign(gate.broker.key).encode()}
        for leg in range(1, 65)
    ]
    gate.broker.database.write(lambda connection: connection.execute(insert(table_of_abandoned), rows))
    view = LineView.parse(owner.client().line(first.line).encode())
    shown = [LegAbandoned.parse(one.payload).leg for one in view.abandoned]
    assert shown == list(range(65 - len(shown), 65)), "the newest, as many as there is room for"
    assert len(shown) > 30
    owner.lost(first.line, 1)


def test_a_gate_whose_database_is_of_before_lines_has_them_from_now_on(gate: DirectGate) -> None:
    def forget(connection: Connection) -> None:
        for table in ("abandoned", "legs", "line_launches", "lines"):
            connection.execute(text(f"DROP TABLE {table}"))

    older = Actor.enter(Owner(gate, releases=2))
    gate.broker.database.write(forget)
    gate.close()
    gate.open()
    asked = gate.send("POST", "/v1/challenge", challenge_request(older.launch))
    challenge = Challenge.parse(asked.content())
    evidence = older.sign(older.claims(challenge))
    assert older.open(gate.send("POST", "/v1/evidence", evidence).content(), challenge, evidence)
    assert LineOwner(gate).leg().begin().checkpoint().seq == 1


def test_leg_lost_is_the_owners_and_of_an_old_leg_changes_nothing(gate: DirectGate, owner: LineOwner) -> None:
    first = owner.leg().begin()
    assert not_launched(lambda: owner.lost(first.line, 1, signer=SigningKey.generate())) is Code.SIGNATURE
    assert owner.client().line(first.line).over == ""
    assert owner.lost(first.line, 1).over == "lost"
    later = owner.leg(owner.next(first.line)).begin()
    before = owner.client().line(first.line)
    assert owner.lost(first.line, 1) == before, "a statement that is brought again"
    later.reports().content()


def test_a_new_line_goes_on_from_nothing_and_a_world_has_its_bounds(gate: DirectGate, owner: LineOwner) -> None:
    for asked in (LineRequest(leg=2), LineRequest(seq=1, checkpoint=bytes(32))):
        assert not_launched(lambda asked=asked: owner.leg(asked)) is Code.USAGE
    place = Group(id=bytes(32), machines=64, machine=0, ranks=64)
    assert not_launched(lambda: owner.leg(group=place)) is Code.USAGE
    first = owner.leg()
    again = owner.leg(LineRequest(id=first.line))
    assert again.begin().line == first.line, "the machine of the first launch never came"
    assert refused(first.attest()) is Code.RELEASE_BUDGET
