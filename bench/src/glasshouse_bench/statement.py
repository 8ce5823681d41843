"""A whole measurement as values, and the statement that its owner signs (spec/measurement.md, section 11).

Law: ``Measurement.load`` trusts no number that it finds; the statement is a function of the files and of one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, FormatError
from glasshouse.evidence.canary import check_canaries
from glasshouse.jobs.owner.home import is_there, write_private
from glasshouse.jobs.verify.publish import host_canaries
from glasshouse.wire import dsse
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.crypto import SigningKey, sha256
from glasshouse.wire.merkle import Tree, leaf_hash
from glasshouse_bench.analysis import analyse
from glasshouse_bench.artifact import ANALYSIS, Part, read_document
from glasshouse_bench.beside import BESIDE, MAX_BESIDE_BYTES, Calibration, Parity, Phases
from glasshouse_bench.design import Kind, Mode

__all__ = ["LIMITS", "STATEMENT", "STATEMENT_TYPE", "Measured", "Measurement", "statement_json", "write_statement"]

STATEMENT = "statement.json"
STATEMENT_TYPE = "application/vnd.glasshouse.measurement+json"
STATEMENT_KIND = "https://glasshouse.dev/measurement/v1"
MAX_STATEMENT_BYTES = 4 << 20
MAX_ANALYSIS_BYTES = 8 << 20
LIMITS = (
    "The numbers follow from the step records; that the steps took place is the owner's word: who controls both arms "
    "can slow the raw one down, or invent all records.",
    "The owner can have measured more than once and published one. The broker's log, where it has the designs' digests "
    "and these deployments, narrows selection, not invention.",
    "The raw arm has no receipt, and a receipt at the level software binds its owner to nothing.",
    "What could not be looked at is null, which is no evidence of absence.",
    "In a confidential virtual machine both arms pay for it: the number is what this software costs on that machine.",
)
# Words of the schema: a machine that is called like one of them is not found in the word itself.
_VOCABULARY = frozenset(one.value for one in Kind) | {"cpu", "gpu", "machine", "name", "kernel", "torch", "python"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One part, computed.

    Args:
        deployments: of all attempts, in order.
        root, size: of the Merkle tree over the notes' bytes.
    """

    part: Part
    analysis: dict[str, Any]
    deployments: tuple[str, ...]
    root: bytes
    size: int

    @classmethod
    def of(cls, part: Part) -> Measured:
        tree, deployments = Tree(), []
        for number in range(part.attempted):
            note, data = part.note(number)
            tree.append(leaf_hash(data))
            if note.protected.deployment is not None:
                deployments.append(note.protected.deployment)
        return cls(part=part, analysis=analyse(part), deployments=tuple(deployments), root=tree.root(), size=len(tree))

    @property
    def mode(self) -> Mode:
        return self.part.design.mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """All parts that lie in a folder, in the order of `Mode`, and what lies beside them."""

    parts: tuple[Measured, ...]
    calibration: Calibration | None
    parity: Parity | None
    phases: Phases | None

    @classmethod
    def load(cls, folder: Path) -> Measurement:
        """Read and compute everything. No signature and no receipt is checked.

        Raises:
            FormatError: files that are missing, cannot be read, or do not fit each other.
            UsageError: `usage`, a record of a schedule outside its limits.
        """
        parts = [Part.open(folder, mode) for mode in Mode if is_there(folder / mode.value)]
        beside: dict[str, Any] = {name: _beside(folder, name) for name in BESIDE}
        _check_calibration(beside["calibration"], parts)  # before much is computed from designs that do not follow
        found = cls(parts=tuple(map(Measured.of, parts)), **beside)
        found._check()
        return found

    def part(self, mode: Mode) -> Measured | None:
        return next((one for one in self.parts if one.mode is mode), None)

    @property
    def main(self) -> Measured:
        """The part whose number is the measurement's: the interleaved one where there is one."""
        order = (Mode.INTERLEAVED, Mode.ALTERNATING, Mode.SEQUENTIAL, Mode.NULL)
        return min(self.parts, key=lambda one: order.index(one.mode))

    @property
    def deployments(self) -> tuple[str, ...]:
        """Of everything that was started for this measurement."""
        others = (self.calibration, self.parity, self.phases)
        named = [one.deployment for one in others if one is not None and one.deployment is not None]
        return (*(one for part in self.parts for one in part.deployments), *named)

    def _check(self) -> None:
        if not self.parts:
            raise FormatError(Code.ARTIFACT_INVALID, "a measurement without a part")
        if len(set(self.deployments)) < len(self.deployments):
            raise FormatError(Code.ARTIFACT_INVALID, "one deployment stands behind two sessions")


def write_statement(folder: Path, *, owner: SigningKey, created_us: int) -> Measurement:
    """Compute and sign what a harness measured: writes each `analysis.json`, and `statement.json`.

    Args:
        created_us: the present, microseconds since the epoch.

    Raises:
        FormatError, VerificationError: files that do not fit each other; `artifact-canary` where a name of this
            machine or its user is among the facts.
        UsageError: `disk-full`, or a file that cannot be written.
    """
    measurement = Measurement.load(folder)
    analyses = {}
    for one in measurement.parts:
        _check_private(one)
        data = encode(one.analysis)
        write_private(one.part.folder / ANALYSIS, data)
        analyses[one.mode] = sha256(data)
    payload = encode(statement_json(measurement, created_us=created_us, analyses=analyses))
    write_private(folder / STATEMENT, dsse.sign(STATEMENT_TYPE, payload, [owner]).encode())
    return measurement


def statement_json(measurement: Measurement, *, created_us: int, analyses: Mapping[Mode, bytes]) -> dict[str, Json]:
    """Return what is signed; `analyses` has the SHA-256 of each part's `analysis.json`."""
    return {
        "beside": {
            name: None if (found := getattr(measurement, name)) is None else found.sha256.hex() for name in BESIDE
        },
        "created_us": created_us,
        "deployments": list(measurement.deployments),
        "kind": STATEMENT_KIND,
        "limits": list(LIMITS),
        "parts": [
            {
                "analysis_sha256": analyses[one.mode].hex(),
                "attempts": {"root": one.root.hex(), "size": one.size},
                "claim": one.analysis["claim"],
                "design_sha256": one.part.design.sha256.hex(),
                "mode": one.mode.value,
                "result": one.analysis["result"],
            }
            for one in measurement.parts
        ],
    }


def _beside(folder: Path, name: str) -> Any:
    path = folder / f"{name}.json"
    return read_document(path, BESIDE[name], max_bytes=MAX_BESIDE_BYTES) if is_there(path) else None


def _check_calibration(calibration: Calibration | None, parts: Sequence[Part]) -> None:
    for part in parts:
        if part.design.calibration_sha256 is None:
            continue
        if calibration is None or calibration.sha256 != part.design.calibration_sha256:
            raise FormatError(Code.ARTIFACT_INVALID, "calibration.json is not the one that a design names")
        calibration.check(part.design)


def _check_private(one: Measured) -> None:
    """All else is numbers, digests and enumerations: only in these texts could a machine's name have slipped in."""
    design = one.part.design
    documents: list[dict[str, Json]] = [{"machine": design.machine.to_json(), "workload": design.workload.to_json()}]
    arms = (arm for note in one.part.notes() for arm in (note.raw, note.protected))
    documents += [
        {"speculation": list(lines)} for lines in sorted({arm.speculation for arm in arms if arm.speculation})
    ]
    for told in documents:
        check_canaries(encode(told), host_canaries(), vocabulary=_VOCABULARY, max_bytes=MAX_STATEMENT_BYTES)
