"""Whether a folder's measurement is the one that was asked for: it goes on only for its owner, and by its designs.

Law: what differs is refused before anything is sealed or trained, and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.owner.home import is_there
from glasshouse.jobs.owner.owner_identity import OwnerPublic, read_public
from glasshouse.wire.canonical import Json
from glasshouse_bench.artifact import DESIGN, Part
from glasshouse_bench.design import Mode
from glasshouse_bench.harness.planning import Setting, Wish

__all__ = ["CALIBRATION", "OWNER", "begun", "check_same"]

CALIBRATION, OWNER = "calibration.json", "owner.pub"
_MOST_NAMED = 4
_ANEW = "measure anew, with -o and another folder"
_WORDS = {
    "asked_s": "--time in seconds",
    "margin_ppm": "--margin in millionths",
    "planted": "what is planted",
    "workload.kind": "the workload",
    "workload.name": "the job's name",
    "workload.cpus": "the processors that both arms may use",
}


def begun(folder: Path, owner: OwnerPublic) -> dict[Mode, Part]:
    """Return the parts whose designs lie in a folder; empty where no measurement was begun.

    Raises:
        UsageError: `owner-mismatch`, another owner's folder, or a measurement of none that it names.
        FormatError: what lies there is no part.
    """
    parts = {mode: Part.open(folder, mode) for mode in Mode if is_there(folder / mode.value / DESIGN)}
    if not parts and (is_there(folder / CALIBRATION) or not is_there(folder / OWNER)):
        return {}  # at most, what was left where no session began: of no use to anyone
    if not is_there(folder / OWNER):
        raise UsageError(
            Code.OWNER_UNKNOWN, f"{folder} holds a measurement and no {OWNER}: whose it is, is not known", hint=_ANEW
        )
    theirs = read_public(folder / OWNER)
    if theirs != owner:
        raise UsageError(
            Code.OWNER_UNKNOWN,
            f"{folder} is of the owner {theirs.fingerprint}, not of {owner.fingerprint}",
            hint=f"use the --home that began it (a key made for one measurement is gone with its process), or {_ANEW}",
        )
    return parts


def check_same(parts: Mapping[Mode, Part], wish: Wish, setting: Setting, *, calibration_sha256: bytes) -> None:
    """Refuse to go on with a measurement by another design than the one that was sealed.

    Parts that are missing where no session was attempted are no other design: their harness was stopped between them.

    Raises:
        UsageError: `usage`; names what differs.
    """
    more, less = [mode for mode in parts if mode not in wish.modes], [mode for mode in wish.modes if mode not in parts]
    if more or (less and any(part.attempted for part in parts.values())):
        there, here = (" and ".join(mode.value for mode in Mode if mode in modes) for modes in (parts, wish.modes))
        raise _other(f"it is {there}, and {here} was asked for")
    differences: dict[str, None] = {}
    for mode, part in parts.items():
        members = setting.members(mode, wish, part.design.seed)
        asked = replace(part.design, **members, calibration_sha256=calibration_sha256)
        differences |= dict.fromkeys(_differences(part.design.to_json(), asked.to_json()))
    if differences:
        raise _other("; ".join([*differences][:_MOST_NAMED]))


def _differences(there: Mapping[str, Json], here: Mapping[str, Json], above: str = "") -> Iterator[str]:
    for name, one in there.items():
        path, other = above + name, here[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{path}.")
        elif one == other:
            continue
        elif path == "workload.commitment":
            yield "the parameters or files of the job are others"
        elif path == "calibration_sha256":
            yield "calibration.json is not the one from which it was designed"
        else:
            yield f"{_WORDS.get(path, path)} was {_shown(one)} and is {_shown(other)}"


def _shown(value: Json) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _other(why: str) -> UsageError:
    return UsageError(
        Code.USAGE,
        f"the measurement that lies there was begun by another design: {why}",
        hint=f"repeat the command that began it, on the same machine, or {_ANEW}",
    )
