"""A Vast.ai of one's own on the loopback: its REST interface, an account, and instances that are real machines.

It answers as its published description has it, and fails as real providers do, where it is asked to.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from simulators.api_description import Description
from simulators.fake_api import FakeApi, Reply
from simulators.fake_api import Troubles as AnyTroubles
from simulators.rented_host import RentedHost
from simulators.vast_market import Host, Instance, disk_price, fits, market

__all__ = ["CALLS", "FakeVast", "Troubles", "fake_vast"]

# How long an endpoint has to be left alone: the thresholds in the description's own examples, in seconds.
CALLS: Mapping[str, float] = {
    "offers": 0.0,
    "gpus": 3.0,
    "locations": 3.0,
    "create": 4.5,
    "find": 2.0,
    "list": 1.0,
    "logs": 0.0,
    "destroy": 3.0,
    "charges": 1.0,
}
_BY_ID = '[{"col": "id", "dir": "asc"}]'
# What a wrong key and a wrong request are answered with, where the description has something else than 401 and 400.
_STRANGER = {"offers": 404, "charges": 404, "destroy": 404, "logs": 403}
_UNLIKE = {"list": (400, "invalid_request"), "logs": (404, "invalid_id")}
_LENIENT = {"gpus", "locations"}  # they have no word for a wrong request
_ROUTES = (
    ("offers", "POST", "/api/v0/bundles/"),
    ("gpus", "GET", "/api/v0/metrics/gpu/current/"),
    ("locations", "GET", "/api/v0/metrics/gpu/locations/"),
    ("create", "PUT", r"/api/v0/asks/([^/]+)/"),
    ("find", "GET", r"/api/v0/instances/([^/]+)/"),
    ("destroy", "DELETE", r"/api/v0/instances/([^/]+)/"),
    ("logs", "PUT", r"/api/v0/instances/request_logs/([^/]+)/"),
    ("list", "GET", "/api/v1/instances/"),
    ("charges", "GET", "/api/v0/charges/"),
)


@dataclass
class Troubles(AnyTroubles):
    """What goes wrong at Vast, beside the usual.

    Attributes:
        busy: by call, how many requests are answered 429, and the seconds of Retry-After, None for none as at Vast.
        fails: by call, how many requests are answered 503.
        refuses: every request is answered so: a status, `error` and `msg`.
        fails_with_contract: creates are refused, by this status, and name what they made all the same.
        contract_refused: with which `error` and `msg`.
        no_key: machines are given no key of their own, from now on.
        programs: what images have in PATH beside the usual, from now on; as of `RentedHost`.
        page: rows in a page of a listing.
        null_rows: a find answers with no row while the machine is there for so many requests.
        log_late: so many looks at a log find nothing there yet.
    """

    busy: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    fails: dict[str, int] = field(default_factory=dict)
    refuses: tuple[int, str, str] | None = None
    fails_with_contract: int | None = None
    contract_refused: tuple[str, str] = ("invalid_args", "error 400/3700: the host did not answer")
    no_key: bool = False
    programs: dict[str, str] = field(default_factory=dict)
    page: int = 25
    null_rows: int = 0
    log_late: int = 1


class Undescribed(Reply):
    """An answer that the published description has not: Vast's other documentation tells of it, or its users do."""


class FakeVast(FakeApi):
    """Vast, with one account.

    Args:
        folder: as of `FakeApi`.
        host: makes a machine; `Paper` for those that nothing has to run on.
        ways: as of `FakeApi`; what is not as described is answered with 400.
    """

    def __init__(self, folder: Path, *, host: Callable[..., Host] = RentedHost, **ways: Any) -> None:
        super().__init__(folder, **{"clock": time.time, **ways})
        self.troubles = Troubles()
        self.offers = {offer["id"]: offer for offer in market()}
        self.instances: dict[int, Instance] = {}
        # Whose key each deletion came with: of the account, or of an instance.
        self.ended_by: list[str] = []
        self._host = host
        self._asked_at: dict[str, float] = {}
        self._texts: dict[str, tuple[str, int]] = {}
        self._next = 30_000_001

    # What a test looks at.

    @property
    def made(self) -> list[Instance]:
        """All machines that there ever were."""
        return list(self.instances.values())

    def closest_s(self, call: str) -> float | None:
        """Return the shortest time between two requests of a call; None for fewer than two."""
        times = [each.at for each in self.exchanges if each.reply.call == call]
        return min((later - earlier for earlier, later in itertools.pairwise(times)), default=None)

    def faults(self, description: Description) -> list[str]:
        """Return where an exchange was not as a description has it; logs lie elsewhere, and are not in it."""
        kept = self.exchanges
        described = [each for each in kept if each.reply.call != "log" and not isinstance(each.reply, Undescribed)]
        refused = [each for each in kept if isinstance(each.reply, Undescribed)]
        wrong = [fault for each in refused for fault in description.request_faults(each.method, each.target, each.body)]
        try:
            self.exchanges = described
            return super().faults(description) + wrong
        finally:
            self.exchanges = kept

    # What it answers.

    def answer(self, method: str, target: str, body: Any, authorization: str) -> Reply:
        """Return what a request is answered with."""
        parts, key = urlsplit(target), authorization.removeprefix("Bearer ")
        if parts.path.startswith("/vast.ai/instance_logs/"):
            assert not key, "a key was sent to where logs lie"
            return self._log(parts.path)
        found = [(call, way, re.fullmatch(pattern, parts.path)) for call, way, pattern in _ROUTES]
        for call, way, match in found:
            if way == method and match:
                asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
                with self.lock:
                    reply = self._reply(call, list(match.groups()), key, asked, body, (method, target))
                return type(reply)(reply.status, reply.value, reply.kind, reply.headers, call)
        ways = ", ".join(way for _, way, match in found if match)
        words = ("not_found", f"no {method} {parts.path}")
        return Reply(405, _refusal(405, *words).value, headers={"Allow": ways}) if ways else _refusal(404, *words)

    def unreadable(self, method: str, target: str) -> Reply:
        """Return what a request is answered with whose body is no JSON."""
        call = next((call for call, way, pattern in _ROUTES if way == method and re.fullmatch(pattern, target)), "")
        return _refusal(*_UNLIKE.get(call, (400, "invalid_args")), "Invalid json body")

    def _reply(
        self, call: str, words: list[str], key: str, asked: dict[str, str], body: Any, request: tuple[str, str]
    ) -> Reply:
        faults = self._description.request_faults(*request, body) if self._description else []
        numbers = [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 19]
        reply = self._hindered(call, key, numbers or [0])
        if reply is not None:
            return reply
        if (faults and call not in _LENIENT) or len(numbers) < len(words):
            status, error = _UNLIKE.get(call, (400, "invalid_args"))
            return _refusal(status, error, "; ".join(faults)[:500])
        return getattr(self, f"_{call}")(*numbers, asked=asked, body=body)

    def _hindered(self, name: str, key: str, numbers: list[int]) -> Reply | None:
        """Return what keeps a request from being answered, if anything does."""
        troubles = self.troubles
        if troubles.other_version:
            return _undescribed(410, "deprecated_endpoint", "Use another version of this endpoint.")
        left, retry_after = troubles.busy.get(name, (0, None))
        if left:
            troubles.busy[name] = (left - 1, retry_after)
            return _busy(name, retry_after)
        if troubles.fails.get(name):
            troubles.fails[name] -= 1
            return Undescribed(503, "<html>Service Unavailable</html>", "text/html")
        now, before = self.clock(), self._asked_at.get(name)
        if before is not None and now - before < CALLS[name]:
            return _busy(name, None)
        self._asked_at[name] = now
        own = self.instances.get(numbers[0]) if name in ("destroy", "find") else None
        if key != self.key and (own is None or key != own.key):
            return _refusal(_STRANGER.get(name, 401), "auth_error", "Invalid user key")
        if name == "destroy":
            self.ended_by.append("account" if key == self.key else f"instance {numbers[0]}")
        return _undescribed(*troubles.refuses) if troubles.refuses else None

    def _offers(self, *, asked: dict[str, str], body: Any) -> Reply:
        if self.troubles.no_capacity:
            return Reply(200, {"offers": []})
        rows = [self._priced(offer, body) for offer in self.offers.values()]
        found = [row for row in rows if all(fits(row, name, rule) for name, rule in body.items())]
        for entry in reversed(body.get("order", [])):
            if len(entry) != 2 or any(entry[0] not in row for row in rows):
                return _refusal(400, "invalid_request", "Invalid order")
            found.sort(key=lambda row, column=entry[0]: row[column], reverse=entry[1] == "desc")
        return Reply(200, {"offers": found[: max(0, body.get("limit", 64))]})

    def _priced(self, offer: dict[str, Any], query: Mapping[str, Any]) -> dict[str, Any]:
        disk = disk_price(offer, query.get("allocated_storage", 8))
        base = (offer["min_bid"] if query.get("type") == "bid" else offer["dph_base"]) * self.troubles.dearer
        return offer | {"dph_base": base, "storage_total_cost": disk, "dph_total": base + disk}

    def _gpus(self, *, asked: dict[str, str], body: Any) -> Reply:
        names = sorted({offer["gpu_name"] for offer in self.offers.values()})
        return Reply(200, {"success": True, "gpus": [{"gpu_name": name, "total": 1, "available": 1} for name in names]})

    def _locations(self, *, asked: dict[str, str], body: Any) -> Reply:
        rows = [
            {"country_code": offer["geolocation"][-2:], "gpu_name": offer["gpu_name"], "num_gpus": offer["num_gpus"]}
            for offer in self.offers.values()
        ]
        return Reply(200, {"success": True, "locations": rows})

    def _create(self, number: int, *, asked: dict[str, str], body: Any) -> Reply:
        offer = self.offers.get(number)
        if self.troubles.vanishes or offer is None or not offer["rentable"]:
            word = f"error 410/3907: no_such_ask Instance type {number} is no longer available."
            return _refusal(410, "no_such_ask", word, ask_id=number)
        if body.get("price", offer["min_bid"]) < offer["min_bid"]:
            return _refusal(400, "invalid_price", "error 400/3500: the bid is too low", ask_id=number)
        if body.get("runtype") != "args":
            return _refusal(400, "invalid_args", "error 400/3467: this one runs images in args launch mode alone")
        made = self._make(offer, body)
        if self.troubles.fails_with_contract is not None:
            status, words = self.troubles.fails_with_contract, self.troubles.contract_refused
            return _undescribed(status, *words, new_contract=made.id, ask_id=number)
        if self.troubles.lose_creates:
            self.troubles.lose_creates -= 1
            return Reply(0, None)
        return Reply(200, {"success": True, "new_contract": made.id, "instance_api_key": made.key})

    def _make(self, offer: dict[str, Any], body: dict[str, Any]) -> Instance:
        number, troubles, now = self._next, self.troubles, self.clock()
        self._next += 1
        offer["rentable"] = False
        key = secrets.token_hex(32)
        host = None
        if not troubles.never_boots:
            # Args launch mode: `onstart` is the entrypoint, and `args` are its arguments.
            host = self._host(
                self._folder / str(number),
                "exec " + shlex.join([body.get("onstart", ":"), *body.get("args", [])]),
                environment={
                    **{name: value for name, value in body.get("env", {}).items() if not name.startswith("-")},
                    **({} if troubles.no_key else {"CONTAINER_API_KEY": key}),
                    "CONTAINER_ID": str(number),
                    "VAST_CONTAINERLABEL": f"C.{number}",
                },
                programs=troubles.programs,
                has_sshd=not troubles.no_sshd,
                loops=troubles.loops,
            )
        loops = troubles.loops is not None
        taken = offer | {"dph_base": offer["dph_base"] * troubles.dearer_once_made}
        made = Instance(number, body, taken, key, host, now, now + troubles.listed_after_s, loops)
        self.instances[number] = made
        return made

    def _find(self, number: int, *, asked: dict[str, str], body: Any) -> Reply:
        one = self.instances.get(number)
        if self.troubles.null_rows:
            self.troubles.null_rows -= 1
            return Reply(200, {"instances": None})
        there = one is not None and one.gone_at is None and one.shown_at <= self.clock()
        return Reply(200, {"instances": self._row(one) if there and one is not None else None})

    def _row(self, one: Instance, *, listed: bool = False) -> dict[str, Any]:
        row = one.row(listed=listed)
        return row | {"start_date": row["start_date"] + self.troubles.ahead_s}

    def _list(self, *, asked: dict[str, str], body: Any) -> Reply:
        then = self.clock() - self.troubles.stale_s
        there = sorted(
            number
            for number, one in self.instances.items()
            if one.shown_at <= then and (one.gone_at is None or one.gone_at > then)
        )
        size = int(asked.get("limit", 25))
        size = min(size if size > 0 else 5, 25, self.troubles.page)
        token = re.fullmatch(r"after-(\d{1,18})", asked.get("after_token", "after-0"))
        if token is None:
            return _refusal(400, "invalid_token", "Invalid pagination token")
        if asked.keys() & {"select_cols", "select_filters"} or asked.get("order_by", _BY_ID) != _BY_ID:
            return _refusal(400, "invalid_request", "Error in query parameters")
        first = int(token[1])
        rest = [number for number in there if number > first]
        rows = [self._row(self.instances[number], listed=True) for number in rest[:size]]
        further = f"after-{rest[size - 1]}" if len(rest) > size else None
        value = {"success": True, "instances_found": len(rows), "total_instances": len(there), "next_token": further}
        return Reply(200, value | {"instances": rows})

    def _destroy(self, number: int, *, asked: dict[str, str], body: Any) -> Reply:
        one = self.instances.get(number)
        if one is None or one.gone_at is not None or one.shown_at > self.clock():
            return _refusal(404, "no_such_instance", f"Instance {number} not found.")
        if self.troubles.lies:
            self.troubles.lies -= 1
        else:
            self.destroy(one)
        return Reply(200, {"success": True})

    def _logs(self, number: int, *, asked: dict[str, str], body: Any) -> Reply:
        one = self.instances.get(number)
        if one is None or one.gone_at is not None:
            return _refusal(404, "invalid_id", "Invalid instance id.")
        path = f"/vast.ai/instance_logs/{secrets.token_hex(16)}.log"
        self._texts[path] = (one.output(), self.troubles.log_late)
        return Reply(200, {"success": True, "result_url": self.url + path})

    def _log(self, path: str) -> Reply:
        text, late = self._texts.get(path, ("", 1))
        if late:
            self._texts[path] = (text, late - 1)
            return Reply(403, "<Error><Code>AccessDenied</Code></Error>", "application/xml", call="log")
        return Reply(200, text, "text/plain", call="log")

    def _charges(self, *, asked: dict[str, str], body: Any) -> Reply:
        try:
            chosen = json.loads(asked["select_filters"])["day"]
            bounds = int(chosen["gte"]), int(chosen["lte"])
        except (ValueError, TypeError, KeyError, OverflowError):
            return _refusal(400, "invalid_request", "Must provide both 'day' gte and lte filters for instance charges")
        rows, ahead_s = [], self.troubles.ahead_s
        for one in self.instances.values():
            # Charges are written when a machine is gone.
            if one.gone_at is not None and bounds[0] <= one.gone_at + ahead_s <= bounds[1]:
                hours = (one.gone_at - one.made_at) / 3600
                amount = round(hours * one.row()["dph_total"], 3)
                row = {"start": int(one.made_at + ahead_s), "end": int(one.gone_at + ahead_s), "items": []}
                row |= {"source": f"instance-{one.id}", "amount": amount, "description": "charges"}
                rows.append(row | {"type": "instance"})
        return Reply(
            200, {"success": True, "count": len(rows), "total": len(rows), "next_token": None, "results": rows}
        )


def _busy(name: str, retry_after: int | None) -> Reply:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return Undescribed(429, f"API requests too frequent: endpoint threshold={CALLS[name]}", "text/html", headers)


def _refusal(status: int, error: str, message: str, **more: Any) -> Reply:
    return Reply(status, {"success": False, "error": error, "msg": message, **more})


def _undescribed(status: int, error: str, message: str, **more: Any) -> Reply:
    return Undescribed(status, _refusal(status, error, message, **more).value)


@contextmanager
def fake_vast(folder: Path, **ways: Any) -> Iterator[FakeVast]:
    """Serve an account as of `FakeVast` as long as the block lasts; its machines end with it."""
    vast = FakeVast(folder, **ways)
    with vast.serving():
        yield vast
