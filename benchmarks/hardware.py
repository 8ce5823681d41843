"""What appraising a large node costs the gate: ``make bench-hardware``.

8 GPUs behind 4 switches, a quote of TDX and an event log of 128 KiB, of simulated machines (`tests/simulators`). Judged
is the processor time of one appraisal where nothing was kept, neither the pack's manifests and answers nor
certificates, and the size of the message with the largest envelope; beside it, the time for a node that is new by a
pack that is not, and for one that was seen before.
"""

from __future__ import annotations

import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.kept import Bar, finish, kept, options
from glasshouse.attestation.evidence import MAX_EVIDENCE_BYTES
from glasshouse.attestation.roots.appraised import EarStatus
from glasshouse.attestation.roots.dstack import dstack_evidence
from glasshouse.attestation.roots.dstack.dstack_events import DstackEvent
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.nvidia import nvidia_certificates, nvidia_evidence, reference_manifest
from glasshouse.runtime.roots.dstack import blob_of
from glasshouse.wire.crypto import sha256

TESTS = Path(__file__).resolve().parents[1] / "tests"
NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
NOW_US = int(NOW.timestamp()) * 1_000_000
ROUNDS = 20
LOG_BYTES = 128 * 1024
EVENT_BYTES = 320
BARS = {"first_ms": Bar(60.0), "message_kib": Bar(416.0)}


def main() -> int:
    output = options(__doc__).parse_args().output
    sys.path.insert(0, str(TESTS))
    gpus, tdx, dstack = (
        importlib.import_module(f"simulators.{name}") for name in ("nvidia_machine", "tdx_machine", "dstack_agent")
    )
    times: dict[str, list[float]] = {"first": [], "new_node": [], "same_node": []}
    sizes: dict[str, int] = {}
    for _ in range(ROUNDS):
        appraise, sizes = _prepared(gpus, tdx, dstack)
        for name, forget in (("first", _forget), ("new_node", _forget_certificates), ("same_node", lambda: None)):
            forget()
            times[name].append(_cpu_ms(appraise))
    message = sum(sizes.values()) + MAX_EVIDENCE_BYTES
    numbers = {f"{name}_ms": statistics.median(found) for name, found in times.items()}
    numbers |= {f"{name}_max_ms": max(found) for name, found in times.items()} | {"message_kib": message / 1024}
    return finish(kept(numbers, BARS, cpu_ms=times, blob_bytes=sizes, log_bytes=LOG_BYTES), output)


def _prepared(gpus: Any, tdx: Any, dstack: Any) -> tuple[Callable[[], None], dict[str, int]]:
    """Make a node with its evidence and collateral; return its appraisal, and how large its blobs are."""
    node, host = gpus.NvidiaMachine(gpus=8, switches=4), tdx.TdxMachine(now=NOW)
    bound, pack, policy = node.bound(), node.pack(), node.policy()
    nvidia = node.blob()
    bound = replace(bound, gpus_sha256=sha256(nvidia))
    events = [
        *dstack.launched(),
        *(
            DstackEvent(name=f"event {number}", payload=bytes(EVENT_BYTES), version=1)
            for number in range(LOG_BYTES // EVENT_BYTES)
        ),
    ]
    processor = blob_of(json.dumps(dstack.answer(host, events, bound.report_data)).encode())
    terms = HardwarePolicy.from_json(
        {
            "dstack": {
                "chain": "workload",
                "compose_hashes": [dstack.COMPOSE_HASH.hex()],
                "fmspcs": [tdx.FMSPC],
                "images": [host.registers.image()],
                "key_providers": [dstack.KEY_PROVIDER],
                "tcb_evaluation": tdx.EVALUATION,
            }
        }
    )
    judging = nvidia_evidence.Judging(now_us=NOW_US, collateral=pack, policy=policy, **node.roots)
    collateral, root = host.pack(), host.root_sha256

    def appraise() -> None:
        assert bound.gpus_sha256 == sha256(nvidia)
        sha256(processor)
        found = nvidia_evidence.appraise_by(nvidia, bound, judging)
        again = dstack_evidence.appraise_blob(
            processor, bound.report_data, now_us=NOW_US, collateral=collateral, policy=terms, root_sha256=root
        )
        assert found.status is again.status is EarStatus.AFFIRMING

    return appraise, {"dstack": len(processor), "nvidia": len(nvidia)}


def _forget() -> None:
    reference_manifest.manifest_of.cache_clear()
    nvidia_certificates._answer.cache_clear()
    _forget_certificates()


def _forget_certificates() -> None:
    nvidia_certificates._check_issued.cache_clear()
    nvidia_certificates.read_certificate.cache_clear()


def _cpu_ms(work: Callable[[], None]) -> float:
    gc.collect()
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1000


if __name__ == "__main__":
    sys.exit(main())
