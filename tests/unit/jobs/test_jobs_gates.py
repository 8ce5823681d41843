"""Gates that an owner has added: what is remembered of them when their names change, and revoking at all of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.broker.client.gate_client import GateClient
from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.store.broker_state import DATABASE_NAME
from glasshouse.errors import Code, GlasshouseError, PeerError, UsageError, VerificationError
from glasshouse.jobs.define.package_records import GivenTo, PackageRecord
from glasshouse.jobs.gates.known_gates import (
    GateBroker,
    KnownGate,
    add_gate,
    audit_gate,
    gate_name,
    gate_of,
    known_gates,
    remove_gate,
)
from glasshouse.jobs.gates.revocation import holders, revoke
from glasshouse.jobs.owner.home import Home
from glasshouse.tamper.stage import Owner
from glasshouse.wire.crypto import SigningKey
from simulators.local_broker import LocalBroker

ALICE = SigningKey.generate()


class AtGate:
    """A gate as its owner reaches it."""

    def __init__(self, broker: LocalBroker) -> None:
        self.runtime_url, self.broker_public = broker.runtime_url, broker.broker_public
        self._broker = broker

    def client(self) -> OwnerClient:
        return self._broker.gate(ALICE)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(path=tmp_path / "home").make()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path / "gate", owners=(ALICE.public,)) as running:
        yield running


@pytest.fixture
def alice(gate: LocalBroker) -> Owner:
    return Owner(AtGate(gate), signing=ALICE)


def pinned(gate: LocalBroker) -> KnownGate:
    return gate_of(gate.gate_url, key=gate.broker_public.hex(), certificate=gate.certificate.sha256.hex())


def given(home: Home, alice: Owner, *gates: GivenTo) -> str:
    package_id = alice.manifest.package_id
    record = PackageRecord.load(home, package_id, workload="script")
    for one in gates:
        record = record.given_to(one)
    record.save(home)
    return package_id


def revoked(home: Home, package_id: str, *, also: str | None = None) -> list[str]:
    return revoke(package_id, home, gates=holders(package_id, home, also=also), owner=ALICE)


def again(home: Home, gate: LocalBroker) -> None:
    add_gate(home, "small", pinned(gate), force=True)


def removed(home: Home, gate: LocalBroker) -> None:
    remove_gate(home, "small")
    add_gate(home, "small", pinned(gate))


def renamed(home: Home, gate: LocalBroker) -> None:
    add_gate(home, "same", pinned(gate))
    remove_gate(home, "small")
    remove_gate(home, "same")
    add_gate(home, "small", pinned(gate))


@pytest.mark.parametrize("change", [again, removed, renamed])
def test_a_gate_that_is_added_again_still_has_to_show_the_log_that_it_showed(
    home: Home, gate: LocalBroker, alice: Owner, change: Callable[[Home, LocalBroker], None]
) -> None:
    add_gate(home, "small", pinned(gate))
    alice.client().revoke(alice.manifest.package_id)
    assert audit_gate(home, "small", ALICE)
    gate.edit("DELETE FROM own_audit WHERE sequence = (SELECT max(sequence) FROM own_audit)")
    change(home, gate)
    assert list(known_gates(home)) == ["small"], "what is remembered has no name"
    with pytest.raises(VerificationError) as caught:
        audit_gate(home, "small", ALICE)
    assert caught.value.code is Code.LOG_INVALID


def test_a_gate_is_found_by_its_key_when_its_name_was_given_to_another(
    home: Home, gate: LocalBroker, alice: Owner, tmp_path: Path
) -> None:
    add_gate(home, "small", pinned(gate))
    package_id = given(home, alice, GivenTo(name="small", public=gate.broker_public, deployed=True))
    with LocalBroker(tmp_path / "other", owners=(ALICE.public,)) as other:
        add_gate(home, "small", pinned(other), force=True)
        revoked(home, package_id)
    assert alice.client().deployment(alice.deployment)["revoked"] is True
    assert PackageRecord.load(home, package_id, workload="script").revoked


def test_a_gate_that_has_the_key_of_a_package_keeps_its_name_until_that_is_revoked(
    home: Home, gate: LocalBroker, alice: Owner
) -> None:
    add_gate(home, "small", pinned(gate))
    add_gate(home, "same", pinned(gate))
    package_id = given(home, alice, GivenTo(name="small", public=gate.broker_public, deployed=True))
    remove_gate(home, "small")  # it has another name
    with pytest.raises(UsageError, match=package_id):
        remove_gate(home, "same")
    revoked(home, package_id)
    remove_gate(home, "same")


def test_every_gate_is_tried_and_those_that_were_not_reached_are_named(
    home: Home, gate: LocalBroker, alice: Owner, tmp_path: Path
) -> None:
    with LocalBroker(tmp_path / "gone", owners=(ALICE.public,)) as gone:
        add_gate(home, "first", pinned(gone))
        left = GivenTo(name="first", public=gone.broker_public, deployed=True)
    add_gate(home, "small", pinned(gate))
    unknown = GivenTo(name="lost", public=SigningKey.generate().public, deployed=True)
    package_id = given(home, alice, left, unknown, GivenTo(name="small", public=gate.broker_public, deployed=True))
    with pytest.raises(PeerError) as caught:
        revoked(home, package_id)
    assert caught.value.code is Code.BROKER_UNREACHABLE
    assert "first: " in caught.value.message
    assert "lost: " in caught.value.message
    assert "small" not in caught.value.message
    assert alice.client().deployment(alice.deployment)["revoked"] is True
    assert not PackageRecord.load(home, package_id, workload="script").revoked, "it may be released by one of them"


def test_a_gate_that_had_the_key_and_says_that_it_never_did_has_not_revoked_it(
    home: Home, gate: LocalBroker, alice: Owner
) -> None:
    add_gate(home, "small", pinned(gate))
    package_id = "ab" * 16
    record = PackageRecord.load(home, package_id, workload="script")
    mine = GivenTo(name="small", public=gate.broker_public, deployed=True)
    record.given_to(mine).given_to(replace(mine, deployed=False)).save(home)
    with pytest.raises(GlasshouseError) as caught:
        revoked(home, package_id)
    assert caught.value.code is Code.DEPLOYMENT_UNKNOWN
    # One that took the key in the end, or not: who asked did not hear.
    record.given_to(replace(mine, deployed=False)).save(home)
    revoked(home, package_id)
    assert PackageRecord.load(home, package_id, workload="script").revoked


def test_a_gate_is_meant_by_its_name_and_by_its_url(home: Home, gate: LocalBroker) -> None:
    add_gate(home, "small", pinned(gate))
    assert gate_name(home, "small") == gate_name(home, gate.gate_url) == "small"
    with pytest.raises(UsageError, match="no gate is called 'large'"):
        gate_name(home, "large")


def test_the_usual_port_need_not_be_written(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GateClient, "check_known", lambda _self: None)
    add_gate(home, "far", gate_of("https://Gate.example", key="ab" * 32, certificate=None))
    assert gate_name(home, "https://gate.example:443/") == "far"
    for other in ("https://gate.example:444", "https://gate.example.org"):
        with pytest.raises(UsageError, match="no gate was added"):
            gate_name(home, other)


def test_a_url_that_was_not_added_is_refused_because_no_key_of_it_is_pinned(home: Home, gate: LocalBroker) -> None:
    for _ in ("never added", "removed"):
        with pytest.raises(UsageError, match="its key has to be pinned before") as caught:
            gate_name(home, gate.gate_url)
        assert f"glasshouse gate add NAME {gate.gate_url} --key KEY" in str(caught.value.hint)
        add_gate(home, "small", pinned(gate))
        remove_gate(home, "small")
    with pytest.raises(UsageError, match="not a gate's address"):
        gate_name(home, "http://gate.example")


def test_a_url_of_several_gates_that_differ_in_what_is_pinned_means_none(
    home: Home, gate: LocalBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_gate(home, "small", pinned(gate))
    add_gate(home, "same", pinned(gate))
    assert gate_name(home, gate.gate_url) == "same", "either is this gate"
    monkeypatch.setattr(GateClient, "check_known", lambda _self: None)
    add_gate(home, "other", replace(pinned(gate), public=bytes(32)))
    with pytest.raises(UsageError, match="other, same, small"):
        gate_name(home, gate.gate_url)


def test_whether_a_gate_keeps_what_runs_leave_can_be_asked(home: Home, gate: LocalBroker, tmp_path: Path) -> None:
    add_gate(home, "small", pinned(gate))
    assert not GateBroker(home, "small").stores()
    with LocalBroker(tmp_path / "other", owners=(ALICE.public,), store_bytes=1 << 20) as keeping:
        add_gate(home, "large", pinned(keeping))
        assert GateBroker(home, "large").stores()
    with pytest.raises(PeerError):
        GateBroker(home, "large").stores()


def test_a_gate_whose_database_was_put_back_is_given_no_key_after_a_revocation(home: Home, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    with LocalBroker(tmp_path / "gate", owners=(ALICE.public,)) as gate:
        add_gate(home, "small", pinned(gate))
        alice = Owner(AtGate(gate), signing=ALICE)
        mine = GivenTo(name="small", public=gate.broker_public, deployed=True)
        package_id = given(home, alice, mine)
        with closing(sqlite3.connect(gate.data / DATABASE_NAME)) as now, closing(sqlite3.connect(backup)) as then:
            now.backup(then)
        before = known_gates(home)["small"].audited
        revoked(home, package_id)
        after = known_gates(home)["small"].audited
        assert after[0] > before[0], "the log with the revocation in it is remembered without being asked for"
        assert audit_gate(home, "small", ALICE, newer=True) == []
        database = gate.data / DATABASE_NAME
    for path in database.parent.glob(f"{DATABASE_NAME}*"):
        path.unlink()
    backup.rename(database)
    database.chmod(0o600)
    with LocalBroker(tmp_path / "gate", owners=(ALICE.public,)) as gate:
        add_gate(home, "small", pinned(gate), force=True)
        # The gate cannot tell: what it has holds by itself. Its owner can.
        assert gate.gate(ALICE).deployment(alice.deployment)["revoked"] is False
        for newer in (True, False):
            with pytest.raises(VerificationError, match="not the one of which it showed") as caught:
                audit_gate(home, "small", ALICE, newer=newer)
            assert caught.value.code is Code.LOG_INVALID
        # Nor when it has grown since to as many records, which are others.
        for _ in range(3):
            gate.gate(ALICE).put_delegation(alice.delegation, ALICE.public)
        with pytest.raises(VerificationError):
            audit_gate(home, "small", ALICE, newer=True)
        assert known_gates(home)["small"].audited == after


def test_a_gate_that_was_put_back_is_known_by_its_other_name_too(home: Home, gate: LocalBroker, alice: Owner) -> None:
    add_gate(home, "same", pinned(gate))
    add_gate(home, "small", pinned(gate))
    alice.client().revoke(alice.manifest.package_id)
    audit_gate(home, "small", ALICE)
    assert known_gates(home)["same"].audited == known_gates(home)["small"].audited
    gate.edit("DELETE FROM own_audit WHERE sequence = (SELECT max(sequence) FROM own_audit)")
    with pytest.raises(VerificationError):
        audit_gate(home, "same", ALICE, newer=True)


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_what_is_changed_while_a_gate_answers_stays_changed(
    home: Home, gate: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    add_gate(home, "small", pinned(gate))
    with LocalBroker(tmp_path / "other", owners=(ALICE.public,)) as other:
        asked = GateClient.own_audit

        def answer(client: GateClient, **given: Any) -> Any:
            if change == "removed":
                remove_gate(home, "small")
            else:
                add_gate(home, "small", pinned(other), force=True)
            return asked(client, **given)

        monkeypatch.setattr(GateClient, "own_audit", answer)
        audit_gate(home, "small", ALICE)
        now = {name: one.public for name, one in known_gates(home).items()}
        assert now == ({} if change == "removed" else {"small": other.broker_public})
