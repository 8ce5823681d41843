"""An owner who is enrolled, and tries to have a gate for themselves: what they take, no other lacks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest

from glasshouse.broker.http.endpoints import Admission
from glasshouse.broker.store.quota import Quota
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, RefusedError
from glasshouse.handshake.owner_api import OwnerRequest
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.crypto import SigningKey
from simulators.gate_store import ALICE, MALLORY, OWNERS, AtGate
from simulators.local_broker import LocalBroker
from simulators.reporting import release_to

Serve = Callable[[Quota], LocalBroker]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    running: list[LocalBroker] = []

    def start(quota: Quota) -> LocalBroker:
        running.append(LocalBroker(tmp_path, owners=OWNERS, quota=quota))
        return running[-1]

    yield start
    for one in running:
        one.close()


def owner(gate: LocalBroker, key: SigningKey) -> Owner:
    return Owner(AtGate(gate, key), signing=key, releases=3)


def deploys_until_refused(gate: LocalBroker, key: SigningKey) -> tuple[int, RefusedError]:
    """Deploy a package of its own each time; return how many were taken, and how the next was refused."""
    for taken in range(20):
        try:
            owner(gate, key)
        except RefusedError as error:
            return taken, error
    raise AssertionError("it was never refused")


def works(gate: LocalBroker, key: SigningKey) -> None:
    """Deploy, launch and be released to, as any owner does."""
    actor = Actor.enter(owner(gate, key))
    assert release_to(actor)


def test_package_keys_fill_no_more_than_their_owners_part(serve: Serve) -> None:
    gate = serve(Quota(packages=3))
    first = owner(gate, MALLORY)
    taken, error = deploys_until_refused(gate, MALLORY)
    assert (taken, error.code) == (2, Code.OWNER_QUOTA)
    assert "3 package keys that are not revoked" in error.message
    assert gate.count("packages") == 3, "nothing of what was refused is kept"
    works(gate, ALICE)
    first.client().revoke(first.manifest.package_id)
    assert deploys_until_refused(gate, MALLORY)[0] == 1


def test_deployments_that_are_over_count_no_more(serve: Serve) -> None:
    gate = serve(Quota(deployments=2))
    assert deploys_until_refused(gate, MALLORY)[0] == 2
    assert gate.count("deployments") == 2
    works(gate, ALICE)
    gate.edit("UPDATE live SET not_after_us = 1 WHERE owner = ?", MALLORY.public)  # time passes
    assert deploys_until_refused(gate, MALLORY)[0] == 2
    [(kept,)] = gate.rows("SELECT count(*) FROM live")
    assert kept == 3, "what is over is not counted, nor kept for that"


@pytest.mark.parametrize("what", ["launch", "group", "delegation"])
def test_what_is_made_in_a_day_is_bounded_and_the_next_day_is_another(serve: Serve, what: str) -> None:
    gate = serve(Quota(per_day=4))
    mallory = owner(gate, MALLORY)
    make: dict[str, Callable[[], object]] = {
        "launch": mallory.launch,
        "group": lambda: mallory.client().add_group(mallory.deployment, machines=2, ranks=1),
        "delegation": lambda: mallory.client().put_delegation(mallory.delegation, MALLORY.public),
    }
    made = 1 if what == "delegation" else 0
    for _ in range(4 - made):
        make[what]()
    records = gate.count("audit")
    for _ in range(3):
        with pytest.raises(RefusedError, match=f"4 {what}s of today") as caught:
            make[what]()
        assert caught.value.code is Code.OWNER_QUOTA
    assert gate.count("audit") == records, "a refusal leaves no record"
    works(gate, ALICE)
    gate.edit("UPDATE spent SET day = day - 1 WHERE owner = ?", MALLORY.public)
    make[what]()


def test_who_has_the_broker_itself_is_not_bounded(serve: Serve) -> None:
    gate = serve(Quota(packages=0, deployments=0, per_day=0))
    mine = Owner(gate)
    assert release_to(Actor.enter(mine))
    assert gate.count("live") == gate.count("spent") == 0


def test_of_an_owner_who_asks_all_at_once_few_requests_wait_before_those_of_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = serve(Quota(in_flight=2))
    mallory, alice = owner(gate, MALLORY), owner(gate, ALICE)
    begun, goes_on, take = threading.Event(), threading.Event(), Admission.take

    def slow(self: Admission, request: OwnerRequest, body: bytes) -> Scope:
        begun.set()
        assert goes_on.wait(30)
        return take(self, request, body)

    def asks(one: Owner, key: SigningKey) -> Code | None:
        try:
            AtGate(gate, key).client().deployment(one.deployment)
        except RefusedError as error:
            return error.code
        return None

    monkeypatch.setattr(Admission, "take", slow)
    with ThreadPoolExecutor(8) as many:
        answers = [many.submit(asks, mallory, MALLORY)]
        assert begun.wait(30)
        answers += [many.submit(asks, mallory, MALLORY) for _ in range(5)]
        refused = [one.result(30) for _, one in zip(range(4), as_completed(answers, timeout=10), strict=False)]
        assert refused == [Code.OWNER_QUOTA] * 4, "while one is decided and one waits"
        hers = many.submit(asks, alice, ALICE)
        goes_on.set()
        assert hers.result(30) is None
        assert [one.result(30) for one in answers].count(None) == 2
    assert asks(mallory, MALLORY) is None
