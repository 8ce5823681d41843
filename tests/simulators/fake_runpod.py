"""A RunPod of one's own on the loopback: version 2 of its interface, an account, and pods that are real machines.

It answers as its published description has it, and fails as real providers do, where it is asked to.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from simulators.fake_api import FakeApi, Reply, problem
from simulators.fake_api import Troubles as AnyTroubles
from simulators.rented_host import RentedHost

__all__ = ["FakeRunPod", "Pod", "Troubles", "fake_runpod"]

_CENTERS = {"US-KS-2": "NORTH_AMERICA", "EU-RO-1": "EUROPE", "EUR-IS-1": "EUROPE"}
# The id, the name, gigabytes, dollars an hour in the secure and in the community cloud, and where there are some.
_GPUS: tuple[tuple[str, str, int, float, float, tuple[str, ...]], ...] = (
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.69, 0.34, ("US-KS-2", "EU-RO-1")),
    ("NVIDIA GeForce RTX 3090", "RTX 3090", 24, 0.46, 0.22, ("EU-RO-1",)),
    ("NVIDIA A100 80GB PCIe", "A100 PCIe", 80, 1.64, 1.19, ("EUR-IS-1",)),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 1.89, 1.39, ("US-KS-2",)),
    ("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 2.99, 2.69, ()),
)
_CPUS: tuple[tuple[str, str, int, int, float, float, tuple[str, ...]], ...] = (
    ("cpu3c", "Compute-Optimized", 2, 32, 2, 0.03, ("EU-RO-1",)),
    ("cpu5m", "Memory-Optimized", 2, 16, 8, 0.05, ("US-KS-2", "EU-RO-1")),
)
_RUNPODCTL = """#!/bin/sh
[ "$1 $2" = "remove pod" ] || exit 1
exec python3 -c '
import os, sys, urllib.request as ask
key = {{"Authorization": "Bearer " + os.environ["RUNPOD_API_KEY"]}}
ask.urlopen(ask.Request("{url}/v2/pods/" + sys.argv[1], method="DELETE", headers=key))
' "$3"
"""


@dataclass
class Troubles(AnyTroubles):
    """What goes wrong at RunPod, beside the usual.

    Attributes:
        answers: what the next requests of a call (``POST /v2/pods``) are answered with: HTTP status, and the seconds
            in Retry-After.
        refused: what every request is answered with: 401, 402 or 403.
        no_runpodctl: pods that are made from then on do not have the program that ends them.
        zone: what stands behind the times that are written.
    """

    answers: dict[str, list[tuple[int, int | None]]] = field(default_factory=dict)
    refused: int | None = None
    no_runpodctl: bool = False
    zone: str = "Z"


@dataclass
class Pod:
    """One pod; `gone_at` is when it was destroyed."""

    id: str
    request: dict[str, Any]
    key: str
    cost: float
    made: float
    made_at: datetime
    listed_after_s: float
    boots: bool
    host: RentedHost | None = None
    gone_at: float | None = None
    in_cluster: bool = False


class FakeRunPod(FakeApi):
    """The account and its pods.

    Args:
        folder: as of `FakeApi`.
        machines: whether pods are real machines, which needs root; others run at once, and print nothing.
        ways: as of `FakeApi`; what is not as described is answered with 422.
    """

    def __init__(self, folder: Path, *, machines: bool = True, **ways: Any) -> None:
        super().__init__(folder, **ways)
        self.troubles = Troubles()
        self.pods: dict[str, Pod] = {}
        self._machines = machines

    @property
    def made(self) -> list[Pod]:
        """All pods that there ever were."""
        return list(self.pods.values())

    def answer(self, method: str, target: str, body: Any, authorization: str) -> Reply:
        """Return what a request is answered with."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query, keep_blank_values=True)
        routes = ((template, pattern.fullmatch(path), ways) for template, pattern, ways in _ROUTES)
        found = next(((template, match, ways) for template, match, ways in routes if match), None)
        if found is None:
            return problem(404, "there is no such path", call=f"{method} {path}")
        template, match, ways = found
        call = f"{method} {template}"
        if method not in ways:
            return problem(405, "this path has no such method", call=call, headers={"Allow": ", ".join(ways)})
        words = [unquote(word) for word in match.groups()]
        with self.lock:
            reply: Reply | None = self._refused(call, words, authorization)
            if reply is None and self._description is not None:
                faults = self._description.request_faults(method, target, body)
                reply = problem(422, "the request is not as described", errors=faults) if faults else None
            if reply is None:
                only = {name: values[-1] for name, values in query.items()}
                reply = getattr(self, ways[method])(*words, query=only, body=body)
            return replace(reply, call=call)

    def _refused(self, call: str, words: list[str], authorization: str) -> Reply | None:
        own = self.pods.get(words[0]) if words and call.startswith("DELETE") else None
        if authorization not in (f"Bearer {self.key}", own and f"Bearer {own.key}"):
            return problem(401, "the key is not valid")
        if self.troubles.refused:
            return problem(self.troubles.refused, "the account may not do this")
        planned = self.troubles.answers.get(call)
        if planned:
            status, after_s = planned.pop(0)
            headers = {} if after_s is None else {"Retry-After": str(after_s)}
            return problem(status, "not now", headers=headers)
        return None

    def list_pods(self, *, query: dict[str, str], body: Any) -> Reply:
        then = self.clock() - self.troubles.stale_s
        listed = [
            self._pod(pod)
            for pod in self.pods.values()
            if pod.made + pod.listed_after_s <= then and (pod.gone_at is None or pod.gone_at > then)
            if query.get("includeClusterPods") == "true" or not pod.in_cluster
        ]
        return Reply(200, {"pods": listed})

    def create_pod(self, *, query: dict[str, str], body: Any) -> Reply:
        kind, compute = ("gpu", body["gpu"]) if "gpu" in body else ("cpu", body.get("cpu", {}))
        if ("gpu" in body) == ("cpu" in body):
            return problem(400, "exactly one of gpu and cpu is needed")
        shelf = {entry["id"]: entry for entry in (self._gpus() if kind == "gpu" else self._cpus())}
        if compute["id"] not in shelf:
            return problem(400, f"there is no {kind} {compute['id']}")
        if self.troubles.no_capacity or self.troubles.vanishes:
            return problem(400, "This machine does not have the resources to deploy your pod.")
        entry = shelf[compute["id"]]
        if kind == "gpu":
            each = entry["price"][body.get("cloud", "SECURE").lower()]
            cost = each * compute.get("count", 1)
        else:
            cost = entry["price"]["securePerVcpu"] * compute["vcpuCount"]
        number, trouble = secrets.token_hex(7), self.troubles
        pod = Pod(
            id=number,
            request=body,
            key=f"rpk_{secrets.token_hex(16)}",
            cost=round(cost * trouble.dearer_once_made, 4),
            made=self.clock(),
            made_at=datetime.now(UTC),
            listed_after_s=trouble.listed_after_s,
            boots=not trouble.never_boots,
        )
        if self._machines and pod.boots:
            pod.host = self._host(pod)
        self.pods[number] = pod
        if trouble.lose_creates:
            trouble.lose_creates -= 1
            return Reply(0, None)
        return Reply(201, self._pod(pod))

    def _host(self, pod: Pod) -> RentedHost:
        assert pod.request["entrypoint"] == ["/bin/sh", "-c"]
        (script,) = pod.request["cmd"]
        trouble = self.troubles
        return RentedHost(
            self._folder / pod.id,
            script,
            environment={**pod.request.get("env", {}), "RUNPOD_POD_ID": pod.id, "RUNPOD_API_KEY": pod.key},
            programs={} if trouble.no_runpodctl else {"runpodctl": _RUNPODCTL.format(url=self.url)},
            has_sshd=not trouble.no_sshd,
            loops=trouble.loops,
        )

    def get_pod(self, number: str, *, query: dict[str, str], body: Any) -> Reply:
        pod = self.pods.get(number)
        if pod is None or pod.gone_at is not None:
            return problem(404, "there is no such pod")
        return Reply(200, self._pod(pod))

    def delete_pod(self, number: str, *, query: dict[str, str], body: Any) -> Reply:
        pod = self.pods.get(number)
        if pod is None or pod.gone_at is not None:
            return problem(404, "there is no such pod")
        if pod.in_cluster:
            return problem(409, "a cluster's pod goes with its cluster")
        if self.troubles.lies:
            self.troubles.lies -= 1
        else:
            self.destroy(pod)
        return Reply(204, None)

    def logs(self, number: str, *, query: dict[str, str], body: Any) -> Reply:
        pod = self.pods.get(number)
        if pod is None or pod.gone_at is not None:
            return problem(404, "there is no such pod")
        written = "" if pod.host is None else pod.host.output()
        lines = written.splitlines()[-int(query.get("tail", "100")) :] if query.get("source") != "system" else []
        now = self._written(datetime.now(UTC))
        events = [
            f"id: {now}/{count:012d}\ndata: {json.dumps({'ts': now, 'source': 'container', 'line': line})}\n\n"
            for count, line in enumerate(lines)
        ]
        return Reply(200, "".join(events), kind="text/event-stream")

    def gpus(self, *, query: dict[str, str], body: Any) -> Reply:
        wrong = _needs_product(query)
        return wrong or Reply(200, {"gpus": self._gpus(stock="include" in query, cloud=query.get("cloud"))})

    def gpu(self, number: str, *, query: dict[str, str], body: Any) -> Reply:
        return _one(self._gpus(stock="include" in query), number)

    def cpus(self, *, query: dict[str, str], body: Any) -> Reply:
        return _needs_product(query) or Reply(200, {"cpus": self._cpus(stock="include" in query)})

    def cpu(self, number: str, *, query: dict[str, str], body: Any) -> Reply:
        return _one(self._cpus(stock="include" in query), number)

    def centers(self, *, query: dict[str, str], body: Any) -> Reply:
        regions = query["regions"].split(",") if "regions" in query else set(_CENTERS.values())
        listed = [
            {
                "id": name,
                "name": name,
                "region": region,
                "globalNetwork": False,
                "networkVolumeTypes": [],
                "compliance": [],
            }
            for name, region in _CENTERS.items()
            if region in regions
        ]
        return Reply(200, {"dataCenters": listed})

    def billing(self, *, query: dict[str, str], body: Any) -> Reply:
        day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        period = {"startTime": self._written(day), "endTime": self._written(day + timedelta(days=1))}
        records = []
        for pod in self.pods.values():
            if query.get("podId") in (None, pod.id) and pod.gone_at is not None:
                total = round(pod.cost * (pod.gone_at - pod.made) / 3600, 6)
                gpu = total if "gpu" in pod.request else 0.0
                amounts = {"totalAmount": total, "gpuAmount": gpu, "cpuAmount": total - gpu, "diskAmount": 0.0}
                records.append({**period, "podId": pod.id, **amounts})
        names = ("totalAmount", "gpuAmount", "cpuAmount", "diskAmount")
        metadata = {
            "query": {**period, "bucketSize": query.get("bucketSize", "day"), "podId": query.get("podId")},
            "recordCount": len(records),
            "uniquePodCount": len(records),
            "totals": {name: sum(float(record[name]) for record in records) for name in names},
        }
        return Reply(200, {"records": records, "metadata": metadata})

    def _gpus(self, *, stock: bool = False, cloud: str | None = None) -> list[dict[str, Any]]:
        made = []
        for number, name, memory, secure, community, centers in _GPUS:
            price = {"secure": secure * self.troubles.dearer, "community": community * self.troubles.dearer}
            entry: dict[str, Any] = {
                "id": number,
                "name": name,
                "pool": None,
                "manufacturer": "NVIDIA",
                "memory": memory,
                "secure": True,
                "community": True,
                "pricing" if self.troubles.other_version else "price": price,
                "maxCount": {"secure": 8, "community": 4},
            }
            made.append(entry | (self._stock(centers) if stock else {}))
        return made

    def _cpus(self, *, stock: bool = False) -> list[dict[str, Any]]:
        made = []
        for number, name, least, most, memory, price, centers in _CPUS:
            entry: dict[str, Any] = {
                "id": number,
                "name": name,
                "group": "Gen",
                "vcpu": {"min": least, "max": most},
                "ramGbPerVcpu": memory,
                "price": {"securePerVcpu": price * self.troubles.dearer, "serverlessPerVcpu": price},
            }
            made.append(entry | (self._stock(centers) if stock else {}))
        return made

    def _stock(self, centers: tuple[str, ...]) -> dict[str, Any]:
        if not centers or self.troubles.no_capacity:
            return {"availability": "NONE"}
        listed = [{"id": center, "name": center, "availability": "LOW"} for center in centers]
        return {"availability": "LOW", "dataCenters": listed}

    def _written(self, when: datetime) -> str:
        told = when + timedelta(seconds=self.troubles.ahead_s)
        return told.strftime("%Y-%m-%dT%H:%M:%S") + self.troubles.zone

    def _pod(self, pod: Pod) -> dict[str, Any]:
        asked, host = pod.request, pod.host
        runs = pod.boots and (host is None or host.runs())
        ended = "STARTING" if host is not None and host.loops is not None else "EXITED"
        status = "RUNNING" if runs else ended if pod.boots else "PROVISIONING"
        direct = None
        if runs and "22/tcp" in asked.get("ports", []):
            address, port = ("203.0.113.7", 10022) if host is None else ("127.0.0.1", host.port)
            command = f"ssh root@{address} -p {port}"
            direct = {"host": address, "port": port, "username": "root", "command": command}
        told: dict[str, Any] = {
            "id": pod.id,
            "name": asked["name"],
            "image": asked.get("image", ""),
            "args": asked.get("args", ""),
            "disk": asked.get("disk", 20),
            "ports": asked.get("ports", []),
            "env": asked.get("env", {}),
            "registry": None,
            "state" if self.troubles.other_version else "status": status,
            "actions": ["stop", "restart", "terminate"] if runs else ["terminate"],
            "mounts": asked.get("mounts", {}),
            "cloud": asked.get("cloud", "SECURE"),
            "dataCenterId": next(iter(asked.get("dataCenterIds", [])), "US-KS-2"),
            "cudaVersion": None,
            "ssh": {"proxy": None, "direct": direct},
            "template": None,
            "cost": pod.cost if status != "EXITED" else 0.0,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "runtime": {} if runs else None,
            "createdAt": self._written(pod.made_at),
            "startedAt": self._written(pod.made_at) if runs else None,
        }
        if pod.in_cluster:
            told["cluster"] = {"id": "blue", "rank": 0}
        if "gpu" in asked:
            count = asked["gpu"].get("count", 1)
            memory = max(asked["gpu"].get("minRamPerGpu", 0), 48) * count
            told["gpu"] = {"id": asked["gpu"]["id"], "count": count, "vcpuCount": 8 * count, "memory": memory}
        else:
            told["cpu"] = {**asked["cpu"], "memory": 8 * asked["cpu"]["vcpuCount"]}
        return told


_ROUTES: list[tuple[str, re.Pattern[str], dict[str, str]]] = [
    (template, re.compile(template.replace("{id}", "([^/]+)")), ways)
    for template, ways in {
        "/v2/pods": {"GET": "list_pods", "POST": "create_pod"},
        "/v2/pods/{id}": {"GET": "get_pod", "DELETE": "delete_pod"},
        "/v2/pods/{id}/logs": {"GET": "logs"},
        "/v2/catalog/gpus": {"GET": "gpus"},
        "/v2/catalog/gpus/{id}": {"GET": "gpu"},
        "/v2/catalog/cpus": {"GET": "cpus"},
        "/v2/catalog/cpus/{id}": {"GET": "cpu"},
        "/v2/catalog/datacenters": {"GET": "centers"},
        "/v2/billing/pods": {"GET": "billing"},
    }.items()
]


def _needs_product(query: dict[str, str]) -> Reply | None:
    """Return the refusal of a question for stock that does not say of what; None for one that does, or needs not."""
    if ("include" in query) != ("product" in query):
        return problem(400, "include and product go together")
    if "include" not in query and query.keys() & {"count", "cloud", "countryCodes", "vcpuCount"}:
        return problem(400, "a filter of the stock needs include")
    return None


def _one(entries: list[dict[str, Any]], number: str) -> Reply:
    found = next((entry for entry in entries if entry["id"] == number), None)
    return problem(404, "there is none of that id") if found is None else Reply(200, found)


@contextmanager
def fake_runpod(folder: Path, **ways: Any) -> Iterator[FakeRunPod]:
    """Serve an account as of `FakeRunPod` as long as the block lasts; its machines end with it."""
    fake = FakeRunPod(folder, **ways)
    with fake.serving():
        yield fake
