"""RunPod, asked over real sockets: what is offered, rented and given back, as it describes it."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.providers.rental.provider import RentedState
from glasshouse.providers.rental.runpod import RunPod
from simulators.api_description import described, needs_description
from simulators.fake_api import quick
from simulators.fake_runpod import FakeRunPod, fake_runpod
from simulators.runpod_market import OPTIONS, START, Clock, cheapest, failing

DESCRIPTION = "runpod-rest-v2.openapi.json"

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
        runpod = quick(RunPod(fake.key, fake.url), clock)
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
