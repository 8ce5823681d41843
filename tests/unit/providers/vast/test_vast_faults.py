"""Each fault of Vast.ai, and what it comes to: an error that says what to do, and nothing left that costs money."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from http.client import HTTPResponse
from typing import Any

import pytest

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.providers.rental.account_api import Api
from glasshouse.providers.rental.provider import Offer, RentedState, UncertainError
from glasshouse.providers.rental.vast import Vast
from simulators.fake_api import Reply, quick
from simulators.fake_vast import CALLS, FakeVast
from simulators.vast_market import OPTIONS, START, Paper, Time, rented


def test_no_capacity_is_no_offer_at_all(there: FakeVast, vast: Vast) -> None:
    there.troubles.no_capacity = True
    assert vast.offers(OPTIONS) == []


def test_an_offer_that_vanishes_while_it_is_taken_is_said_and_leaves_nothing(
    there: FakeVast, vast: Vast, time: Time
) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.troubles.vanishes = True
    with pytest.raises(PlatformError, match="no_such_ask") as gone:
        vast.rent(offer, START)
    assert gone.value.code is Code.NO_OFFER
    there.offers.pop(7_000_001)
    with pytest.raises(PlatformError, match="someone else") as gone:
        vast.rent(offer, START)
    assert gone.value.code is Code.NO_OFFER
    assert there.left() == []


def test_a_price_that_rose_since_it_was_shown_is_not_paid(there: FakeVast, vast: Vast) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.offers[7_000_001]["dph_base"] = 0.41
    with pytest.raises(PlatformError, match=r"it costs 0\.431 \$ an hour now, and 0\.421 were shown") as gone:
        vast.rent(offer, START)
    assert gone.value.code is Code.NO_OFFER
    assert there.requests()["create"] == 0


def test_an_offer_whose_host_ends_it_before_the_run_may_end_is_not_taken(there: FakeVast, vast: Vast) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.offers[7_000_001]["duration"] = START.ends_s - 1
    with pytest.raises(PlatformError, match="sooner than the run may last"):
        vast.rent(offer, START)
    assert there.left() == []


@pytest.mark.parametrize("retry_after", [None, 7])
def test_too_many_requests_are_waited_out(there: FakeVast, vast: Vast, time: Time, retry_after: int | None) -> None:
    there.troubles.busy = dict.fromkeys(CALLS, (2, retry_after))
    began = time.now
    machine = rented(vast, time)
    assert vast.find(machine) is not None
    assert [each.id for each in vast.tagged("gh-")] == [machine]
    vast.output(machine)
    vast.give_back(machine)
    assert there.left() == []
    assert there.requests()["create"] == 3
    if retry_after is not None:
        assert time.now - began > 2 * 7 * 7


def test_a_failing_interface_is_asked_again_and_then_said_to_be_away(there: FakeVast, vast: Vast) -> None:
    there.troubles.fails = {"offers": 2}
    offers = vast.offers(OPTIONS)
    assert len(offers) == 1
    there.troubles.fails = {"list": 99}
    with pytest.raises(PeerError, match="vast does not answer") as away:
        vast.tagged("gh-")
    assert away.value.code is Code.PROVIDER_UNREACHABLE


def test_a_create_that_fails_without_a_word_is_uncertain_and_sent_once(there: FakeVast, vast: Vast) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.troubles.fails = {"create": 1}
    with pytest.raises(UncertainError):
        vast.rent(offer, START)
    assert there.requests()["create"] == 1


def test_a_machine_whose_creation_was_not_answered_is_found_by_its_tag_once_it_is_listed(
    there: FakeVast, vast: Vast, time: Time
) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.troubles.lose_creates, there.troubles.listed_after_s = 1, 60.0
    with pytest.raises(UncertainError):
        vast.rent(offer, START)
    assert there.requests()["create"] == 1
    assert vast.tagged(START.tag) == []
    time.sleep(vast.settles_s)
    (found,) = vast.tagged(START.tag)
    vast.give_back(found.id)
    assert there.left() == []


@pytest.mark.parametrize(
    ("status", "refused", "kind", "code"),
    [
        (200, ("invalid_args", "error 400/3700: the host did not answer"), PeerError, Code.PROVIDER_PROTOCOL),
        (410, ("no_such_ask", "no longer available"), PlatformError, Code.NO_OFFER),
        (400, ("insufficient_credit", "Your account lacks credit"), UsageError, Code.PROVIDER_MONEY),
        (402, ("x", "y"), UsageError, Code.PROVIDER_MONEY),
        (403, ("x", "y"), UsageError, Code.PROVIDER_KEY),
    ],
)
def test_what_a_refused_create_made_all_the_same_is_given_back(
    there: FakeVast,
    vast: Vast,
    status: int,
    refused: tuple[str, str],
    kind: type[GlasshouseError],
    code: Code,
) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.troubles.fails_with_contract, there.troubles.contract_refused = status, refused
    with pytest.raises(kind) as failed:
        vast.rent(offer, START)
    assert failed.value.code is code
    assert len(there.instances) == 1
    assert there.left() == []


def test_what_a_refused_create_made_and_that_stays_is_uncertain(there: FakeVast, vast: Vast) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.troubles.fails_with_contract, there.troubles.lies = 400, 1
    with pytest.raises(UncertainError, match="still there") as uncertain:
        vast.rent(offer, START)
    assert [uncertain.value.machine] == [found.id for found in vast.tagged(START.tag)]


def test_what_a_refused_create_made_and_is_not_there_yet_is_uncertain(there: FakeVast, vast: Vast, time: Time) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.troubles.fails_with_contract, there.troubles.listed_after_s = 400, 60.0
    with pytest.raises(UncertainError, match="not found") as uncertain:
        vast.rent(offer, START)
    time.sleep(vast.settles_s)
    (found,) = vast.tagged(START.tag)
    assert uncertain.value.machine == found.id
    vast.give_back(found.id)
    assert there.left() == []


@pytest.mark.parametrize("name", ["destroy", "find"])
def test_what_a_refused_create_made_and_cannot_be_ended_is_uncertain(there: FakeVast, vast: Vast, name: str) -> None:
    offer = vast.offers(OPTIONS)[0]
    there.troubles.fails_with_contract, there.troubles.fails = 400, {name: 99}
    with pytest.raises(UncertainError, match="does not answer"):
        vast.rent(offer, START)


def test_a_deletion_that_is_a_lie_shows_in_what_is_found_and_listed(there: FakeVast, vast: Vast, time: Time) -> None:
    machine = rented(vast, time)
    there.troubles.lies = 1
    vast.give_back(machine)
    assert vast.find(machine) is not None
    assert [each.id for each in vast.tagged(START.tag)] == [machine]
    time.sleep(10)
    vast.give_back(machine)
    assert vast.find(machine) is None
    assert there.left() == []


def test_a_stale_listing_shows_what_is_gone_and_not_what_is_new(there: FakeVast, vast: Vast, time: Time) -> None:
    there.troubles.stale_s = 60.0
    machine = rented(vast, time)
    assert vast.tagged(START.tag) == []
    time.sleep(60)
    assert [each.id for each in vast.tagged(START.tag)] == [machine]
    vast.give_back(machine)
    time.sleep(10)
    assert [each.id for each in vast.tagged(START.tag)] == [machine]
    time.sleep(60)
    assert vast.tagged(START.tag) == []


def test_a_machine_that_dies_has_stopped(there: FakeVast, vast: Vast, time: Time) -> None:
    machine = rented(vast, time)
    host = there.left()[0].host
    assert host is not None
    host.die()
    found = vast.find(machine)
    assert found is not None
    assert (found.state, found.why.split()[0]) == (RentedState.STOPPED, "exited")


# Vast answers 404 to a key that it does not know: nothing that was asked by it is gone.

METHODS: dict[str, Callable[[Vast], object]] = {
    "offers": lambda vast: vast.offers(OPTIONS),
    "rent": lambda vast: vast.rent(
        Offer(
            id="7000001",
            gpu="RTX 4090",
            gpus=1,
            gpu_memory_gb=24,
            memory_gb=64,
            disk_gb=100,
            region="",
            usd_per_hour=Decimal(1),
            spot=False,
        ),
        START,
    ),
    "find": lambda vast: vast.find("30000001"),
    "tagged": lambda vast: vast.tagged("gh-"),
    "output": lambda vast: vast.output("30000001"),
    "give_back": lambda vast: vast.give_back("30000001"),
    "bill": lambda vast: vast.bill("30000001"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_key_that_is_not_known_is_said_and_never_taken_for_absence(there: FakeVast, time: Time, name: str) -> None:
    stranger = quick(Vast("0" * 64, there.url), time)
    with pytest.raises(UsageError, match="refused the account's key") as refused:
        METHODS[name](stranger)
    assert refused.value.code is Code.PROVIDER_KEY
    assert "0" * 64 not in str(refused.value)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        ((401, "auth_error", "Invalid user key"), Code.PROVIDER_KEY),
        ((404, "auth_error", "Invalid user key"), Code.PROVIDER_KEY),
        ((403, "not_authorized", "This action requires login."), Code.PROVIDER_KEY),
        ((402, "insufficient_credit", "Insufficient credit"), Code.PROVIDER_MONEY),
        ((200, "insufficient_credit", "Your account lacks credit"), Code.PROVIDER_MONEY),
        ((400, "missing_billing", "No payment method"), Code.PROVIDER_MONEY),
    ],
)
def test_an_account_that_may_not_or_has_no_money_is_said(
    there: FakeVast, vast: Vast, name: str, refusal: tuple[int, str, str], code: Code
) -> None:
    there.troubles.refuses = refusal
    with pytest.raises(UsageError) as refused:
        METHODS[name](vast)
    assert refused.value.code is code
    assert refusal[2] in str(refused.value)
    assert there.left() == []


@pytest.mark.parametrize("name", METHODS)
def test_another_version_of_the_interface_is_said(there: FakeVast, vast: Vast, name: str) -> None:
    there.troubles.other_version = True
    with pytest.raises(PeerError, match="Use another version") as refused:
        METHODS[name](vast)
    assert refused.value.code is Code.PROVIDER_PROTOCOL


def test_a_log_that_never_comes_is_empty_after_some_looks(there: FakeVast, vast: Vast, time: Time) -> None:
    machine = rented(vast, time)
    there.troubles.log_late = 99
    assert vast.output(machine) == ""
    assert there.requests()["log"] == 10


def test_names_that_are_no_numbers_are_never_part_of_a_path(vast: Vast, there: FakeVast) -> None:
    for name in ("", "7/../../users", "-1", "٣", "9" * 19):
        with pytest.raises(UsageError, match="its ids are numbers"):
            vast.give_back(name)
    assert there.exchanges == []


# Answers that are none.


def answering(there: FakeVast, monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Have calls be answered so: a reply, or JSON of a success."""
    for call, value in values.items():
        reply = value if isinstance(value, Reply) else Reply(200, value)
        monkeypatch.setattr(there, f"_{call}", lambda *_, reply=reply, **__: reply)


HTML = Reply(200, "<html>Sign in</html>", "text/html")
BROKEN = Reply(200, '{"success": tr')
NOT_THERE = Reply(404, "<html>Not Found</html>", "text/html")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("offers", {"gpus": HTML}),
        ("offers", {"gpus": {"success": True}}),
        ("offers", {"offers": {"offers": {"id": 1}}}),
        ("offers", {"offers": []}),
        ("find", {"find": HTML}),
        ("find", {"find": BROKEN}),
        ("find", {"find": NOT_THERE}),
        ("find", {"find": {"success": True}}),
        ("find", {"find": {"instances": []}}),
        ("find", {"find": {"instances": {}}}),
        ("find", {"find": {"instances": {"id": 30_000_002}}}),
        ("find", {"find": Reply(404, {"success": False, "error": "not_found", "msg": "no such endpoint"})}),
        ("give_back", {"destroy": Reply(404, {"success": False, "error": "not_found", "msg": "no such endpoint"})}),
        ("find", {"find": Reply(400, {"success": False, "error": "no_such_instance"})}),
        ("tagged", {"list": HTML}),
        ("tagged", {"list": NOT_THERE}),
        ("tagged", {"list": {"success": True, "next_token": None}}),
        ("tagged", {"list": {"instances": [None], "next_token": None}}),
        ("tagged", {"list": {"instances": [{"label": "gh-"}], "next_token": None}}),
        ("tagged", {"list": {"instances": [], "next_token": 7}}),
        ("give_back", {"destroy": HTML}),
        ("give_back", {"destroy": NOT_THERE}),
        ("give_back", {"destroy": {"success": False, "error": "busy", "msg": "try again"}}),
        ("bill", {"charges": {"success": True}}),
    ],
)
def test_an_answer_that_is_not_as_described_is_never_taken_for_absence(
    there: FakeVast, vast: Vast, name: str, values: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(there, monkeypatch, **values)
    with pytest.raises(PeerError) as refused:
        METHODS[name](vast)
    assert refused.value.code is Code.PROVIDER_PROTOCOL


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("words", [{"error": "no_such_instance"}, {"error": "not_found", "msg": "Instance not found"}])
def test_a_machine_is_gone_when_vast_says_so(
    there: FakeVast, vast: Vast, status: int, words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Reply(status, {"success": False, **words})
    answering(there, monkeypatch, find=gone, destroy=gone)
    assert vast.find("30000001") is None
    vast.give_back("30000001")


def test_a_wrong_key_is_no_absence_whatever_else_is_said(
    there: FakeVast, vast: Vast, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Reply(404, {"success": False, "error": "auth_error", "msg": "no_such_instance for this user"})
    answering(there, monkeypatch, find=said, destroy=said)
    for act in (vast.find, vast.give_back):
        with pytest.raises(UsageError) as refused:
            act("30000001")
        assert refused.value.code is Code.PROVIDER_KEY


@pytest.mark.parametrize(("spot", "name"), [(True, "min_bid"), (False, "dph_base")])
@pytest.mark.parametrize("total", [0.0, 1.5])
def test_a_price_has_the_disk_whatever_the_total_says_and_a_bid_is_no_more_than_the_least(
    there: FakeVast, vast: Vast, spot: bool, name: str, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = there._priced(there.offers[7_000_001], {"allocated_storage": 100})
    answering(there, monkeypatch, offers={"offers": [{**row, "dph_total": total}]})
    (offer,) = vast.offers(replace(OPTIONS, spot=spot))
    priced = Decimal(str(row[name])) + Decimal("0.15") * 100 / 720
    assert offer.usd_per_hour == pytest.approx(priced if spot else max(priced, Decimal(str(total))))


def test_a_listing_without_an_end_is_left(there: FakeVast, vast: Vast, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(range(10_000))
    monkeypatch.setattr("glasshouse.providers.rental.vast._MOST_PAGES", 5)
    monkeypatch.setattr(there, "_list", lambda **_: Reply(200, {"instances": [], "next_token": f"{next(tokens)}"}))
    with pytest.raises(PeerError, match="without an end"):
        vast.tagged("gh-")
    assert there.requests()["list"] == 5


@pytest.mark.parametrize(
    "reply",
    [
        HTML,
        BROKEN,
        Reply(200, None),
        Reply(200, {}),
        Reply(200, {"success": True}),
        Reply(200, {"success": True, "new_contract": "30000001"}),
        Reply(200, {"success": False, "new_contract": True}),
        Reply(400, {"success": False, "new_contract": "30000001"}),
        Reply(302, None, headers={"Location": "https://example.org/"}),
        Reply(202, {"success": True, "new_contract": 30_000_001}),
        Reply(500, {"success": False}),
        Reply(0, None),
    ],
)
def test_a_create_that_is_not_answered_as_described_is_uncertain(
    there: FakeVast, vast: Vast, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = vast.offers(OPTIONS)[0]
    answering(there, monkeypatch, create=reply)
    with pytest.raises(UncertainError):
        vast.rent(offer, START)
    assert there.requests()["create"] == 1


@pytest.mark.parametrize("spot", [False, True])
@pytest.mark.parametrize(
    ("name", "value"), [("id", None), ("dph_total", None), ("dph_total", -1), ("num_gpus", "1"), ("cpu_ram", None)]
)
def test_a_row_that_lacks_what_has_to_be_known_is_no_offer(
    there: FakeVast, vast: Vast, name: str, value: object, spot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = there._priced(there.offers[7_000_001], {})
    answering(there, monkeypatch, offers={"offers": [row, None, {**row, name: value}]})
    assert len(vast.offers(replace(OPTIONS, spot=spot))) == 1


def test_a_log_is_read_from_where_https_leads_alone(
    there: FakeVast, vast: Vast, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = rented(vast, time)
    for url in (
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "https:///x",
        "https://host:x/",
        "https://host:99999/",
        "https://a..b/",
    ):
        answering(there, monkeypatch, logs={"success": True, "result_url": url})
        with pytest.raises(PeerError, match="not behind https"):
            vast.output(machine)
    for value in ({"success": True, "msg": "no container yet"}, {"success": True, "result_url": None}):
        answering(there, monkeypatch, logs=value)
        assert vast.output(machine) == ""


def test_a_number_beyond_all_numbers_is_an_answer_that_cannot_be_read(
    there: FakeVast, vast: Vast, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = rented(vast, time)
    real = Api._exchange

    def huge(self: Api, *asked: Any) -> tuple[HTTPResponse, bytes]:
        return real(self, *asked)[0], b'{"cost": 1e99999999999999999999}'

    monkeypatch.setattr(Api, "_exchange", huge)
    with pytest.raises(PeerError, match="no JSON"):
        vast.find(machine)


def test_a_long_log_is_its_beginning(there: FakeVast, vast: Vast, time: Time) -> None:
    machine = rented(vast, time)
    host = there.left()[0].host
    assert isinstance(host, Paper)
    host.printed = "first\n" + "x" * 1_000_000
    assert vast.output(machine) == host.printed[: 64 << 10]
