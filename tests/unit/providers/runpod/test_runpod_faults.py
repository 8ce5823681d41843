"""RunPod, asked over real sockets, where that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glasshouse.errors import Code, PeerError, PlatformError, UsageError
from glasshouse.providers.rental.provider import RentedState, UncertainError
from glasshouse.providers.rental.runpod import RunPod
from simulators.fake_api import Reply, quick
from simulators.fake_runpod import FakeRunPod
from simulators.runpod_market import OPTIONS, START, Clock, cheapest, failing


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, Code.PROVIDER_KEY), (403, Code.PROVIDER_KEY), (402, Code.PROVIDER_MONEY)],
)
def test_an_account_that_may_not_is_the_users_to_mend(
    runpod: RunPod, fake: FakeRunPod, status: int, code: Code
) -> None:
    offer = cheapest(runpod)
    fake.troubles.refused = status
    calls = (
        lambda: runpod.offers(OPTIONS),
        lambda: runpod.rent(offer, START),
        lambda: runpod.find("7"),
        lambda: runpod.tagged("gh-"),
        lambda: runpod.output("7"),
        lambda: runpod.give_back("7"),
        lambda: runpod.bill("7"),
    )
    for call in calls:
        error = failing(call)
        assert (error.code, isinstance(error, UsageError), bool(error.hint)) == (code, True, True)
    assert fake.pods == {}


def test_a_wrong_key_is_refused_and_not_repeated(fake: FakeRunPod, clock: Clock) -> None:
    error = failing(lambda: quick(RunPod("rpa_wrong", url=fake.url), clock).offers(OPTIONS))
    assert error.code == Code.PROVIDER_KEY
    assert "rpa_wrong" not in repr(error)
    assert clock.slept == []


@pytest.mark.parametrize("key", ["", "rpa_secret\n", "rpa secret", "rpa_secrét"])
def test_a_key_that_cannot_be_one_is_refused_and_not_shown(key: str) -> None:
    error = failing(lambda: RunPod(key))
    assert (error.code, isinstance(error, UsageError)) == (Code.PROVIDER_KEY, True)
    assert "secr" not in repr(error)


def test_too_many_requests_are_waited_for_as_long_as_is_asked(runpod: RunPod, fake: FakeRunPod, clock: Clock) -> None:
    offer = cheapest(runpod)
    fake.troubles.answers = {
        "GET /v2/pods": [(429, 12), (429, 30)],
        "POST /v2/pods": [(429, 7)],
        "DELETE /v2/pods/{id}": [(503, None)],
    }
    assert runpod.tagged("gh-") == []
    assert clock.slept == [12.5, 30.5]
    machine = runpod.rent(offer, START)
    assert clock.slept[2:] == [7.5]
    runpod.give_back(machine)
    assert fake.left() == []
    assert len(fake.pods) == 1


def test_a_provider_that_is_down_is_said_to_be(runpod: RunPod, fake: FakeRunPod) -> None:
    offer = cheapest(runpod)
    fake.troubles.answers = {"GET /v2/pods": [(502, None)] * 9, "POST /v2/pods": [(429, None)] * 9}
    for call in (lambda: runpod.tagged("gh-"), lambda: runpod.rent(offer, START)):
        error = failing(call)
        assert isinstance(error, PeerError)
        assert error.code == Code.PROVIDER_UNREACHABLE
    assert fake.pods == {}


def test_no_capacity_is_no_offer(runpod: RunPod, fake: FakeRunPod) -> None:
    offer = cheapest(runpod)
    fake.troubles.vanishes = True
    error = failing(lambda: runpod.rent(offer, START))
    assert isinstance(error, PlatformError)
    assert error.code == Code.NO_OFFER
    assert "does not have the resources" in error.message
    fake.troubles.no_capacity = True
    assert runpod.offers(OPTIONS) == []
    gone = replace(offer, id=offer.id.replace("4090", "4091"))
    assert failing(lambda: runpod.rent(gone, START)).code == Code.NO_OFFER


def test_a_price_that_rose_since_the_offer_is_not_paid(runpod: RunPod, fake: FakeRunPod) -> None:
    offers = [cheapest(runpod), cheapest(runpod, gpus=0, gpu=())]
    fake.troubles.dearer = 1.5
    for offer in offers:
        error = failing(lambda offer=offer: runpod.rent(offer, START))
        assert (error.code, "an hour now" in error.message) == (Code.NO_OFFER, True)
    assert fake.pods == {}


def test_a_pod_that_is_dearer_than_its_offer_is_given_back_at_once(runpod: RunPod, fake: FakeRunPod) -> None:
    offer = cheapest(runpod)
    fake.troubles.dearer_once_made = 1.5
    error = failing(lambda: runpod.rent(offer, START))
    assert isinstance(error, UncertainError)
    assert "0.51 dollars an hour" in error.message
    assert (list(fake.pods), fake.left()) == ([error.machine], [])


def test_a_dearer_pod_that_cannot_be_given_back_is_found_by_its_tag(runpod: RunPod, fake: FakeRunPod) -> None:
    offer = cheapest(runpod)
    fake.troubles.dearer_once_made = 1.5
    fake.troubles.answers = {"DELETE /v2/pods/{id}": [(500, None)] * 9}
    error = failing(lambda: runpod.rent(offer, START))
    assert (error.code, "giving it back failed" in error.message) == (Code.RENTAL_UNCERTAIN, True)
    assert [rented.id for rented in runpod.tagged(START.tag)] == [fake.left()[0].id]


def test_a_create_whose_answer_cannot_be_read_is_uncertain(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = cheapest(runpod)
    answer = fake.answer

    def garbled(method: str, *rest: object) -> Reply:
        reply = answer(method, *rest)  # type: ignore[arg-type]
        return replace(reply, value="{") if method == "POST" else reply

    monkeypatch.setattr(fake, "answer", garbled)
    assert isinstance(failing(lambda: runpod.rent(offer, START)), UncertainError)
    assert len(fake.left()) == 1


@pytest.mark.parametrize("status", [302, 500, 502, 504])
def test_a_create_that_failed_there_is_uncertain_and_sent_once(runpod: RunPod, fake: FakeRunPod, status: int) -> None:
    offer = cheapest(runpod)
    fake.troubles.answers = {"POST /v2/pods": [(status, None)]}
    assert isinstance(failing(lambda: runpod.rent(offer, START)), UncertainError)
    assert fake.requests()["POST /v2/pods"] == 1


def test_a_create_without_an_answer_is_found_by_its_tag_once_it_is_listed(
    runpod: RunPod, fake: FakeRunPod, clock: Clock
) -> None:
    offer = cheapest(runpod)
    fake.troubles.lose_creates, fake.troubles.listed_after_s = 1, 60
    error = failing(lambda: runpod.rent(offer, START))
    assert (error.code, error.hint != "") == (Code.RENTAL_UNCERTAIN, True)
    assert fake.requests()["POST /v2/pods"] == 1
    assert runpod.tagged(START.tag) == []
    clock.now += 60
    assert clock.now <= runpod.settles_s
    (rented,) = runpod.tagged(START.tag)
    runpod.give_back(rented.id)
    assert fake.left() == []


def test_a_listing_that_is_stale_and_a_deletion_that_lies_do_not_hide_a_pod(
    runpod: RunPod, fake: FakeRunPod, clock: Clock
) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    fake.troubles.stale_s, fake.troubles.lies = 60, 1
    clock.now += 90
    runpod.give_back(machine)
    assert runpod.find(machine) is not None
    runpod.give_back(machine)
    assert runpod.find(machine) is None
    assert [rented.id for rented in runpod.tagged("gh-")] == [machine]
    clock.now += 60
    assert runpod.tagged("gh-") == []


def test_a_pod_that_does_not_boot_is_starting_for_ever(runpod: RunPod, fake: FakeRunPod, clock: Clock) -> None:
    fake.troubles.never_boots = True
    machine = runpod.rent(cheapest(runpod), START)
    clock.now += 3600
    rented = runpod.find(machine)
    assert rented is not None
    assert (rented.state, rented.host, rented.why) == (RentedState.STARTING, None, "provisioning")


def change(fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
    """Have pods be told of with other fields; None takes one away."""
    told = fake._pod

    def other(pod: object) -> dict[str, object]:
        return {name: value for name, value in {**told(pod), **fields}.items() if value is not ...}  # type: ignore[arg-type]

    monkeypatch.setattr(fake, "_pod", other)


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"status": "STARTING"}, RentedState.STARTING),
        ({"status": "EXITED"}, RentedState.STOPPED),
        ({"status": "ERROR"}, RentedState.STOPPED),
        ({"status": "MIGRATING"}, RentedState.STARTING),
        ({"ssh": {"proxy": None, "direct": None}}, RentedState.STARTING),
        ({"colour": "blue"}, RentedState.RUNNING),
    ],
)
def test_every_state_but_gone_is_one_of_a_pod_that_costs(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object], state: RentedState
) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    change(fake, monkeypatch, **fields)
    rented = runpod.find(machine)
    assert rented is not None
    assert rented.state is state
    assert runpod.tagged("gh-") == [rented]


def test_a_pod_that_is_told_of_as_terminated_is_gone(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    change(fake, monkeypatch, status="TERMINATED")
    assert (runpod.find(machine), runpod.tagged("gh-")) == (None, [])


@pytest.mark.parametrize(
    "fields",
    [
        {"status": ...},
        {"status": 7},
        {"ssh": ...},
        {"ssh": {"direct": "root@host"}},
        {"ssh": {"direct": {"host": "h", "port": True}}},
        {"ssh": {"direct": {"host": "-oProxyCommand=true", "port": 22}}},
        {"ssh": {"direct": {"host": "a\nProxyCommand true", "port": 22}}},
        {"ssh": {"direct": {"host": "h", "port": 65536}}},
        {"status": "RUNNING\x1b[2J"},
        {"id": ""},
        {"cost": ...},
        {"cost": "0.34"},
        {"cost": -1},
        {"name": ...},
    ],
)
def test_an_answer_of_another_version_is_said_to_be_one(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    change(fake, monkeypatch, **fields)
    for call in (lambda: runpod.find(machine), lambda: runpod.tagged("gh-")):
        error = failing(call)
        assert isinstance(error, PeerError)
        assert error.code == Code.PROVIDER_PROTOCOL
        assert "version 2 of RunPod's interface" in error.message


@pytest.mark.parametrize("fields", [{"id": ...}, {"cost": ...}, {"gpu": {"id": "x"}}])
def test_a_pod_that_was_made_and_is_not_understood_is_uncertain(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    offer = cheapest(runpod)
    change(fake, monkeypatch, **fields)
    error = failing(lambda: runpod.rent(offer, START))
    assert isinstance(error, UncertainError)
    assert error.machine == (None if "id" in fields else fake.left()[0].id)


@pytest.mark.parametrize("fields", [{"name": "other"}, {"gpu": {"id": "x", "memory": 8}}])
def test_a_pod_that_is_made_otherwise_than_asked_is_given_back(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    offer = cheapest(runpod)
    change(fake, monkeypatch, **fields)
    start = replace(START, options=replace(OPTIONS, memory_gb=16))
    assert isinstance(failing(lambda: runpod.rent(offer, start)), UncertainError)
    assert (len(fake.pods), fake.left()) == (1, [])


def test_another_version_of_the_interface_is_named(runpod: RunPod, fake: FakeRunPod) -> None:
    offer = cheapest(runpod)
    fake.troubles.other_version = True
    error = failing(lambda: runpod.offers(OPTIONS))
    assert (error.code, "a valid price" in error.message) == (Code.PROVIDER_PROTOCOL, True)
    fake.troubles.other_version = False
    for status in (405, 422):
        fake.troubles.answers = {"POST /v2/pods": [(status, None)]}
        error = failing(lambda: runpod.rent(offer, START))
        assert (error.code, str(status) in error.message) == (Code.PROVIDER_PROTOCOL, True)
    fake.troubles.answers = {"DELETE /v2/pods/{id}": [(409, None)]}
    assert failing(lambda: runpod.give_back("7")).code == Code.PROVIDER_PROTOCOL
    assert fake.pods == {}
