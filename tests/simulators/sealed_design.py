"""Designs and notes of measurements that no machine took."""

from __future__ import annotations

from typing import Any

from glasshouse.wire.policy import Assurance
from glasshouse_bench.artifact import Attempt, Clock
from glasshouse_bench.design import Design, Exclusions, Kind, Machine, Mode, Padding, Workload

__all__ = ["design", "note"]

MACHINE = Machine(
    cpu="Imagined CPU",
    cpus=2,
    glasshouse="0.1.0",
    gpu=None,
    kernel="Linux 6.1 x86_64",
    memory_bytes=8 << 30,
    python="3.12.1",
    speculation=("spectre_v2 Mitigation Retpolines",),
    torch="2.5.0",
    virtualised=True,
)
COMMITMENT = b"c" * 32


def design(mode: Mode = Mode.INTERLEAVED, **changed: Any) -> Design:
    """Return a design of four sessions of two seconds with steps of about 10 ms."""
    given: dict[str, Any] = {
        "mode": mode,
        "seed": bytes(range(32)),
        "sessions": 4,
        "length_ns": 2 * 10**9,
        "slot_ns": 100 * 10**6,
        "steps": 5,
        "uncounted": 1,
        "warmup_steps": 6,
        "margin_ppm": 10_000,
        "asked_s": 60,
        "exclusions": Exclusions(steal_ppm=50_000),
        "padding": Padding(fixed_bytes=4096, random_bytes=4096),
        "assurance": None if mode is Mode.NULL else Assurance.SOFTWARE,
        "workload": Workload(
            kind=Kind.MLP, name="mlp", commitment=COMMITMENT, deterministic=True, threads=1, cpus=(0, 1)
        ),
        "machine": MACHINE,
        "calibration_sha256": None,
        "created_us": 1_700_000_000_000_000,
    }
    return Design(**{**given, **changed})


def note(session: int, **changed: Any) -> Attempt:
    """Return the note of an attempt of which nothing is known yet."""
    began = Clock(monotonic_ns=10**12, boot_ns=0, real_us=1_700_000_000_000_000)
    return Attempt(**{"session": session, "began": began, **changed})
