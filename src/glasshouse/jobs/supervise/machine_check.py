"""Refuses a machine that lacks what a job needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.installation import install_command
from glasshouse.providers.place.base import Place
from glasshouse.wire.canonical import Json
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
