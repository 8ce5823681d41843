"""Confidential machines at a live gate: a good one gets the key, and each that is not as its owner said its refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from glasshouse.attestation.roots.dstack.dstack_events import DstackEvent
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.errors import Code
from glasshouse.tamper.stage import Owner
from simulators.confidential_node import ConfidentialNode, SnpNode, Visit, trusted
from simulators.dstack_agent import COMPOSE_HASH, launched
from simulators.local_broker import LocalBroker

pytest.importorskip("lxml")
pytest.importorskip("dcap_qvl")


@pytest.fixture(scope="module")
def whole() -> ConfidentialNode:
    return ConfidentialNode()


@pytest.fixture
def node(whole: ConfidentialNode, monkeypatch: pytest.MonkeyPatch) -> ConfidentialNode:
    """A node whose GPUs are those of all stories, and whose processor is its own."""
    made = replace(whole, cpu=ConfidentialNode.__dataclass_fields__["cpu"].default_factory())
    trusted(monkeypatch, made)
    monkeypatch.setattr(made.gpus, "revoked", {})
    return made


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    with LocalBroker(tmp_path) as running:
        yield running


def owner_of(broker: LocalBroker, node: ConfidentialNode, releases: int = 1) -> Owner:
    """Return an owner whose policy takes this node, and who has fetched what its makers publish."""
    owner = Owner(broker, releases=releases, hardware=node.policy)
    owner.client().put_collateral(node.pack(), owner.signing.public)
    return owner


def test_a_node_of_eight_gpus_on_dstack_gets_the_key_at_gpu_tee(broker: LocalBroker, node: ConfidentialNode) -> None:
    owner = owner_of(broker, node)
    visit = Visit.begin(node, owner)
    reply, envelope = visit.send()
    assert visit.actor.open(reply.content(), visit.challenge, envelope) == owner.package_key
    assert owner.releases() == 1


def test_a_gpu_does_not_count_for_two_machines_of_a_group(broker: LocalBroker, node: ConfidentialNode) -> None:
    """A host relays what the second machine asks its GPUs to those of the first."""
    owner = owner_of(broker, node, releases=2)
    visits = [Visit.begin(node, owner, launch) for launch in owner.group(2)]
    first, second = (visit.send()[0] for visit in visits)
    assert (first.status, second.problem().code) == (202, Code.GPU_COUNT)
    assert broker.rows("SELECT state, culprit, code FROM groups") == [("refused", 1, "gpu-count")]
    assert owner.releases() == 0


def older(visit: Visit) -> None:
    visit.node.cpu.status = "OutOfDate"


def advised(visit: Visit) -> None:
    visit.node.cpu.advisories = ("INTEL-SA-00615",)


def revoked(visit: Visit) -> None:
    visit.node.cpu.revoked = (0,)


def stale(visit: Visit) -> None:
    visit.node.cpu.now -= timedelta(days=40)


def gpu_revoked(visit: Visit) -> None:
    gpus = visit.node.gpus
    gpus.revoked[gpus.provisioner.der] = x509.ReasonFlags.key_compromise


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (older, Code.HARDWARE_TCB),
        (advised, Code.HARDWARE_TCB),
        (revoked, Code.HARDWARE_REVOKED),
        (stale, Code.COLLATERAL_EXPIRED),
        (gpu_revoked, Code.HARDWARE_REVOKED),
    ],
)
def test_what_its_makers_say_of_a_machine_is_heard(
    broker: LocalBroker, node: ConfidentialNode, what: Callable[[Visit], None], code: Code
) -> None:
    """Older firmware, an advisory, a certificate that is revoked, lists that are too old."""
    owner = Owner(broker, hardware=node.policy)
    visit = Visit.begin(node, owner)
    what(visit)
    owner.client().put_collateral(node.pack(), owner.signing.public)
    assert_refused(visit, owner, code)


def test_without_what_its_makers_publish_nothing_is_released(broker: LocalBroker, node: ConfidentialNode) -> None:
    owner = Owner(broker, hardware=node.policy)
    assert_refused(Visit.begin(node, owner), owner, Code.COLLATERAL_MISSING)


def debugged(visit: Visit) -> None:
    visit.node.cpu.registers.attributes = (1 << 28 | 1).to_bytes(8, "little")


def another_kernel(visit: Visit) -> None:
    visit.node.cpu.registers.rtmr1 = b"\x77" * 48


def developed(visit: Visit) -> None:
    visit.devtools = True


def swapped(visit: Visit) -> None:
    """One GPU is of another node, genuine and in the right mode."""
    elsewhere = visit.node.gpus.made_device("a GPU of another node")
    devices = [elsewhere, *visit.node.gpus.gpus[1:]]
    visit.gpus = [visit.report(device) for device in devices]


def seven(visit: Visit) -> None:
    visit.gpus = [visit.report(device) for device in visit.node.gpus.gpus[:7]]


def twice(visit: Visit) -> None:
    devices = visit.node.gpus.gpus
    visit.gpus = [visit.report(device) for device in (*devices[:7], devices[0])]


def three_switches(visit: Visit) -> None:
    visit.switches = [visit.report(device) for device in visit.node.gpus.switches[:3]]


def earlier_gpus(visit: Visit) -> None:
    visit.nonce = bytes(32)


def gpus_put_in_place(visit: Visit) -> None:
    """The processor's report is genuine and of this run, and made before the GPUs' evidence was exchanged."""
    visit.quoted = bytes(32)


def altered_event(visit: Visit) -> None:
    def spoil(answered: dict[str, Any]) -> dict[str, Any]:
        log = json.loads(answered["event_log"])
        for event in log:
            if event["event"] == "compose-hash":
                event["event_payload"] = "00" * 32
        return {**answered, "event_log": json.dumps(log)}

    visit.spoil = spoil


def behind_the_marker(visit: Visit) -> None:
    """Another compose file was launched; what it started writes the listed one's hash behind the launcher's events."""
    other = [replace(event, payload=bytes(32)) if event.name == "compose-hash" else event for event in launched()]
    visit.events = [*other, DstackEvent(name="compose-hash", payload=COMPOSE_HASH, version=1)]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (debugged, Code.HARDWARE_DEBUG),
        (another_kernel, Code.REFERENCE_VALUE),
        (developed, Code.HARDWARE_DEBUG),
        (swapped, Code.GPU_TOPOLOGY),
        (seven, Code.GPU_COUNT),
        (twice, Code.GPU_COUNT),
        (three_switches, Code.GPU_COUNT),
        (earlier_gpus, Code.HARDWARE_BINDING),
        (gpus_put_in_place, Code.HARDWARE_BINDING),
        (altered_event, Code.DSTACK_EVENT),
        (behind_the_marker, Code.DSTACK_EVENT),
    ],
)
def test_a_machine_that_is_not_as_its_owner_said_gets_no_key(
    broker: LocalBroker, node: ConfidentialNode, what: Callable[[Visit], None], code: Code
) -> None:
    owner = owner_of(broker, node)
    visit = Visit.begin(node, owner)
    what(visit)
    assert_refused(visit, owner, code)


def assert_refused(visit: Visit, owner: Owner, code: Code) -> None:
    reply, _ = visit.send()
    problem = reply.problem()
    assert (problem.code, problem.check) == (code, "12"), problem
    assert owner.releases() == 0


DEBUG, MIGRATION = 1 << 19, 1 << 18


@pytest.mark.parametrize(
    ("report", "code"),
    [
        ({}, None),
        ({"guest_policy": 1 << 17 | DEBUG}, Code.HARDWARE_DEBUG),
        ({"guest_policy": 1 << 17 | MIGRATION}, Code.SNP_POLICY),
        ({"committed": bytes([9, 0, 0, 0, 0, 0, 23, 84])}, Code.HARDWARE_TCB),  # its boot loader was put back
        ({"vmpl": 1}, Code.SNP_VMPL),
        ({"chip": bytes(64)}, Code.SNP_CHIP),
        ({"measurement": bytes(48)}, Code.REFERENCE_VALUE),
    ],
)
def test_machines_of_sev_snp(
    broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], code: Code | None
) -> None:
    snp = SnpNode()
    trusted(monkeypatch, snp)
    owner = Owner(broker, hardware=HardwarePolicy(sev_snp=snp.cpu.policy()))
    owner.client().put_collateral(snp.cpu.pack(), owner.signing.public)
    reply = snp.send(owner, **report)
    assert (reply.problem().code if reply.status >= 400 else None) == code
    assert owner.releases() == (code is None)
