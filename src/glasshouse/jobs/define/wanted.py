"""What of a job file stays on the owner's side: how the key is deployed, and the machine that it is to run on.

None of it goes into the package: what a machine costs is between its owner and the provider.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from glasshouse.attestation.measurements.measured import MAX_REFERENCES
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.providers.rental.provider import Options
from glasshouse.wire.record import LEFT_OUT, Record, items
from glasshouse.wire.record import text as text_codec
from glasshouse.workloads.job_keys import FLAG, Field, Kind, integer, number, text, texts, whole

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_FORM = r"([1-9][0-9]{0,6})([smhd])"


def parse_s(text: str) -> int | None:
    """Return whole seconds, or None for what is not a length of time."""
    found = re.fullmatch(_FORM, text)
    return int(found[1]) * _UNITS[found[2]] if found else None


def format_text(seconds: int) -> str:
    """Return whole seconds in the form that `parse_s` takes, in the largest unit that is exact."""
    unit = next(unit for unit in ("d", "h", "m", "s") if seconds % _UNITS[unit] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"


def duration(limit_s: int, *, least_s: int = 1) -> Kind:
    """A length of time, as `90s`, `10m`, `2h` or `7d`: from `least_s` to `limit_s` seconds."""

    def read(value: Any, _path: str) -> int:
        seconds = parse_s(value) if isinstance(value, str) else None
        if seconds is None or not least_s <= seconds <= limit_s:
            raise ValueError
        return seconds

    least = "" if least_s == 1 else f"at least {least_s}s and "
    allowed = f"a time: text such as '90s', '10m', '2h' or '7d', {least}at most {limit_s // 3600}h"
    return Kind(allowed, {"type": "string", "pattern": whole(_FORM)}, read, format_text)


_MOST_S = 14 * 86400
MAX_RETRIES = 100
_USD = number(0.001, 100_000)
MACHINE = (
    Field("on", text(max_chars=300), "Where it runs without `--on`: a provider, or a machine's name.", None),
    Field("gpu", texts(text(max_chars=64), max_items=16), "Kinds of GPU, any of them; all by default.", ()),
    Field("gpus", integer(0, 16), "How many of one kind; 0 for a machine without.", 1),
    Field("memory_gb", integer(0, 4096), "The machine's memory, at least, in GB.", 0),
    Field("disk_gb", integer(1, 16384), "Room for the image, the package and what is trained, in GB.", 40),
    Field("regions", texts(text(max_chars=64), max_items=64), "Where it may stand, in the provider's words.", ()),
    Field("most_per_hour", _USD, "The most that it may cost an hour, in US dollars; renting needs it.", None),
    Field("most_usd", _USD, "The most that the run may cost, in US dollars; renting needs it.", None),
    Field("most_time", duration(_MOST_S), "The longest rental; the run ends in order before.", 4 * 3600),
    Field("boot", duration(_MOST_S), "A machine not up by then is given back for the next offer.", 900),
    Field("spot", FLAG, "Whether one will do that the provider may take back at any moment.", False),
    Field("image", text(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", max_chars=255), "The container image, with sshd.", None),
    Field("python", text(r"[A-Za-z0-9._/~-]+", max_chars=255), "The image's interpreter with torch.", "python3"),
    Field(
        "login",
        text(
            max_chars=300,
            form=r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9\[][A-Za-z0-9.:\[\]-]*",
            words="user@host:port",
        ),
        "Of Slurm: the login node, as ssh reaches it; by default this machine is one.",
        None,
    ),
    Field(
        "sbatch",
        texts(text(r"--[a-z][ -~]*", max_chars=200, words="an option of sbatch"), max_items=32),
        "Of Slurm: further options, such as `--account=lab`; `regions` are its partitions.",
        (),
    ),
    Field("bundle", text(), "A file of `glasshouse runtime bundle`; by default one of this installation.", None),
)
"""Every key of `[machine]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """What ends a rental, whichever comes first."""

    usd: Decimal | None  # all machines of it together; None where the provider takes no money
    seconds: int  # from the first request on
    boot_s: int  # for one machine until it can be logged in to


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A Slurm cluster, and what is requested of it."""

    login: str = ""  # ``[user@]host[:port]`` of its login node; empty where this machine is one
    sbatch: tuple[str, ...] = ()  # further arguments of sbatch
    nodes: int = 1  # how many


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A checked `[machine]`."""

    on: str | None  # where, by the job; None where it has none
    options: Options  # with `most_per_hour_usd` 0 and `image` empty where the job has none
    caps: Caps  # what ends a rental
    python: str  # the interpreter there
    cluster: Cluster  # of Slurm: which
    bundle: Path | None  # what Glasshouse is brought along as; None for one of this installation

    def to_json(self) -> dict[str, Any]:
        """Return it as it is kept, with amounts of money as decimal text."""
        value: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Wanted:
        """Inverse of `to_json`; raises KeyError, TypeError, ValueError or ArithmeticError."""
        options, caps, cluster = (dict(value[name]) for name in ("options", "caps", "cluster"))
        most, usd, bundle = options["most_per_hour_usd"], caps["usd"], value["bundle"]
        tuples = {name: tuple(options[name]) for name in ("gpu", "regions")}
        return cls(
            on=value["on"],
            options=Options(**options | tuples | {"most_per_hour_usd": Decimal(most)}),
            caps=Caps(**caps | {"usd": None if usd is None else Decimal(usd)}),
            python=value["python"],
            cluster=Cluster(**cluster | {"sbatch": tuple(cluster["sbatch"])}),
            bundle=None if bundle is None else Path(bundle),
        )


def wanted(found: Mapping[str, Any], folder: Path) -> Wanted:
    """Return a job file's `[machine]`, with paths beside the job file."""
    return Wanted(
        on=found["on"],
        options=Options(
            gpu=tuple(found["gpu"]),
            gpus=found["gpus"],
            memory_gb=found["memory_gb"],
            disk_gb=found["disk_gb"],
            regions=tuple(found["regions"]),
            most_per_hour_usd=_usd(found["most_per_hour"]) or Decimal(0),
            spot=found["spot"],
            image=found["image"] or "",
        ),
        caps=Caps(usd=_usd(found["most_usd"]), seconds=found["most_time"], boot_s=found["boot"]),
        python=found["python"],
        cluster=Cluster(login=found["login"] or "", sbatch=tuple(found["sbatch"])),
        bundle=None if found["bundle"] is None else folder / found["bundle"],
    )


def _usd(amount: float | None) -> Decimal | None:
    return None if amount is None else Decimal(str(amount))


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment(Record, name="deployment"):
    """The part of the policy that belongs to a deployment, not to the package."""

    max_duration_s: int = 24 * 3600  # a longer run is wiped
    lease_s: int = 600  # a run without broker contact for so long is wiped
    releases: int = 1  # how many runtimes may be given the key
    valid_s: int = 24 * 3600  # for how long the broker may give it
    retries: Annotated[int, LEFT_OUT] = 0  # how many lost machines of a line are replaced
    # Names of the installations that may be given the key; none for the one at hand alone.
    reference: Annotated[tuple[str, ...], items(MAX_REFERENCES, text_codec(64)), LEFT_OUT] = ()
    hardware: Annotated[HardwarePolicy | None, LEFT_OUT] = None  # which machines count, above `software`
