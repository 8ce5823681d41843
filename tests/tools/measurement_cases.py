"""What the implementation finds of one case of spec/vectors/measurement, in the form in which the case expects it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse.errors import GlasshouseError
from glasshouse.wire.canonical import b64decode, encode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.workloads.measurement.slots import Plan, order_of
from glasshouse_bench.beside import Calibration
from glasshouse_bench.claim import claim
from glasshouse_bench.design import Mode
from glasshouse_bench.estimate import Estimate, estimate
from glasshouse_bench.harness.subject import commitment
from glasshouse_bench.records import parse
from glasshouse_bench.sensitivity import sensitivity
from glasshouse_bench.sessions import Blocks, session_of
from glasshouse_bench.verify import verify_measurement


def outcome(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return `expect`: the refusal's code, or null and what was found."""
    try:
        return {"code": None, **_KINDS[kind](given)}
    except GlasshouseError as error:
        return {"code": error.code.value}


def number(value: float | None) -> str | None:
    return None if value is None else f"{value + 0.0:.11e}"


def _commitment(given: dict[str, Any]) -> dict[str, Any]:
    owner, seed = SigningKey(bytes.fromhex(given["key"])), bytes.fromhex(given["seed"])
    return {"commitment": commitment(owner, seed, sha256(encode(given["job"]))).hex()}


def _calibration(given: dict[str, Any]) -> dict[str, Any]:
    return {**Calibration.parse(given["calibration"]).schedule(Mode(given["mode"]), given["asked_s"])}


def _schedule(given: dict[str, Any]) -> dict[str, Any]:
    plan = Plan.from_json(given["plan"])
    return {
        "orders": [order_of(plan.seed, given["first"] + block) for block in range(64)],
        "own_slots": [str(plan.own_slot(int(one))) for one in given["instants"]],
    }


def _record(given: dict[str, Any]) -> dict[str, Any]:
    found = parse(given["record"].encode())
    return {"reason": found.reason, "slots": len(found.slots), "steps": len(found.losses)}


def _session(given: dict[str, Any]) -> dict[str, Any]:
    raw, protected = (None if one is None else parse(one.encode()) for one in (given["raw"], given["protected"]))
    observed = {int(block): rule for block, rule in given["observed"].items()}
    found = session_of(raw, protected, length_ns=given["length_ns"], observed=observed, throttled=given["throttled"])
    sums = (
        None
        if found.blocks is None
        else np.hstack([found.blocks.time_ns, found.blocks.steps, found.blocks.beside_ns]).tolist()
    )
    return {
        "blocks": sums,
        "contention": None if found.blocks is None else number(found.blocks.contention),
        "contrast": None if found.blocks is None else number(found.blocks.contrast),
        "dropped": list(found.dropped),
        "excluded": dict(found.excluded),
        "outcome": found.outcome.value,
        "unlike_losses": found.unlike_losses,
    }


def _estimate(given: dict[str, Any]) -> dict[str, Any]:
    contrasts = [float(one) for one in given["contrasts"]]
    found = estimate(
        contrasts,
        background=float(given["background"]),
        widening=float(given["widening"]),
        contention=[float(one) for one in given["contention"]],
    )
    claimed = claim(found, margin=float(given["margin"]), null=given["null"])
    interval = found.interval()
    return {
        "high": None if interval is None else number(interval.high),
        "log_ratio": number(found.log_ratio),
        "low": None if interval is None else number(interval.low),
        "minimum_detectable": number(found.minimum_detectable),
        "standard_error": number(found.standard_error),
        "steady_p": number(found.steady_p),
        "tost_p": number(claimed.tost_p),
        "word": claimed.word.value,
    }


def _sensitivity(given: dict[str, Any]) -> dict[str, Any]:
    sessions = []
    for rows in given["sessions"]:
        pairs = np.array(rows, dtype=np.int64).reshape(len(rows), 4, 2)
        time_ns, steps, cpu_ns, all_steps = (pairs[:, place] for place in range(4))
        none = np.zeros_like(steps)
        sessions.append(Blocks(time_ns=time_ns, steps=steps, beside_ns=none, cpu_ns=cpu_ns, all_steps=all_steps))
    found = sensitivity(sessions, seed=bytes.fromhex(given["seed"]))

    def ratio(one: Estimate | None) -> str | None:
        return None if one is None else number(one.log_ratio)

    return {
        "processor": ratio(found.processor),
        "randomisation_p": number(found.randomisation_p),
        "trimmed": ratio(found.trimmed),
    }


def files_of(given: dict[str, Any], base: dict[str, Any] | None) -> dict[str, str]:
    """The files of an artifact, by path; `base` is the input of the case that it names."""
    if base is None:
        return dict(given["files"])
    kept = {path: text for path, text in base["files"].items() if path not in given["removed"]}
    return kept | given["put"]


def _artifact(given: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        for path, text in given["files"].items():
            (Path(name) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / path).write_bytes(text.encode())
        found = verify_measurement(Path(name), owner=b64decode(given["owner"]))
    claimed = found.measurement.parts[0].analysis["claim"]
    return {
        "assurance": found.assurance,
        "lacks": [one.value for one in found.lacks],
        "status": found.status.value,
        "word": None if claimed is None else claimed["word"],
    }


_KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "calibration": _calibration,
    "commitment": _commitment,
    "schedule": _schedule,
    "record": _record,
    "session": _session,
    "estimate": _estimate,
    "sensitivity": _sensitivity,
    "artifact": _artifact,
}
