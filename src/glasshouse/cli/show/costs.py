"""What a run cost, in words."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from glasshouse.jobs.owner.durations import format_s, utc
from glasshouse.jobs.results.run_cost import Cost, Share, Slowdown


def cost_facts(
    statement: Mapping[str, Any] | None, cost: Cost | None, *, workload: str | None = None
) -> dict[str, str]:
    """Return a cost for people, by name: `rental` (its `statement`, if there is one), then parts as far as known."""
    if cost is None:
        return {}
    facts = {"rental": _own(cost) if statement is None else _rental(statement, cost)}
    parts = {
        "booting": cost.booting,
        "login and upload": cost.uploading,
        "training": cost.training,
        "protection": cost.protecting,
        "the rest": cost.rest,
    }
    facts |= {name: _share(share, cost) for name, share in parts.items() if share is not None}
    if "protection" in facts:
        facts["protection"] += ", beside the training"
    if not cost.fits:
        facts["the rest"] = "the receipt has more time than there was: its times do not fit"
    if cost.slowdown is not None:
        facts["slowdown"] = _slowdown(cost.slowdown, cost, workload)
    if cost.unit is not None and cost.usd_per_unit is not None:
        facts[f"a {cost.unit}"] = f"{cost.usd_per_unit:f} $, of {cost.done} by the receipt, all of the above included"
    return facts


def _rental(statement: Mapping[str, Any], cost: Cost) -> str:
    """Return what was rented, what it cost by its price and by the provider's bill, and against the caps."""
    assert cost.total is not None and cost.total.usd is not None  # noqa: S101, PT018 - it was rented
    whom, so_far = statement["provider"], "" if cost.over else " so far"
    lines = [f"{usd_text(cost.total.usd)}{so_far} by its price, for {format_s(float(cost.total.seconds))}"]
    machine = next((one for one in statement["machines"] if one["up_us"] is not None), None)
    if machine is not None and cost.usd_per_hour is not None:
        kind = f"{machine['gpus']} × {machine['gpu']}" if machine["gpus"] else "no GPU"
        lines.append(f"{kind} at {cost.usd_per_hour:.3f} $ an hour, by {whom}'s word")
    else:
        lines.append(f"no machine of {whom} came up")
    if cost.since_us is not None:
        lines[-1] += f"; the first was asked for at {utc(cost.since_us)}"
    lines.append(
        f"no bill from {whom}" if cost.billed_usd is None else f"billed {usd_text(cost.billed_usd)}, by {whom}'s word"
    )
    if cost.of_cap is not None:
        lines.append(f"{cost.of_cap * 100:.0f} % of the cap of {cost.most_usd} $")
    if cost.most_s is not None:
        lines.append(f"at most {format_s(cost.most_s)}")
    if not cost.over:
        lines.append("NOT shown to be gone: it costs on, see glasshouse machine rented")
    return "\n".join(lines)


def _own(cost: Cost) -> str:
    if cost.total is None:
        return "nothing was rented; for how long it ran is in no receipt"
    ran = format_s(float(cost.total.seconds))
    if cost.total.usd is None:
        return f"nothing was rented; it ran for {ran} (--usd-per-hour X prices that)"
    priced = f"at {cost.usd_per_hour:f} $ an hour, as you say, that is {usd_text(cost.total.usd)}"
    return f"nothing was rented; it ran for {ran}; {priced}"


def _share(share: Share, cost: Cost) -> str:
    """Return a part of the time, what it cost, and how much of the whole that is."""
    took = format_s(float(share.seconds))
    text = took if share.usd is None else f"{usd_text(share.usd)} ({took})"
    if cost.total is None or not cost.total.seconds or not cost.fits:
        return text
    return f"{text}, {share.seconds / cost.total.seconds * 100:.1f} %"


def _slowdown(found: Slowdown, cost: Cost, workload: str | None) -> str:
    """Return what a measurement found, never without its word; an amount only where its interval bears one."""
    word = found.word.replace("_", " ") or "no session counts"
    lines = [word]
    if found.delta is not None:
        ends = "no interval"
        if found.low is not None and found.high is not None:
            ends = f"95 % interval {_percent(found.low)} to {_percent(found.high)}"
        lines[0] = f"{word}: {_percent(found.delta)} a step ({ends})"
    if cost.slowed is not None:
        low, high = cost.slowed
        if low.usd is not None and high.usd is not None:
            lines.append(f"of this training {usd_text(low.usd)} to {usd_text(high.usd)}")
        else:
            lines.append(f"of this training {_seconds(low.seconds)} to {_seconds(high.seconds)}")
        if found.word == "inconclusive":
            lines[-1] += ", and it may be nothing"
    elif not found.bears:
        lines.append("no amount follows from it")
    if not found.whole:
        lines.append("the measurement is incomplete: its own word does not stand (why: glasshouse verify)")
    where = found.cpu or "a processor that it does not name"
    lines.append(f"measured with {found.workload} on {where}, {found.gpu or 'no GPU'}; this machine may be another")
    if workload is not None and workload != found.workload:
        lines.append(f"this run's workload is another: {workload}")
    return "\n".join(lines)


def _seconds(seconds: Decimal) -> str:
    return ("-" if seconds < 0 else "") + format_s(float(abs(seconds)))


def _percent(part: Decimal) -> str:
    return f"{part * 100:+.2f} %"


def usd_text(amount: Decimal) -> str:
    """Return US dollars with three digits: at least to the cent, and no further than a hundredth of one."""
    if amount and abs(amount) < Decimal("0.00005"):
        return "under 0.0001 $"
    digits = min(4, max(2, 2 - amount.adjusted())) if amount else 0
    return f"{amount.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP):f} $"
