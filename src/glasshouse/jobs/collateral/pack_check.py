"""What a hardware policy needs of a collateral pack, and what that lacks, now or by a later time.

Laws: it says no more than dates and names do; whether an item is its maker's is for the gate, by the pinned roots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy, MaxAges
from glasshouse.errors import Code, FormatError
from glasshouse.jobs.collateral.item_dates import Dates, dates_of
from glasshouse.jobs.collateral.vendor_services import RIM, asked_about, signers


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemState:
    """One item that is needed or there."""

    name: str
    size: int = 0  # in bytes
    dates: Dates | None = None  # None where it is not there, or cannot be read
    until_us: int = 0  # when a policy accepts it no more
    lack: Code | None = None  # `collateral-missing`, `collateral-expired` or `collateral-invalid`
    wanted: str = ""  # of `collateral-expired`, where it lacks more than the time: what it is not


def pack_states(pack: Pack | None, policy: HardwarePolicy | None, *, at_us: int) -> tuple[ItemState, ...]:
    """Return the state of each item that a policy needs, or a pack has where none is named, sorted by name.

    Args:
        pack: None where none was fetched.
        policy: it names items and greatest ages; without one the ages are the defaults.
        at_us: when the items have to be current.
    """
    found = {item.name: item.data for item in (pack.items if pack is not None else ())}
    ages, evaluation = (policy.collateral, policy.tcb_evaluation) if policy is not None else (MaxAges(), 0)
    names: Iterable[str] = found if policy is None else {*policy.needed, *needed_responses(pack, policy)}
    return tuple(_state(name, found.get(name), ages, evaluation, at_us) for name in sorted(names))


def lacking(pack: Pack | None, policy: HardwarePolicy, *, at_us: int) -> tuple[ItemState, ...]:
    """Return what a policy needs at a time and a pack does not have, or not for that time."""
    return tuple(state for state in pack_states(pack, policy, at_us=at_us) if state.lack is not None)


def needed_responses(pack: Pack | None, policy: HardwarePolicy) -> frozenset[str]:
    """Return the names of the OCSP responses about those who signed the manifests that a policy needs."""
    names = frozenset(policy.needed)
    return frozenset(
        response
        for item in (pack.items if pack is not None else ())
        if item.name in names and item.name.startswith(RIM)
        for response in _asked(item.data)
    )


def _asked(manifest: bytes) -> Iterable[str]:
    try:
        return asked_about(signers(manifest))
    except FormatError:  # told of the manifest itself
        return ()


def _state(name: str, data: bytes | None, ages: MaxAges, evaluation: int, at_us: int) -> ItemState:
    if data is None:
        return ItemState(name=name, lack=Code.COLLATERAL_MISSING)
    try:
        dates = dates_of(name, data)
    except FormatError:
        return ItemState(name=name, size=len(data), lack=Code.COLLATERAL_INVALID)
    until = dates.until(ages)
    is_older = dates.evaluation is not None and dates.evaluation < evaluation
    wanted = f"of evaluation {evaluation} or later" if is_older else ""
    lack = None if dates.issued_us <= at_us < until and not is_older else Code.COLLATERAL_EXPIRED
    return ItemState(name=name, size=len(data), dates=dates, until_us=until, lack=lack, wanted=wanted)
