"""Whole runs at the level `tpm`: a real software TPM that booted a public log, and what its owner has a year later."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.collateral import EMPTY, Item, Pack
from glasshouse.errors import Code, ExitCode, PlatformError, VerificationError
from glasshouse.evidence.bundle import Bundle, HardwareParts
from glasshouse.jobs.define.hardware_file import read_hardware
from glasshouse.jobs.define.run_hardware import RunHardware
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.kept_pack import keep_pack
from glasshouse.jobs.owner.owner_identity import read_public
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.references.hardware_draft import draft_of, look_at_hardware
from glasshouse.jobs.verify.conclusion import Conclusion, conclude
from glasshouse.jobs.verify.hardware.repeated import check_appraisal
from glasshouse.jobs.verify.run_files import check_group
from glasshouse.jobs.verify.verdict import Status, verify_bundle
from glasshouse.jobs.verify.verify_named import GroupVerdict
from glasshouse.runtime.roots.tpm import TpmCollector
from glasshouse.wire.group import ID_BYTES, Group
from glasshouse.wire.states import Outcome
from simulators.command_line import Shell
from tools.machine import needs_root
from tools.machine_with_tpm import MachineWithTpm
from tools.run_on import run_on
from tools.software_tpm import SoftwareTpm, needs_swtpm, software_tpm

pytestmark = needs_swtpm


@dataclass(frozen=True)
class Owner:
    """An owner, with a job at the level `tpm`, and the machine that it runs on."""

    shell: Shell
    machine: MachineWithTpm

    def policy(self, tpm: SoftwareTpm, **registers: str) -> None:
        """Write the policy that takes a TPM's maker, and the image that it booted but for some registers."""
        found = tpm.policy()
        pem = x509.load_der_x509_certificate(tpm.root).public_bytes(Encoding.PEM)
        (self.shell.folder / "maker.pem").write_bytes(pem)
        values = {name: value.hex() for name, (value,) in found.pcrs.items()} | registers
        lines = ["[tpm]", 'chain = "image"', 'ek_roots = ["maker.pem"]', "[tpm.pcrs]"]
        lines += [f'{name} = ["{value}"]' for name, value in values.items()]
        (self.shell.folder / "machines.toml").write_text("\n".join(lines))

    def job(self, name: str, policy: str = 'assurance = "tpm"\nhardware = "machines.toml"') -> Path:
        path = self.shell.job(name, "5")
        path.write_text(path.read_text().replace('assurance = "software"', policy))
        return path

    def run(self, name: str, machine: MachineWithTpm | None = None) -> tuple[RunFolder, Conclusion]:
        """Run a job on the machine, or on another, to its end."""
        return run_on(self.shell, name, machine or self.machine)


@pytest.fixture(scope="module")
def tpm() -> Iterator[SoftwareTpm]:
    with software_tpm() as made:
        yield made


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory, tpm: SoftwareTpm) -> Iterator[Owner]:
    made = Owner(Shell(tmp_path_factory.mktemp("owner")), MachineWithTpm(tpm))
    assert made.shell.ask("init").code == 0
    with pytest.MonkeyPatch.context() as patch:  # this process looks at the machine before it places anything
        patch.setattr(TpmCollector.__init__, "__defaults__", made.machine.defaults)
        made.policy(tpm)
        made.job("job")
        yield made
    assert made.shell.left_running() == []


@pytest.fixture(scope="module")
def ended(owner: Owner) -> tuple[RunFolder, Conclusion]:
    """A run at the level `tpm`, of an owner who fetched collateral for others too."""
    keep_pack(Home(path=owner.shell.home), Pack(items=(Item(name="amd/crl/Milan", data=b"a list"),)))
    return owner.run("job")


@pytest.fixture
def verify(owner: Owner) -> Callable[[Bundle], Status]:
    """Verify a bundle with nothing but the owner's public key; a failure is raised."""
    public = read_public(Home(path=owner.shell.home).owner_public).signing

    def of(bundle: Bundle) -> Status:
        return verify_bundle(bundle.encode(), owner=public).status

    return of


def test_a_run_at_the_level_tpm_is_good_and_says_what_stands_behind_it(
    owner: Owner, ended: tuple[RunFolder, Conclusion]
) -> None:
    folder, conclusion = ended
    log = folder.runtime_log.read_text()
    assert (conclusion.outcome, conclusion.code, conclusion.verdict) == (Outcome.COMPLETED, None, "good"), log
    shown = owner.shell.ask("verify", folder.run_id, "--json")
    assert shown.code == ExitCode.DONE
    assert (shown.object["assurance"], shown.object["attestation"]) == ("tpm", "affirming")
    assert "whose TPM the policy trusts" in shown.object["verdict"]
    card = owner.shell.ask("card", folder.run_id, "-o", "card.html")
    assert card.code == ExitCode.DONE, card.err
    page = (owner.shell.folder / "card.html").read_text()
    assert "assurance tpm" in page
    assert "assurance software" not in page
    assert "makers" not in page, "no maker signed the key that quoted: that it is a TPM's is the broker's word"
    made = owner.shell.ask("artifact", folder.run_id, "-o", "artifact.json")
    assert made.code == ExitCode.DONE, made.err
    compared = owner.shell.ask("verify", "artifact.json", "--bundle", str(folder.receipt), "--json")
    assert (compared.code, compared.object["assurance"]) == (ExitCode.DONE, "tpm")
    assert "whose TPM the policy trusts" in compared.object["proves"]


@needs_root
def test_its_receipt_is_verified_from_one_file_and_the_owners_key_without_a_network(
    owner: Owner, ended: tuple[RunFolder, Conclusion], tmp_path: Path
) -> None:
    folder, _ = ended
    (tmp_path / "receipt.json").write_bytes(folder.receipt.read_bytes())
    (tmp_path / "owner.pub").write_bytes(Home(path=owner.shell.home).owner_public.read_bytes())
    command = [sys.executable, "-m", "glasshouse.cli", "verify", "receipt.json", "--owner", "owner.pub", "--json"]
    found = subprocess.run(
        ["unshare", "--net", *command],
        cwd=tmp_path,
        env={"GLASSHOUSE_HOME": str(tmp_path / "home")},
        capture_output=True,
    )
    assert found.returncode == ExitCode.DONE, found.stdout
    assert json.loads(found.stdout)["status"] == "good"


def test_a_bundle_whose_hardware_is_another_is_not_genuine(
    ended: tuple[RunFolder, Conclusion], verify: Callable[[Bundle], Status]
) -> None:
    bundle = Bundle.parse(ended[0].receipt.read_bytes())
    parts = bundle.hardware
    assert parts is not None
    assert verify(bundle) is Status.GOOD
    (blob,) = parts.blobs
    policy = dict(parts.policy)  # type: ignore[call-overload, arg-type]
    looser = policy | {"hardware": policy["hardware"] | {"collateral": {"crl": 60}}}
    for name, forged in {
        "a flipped blob": replace(parts, blobs=(blob[:-1] + bytes([blob[-1] ^ 1]),)),
        "a longer blob": replace(parts, blobs=(blob + b" ",)),
        "one blob more": replace(parts, blobs=(blob, blob)),
        "another policy": replace(parts, policy=looser),
        "no policy that can be read": replace(parts, policy={"assurance": "software"}),
        "another pack": replace(parts, collateral=EMPTY.encode()),
    }.items():
        with pytest.raises(VerificationError) as refused:
            verify(replace(bundle, hardware=forged))
        assert refused.value.code is Code.CHAIN_EVIDENCE, name
    lacking: list[HardwareParts | None] = [None, replace(parts, policy=None), replace(parts, collateral=None)]
    assert [verify(replace(bundle, hardware=one)) for one in lacking] == [Status.INCOMPLETE] * 3


def test_a_pack_that_another_launch_handed_to_the_gate_in_between_is_put_into_the_receipt(
    owner: Owner, ended: tuple[RunFolder, Conclusion], tmp_path: Path
) -> None:
    """The result names the last pack that the gate had of this owner, which is not the one of this launch."""
    folder, home = RunFolder(tmp_path / ended[0].run_id), Home(path=owner.shell.home)
    shutil.copytree(ended[0].path, folder.path, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
    whole, known = folder.receipt.read_bytes(), RunHardware.load(folder)
    assert known is not None
    replace(known, collateral=EMPTY).save(folder)

    def concluded(home: Home | None) -> Conclusion:
        signing = read_public(Home(path=owner.shell.home).owner_public).signing
        return conclude(folder, owner_signing=signing, agent_exit=None, home=home)

    assert concluded(None).verdict == "incomplete"
    assert concluded(Home(path=tmp_path / "another home")).verdict == "incomplete"
    assert concluded(home).verdict == "good"
    assert folder.receipt.read_bytes() == whole


def test_a_receipt_that_lost_its_hardware_is_not_said_to_show_what_hardware_shows(
    owner: Owner, ended: tuple[RunFolder, Conclusion]
) -> None:
    public = read_public(Home(path=owner.shell.home).owner_public).signing
    bundle = Bundle.parse(ended[0].receipt.read_bytes())
    whole, lacking = (verify_bundle(one.encode(), owner=public) for one in (bundle, replace(bundle, hardware=None)))
    shows = "whose TPM the policy trusts"
    assert shows in whole.sentence
    assert "To others it is the owner's word" in whole.sentence
    assert shows not in lacking.sentence
    assert "not appraised here" in lacking.to_json()["proves"]  # type: ignore[operator]
    group = GroupVerdict(group=Group(id=bytes(ID_BYTES), machines=2, machine=0, ranks=1), machines=(whole, lacking))
    assert shows not in group.sentence, "of several machines the weakest is what is told"


def test_receipts_of_two_machines_with_one_tpm_are_refused(owner: Owner, ended: tuple[RunFolder, Conclusion]) -> None:
    """As a gate that counts one machine twice would leave them."""
    public = read_public(Home(path=owner.shell.home).owner_public).signing
    chain = verify_bundle(ended[0].receipt.read_bytes(), owner=public).chain
    places = [Group(id=bytes(ID_BYTES), machines=2, machine=number, ranks=1) for number in range(2)]
    chains = [replace(chain, token=replace(chain.token, group=place)) for place in places]
    with pytest.raises(VerificationError, match="another machine of the group shows too") as refused:
        check_group(chains)
    assert refused.value.code is Code.CHAIN_EVIDENCE
    assert check_group([chains[0], replace(chains[1], missing=("hardware",))]) == places[0], "that one is incomplete"


def test_a_result_that_tells_otherwise_of_the_activation_is_not_genuine(
    owner: Owner, ended: tuple[RunFolder, Conclusion]
) -> None:
    public = read_public(Home(path=owner.shell.home).owner_public).signing
    chain = verify_bundle(ended[0].receipt.read_bytes(), owner=public).chain
    assert chain.hardware is not None
    assert chain.evidence is not None
    assert chain.ear is not None
    check_appraisal(chain.hardware, chain.evidence, chain.ear)
    with pytest.raises(VerificationError, match="activation"):
        check_appraisal(chain.hardware, chain.evidence, replace(chain.ear, tpm_activated=False))


def test_a_machine_that_booted_another_image_is_refused_by_the_register_that_says_so(
    owner: Owner, tpm: SoftwareTpm
) -> None:
    owner.policy(tpm, **{"9": "aa" * 32})
    owner.job("another")
    try:
        folder, conclusion = owner.run("another")
    finally:
        owner.policy(tpm)
    assert (conclusion.outcome, conclusion.code) == (Outcome.REFUSED, Code.REFERENCE_VALUE)
    assert conclusion.verdict == "incomplete"
    assert not list((folder.out / "outputs").iterdir())


def test_a_machine_without_the_tpm_is_refused_before_anything_is_sent(owner: Owner, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TpmCollector.__init__, "__defaults__", (str(tmp_path / "tpmrm0"), ""))
        with pytest.raises(PlatformError) as refused:
            owner.run("job")
    assert refused.value.code is Code.HARDWARE_UNAVAILABLE
    assert "tpmrm0" in refused.value.message


def test_a_runtime_that_finds_no_tpm_asks_nothing_of_the_gate_and_says_what_is_missing(
    owner: Owner, tpm: SoftwareTpm, tmp_path: Path
) -> None:
    folder, conclusion = owner.run("job", MachineWithTpm(replace(tpm, path=str(tmp_path / "tpmrm0"))))
    assert (conclusion.outcome, conclusion.code) == (Outcome.FAILED, Code.HARDWARE_UNAVAILABLE)
    assert f"there is no TPM: no {tmp_path}/tpmrm0" in folder.runtime_log.read_text()
    bundle = Bundle.parse(folder.receipt.read_bytes())
    assert (bundle.evidence, bundle.hardware) == (None, None)
    assert '"released"' not in owner.shell.ask("status", folder.run_id, "--json").out


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ('assurance = "tpm"', Code.CHAIN_MISSING),
        ('assurance = "cpu-tee"\nhardware = "machines.toml"', Code.CHAIN_MISSING),
        ('assurance = "software"\nhardware = "machines.toml"', Code.JOB_INVALID),
        ('assurance = "tpm"\nhardware = "nowhere.toml"', Code.FILE_MISSING),
    ],
)
def test_a_level_and_a_hardware_policy_that_do_not_fit_are_no_job(owner: Owner, policy: str, code: Code) -> None:
    owner.job("wrong", policy)
    refused = owner.shell.ask("seal", "wrong.toml", "-o", "wrong.sealed", "--json")
    assert (refused.code, refused.error["code"]) == (ExitCode.USAGE, code)


def test_a_draft_has_what_the_machine_shows_and_is_a_policy_once_its_chain_is_named(
    owner: Owner, tpm: SoftwareTpm, tmp_path: Path
) -> None:
    text = draft_of(look_at_hardware())
    assert "It is no policy yet" in text
    (tmp_path / "draft.toml").write_text(text.replace("# chain = ", "chain = "))
    found, seen = read_hardware(tmp_path / "draft.toml").tpm, tpm.policy()
    assert found is not None
    assert found.pcrs.items() == seen.pcrs.items()
    assert (len(found.aks), found.ek_roots) == (1, ())
