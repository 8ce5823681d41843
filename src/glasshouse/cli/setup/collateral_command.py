"""`glasshouse collateral fetch|show|check`: what vendors publish to check hardware evidence by, in your state home."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.kinds import KINDS
from glasshouse.cli.options import HomeOptions, argument, option
from glasshouse.cli.show.output import CommandOutput, bytes_text, counted
from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.jobs.collateral.fetched_pack import BY_KIND, chain_in, fetched_pack, named_by
from glasshouse.jobs.collateral.item_dates import Dates
from glasshouse.jobs.collateral.pack_check import ItemState, pack_states
from glasshouse.jobs.collateral.vendor_services import Certified
from glasshouse.jobs.define.hardware_file import read_hardware
from glasshouse.jobs.owner.kept_pack import THE_POLICY, keep_pack, kept_pack, needed_pack

group = typer.Typer(no_args_is_help=True)
_HOUR_US = 3600 * 1_000_000
_LACKS = {
    Code.COLLATERAL_MISSING: "not there",
    Code.COLLATERAL_EXPIRED: "not of that time",
    Code.COLLATERAL_INVALID: "not what its name says",
}


@group.command("fetch")
def fetch(
    what: Annotated[
        list[str] | None,
        argument(
            "[WHAT]...",
            "Hardware policies (.toml), kinds such as sev-snp, items as a refusal names them, chains (.pem); "
            "by default what is there already.",
        ),
    ] = None,
    only: Annotated[bool, option("--only", "Leave out what is there already and was not named.")] = False,
    *,
    options: HomeOptions,
) -> None:
    """Fetch it from AMD, Intel and NVIDIA, over HTTPS and without an account."""
    home, output, now_us = options.any_home, options.output, time.time_ns() // 1000
    names, certified = _wanted(what or ())
    last = None if only else kept_pack(home)
    if not names and (last is None or not last.items):
        if without := [one for one in what or () if one in KINDS and one not in BY_KIND]:
            output.say(f"Nothing was fetched: vendors publish nothing that {' or '.join(without)} needs.")
            output.result({"file": None} | _facts(None, ()))
            return
        why = "there is nothing to fetch: no policy, kind or item was named, and no pack is there"
        raise UsageError(Code.USAGE, why, hint=f"glasshouse collateral fetch with {THE_POLICY}")

    def got(name: str, data: bytes, dates: Dates) -> None:
        output.say(f"✓ {name}  {bytes_text(len(data))}, issued {_time(dates.issued_us)}")

    pack = fetched_pack(names, certified, last=last, now_us=now_us, got=got, say=output.say)
    keep_pack(home, pack)
    states = pack_states(pack, None, at_us=now_us)
    output.result({"file": str(home.collateral)} | _facts(pack, states))
    _say_evaluation(output, states)
    output.say(f"{counted(len(pack.items), 'item')} in {home.collateral}, sha256 {pack.sha256.hex()}")


@group.command("show")
def show(*, options: HomeOptions) -> None:
    """Show what was fetched: each item, its size, from when it is and until when it may be used."""
    home, output, now_us = options.any_home, options.output, time.time_ns() // 1000
    pack = needed_pack(home)
    states = pack_states(pack, None, at_us=now_us)
    output.result({"file": str(home.collateral)} | _facts(pack, states))
    _say_states(output, states, now_us)
    output.say(f"sha256 {pack.sha256.hex()}, by which attestation results name it")


@group.command("check")
def check(
    policy: Annotated[Path | None, argument("[POLICY.toml]", "Its kinds and greatest ages; else the defaults.")] = None,
    at: Annotated[str | None, option("--at TIME", "When it has to hold, as 2026-12-24 or 2026-12-24T18:00Z.")] = None,
    *,
    options: HomeOptions,
) -> int:
    """Say what a policy needs and the pack lacks, now or at a time; exit 0 where nothing is lacking, else 8."""
    home, output = options.any_home, options.output
    at_us = time.time_ns() // 1000 if at is None else _moment(at)
    demanded = None if policy is None else read_hardware(policy)
    pack = kept_pack(home) if demanded is not None else needed_pack(home)
    states = pack_states(pack, demanded, at_us=at_us)
    bad = [state for state in states if state.lack is not None]
    until = min((state.until_us for state in states), default=0)
    output.result(
        {"good": not bad, "at": _time(at_us), "until": _time(until) if states and not bad else None}
        | _facts(pack, states)
    )
    _say_states(output, states, at_us)
    if bad:
        again = f"glasshouse collateral fetch{'' if policy is None else f' {policy}'}{options.again}"
        output.say(f"{counted(len(bad), 'item')} lacking at {_time(at_us)}: {again}")
        return ExitCode.INCOMPLETE
    output.say(f"Nothing is lacking{f' until {_time(until)}' if states else ': this policy needs no collateral'}.")
    return ExitCode.DONE


def _wanted(what: Sequence[str]) -> tuple[set[str], Certified]:
    names, certified = set[str](), Certified()
    for one in what:
        if one.endswith(".toml"):
            names |= named_by(read_hardware(Path(one)))
        elif one.endswith(".pem"):
            chain = chain_in(Path(one))
            names |= set(chain)
            certified |= chain
        else:
            names |= set(BY_KIND.get(one, () if one in KINDS else (one,)))
    return names, certified


def _facts(pack: Pack | None, states: Sequence[ItemState]) -> dict[str, Any]:
    return {"sha256": None if pack is None else pack.sha256.hex(), "items": [_fact(state) for state in states]}


def _fact(state: ItemState) -> dict[str, Any]:
    dates = state.dates
    return {
        "name": state.name,
        "bytes": state.size,
        "issued": None if dates is None else _time(dates.issued_us),
        "expires": None if dates is None else _time(dates.expires_us),
        "until": None if dates is None else _time(state.until_us),
        "lack": None if state.lack is None else state.lack.value,
        "evaluation": None if dates is None else dates.evaluation,
    }


def _say_states(output: CommandOutput, states: Sequence[ItemState], at_us: int) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(
        "item", overflow="fold"
    )  # a name is typed again, so that it is whole also where there is little room
    for name in ("size", "age", "until"):
        table.add_column(name, no_wrap=True, justify="left" if name == "until" else "right")
    for state in states:
        lack = f"not {state.wanted}" if state.wanted else "" if state.lack is None else _LACKS[state.lack]
        if state.dates is None:
            table.add_row(state.name, bytes_text(state.size) if state.size else "", "", lack)
        else:
            issued, until = state.dates.issued_us, state.until_us
            age = (
                f"{(at_us - issued) // (24 * _HOUR_US)} d"
                if at_us - issued >= 48 * _HOUR_US
                else f"{(at_us - issued) // _HOUR_US} h"
            )
            table.add_row(state.name, bytes_text(state.size), age, lack or _time(until))
    output.say(table)
    _say_evaluation(output, states)


def _say_evaluation(output: CommandOutput, states: Sequence[ItemState]) -> None:
    found = [state.dates.evaluation for state in states if state.dates is not None and state.dates.evaluation]
    if found:
        output.say(f"Intel's lists are of evaluation {min(found)}: tcb_evaluation of a policy may be so high, no more.")


def _time(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _moment(text: str) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(Code.USAGE, f"{text} is no time: 2026-12-24, or 2026-12-24T18:00Z") from None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()) * 1_000_000
