"""A node of dstack's with NVIDIA's GPUs and switches, and one of SEV-SNP, that show themselves to a live gate.

What a gate pins are the makers' own roots; a test puts these machines' in their place, in its own process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from glasshouse.attestation.claims import Claims, Gpu, composite
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.dstack.dstack_events import DstackEvent
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.nvidia import nvidia_evidence
from glasshouse.attestation.roots.sev_snp import sev_snp_evidence
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import SevSnpBlob
from glasshouse.attestation.roots.tdx import tdx_evidence
from glasshouse.broker.client.owner_client import Reply
from glasshouse.handshake.launch import LaunchFile
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.runtime_side import with_blobs
from glasshouse.runtime.roots.dstack import blob_of
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.wire.crypto import sha256
from glasshouse.wire.policy import Assurance
from simulators.dstack_agent import COMPOSE_HASH, KEY_PROVIDER, answer, launched
from simulators.nvidia_machine import DRIVER, Authority, NvidiaMachine
from simulators.snp_machine import SnpMachine
from simulators.tdx_machine import EVALUATION, FMSPC, TdxMachine

__all__ = ["ConfidentialNode", "SnpNode", "Visit", "trusted"]


class _Gpus(NvidiaMachine):
    """GPUs about which NVIDIA answers now."""

    def answer(self, about: Authority, issuer: Authority, **terms: Any) -> bytes:
        now = datetime.now(UTC)
        return super().answer(
            about, issuer, **{"at": now - timedelta(hours=1), "until": now + timedelta(days=1), **terms}
        )


@dataclass(kw_only=True)
class ConfidentialNode:
    """Eight GPUs, four switches, and a machine of TDX around them."""

    cpu: TdxMachine = field(default_factory=lambda: TdxMachine(now=datetime.now(UTC)))
    gpus: NvidiaMachine = field(default_factory=lambda: _Gpus(gpus=8, switches=4))

    @property
    def policy(self) -> HardwarePolicy:
        """A policy that takes this node."""
        terms = {
            "chain": "workload",
            "compose_hashes": [COMPOSE_HASH.hex()],
            "fmspcs": [FMSPC],
            "images": [TdxMachine(now=self.cpu.now).registers.image()],
            "key_providers": [KEY_PROVIDER],
            "tcb_evaluation": EVALUATION,
        }
        return replace(HardwarePolicy.from_json({"dstack": terms}), nvidia=self.gpus.policy(device_ocsp=False).nvidia)

    def pack(self) -> Pack:
        """What its makers publish."""
        return Pack(items=tuple(sorted((*self.cpu.pack().items, *self.gpus.pack().items), key=lambda item: item.name)))


@dataclass(kw_only=True)
class Visit:
    """A runtime on such a node, between its challenge and its evidence.

    Attributes:
        quoted: what the processor binds of the GPUs, if not what is sent.
        nonce: what the GPUs were asked with, if not with this run's.
    """

    node: ConfidentialNode
    actor: Actor
    challenge: Challenge
    events: Sequence[DstackEvent] = field(default_factory=launched)
    gpus: Iterable[tuple[bytes, list[bytes]]] | None = None
    switches: Iterable[tuple[bytes, list[bytes]]] | None = None
    devtools: bool = False
    quoted: bytes | None = None
    nonce: bytes | None = None
    spoil: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer

    @classmethod
    def begin(cls, node: ConfidentialNode, owner: Owner, launch: LaunchFile | None = None) -> Visit:
        """Ask for a challenge."""
        actor = Actor.enter(owner, launch)
        return cls(node=node, actor=actor, challenge=actor.challenge())

    def __post_init__(self) -> None:
        seen = tuple(
            Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, driver=DRIVER, uuid=f"GPU-{number}")
            for number in range(8)
        )
        claims = self.actor.claims(self.challenge)
        self.claims: Claims = replace(claims, gpus=seen, assurance=Assurance.GPU_TEE)

    @property
    def bound(self) -> Bound:
        """What its evidence has to be bound to, but for the GPUs'."""
        return Bound(composite=composite(self.claims), gpus=self.claims.gpus)

    def report(self, device: Any) -> tuple[bytes, list[bytes]]:
        """Return a device's report for this run."""
        return self.node.gpus.report(device, self.bound.gpu_nonce)

    def send(self) -> tuple[Reply, bytes]:
        """Send the evidence; return the answer, and the envelope."""
        nonce = self.nonce or self.bound.gpu_nonce
        gpus = self.node.gpus.blob(gpus=self.gpus, switches=self.switches, devtools=self.devtools, nonce=nonce)
        bound = replace(self.bound, gpus_sha256=sha256(gpus) if self.quoted is None else self.quoted)
        answered = self.spoil(answer(self.node.cpu, self.events, bound.report_data))
        cpu = blob_of(json.dumps(answered).encode())
        envelope = self.actor.sign(self.claims, [Blob.of("dstack", cpu), Blob.of("nvidia", gpus)])
        return self.actor.send(with_blobs(envelope, [cpu, gpus])), envelope


@dataclass(kw_only=True)
class SnpNode:
    """A machine of SEV-SNP."""

    cpu: SnpMachine = field(default_factory=lambda: SnpMachine(now=datetime.now(UTC)))

    def send(self, owner: Owner, **report: Any) -> Reply:
        """Attest with a report of which some fields are others."""
        actor = Actor.enter(owner)
        claims = replace(actor.claims(actor.challenge()), assurance=Assurance.CPU_TEE)
        data = self.cpu.report(Bound(composite=composite(claims)).report_data, **report)
        blob = SevSnpBlob(certificate=self.cpu.certificate, report=data).encode()
        return actor.send(with_blobs(actor.sign(claims, [Blob.of("sev-snp", blob)]), [blob]))


def trusted(monkeypatch: pytest.MonkeyPatch, node: ConfidentialNode | SnpNode) -> None:
    """Put a node's roots in the place of the makers', in this process."""
    if isinstance(node, SnpNode):
        monkeypatch.setitem(sev_snp_evidence.appraise_report.__kwdefaults__, "roots", node.cpu.roots)
    else:
        monkeypatch.setattr(tdx_evidence, "INTEL_ROOT_SHA256", node.cpu.root_sha256)
        monkeypatch.setattr(nvidia_evidence, "Judging", partial(nvidia_evidence.Judging, **node.gpus.roots))
