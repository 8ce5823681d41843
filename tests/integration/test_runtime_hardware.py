"""A whole protected run at level `cpu-tee`, on a machine of SEV-SNP whose keys only these tests trust."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from glasshouse.attestation.roots.collateral import EMPTY
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.sev_snp.sev_snp_evidence import appraise_report
from glasshouse.errors import Code, ExitCode, VerificationError
from glasshouse.evidence.bundle import Bundle
from glasshouse.jobs.verify.verdict import Status, Verdict, verify_bundle
from glasshouse.wire.policy import Assurance
from simulators.local_broker import LocalBroker
from simulators.snp_machine import SnpMachine, report_folder
from tools.runtime_world import CANARY, AgentProcess, Broken, World, nothing_in_the_clear, script_world

AGENT = Path(__file__).resolve().parents[1] / "tools" / "agent_of_snp.py"
SCRIPT = "from pathlib import Path\nopen(Path('outputs', 'model'), 'wb').write(open('data.csv', 'rb').read()[::-1])\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SnpMachine]:
    """A machine whose keys the gate of this process pins, and those who verify receipts in it."""
    made = SnpMachine(now=datetime.now(UTC).replace(microsecond=0))
    monkeypatch.setitem(appraise_report.__kwdefaults__, "roots", made.roots)
    (tmp_path / "sev-guest").touch()
    with report_folder(made, tmp_path / "report", "glasshouse"):
        yield made


def world_of(machine: SnpMachine, folder: Path, broker: LocalBroker, **policy: object) -> World:
    hardware = HardwarePolicy(sev_snp=machine.policy(**policy))
    broken = Broken(hardware=hardware, collateral=machine.pack())
    return script_world(folder, SCRIPT, {"data.csv": CANARY}, broken=broken, broker=broker)


def started(world: World) -> AgentProcess:
    return world.start(program=(str(AGENT), str(world.folder)))


def judged(agent: AgentProcess, bundle: Bundle) -> Verdict:
    return verify_bundle(bundle.encode(), owner=agent.world.package.owner.public)


def test_a_run_on_a_confidential_machine(tmp_path: Path, machine: SnpMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBroker(tmp_path) as broker, world_of(machine, tmp_path, broker) as world:
        agent = started(world)
        assert agent.wait() == ExitCode.DONE, agent.stderr.read_text()
        assert agent.outputs()["model"] == CANARY[::-1]
        nothing_in_the_clear(agent)
        policy, pack = world.policy, world.broken.collateral
    left = Bundle.parse(agent.receipt())
    assert left.hardware is not None
    assert pack is not None
    # The gate is gone; the owner puts in what the runtime did not have.
    whole = replace(left.hardware, collateral=pack.encode(), policy=policy.to_json())
    verdict = judged(agent, replace(left, hardware=whole))
    assert verdict.status is Status.GOOD, verdict
    assert verdict.chain.ear is not None
    assert verdict.chain.ear.assurance is Assurance.CPU_TEE
    for lacking in (left.hardware, None):
        assert judged(agent, replace(left, hardware=lacking)).status is Status.INCOMPLETE
    for forged in ({"collateral": EMPTY.encode()}, {"blobs": (whole.blobs[0].replace(b"A", b"B", 1),)}):
        with pytest.raises(VerificationError) as refused:
            judged(agent, replace(left, hardware=replace(whole, **forged)))
        assert refused.value.code is Code.CHAIN_EVIDENCE
    monkeypatch.undo()  # by AMD's own keys this machine is none
    with pytest.raises(VerificationError, match="pinned key of AMD's"):
        judged(agent, replace(left, hardware=whole))


def test_a_machine_that_was_launched_with_something_else_gets_no_key(tmp_path: Path, machine: SnpMachine) -> None:
    with LocalBroker(tmp_path) as broker, world_of(machine, tmp_path, broker, measurements=["aa" * 48]) as world:
        agent = started(world)
        assert agent.wait() == ExitCode.REFUSED, agent.stderr.read_text()
        assert Code.REFERENCE_VALUE in agent.stderr.read_text()
        nothing_in_the_clear(agent)
