"""The providers that machines are rented from, and the keys of the owner's accounts there.

Law: a key comes from a 0600 file of the owner's, or from the environment, out of which it is taken: no process that is
started here inherits it, but the supervisor of a detached rental.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.wanted import PROVIDERS, Cluster
from glasshouse.jobs.owner.files import is_there, read_bounded
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.places.rental_journal import Rental
from glasshouse.providers.rental.provider import Provider

__all__ = ["handed_on", "provider_for", "provider_of", "providers_with_keys", "take_keys"]

_MAX_KEY_BYTES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class _Account:
    """How a provider is asked."""

    key: str  # the environment's name for the account's key
    url: str  # the environment's name for where its interface is, for those who have one of their own
    make: Callable[[str, str | None], Provider]  # returns the provider for a key and a URL, None for its usual one


def _runpod(key: str, url: str | None) -> Provider:
    from glasshouse.providers.rental.runpod import RunPod

    return RunPod(key) if url is None else RunPod(key, url=url)


def _vast(key: str, url: str | None) -> Provider:
    from glasshouse.providers.rental.vast import Vast

    return Vast(key) if url is None else Vast(key, url=url)


def _slurm(cluster: Cluster, python: str) -> Provider:
    from glasshouse.providers.rental.slurm_jobs import Slurm

    return Slurm(cluster.login, words=cluster.sbatch, nodes=cluster.nodes, python=python)


_ACCOUNTS: Mapping[str, _Account] = {
    "runpod": _Account(key="RUNPOD_API_KEY", url="RUNPOD_API_URL", make=_runpod),
    "vast": _Account(key="VAST_API_KEY", url="VAST_URL", make=_vast),
}
_taken: dict[str, str] = {}


def provider_of(home: Home, name: str, cluster: Cluster | None = None, *, python: str = "python3") -> Provider:
    """Return a provider, to be asked with the owner's key.

    Args:
        home: whose accounts.
        name: of `PROVIDERS`.
        cluster: which, for ``slurm``, which has no accounts; by default this machine is its login node.
        python: the interpreter there that holds a node.

    Raises:
        UsageError: `provider-key`: there is none, or others may read it; `usage`: no such provider.
    """
    if name == "slurm":
        return _slurm(cluster or Cluster(), python)
    account = _ACCOUNTS.get(name)
    if account is None:
        raise UsageError(Code.USAGE, f"no provider is called {name!r}; known: {', '.join(PROVIDERS)}")
    return account.make(_key(home, name, account), os.environ.get(account.url))


def provider_for(home: Home, rental: Rental) -> Provider:
    """Return the provider of a rental; raises as `provider_of`."""
    return provider_of(home, rental.provider, rental.cluster, python=rental.python)


def providers_with_keys(home: Home) -> tuple[str, ...]:
    """Return the names of the providers whose account has a key here."""
    take_keys()
    return tuple(name for name, one in _ACCOUNTS.items() if one.key in _taken or is_there(home.accounts / name))


def take_keys() -> None:
    """Take the keys of accounts out of this process's environment, before it starts any other."""
    for account in _ACCOUNTS.values():
        if account.key in os.environ:
            _taken[account.key] = os.environ.pop(account.key)


def handed_on(*, keys: bool) -> dict[str, str]:
    """Return the environment of a process, with the keys that this one took out of its own only if it needs them."""
    take_keys()
    return dict(os.environ) | (_taken if keys else {})


def _key(home: Home, name: str, account: _Account) -> str:
    take_keys()
    path = home.accounts / name
    if account.key in _taken:
        key = _taken[account.key].strip()
    elif is_there(path):
        content = read_bounded(path, max_bytes=_MAX_KEY_BYTES, what=f"key of {name}", private=True)
        key = content.decode("ascii", "replace").strip()
    else:
        raise UsageError(
            Code.PROVIDER_KEY,
            f"no key of a {name} account is here",
            hint=f"put it into {path}, mode 0600, or into {account.key}",
        )
    if not key.isascii() or not key.isprintable() or not 8 <= len(key) <= _MAX_KEY_BYTES or " " in key:
        raise UsageError(Code.PROVIDER_KEY, f"what is given as the key of {name} is no key", hint=f"see {path}")
    return key
