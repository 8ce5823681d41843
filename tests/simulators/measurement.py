"""A measurement's folder as a harness leaves it: slices of a known truth, and receipts of runs told in memory.

`write` makes an honest one; `reseal` is a forger who has the owner's key and signs whatever lies there now.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from glasshouse.bench.overhead.artifact import (
    ANALYSIS,
    DESIGN,
    PHASE_SLICES,
    RECEIPTS,
    SESSIONS,
    SLICES,
    STATEMENT,
    ArmWork,
    Measurement,
    SessionNote,
    bundle_name,
)
from glasshouse.bench.overhead.design import Arm, Design, Mode
from glasshouse.bench.overhead.facts import STATEMENT_TYPE, Facts, payload_of
from glasshouse.bench.overhead.phases import PhaseSlice
from glasshouse.bench.overhead.slices import Record, SessionEnd, Slice, tree
from glasshouse.bench.overhead.statement import statement_json, write_statement
from glasshouse.errors import FormatError, VerificationError
from glasshouse.evidence.receipt import Receipt
from glasshouse.evidence.results import PACED, Work
from glasshouse.wire import dsse
from glasshouse.wire.canonical import decode, encode
from glasshouse.wire.kdf import sha256
from glasshouse.wire.signing import SigningKey
from simulators.simulate import NO_WARMUP, make_design, run_legs, run_world
from simulators.simulate import World as Machine
from simulators.world import START_US, World

__all__ = [
    "FACTS",
    "OWNER",
    "SessionRun",
    "copy",
    "edit_lines",
    "edit_statement",
    "lines",
    "phase_slices",
    "reseal",
    "small_design",
    "write",
    "write_part",
]

OWNER = World().owner
FACTS = Facts(
    workload={
        "kind": "lora",
        "name": "tiny LoRA",
        "unit": "step",
        "facts": {"batch_size": 4, "dtype": "float32", "deterministic": True},
    },
    system={
        "cpu": "Example CPU @ 2.00GHz",
        "glasshouse": "0.1.0",
        "gpu": None,
        "kernel": "6.1.0",
        "logical_cpus": 2,
        "memory_bytes": 1 << 33,
        "python": "3.12.1",
        "torch": "2.11.0",
        "virtualised": True,
    },
    created_us=START_US + 3_600_000_000,
)
_NUMBERS = {Mode.INTERLEAVED: 1, Mode.NULL: 2, Mode.SEQUENTIAL: 3}


@dataclass
class SessionRun(World):
    """The protected run of one session: its owner, broker and package are those of all, its run is its own."""

    session: str = ""

    def digest(self, label: str) -> bytes:
        own = label in ("id of run", "id of token", "id of deployment", "adapter")
        return super().digest(f"{label} of {self.session}" if own else label)


def small_design(mode: Mode, *, sessions: int = 3, blocks: int = 4) -> Design:
    """Return the design of one part, small enough to be computed again in no time."""
    if mode is Mode.SEQUENTIAL:
        return make_design(3, mode=mode, sessions=2, blocks_per_session=1, guard_steps=0, guard_ns=0, warmup=NO_WARMUP)
    return make_design(_NUMBERS[mode], mode=mode, sessions=sessions, blocks_per_session=blocks, warmup=NO_WARMUP)


def write(
    folder: Path,
    *,
    modes: Sequence[Mode] = (Mode.INTERLEAVED, Mode.NULL, Mode.SEQUENTIAL),
    overhead: float = 0.02,
    null_overhead: float = 0.0,
    phases: int = 4,
    same_weights: bool = True,
    facts: Facts = FACTS,
    sessions: int = 3,
    blocks: int = 4,
    run: Callable[[SessionRun, Callable[[Receipt], Receipt]], bytes] | None = None,
) -> Measurement:
    """Write and sign an honest measurement of a machine with this overhead.

    Args:
        folder: made here.
        modes: the parts to measure.
        overhead, null_overhead: the true log ratio; with the second one the harness itself is biased.
        phases: how many blocks of phases were measured.
        same_weights: whether both arms trained the same.
        facts: about it.
        sessions, blocks: of the interleaved parts.
        run: tells a protected run otherwise than to its good end.
    """
    folder.mkdir()
    for mode in modes:
        design = small_design(mode, sessions=sessions, blocks=blocks)
        machine = Machine(overhead=null_overhead if mode is Mode.NULL else overhead, noise=0.004)
        rng = np.random.default_rng(_NUMBERS[mode])
        records = (
            [record for session in range(design.sessions) for record in run_legs(machine, design, session, rng)]
            if mode is Mode.SEQUENTIAL
            else run_world(machine, design, rng)
        )
        write_part(folder / mode.value, design, records, same_weights=same_weights, run=run)
    if phases:
        lines(folder / PHASE_SLICES, [one.encode() for one in phase_slices(blocks=phases)])
    return write_statement(folder, facts, owner=OWNER)


def write_part(
    folder: Path,
    design: Design,
    records: Sequence[Record],
    *,
    same_weights: bool = True,
    run: Callable[[SessionRun, Callable[[Receipt], Receipt]], bytes] | None = None,
) -> None:
    """Write what a harness leaves of one part."""
    (folder / RECEIPTS).mkdir(parents=True)
    (folder / DESIGN).write_bytes(encode(design.to_json()))
    lines(folder / SLICES, [record.encode() for record in records])
    notes = []
    for end in records:
        if isinstance(end, SessionEnd):
            done = [one.done_after for one in records if isinstance(one, Slice) and one.session == end.session]
            note, bundle = _session(design, end.session, max(done, default=0), same_weights, run)
            notes.append(note)
            if bundle is not None:
                (folder / RECEIPTS / bundle_name(end.session)).write_bytes(bundle)
    lines(folder / SESSIONS, [note.encode() for note in notes])
    if design.mode is Mode.NULL:
        (folder / RECEIPTS).rmdir()


def _session(
    design: Design,
    session: int,
    done: int,
    same_weights: bool,
    run: Callable[[SessionRun, Callable[[Receipt], Receipt]], bytes] | None,
) -> tuple[SessionNote, bytes | None]:
    world = SessionRun(session=f"{design.mode.value} {session}")
    steps = ("attest", "harden", "open", "release", "seal_outputs", "total", "zeroize")
    lifecycle = {step: (number + 1) * 10_000 + session * 100 for number, step in enumerate(steps)}

    def told(receipt: Receipt) -> Receipt:
        work = receipt.work and Work(unit="step", done=done, elapsed_us=5_000_000, stop_reason=PACED)
        return replace(receipt, lifecycle_us=lifecycle, work=work)

    outputs = tuple((one.kind, one.of, one.plain_hmac) for one in world.outputs())
    raw = outputs if same_weights else ((*outputs[0][:2], world.digest("another adapter")), *outputs[1:])
    bundle = None
    if design.mode is not Mode.NULL:
        bundle = run(world, told) if run else world.run(change=told).data
    note = SessionNote(
        session=session,
        raw=ArmWork(done=done, start_ns=900_000_000, outputs=raw),
        protected=ArmWork(done=done, start_ns=1_900_000_000, outputs=outputs),
        lifecycle_us=lifecycle if bundle else None,
        imports_us=1_500_000 if bundle else None,
        bundle_sha256=sha256(bundle) if bundle else None,
    )
    return note, bundle


def phase_slices(*, blocks: int = 4, device: bool = False, **changes: Any) -> list[PhaseSlice]:
    """Return phase slices of a step whose parts are known: 1 ms forward, 2 ms backward, 0.5 ms that no stamp covers."""
    found = []
    now = 0
    for block in range(blocks):
        for position, (arm, stamped) in enumerate((arm, stamped) for arm in Arm for stamped in (True, False)):
            slower = 100_000 if arm is Arm.PROTECTED else 0
            step = 3_500_000 + slower + (35_000 + 1_000 * (block % 2) if stamped else 0)
            phases = {"forward": 100_000_000, "backward": 200_000_000} if stamped else None
            values: dict[str, Any] = {
                "arm": arm,
                "block": block,
                "position": position,
                "stamped": stamped,
                "steps": 100,
                "t0_ns": now + 1000,
                "t1_ns": now + 1000 + 100 * step,
                "phases": phases,
                "cpu_ns": 90 * step,
                "rss_bytes": (200 << 20) + block,
                "device_bytes": (1 << 30) + block if device else None,
                "energy_mj": 25_000 if device else None,
            }
            now = values["t1_ns"]
            found.append(PhaseSlice(**(values | changes)))
    return found


def lines(path: Path, found: Sequence[bytes]) -> None:
    path.write_bytes(b"".join(line + b"\n" for line in found))


# ---- forgers


def edit_lines(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the objects of a file of lines."""
    objects = [json.loads(line) for line in path.read_bytes().splitlines()]
    change(objects)
    lines(path, [encode(one) for one in objects])


def edit_statement(folder: Path, change: Callable[[dict[str, Any]], object], *, key: SigningKey | None = None) -> None:
    """Change what the statement says; with a key it is signed again, without one the old signature stays."""
    path = folder / STATEMENT
    envelope = dsse.Envelope.parse(path.read_bytes(), max_bytes=1 << 24)
    value = json.loads(envelope.payload)
    change(value)
    payload = encode(value)
    signed = dsse.sign(STATEMENT_TYPE, payload, [key]) if key else replace(envelope, payload=payload)
    path.write_bytes(signed.encode())


def reseal(folder: Path) -> None:
    """Sign what lies there now with the owner's own key, computing whatever the files still allow.

    Where they fit each other, everything is computed again, so that only what receipts contradict is left to find;
    where they do not, the old numbers stay and the digests of the files are made to match.
    """
    payload: Any = decode(payload_of((folder / STATEMENT).read_bytes()), max_bytes=1 << 24)
    facts = Facts(**{name: payload[name] for name in ("workload", "system", "created_us", "planted_ppm")})
    try:
        measurement = Measurement.assemble(folder, facts, assurance=payload["assurance"])
    except (FormatError, VerificationError):
        value = {**payload, "parts": [_patched(folder, part) for part in payload["parts"]]}
    else:
        analyses = {}
        for part in measurement.parts:
            data = encode(part.to_json())
            (folder / part.mode.value / ANALYSIS).write_bytes(data)
            analyses[part.mode] = sha256(data)
        phases = None
        if measurement.phases is not None:
            data = encode(measurement.phases.to_json())
            (folder / "phases.json").write_bytes(data)
            phases = sha256(data)
        value = statement_json(measurement, analyses=analyses, phases_sha256=phases)
    (folder / STATEMENT).write_bytes(dsse.sign(STATEMENT_TYPE, encode(value), [OWNER]).encode())


def _patched(folder: Path, part: dict[str, Any]) -> dict[str, Any]:
    place = folder / part["mode"]
    found = dict(part)
    for name, grow in ((SLICES, tree), (SESSIONS, tree)):
        try:
            raw = [_Raw(line) for line in (place / name).read_bytes().splitlines()]
        except OSError:
            continue
        grown = grow(raw)  # type: ignore[operator]
        found[name.removesuffix(".jsonl")] = {"root": grown.root().hex(), "size": len(grown)}
    if (place / DESIGN).is_file():
        found["design"] = json.loads((place / DESIGN).read_bytes())
        found["design_sha256"] = sha256((place / DESIGN).read_bytes()).hex()
    if (place / ANALYSIS).is_file():
        found["analysis_sha256"] = sha256((place / ANALYSIS).read_bytes()).hex()
    return found


@dataclass(frozen=True)
class _Raw:
    """A line that may be no record."""

    line: bytes

    def encode(self) -> bytes:
        return self.line


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
