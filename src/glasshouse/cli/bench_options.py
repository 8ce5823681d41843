"""What the measuring commands share: their options as text, the job that is measured, and the owner who signs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from glasshouse.cli.options import unlock
from glasshouse.cli.output import Output
from glasshouse.errors import Code, UsageError

if TYPE_CHECKING:
    from glasshouse.bench.harness.subject import Subject
    from glasshouse.jobs.identity import Identity

__all__ = ["DEVICES", "check_installed", "choice", "maker", "owner", "ppm", "seconds", "seed_of"]

DEVICES = ("auto", "cpu", "cuda")
_NEEDED = {"numpy": "bench", "scipy": "bench", "matplotlib": "bench", "torch": "train"}
_PERCENT = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,4})?)\s*%?")


def check_installed() -> None:
    """Raise `UsageError`, `requirement-missing`, where the libraries of a measurement are not installed."""
    from glasshouse.jobs.installation import install_command

    for name, extra in _NEEDED.items():
        if importlib.util.find_spec(name) is None:
            raise UsageError(Code.REQUIREMENT_MISSING, f"the measurement needs {name}", hint=install_command(extra))


def maker(workload: str, job: Path | None, model: str | None, device: str | None) -> Callable[[Path], Subject]:
    """Return what makes the measured job in a folder; raises `UsageError` before anybody waits."""
    from glasshouse.bench.harness import subject

    choice("--workload", workload, subject.WORKLOADS)
    choice("--device", device or "auto", DEVICES)
    if job is not None and model is not None:
        raise UsageError(Code.USAGE, "--model is for the built-in job; the model of yours stands in its job file")
    if job is not None:
        mine = subject.owners(job, workload, device=device)
        return lambda _folder: mine
    if workload == "script":
        raise UsageError(Code.USAGE, "the workload script is your own: name its job file with --job")

    def make(folder: Path) -> Subject:
        return subject.builtin(workload, folder, model=model, device=device or "auto")

    return make


def owner(home: Path | None, passphrase_file: Path | None, passphrase_fd: int | None, output: Output) -> Identity:
    """Return the owner, or one made for this measurement where there is none; raises `UsageError`."""
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.identity import Identity

    place = Home.locate(home)
    if home is not None or place.owner_public.is_file():
        return unlock(place.require(), passphrase_file, passphrase_fd)
    output.warn(
        "no owner's identity here: a key made for this measurement signs it; `glasshouse init` makes a lasting one"
    )
    return Identity.generate()


def seconds(option: str, text: str) -> int:
    """Return a time such as `10m`; raises `UsageError`."""
    from glasshouse.jobs.durations import parse_s

    found = parse_s(text)
    if found is None:
        raise UsageError(Code.USAGE, f"{option} takes a time such as 30s, 10m or 2h, not {text[:40]!r}")
    return found


def ppm(option: str, text: str, *, least: int = 0) -> int:
    """Return a percentage in millionths, `least` or more; raises `UsageError`."""
    found = _PERCENT.fullmatch(text.strip())
    value = -1 if found is None else round(float(found[1]) * 10_000)
    if value < least:
        raise UsageError(Code.USAGE, f"{option} takes a percentage such as 0.5%, not {text[:40]!r}")
    return value


def seed_of(text: str) -> bytes:
    """Return the 32 bytes of `--seed`; raises `UsageError`."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise UsageError(Code.USAGE, f"--seed takes 64 hexadecimal digits, not {text[:40]!r}")
    return found


def choice(option: str, value: str, options: tuple[str, ...]) -> str:
    """Return a value that is one of the options; raises `UsageError`."""
    if value not in options:
        raise UsageError(Code.USAGE, f"{option} is one of {', '.join(options)}, not {value[:40]!r}")
    return value
