"""Whole runs on Confidential Space: launcher and Google's service are simulated, gate, agent and receipt are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pytest

from glasshouse.attestation.roots.gcp import gcp_evidence
from glasshouse.attestation.roots.gcp.gcp_evidence import GOOGLE_ROOT_SHA256  # as it is in the product
from glasshouse.errors import Code, VerificationError
from glasshouse.evidence.bundle import Bundle
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.jobs.verify.verdict import Status, Verdict, verify_bundle
from glasshouse.runtime.roots.gcp import GcpCollector
from glasshouse.wire.states import Outcome
from simulators.command_line import Shell
from simulators.confidential_space import IMAGE_DIGEST, ConfidentialSpace
from tools.machine_with_socket import MachineWithSocket, trusting
from tools.run_on import run_on


@dataclass(frozen=True)
class SpaceOwner:
    """An owner with a job at the level `tpm` who takes Google's word, and a machine of Google's."""

    shell: Shell
    space: ConfidentialSpace
    place: MachineWithSocket

    def verify(self, bundle: Bundle) -> Verdict:
        """Verify with nothing but the owner's public key; a failure is raised."""
        return verify_bundle(bundle.encode(), owner=read_public(Home(path=self.shell.home).owner_public).signing)


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpaceOwner]:
    folder = tmp_path_factory.mktemp("owner")
    socket = tmp_path_factory.mktemp("run") / "teeserver.sock"
    space, place = ConfidentialSpace(now=datetime.now(UTC)), MachineWithSocket(GcpCollector, str(socket))
    made = SpaceOwner(Shell(folder), space, place)
    assert made.shell.ask("init").code == 0
    lines = ["[gcp]", "accept_issuers_word = true", 'chain = "workload"', 'hwmodels = ["GCP_INTEL_TDX"]']
    lines += [f'image_digests = ["{IMAGE_DIGEST.hex()}"]', "least_swversion = 250800"]
    (folder / "space.toml").write_text("\n".join(lines))
    job = made.shell.job("job", "5")
    job.write_text(job.read_text().replace('"software"', '"tpm"\nhardware = "space.toml"'))
    with space.launcher(socket), trusting(gcp_evidence, "GOOGLE_ROOT_SHA256", space.root_sha256, place):
        yield made
    assert made.shell.left_running() == []


@pytest.fixture(scope="module")
def ended(owner: SpaceOwner) -> tuple[RunFolder, Conclusion]:
    return run_on(owner.shell, "job", owner.place)


def test_a_run_on_confidential_space_is_good_and_says_whose_word_it_is(
    owner: SpaceOwner, ended: tuple[RunFolder, Conclusion]
) -> None:
    folder, conclusion = ended
    log = folder.runtime_log.read_text()
    assert (conclusion.outcome, conclusion.code, conclusion.verdict) == (Outcome.COMPLETED, None, "good"), log
    bundle = Bundle.parse(folder.receipt.read_bytes())
    verdict = owner.verify(bundle)
    assert verdict.status is Status.GOOD
    assert verdict.to_json()["attestation"] == "warning"
    assert verdict.proves in verdict.sentence
    assert "Google's word about Google's machine" in verdict.proves
    assert "whose TPM the policy trusts" not in verdict.sentence
    said = dict(verdict.links)["hardware"]
    assert said == "gcp, appraised again here; all of it is Google's word about Google's machine"


def test_its_receipt_is_nothing_without_google_or_with_another_token(
    owner: SpaceOwner, ended: tuple[RunFolder, Conclusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.parse(ended[0].receipt.read_bytes())
    assert bundle.hardware is not None
    other = replace(bundle.hardware, blobs=(owner.space.token("0" * 64),))
    for root, given in ((owner.space.root_sha256, replace(bundle, hardware=other)), (GOOGLE_ROOT_SHA256, bundle)):
        monkeypatch.setattr(gcp_evidence, "GOOGLE_ROOT_SHA256", root)
        with pytest.raises(VerificationError) as refused:
            owner.verify(given)
        assert refused.value.code is Code.CHAIN_EVIDENCE


def test_an_operator_who_starts_the_image_for_debugging_gets_no_key(owner: SpaceOwner) -> None:
    """Who runs it may log in there, and become root."""
    owner.space.said["dbgstat"] = "enabled"
    try:
        folder, conclusion = run_on(owner.shell, "job", owner.place)
    finally:
        owner.space.said.clear()
    assert (conclusion.outcome, conclusion.code) == (Outcome.REFUSED, Code.HARDWARE_DEBUG)
    assert not list((folder.out / "outputs").iterdir())
