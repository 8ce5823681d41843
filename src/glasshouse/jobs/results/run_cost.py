"""What a run cost: its rented machine by the hour, what of that was not training, and what protection added.

Laws: what no input has is absent, and never 0; prices and bills are the provider's, times of the run are the receipt's;
a slowdown has an amount of money only where its measurement has an interval and no suspected bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from glasshouse.errors import Code, UsageError
from glasshouse.evidence.receipt import Receipt

_HOUR_US = 3_600_000_000
_UNIT_DIGITS = 3
# Two clocks and their rounding may let the parts exceed the whole by so much.
_SECOND = Decimal(1)
_SHARES = ("total", "booting", "uploading", "training", "protecting", "rest")
# The part whose number is the measurement's, as in `glasshouse verify`.
_MAIN = ("interleaved", "alternating", "sequential")
_WORDS = frozenset({"overhead", "equivalent", "inconclusive"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Some of a run's time, and what it cost."""

    seconds: Decimal  # how long; negative at an end of an interval that has 0 in it
    usd: Decimal | None  # by the price; None without one

    @classmethod
    def of(cls, us: int, price: Decimal | None) -> Share:
        """Return a time, in microseconds, and what it cost by a price an hour."""
        return cls(seconds=Decimal(us) / 1_000_000, usd=None if price is None else price * us / _HOUR_US)

    def times(self, part: Decimal) -> Share:
        """Return a part of it."""
        return Share(seconds=self.seconds * part, usd=None if self.usd is None else self.usd * part)

    def to_json(self) -> dict[str, Any]:
        """Return it as decimal text."""
        return {"seconds": f"{self.seconds:.3f}", "usd": _text(self.usd, ".4f")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """What protection adds to a training step, by a measurement."""

    delta: Decimal | None  # by how much a protected step is longer than a raw one, as a part of the raw one
    low: Decimal | None  # the 95 % interval; None where there is none
    high: Decimal | None
    word: str  # the measurement's; empty where no session counts
    whole: bool  # whether nothing is missing by which its word would stand
    workload: str  # of what kind it was measured: `lora`, `mlp` or `script`
    cpu: str | None  # on which machine; None where the measurement has none
    gpu: str | None

    @property
    def bears(self) -> bool:
        """Whether an amount follows from it: there is an interval, and no bias is suspected."""
        return self.low is not None and self.high is not None and self.low > -1 and self.word in _WORDS

    def to_json(self) -> dict[str, Any]:
        """Return the slowdown, its numbers as decimal text."""
        return {
            "delta": _text(self.delta, ".4f"),
            "low": _text(self.low, ".4f"),
            "high": _text(self.high, ".4f"),
            "word": self.word or None,
            "status": "good" if self.whole else "incomplete",
            "workload": self.workload,
            "cpu": self.cpu,
            "gpu": self.gpu,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a run cost; what is None is not known."""

    rented: bool  # whether a machine was rented for it
    over: bool  # whether it costs no more: every machine is shown to be gone, or none was rented
    usd_per_hour: Decimal | None  # of the machine that it was on
    since_us: int | None  # when the first machine was asked for
    total: Share | None  # of all machines until each was shown to be gone; on the owner's own, the run
    booting: Share | None  # until the run's machine could be logged in to, with all of those that never could
    uploading: Share | None  # from then until the runtime was requested: login, examination, package
    training: Share | None  # what the workload itself took
    protecting: Share | None  # of the runtime beside training and imports; sealing during training is in both
    rest: Share | None  # imports, fetching, giving back; None where the parts exceed the total
    fits: bool  # whether the parts are no more than the total
    slowdown: Slowdown | None  # of a measurement; None where none was named
    slowed: tuple[Share, Share] | None  # of the training, at the two ends of the interval
    unit: str | None  # the work that the receipt names, and what one costs of the total, to three digits
    done: int | None
    usd_per_unit: Decimal | None
    billed_usd: Decimal | None  # by the provider's word
    most_usd: Decimal | None  # the caps
    most_s: int | None

    @property
    def of_cap(self) -> Decimal | None:
        """Which part of the money's cap it came to, by the price."""
        if not self.most_usd or self.total is None or self.total.usd is None:
            return None
        return self.total.usd / self.most_usd

    def to_json(self) -> dict[str, Any]:
        """Return the cost, amounts of money and seconds as decimal text."""
        shares: dict[str, Share | None] = {name: getattr(self, name) for name in _SHARES}
        each = {"unit": self.unit, "done": self.done, "usd_each": _text(self.usd_per_unit)}
        return {
            "rented": self.rented,
            "over": self.over,
            "usd_per_hour": _text(self.usd_per_hour),
            "since_us": self.since_us,
            **{name: share and share.to_json() for name, share in shares.items()},
            "fits": self.fits,
            "slowdown": self.slowdown and self.slowdown.to_json(),
            "slowed_95": self.slowed and [share.to_json() for share in self.slowed],
            "work": None if self.unit is None else each,
            "billed_usd": _text(self.billed_usd),
            "most_usd": _text(self.most_usd),
            "most_s": self.most_s,
            "of_cap": _text(self.of_cap, ".3f"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hired:
    """A machine as a statement has it, for as long as it cost something."""

    price: Decimal
    asked_us: int
    up_us: int | None
    until_us: int

    def share(self, from_us: int, to_us: int) -> Share:
        return Share.of(max(0, to_us - from_us), self.price)


def cost_of(
    statement: Mapping[str, Any] | None,
    receipt: Receipt | None,
    *,
    now_us: int,
    placed_us: int | None = None,
    usd_per_hour: Decimal | None = None,
    slowdown: Slowdown | None = None,
) -> Cost:
    """Return what a run cost; raises `UsageError` for a damaged statement, or a price beside one.

    Args:
        statement: of its rental, as `rented_machine.statement` has it; None where nothing was rented.
        receipt: verified; None where there is none (yet).
        now_us: the end of what is not over.
        placed_us: when its runtime was asked for, by the same clock as the statement's times.
        usd_per_hour: of a machine that was not rented.
    """
    if statement is not None and usd_per_hour is not None:
        raise UsageError(Code.USAGE, "the machine was rented, and its price is known", hint="leave --usd-per-hour out")
    hired, caps = _read(statement, now_us)
    own = next((one for one in hired if one.up_us is not None), None)
    price = usd_per_hour if own is None else own.price
    booting = uploading = None
    if statement is None:
        ran = None if receipt is None else receipt.finished_us - receipt.started_us
        total = None if ran is None else Share.of(ran, price)
    else:
        total = _sum([one.share(one.asked_us, one.until_us) for one in hired])
        booting = _sum([one.share(one.asked_us, one.until_us if one.up_us is None else one.up_us) for one in hired])
        if own is not None and own.up_us is not None and placed_us is not None and placed_us >= own.up_us:
            uploading = own.share(own.up_us, placed_us)
    work = None if receipt is None else receipt.work
    training = None if work is None else Share.of(work.elapsed_us, price)
    protecting = rest = None
    if receipt is not None and (whole_us := receipt.lifecycle_us["total"]) is not None:
        protecting = Share.of(max(0, whole_us - (receipt.training_imports_us or 0)), price)
        if total is not None and training is not None:
            parts = [one for one in (booting, uploading, training, protecting) if one is not None]
            both = Share.of(receipt.lifecycle_us["seal_outputs"] or 0, price)  # in training and in protecting
            rest = _sum([total, both, *(one.times(Decimal(-1)) for one in parts)])
    slowed = None
    if training is not None and slowdown is not None and slowdown.bears:
        # Of a protected training's 1 + δ the part δ is its slowdown.
        low, high = (training.times(end / (1 + end)) for end in (slowdown.low, slowdown.high) if end is not None)
        slowed = low, high
    fits = rest is None or rest.seconds > -_SECOND
    done = work.done if work is not None and work.done else None
    each = None if done is None or total is None or total.usd is None else total.usd / done
    return Cost(
        rented=statement is not None,
        over=statement is None or statement["over"] is True,
        usd_per_hour=price,
        since_us=min((one.asked_us for one in hired), default=None),
        total=total,
        booting=booting,
        uploading=uploading,
        training=training,
        protecting=protecting,
        rest=rest if fits else None,
        fits=fits,
        slowdown=slowdown,
        slowed=slowed,
        unit=None if done is None or work is None else work.unit,
        done=done,
        usd_per_unit=None if each is None else _rounded(each),
        **caps,
    )


def slowdown_of(verdict: Mapping[str, Any]) -> Slowdown:
    """Return the slowdown in the object that `glasshouse verify DIR --json` prints; raises `UsageError`."""
    try:
        parts = {part["design"]["mode"]: part for part in verdict["parts"]}
        mode = next((mode for mode in _MAIN if mode in parts), None)
        if mode is None:
            why = "that measurement has no protected run: it has nothing on what protection costs"
            raise UsageError(Code.USAGE, why)
        part, design = parts[mode], parts[mode]["design"]
        if design["planted"] is not None:
            raise UsageError(Code.USAGE, "that measurement has a cost that was planted on purpose")
        result, claim = part["result"], part["claim"]
        ends = None if result is None else result["slowdown_95"]
        return Slowdown(
            delta=None if result is None else Decimal(result["slowdown"]),
            low=None if ends is None else Decimal(ends["low"]),
            high=None if ends is None else Decimal(ends["high"]),
            word="" if claim is None else claim["word"],
            whole=verdict["status"] == "good",
            workload=design["workload"]["kind"],
            cpu=design["machine"]["cpu"],
            gpu=design["machine"]["gpu"],
        )
    except (KeyError, TypeError, InvalidOperation):
        why = "that is no measurement of what protection costs a step"
        raise UsageError(Code.USAGE, why, hint="name the folder that glasshouse bench overhead wrote") from None


def _read(statement: Mapping[str, Any] | None, now_us: int) -> tuple[Sequence[_Hired], dict[str, Any]]:
    """Return the machines of a statement that cost something, and its bill and caps."""
    if statement is None:
        return (), dict.fromkeys(("billed_usd", "most_usd", "most_s"))
    try:
        given = {name: statement[name] for name in ("billed_usd", "most_usd")}
        caps = {name: None if value is None else _amount(value) for name, value in given.items()}
        most_s = statement["most_s"]
        hired = [
            _Hired(
                price=_amount(one["usd_per_hour"]),
                asked_us=int(one["asked_us"]),
                up_us=None if one["up_us"] is None else int(one["up_us"]),
                until_us=now_us if one["gone_us"] is None else int(one["gone_us"]),
            )
            for one in statement["machines"]
            if one["state"] != "never"
        ]
        return hired, caps | {"most_s": None if most_s is None else int(most_s)}
    except (KeyError, TypeError, ValueError, InvalidOperation):
        raise UsageError(Code.USAGE, "what the run's rental cost cannot be read: its rental.json is damaged") from None


def _amount(value: str) -> Decimal:
    amount = Decimal(value)
    if not amount.is_finite():
        raise ValueError("no amount")
    return amount


def _sum(shares: Sequence[Share]) -> Share:
    priced = [one.usd for one in shares if one.usd is not None]
    return Share(
        seconds=sum((one.seconds for one in shares), Decimal(0)),
        usd=sum(priced, Decimal(0)) if len(priced) == len(shares) else None,
    )


def _rounded(amount: Decimal) -> Decimal:
    """Return an amount to as many digits as its times are good for."""
    return amount if not amount else amount.quantize(Decimal(1).scaleb(amount.adjusted() - _UNIT_DIGITS + 1))


def _text(amount: Decimal | None, form: str = "f") -> str | None:
    return None if amount is None else format(amount, form)
