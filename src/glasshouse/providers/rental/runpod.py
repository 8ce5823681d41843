"""Rents pods of RunPod, over version 2 of its REST interface.

Laws: a field that this file reads and that is not there is `provider-protocol`, never a guess; a state that it does not
list is one of a machine that exists; a pod that is otherwise than its offer is destroyed at once, and uncertain still:
that it is gone is for the caller to show.
Source: RunPod's description of its interface, version 2.0.0; docs.runpod.io/pods/storage/types for the disk's price.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, TypeVar
from urllib.parse import quote

from glasshouse.errors import GlasshouseError, PeerError
from glasshouse.providers.rental.account_api import ApiAnswer
from glasshouse.providers.rental.provider import Offer, Options, Rented, RentedState, Start, UncertainError
from glasshouse.providers.rental.rest import OUTPUT_BYTES, RestProvider, cheapest, no_offer, unexpected, unknown, words
from glasshouse.providers.rental.rest import number as number_or_none
from glasshouse.providers.rental.start_script import start_script

_API = "version 2 of RunPod's interface"
_CLOUDS = ("SECURE", "COMMUNITY")
_CPU = "CPU"
# A container's disk costs 0.10 dollars a gigabyte and month, of 730 hours; the catalogue does not say so.
_DISK_USD = Decimal("0.10") / 730
# What RunPod may have rounded differently.
_CENT_USD = Decimal("0.005")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]{0,252}")
_STATES = {
    "PROVISIONING": RentedState.STARTING,
    "STARTING": RentedState.STARTING,
    "RUNNING": RentedState.RUNNING,
    "EXITED": RentedState.STOPPED,
    "ERROR": RentedState.STOPPED,
}
_GONE = "TERMINATED"
# Pods have `runpodctl`, and a key for themselves alone in the environment of their first process and its children; it
# never stands among a command's arguments. As the one may fail in silence, the same is asked for directly too.
_END = """timeout 60 runpodctl remove pod "$RUNPOD_POD_ID"; python3 -c '
import os, urllib.request as ask
key = {{"Authorization": "Bearer " + os.environ["RUNPOD_API_KEY"]}}
ask.urlopen(ask.Request("{url}/v2/pods/" + os.environ["RUNPOD_POD_ID"], method="DELETE", headers=key), timeout=60)
'"""

_T = TypeVar("_T")


class RunPod(RestProvider):
    """An account at RunPod; see `Provider`."""

    name, title, usual_url = "runpod", "RunPod", "https://api.runpod.io"
    quiet_s = 2.0  # a stream of output that has been silent for so long has nothing more for now

    def offers(self, options: Options) -> list[Offer]:
        """Return what fits, the cheapest first; RunPod's interface has no spot pods."""
        centers = self._centers(options.regions)
        found = self._gpu_offers(options, centers) if options.gpus else self._cpu_offers(options, centers)
        return cheapest(found, options)

    def _centers(self, regions: tuple[str, ...]) -> set[str] | None:
        """Return the data centers in regions, which are such or continents; None for any. Raises `UsageError`."""
        if not regions:
            return None
        listed = self._list("/v2/catalog/datacenters", "dataCenters")
        continents = {_text(center, "id"): _text(center, "region") for center in listed}
        chosen: set[str] = set()
        for region in regions:
            wanted = region.upper().replace(" ", "_")
            here = {name for name, continent in continents.items() if wanted in (name.upper(), continent)}
            if not here:
                raise unknown("RunPod", "region", region, {*continents, *continents.values()})
            chosen |= here
        return chosen

    def _gpu_offers(self, options: Options, centers: set[str] | None) -> Iterable[Offer]:
        query = {"include": "AVAILABILITY", "product": "POD", "count": str(options.gpus)}
        shelves = {cloud: self._list("/v2/catalog/gpus", "gpus", {**query, "cloud": cloud}) for cloud in _CLOUDS}
        chosen = _named([kind for kinds in shelves.values() for kind in kinds], options.gpu)
        for cloud, kinds in shelves.items():
            for kind in kinds:
                identity, side = _text(kind, "id"), cloud.lower()
                most = _field(_field(kind, "maxCount", dict), side, int)
                if identity not in chosen or not _field(kind, side, bool) or options.gpus > most:
                    continue
                usd, gb = _usd(kind, cloud, options.gpus), _field(kind, "memory", int)
                for center in _available(kind, centers):
                    yield _offer(options, (cloud, center, identity), usd, options.memory_gb, identity, gb)

    def _cpu_offers(self, options: Options, centers: set[str] | None) -> Iterable[Offer]:
        for kind in self._list("/v2/catalog/cpus", "cpus", {"include": "AVAILABILITY", "product": "POD"}):
            room = _field(kind, "vcpu", dict)
            each_gb, count = _number(kind, "ramGbPerVcpu"), 2
            while count < _field(room, "min", int) or count * each_gb < options.memory_gb:
                count *= 2
                if count > _field(room, "max", int):
                    break
            else:
                for center in _available(kind, centers):
                    identity = _CPU, center, f"{count}", _text(kind, "id")
                    yield _offer(options, identity, _usd(kind, _CPU, count), int(count * each_gb))

    def rent(self, offer: Offer, start: Start) -> str:
        options = start.options
        cloud, center, kind = offer.id.split("/", 2)
        count = offer.gpus
        if cloud == _CPU:
            vcpus, _, kind = kind.partition("/")
            count = int(vcpus)
        self._check_price(offer, cloud, kind, count)
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
            body["cpu"] = {"id": kind, "vcpuCount": count}
        else:
            body |= {"cloud": cloud, "gpu": {"id": kind, "count": count}}
            if options.memory_gb:
                body["gpu"]["minRamPerGpu"] = math.ceil(options.memory_gb / count)
        answer = self.api.create("POST", "/v2/pods", body)
        if answer.status in (400, 404, 409):
            raise no_offer(self.api.words(answer))
        if answer.status in (405, 413, 415, 422):
            raise self._otherwise("POST /v2/pods", answer)
        return self._as_offered(answer, offer, start)

    def _check_price(self, offer: Offer, cloud: str, kind: str, count: int) -> None:
        """Raise `PlatformError` `no-offer` unless an offer costs what it did."""
        path = f"/v2/catalog/{'cpus' if cloud == _CPU else 'gpus'}/{quote(kind, safe='')}"
        answer = self.api.get(path)
        if answer.status == 404:
            raise no_offer(f"RunPod has no {kind} any more")
        now = _usd(self._value(path, answer), cloud, count) + offer.disk_gb * _DISK_USD
        if now > offer.usd_per_hour + _CENT_USD:
            raise no_offer(f"{kind} costs {now:.3f} dollars an hour now, and {offer.usd_per_hour:.3f} were offered")

    def _as_offered(self, answer: ApiAnswer, offer: Offer, start: Start) -> str:
        """Return the id of a pod that was made as it should be; another is destroyed, and may be there for a while."""
        machine = None
        try:
            pod = self._value("POST /v2/pods", answer)
            machine = _text(pod, "id")
            cost, named = _number(pod, "cost"), _text(pod, "name")
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
        path = _path(machine)
        answer = self.api.get(path)
        return None if answer.status == 404 else _rented(self._value(path, answer))

    def tagged(self, prefix: str) -> list[Rented]:
        """Return all pods whose names begin so; RunPod lists all of them at once."""
        pods = self._list("/v2/pods", "pods", {"includeClusterPods": "true"})
        found = [_rented(pod) for pod in pods if _field(pod, "name", str).startswith(prefix)]
        return [rented for rented in found if rented is not None]

    def output(self, machine: str) -> str:
        path = f"{_path(machine)}/logs"
        query = {"source": "container", "tail": "5000"}
        answer = self.api.stream(path, query, quiet_s=self.quiet_s, most_bytes=8 * OUTPUT_BYTES)
        if answer.status == 404:
            return ""
        if answer.status != 200:
            raise self._otherwise(path, answer)
        return "".join(f"{line}\n" for line in _lines(answer.text))[:OUTPUT_BYTES]

    def give_back(self, machine: str) -> None:
        answer = self.api.ask("DELETE", _path(machine))
        if answer.status not in (200, 202, 204, 404):
            raise self._otherwise(f"DELETE {_path(machine)}", answer)

    def bill(self, machine: str) -> Decimal | None:
        """Return what a pod cost in the last 30 days, in US dollars; None until there is a record of it."""
        records = self._list("/v2/billing/pods", "records", {"podId": machine})
        return sum((_number(record, "totalAmount") for record in records), Decimal(0)) if records else None

    def _list(self, path: str, name: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        return _dicts(self._value(path, self.api.get(path, query)), name)

    def _value(self, what: str, answer: ApiAnswer) -> dict[str, Any]:
        if answer.status not in (200, 201) or not isinstance(answer.value, dict):
            raise self._otherwise(what, answer)
        return answer.value

    def _otherwise(self, what: str, answer: ApiAnswer) -> PeerError:
        why = f"{what} with HTTP {answer.status}, not as {_API} does: {self.api.words(answer)}"
        return unexpected("RunPod", why)


def _path(machine: str) -> str:
    return f"/v2/pods/{quote(machine, safe='')}"


def _missing(name: str) -> PeerError:
    return unexpected("RunPod", f"without a valid {name}, which {_API} has")


def _field(value: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    """Return a field that the description requires, of this type."""
    found = value.get(name)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise _missing(name)
    return found


def _dicts(value: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = _field(value, name, list)
    if not all(isinstance(entry, dict) for entry in found):
        raise _missing(name)
    return found


def _text(value: Mapping[str, Any], name: str) -> str:
    """Return a text that is required and shown: one short line, which cannot steer a terminal."""
    found = _field(value, name, str)
    if not 0 < len(found) <= 200 or not found.isprintable():
        raise _missing(name)
    return found


def _number(value: Mapping[str, Any], name: str) -> Decimal:
    found = number_or_none(value.get(name))
    if found is None:
        raise _missing(name)
    return found


def _usd(kind: Mapping[str, Any], cloud: str, count: int) -> Decimal:
    return _number(_field(kind, "price", dict), "securePerVcpu" if cloud == _CPU else cloud.lower()) * count


def _offer(
    options: Options, identity: tuple[str, ...], usd: Decimal, memory_gb: int, gpu: str = "", gpu_memory_gb: int = 0
) -> Offer:
    return Offer(
        id="/".join(identity),
        gpu=gpu,
        gpus=options.gpus,
        gpu_memory_gb=gpu_memory_gb,
        memory_gb=memory_gb,
        disk_gb=options.disk_gb,
        region=identity[1],
        usd_per_hour=usd + options.disk_gb * _DISK_USD,
        spot=False,
    )


def _available(kind: Mapping[str, Any], centers: set[str] | None) -> list[str]:
    """Return the data centers that have one now, among these; without a choice also one that is not named."""
    if kind.get("availability") in (None, "NONE"):
        return []
    listed = _dicts(kind, "dataCenters") if "dataCenters" in kind else []
    here = [_text(center, "id") for center in listed if center.get("availability") != "NONE"]
    return (here or [""]) if centers is None else [center for center in here if center in centers]


def _named(kinds: Iterable[Mapping[str, Any]], wanted: tuple[str, ...]) -> set[str]:
    """Return the ids of the kinds of GPU that people mean, by their name or words of it; raises `UsageError`."""
    names = {_text(kind, "id"): (_text(kind, "name"), _field(kind, "memory", int)) for kind in kinds}
    if not wanted:
        return set(names)
    chosen: set[str] = set()
    for text in wanted:
        plain, meant = text.lower().strip(), set(words(text))
        exact = {key for key, (name, _) in names.items() if plain in (key.lower(), name.lower())}
        close = {key for key, (name, gb) in names.items() if meant and meant <= set(words(f"{key} {name} {gb}GB"))}
        if not (found := exact or close):
            raise unknown("RunPod", "GPU", text, [*names, *(name for name, _ in names.values())])
        chosen |= found
    return chosen


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
    usd, tag = _number(pod, "cost"), _text(pod, "name")
    return Rented(id=_text(pod, "id"), tag=tag, state=state, host=host, port=port, usd_per_hour=usd, why=why)


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
            entry = None
        if not isinstance(entry, dict):
            raise _missing("event of the log")
        if entry.get("source") == "container":
            found.append(_field(entry, "line", str))
    return found
