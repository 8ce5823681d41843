"""Refuses a machine that lacks what a job needs, and a run above `software` that nothing could be judged by."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.jobs.collateral.pack_check import lacking as lacking_items
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.installation import install_command
from glasshouse.jobs.owner.kept_pack import THE_POLICY, kept_pack, needed_pack
from glasshouse.jobs.places.known_machines import examine
from glasshouse.providers.place.base import Place
from glasshouse.providers.place.local import LocalPlace
from glasshouse.providers.rental.known import ACCOUNTS
from glasshouse.runtime.roots.collectors import collector_of
from glasshouse.runtime.run.findings import Standing
from glasshouse.wire.canonical import Json
from glasshouse.wire.policy import Assurance
from glasshouse.workloads.params import DeviceParams
from glasshouse.workloads.registry import load, missing_frameworks
from glasshouse.workloads.registry import parse as parse_params
from glasshouse.workloads.requirements import lacking, old_driver


def check_machine(workload: str, job: Mapping[str, Json], names: Iterable[str], place: Place | None = None) -> None:
    """Refuse a machine, None for this one, that lacks what the job needs, before anything is sent and its key released.

    Args:
        job: its `[params]`.
        names: of its inputs.

    What the job needs stays here: it is sealed. The machine lists what it has.

    Raises:
        UsageError: `requirement-missing`, `device-missing`.
        PeerError, PlatformError: as `Place.installed`.
    """
    params = parse_params(workload, job)
    module = load(workload)
    needed = module.requirements(params, names)
    if not module.FRAMEWORKS and not needed:
        return
    installed = None if place is None else place.installed()
    name = "this machine" if place is None or installed is None else place.name
    where = "here" if installed is None else "there, beside Glasshouse"
    if missing := missing_frameworks(workload, installed):
        raise UsageError(
            Code.REQUIREMENT_MISSING,
            f"{name} lacks what {workload} trains with: {', '.join(missing)}",
            hint=install_command() if installed is None else f"install it {where}",
        )
    if without := {line: instead for one, instead in needed.items() for line in lacking([one], installed)}:
        raise UsageError(
            Code.REQUIREMENT_MISSING,
            f"{name} lacks what the job requires: " + "; ".join(without),
            hint=f"install it {where}, or {' or '.join(dict.fromkeys(without.values()))} and seal the job again",
        )
    if installed is not None and isinstance(params, DeviceParams):
        _check_gpu(name, params.device, installed)


def check_hardware(home: Home, kinds: Sequence[str], name: str) -> None:
    """Refuse a machine that does not offer the evidence of these kinds, by its own word; raises `PlatformError`.

    An early refusal and no more: what a machine has is shown to the gate.
    """
    if not kinds:
        return
    lacking = {kind: collector_of(kind).look() for kind in kinds} if name == LocalPlace.name else {}
    if name != LocalPlace.name:
        offered = {one.feature for one in examine(home, name) if one.standing is Standing.GOOD}
        missing = "it is not offered there; see: glasshouse doctor --on " + name
        lacking = {kind: "" if f"root-{kind}" in offered else missing for kind in kinds}
    for kind, why in lacking.items():
        if why:
            where = "this machine" if name == LocalPlace.name else name
            raise PlatformError(
                Code.HARDWARE_UNAVAILABLE,
                f"{where} gives no evidence of the kind {kind}, which policy.hardware wants: {why}",
                hint="run it on a machine that has it, or read docs/security/hardware.md before you lower the level",
            )


def check_rentable(assurance: Assurance, provider: str) -> None:
    """Refuse a level that no machine of a provider can prove, before one is rented; raises `UsageError`."""
    if assurance is not Assurance.SOFTWARE and provider in ACCOUNTS:
        raise UsageError(
            Code.POLICY_IMPOSSIBLE,
            f"machines of {provider} give no evidence of hardware, and policy.assurance is "
            f'"{assurance}": none was rented',
            hint="docs/how-to/dstack.md has containers that do; docs/security/hardware.md which machines else",
        )


def pack_for(home: Home, hardware: HardwarePolicy | None) -> Pack | None:
    """Return the collateral that a policy's kinds are judged by, None where none of them needs any and none is there.

    Raises:
        UsageError: `collateral-missing`, `collateral-expired` or `collateral-invalid`, of the first item that is
            not there, not of this time, or not what its name says.
    """
    if hardware is None:
        return None
    # Also one that no kind of the policy needs: the gate names the last that it was given.
    pack = needed_pack(home) if hardware.needed else kept_pack(home)
    for state in lacking_items(pack, hardware, at_us=time.time_ns() // 1000):
        wanted = state.wanted or "of this time"
        raise UsageError(
            state.lack or Code.COLLATERAL_MISSING,
            f"the collateral pack has no {state.name} {wanted}, by which policy.hardware is judged",
            hint=f"glasshouse collateral fetch with {THE_POLICY}; glasshouse collateral check says what else lacks",
        )
    return pack


def _check_gpu(name: str, device: str, installed: Mapping[str, str]) -> None:
    why = None if device == "cpu" else old_driver(installed)
    if device == "cuda" and "nvidia-driver" not in installed:
        why = "it has no NVIDIA driver, and the job asks for a GPU"
    if why is not None:
        raise UsageError(
            Code.DEVICE_MISSING,
            f"{name} cannot train on a GPU: {why}",
            hint='install a newer driver there, or seal the job again with device = "cpu" in [params]',
        )
