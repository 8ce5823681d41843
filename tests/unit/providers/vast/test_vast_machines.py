"""Renting at Vast.ai: what is offered, taken, found and given back."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from glasshouse.errors import PeerError, PlatformError, UsageError
from glasshouse.providers.rental.provider import Offer, RentedState
from glasshouse.providers.rental.vast import Vast
from simulators.api_description import Description, described, needs_description
from simulators.fake_api import quick
from simulators.fake_vast import CALLS, FakeVast, fake_vast
from simulators.vast_market import OPTIONS, START, Paper, Time, rented

DESCRIPTION = "vast.openapi.yaml"


@pytest.fixture(scope="module")
def description() -> Description:
    return described(DESCRIPTION)


# What is offered.


def test_what_is_offered_is_of_the_kind_asked_for_and_verified_and_has_open_ports_the_cheapest_first(
    vast: Vast,
) -> None:
    (offer,) = vast.offers(OPTIONS)
    assert offer == Offer(
        id="7000001",
        gpu="RTX 4090",
        gpus=1,
        gpu_memory_gb=24,
        memory_gb=64,
        disk_gb=100,
        region="Sweden, SE",
        usd_per_hour=offer.usd_per_hour,
        spot=False,
    )
    assert offer.usd_per_hour == pytest.approx(Decimal("0.40") + Decimal("0.15") * 100 / 720)


def test_the_disk_is_part_of_the_price(vast: Vast, time: Time) -> None:
    (small,) = vast.offers(replace(OPTIONS, disk_gb=10))
    time.sleep(10)
    (large,) = vast.offers(replace(OPTIONS, disk_gb=490))
    assert large.usd_per_hour - small.usd_per_hour == pytest.approx(Decimal("0.15") * 480 / 720)
    time.sleep(10)
    dearest = small.usd_per_hour + Decimal("0.01")
    assert vast.offers(replace(OPTIONS, disk_gb=490, most_per_hour_usd=dearest)) == []
    time.sleep(10)
    assert vast.offers(replace(OPTIONS, disk_gb=501)) == []


@pytest.mark.parametrize(
    ("gpu", "kinds"),
    [
        (("rtx4090",), ["RTX 4090"]),
        (("NVIDIA GeForce RTX 4090",), ["RTX 4090"]),
        (("a100",), ["A100 PCIE", "A100 SXM4"]),
        (("A100 80GB",), ["A100 SXM4"]),
        (("A100 40 GB", "RTX 3060"), ["RTX 3060", "A100 PCIE", "A100 SXM4"]),
        (("RTX 4070S TI",), ["RTX 4070S Ti"]),
        ((), ["RTX 3060", "RTX 4070S Ti", "RTX 4090", "A100 PCIE", "A100 SXM4"]),
    ],
)
def test_kinds_are_found_as_people_write_them(vast: Vast, gpu: tuple[str, ...], kinds: list[str]) -> None:
    assert [offer.gpu for offer in vast.offers(replace(OPTIONS, gpu=gpu, memory_gb=0))] == kinds


def test_an_unknown_kind_or_region_is_refused_with_the_nearest(vast: Vast, time: Time) -> None:
    with pytest.raises(UsageError, match="no GPU called 'RTX 4091'") as refused:
        vast.offers(replace(OPTIONS, gpu=("RTX 4091",)))
    assert "RTX 4090" in refused.value.hint
    time.sleep(10)
    with pytest.raises(UsageError, match="no GPU called 'RTX 4070 Super'") as refused:
        vast.offers(replace(OPTIONS, gpu=("RTX 4070 Super",)))
    assert "RTX 4070S Ti" in refused.value.hint
    time.sleep(10)
    with pytest.raises(UsageError, match="no region called 'Sweden'") as refused:
        vast.offers(replace(OPTIONS, regions=("Sweden",)))
    assert "SE" in refused.value.hint


def test_memory_is_the_part_of_the_hosts_that_goes_with_its_gpus(vast: Vast, time: Time) -> None:
    assert vast.offers(replace(OPTIONS, memory_gb=65)) == []
    time.sleep(10)
    (pair,) = vast.offers(replace(OPTIONS, gpus=2, memory_gb=65))
    assert (pair.memory_gb, pair.gpus) == (128, 2)


def test_regions_are_countries(vast: Vast, time: Time) -> None:
    assert [offer.region for offer in vast.offers(replace(OPTIONS, regions=("se", "US")))] == ["Sweden, SE"]
    time.sleep(10)
    assert vast.offers(replace(OPTIONS, regions=("US",))) == []


# A machine's life.


def test_a_machine_is_rented_found_read_and_given_back(there: FakeVast, vast: Vast, time: Time) -> None:
    machine = rented(vast, time)
    found = vast.find(machine)
    assert found is not None
    assert (found.id, found.tag, found.state) == (machine, START.tag, RentedState.RUNNING)
    assert (found.host, found.port) == ("127.0.0.1", Paper.port)
    assert found.usd_per_hour == pytest.approx(Decimal("0.40") + Decimal("0.15") * 100 / 720)
    (one,) = there.left()
    assert isinstance(one.host, Paper)
    one.host.printed = "glasshouse-host-key …\n"
    assert vast.output(machine) == "glasshouse-host-key …\n"
    assert [each.id for each in vast.tagged("gh-0011223344556677-")] == [machine]
    assert vast.bill(machine) is None
    time.sleep(3600)
    vast.give_back(machine)
    assert vast.find(machine) is None
    time.sleep(10)
    assert vast.tagged("gh-") == []
    time.sleep(10)
    assert vast.bill(machine) == pytest.approx(found.usd_per_hour, abs=Decimal("0.05"))
    vast.give_back(machine)
    assert there.left() == []
    assert vast.output(machine) == ""


def test_what_is_sent_to_make_one_has_its_tag_and_end_and_no_secret(there: FakeVast, vast: Vast, time: Time) -> None:
    rented(vast, time)
    (call,) = [call for call in there.exchanges if call.reply.call == "create"]
    body = call.body
    assert (body["label"], body["image"], body["disk"]) == (START.tag, OPTIONS.image, 100)
    assert body["cancel_unavail"] is True
    assert body["env"] == {"-p 2222:2222": "1"}
    assert "price" not in body
    assert (body["runtype"], body["onstart"], body["args"][:2]) == ("args", "env", ["sh", "-c"])
    script = body["args"][2]
    assert script.index("sleep") < script.index("sshd=")
    assert "CONTAINER_API_KEY" in script
    assert f"{there.url}/api/v0/instances/" in script
    for sent in there.exchanges:
        assert there.key not in json.dumps(sent.body)
        assert there.key not in sent.target


def test_a_bid_is_the_price_that_was_shown_without_the_disks(there: FakeVast, vast: Vast, time: Time) -> None:
    spot = replace(OPTIONS, spot=True)
    offer = vast.offers(spot)[0]
    assert offer.spot
    assert offer.usd_per_hour == pytest.approx(Decimal("0.16") + Decimal("0.15") * 100 / 720)
    machine = rented(vast, time, spot)
    (one,) = there.left()
    assert one.request["price"] == 0.16
    assert one.row()["is_bid"]
    found = vast.find(machine)
    assert found is not None
    assert found.usd_per_hour == pytest.approx(offer.usd_per_hour)


def test_every_page_of_a_listing_is_read_no_faster_than_it_may_be(there: FakeVast, vast: Vast, time: Time) -> None:
    there.offers |= {number: {**there.offers[7_000_001], "id": number} for number in range(8_000_000, 8_000_007)}
    there.troubles.page = 2
    for number in range(8_000_000, 8_000_007):
        offer = replace(vast.offers(OPTIONS)[0], id=str(number))
        time.sleep(10)
        vast.rent(offer, replace(START, tag=f"gh-{'ab' if number % 2 else 'cd'}-{number}"))
        time.sleep(10)
    assert [each.tag for each in vast.tagged("gh-ab-")] == [f"gh-ab-{number}" for number in (8000001, 8000003, 8000005)]
    pages = [call for call in there.exchanges if call.reply.call == "list"]
    assert len(pages) == 4
    assert all(call.reply.status == 200 for call in pages)
    closest = there.closest_s("list")
    assert closest is not None
    assert closest >= CALLS["list"]


# States.


def test_a_row_without_its_ports_is_a_machine_that_starts(there: FakeVast, vast: Vast, time: Time) -> None:
    there.troubles.never_boots = True
    found = vast.find(rented(vast, time))
    assert found is not None
    assert (found.state, found.host, found.port) == (RentedState.STARTING, None, None)


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"actual_status": None}, RentedState.STARTING),
        ({"actual_status": "loading", "cur_state": "unloaded"}, RentedState.STARTING),
        ({"actual_status": "created"}, RentedState.STARTING),
        ({"actual_status": "created", "status_msg": "x: OCI runtime create failed: y"}, RentedState.STOPPED),
        ({"actual_status": "rebooting"}, RentedState.STARTING),
        ({"actual_status": "exited"}, RentedState.STOPPED),
        ({"actual_status": "unknown"}, RentedState.STOPPED),
        ({"actual_status": "offline"}, RentedState.STOPPED),
        ({"actual_status": "running", "intended_status": "stopped"}, RentedState.STOPPED),
        ({"actual_status": "loading", "cur_state": "stopped"}, RentedState.STOPPED),
        ({"actual_status": "destroyed"}, RentedState.STOPPED),
    ],
)
def test_states(
    there: FakeVast,
    vast: Vast,
    time: Time,
    said: dict[str, str],
    state: RentedState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = rented(vast, time)
    row = {**there.left()[0].row(), **said}
    monkeypatch.setattr(type(there.left()[0]), "row", lambda _, listed=False: row)
    found = vast.find(machine)
    assert found is not None
    assert found.state is state
    if said.get("status_msg"):
        assert "OCI runtime" in found.why


@pytest.mark.parametrize(
    "ports",
    [
        None,
        {},
        {"2222/tcp": None},
        {"2222/tcp": []},
        {"2222/tcp": [{"HostPort": "0"}]},
        {"22/tcp": [{"HostPort": "40022"}]},
    ],
)
def test_ports_may_lack_at_every_level(
    there: FakeVast, vast: Vast, time: Time, ports: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = rented(vast, time)
    row = {**there.left()[0].row(), "ports": ports}
    monkeypatch.setattr(type(there.left()[0]), "row", lambda _, listed=False: row)
    found = vast.find(machine)
    assert found is not None
    assert (found.host, found.port) == (None, None)


# As described.


@needs_description(DESCRIPTION)
def test_every_exchange_is_as_vast_describes_it(tmp_path: Path, time: Time, description: Description) -> None:
    anywhere = replace(OPTIONS, gpu=(), spot=True, regions=("US", "PL"), memory_gb=0)
    with fake_vast(tmp_path, clock=time, host=Paper, description=description) as there:
        vast = quick(Vast(there.key, there.url), time)
        machines = [rented(vast, time, options) for options in (OPTIONS, anywhere)]
        there.troubles.page = 1
        assert len(vast.tagged("gh-")) == 2
        for machine in machines:
            assert vast.find(machine) is not None
            vast.output(machine)
            vast.give_back(machine)
            assert vast.output(machine) == ""
            time.sleep(10)
            vast.give_back(machine)
            assert vast.find(machine) is None
            time.sleep(10)
        assert vast.bill(machines[0]) is not None
        offer = vast.offers(replace(OPTIONS, gpus=2))[0]
        there.troubles.vanishes = True
        with pytest.raises(PlatformError):
            vast.rent(offer, START)
        assert there.requests().keys() == {*CALLS, "log"}
        assert there.faults(description) == []
        assert there.left() == []
        there.troubles.vanishes, there.offers[7_000_001]["rentable"] = False, True
        there.troubles.fails_with_contract = 400  # with `new_contract`, of which users tell
        with pytest.raises(PeerError):
            rented(vast, time)
        assert there.faults(description) == []


@needs_description(DESCRIPTION)
@pytest.mark.parametrize(
    ("method", "target", "body"),
    [
        ("POST", "/api/v0/bundles/", {"order": [["dph_total", "asc"]]}),
        ("POST", "/api/v0/bundles/", {"type": "interruptible"}),
        ("PUT", "/api/v0/asks/7/", {"env": "-p 2222:2222"}),
        ("PUT", "/api/v0/asks/7/", {"runtype": "entrypoint"}),
        ("PUT", "/api/v0/asks/x/", {}),
        ("GET", "/api/v1/instances/?limit=26", None),
        ("GET", "/api/v0/charges/", None),
        ("PUT", "/api/v0/instances/request_logs/7/", {"tail": 1000}),
    ],
)
def test_the_description_does_not_allow_what_vast_refuses(
    description: Description, method: str, target: str, body: object
) -> None:
    assert description.request_faults(method, target, body) != []
