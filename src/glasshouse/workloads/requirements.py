"""Which distributions a job needs that are not installed, or not in the version that it asks for.

What is installed on another machine is a mapping from normal names to versions; None is what this process can import.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REQUIREMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(\[[A-Za-z0-9._,\s-]*\])?\s*([<>=!~][^;@]*)?"
"""The form of one."""

Installed = Mapping[str, str] | None

# CUDA's major version, and the oldest driver that runs what is built for any of its minor ones (NVIDIA, CUDA
# Compatibility, "Minor Version Compatibility").
_DRIVERS = {11: 450, 12: 525, 13: 580}


def old_driver(installed: Mapping[str, str]) -> str | None:
    """Return a line where the PyTorch of a machine needs a newer NVIDIA driver than it has; None where none is seen."""
    driver, cuda = re.match("[0-9]+", installed.get("nvidia-driver", "")), _cuda(installed)
    if driver is None or cuda is None or int(driver[0]) >= _DRIVERS.get(cuda, 0):
        return None
    return (
        f"its NVIDIA driver {installed['nvidia-driver']} is too old for PyTorch {installed['torch']}, which is built "
        f"for CUDA {cuda} and takes driver {_DRIVERS[cuda]} or newer"
    )


def _cuda(installed: Mapping[str, str]) -> int | None:
    """Return the major version of CUDA that PyTorch is built for: its own tag names it, or what it depends on."""
    tag = re.search(r"\+(cu([0-9]{2})[0-9]|cpu)$", installed.get("torch", ""))
    if tag is not None or "torch" not in installed:
        return None if tag is None or tag[2] is None else int(tag[2])
    for name, version in installed.items():
        if found := re.fullmatch("nvidia-cuda-runtime(?:-cu([0-9]{2}))?", name):
            major = re.match("[0-9]{1,4}", found[1] or version)
            return None if major is None else int(major[0])
    return None


def lacking(requirements: Iterable[str], installed: Installed = None) -> list[str]:
    """Return a line for each requirement that does not hold."""
    return [text for requirement in requirements if (text := _lacking(requirement.strip(), installed))]


def _lacking(requirement: str, installed: Installed) -> str | None:
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    except ImportError:
        return f"{requirement} (cannot be checked without the distribution 'packaging')"
    import importlib.metadata  # 65 ms of e-mail and calendar, for those who list requirements

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement:
        return f"{requirement} is no requirement"
    try:
        name = wanted.name
        version = importlib.metadata.version(name) if installed is None else installed[canonicalize_name(name)]
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return f"{requirement} is not installed"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{requirement} is wanted and {version} is installed"
    return None
