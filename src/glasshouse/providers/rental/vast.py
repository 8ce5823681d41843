"""Machines rented at Vast.ai, over its REST interface (https://docs.vast.ai/api-reference).

Laws: a refusal that names what it made all the same is followed by that machine's end; a machine is gone only when
Vast says so in as many words, because it answers 404 to a wrong key too.

How a machine starts: runtype ``args`` with ``onstart`` as its entrypoint (`vastai create instance --help`: args launch
mode), so our start script is the container's first process. ``ssh_direct`` replaces the entrypoint by Vast's own, which
starts an sshd on port 22 for the keys of the account and then runs ``onstart``, whose output, as users tell, goes to a
file in the container. As the first process, the script arms the machine's own end before anyone can log in, nothing but
the run's key is let in, and what it prints is the container's log, which ``request_logs`` returns. Its sshd has port
2222, mapped by ``-p`` to a port of the host's public address (`direct_port_count`). The price: the image has to have an
sshd, which Vast's entrypoint would bring.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.providers.rental.account_api import Answer, Api
from glasshouse.providers.rental.provider import Offer, Options, Rented, RentedState, Start, UncertainError
from glasshouse.providers.rental.start_script import start_script

__all__ = ["Vast"]

_PORT = 2222
_MOST_OFFERS = 64  # one search returns no more
_PAGE_PAUSE_S = 1.1  # a listing may be asked once a second
_MOST_PAGES = 100
_OUTPUT_BYTES = 64 << 10
_LOG_LINES, _LOG_TRIES, _LOG_PAUSE_S = "10000", 10, 1.0
_BILLED_S = 31 * 86_400
_OF_ITS_NAME = 0.9  # an L40S "48GB" shows 45
_BRANDS = {"nvidia", "geforce", "tesla"}
# "If actual_status becomes exited, unknown, or offline it will never reach running": the description's own words.
_ENDED = {"exited", "unknown", "offline", "stopped", "frozen", "destroyed"}
# Of the machine: that an address was not found says nothing of it.
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


class Vast:
    """An account at Vast.ai; a `Provider`.

    Args:
        key: the account's.
        url: where its interface is.
        sleep: waits between tries, pages and looks at a log.
        jitter: a number from 0 to 1, anew each time.
        clock: seconds since 1970.
    """

    name = "vast"
    settles_s = 180.0  # Vast promises nothing: chosen, not measured
    user = "root"
    has_sshd = True

    def __init__(
        self,
        key: str,
        url: str = "https://console.vast.ai",
        *,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = Api(self.name, url, key, sleep=sleep, jitter=jitter)
        self._url, self._sleep, self._clock = url.rstrip("/"), sleep, clock

    def account(self, salt: str) -> str:
        """Return what tells this account from others. See `Provider`."""
        return self._api.account(salt)

    def offers(self, options: Options) -> list[Offer]:
        """Return what fits, the cheapest first; of the hosts that Vast has verified. See `Provider`."""
        wanted: dict[str, Any] = {"num_gpus": {"eq": options.gpus}, "cpu_ram": {"gte": options.memory_gb * 1000}}
        kinds: dict[str, int] = {}
        if options.gpu and options.gpus:
            kinds = _kinds(options.gpu, self._known("/api/v0/metrics/gpu/current/", "gpus", "gpu_name"))
            wanted["gpu_name"] = {"in": sorted(kinds)}
        elif options.gpus:
            wanted["gpu_arch"] = {"eq": "nvidia"}
        if options.regions:
            known = self._known("/api/v0/metrics/gpu/locations/", "locations", "country_code")
            wanted["geolocation"] = {"in": _regions(options.regions, known)}
        found = [offer for _, offer in self._search(options, wanted)]
        fitting = [
            offer
            for offer in found
            if offer.memory_gb >= options.memory_gb
            and offer.gpus == options.gpus
            and offer.gpu_memory_gb >= kinds.get(offer.gpu, 0) * _OF_ITS_NAME
            and offer.usd_per_hour <= options.most_per_hour_usd
        ]
        return sorted(fitting, key=lambda offer: (offer.usd_per_hour, offer.id))

    def rent(self, offer: Offer, start: Start) -> str:
        """Make a machine, and return its id. See `Provider`.

        The offer is looked up once more first, because a host may change its price at any time, and has to be there
        for as long as the machine may run. A bid is the price that was shown, and is what is paid.
        """
        options = replace(start.options, spot=offer.spot)
        lasting = {"id": {"eq": _number(offer.id)}, "duration": {"gte": start.ends_s}}
        now = next((pair for pair in self._search(options, lasting) if pair[1].id == offer.id), None)
        if now is None:
            raise _gone("it was rented to someone else, or its host ends it sooner than the run may last")
        bid, shown = now
        if shown.usd_per_hour > offer.usd_per_hour:
            raise _gone(f"it costs {shown.usd_per_hour:.3f} $ an hour now, and {offer.usd_per_hour:.3f} were shown")
        script = _KEY_THERE + start_script(start, end=_END.format(url=self._url), port=_PORT)
        body: dict[str, Any] = {
            "image": options.image,
            "label": start.tag,
            "disk": options.disk_gb,
            "env": {f"-p {_PORT}:{_PORT}": "1"},
            "runtype": "args",
            # `env` runs its arguments. So does the image's own entrypoint, or none, should `onstart` not replace it.
            "onstart": "env",
            "args": ["sh", "-c", script],
            "target_state": "running",
            "cancel_unavail": True,
        }
        if offer.spot:
            body["price"] = float(bid)
        return self._made(self._api.create("PUT", f"/api/v0/asks/{_number(offer.id)}/", body, judged=False))

    def find(self, machine: str) -> Rented | None:
        """Return a machine by its id; None once it does not exist any more. See `Provider`."""
        value = self._value(self._api.get(f"/api/v0/instances/{_number(machine)}/"), gone=True)
        if value is None or ("instances" in value and value["instances"] is None):
            return None
        found = _rented(value.get("instances"))
        if found is None or found.id != machine:
            raise self._broken("a machine that is not the one asked for")
        return found

    def tagged(self, prefix: str) -> list[Rented]:
        """Return all machines of this account whose tags begin so. See `Provider`."""
        found = []
        order = json.dumps([{"col": "id", "dir": "asc"}])
        for row in self._pages("/api/v1/instances/", "instances", {"limit": "25", "order_by": order}):
            one = _rented(row)
            if one is None:
                raise self._broken("a machine without an id")
            if one.tag.startswith(prefix):
                found.append(one)
        return found

    def output(self, machine: str) -> str:
        """Return what the machine's start command printed. See `Provider`.

        Vast writes it to a file when it is asked to, and names that file before it is there; it is waited for ten
        seconds.
        """
        answer = self._api.ask("PUT", f"/api/v0/instances/request_logs/{_number(machine)}/", {"tail": _LOG_LINES})
        value = self._value(answer, gone=True)
        url = value.get("result_url") if value is not None else None
        if not isinstance(url, str) or not url:
            return ""
        for _ in range(_LOG_TRIES):
            self._sleep(_LOG_PAUSE_S)
            text = self._api.file(url, _OUTPUT_BYTES)
            if text is not None:
                return text
        return ""

    def places(self, machine: str) -> tuple[str, ...]:
        """Return none: its machines have an sshd."""
        return ()

    def give_back(self, machine: str) -> None:
        """Destroy a machine, its disk too; one that does not exist any more is fine. See `Provider`."""
        self._value(self._api.delete(f"/api/v0/instances/{_number(machine)}/"), gone=True)

    def bill(self, machine: str) -> Decimal | None:
        """Return what it cost in the last 31 days, in US dollars; None while Vast does not list it. See `Provider`."""
        now = int(self._clock())
        chosen = {"day": {"gte": now - _BILLED_S, "lte": now + 86_400}, "type": {"in": ["instance"]}}
        query = {"select_filters": json.dumps(chosen), "limit": "500"}
        amounts = [
            _decimal(row.get("amount"))
            for row in self._pages("/api/v0/charges/", "results", query)
            if isinstance(row, dict) and row.get("source") == f"instance-{_number(machine)}"
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
        value = self._value(self._api.ask("POST", "/api/v0/bundles/", query))
        rows = value.get("offers") if value is not None else None
        if not isinstance(rows, list):
            raise self._broken("no list of offers")
        read = (_offer(row, options) for row in rows if isinstance(row, dict))
        return [pair for pair in read if pair is not None]

    def _known(self, path: str, rows: str, column: str) -> list[str]:
        """Return the names that a table of the whole market has in a column."""
        value = self._value(self._api.get(path))
        listed = value.get(rows) if value is not None else None
        if not isinstance(listed, list):
            raise self._broken(f"no {rows}")
        return sorted({row[column] for row in listed if isinstance(row, dict) and isinstance(row.get(column), str)})

    def _made(self, answer: Answer) -> str:
        """Return the id of what a create made; raises as `rent`."""
        value = answer.value if isinstance(answer.value, dict) else {}
        made, words = value.get("new_contract"), self._api.words(answer)
        named = isinstance(made, int) and not isinstance(made, bool)
        if answer.status == 200 and value.get("success") is True and named:
            return str(made)
        refused = answer.status >= 400 or (answer.status == 200 and value.get("success") is False)
        if not refused or (made is not None and not named):
            raise UncertainError(self.name, f"it answered HTTP {answer.status} without an id: {words}")
        if named:
            self._undo(str(made), words)
        refusal = self._refusal(answer)
        if refusal.code is Code.PROVIDER_PROTOCOL and _NO_OFFER.search(_said(answer)):
            raise _gone(words)
        raise refusal

    def _undo(self, machine: str, words: str) -> None:
        """Give back what a refused create made; raises `UncertainError` where it is not seen to be gone."""
        try:
            # That there is no such machine may only be true as yet.
            self._value(self._api.delete(f"/api/v0/instances/{machine}/"))
            left = self.find(machine) is not None
        except GlasshouseError as error:
            why = f"it refused ({words}) and made {machine}; {error.message}"
            raise UncertainError(self.name, why, machine=machine) from None
        if left:
            why = f"it refused ({words}) and made {machine}, which is still there"
            raise UncertainError(self.name, why, machine=machine)

    def _pages(self, path: str, rows: str, query: Mapping[str, str]) -> Iterator[Any]:
        """Yield the rows of all pages of a listing; raises as `Provider` where one of them is missing."""
        after: dict[str, str] = {}
        for number in range(_MOST_PAGES):
            if number:
                self._sleep(_PAGE_PAUSE_S)
            value = self._value(self._api.get(path, {**query, **after}))
            listed = value.get(rows) if value is not None else None
            if value is None or not isinstance(listed, list):
                raise self._broken(f"no list of {rows}")
            yield from listed
            token = value.get("next_token")
            if token is None:
                return
            if not isinstance(token, str):
                raise self._broken("a listing that does not go on")
            after = {"after_token": token}
        raise self._broken("a listing without an end")

    def _value(self, answer: Answer, *, gone: bool = False) -> dict[str, Any] | None:
        """Return what an answer has; None, where `gone` allows it, if it says that there is no such machine."""
        if answer.status == 200 and isinstance(answer.value, dict) and answer.value.get("success") is not False:
            return answer.value
        refusal = self._refusal(answer)
        # A wrong key is answered by 404 as well, and so is an address that this interface has no more.
        known = refusal.code is Code.PROVIDER_PROTOCOL and answer.status in (200, 404)
        if gone and known and _NO_MACHINE.search(_said(answer)):
            return None
        raise refusal

    def _refusal(self, answer: Answer) -> GlasshouseError:
        words, said = self._api.words(answer), _said(answer)
        try:
            self._api.judge(answer)
            if _NO_KEY.search(said):
                self._api.judge(replace(answer, status=401))
            if _NO_MONEY.search(said):
                self._api.judge(replace(answer, status=402))
        except UsageError as error:
            return error
        return self._broken(f"HTTP {answer.status}: {words}")

    def _broken(self, what: str) -> PeerError:
        return PeerError(
            Code.PROVIDER_PROTOCOL,
            f"{self.name} answered with {what}",
            hint="if its interface has changed, a newer Glasshouse may know it",
        )


def _gone(why: str) -> PlatformError:
    return PlatformError(Code.NO_OFFER, f"this machine at vast cannot be rented any more: {why}")


def _said(answer: Answer) -> str:
    """Return an answer's own words for what it refuses: Vast's errors have one, two or all of these."""
    value = answer.value if isinstance(answer.value, dict) else {}
    texts = (value.get(name) for name in ("error", "msg", "message"))
    return " ".join(text for text in texts if isinstance(text, str))


def _number(name: str) -> int:
    """Return an id as Vast's paths have it."""
    if not (name.isascii() and name.isdigit() and len(name) <= 18):
        raise UsageError(Code.USAGE, f"vast has no machine or offer called {name!r}; its ids are numbers")
    return int(name)


def _decimal(value: Any) -> Decimal | None:
    """Return a number that an answer has; None for what is none, or could not be one of money, memory or time."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal) or not 0 <= value < 10**12:
        return None
    return Decimal(value)


def _offer(row: Mapping[str, Any], options: Options) -> tuple[Decimal, Offer] | None:
    """Return an offer and the price of its GPUs alone; None for a row that lacks what has to be known of one."""
    names = ("dph_total", "num_gpus", "cpu_ram", "dph_base", "storage_total_cost")
    total, gpus, memory_mb, base, disk = (_decimal(row.get(name)) for name in names)
    if total is None or gpus is None or memory_mb is None or not isinstance(row.get("id"), int):
        return None
    if options.spot:
        base = _decimal(row.get("min_bid")) or base
        if base is None or disk is None:
            return None  # what would be bid is not known
        total = base + disk
    elif base is not None and disk is not None:
        total = max(total, base + disk)
    part = min(_decimal(row.get("gpu_frac")) or Decimal(1), Decimal(1))  # of the host's memory: as of its GPUs
    return base or total, Offer(
        id=str(row["id"]),
        gpu=_plain(row.get("gpu_name")) if gpus else "",
        gpus=int(gpus),
        gpu_memory_gb=round((_decimal(row.get("gpu_ram")) or 0) / 1024) if gpus else 0,
        memory_gb=int(memory_mb * part / 1000),
        disk_gb=options.disk_gb,
        region=_plain(row.get("geolocation")),
        usd_per_hour=total,
        spot=options.spot,
    )


def _rented(row: Any) -> Rented | None:
    """Return a machine as a row of a listing has it; None for a row that does not say which."""
    if not isinstance(row, dict) or isinstance(row.get("id"), bool) or not isinstance(row.get("id"), int):
        return None
    host, port = _address(row)
    return Rented(
        id=str(row["id"]),
        tag=row["label"] if isinstance(row.get("label"), str) else "",
        state=_state(row),
        host=host,
        port=port,
        usd_per_hour=_decimal(row.get("dph_total")),
        why=" ".join(filter(None, (_plain(row.get("actual_status")), _plain(row.get("status_msg"))))),
    )


def _state(row: Mapping[str, Any]) -> RentedState:
    actual = row.get("actual_status")
    if actual in _ENDED or row.get("intended_status") in _ENDED or row.get("cur_state") == "stopped":
        return RentedState.STOPPED
    message = row.get("status_msg")
    if actual == "created" and isinstance(message, str) and "OCI runtime create failed" in message:
        return RentedState.STOPPED  # it is tried over and over, and never starts
    return RentedState.RUNNING if actual == "running" else RentedState.STARTING


def _address(row: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return where a machine's sshd is reached, both None until that is known."""
    try:
        host = str(ipaddress.ip_address(str(row.get("public_ipaddr")).strip()))
        ports = row["ports"][f"{_PORT}/tcp"]
        port = next(int(one["HostPort"]) for one in ports)
    except (KeyError, TypeError, ValueError, StopIteration):  # the table, a port of it or a row may be null
        return None, None
    return (host, port) if 0 < port < 1 << 16 else (None, None)


def _plain(text: Any) -> str:
    """Return what is for people of an answer's text: short and printable."""
    if not isinstance(text, str):
        return ""
    short = " ".join(text.split())[:200]
    return short if short.isprintable() else ascii(short)


def _kinds(wanted: Sequence[str], known: Sequence[str]) -> dict[str, int]:
    """Return the kinds of GPU that are meant, as Vast writes them, each with the least memory that it has to have.

    ``A100 80GB`` means ``A100 PCIE`` and ``A100 SXM4`` with as much memory; a name that Vast has means no other.

    Raises:
        UsageError: `usage`: Vast has none that is called so.
    """
    found: dict[str, int] = {}
    for text in wanted:
        size = re.search(r"\b(\d{1,3})\s*G(?:i)?B\b", text, re.IGNORECASE)
        words = _words(text[: size.start()] + text[size.end() :] if size else text)
        same = [name for name in known if "".join(_words(name)) == "".join(words)]
        meant = same or [name for name in known if words and _words(name)[: len(words)] == words]
        if not meant:
            near = difflib.get_close_matches(" ".join(words), [name.lower() for name in known], n=3, cutoff=0.3)
            names = ", ".join(name for low in near for name in known if name.lower() == low)
            raise UsageError(
                Code.USAGE,
                f"vast has no GPU called {text!r}",
                hint=f"the nearest are {names}" if names else "glasshouse offers lists what it has",
            )
        for name in meant:
            least = int(size[1]) if size else 0
            found[name] = min(found.get(name, least), least)
    return found


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _BRANDS]


def _regions(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return country codes as Vast writes them; raises `UsageError` for one that it does not have."""
    for text in wanted:
        if text.upper() not in known:
            near = difflib.get_close_matches(text.upper(), known, n=3, cutoff=0.3) or known
            raise UsageError(
                Code.USAGE,
                f"vast has no region called {text!r}; its regions are countries of two letters",
                hint=f"it has {', '.join(near)}",
            )
    return sorted({text.upper() for text in wanted})
