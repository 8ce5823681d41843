"""The providers that machines are rented from: the one list, which accounts, texts and docs follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glasshouse.providers.rental.provider import Provider


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderAccount:
    """A provider whose accounts have keys."""

    key: str  # the environment's name for an account's key
    url: str  # the environment's name for where its interface is, for accounts that have one of their own
    make: Callable[[str, str | None], Provider]  # of a key and a URL; None: its usual one


def _runpod(key: str, url: str | None) -> Provider:
    from glasshouse.providers.rental.runpod import RunPod  # loaded where it is asked: a list of names needs none of it

    return RunPod(key, url)


def _vast(key: str, url: str | None) -> Provider:
    from glasshouse.providers.rental.vast import Vast

    return Vast(key, url)


ACCOUNTS: Mapping[str, ProviderAccount] = {
    "runpod": ProviderAccount(key="RUNPOD_API_KEY", url="RUNPOD_API_URL", make=_runpod),
    "vast": ProviderAccount(key="VAST_API_KEY", url="VAST_URL", make=_vast),
}
PROVIDERS = (*ACCOUNTS, "slurm")  # a cluster has its users, and no keys
