"""RunPod, asked over real sockets: what is offered, rented and given back, and what happens where that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.providers.rental.provider import Offer, Options, RentedState, Start, UncertainError
from glasshouse.providers.rental.runpod import RunPod
from simulators.api_description import described, needs_description
from simulators.fake_api import Reply
from simulators.fake_runpod import FakeRunPod, fake_runpod

DESCRIPTION = "runpod-rest-v2.openapi.json"
OPTIONS = Options(
    gpu=("RTX 4090",),
    gpus=1,
    memory_gb=0,
    disk_gb=20,
    regions=(),
    most_per_hour_usd=Decimal(10),
    spot=False,
    image="pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
)
START = Start(
    tag="gh-olga-blue-1",
    nonce="0123456789abcdef" * 2,
    ssh_public="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB8Zl9c2pM2y",
    ends_s=3600,
    ends_at_s=int(time.time()) + 3600,
    options=OPTIONS,
)


class Clock:
    """Time that passes as a test says, and where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fake(tmp_path: Path, clock: Clock) -> Iterator[FakeRunPod]:
    with fake_runpod(tmp_path, machines=False, clock=clock) as made:
        yield made


@pytest.fixture
def runpod(fake: FakeRunPod, clock: Clock) -> RunPod:
    made = RunPod(fake.key, fake.url, sleep=clock.sleep, jitter=lambda: 0.5)
    made.quiet_s = 0.05
    return made


def cheapest(runpod: RunPod, **other: object) -> Offer:
    return runpod.offers(replace(OPTIONS, **other))[0]  # type: ignore[arg-type]


def failing(act: Callable[[], object]) -> GlasshouseError:
    with pytest.raises(GlasshouseError) as caught:
        act()
    assert caught.value.message
    return caught.value


# What is offered.


def test_the_cheapest_comes_first_of_what_fits(runpod: RunPod) -> None:
    offers = runpod.offers(OPTIONS)
    assert [(offer.region, offer.usd_per_hour.quantize(Decimal("0.001"))) for offer in offers] == [
        ("EU-RO-1", Decimal("0.343")),
        ("US-KS-2", Decimal("0.343")),
        ("EU-RO-1", Decimal("0.693")),
        ("US-KS-2", Decimal("0.693")),
    ]
    assert {(offer.gpu, offer.gpus, offer.gpu_memory_gb) for offer in offers} == {("NVIDIA GeForce RTX 4090", 1, 24)}
    assert not any(offer.spot for offer in runpod.offers(replace(OPTIONS, spot=True)))


def test_prices_are_of_all_gpus_and_the_disk(runpod: RunPod) -> None:
    two = cheapest(runpod, gpus=2, disk_gb=730)
    assert (two.gpus, two.usd_per_hour) == (2, 2 * Decimal("0.34") + Decimal("0.1"))
    assert runpod.offers(replace(OPTIONS, most_per_hour_usd=Decimal("0.3"))) == []
    assert {offer.id.split("/")[0] for offer in runpod.offers(replace(OPTIONS, gpus=8))} == {"SECURE"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (("RTX 4090",), {"NVIDIA GeForce RTX 4090"}),
        (("nvidia geforce rtx 3090",), {"NVIDIA GeForce RTX 3090"}),
        (("A100 80GB",), {"NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB"}),
        (("A100 SXM", "RTX 3090"), {"NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090"}),
        (("H100",), set()),  # there is none now
    ],
)
def test_a_kind_of_gpu_is_named_as_people_do(runpod: RunPod, wanted: tuple[str, ...], found: set[str]) -> None:
    assert {offer.gpu for offer in runpod.offers(replace(OPTIONS, gpu=wanted))} == found


def test_a_kind_that_one_cloud_alone_lists_is_offered(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = fake._gpus

    def fewer(*, stock: bool = False, cloud: str | None = None) -> list[dict[str, object]]:
        return [kind for kind in shelf(stock=stock) if cloud == "SECURE" or kind["name"] != "RTX 4090"]

    monkeypatch.setattr(fake, "_gpus", fewer)
    assert {offer.id.split("/")[0] for offer in runpod.offers(OPTIONS)} == {"SECURE"}


def test_an_unknown_gpu_and_region_are_refused_with_the_nearest(runpod: RunPod) -> None:
    for wrong, near in (("RTX 4900", "RTX 4090"), ("A10 80 GB", "A100"), ("  ", "")):
        error = failing(lambda wrong=wrong: runpod.offers(replace(OPTIONS, gpu=(wrong,))))
        assert isinstance(error, UsageError)
        assert (error.code, near in error.hint) == (Code.USAGE, True)
    error = failing(lambda: runpod.offers(replace(OPTIONS, regions=("EU-RO-2",))))
    assert error.code == Code.USAGE
    assert "EU-RO-1" in error.hint


def test_a_region_is_a_data_center_or_a_continent(runpod: RunPod) -> None:
    wanted = replace(OPTIONS, gpu=())
    assert {offer.region for offer in runpod.offers(replace(wanted, regions=("eu-ro-1",)))} == {"EU-RO-1"}
    assert {offer.region for offer in runpod.offers(replace(wanted, regions=("Europe",)))} == {"EU-RO-1", "EUR-IS-1"}
    assert {offer.region for offer in runpod.offers(replace(wanted, regions=("North America",)))} == {"US-KS-2"}


def test_without_gpus_a_machine_of_processors_is_offered(runpod: RunPod, fake: FakeRunPod) -> None:
    offers = runpod.offers(replace(OPTIONS, gpu=(), gpus=0, memory_gb=30))
    assert [(offer.id, offer.memory_gb) for offer in offers] == [
        ("CPU/EU-RO-1/4/cpu5m", 32),
        ("CPU/US-KS-2/4/cpu5m", 32),
        ("CPU/EU-RO-1/16/cpu3c", 32),
    ]
    assert runpod.offers(replace(OPTIONS, gpus=0, memory_gb=1000)) == []
    machine = runpod.rent(offers[0], START)
    assert fake.pods[machine].request["cpu"] == {"id": "cpu5m", "vcpuCount": 4}
    assert "gpu" not in fake.pods[machine].request


# What is rented.


def test_a_pod_is_rented_found_and_given_back(runpod: RunPod, fake: FakeRunPod, clock: Clock) -> None:
    offer = cheapest(runpod, memory_gb=64)
    machine = runpod.rent(offer, replace(START, options=replace(OPTIONS, memory_gb=64)))
    request = fake.pods[machine].request
    assert request["name"] == START.tag
    assert (request["ports"], request["env"]) == (["22/tcp"], {"PUBLIC_KEY": START.ssh_public})
    assert request["gpu"] == {"id": "NVIDIA GeForce RTX 4090", "count": 1, "minRamPerGpu": 64}
    assert (request["cloud"], request["dataCenterIds"], request["disk"]) == ("COMMUNITY", ["EU-RO-1"], 20)
    assert START.nonce in request["cmd"][0]
    rented = runpod.find(machine)
    assert rented is not None
    assert (rented.state, rented.host, rented.port) == (RentedState.RUNNING, "203.0.113.7", 10022)
    assert (rented.tag, rented.usd_per_hour) == (START.tag, Decimal("0.34"))
    assert runpod.tagged("gh-olga-") == [rented]
    assert runpod.tagged("gh-olaf-") == []
    assert runpod.bill(machine) is None
    clock.now += 7200
    runpod.give_back(machine)
    runpod.give_back(machine)
    assert (runpod.find(machine), runpod.tagged("gh-")) == (None, [])
    assert runpod.bill(machine) == Decimal("0.68")
    assert fake.left() == []


def test_requests_are_counted_and_the_time_between_equal_ones_measured(
    runpod: RunPod, fake: FakeRunPod, clock: Clock
) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    assert fake.polled_s() is None
    for pause_s in (20, 10, 30):
        runpod.find(machine)
        clock.now += pause_s
    assert fake.polled_s() == 10
    # Both clouds' GPUs, the price once more, and the pod.
    assert (fake.requests()["GET /v2/pods/{id}"], len(fake.exchanges)) == (3, 2 + 1 + 1 + 3)


def test_neither_key_is_where_it_should_not_be(runpod: RunPod, fake: FakeRunPod) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    assert fake.key not in repr(fake.pods[machine].request)
    assert fake.key not in repr([each.target for each in fake.exchanges])
    assert fake.key not in repr(vars(runpod))
    fake.troubles.answers = {"GET /v2/pods": [(418, None)]}
    assert fake.key not in repr(failing(lambda: runpod.tagged("gh-")))


def test_pods_of_others_are_left_alone_and_those_of_clusters_are_listed(runpod: RunPod, fake: FakeRunPod) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    fake.pods[machine].in_cluster = True
    assert [rented.id for rented in runpod.tagged("gh-olga-blue-")] == [machine]
    error = failing(lambda: runpod.give_back(machine))
    assert (error.code, "goes with its cluster" in error.message) == (Code.PROVIDER_PROTOCOL, True)
    fake.pods[machine].request["name"] = "pytorch-training"
    assert runpod.tagged("gh-") == []


# What fails.


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
    error = failing(lambda: RunPod("rpa_wrong", url=fake.url, sleep=clock.sleep).offers(OPTIONS))
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


def test_a_stream_of_output_is_read_until_it_is_quiet_and_to_its_bound(
    runpod: RunPod, fake: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = runpod.rent(cheapest(runpod), START)
    assert runpod.output(machine) == ""
    assert runpod.output("7") == ""
    written = [""]

    class Host:
        loops = None
        port = 1

        def output(self) -> str:
            return written[0]

        def runs(self) -> bool:
            return True

        def destroy(self) -> None:
            pass

    monkeypatch.setattr(fake.pods[machine], "host", Host())
    written[0] = "glasshouse-host-key\nzwei\n"
    assert runpod.output(machine) == written[0]
    written[0] = ("x" * 99 + "\n") * 4000
    assert runpod.output(machine) == written[0][: 64 << 10]


@needs_description(DESCRIPTION)
def test_every_exchange_is_as_runpod_describes_it(tmp_path: Path, clock: Clock) -> None:
    description = described(DESCRIPTION)
    with fake_runpod(tmp_path, machines=False, clock=clock, description=description) as fake:
        runpod = RunPod(fake.key, fake.url, sleep=clock.sleep)
        runpod.quiet_s = 0.05
        offers = [*runpod.offers(replace(OPTIONS, regions=("Europe",), memory_gb=64)), cheapest(runpod, gpus=0)]
        machines = [runpod.rent(offer, START) for offer in offers]
        for machine in [*machines, "none"]:
            runpod.find(machine)
            runpod.output(machine)
            runpod.give_back(machine)
            runpod.bill(machine)
        runpod.tagged("gh-")
        for status, after_s in ((400, None), (401, None), (402, None), (403, None), (422, None), (429, 1), (500, None)):
            fake.troubles.answers = {"POST /v2/pods": [(status, after_s)]}
            if status != 429:
                failing(lambda: runpod.rent(offers[0], START))
            else:
                runpod.give_back(runpod.rent(offers[0], START))
        used = {"GET /v2/pods", "POST /v2/pods", "GET /v2/pods/{id}", "DELETE /v2/pods/{id}", "GET /v2/pods/{id}/logs"}
        used |= {f"GET /v2/catalog/{name}" for name in ("gpus", "gpus/{id}", "cpus", "cpus/{id}", "datacenters")}
        assert fake.requests().keys() == used | {"GET /v2/billing/pods"}
        assert fake.faults(description) == []
        assert fake.left() == []
        fake.troubles.other_version = True
        failing(lambda: runpod.offers(OPTIONS))
        assert fake.faults(description) != []
