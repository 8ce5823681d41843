"""`glasshouse offers [JOB.toml]`: what could be rented now, and for how much."""

from __future__ import annotations

from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, locate
from glasshouse.cli.show.output import Output
from glasshouse.errors import Code, ExitCode, GlasshouseError, UsageError

__all__ = ["command"]

_ANY_USD = Decimal(1_000_000)


def command(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB.toml]", help="Its table `machine` says what it needs.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="PROVIDER", help="runpod, vast, slurm; all with a key."),
    ] = None,
    gpu: Annotated[
        list[str] | None, typer.Option("--gpu", metavar="KIND", help="Such as `RTX 4090`; several times for several.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=0, max=16, help="How many of one kind.")
    ] = None,
    any_price: Annotated[bool, typer.Option("--any-price", help="Also what costs more than the job allows.")] = False,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.cli.show.offered import say_offers
    from glasshouse.jobs.define.jobfile import load
    from glasshouse.jobs.places.accounts import provider_of, providers_with_keys
    from glasshouse.jobs.places.rented_machine import NO_MACHINE

    output, place = Output(as_json), locate(home)
    machine = NO_MACHINE if job is None else load(job).machine or NO_MACHINE
    options = machine.options
    options = replace(
        options,
        gpu=options.gpu if gpu is None else tuple(gpu),
        gpus=options.gpus if gpus is None else gpus,
    )
    names = on.split(",") if on is not None else list(providers_with_keys(place))
    if not names:
        raise UsageError(
            Code.PROVIDER_KEY,
            "no key of a provider's account is here",
            hint=f"put one into {place.accounts}/runpod or {place.accounts}/vast, mode 0600",
        )
    most = options.most_per_hour_usd
    # What a provider sorts out itself would not be counted here.
    options = replace(options, most_per_hour_usd=_ANY_USD)
    if any_price or not most:
        most = _ANY_USD
    found, failed = [], []
    for name in names:
        try:
            found += [(name, one) for one in provider_of(place, name, machine.cluster).offers(options)]
        except GlasshouseError as error:
            if len(names) == 1:
                raise
            failed.append(f"{name}: {error}")
    fitting = [one for one in found if one[1].usd_per_hour <= most]
    fitting.sort(key=lambda one: one[1].usd_per_hour)
    output.result(
        {
            "offers": [
                {"provider": name} | asdict(one) | {"usd_per_hour": f"{one.usd_per_hour}"} for name, one in fitting
            ],
            "failed": failed,
        }
    )
    for line in failed:
        output.warn(line)
    if fitting:
        say_offers(output, fitting)
    else:
        dearer = f"; {len(found)} cost more than {most} $ an hour (--any-price)" if found else ""
        output.say(f"Nothing that fits is offered{dearer}.")
    return ExitCode.DONE if fitting else ExitCode.UNREACHABLE
