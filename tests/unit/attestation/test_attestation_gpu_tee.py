"""The level `gpu-tee`: that GPUs are this machine's is the word of measured code, which the processor binds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from glasshouse.attestation.claims import Claims, Gpu, composite
from glasshouse.attestation.evidence import Evidence
from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots import root_table
from glasshouse.attestation.roots.appraised import Appraised, Blob
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.dstack import dstack_evidence
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.nvidia import nvidia_evidence
from glasshouse.errors import Code
from glasshouse.runtime.roots.dstack import blob_of
from glasshouse.wire.policy import Assurance
from simulators.dstack_agent import COMPOSE_HASH, KEY_PROVIDER, answer, launched
from simulators.key_release_world import World
from simulators.nvidia_machine import DRIVER, NvidiaMachine
from simulators.tdx_machine import EVALUATION, FMSPC, TdxMachine

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
NOW_US = int(NOW.timestamp()) * 1_000_000


class Node:
    """A confidential machine with confidential GPUs, whose roots the gate of these tests pins."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gpus, self.processor = NvidiaMachine(gpus=2), TdxMachine(now=NOW)
        gpu = Gpu(name="NVIDIA H100", memory_bytes=1, driver=DRIVER, uuid="GPU-1")
        self.claims: Claims = World().claims(assurance=Assurance.GPU_TEE, gpus=(gpu, gpu))
        self.bound = Bound(composite=composite(self.claims), gpus=self.claims.gpus)
        dstack = {
            "chain": "workload",
            "compose_hashes": [COMPOSE_HASH.hex()],
            "fmspcs": [FMSPC],
            "images": [self.processor.registers.image()],
            "key_providers": [KEY_PROVIDER],
            "tcb_evaluation": EVALUATION,
        }
        self.policy = HardwarePolicy.from_json({"dstack": dstack, "nvidia": self.gpus.policy().to_json()["nvidia"]})
        self.pack = Pack(
            items=tuple(sorted((*self.gpus.pack().items, *self.processor.pack().items), key=lambda item: item.name))
        )
        patch.setattr(nvidia_evidence, "appraise", self._appraise_gpus)
        patch.setattr(dstack_evidence, "appraise", self._appraise_processor)

    def _appraise_gpus(self, blob: bytes, *, bound: Bound, **terms: Any) -> Appraised:
        return nvidia_evidence.appraise_by(blob, bound, nvidia_evidence.Judging(**terms, **self.gpus.roots))

    def _appraise_processor(self, blob: bytes, *, bound: Bound, **terms: Any) -> Appraised:
        return dstack_evidence.appraise_blob(blob, bound.report_data, **terms, root_sha256=self.processor.root_sha256)

    def gpus_blob(self, **changed: Any) -> bytes:
        return self.gpus.blob(nonce=self.bound.gpu_nonce, **changed)

    def processors_blob(self, gpus: bytes | None) -> bytes:
        blobs = {} if gpus is None else {"nvidia": gpus}
        bound = root_table.bound_of(self._evidence(blobs), blobs, ak=None, secret=None)
        return blob_of(json.dumps(answer(self.processor, launched(), bound.report_data)).encode())

    def _evidence(self, blobs: Mapping[str, bytes]) -> Evidence:
        listed = tuple(Blob.of(kind, blobs[kind]) for kind in sorted(blobs))
        return Evidence(claims=self.claims, composite=composite(self.claims), hardware=listed)

    def appraise(self, blobs: Mapping[str, bytes]) -> dict[str, Appraised]:
        evidence = self._evidence(blobs)
        return root_table.check_12_hardware(
            evidence,
            blobs,
            bound=root_table.bound_of(evidence, blobs, ak=None, secret=None),
            now_us=NOW_US,
            collateral=self.pack,
            policy=self.policy,
        )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def refused(node: Node, code: Code, blobs: Mapping[str, bytes]) -> None:
    with pytest.raises(CheckFailedError) as error:
        node.appraise(blobs)
    assert (error.value.check, error.value.code) == ("12", code), error.value


def test_a_processor_that_binds_its_gpus_is_accepted_with_them(node: Node) -> None:
    gpus = node.gpus_blob()
    found = node.appraise({"dstack": node.processors_blob(gpus), "nvidia": gpus})
    assert {kind: each.vector["hardware"] for kind, each in found.items()} == {"dstack": 2, "nvidia": 2}


def test_gpus_of_another_machine_with_the_right_nonce_are_refused(node: Node) -> None:
    """A host relays the nonce to GPUs elsewhere: each report is genuine, and no signature says where they are."""
    elsewhere = node.gpus_blob()  # signed anew: other bytes, and all of it right
    refused(node, Code.HARDWARE_BINDING, {"dstack": node.processors_blob(node.gpus_blob()), "nvidia": elsewhere})
    refused(node, Code.HARDWARE_BINDING, {"dstack": node.processors_blob(None), "nvidia": elsewhere})


def test_neither_stands_for_both(node: Node) -> None:
    gpus = node.gpus_blob()
    refused(node, Code.HARDWARE_MISSING, {"dstack": node.processors_blob(None)})
    refused(node, Code.HARDWARE_MISSING, {"nvidia": gpus})


def test_gpus_that_answered_another_run_are_refused(node: Node) -> None:
    gpus = node.gpus.blob(nonce=bytes(32))
    refused(node, Code.HARDWARE_BINDING, {"dstack": node.processors_blob(gpus), "nvidia": gpus})
