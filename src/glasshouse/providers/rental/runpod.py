"""Rents pods of RunPod, over version 2 of its REST interface.

Laws: a field that this file reads and that is not there is `provider-protocol`, never a guess; a state that it does not
know is one of a machine that exists; a pod that is otherwise than its offer is destroyed at once, and uncertain still:
that it is gone is for the caller to show.
Source: RunPod's description of its interface, version 2.0.0; docs.runpod.io/pods/storage/types for the disk's price.
"""

from __future__ import annotations

import difflib
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeVar
from urllib.parse import quote

from glasshouse.errors import Code, GlasshouseError, PeerError, PlatformError, UsageError
from glasshouse.providers.rental.account_api import Answer, Api
from glasshouse.providers.rental.provider import Offer, Options, Rented, RentedState, Start, UncertainError
from glasshouse.providers.rental.start_script import start_script

__all__ = ["RunPod"]

_API = "version 2 of RunPod's interface"
_CLOUDS = ("SECURE", "COMMUNITY")
_CPU = "CPU"
# A container's disk costs 0.10 dollars a gigabyte and month, of 730 hours; the catalogue does not say so.
_DISK_USD = Decimal("0.10") / 730
# What RunPod may have rounded differently.
_CENT_USD = Decimal("0.005")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,252}")
_OUTPUT_BYTES = 64 << 10
_STATES = {
    "PROVISIONING": RentedState.STARTING,
    "STARTING": RentedState.STARTING,
    "RUNNING": RentedState.RUNNING,
    "EXITED": RentedState.STOPPED,
    "ERROR": RentedState.STOPPED,
}
_GONE = "TERMINATED"
# Pods have `runpodctl`, and a key for themselves alone in the environment of their first process and its children; it
# never stands among a command's arguments. As the one may fail and not say so, the same is asked for directly too.
_END = """timeout 60 runpodctl remove pod "$RUNPOD_POD_ID"; python3 -c '
import os, urllib.request as ask
key = {{"Authorization": "Bearer " + os.environ["RUNPOD_API_KEY"]}}
ask.urlopen(ask.Request("{url}/v2/pods/" + os.environ["RUNPOD_POD_ID"], method="DELETE", headers=key), timeout=60)
'"""

_T = TypeVar("_T")


class RunPod:
    """An account at RunPod; see `Provider`.

    Args:
        key: of the account, with the right to manage pods.
        url: of the interface.
        sleep, jitter: as of `Api`.
        quiet_s: a stream of output that has been silent for so long has nothing more for now.
    """

    name = "runpod"
    settles_s = 180.0
    user = "root"
    has_sshd = True

    def __init__(
        self,
        key: str,
        *,
        url: str = "https://api.runpod.io",
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        quiet_s: float = 2.0,
    ) -> None:
        self._api = Api("RunPod", url, key, sleep=sleep, jitter=jitter)
        self._url, self._quiet_s = url.rstrip("/"), quiet_s

    def account(self, salt: str) -> str:
        """Return what tells this account from others. See `Provider`."""
        return self._api.account(salt)

    def offers(self, options: Options) -> list[Offer]:
        """Return what fits, the cheapest first; RunPod's interface has no spot pods."""
        places = self._places(options.regions)
        found = self._gpu_offers(options, places) if options.gpus else self._cpu_offers(options, places)
        fitting = [offer for offer in found if offer.usd_per_hour <= options.most_per_hour_usd]
        return sorted(fitting, key=lambda offer: (offer.usd_per_hour, offer.id))

    def _places(self, regions: tuple[str, ...]) -> set[str] | None:
        """Return the data centers in regions, which are such or their continents; None for any.

        Raises:
            UsageError: `usage`: there is none of that name.
        """
        if not regions:
            return None
        centers = [
            (_text(center, "id"), _text(center, "region"))
            for center in self._list("/v2/catalog/datacenters", "dataCenters")
        ]
        chosen: set[str] = set()
        for region in regions:
            wanted = region.upper().replace(" ", "_")
            here = {name for name, continent in centers if wanted in (name.upper(), continent)}
            if not here:
                known = sorted({name for center in centers for name in center})
                raise UsageError(Code.USAGE, f"RunPod has no region {region}", hint=_nearest(wanted, known))
            chosen |= here
        return chosen

    def _gpu_offers(self, options: Options, places: set[str] | None) -> Iterable[Offer]:
        query = {"include": "AVAILABILITY", "product": "POD", "count": str(options.gpus)}
        shelves = {cloud: self._list("/v2/catalog/gpus", "gpus", {**query, "cloud": cloud}) for cloud in _CLOUDS}
        chosen = _named([kind for kinds in shelves.values() for kind in kinds], options.gpu)
        for cloud, kinds in shelves.items():
            for kind in kinds:
                identity = _text(kind, "id")
                side = cloud.lower()
                most = _field(_field(kind, "maxCount", dict), side, int)
                if identity not in chosen or not _field(kind, side, bool) or options.gpus > most:
                    continue
                for center in _available(kind, places):
                    yield Offer(
                        id="/".join((cloud, center, identity)),
                        gpu=identity,
                        gpus=options.gpus,
                        gpu_memory_gb=_field(kind, "memory", int),
                        memory_gb=options.memory_gb,
                        disk_gb=options.disk_gb,
                        region=center,
                        usd_per_hour=_gpu_usd(kind, cloud, options.gpus) + options.disk_gb * _DISK_USD,
                        spot=False,
                    )

    def _cpu_offers(self, options: Options, places: set[str] | None) -> Iterable[Offer]:
        query = {"include": "AVAILABILITY", "product": "POD"}
        for kind in self._list("/v2/catalog/cpus", "cpus", query):
            room = _field(kind, "vcpu", dict)
            each_gb, count = _number(kind, "ramGbPerVcpu"), 2
            while count < _field(room, "min", int) or count * each_gb < options.memory_gb:
                count *= 2
                if count > _field(room, "max", int):
                    break
            else:
                for center in _available(kind, places):
                    yield Offer(
                        id="/".join((_CPU, center, f"{count}", _text(kind, "id"))),
                        gpu="",
                        gpus=0,
                        gpu_memory_gb=0,
                        memory_gb=int(count * each_gb),
                        disk_gb=options.disk_gb,
                        region=center,
                        usd_per_hour=_cpu_usd(kind, count) + options.disk_gb * _DISK_USD,
                        spot=False,
                    )

    def rent(self, offer: Offer, start: Start) -> str:
        """Make a pod, and return its id; raises as `Provider`."""
        options = start.options
        self._still(offer)
        cloud, center, rest = offer.id.split("/", 2)
        body: dict[str, Any] = {
            "name": start.tag,
            "image": options.image,
            "disk": max(1, offer.disk_gb),
            "ports": ["22/tcp"],
            # Set per pod, the account's own list of keys never reaches it.
            "env": {"PUBLIC_KEY": start.ssh_public},
            "entrypoint": ["/bin/sh", "-c"],
            "cmd": [start_script(start, end=_END.format(url=self._url))],
        }
        if center:
            body["dataCenterIds"] = [center]
        if cloud == _CPU:
            count, _, kind = rest.partition("/")
            body["cpu"] = {"id": kind, "vcpuCount": int(count)}
        else:
            body |= {"cloud": cloud, "gpu": {"id": rest, "count": offer.gpus}}
            if options.memory_gb:
                body["gpu"]["minRamPerGpu"] = math.ceil(options.memory_gb / offer.gpus)
        answer = self._api.create("POST", "/v2/pods", body)
        if answer.status in (400, 404, 409):
            raise _gone(f"RunPod could not make it: {self._api.words(answer)}")
        if answer.status in (405, 413, 415, 422):
            raise self._otherwise("POST /v2/pods", answer)
        return self._as_offered(answer, offer, start)

    def _still(self, offer: Offer) -> None:
        """Raise `PlatformError` `no-offer` unless an offer is as it was."""
        cloud, _, rest = offer.id.split("/", 2)
        shelf, kind = ("cpus", rest.partition("/")[2]) if cloud == _CPU else ("gpus", rest)
        path = f"/v2/catalog/{shelf}/{quote(kind, safe='')}"
        answer = self._api.get(path)
        if answer.status == 404:
            raise _gone(f"RunPod has no {kind} any more")
        found = self._value(path, answer)
        now = _cpu_usd(found, int(rest.partition("/")[0])) if cloud == _CPU else _gpu_usd(found, cloud, offer.gpus)
        now += offer.disk_gb * _DISK_USD
        if now > offer.usd_per_hour + _CENT_USD:
            raise _gone(f"{kind} costs {now:.3f} dollars an hour now, and {offer.usd_per_hour:.3f} were offered")

    def _as_offered(self, answer: Answer, offer: Offer, start: Start) -> str:
        """Return the id of a pod that was made as it should be; another is destroyed, and may be there for a while."""
        try:
            pod = self._value("POST /v2/pods", answer)
            machine = _text(pod, "id")
        except PeerError as error:
            raise UncertainError("RunPod", str(error)) from None
        try:
            cost = _number(pod, "cost")
            named = _text(pod, "name")
            memory = 0 if "gpu" not in pod else _number(_field(pod, "gpu", dict), "memory")
        except PeerError as error:
            raise UncertainError("RunPod", str(error), machine=machine) from None
        if named != start.tag:
            why = "it has another name than it was given, by which it could not be found again"
        elif cost > offer.usd_per_hour + _CENT_USD:
            why = f"it costs {cost} dollars an hour, and {offer.usd_per_hour:.3f} were offered"
        elif memory and memory < start.options.memory_gb:
            why = f"it has {memory} GB of memory, and {start.options.memory_gb} were asked for"
        else:
            return machine
        try:
            self.give_back(machine)
        except GlasshouseError as error:
            why += f"; giving it back failed: {error.message}"
        raise UncertainError("RunPod", f"it made {machine}, which is given back: {why}", machine=machine)

    def find(self, machine: str) -> Rented | None:
        """Return a pod by its id; None once it does not exist any more."""
        path = f"/v2/pods/{quote(machine, safe='')}"
        answer = self._api.get(path)
        return None if answer.status == 404 else _rented(self._value(path, answer))

    def tagged(self, prefix: str) -> list[Rented]:
        """Return all pods whose names begin so; RunPod lists all of them at once."""
        pods = self._list("/v2/pods", "pods", {"includeClusterPods": "true"})
        found = [_rented(pod) for pod in pods if _field(pod, "name", str).startswith(prefix)]
        return [rented for rented in found if rented is not None]

    def output(self, machine: str) -> str:
        """Return what a pod's start command printed, at most its first 64 KiB."""
        path = f"/v2/pods/{quote(machine, safe='')}/logs"
        query = {"source": "container", "tail": "5000"}
        answer = self._api.stream(path, query, quiet_s=self._quiet_s, most_bytes=8 * _OUTPUT_BYTES)
        if answer.status == 404:
            return ""
        if answer.status != 200:
            raise self._otherwise(path, answer)
        return "".join(f"{line}\n" for line in _lines(answer.text))[:_OUTPUT_BYTES]

    def places(self, machine: str) -> tuple[str, ...]:
        """Return none: its machines have an sshd."""
        return ()

    def give_back(self, machine: str) -> None:
        """Destroy a pod and its disk; one that does not exist any more is fine."""
        path = f"/v2/pods/{quote(machine, safe='')}"
        answer = self._api.delete(path)
        if answer.status not in (200, 202, 204, 404):
            raise self._otherwise(f"DELETE {path}", answer)

    def bill(self, machine: str) -> Decimal | None:
        """Return what a pod cost in the last 30 days, in US dollars; None until there is a record of it."""
        records = self._list("/v2/billing/pods", "records", {"podId": machine})
        return sum((_number(record, "totalAmount") for record in records), Decimal(0)) if records else None

    def _list(self, path: str, name: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        found = _field(self._value(path, self._api.get(path, query)), name, list)
        if not all(isinstance(entry, dict) for entry in found):
            raise _missing(name)
        return found

    def _value(self, what: str, answer: Answer) -> dict[str, Any]:
        if answer.status not in (200, 201) or not isinstance(answer.value, dict):
            raise self._otherwise(what, answer)
        return answer.value

    def _otherwise(self, what: str, answer: Answer) -> PeerError:
        return PeerError(
            Code.PROVIDER_PROTOCOL,
            f"RunPod answered {what} with HTTP {answer.status}, not as {_API} does: {self._api.words(answer)}",
            hint="a newer glasshouse may ask as RunPod wants it now",
        )


def _missing(name: str) -> PeerError:
    return PeerError(
        Code.PROVIDER_PROTOCOL,
        f"RunPod answered without a valid {name}, which {_API} has",
        hint="a newer glasshouse may understand what RunPod answers now",
    )


def _field(value: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    """Return a field that the description requires, of this type."""
    found = value.get(name)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise _missing(name)
    return found


def _text(value: Mapping[str, Any], name: str) -> str:
    """Return a text that is required and shown: one short line, which cannot steer a terminal."""
    found = _field(value, name, str)
    if not 0 < len(found) <= 200 or not found.isprintable():
        raise _missing(name)
    return found


def _number(value: Mapping[str, Any], name: str) -> Decimal:
    """Return a number that is required, and is no price or size if it is below zero."""
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int | Decimal) or found < 0:
        raise _missing(name)
    return Decimal(found)


def _gpu_usd(kind: Mapping[str, Any], cloud: str, count: int) -> Decimal:
    return _number(_field(kind, "price", dict), cloud.lower()) * count


def _cpu_usd(kind: Mapping[str, Any], count: int) -> Decimal:
    return _number(_field(kind, "price", dict), "securePerVcpu") * count


def _available(kind: Mapping[str, Any], places: set[str] | None) -> list[str]:
    """Return the data centers that have one now, among these; without a choice also one that is not named."""
    if kind.get("availability") in (None, "NONE"):
        return []
    listed = kind.get("dataCenters", [])
    if not isinstance(listed, list) or not all(isinstance(center, dict) for center in listed):
        raise _missing("dataCenters")
    centers = [_text(center, "id") for center in listed if center.get("availability") != "NONE"]
    if places is not None:
        return [center for center in centers if center in places]
    return centers or [""]


def _named(kinds: Iterable[Mapping[str, Any]], wanted: tuple[str, ...]) -> set[str]:
    """Return the ids of the kinds of GPU that people mean: by their name, or by some of its words.

    Raises:
        UsageError: `usage`: there is none; names the nearest.
    """
    names = {_text(kind, "id"): _text(kind, "name") for kind in kinds}
    words = {
        _text(kind, "id"): _words(f"{kind['id']} {kind['name']} {_field(kind, 'memory', int)}GB") for kind in kinds
    }
    if not wanted:
        return set(names)
    chosen: set[str] = set()
    for text in wanted:
        plain = text.lower().strip()
        exact = {key for key, name in names.items() if plain in (key.lower(), name.lower())}
        found = exact or {key for key, of in words.items() if _words(text) and _words(text) <= of}
        if not found:
            known = sorted({*names, *names.values()})
            raise UsageError(Code.USAGE, f"RunPod has no GPU {text}", hint=_nearest(text, known))
        chosen |= found
    return chosen


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))


def _nearest(text: str, known: list[str]) -> str:
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(text.lower(), lower, n=3, cutoff=0.0)
    return "the nearest are " + ", ".join(lower[name] for name in near) if near else "there is none at all now"


def _rented(pod: Mapping[str, Any]) -> Rented | None:
    """Return a pod; None for one that is permanently gone."""
    status = _text(pod, "status")
    if status == _GONE:
        return None
    state, why = _STATES.get(status, RentedState.STARTING), status.lower()
    direct = _field(pod, "ssh", dict).get("direct")
    host, port = None, None
    if direct is not None:
        if not isinstance(direct, dict):
            raise _missing("ssh.direct")
        host, port = _text(direct, "host"), _field(direct, "port", int)
        # It becomes an argument of `ssh`.
        if not _HOST.fullmatch(host) or not 0 < port < 1 << 16:
            raise _missing("ssh.direct")
    elif state is RentedState.RUNNING:
        state, why = RentedState.STARTING, "running, and its port for ssh is not open yet"
    return Rented(
        id=_text(pod, "id"),
        tag=_text(pod, "name"),
        state=state,
        host=host,
        port=port,
        usd_per_hour=_number(pod, "cost"),
        why=why,
    )


def _lines(stream: str) -> list[str]:
    """Return the lines of a container in a stream of events; one that is not complete yet is none."""
    found = []
    for event in re.split(r"\r?\n\r?\n", stream)[:-1]:
        data = "\n".join(line[5:].removeprefix(" ") for line in event.splitlines() if line.startswith("data:"))
        if not data:
            continue  # a comment, which keeps the connection open
        try:
            entry = json.loads(data)
        except (ValueError, RecursionError):
            raise _missing("event of the log") from None
        if not isinstance(entry, dict):
            raise _missing("event of the log")
        if entry.get("source") == "container":
            found.append(_field(entry, "line", str))
    return found


def _gone(why: str) -> PlatformError:
    return PlatformError(Code.NO_OFFER, why, hint="take another offer")
