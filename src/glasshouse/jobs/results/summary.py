"""What a run came to, as the one object that `run`, `attach` and `status` print with `--json`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from glasshouse.attestation.claims import REQUIRED, CheckResult
from glasshouse.errors import GlasshouseError
from glasshouse.evidence.receipt import LIFECYCLE, Receipt
from glasshouse.evidence.receipt import Work as Done
from glasshouse.jobs.owner.home import Home, is_there
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.jobs.places.rented_machine import statement_of
from glasshouse.jobs.results.collect import RunOutput, look_inside
from glasshouse.jobs.results.line_account import LegAccount, line_account
from glasshouse.jobs.results.run_cost import Cost, cost_of
from glasshouse.jobs.results.run_logs import uncollected
from glasshouse.jobs.supervise.follow import Seen
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.task.uncollected import Uncollected
from glasshouse.wire.crypto import RecipientKey
from glasshouse.wire.group import Group
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What a run that has ended came to, as far as the keys at hand show it."""

    outputs: tuple[RunOutput, ...]  # as their owner sees them; empty while they stay sealed
    lost: Uncollected | None  # what a script wrote outside of its output folders
    rental: Mapping[str, Any] | None  # the statement of its rental; None where nothing was rented
    cost: Cost | None  # what that came to
    line: Sequence[LegAccount]  # of each leg of its line up to it; none where it has none
    problem: str  # why something of this could not be read; empty where all could
    facts: Mapping[str, Any]  # all of it as `summary` returns it


def account_of(
    ended: Ended, *, home: Home, sealing: RecipientKey | None, owner_signing: bytes | None = None
) -> Account:
    """Return what a run came to; without `sealing` the outputs' names stay sealed."""
    conclusion, problem = ended.conclusion, ""
    opened: list[RunOutput] = []
    if sealing is not None and conclusion.receipt is not None:
        try:
            opened = look_inside(ended.folder, conclusion.receipt, sealing=sealing)
        except GlasshouseError as error:
            problem = str(error)
    lost = None
    if sealing is not None and owner_signing is not None and ended.record.workload == "script":
        lost = uncollected(ended.folder, sealing=sealing, owner_signing=owner_signing)
    rental, cost, unread = rental_and_cost(home, ended.folder, ended.record, conclusion.receipt)
    line = line_account(home, ended.record)
    return Account(
        outputs=tuple(opened),
        lost=lost,
        rental=rental,
        cost=cost,
        line=line,
        problem=problem or unread,
        facts=summary(ended.folder, ended.record, ended.seen, conclusion, opened, lost, rental, cost, line),
    )


def rental_and_cost(
    home: Home, run: RunFolder, record: RunRecord, receipt: Receipt | None
) -> tuple[dict[str, Any] | None, Cost | None, str]:
    """Return the statement of a run's rental and what it came to, both None without one, and why one cannot be read."""
    now_us = time.time_ns() // 1000
    try:
        statement = statement_of(home, run, now_us)
        if statement is None:
            return None, None, ""
        return statement, cost_of(statement, receipt, now_us=now_us, placed_us=record.placed_us), ""
    except GlasshouseError as error:
        return None, None, error.message


def summary(
    folder: RunFolder,
    record: RunRecord,
    seen: Seen,
    conclusion: Conclusion | None,
    opened: Sequence[RunOutput] = (),
    lost: Uncollected | None = None,
    rental: Mapping[str, Any] | None = None,
    cost: Cost | None = None,
    line: Sequence[LegAccount] = (),
) -> dict[str, Any]:
    """Return a run's facts; all that describes its end comes from the verified receipt or is null.

    A run that goes on has no `conclusion`; without the outputs `opened`, their names are sealed, and null.
    """
    receipt = None if conclusion is None else conclusion.receipt
    chain = conclusion and conclusion.verified and conclusion.verified.chain
    return {
        "run_id": record.run_id,
        "name": record.name,
        "state": (seen.state or State.CREATED).value,
        "outcome": conclusion and conclusion.outcome.value,
        "code": conclusion and conclusion.code and conclusion.code.value,
        "attestation": chain
        and {
            "key_released": chain.ear is not None,
            "ear_status": chain.ear and chain.ear.status.value,
            "evidence_sha256": chain.receipt.evidence_sha256 and chain.receipt.evidence_sha256.hex(),
        },
        "assurance": receipt and receipt.assurance and receipt.assurance.value,
        "hardening": receipt
        and {
            "profile": receipt.profile.value,
            "workspace": receipt.workspace,
            "secret_memory": receipt.secret_memory,
            "missing": missing_checks(record, seen),
        },
        "package": {"id": record.package_id, "manifest_sha256": record.manifest_sha256},
        "workload": record.workload,
        "work": receipt and receipt.work and work_facts(receipt.work),
        "loss": receipt and receipt.loss and {"first": float(receipt.loss.first), "final": float(receipt.loss.final)},
        "trainable": receipt and receipt.trainable,
        "outputs": [] if receipt is None else _outputs(receipt, opened),
        "uncollected": lost and asdict(lost),
        "lifecycle_s": {step: _seconds(receipt.lifecycle_us[step] if receipt else None) for step in LIFECYCLE},
        "training_imports_s": _seconds(receipt.training_imports_us if receipt else None),
        "zeroization": [
            {"probe": probe.probe, "result": probe.result.value, "detail": probe.detail}
            for probe in (receipt.zeroization if receipt else ())
        ],
        "receipt": conclusion
        and {
            "path": str(folder.receipt) if is_there(folder.receipt) else None,
            "verdict": conclusion.verdict,
            "problem": conclusion.problem or None,
        },
        "group": record.group and _group(record.group, conclusion),
        "line": record.line
        and {"id": record.line, "leg": record.leg, "legs": [leg.to_json() for leg in line], "before": record.before},
        "rental": rental,
        "cost": cost and cost.to_json(),
        "files": str(folder.path),
    }


def _group(group: Group, conclusion: Conclusion | None) -> dict[str, Any]:
    ends = () if conclusion is None else conclusion.machines
    return {
        "id": group.id.hex(),
        "machines": group.machines,
        "ranks": group.ranks,
        "blamed": conclusion and conclusion.blamed,
        "ended": [
            {
                "machine": machine,
                "outcome": end.outcome.value,
                "code": end.code and end.code.value,
                "verdict": end.verdict,
                "problem": end.problem or None,
            }
            for machine, end in enumerate(ends)
        ],
    }


def missing_checks(record: RunRecord, seen: Seen) -> list[str]:
    """Return the checks that the run's profile demands and that did not pass, as `process.check`."""
    required = {str(process): names for process, names in REQUIRED[Profile(record.profile)].items()}
    return sorted(
        f"{process}.{name}"
        for (process, name), result in seen.checks.items()
        if result != CheckResult.PASSED and name in required.get(process, ())
    )


def work_facts(work: Done) -> dict[str, Any]:
    """Return how much was done, as programs are shown it."""
    return {
        "unit": work.unit,
        "done": work.done,
        "elapsed_s": _seconds(work.elapsed_us),
        "rate_per_s": round(work.done * 1e6 / work.elapsed_us, 4) if work.elapsed_us and work.done else None,
        "stop_reason": work.stop_reason,
    }


def _outputs(receipt: Receipt, opened: Sequence[RunOutput]) -> list[dict[str, Any]]:
    inside = {one.sequence: one for one in opened}
    return [
        {
            "name": (one := inside.get(output.sequence)) and one.name,
            "kind": output.kind,
            "sha256": one and one.sha256.hex(),
            "bytes": output.plain_bytes,
            "sealed": str(PurePosixPath(output.file_name)),
            "sealed_sha256": output.sealed_sha256.hex(),
        }
        for output in receipt.outputs
    ]


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / 1e6
