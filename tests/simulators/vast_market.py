"""What is to be had on a Vast.ai of one's own, and what an account has of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from glasshouse.providers.rental.provider import Options, Start
from glasshouse.providers.rental.vast import Vast

__all__ = ["OPTIONS", "START", "Host", "Instance", "Paper", "Time", "disk_price", "fits", "market", "rented"]

# What an owner asks for, and starts a machine with.
OPTIONS = Options(
    gpu=("RTX 4090",),
    gpus=1,
    memory_gb=32,
    disk_gb=100,
    regions=(),
    most_per_hour_usd=Decimal(2),
    spot=False,
    image="pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
)
START = Start(
    tag="gh-0011223344556677-8899aabbccddeeff-1",
    nonce="0123456789abcdef" * 2,
    ssh_public="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43,
    ends_s=3600,
    ends_at_s=1_790_003_600,
    options=OPTIONS,
)

_HOURS_A_MONTH = 720


class Time:
    """A clock that waits by moving on."""

    def __init__(self, now: float = 1_790_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Host(Protocol):
    """What a machine can do; a `RentedHost` is one."""

    port: int

    def output(self) -> str: ...

    def runs(self) -> bool: ...

    def die(self) -> None: ...

    def destroy(self) -> None: ...


class Paper:
    """A machine on paper: it has a start command, and runs nothing."""

    port = 40_022

    def __init__(self, folder: Path, script: str, **_: object) -> None:
        self.script, self.printed, self.alive = script, "", True

    def output(self) -> str:
        return self.printed

    def runs(self) -> bool:
        return self.alive

    def die(self) -> None:
        self.alive = False

    def destroy(self) -> None:
        self.die()


@dataclass
class Instance:
    """One machine of the account; `gone_at` is None while it is there."""

    id: int
    request: dict[str, Any]
    offer: dict[str, Any]
    key: str
    host: Host | None
    made_at: float
    shown_at: float
    loops: bool
    gone_at: float | None = None

    def output(self) -> str:
        """Return what its start command wrote."""
        return "" if self.host is None else self.host.output()

    def row(self, *, listed: bool = False) -> dict[str, Any]:
        """Return it as it is found, or as listings have it: their ports are never null."""
        runs = self.host is not None and self.host.runs()
        status = None if self.host is None else "running" if runs else "loading" if self.loops else "exited"
        ports, env = None, self.request.get("env", {})
        if runs and self.host is not None:
            wanted = [name.removeprefix("-p ").split(":")[1] for name in env if name.startswith("-p ") and ":" in name]
            mapped = [{"HostIp": "0.0.0.0", "HostPort": str(self.host.port)}]  # what Docker says
            ports = ({} if listed else {"8080/tcp": None}) | {f"{port}/tcp": mapped for port in wanted}
        disk = disk_price(self.offer, self.request.get("disk", 8))
        base = self.request.get("price", self.offer["dph_base"])
        row = {name: self.offer[name] for name in ("gpu_name", "num_gpus", "gpu_ram", "geolocation", "cpu_ram")}
        return row | {
            "id": self.id,
            "actual_status": status,
            "intended_status": "running",
            "cur_state": "running",
            "next_state": "running",
            "label": self.request.get("label"),
            "image_uuid": self.request.get("image", "vastai/base-image"),
            "image_runtype": self.request["runtype"],
            "image_args": self.request.get("args", []),
            "extra_env": [list(pair) for pair in env.items()],
            "onstart": self.request.get("onstart", ""),
            "status_msg": None if status is None else f"success, {status} {self.request['image']}",
            "public_ipaddr": "127.0.0.1 \n",
            "ports": ports,
            "start_date": self.made_at,
            "disk_space": float(self.request.get("disk", 8)),
            "is_bid": "price" in self.request,
            "dph_base": base,
            "dph_total": base + disk,
            "storage_total_cost": disk,
        }


def market() -> list[dict[str, Any]]:
    """Return what hosts offer: GPUs, the memory and disk of the whole host, and prices without any disk."""
    made = []
    for number, (name, gpus, of_host, ram, memory, price, place, verified) in enumerate(
        (
            ("RTX 4090", 1, 8, 24_564, 515_000, 0.40, "Sweden, SE", True),
            ("RTX 4090", 2, 2, 24_564, 128_000, 0.82, "Texas, US", True),
            ("RTX 4090", 1, 1, 24_564, 64_000, 0.20, "Nevada, US", False),
            ("A100 SXM4", 1, 8, 81_920, 1_031_000, 1.10, "Iceland, IS", True),
            ("A100 PCIE", 1, 2, 40_960, 257_000, 0.70, "California, US", True),
            ("RTX 3060", 1, 1, 12_288, 32_000, 0.08, "Poland, PL", True),
            ("RTX 4070S Ti", 1, 1, 16_376, 32_000, 0.12, "Ohio, US", True),
        )
    ):
        made.append(
            {
                "id": 7_000_001 + number,
                "gpu_name": name,
                "num_gpus": gpus,
                "gpu_frac": gpus / of_host,
                "gpu_ram": ram,
                "gpu_arch": "nvidia",
                "cpu_ram": memory,
                "disk_space": 500.0,
                "direct_port_count": 100,
                "geolocation": place,
                "verified": verified,
                "rentable": True,
                "rented": False,
                "external": False,
                "duration": 30 * 86_400.0,
                "storage_cost": 0.15,
                "dph_base": price,
                "min_bid": round(price * 0.4, 4),
            }
        )
    made.append({**made[0], "id": 7_000_099, "direct_port_count": 0, "dph_base": 0.05})
    return made


def fits(row: Mapping[str, Any], name: str, rule: Any) -> bool:
    """Whether an offer fits one part of a search."""
    if not isinstance(rule, dict) or name not in row:
        return True
    value = row[name][-2:] if name == "geolocation" else row[name]
    ways: dict[str, Callable[[Any], bool]] = {
        "eq": lambda wanted: value == wanted,
        "in": lambda wanted: value in wanted,
        "gte": lambda wanted: value >= wanted,
        "lte": lambda wanted: value <= wanted,
    }
    try:
        return all(ways[way](wanted) for way, wanted in rule.items() if way in ways)
    except TypeError:  # a number beside a word
        return False


def disk_price(offer: Mapping[str, Any], disk_gb: float) -> float:
    """Return what a disk costs by the hour."""
    return offer["storage_cost"] * disk_gb / _HOURS_A_MONTH


def rented(vast: Vast, time: Time, options: Options = OPTIONS) -> str:
    """Rent what is cheapest, and wait ten seconds."""
    offer = vast.offers(options)[0]
    time.sleep(10)
    machine = vast.rent(offer, replace(START, options=options))
    time.sleep(10)
    return machine
