"""What can be done to a measurement's folder, with and without its owner's key, as cases of the vectors."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from glasshouse.wire import dsse
from glasshouse.wire.canonical import b64encode, decode, encode
from glasshouse.wire.crypto import sha256
from glasshouse.wire.merkle import Tree, leaf_hash
from glasshouse_bench.artifact import Part
from glasshouse_bench.beside import Calibration
from glasshouse_bench.design import Mode
from glasshouse_bench.statement import STATEMENT_TYPE, write_statement
from simulators.slot_measurement import CREATED_US, OWNER, PHASES, measured
from simulators.world import World
from tools.measurement_cases import files_of, outcome

__all__ = ["artifacts", "edit", "fitted", "payload", "sign"]

BASE = "artifact-good"
FIRST = "interleaved/sessions/0000"


def payload(folder: Path) -> dict[str, Any]:
    envelope = dsse.Envelope.parse((folder / "statement.json").read_bytes(), max_bytes=1 << 23)
    found: Any = json.loads(envelope.payload)
    return found


def sign(folder: Path, told: dict[str, Any], *, key: Any = OWNER, kind: str = STATEMENT_TYPE) -> None:
    (folder / "statement.json").write_bytes(dsse.sign(kind, encode(told), [key]).encode())


def fitted(folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    """The statement with the digests of the designs and notes that lie there now."""
    for one in told["parts"]:
        part = folder / one["mode"]
        tree = Tree()
        for path in sorted(part.glob("sessions/*/session.json")):
            tree.append(leaf_hash(path.read_bytes()))
        one["design_sha256"] = sha256((part / "design.json").read_bytes()).hex()
        one["attempts"] = {"root": tree.root().hex(), "size": len(tree)}
    return told


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value: Any = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(encode(value))


def told_otherwise(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The owner changes an analysis and the statement that repeats it, and signs."""

    def forge(folder: Path) -> None:
        path = folder / "interleaved" / "analysis.json"
        edit(path, change)
        told = payload(folder)
        analysis: Any = decode(path.read_bytes(), max_bytes=1 << 20)
        told["parts"][0].update(
            analysis_sha256=sha256(path.read_bytes()).hex(), claim=analysis["claim"], result=analysis["result"]
        )
        sign(folder, told)

    return forge


def step_shorter(folder: Path) -> None:
    path = folder / FIRST / "protected.steps"
    lines = path.read_text().splitlines()
    slot = json.loads(lines[9])
    slot["steps"][-1][1] -= 1_000_000
    lines[9] = encode(slot).decode()
    path.write_text("\n".join(lines) + "\n")


def step_shorter_and_noted(folder: Path) -> None:
    step_shorter(folder)
    digest = sha256((folder / FIRST / "protected.steps").read_bytes()).hex()
    edit(folder / FIRST / "session.json", lambda note: note["protected"].update(record_sha256=digest))
    sign(folder, fitted(folder, payload(folder)))


def records_of_another_session(folder: Path) -> None:
    other = folder / "interleaved" / "sessions" / "0001"
    for name in ("raw.steps", "protected.steps"):
        shutil.copy(other / name, folder / FIRST / name)
    notes = [json.loads((one / "session.json").read_bytes()) for one in (folder / FIRST, other)]
    for arm in ("raw", "protected"):
        notes[0][arm]["record_sha256"] = notes[1][arm]["record_sha256"]
    (folder / FIRST / "session.json").write_bytes(encode(notes[0]))
    sign(folder, fitted(folder, payload(folder)))


def receipt_of_another_session(folder: Path) -> None:
    receipts = folder / "interleaved" / "receipts"
    shutil.copy(receipts / "0001.json", receipts / "0000.json")
    digest = sha256((receipts / "0000.json").read_bytes()).hex()
    edit(folder / FIRST / "session.json", lambda note: note.update(receipt_sha256=digest))
    write_statement(folder, owner=OWNER, created_us=CREATED_US)


def last_left_out(folder: Path) -> None:
    shutil.rmtree(folder / "interleaved" / "sessions" / "0002")
    (folder / "interleaved" / "receipts" / "0002.json").unlink()


def then_signed(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        change(folder)
        write_statement(folder, owner=OWNER, created_us=CREATED_US)

    return forge


def told_of(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The owner signs another statement of the same files."""

    def forge(folder: Path) -> None:
        told = payload(folder)
        change(told)
        sign(folder, told)

    return forge


def one_died(folder: Path) -> None:
    """An attempt whose protected arm left nothing stays in the count."""
    part = Part.open(folder, Mode.INTERLEAVED)
    note, _ = part.note(0)
    for path in (folder / FIRST / "protected.steps", part.receipt(0)):
        path.unlink()
    died = replace(note, protected=replace(note.protected, record_sha256=None), receipt_sha256=None)
    (folder / FIRST / "session.json").write_bytes(died.encode())


def phases_beside(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The owner puts the profile of a step beside the parts, and signs."""

    def put(folder: Path) -> None:
        path = folder / "phases.json"
        path.write_bytes(PHASES.encode())
        edit(path, change)
        told = payload(folder)
        told["beside"]["phases"] = sha256(path.read_bytes()).hex()
        told["deployments"].append(PHASES.deployment)
        sign(folder, told)

    return put


def calibrated(folder: Path, **changed: Any) -> None:
    """The owner measures anew, by a design that names a calibration with steps of 10 ms, and signs whatever follows."""
    shutil.rmtree(folder)
    steps = tuple(9_900_000 + 10_000 * (k % 21) for k in range(42))
    found = Calibration(raw_ns=steps, protected_ns=steps, start_us=2_500_000, between_ppm=18_000, device=False)
    design: dict[str, Any] = {**found.schedule(Mode.INTERLEAVED, 60), "sessions": 1, **changed}
    with patch.object(Calibration, "check", lambda *_: None):
        measured(folder, modes=[Mode.INTERLEAVED], calibration=found, **design)


STORIES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "without-receipts": (
        "receipts are not shown: nothing is known of the level",
        lambda folder: shutil.rmtree(folder / "interleaved" / "receipts"),
    ),
    "one-died": ("an arm died; the attempt counts, and the word with fewer sessions stands", then_signed(one_died)),
    "stopped-early": ("the last session was never attempted", then_signed(last_left_out)),
    "no-null": ("no null part beside it", then_signed(lambda folder: shutil.rmtree(folder / "null"))),
    "step-changed": ("a step was made shorter", step_shorter),
    "step-changed-and-signed": ("the same by the owner, whose analysis is the old one", step_shorter_and_noted),
    "session-left-out": ("the last session was taken away after the signature", last_left_out),
    "session-in-the-middle-left-out": (
        "a session was taken away, and the owner signed",
        lambda folder: (shutil.rmtree(folder / FIRST), sign(folder, fitted(folder, payload(folder)))),
    ),
    "design-other": (
        "the margin was named afterwards",
        lambda folder: edit(folder / "interleaved" / "design.json", lambda one: one.update(margin_ppm=50_000)),
    ),
    "seed-other-and-signed": (
        "another seed, of which these records are not",
        lambda folder: (
            edit(folder / "interleaved" / "design.json", lambda one: one.update(seed="77" * 32)),
            sign(folder, fitted(folder, payload(folder))),
        ),
    ),
    "word-changed-and-signed": (
        "the owner claims another word",
        told_otherwise(lambda one: one["claim"].update(word="equivalent")),
    ),
    "interval-narrowed-and-signed": (
        "the owner claims a narrower interval",
        told_otherwise(lambda one: one["result"].update(slowdown_95=one["result"]["without_background_95"])),
    ),
    "not-a-number-and-signed": (
        "a number is none",
        told_otherwise(lambda one: one["result"].update(standard_error="nan")),
    ),
    "exclusion-invented-and-signed": (
        "a block was excluded by no rule",
        told_otherwise(lambda one: one["attempts"].update(excluded_blocks={"steal": 1})),
    ),
    "deployment-missing": ("a deployment is not named", told_of(lambda one: one["deployments"].pop())),
    "limit-missing": ("a limit is not named", told_of(lambda one: one["limits"].pop())),
    "part-not-named": ("a part lies there that the statement does not name", told_of(lambda one: one["parts"].pop())),
    "member-more": ("a member more in the statement", told_of(lambda one: one.update(more=1))),
    "file-more-in-a-part": (
        "a file that nothing names",
        lambda folder: (folder / "interleaved" / "notes.txt").write_text("x"),
    ),
    "file-more-in-a-session": (
        "a record that its note does not name",
        lambda folder: (folder / FIRST / "raw.steps.old").write_text("x"),
    ),
    "receipt-more": (
        "a receipt that no note names",
        lambda folder: (folder / "interleaved" / "receipts" / "0007.json").write_text("{}"),
    ),
    "record-missing": ("a record is not there", lambda folder: (folder / FIRST / "raw.steps").unlink()),
    "records-of-another-session": ("records follow another session's schedule", records_of_another_session),
    "receipt-of-another-session": ("a receipt is of another session's run", receipt_of_another_session),
    "phases": ("where the time of a step goes", phases_beside(lambda one: None)),
    "phases-longer-than-their-steps": (
        "the phases of an arm do not fit into its steps",
        phases_beside(lambda one: one["phases"][0].update(protected_ns=45_000_000)),
    ),
    "phases-of-fewer-steps": ("a loss is missing", phases_beside(lambda one: one["raw_losses"].pop())),
    "phases-out-of-order": ("a phase stands before another", phases_beside(lambda one: one["phases"].reverse())),
    "calibrated": ("its slots and sessions follow from its calibration; it has no null", calibrated),
    "calibrated-other-slots": (
        "slots are a millisecond longer than those that follow from its calibration",
        lambda folder: calibrated(folder, slot_ns=49_432_000),
    ),
    "calibrated-other-length": (
        "sessions are two microseconds longer",
        lambda folder: calibrated(folder, length_ns=5_000_002_000),
    ),
    "calibration-missing": (
        "the calibration that its design names does not lie there",
        lambda folder: (calibrated(folder), (folder / "calibration.json").unlink()),
    ),
    "another-owner": ("another owner signed", lambda folder: sign(folder, payload(folder), key=World("rival").owner)),
    "first-format": (
        "a measurement of the first format",
        lambda folder: sign(folder, {"kind": "x"}, kind="application/vnd.glasshouse.overhead+json"),
    ),
}


def artifacts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every case, the one that the others begin with first."""
    owner = b64encode(OWNER.public)
    with tempfile.TemporaryDirectory() as name:
        folder = measured(Path(name) / "good", receipts=True, sessions=3, length_ns=800_000_000)
        files = _files(folder)
        yield BASE, _case("a measurement with its null part and receipts", {"files": files, "owner": owner}, None)
        for story, (description, change) in STORIES.items():
            altered = Path(name) / story
            shutil.copytree(folder, altered)
            change(altered)
            found = _files(altered)
            given = {
                "base": BASE,
                "owner": owner,
                "put": {path: text for path, text in found.items() if files.get(path) != text},
                "removed": sorted(set(files) - set(found)),
            }
            yield f"artifact-{story}", _case(description, given, {"files": files})


def _case(description: str, given: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    expect = outcome("artifact", {"files": files_of(given, base), "owner": given["owner"]})
    return {"description": description, "expect": expect, "input": given, "kind": "artifact"}


def _files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}
