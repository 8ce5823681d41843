"""Glasshouse: train on machines you do not trust, and show afterwards what happened there."""

__version__ = "0.1.0"

# `glasshouse.jobs.api` has them: it is loaded with the first use of one, and never by what trains.
_API = (
    "Fetched",
    "GlasshouseError",
    "Inspected",
    "RunResult",
    "Sealed",
    "Verified",
    "fetch",
    "inspect",
    "resume",
    "run",
    "seal",
    "verify",
)


def __getattr__(name: str) -> object:
    if name not in _API:
        raise AttributeError(f"module 'glasshouse' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("glasshouse.jobs.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
