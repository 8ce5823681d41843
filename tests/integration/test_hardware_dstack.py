"""Whole runs at the level `cpu-tee`: dstack's agent and a processor are simulated, gate, agent and receipt are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from glasshouse.attestation.roots.dstack.dstack_events import DstackBlob
from glasshouse.attestation.roots.tdx import tdx_evidence
from glasshouse.attestation.roots.tdx.tdx_evidence import INTEL_ROOT_SHA256  # as it is in the product
from glasshouse.errors import Code, VerificationError
from glasshouse.evidence.bundle import Bundle
from glasshouse.jobs.define.hardware_file import read_hardware
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.kept_pack import keep_pack
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.references.hardware_draft import draft_of, look_at_hardware
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.jobs.verify.verdict import Status, verify_bundle
from glasshouse.runtime.roots.dstack import DstackCollector
from glasshouse.wire.states import Outcome
from simulators.command_line import Shell
from simulators.dstack_agent import COMPOSE_HASH, KEY_PROVIDER, dstack_agent, launched
from simulators.tdx_machine import EVALUATION, FMSPC, TdxMachine
from tools.machine_with_socket import MachineWithSocket, trusting
from tools.run_on import run_on


@dataclass(frozen=True)
class DstackOwner:
    """An owner with a job at the level `cpu-tee`, and a machine of dstack's."""

    shell: Shell
    machine: TdxMachine
    place: MachineWithSocket

    @property
    def home(self) -> Home:
        return Home(path=self.shell.home)

    @property
    def policy_file(self) -> Path:
        return self.shell.folder / "dstack.toml"

    def policy(self) -> None:
        """Write the policy that takes the machine as it is now."""
        image = self.machine.registers.image()
        lines = ["[dstack]", 'chain = "workload"', f'compose_hashes = ["{COMPOSE_HASH.hex()}"]']
        lines += [f'fmspcs = ["{FMSPC}"]', f"key_providers = ['{KEY_PROVIDER}']", f"tcb_evaluation = {EVALUATION}"]
        lines += ["[[dstack.images]]", f'rtmr0 = ["{image.pop("rtmr0")[0]}"]']
        lines += [f'{name} = "{value}"' for name, value in image.items()]
        self.policy_file.write_text("\n".join(lines))

    def verify(self, bundle: Bundle) -> Status:
        """Verify with nothing but the owner's public key; a failure is raised."""
        return verify_bundle(bundle.encode(), owner=read_public(self.home.owner_public).signing).status


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DstackOwner]:
    folder = tmp_path_factory.mktemp("owner")
    socket = tmp_path_factory.mktemp("run") / "dstack.sock"
    machine, place = TdxMachine(now=datetime.now(UTC)), MachineWithSocket(DstackCollector, (str(socket),))
    made = DstackOwner(Shell(folder), machine, place)
    assert made.shell.ask("init").code == 0
    keep_pack(made.home, machine.pack())
    made.policy()
    job = made.shell.job("job", "5")
    policy = 'assurance = "cpu-tee"\nhardware = "dstack.toml"'
    job.write_text(job.read_text().replace('assurance = "software"', policy))
    with (
        dstack_agent(socket, machine, launched()),
        trusting(tdx_evidence, "INTEL_ROOT_SHA256", machine.root_sha256, place),
    ):
        yield made
    assert made.shell.left_running() == []


@pytest.fixture(scope="module")
def ended(owner: DstackOwner) -> tuple[RunFolder, Conclusion]:
    return run_on(owner.shell, "job", owner.place)


def test_a_run_on_dstack_is_good_at_the_level_cpu_tee(owner: DstackOwner, ended: tuple[RunFolder, Conclusion]) -> None:
    folder, conclusion = ended
    log = folder.runtime_log.read_text()
    assert (conclusion.outcome, conclusion.code, conclusion.verdict) == (Outcome.COMPLETED, None, "good"), log
    bundle = Bundle.parse(folder.receipt.read_bytes())
    assert owner.verify(bundle) is Status.GOOD
    assert bundle.hardware is not None
    (blob,) = bundle.hardware.blobs
    assert DstackBlob.parse(blob).events == tuple(launched())


def test_its_receipt_is_nothing_to_who_trusts_intel_alone(
    owner: DstackOwner, ended: tuple[RunFolder, Conclusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tdx_evidence, "INTEL_ROOT_SHA256", INTEL_ROOT_SHA256)
    with pytest.raises(VerificationError) as refused:
        owner.verify(Bundle.parse(ended[0].receipt.read_bytes()))
    assert refused.value.code is Code.CHAIN_EVIDENCE


def test_events_that_are_altered_later_are_not_genuine(owner: DstackOwner, ended: tuple[RunFolder, Conclusion]) -> None:
    bundle = Bundle.parse(ended[0].receipt.read_bytes())
    assert bundle.hardware is not None
    read = DstackBlob.parse(bundle.hardware.blobs[0])
    other = replace(read, events=read.events[:-1]).encode()
    with pytest.raises(VerificationError) as refused:
        owner.verify(replace(bundle, hardware=replace(bundle.hardware, blobs=(other,))))
    assert refused.value.code is Code.CHAIN_EVIDENCE


def test_a_host_that_starts_another_image_gets_no_key(owner: DstackOwner) -> None:
    """As a development image, into which everyone logs in; its socket answers as the other's."""
    listed = owner.machine.registers.rtmr2
    owner.machine.registers.rtmr2 = b"\xde" * 48
    try:
        folder, conclusion = run_on(owner.shell, "job", owner.place)
    finally:
        owner.machine.registers.rtmr2 = listed
    assert (conclusion.outcome, conclusion.code) == (Outcome.REFUSED, Code.REFERENCE_VALUE)
    assert f"rtmr2 of this machine has a value that the policy does not list: it shows {'de' * 48}" in (
        folder.runtime_log.read_text()
    )
    assert not list((folder.out / "outputs").iterdir())


def test_a_draft_of_a_policy_has_what_the_machine_shows(owner: DstackOwner, tmp_path: Path) -> None:
    (tmp_path / "draft.toml").write_text(draft_of(look_at_hardware()).replace("# chain = ", "chain = "))
    drafted, written = (read_hardware(path).dstack for path in (tmp_path / "draft.toml", owner.policy_file))
    assert drafted is not None
    assert written is not None
    assert replace(drafted, tcb_evaluation=EVALUATION) == written
