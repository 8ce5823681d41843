"""The signed statement over a measurement: what its owner vouches for (spec/overhead-artifact.md section 11).

Law: ``statement_json`` is a function of the measurement and of the digests of the two kinds of computed files, so that
a verifier makes the statement again and compares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from glasshouse.bench.overhead.artifact import (
    ANALYSIS,
    MAX_ANALYSIS_BYTES,
    PHASES,
    STATEMENT,
    Measurement,
    Part,
)
from glasshouse.bench.overhead.design import Mode
from glasshouse.bench.overhead.facts import (
    MAX_STATEMENT_BYTES,
    STATEMENT_KIND,
    STATEMENT_TYPE,
    Facts,
)
from glasshouse.bench.overhead.receipts import Backing, back, lowest
from glasshouse.bench.overhead.slices import tree
from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.artifact import WORKLOADS
from glasshouse.evidence.canary import check_canaries
from glasshouse.jobs.artifact import host_canaries
from glasshouse.jobs.files import write_private
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.kdf import sha256
from glasshouse.wire.merkle import Tree
from glasshouse.wire.signing import SigningKey

__all__ = ["LIMITS", "check_runs", "statement_json", "write_statement"]

# What no measurement of this kind can show; spec/overhead-artifact.md section 13 has a sentence for each.
LIMITS = (
    "times-are-the-owners-word",
    "seed-may-have-been-chosen",
    "other-measurements-may-be-unpublished",
    "one-session-is-one-process-pair",
    "warm-up-averages-both-arms",
    "unobserved-is-not-absent",
    "parity-is-of-weights-only",
    "raw-arm-has-no-receipt",
    "null-run-rests-no-protected-arm",
)
# A rented machine's clock may be off by so much.
_CLOCK_LEEWAY_US = 600 * 1_000_000
# Words of the schema: a machine that is called like one of them is not found in the word itself.
_VOCABULARY = frozenset(
    {"system", "workload", "cpu", "logical_cpus", "memory_bytes", "kernel", "python", "torch", "glasshouse", "gpu"}
    | {"name", "driver", "virtualised", "kind", "unit", "facts", "step", "epoch", *WORKLOADS}
)


def write_statement(folder: Path, facts: Facts, *, owner: SigningKey) -> Measurement:
    """Compute and sign what a harness measured: writes each `analysis.json`, `phases.json` and `statement.json`.

    Args:
        folder: with the parts that were measured: `design.json`, `slices.jsonl`, `sessions.jsonl` and `receipts/` in
            each, and `phases.jsonl` beside them.
        facts: what those files do not say.
        owner: the signing key of the owner whose runs were measured.

    Returns:
        The measurement, as `Measurement.load` gives it from now on.

    Raises:
        FormatError, VerificationError: files that do not fit each other, or a receipt that does not hold;
            `artifact-canary` where a name of this machine or its user is among the facts.
        UsageError: `disk-full`, or a file that cannot be written.
    """
    _check_private(facts)
    measurement = Measurement.assemble(folder, facts, assurance=None)
    kind = str(facts.workload["kind"])
    backings = [back(folder / part.mode.value, part, owner=owner.public, workload=kind) for part in measurement.parts]
    check_runs(backings, facts)
    measurement = replace(measurement, assurance=lowest(backings))
    analyses: dict[Mode, bytes] = {}
    for part in measurement.parts:
        data = _bounded(encode(part.to_json()), MAX_ANALYSIS_BYTES, ANALYSIS)
        write_private(folder / part.mode.value / ANALYSIS, data)
        analyses[part.mode] = sha256(data)
    phases = None
    if measurement.phases is not None:
        data = encode(measurement.phases.to_json())
        write_private(folder / PHASES, data)
        phases = sha256(data)
    payload = encode(statement_json(measurement, analyses=analyses, phases_sha256=phases))
    _bounded(payload, MAX_STATEMENT_BYTES, STATEMENT)
    write_private(folder / STATEMENT, dsse.sign(STATEMENT_TYPE, payload, [owner]).encode())
    return measurement


def statement_json(
    measurement: Measurement, *, analyses: Mapping[Mode, bytes], phases_sha256: bytes | None
) -> dict[str, Json]:
    """Return what is signed.

    Args:
        measurement: everything that was read and computed.
        analyses: the SHA-256 of each part's `analysis.json`.
        phases_sha256: of `phases.json`, where there is one.
    """
    null = measurement.part(Mode.NULL)
    phases = measurement.phases
    return {
        **measurement.facts.to_json(),
        "assurance": measurement.assurance,
        "kind": STATEMENT_KIND,
        "limits": list(LIMITS),
        "null_result": None if null is None else _null_result(null),
        "parts": [_part(part, analyses[part.mode]) for part in measurement.parts],
        "phases": None
        if phases is None or phases_sha256 is None
        else {"analysis_sha256": phases_sha256.hex(), "slices": _root(tree(phases.slices))},
    }


def check_runs(backings: Sequence[Backing], facts: Facts) -> None:
    """Refuse one run behind two sessions, runs of different packages, and one that ended after the statement was made.

    Raises:
        VerificationError: `artifact-invalid`.
    """
    receipts = [verdict.chain.receipt for backing in backings for verdict in backing.receipts]
    if len({receipt.run_id for receipt in receipts}) < len(receipts):
        raise VerificationError(Code.ARTIFACT_INVALID, "one run's receipt stands behind two sessions")
    if len({receipt.manifest_sha256 for receipt in receipts}) > 1:
        raise VerificationError(Code.ARTIFACT_INVALID, "receipts of different packages stand behind one measurement")
    if any(receipt.finished_us > facts.created_us + _CLOCK_LEEWAY_US for receipt in receipts):
        raise VerificationError(Code.ARTIFACT_INVALID, "a run that ended after the statement about it was made")


def _part(part: Part, analysis_sha256: bytes) -> dict[str, Json]:
    computed = part.to_json()
    repeated = ("attempts", "claim", "jobs", "lifecycle", "parity", "result", "sequential")
    return {
        **{name: computed[name] for name in repeated},
        "analysis_sha256": analysis_sha256.hex(),
        "design": part.design.to_json(),
        "design_sha256": part.design.sha256.hex(),
        "mode": part.mode.value,
        "receipts": [None if note.bundle_sha256 is None else note.bundle_sha256.hex() for note in part.notes],
        "sessions": _root(tree(part.notes)),
        "slices": _root(tree(part.records)),
    }


def _null_result(part: Part) -> dict[str, Json]:
    result, found = part.analysis.result, part.analysis.claim
    interval = None if result is None else result.interval()
    return {
        "holds_zero": None if interval is None else interval.holds(0.0),
        "interval_95": None if interval is None else interval.to_json(),
        "word": None if found is None else found.word.value,
    }


def _root(grown: Tree) -> dict[str, Json]:
    return {"root": grown.root().hex(), "size": len(grown)}


def _check_private(facts: Facts) -> None:
    """The other members are numbers, digests and enumerations: only here could a machine's name have slipped in."""
    told = encode({"system": dict(facts.system), "workload": dict(facts.workload)})
    check_canaries(told, host_canaries(), vocabulary=_VOCABULARY, max_bytes=MAX_STATEMENT_BYTES)


def _bounded(data: bytes, limit: int, name: str) -> bytes:
    if len(data) > limit:
        raise FormatError(Code.TOO_LARGE, f"{name} would be longer than {limit} bytes: too many sessions for one")
    return data
