"""`glasshouse offers [JOB.toml]`: what could be rented now, and for how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from rich.table import Table

from glasshouse.cli.options import HomeOptions, argument, option
from glasshouse.cli.show.output import CommandOutput
from glasshouse.errors import Code, ExitCode, GlasshouseError, UsageError
from glasshouse.jobs.define.jobfile import load
from glasshouse.jobs.places.accounts import provider_of, providers_with_keys
from glasshouse.jobs.places.rented_machine import NO_MACHINE
from glasshouse.providers.rental.known import ACCOUNTS, PROVIDERS
from glasshouse.providers.rental.provider import Offer

_ANY_USD = Decimal(1_000_000)
_SHOWN = 20


def command(
    job: Annotated[Path | None, argument("[JOB.toml]", "Its table `machine` has what it needs.")] = None,
    on: Annotated[str | None, option("--on PROVIDER", f"{', '.join(PROVIDERS)}; all with a key.")] = None,
    gpu: Annotated[list[str] | None, option("--gpu KIND", "Such as `RTX 4090`; several times for several.")] = None,
    gpus: Annotated[int | None, option("--gpus N", "How many of one kind.", min=0, max=16)] = None,
    any_price: Annotated[bool, option("--any-price", "Also what costs more than the job allows.")] = False,
    *,
    options: HomeOptions,
) -> int:
    """Print the offers that fit, the cheapest first."""
    output, home = options.output, options.own_home
    machine = NO_MACHINE if job is None else load(job).machine or NO_MACHINE
    names = on.split(",") if on is not None else list(providers_with_keys(home))
    if not names:
        hint = f"put one into {' or '.join(str(home.accounts / account) for account in ACCOUNTS)}, mode 0600"
        raise UsageError(Code.PROVIDER_KEY, "no key of a provider's account is here", hint=hint)
    most = _ANY_USD if any_price else machine.options.most_per_hour_usd or _ANY_USD
    wanted = replace(
        machine.options,
        gpu=machine.options.gpu if gpu is None else tuple(gpu),
        gpus=machine.options.gpus if gpus is None else gpus,
        most_per_hour_usd=_ANY_USD,  # what a provider sorts out itself would not be counted here
    )
    found, failed = [], []
    for name in names:
        try:
            found += [(name, one) for one in provider_of(home, name, machine.cluster).offers(wanted)]
        except GlasshouseError as error:
            if len(names) == 1:
                raise
            failed.append(f"{name}: {error}")
    fitting = [one for one in found if one[1].usd_per_hour <= most]
    fitting.sort(key=lambda one: one[1].usd_per_hour)
    rows = [{"provider": name} | asdict(one) | {"usd_per_hour": f"{one.usd_per_hour}"} for name, one in fitting]
    output.result({"offers": rows, "failed": failed})
    for line in failed:
        output.warn(line)
    if fitting:
        _say_offers(output, fitting)
        return ExitCode.DONE
    dearer = f"; {len(found)} cost more than {most} $ an hour (--any-price)" if found else ""
    output.say(f"Nothing that fits is offered{dearer}.")
    return ExitCode.UNREACHABLE


def _say_offers(output: CommandOutput, found: Sequence[tuple[str, Offer]]) -> None:
    """Print offers as a table, in their order."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("from", "GPU", "memory", "machine", "where", "$/hour", ""):
        table.add_column(name, no_wrap=True, justify="right" if name == "$/hour" else "left")
    for name, one in found[:_SHOWN]:
        gpu = f"{one.gpus} × {one.gpu}" if one.gpus else "none"
        each = f"{one.gpu_memory_gb} GB" if one.gpus else ""
        kind = "spot" if one.spot else ""
        table.add_row(name, gpu, each, f"{one.memory_gb} GB", one.region, f"{one.usd_per_hour:.3f}", kind)
    output.say(table)
    if len(found) > _SHOWN:
        output.say(f"and {len(found) - _SHOWN} more, dearer: --json has them", style="dim")
