"""The providers that machines are rented from, and the keys of the owner's accounts there.

Law: a key comes from a 0600 file of the owner's, or from the environment, out of which it is taken: of the processes
that are started here only the supervisor of a detached rental inherits it.
"""

from __future__ import annotations

import os

from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.jobs.define.wanted import Cluster, Wanted
from glasshouse.jobs.owner.home import Home, is_there, read_bounded
from glasshouse.providers.rental.known import ACCOUNTS, PROVIDERS, ProviderAccount
from glasshouse.providers.rental.provider import Offer, Provider

_MAX_KEY_BYTES = 512
_taken: dict[str, str] = {}


def provider_of(home: Home, name: str, cluster: Cluster | None = None, *, python: str = "python3") -> Provider:
    """Return a provider, one of `PROVIDERS`, with the key of the owner's account.

    Args:
        cluster: for ``slurm``, which has no accounts; by default this machine is its login node.
        python: the interpreter there that holds a node.

    Raises:
        UsageError: `provider-key`: there is none, or others may read it; `usage`: no such provider.
    """
    if name == "slurm":
        from glasshouse.providers.rental.slurm_jobs import Slurm

        cluster = cluster or Cluster()
        return Slurm(cluster.login, words=cluster.sbatch, nodes=cluster.nodes, python=python)
    account = ACCOUNTS.get(name)
    if account is None:
        raise UsageError(Code.USAGE, f"no provider is called {name!r}; known: {', '.join(PROVIDERS)}")
    return account.make(_key(home, name, account), os.environ.get(account.url))


def providers_with_keys(home: Home) -> tuple[str, ...]:
    """Return the names of the providers whose account has a key here."""
    take_keys()
    return tuple(name for name, one in ACCOUNTS.items() if one.key in _taken or is_there(home.accounts / name))


def take_keys() -> None:
    """Move the keys of accounts out of this process's environment, before it starts another."""
    for account in ACCOUNTS.values():
        if account.key in os.environ:
            _taken[account.key] = os.environ.pop(account.key)


def handed_on(*, keys: bool) -> dict[str, str]:
    """Return the environment of a new process, with the keys that were taken from this one's only if it needs them."""
    take_keys()
    return dict(os.environ) | (_taken if keys else {})


def _key(home: Home, name: str, account: ProviderAccount) -> str:
    take_keys()
    path = home.accounts / name
    if account.key in _taken:
        key = _taken[account.key].strip()
    elif is_there(path):
        content = read_bounded(path, max_bytes=_MAX_KEY_BYTES, what=f"key of {name}", private=True)
        key = content.decode("ascii", "replace").strip()
    else:
        hint = f"put it into {path}, mode 0600, or into {account.key}"
        raise UsageError(Code.PROVIDER_KEY, f"no key of a {name} account is here", hint=hint)
    if not key.isascii() or not key.isprintable() or not 8 <= len(key) <= _MAX_KEY_BYTES or " " in key:
        raise UsageError(Code.PROVIDER_KEY, f"what is given as the key of {name} is no key", hint=f"see {path}")
    return key


def offers_of(provider: Provider, machine: Wanted) -> list[Offer]:
    """Return what a job may rent, the cheapest first.

    Raises:
        UsageError: `job-invalid`: the job lacks the most that it may cost, or its image; `usage` for a kind of GPU
            that the provider does not have.
        PlatformError: `no-offer`.
        PeerError: as `Provider`.
    """
    missing = provider.has_sshd and [
        f"{key} = {example}"
        for key, example, given in (
            ("most_per_hour", "0.80", machine.options.most_per_hour_usd),
            ("most_usd", "5", machine.caps.usd),
            ("image", '"pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"', machine.options.image),
        )
        if not given
    ]
    if missing:
        keys = ", ".join(line.split(" ")[0] for line in missing)
        why = f"the job file limits no cost of a machine, or names no image: [machine] lacks {keys}"
        raise UsageError(Code.JOB_INVALID, why, hint="for example: " + "; ".join(missing))
    found = [one for one in provider.offers(machine.options) if one.usd_per_hour <= machine.options.most_per_hour_usd]
    if not found:
        kinds = " or ".join(machine.options.gpu) or "any kind"
        raise PlatformError(
            Code.NO_OFFER,
            f"{provider.name} offers no machine with {machine.options.gpus} × {kinds}"
            + (f" for at most {machine.options.most_per_hour_usd} $ an hour" if provider.has_sshd else ""),
            hint="glasshouse offers --any-price shows what there is",
        )
    return sorted(found, key=lambda one: one.usd_per_hour)
