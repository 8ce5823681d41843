"""Machines rented at Vast.ai, over its REST interface (https://docs.vast.ai/api-reference).

Laws: a refusal that names what it made all the same is followed by that machine's end; a machine is gone only when
its answer names that, because it answers 404 to a wrong key too.

A machine starts by runtype ``args`` with ``onstart`` as its entrypoint (`vastai create instance --help`), so that our
start script is the container's first process: it arms the machine's own end before a login is possible, lets in the
run's key alone, and prints to the container's log, which ``request_logs`` returns. (``ssh_direct`` starts Vast's own
entrypoint, with an sshd for the keys of the account.) Its sshd is mapped by ``-p`` to a port of the host's public
address (`direct_port_count`). The price: the image has to have an sshd.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

from glasshouse.errors import Code, GlasshouseError, PeerError, UsageError
from glasshouse.providers.rental.account_api import ApiAnswer
from glasshouse.providers.rental.provider import Offer, Options, Rented, Start, UncertainError
from glasshouse.providers.rental.rest import OUTPUT_BYTES, RestProvider, cheapest, no_offer, number, unexpected, unknown
from glasshouse.providers.rental.start_script import start_script
from glasshouse.providers.rental.vast_rows import PORT, kinds_of, offer_of, rented_of

_MOST_OFFERS = 64  # one search returns no more
_PAGE_PAUSE_S = 1.1  # a listing may be asked once a second
_MOST_PAGES = 100
_LOG_LINES, _LOG_TRIES, _LOG_PAUSE_S = "10000", 10, 1.0
_BILLED_S = 31 * 86_400
_OF_ITS_NAME = 0.9  # an L40S "48GB" shows 45
# Of the machine: an address that was not found is no sign of it.
_NO_MACHINE = re.compile(r"no_such_instance|instance (\d+ )?not found|invalid instance id", re.IGNORECASE)
_NO_OFFER = re.compile(r"no_such_ask|invalid_price|not available|no longer available", re.IGNORECASE)
_NO_KEY = re.compile(r"auth_error|invalid user key", re.IGNORECASE)
_NO_MONEY = re.compile(r"insufficient.credit|missing_billing|\bcredit\b|\bbalance\b", re.IGNORECASE)
# Ends the machine from inside, by the key that Vast gives each container for itself alone. An image in which nothing
# of Glasshouse could run has no Python either: then curl does.
_END = """\
printf 'header = "Authorization: Bearer %s"\\n' "$CONTAINER_API_KEY" \
| curl -fsS -m 30 -K - -X DELETE "{url}/api/v0/instances/${{CONTAINER_ID:-${{VAST_CONTAINERLABEL#C.}}}}/" \
|| python3 -c 'import os, urllib.request as u
e = os.environ
name = e.get("CONTAINER_ID") or e["VAST_CONTAINERLABEL"][2:]
key = {{"Authorization": "Bearer " + e["CONTAINER_API_KEY"]}}
u.urlopen(u.Request("{url}/api/v0/instances/" + name + "/", headers=key, method="DELETE"), timeout=30)'"""
# A machine that could not end itself is none that is used: it stops here, and is given back.
_KEY_THERE = """\
if [ -z "$CONTAINER_API_KEY" ]; then echo "glasshouse: Vast gave this machine no key to end itself by"; exit 1; fi
"""


class Vast(RestProvider):
    """An account at Vast.ai; see `Provider`."""

    name, title, usual_url = "vast", "vast", "https://console.vast.ai"
    clock: Callable[[], float] = staticmethod(time.time)  # tests have another

    def offers(self, options: Options) -> list[Offer]:
        """Return what fits, the cheapest first; of the hosts that Vast has verified. See `Provider`."""
        wanted: dict[str, Any] = {"num_gpus": {"eq": options.gpus}, "cpu_ram": {"gte": options.memory_gb * 1000}}
        kinds: dict[str, int] = {}
        if options.gpu and options.gpus:
            kinds = kinds_of(options.gpu, self._column("/api/v0/metrics/gpu/current/", "gpus", "gpu_name"))
            wanted["gpu_name"] = {"in": sorted(kinds)}
        elif options.gpus:
            wanted["gpu_arch"] = {"eq": "nvidia"}
        if options.regions:
            countries = self._column("/api/v0/metrics/gpu/locations/", "locations", "country_code")
            for text in options.regions:
                if text.upper() not in countries:
                    raise unknown("vast", "region", text, countries)
            wanted["geolocation"] = {"in": sorted({text.upper() for text in options.regions})}
        found = (
            offer
            for _, offer in self._search(options, wanted)
            if (offer.memory_gb >= options.memory_gb and offer.gpus == options.gpus)
            and offer.gpu_memory_gb >= kinds.get(offer.gpu, 0) * _OF_ITS_NAME
        )
        return cheapest(found, options)

    def rent(self, offer: Offer, start: Start) -> str:
        """Make a machine, and return its id. See `Provider`.

        The offer is looked up once more first, because a host may change its price at any time, and has to be there
        for as long as the machine may run. A bid is the price that was shown, and is what is paid.
        """
        options = replace(start.options, spot=offer.spot)
        lasting = {"id": {"eq": _id(offer.id)}, "duration": {"gte": start.ends_s}}
        now = next((pair for pair in self._search(options, lasting) if pair[1].id == offer.id), None)
        if now is None:
            raise no_offer("it was rented to someone else, or its host ends it sooner than the run may last")
        bid, found = now
        if found.usd_per_hour > offer.usd_per_hour:
            raise no_offer(f"it costs {found.usd_per_hour:.3f} $ an hour now, and {offer.usd_per_hour:.3f} were shown")
        script = _KEY_THERE + start_script(start, end=_END.format(url=self._url), port=PORT)
        body: dict[str, Any] = {
            "image": options.image,
            "label": start.tag,
            "disk": options.disk_gb,
            "env": {f"-p {PORT}:{PORT}": "1"},
            "runtype": "args",
            # `env` runs its arguments. So does the image's own entrypoint, or none, should `onstart` not replace it.
            "onstart": "env",
            "args": ["sh", "-c", script],
            "target_state": "running",
            "cancel_unavail": True,
        }
        if offer.spot:
            body["price"] = float(bid)
        return self._made(self.api.create("PUT", f"/api/v0/asks/{_id(offer.id)}/", body, judged=False))

    def find(self, machine: str) -> Rented | None:
        value = self._unless_gone(self.api.get(_path(machine)))
        if value is None or ("instances" in value and value["instances"] is None):
            return None
        found = rented_of(value.get("instances"))
        if found.id != machine:
            raise unexpected("vast", "with a machine that is not the one asked for")
        return found

    def tagged(self, prefix: str) -> list[Rented]:
        query = {"limit": "25", "order_by": json.dumps([{"col": "id", "dir": "asc"}])}
        found = [rented_of(row) for row in self._pages("/api/v1/instances/", "instances", query)]
        return [one for one in found if one.tag.startswith(prefix)]

    def output(self, machine: str) -> str:
        """Return what the machine's start command printed. See `Provider`.

        Vast writes it to a file when it is asked to, and names that file before it is there; it is waited for ten
        seconds.
        """
        path = f"/api/v0/instances/request_logs/{_id(machine)}/"
        value = self._unless_gone(self.api.ask("PUT", path, {"tail": _LOG_LINES}))
        url = None if value is None else value.get("result_url")
        if not isinstance(url, str) or not url:
            return ""
        for _ in range(_LOG_TRIES):
            self.api.sleep(_LOG_PAUSE_S)
            text = self.api.file(url, OUTPUT_BYTES)
            if text is not None:
                return text
        return ""

    def give_back(self, machine: str) -> None:
        self._unless_gone(self.api.ask("DELETE", _path(machine)))

    def bill(self, machine: str) -> Decimal | None:
        """Return what it cost in the last 31 days, in US dollars; None while Vast does not list it. See `Provider`."""
        now = int(self.clock())
        chosen = {"day": {"gte": now - _BILLED_S, "lte": now + 86_400}, "type": {"in": ["instance"]}}
        query = {"select_filters": json.dumps(chosen), "limit": "500"}
        amounts = [
            number(row.get("amount"))
            for row in self._pages("/api/v0/charges/", "results", query)
            if isinstance(row, dict) and row.get("source") == f"instance-{_id(machine)}"
        ]
        return sum((one for one in amounts if one is not None), Decimal(0)) if any(amounts) else None

    def _search(self, options: Options, wanted: Mapping[str, Any]) -> list[tuple[Decimal, Offer]]:
        """Return offers, each with what its GPUs alone cost by the hour: a bid is made without the disk's price."""
        query = {
            "type": "bid" if options.spot else "ondemand",
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "rented": {"eq": False},
            "external": {"eq": False},
            "direct_port_count": {"gte": 1},
            "disk_space": {"gte": options.disk_gb},
            "allocated_storage": options.disk_gb,
            "order": [["dph_total", "asc"], ["id", "asc"]],
            "limit": _MOST_OFFERS,
            **wanted,
        }
        rows = _rows(self._value(self.api.ask("POST", "/api/v0/bundles/", query)), "offers")
        read = (offer_of(row, options) for row in rows if isinstance(row, dict))
        return [pair for pair in read if pair is not None]

    def _column(self, path: str, rows: str, column: str) -> list[str]:
        """Return the names that a table of the whole market has in a column."""
        listed = _rows(self._value(self.api.get(path)), rows)
        return sorted({row[column] for row in listed if isinstance(row, dict) and isinstance(row.get(column), str)})

    def _made(self, answer: ApiAnswer) -> str:
        """Return the id of what a create made; raises as `rent`."""
        value = answer.value if isinstance(answer.value, dict) else {}
        made, why = value.get("new_contract"), self.api.words(answer)
        named = isinstance(made, int) and not isinstance(made, bool)
        if answer.status == 200 and value.get("success") is True and named:
            return str(made)
        refused = answer.status >= 400 or (answer.status == 200 and value.get("success") is False)
        if not refused or (made is not None and not named):
            raise UncertainError("vast", f"it answered HTTP {answer.status} without an id: {why}")
        if named:
            self._undo(str(made), why)
        refusal = self._refusal(answer)
        if refusal.code is Code.PROVIDER_PROTOCOL and _NO_OFFER.search(_said(answer)):
            raise no_offer(why)
        raise refusal

    def _undo(self, machine: str, refused: str) -> None:
        """Give back what a refused create made; raises `UncertainError` where it is not seen to be gone."""
        try:
            # That there is no such machine may only be true as yet.
            self._value(self.api.ask("DELETE", _path(machine)))
            left = "which is still there" if self.find(machine) is not None else ""
        except GlasshouseError as error:
            left = error.message
        if left:
            raise UncertainError("vast", f"it refused ({refused}) and made {machine}; {left}", machine=machine)

    def _pages(self, path: str, rows: str, query: Mapping[str, str]) -> Iterator[Any]:
        """Yield the rows of all pages of a listing; raises as `Provider` where one of them is missing."""
        after: dict[str, str] = {}
        for page in range(_MOST_PAGES):
            if page:
                self.api.sleep(_PAGE_PAUSE_S)
            value = self._value(self.api.get(path, {**query, **after}))
            yield from _rows(value, rows)
            token = value.get("next_token")
            if token is None:
                return
            if not isinstance(token, str):
                raise unexpected("vast", "with a listing that does not go on")
            after = {"after_token": token}
        raise unexpected("vast", "with a listing without an end")

    def _value(self, answer: ApiAnswer) -> dict[str, Any]:
        """Return what an answer has, or raise what it refuses."""
        if answer.status == 200 and isinstance(answer.value, dict) and answer.value.get("success") is not False:
            return answer.value
        raise self._refusal(answer)

    def _unless_gone(self, answer: ApiAnswer) -> dict[str, Any] | None:
        """Return the same, and None for an answer that names no such machine."""
        try:
            return self._value(answer)
        except PeerError as error:
            # A wrong key is answered by 404 as well, and so is an address that this interface has no more.
            known = error.code is Code.PROVIDER_PROTOCOL and answer.status in (200, 404)
            if known and _NO_MACHINE.search(_said(answer)):
                return None
            raise

    def _refusal(self, answer: ApiAnswer) -> GlasshouseError:
        said = _said(answer)
        try:
            self.api.judge(answer)
            if _NO_KEY.search(said):
                self.api.judge(replace(answer, status=401))
            if _NO_MONEY.search(said):
                self.api.judge(replace(answer, status=402))
        except UsageError as error:
            return error
        return unexpected("vast", f"with HTTP {answer.status}: {self.api.words(answer)}")


def _path(machine: str) -> str:
    return f"/api/v0/instances/{_id(machine)}/"


def _rows(value: Mapping[str, Any], name: str) -> list[Any]:
    rows = value.get(name)
    if not isinstance(rows, list):
        raise unexpected("vast", f"with no list of {name}")
    return rows


def _said(answer: ApiAnswer) -> str:
    """Return an answer's own words for what it refuses: Vast's errors have one, two or all of these."""
    value = answer.value if isinstance(answer.value, dict) else {}
    texts = (value.get(name) for name in ("error", "msg", "message"))
    return " ".join(text for text in texts if isinstance(text, str))


def _id(name: str) -> int:
    """Return an id as Vast's paths have it."""
    if not (name.isascii() and name.isdigit() and len(name) <= 18):
        raise UsageError(Code.USAGE, f"vast has no machine or offer called {name!r}; its ids are numbers")
    return int(name)
