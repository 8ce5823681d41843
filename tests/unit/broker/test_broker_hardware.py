"""Hardware evidence at a live gate: what is read of it and when, what it is compared with, and what it costs whom."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.detached import MIN_FIRST_BYTES
from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES, Blob
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.collateral import COLLATERAL_KIND, MAX_PACK_BYTES, Item, Pack
from glasshouse.broker.decide import key_release
from glasshouse.broker.http import bounded, connections, endpoints, rests
from glasshouse.broker.store.broker_state import DATABASE_NAME
from glasshouse.broker.store.quota import Quota
from glasshouse.errors import Code, GlasshouseError
from glasshouse.handshake.messages import Pending, ReleaseMessage, TpmKeys
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire import jwt
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.policy import Assurance
from simulators.hardware_runtime import (
    GENUINE,
    KEYS,
    POLICY,
    Shelf,
    evidence,
    first_of,
    framed,
    post,
    refusal,
    registered,
)
from simulators.local_broker import LocalBroker
from tools.raw_http import head
from tools.waiting import wait_for

QUOTE = b"quote" * 12_000
PACK = Pack(items=(Item(name="amd/crl/Milan", data=b"list"),))


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return registered(monkeypatch)


@pytest.fixture
def owner(broker: LocalBroker) -> Owner:
    return Owner(broker, releases=3, hardware=POLICY)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read took from a socket."""
    received, counted = bounded.BoundedProtocol.data_received, list[int]()

    def count(line: bounded.BoundedProtocol, data: bytes) -> None:
        counted.append(len(data))
        received(line, data)

    monkeypatch.setattr(bounded.BoundedProtocol, "data_received", count)
    return counted


def head_bytes(body: bytes) -> int:
    return len(head("/v1/evidence", "Content-Type: application/json", f"Content-Length: {len(body)}"))


def claims_of(content: bytes) -> dict[str, object]:
    return dict(jwt.parse(ReleaseMessage.parse(content).ear).claims)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_runtime_with_a_tpm_is_released_to(broker: LocalBroker, owner: Owner, shelf: Shelf, tls: bool) -> None:
    actor = Actor.enter(owner)
    challenge = actor.challenge(KEYS)
    assert challenge.credential == b"credential"
    envelope = evidence(actor, challenge, QUOTE)
    status, content = post(broker, framed(envelope, QUOTE), tls=tls)
    assert status == 200
    actor.open(content, challenge, envelope)
    [(blob, bound, pack)] = shelf.asked
    assert (blob, bound.ak, bound.ek, bound.secret, pack.items) == (QUOTE, KEYS.ak, KEYS.ek, shelf.secrets[0], ())
    ear = claims_of(content)
    assert ear["ear_status"] == "affirming"
    assert ear["submods"]["tpm"]["ear_trustworthiness_vector"] == GENUINE  # type: ignore[index]
    told = ear["glasshouse"]
    assert isinstance(told, dict)
    assert (told["tpm_activated"], told["evidence_sha256"]) == (True, sha256(envelope).hex())
    assert "collateral_sha256" not in told
    assert shelf.secrets[0] not in b"".join(
        v for t in broker.everything().values() for r in t for v in r if isinstance(v, bytes)
    )


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_of_what_is_not_authentic_no_hardware_byte_is_read(
    broker: LocalBroker, owner: Owner, shelf: Shelf, read: list[int], tls: bool
) -> None:
    """A flood of envelopes that strangers signed, each with 400 KB behind it."""
    actor, stranger = Actor.enter(owner), SigningKey.generate()
    challenge = actor.challenge(KEYS)
    tail = bytes(400 * 1024)
    envelope = evidence(
        replace(actor, launch=replace(actor.launch, launch_seed=stranger.seed())), challenge, tail[:65536]
    )
    body, before = framed(envelope, tail), broker.everything()
    answers: list[Code] = []
    read.clear()
    threads = [threading.Thread(target=lambda: answers.append(refusal(post(broker, body, tls=tls)))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [Code.EVIDENCE_SIGNATURE] * 12
    assert sum(read) == 12 * (head_bytes(body) + first_of(body)), "bytes of hardware evidence were read"
    assert max(read) <= max(MIN_FIRST_BYTES, first_of(body))
    assert (broker.everything(), shelf.asked) == (before, [])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cut", Code.HARDWARE_LENGTH),
        ("longer", Code.HARDWARE_LENGTH),
        ("without", Code.HARDWARE_LENGTH),
        ("alone", Code.HARDWARE_LENGTH),
        ("other", Code.HARDWARE_DIGEST),
    ],
)
def test_a_tail_that_was_spoiled_on_the_way_changes_nothing(
    broker: LocalBroker, owner: Owner, shelf: Shelf, name: str, code: Code
) -> None:
    """Who reads a nonce and both signatures in the clear could else use the challenge up, and end a whole group."""
    actor = Actor.enter(owner)
    challenge = actor.challenge(KEYS)
    envelope = evidence(actor, challenge, QUOTE)
    spoiled = {
        "cut": framed(envelope, QUOTE[:-1]),
        "longer": framed(envelope, QUOTE + b"\0"),
        "without": framed(envelope, b""),
        "alone": envelope,
        "other": framed(envelope, QUOTE[:-1] + b"?"),
    }
    before = broker.everything()
    assert refusal(post(broker, spoiled[name])) is code
    assert (broker.everything(), shelf.asked) == (before, [])
    assert post(broker, framed(envelope, QUOTE))[0] == 200


def test_a_frame_around_nothing_is_refused(broker: LocalBroker, owner: Owner) -> None:
    """One message has one form."""
    actor = Actor.enter(owner)
    envelope = actor.sign(actor.claims(actor.challenge()))
    for rest in (b"", b"x"):
        assert refusal(post(broker, framed(envelope, rest))) is Code.HARDWARE_LENGTH
    assert post(broker, envelope)[0] == 200


@pytest.mark.parametrize(
    ("begin", "code"),
    [
        (0, Code.MESSAGE_INVALID),
        (MIN_FIRST_BYTES - 1, Code.MESSAGE_INVALID),
        (MAX_EVIDENCE_BYTES + 1, Code.MESSAGE_TOO_LARGE),
        (2**24 - 1, Code.MESSAGE_TOO_LARGE),
        (MAX_EVIDENCE_BYTES, Code.MESSAGE_INVALID),
    ],
)
def test_a_first_part_of_another_length(broker: LocalBroker, read: list[int], begin: int, code: Code) -> None:
    body = begin.to_bytes(4, "big") + b"{" * 30_000 + bytes(100_000)
    assert refusal(post(broker, body)) is code
    assert sum(read) <= head_bytes(body) + 4 + MAX_EVIDENCE_BYTES
    assert refusal(post(broker, begin.to_bytes(4, "big")[:3])) is Code.MESSAGE_INVALID
    assert refusal(post(broker, MIN_FIRST_BYTES.to_bytes(4, "big") + b"{")) is Code.MESSAGE_INVALID


def test_a_body_of_one_part_is_no_longer_than_an_envelope_may_be(broker: LocalBroker, read: list[int]) -> None:
    assert refusal(post(broker, b"{" * 2000, length=MAX_EVIDENCE_BYTES + 1)) is Code.MESSAGE_TOO_LARGE
    assert sum(read) <= MIN_FIRST_BYTES


@pytest.mark.parametrize("level", [Assurance.SOFTWARE, Assurance.TPM])
def test_a_policy_of_software_refuses_without_reading(
    broker: LocalBroker, shelf: Shelf, read: list[int], level: Assurance
) -> None:
    actor = Actor.enter(Owner(broker))
    challenge = actor.challenge(KEYS)
    assert challenge.credential is None
    body = framed(evidence(actor, challenge, QUOTE, level=level), QUOTE)
    read.clear()
    assert refusal(post(broker, body)) is Code.HARDWARE_UNEXPECTED
    assert (sum(read), shelf.asked) == (head_bytes(body) + first_of(body), [])


def test_what_was_answered_is_not_read_again(broker: LocalBroker, owner: Owner, shelf: Shelf, read: list[int]) -> None:
    actor = Actor.enter(owner)
    body = framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE)
    assert post(broker, body)[0] == 200
    for _ in range(2):
        read.clear()
        assert refusal(post(broker, body)) is Code.NONCE_REPLAYED
        assert sum(read) == head_bytes(body) + first_of(body)
    assert len(shelf.asked) == 1


def test_a_tail_that_does_not_come_is_not_waited_for(
    broker: LocalBroker, owner: Owner, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "BODY_TIMEOUT_S", 0.2)
    actor = Actor.enter(owner)
    body = framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE)
    assert refusal(post(broker, body[: first_of(body)], length=len(body))) is Code.MESSAGE_INVALID
    monkeypatch.undo()
    registered(monkeypatch)
    assert post(broker, body)[0] == 200
    assert shelf.asked == []


def test_an_envelope_that_arrived_gives_way_to_nothing(
    broker: LocalBroker, owner: Owner, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits to be read, strangers fill the room with unfinished requests."""
    cut, entered = [], threading.Event()
    monkeypatch.setattr(connections, "MOST_BYTES", 10_000)
    monkeypatch.setattr(bounded.BoundedProtocol, "cut", lambda line: cut.append(line._left) or line.transport.abort())
    read_first = key_release.read_evidence

    def slow(*arguments: Any) -> Any:
        entered.set()
        assert crowded.wait(10)
        return read_first(*arguments)

    crowded, answers = threading.Event(), list[int]()
    monkeypatch.setattr(key_release, "read_evidence", slow)
    actor = Actor.enter(owner)
    body = framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE)
    honest = threading.Thread(target=lambda: answers.append(post(broker, body)[0]))
    honest.start()
    assert entered.wait(10)
    host, _, port = broker.runtime_url.rpartition("//")[2].rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            stranger.sendall(head("/v1/receipt", "Content-Length: 100000") + b"." * 15_000)
        wait_for(lambda: cut, within_s=10)
        crowded.set()
        honest.join()
    assert answers == [200]


def test_recordings_that_are_played_again_slowly_do_not_keep_the_runtime_out(
    broker: LocalBroker, owner: Owner, shelf: Shelf
) -> None:
    """Someone on the way has the envelope, plays it on more connections than a launch has places, and begins anew."""
    actor = Actor.enter(owner)
    body = framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE)
    start = head("/v1/evidence", "Content-Type: application/json", f"Content-Length: {len(body)}")
    host, _, port = broker.runtime_url.rpartition("//")[2].rpartition(":")
    ended, held = threading.Event(), threading.Semaphore(0)

    def replay(more: int) -> None:
        while not ended.is_set():
            with socket.create_connection((host, int(port)), timeout=10) as line, contextlib.suppress(OSError):
                line.sendall(start + body[: first_of(body) + more])
                held.release()
                line.settimeout(1)
                line.recv(1)

    replayers = [threading.Thread(target=replay, args=(100 * one,)) for one in range(rests.RESTS_OF_LAUNCH + 2)]
    for replayer in replayers:
        replayer.start()
    for _ in range(2 * len(replayers)):
        assert held.acquire(timeout=10)
    try:
        assert post(broker, body)[0] == 200
    finally:
        ended.set()
        for replayer in replayers:
            replayer.join()
    assert owner.releases() == 1


def test_recordings_that_came_together_with_the_evidence_are_not_appraised(
    broker: LocalBroker, owner: Owner, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of refused evidence nothing is remembered, so that each would cost as much as the first."""
    asked, begun, read_first = [], [], key_release.read_evidence

    def reads(*arguments: Any) -> Any:
        found = read_first(*arguments)
        begun.append(1)
        return found

    def refuses(*_arguments: Any, **_named: Any) -> Any:
        asked.append(1)
        raise CheckFailedError("12", Code.HARDWARE_SIGNATURE, "not this TPM's")

    monkeypatch.setattr(Shelf, "appraise", refuses)
    monkeypatch.setattr(key_release, "read_evidence", reads)
    actor = Actor.enter(owner)
    body = framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE)
    start = head("/v1/evidence", "Content-Type: application/json", f"Content-Length: {len(body)}")
    host, _, port = broker.runtime_url.rpartition("//")[2].rpartition(":")
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection((host, int(port)), timeout=10)) for _ in range(3)]
        for line in lines:
            line.sendall(start + body[: first_of(body)])
        wait_for(lambda: len(begun) == len(lines))
        for line in lines:
            line.sendall(body[first_of(body) :])
            assert line.recv(12) == (b"HTTP/1.1 403" if line is lines[0] else b"HTTP/1.1 409")
    assert len(asked) == 2, "ahead of the decision, and by it"


def test_no_lock_is_held_while_hardware_is_appraised(
    broker: LocalBroker, owner: Owner, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gate process on the same database decides meanwhile, and heads of runs are taken by this one."""
    appraise, another = Shelf.appraise, sqlite3.connect(broker.data / DATABASE_NAME, timeout=0, check_same_thread=False)

    def beside(*arguments: Any, **named: Any) -> Any:
        another.execute("BEGIN IMMEDIATE")
        another.rollback()
        return appraise(*arguments, **named)

    monkeypatch.setattr(Shelf, "appraise", beside)
    actor = Actor.enter(owner)
    with contextlib.closing(another):
        assert post(broker, framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE))[0] == 200
    assert len(shelf.asked) == 1, "the decision finds it done"


def test_nothing_is_appraised_of_what_an_earlier_check_refuses(broker: LocalBroker, owner: Owner, shelf: Shelf) -> None:
    actor = Actor.enter(owner)
    claims = replace(actor.claims(actor.challenge(KEYS)), assurance=Assurance.TPM, manifest_sha256=bytes(32))
    body = framed(actor.sign(claims, [Blob.of("tpm", QUOTE)]), QUOTE)
    assert refusal(post(broker, body)) is Code.MANIFEST_MISMATCH
    assert shelf.asked == []
    assert refusal(post(broker, body)) is Code.NONCE_REPLAYED


def test_a_defect_of_an_appraiser_uses_the_challenge_up_like_a_refusal(
    broker: LocalBroker, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered(monkeypatch)
    monkeypatch.setattr(Shelf, "appraise", lambda *_arguments, **_named: 1 // 0)
    actor = Actor.enter(owner)
    body = framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE)
    assert refusal(post(broker, body)) is Code.INTERNAL
    assert refusal(post(broker, body)) is Code.NONCE_REPLAYED


def test_keys_that_no_tpm_holds_get_no_challenge(broker: LocalBroker, owner: Owner, shelf: Shelf) -> None:
    actor, before = Actor.enter(owner), broker.everything()
    with pytest.raises(GlasshouseError) as refused:
        actor.challenge(TpmKeys(ak=KEYS.ak, ek=b"another"))
    assert refused.value.code is Code.TPM_ENDORSEMENT
    assert broker.count("challenges") == len(before["challenges"])
    assert actor.challenge().credential is None, "a runtime without a TPM asks as it did before"


def test_a_group_is_released_to_by_what_was_appraised_when_each_machine_came(
    broker: LocalBroker, owner: Owner, shelf: Shelf
) -> None:
    machines = [Actor.enter(owner, launch) for launch in owner.group(2)]
    assert [answered(broker, actor, number) for number, actor in enumerate(machines)] == [202, 200]
    assert [blob[:1] for blob, _, _ in shelf.asked] == [b"0", b"1"], "each once"


@pytest.mark.parametrize("change", ["pack", "expiry", "restart"])
def test_a_group_is_appraised_again_where_something_changed(tmp_path: Path, shelf: Shelf, change: str) -> None:
    """Another pack may revoke, and a certificate may have ended; a gate that was restarted remembers nothing."""
    with LocalBroker(tmp_path) as broker:
        owner = Owner(broker, releases=3, hardware=POLICY)
        first, second = (Actor.enter(owner, launch) for launch in owner.group(2))
        if change == "expiry":
            shelf.not_after_us = broker.clock_us() + 20_000_000
        assert answered(broker, first, 0) == 202
        if change == "pack":
            owner.client().put_collateral(PACK, owner.signing.public)
        if change == "expiry":
            broker.advance(30)
            shelf.not_after_us = 2**53 - 1
        if change != "restart":
            assert answered(broker, second, 1) == 200
    if change == "restart":
        with LocalBroker(tmp_path) as broker:
            assert answered(broker, replace(second, url=broker.runtime_url), 1) == 200
    assert sorted(blob[:1] for blob, _, _ in shelf.asked) == [b"0", b"0", b"1"]
    assert all(bound.secret in shelf.secrets for _, bound, _ in shelf.asked)


def test_the_machine_that_does_not_pass_again_is_to_blame(broker: LocalBroker, owner: Owner, shelf: Shelf) -> None:
    first, second = (Actor.enter(owner, launch) for launch in owner.group(2))
    assert answered(broker, first, 0) == 202
    owner.client().put_collateral(PACK, owner.signing.public)
    shelf.refusal = Code.HARDWARE_REVOKED
    challenge = second.challenge(KEYS)
    assert refusal(post(broker, framed(evidence(second, challenge, b"1" * 5000), b"1" * 5000))) is Code.HARDWARE_REVOKED
    assert broker.rows("SELECT state, culprit, code FROM groups") == [("refused", 1, "hardware-revoked")]
    assert broker.count("releases") == 0


@pytest.mark.parametrize("claim", ["ak", "ek_sha256"])
def test_one_tpm_does_not_stand_for_two_machines_of_a_group(
    broker: LocalBroker, owner: Owner, shelf: Shelf, claim: str
) -> None:
    first, second = (Actor.enter(owner, launch) for launch in owner.group(2))
    shelf.claims = {claim: "aa"}
    assert answered(broker, first, 0) == 202
    challenge = second.challenge(KEYS)
    assert refusal(post(broker, framed(evidence(second, challenge, b"1" * 5000), b"1" * 5000))) is Code.TPM_KEY
    assert broker.rows("SELECT state, culprit, code FROM groups") == [("refused", 1, "tpm-key")]
    assert broker.count("releases") == 0


def test_two_tpms_stand_for_two_machines(broker: LocalBroker, owner: Owner, shelf: Shelf) -> None:
    first, second = (Actor.enter(owner, launch) for launch in owner.group(2))
    shelf.claims = {"ak": "aa", "ek_sha256": "ee"}
    assert answered(broker, first, 0) == 202
    shelf.claims = {"ak": "ab", "ek_sha256": "ef"}
    assert answered(broker, second, 1) == 200


def answered(broker: LocalBroker, actor: Actor, number: int) -> int:
    blob = str(number).encode() * 5000
    envelope = evidence(actor, actor.challenge(KEYS), blob)
    status, content = post(broker, framed(envelope, blob))
    if status == 202:
        assert Pending.parse(content).accepted == 1
    return status


def test_an_owner_brings_collateral_and_the_result_names_it(broker: LocalBroker, owner: Owner, shelf: Shelf) -> None:
    owner.client().put_collateral(Pack(items=()), owner.signing.public)
    assert owner.client().put_collateral(PACK, owner.signing.public) == PACK.sha256.hex(), "the last counts"
    Owner(broker).client().put_collateral(Pack(items=()), bytes(32))  # another's is not theirs
    actor = Actor.enter(owner)
    status, content = post(broker, framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE))
    assert status == 200
    assert shelf.asked[0][2] == PACK
    assert claims_of(content)["glasshouse"]["collateral_sha256"] == PACK.sha256.hex()  # type: ignore[index]


def test_no_pack_is_taken_for_another_owners(broker: LocalBroker, owner: Owner, shelf: Shelf) -> None:
    """A pack that was put in place of another while both were read has the other's digest beside it."""
    careless = Owner(broker, hardware=POLICY)
    careless.client().put_collateral(Pack(items=()), careless.signing.public)
    owner.client().put_collateral(PACK, owner.signing.public)
    with contextlib.closing(sqlite3.connect(broker.data / DATABASE_NAME)) as database:
        named = (PACK.sha256, careless.signing.public)
        assert database.execute("UPDATE collateral SET sha256 = ? WHERE owner = ?", named).rowcount == 1
        database.commit()
    for one, pack in ((careless, Pack(items=())), (owner, PACK)):
        actor = Actor.enter(one)
        content = post(broker, framed(evidence(actor, actor.challenge(KEYS), QUOTE), QUOTE))[1]
        assert shelf.asked[-1][2] == pack
        assert claims_of(content)["glasshouse"]["collateral_sha256"] == pack.sha256.hex()  # type: ignore[index]


def test_collateral_comes_over_the_network_within_the_owners_bounds(tmp_path: Path) -> None:
    mine, other = SigningKey.generate(), SigningKey.generate()
    with LocalBroker(tmp_path, owners=(mine.public, other.public), quota=Quota(per_day=2)) as broker:
        gate = broker.gate(mine)
        large = Pack(items=(Item(name="nvidia/rim/A", data=bytes(MAX_PACK_BYTES * 3 // 4 - 200)),))
        assert gate.put_collateral(large, mine.public) == large.sha256.hex()
        with pytest.raises(GlasshouseError) as foreign:
            gate.put_collateral(PACK, other.public)
        assert foreign.value.code is Code.PACKAGE_OWNER
        gate.put_collateral(PACK, mine.public)
        with pytest.raises(GlasshouseError) as many:
            gate.put_collateral(PACK, mine.public)
        assert many.value.code is Code.OWNER_QUOTA
        assert broker.rows("SELECT pack FROM collateral") == [(PACK.encode(),)]
        records, _ = gate.own_audit()
        assert [record["event"] for record in records] == ["collateral", "collateral"]  # type: ignore[index,call-overload]
        assert COLLATERAL_KIND.encode() in PACK.encode()
