"""Which distributions a job needs that are not installed, or not in the version that it asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

__all__ = ["FRAMEWORKS", "lacking", "missing_frameworks"]

FRAMEWORKS = {"lora": ("torch", "transformers", "peft", "safetensors"), "mlp": ("torch",), "script": ()}
"""What each workload imports itself."""


def missing_frameworks(workload: str) -> list[str]:
    """Return what a workload imports itself and is not installed here."""
    return [name for name in FRAMEWORKS.get(workload, ()) if importlib.util.find_spec(name) is None]


def lacking(requirements: Iterable[str]) -> list[str]:
    """Return a line for each requirement that does not hold here."""
    return [text for requirement in requirements if (text := _lacking(requirement.strip()))]


def _lacking(requirement: str) -> str | None:
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        return f"{requirement} (cannot be checked without the distribution 'packaging')"
    import importlib.metadata  # 65 ms of e-mail and calendar, for those who list requirements

    try:
        wanted = Requirement(requirement)
    except InvalidRequirement:
        return f"{requirement} is no requirement"
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement} is not installed"
    if not wanted.specifier.contains(version, prereleases=True):
        return f"{requirement} is wanted and {version} is installed"
    return None
