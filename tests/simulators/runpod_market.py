"""What is asked of a RunPod of one's own, and a clock for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal

import pytest

from glasshouse.errors import GlasshouseError
from glasshouse.providers.rental.provider import Offer, Options, Start
from glasshouse.providers.rental.runpod import RunPod

OPTIONS = Options(
    gpu=("RTX 4090",),
    gpus=1,
    memory_gb=0,
    disk_gb=20,
    regions=(),
    most_per_hour_usd=Decimal(10),
    spot=False,
    image="pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime",
)
START = Start(
    tag="gh-olga-blue-1",
    nonce="0123456789abcdef" * 2,
    ssh_public="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB8Zl9c2pM2y",
    ends_s=3600,
    ends_at_s=1_790_003_600,
    options=OPTIONS,
)


class Clock:
    """Time that passes where a test sets it, and where something sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def cheapest(runpod: RunPod, **other: object) -> Offer:
    return runpod.offers(replace(OPTIONS, **other))[0]  # type: ignore[arg-type]


def failing(act: Callable[[], object]) -> GlasshouseError:
    with pytest.raises(GlasshouseError) as caught:
        act()
    assert caught.value.message
    return caught.value
