"""What Vast.ai's rows of machines and offers mean."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from glasshouse.providers.rental.provider import Offer, Options, Rented, RentedState
from glasshouse.providers.rental.rest import number, shown, unexpected, unknown, words

PORT = 2222  # of a machine's sshd, within
_BRANDS = {"nvidia", "geforce", "tesla"}
# "If actual_status becomes exited, unknown, or offline it will never reach running": the description's own words.
_ENDED = {"exited", "unknown", "offline", "stopped", "frozen", "destroyed"}


def offer_of(row: Mapping[str, Any], options: Options) -> tuple[Decimal, Offer] | None:
    """Return an offer and the price of its GPUs alone; None for a row that lacks what has to be known of one."""
    names = ("dph_total", "num_gpus", "cpu_ram", "dph_base", "storage_total_cost")
    total, gpus, memory_mb, base, disk = (number(row.get(name)) for name in names)
    if total is None or gpus is None or memory_mb is None or not isinstance(row.get("id"), int):
        return None
    if options.spot:
        base = number(row.get("min_bid")) or base
        if base is None or disk is None:
            return None  # what would be bid is not known
        total = base + disk
    elif base is not None and disk is not None:
        total = max(total, base + disk)
    part = min(number(row.get("gpu_frac")) or Decimal(1), Decimal(1))  # of the host's memory: as of its GPUs
    return base or total, Offer(
        id=str(row["id"]),
        gpu=shown(row.get("gpu_name")) if gpus else "",
        gpus=int(gpus),
        gpu_memory_gb=round((number(row.get("gpu_ram")) or 0) / 1024) if gpus else 0,
        memory_gb=int(memory_mb * part / 1000),
        disk_gb=options.disk_gb,
        region=shown(row.get("geolocation")),
        usd_per_hour=total,
        spot=options.spot,
    )


def rented_of(row: Any) -> Rented:
    """Return a machine as a row of a listing has it."""
    if not isinstance(row, dict) or isinstance(row.get("id"), bool) or not isinstance(row.get("id"), int):
        raise unexpected("vast", "with a machine without an id")
    host, port = _address(row)
    return Rented(
        id=str(row["id"]),
        tag=row["label"] if isinstance(row.get("label"), str) else "",
        state=_state(row),
        host=host,
        port=port,
        usd_per_hour=number(row.get("dph_total")),
        why=" ".join(filter(None, (shown(row.get("actual_status")), shown(row.get("status_msg"))))),
    )


def _state(row: Mapping[str, Any]) -> RentedState:
    actual = row.get("actual_status")
    if actual in _ENDED or row.get("intended_status") in _ENDED or row.get("cur_state") == "stopped":
        return RentedState.STOPPED
    message = row.get("status_msg")
    if actual == "created" and isinstance(message, str) and "OCI runtime create failed" in message:
        return RentedState.STOPPED  # it is tried over and over, and never starts
    return RentedState.RUNNING if actual == "running" else RentedState.STARTING


def _address(row: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return where a machine's sshd is reached, both None until that is known."""
    try:
        host = str(ipaddress.ip_address(str(row.get("public_ipaddr")).strip()))
        ports = row["ports"][f"{PORT}/tcp"]
        port = next(int(one["HostPort"]) for one in ports)
    except (KeyError, TypeError, ValueError, StopIteration):  # the table, a port of it or a row may be null
        return None, None
    return (host, port) if 0 < port < 1 << 16 else (None, None)


def kinds_of(wanted: Sequence[str], known: Sequence[str]) -> dict[str, int]:
    """Return the kinds of GPU that are meant, as Vast writes them, each with the least memory that it has to have.

    ``A100 80GB`` means ``A100 PCIE`` and ``A100 SXM4`` with as much memory; a name that Vast has means no other.

    Raises:
        UsageError: `usage`: Vast has none that is called so.
    """
    found: dict[str, int] = {}
    for text in wanted:
        size = re.search(r"\b(\d{1,3})\s*G(?:i)?B\b", text, re.IGNORECASE)
        wanted_words = _words(text[: size.start()] + text[size.end() :] if size else text)
        same = [name for name in known if "".join(_words(name)) == "".join(wanted_words)]
        meant = same or [name for name in known if wanted_words and _words(name)[: len(wanted_words)] == wanted_words]
        if not meant:
            raise unknown("vast", "GPU", text, known)
        for name in meant:
            least = int(size[1]) if size else 0
            found[name] = min(found.get(name, least), least)
    return found


def _words(text: str) -> list[str]:
    return [word for word in words(text) if word not in _BRANDS]
