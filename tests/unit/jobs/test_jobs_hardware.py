"""A level above `software`: its policy is read before anything is sealed, and what cannot prove it is not rented."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy, MaxAges
from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.jobs.define.hardware_file import kinds_wanted, read_hardware
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.kept_pack import given_pack, keep_pack, note_given
from glasshouse.jobs.supervise import machine_check
from glasshouse.jobs.supervise.machine_check import check_hardware, check_rentable, pack_for
from glasshouse.providers.rental.known import ACCOUNTS
from glasshouse.runtime.run.findings import Finding, Standing
from glasshouse.wire.policy import Assurance
from tools.ek_authority import EkAuthority

TPM = """
[collateral]
crl = 86400
[tpm]
chain = "image"
ek_roots = ["makers.pem"]
[tpm.pcrs]
"""
PCRS = "\n".join(f'{register} = ["{"ab" * 32}"]' for register in (0, 2, 4, 7, 8, 9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a policy, and the certificates of two makers beside it."""
    roots = [x509.load_der_x509_certificate(EkAuthority(name).der) for name in ("one", "two")]
    pem = b"".join(root.public_bytes(Encoding.PEM) for root in roots)
    (tmp_path / "makers.pem").write_bytes(pem)
    (tmp_path / "machines.toml").write_text(TPM + PCRS)
    return tmp_path


def test_a_pem_file_stands_for_the_certificates_in_it(folder: Path) -> None:
    found = read_hardware(folder / "machines.toml")
    assert found.collateral == MaxAges(crl=86400)
    assert found.tpm is not None
    names = [x509.load_der_x509_certificate(root).subject.rfc4514_string() for root in found.tpm.ek_roots]
    assert names == ["CN=one", "CN=two"]
    assert HardwarePolicy.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ('chain = "image"', "", Code.CHAIN_MISSING),
        ('chain = "image"', 'chain = "ima"', Code.JOB_INVALID),
        ('8 = ["', '10 = ["', Code.POLICY_IMPOSSIBLE),
        ('"makers.pem"', '"nowhere.pem"', Code.FILE_MISSING),
        ('"makers.pem"', '"machines.toml.pem"', Code.JOB_INVALID),
        ("[collateral]", "[colateral]", Code.JOB_INVALID),
        ("crl = 86400", "crl = 1979-05-27", Code.JOB_INVALID),
        ("[tpm]", "[tpm", Code.JOB_INVALID),
    ],
)
def test_what_leads_from_no_hardware_to_the_runtime_is_no_policy(
    folder: Path, before: str, after: str, code: Code
) -> None:
    (folder / "machines.toml.pem").write_text("none\n")
    text = (folder / "machines.toml").read_text()
    assert before in text
    (folder / "machines.toml").write_text(text.replace(before, after))
    with pytest.raises(UsageError) as refused:
        read_hardware(folder / "machines.toml")
    assert refused.value.code is code


def test_a_file_of_comments_is_no_policy(tmp_path: Path) -> None:
    (tmp_path / "draft.toml").write_text("# tpm: there is no TPM\n")
    with pytest.raises(UsageError, match="names no kind") as refused:
        read_hardware(tmp_path / "draft.toml")
    assert refused.value.code is Code.CHAIN_MISSING


def test_a_level_and_its_policy_fit_or_there_is_no_job(folder: Path) -> None:
    policy = read_hardware(folder / "machines.toml")
    assert kinds_wanted(Assurance.SOFTWARE, None) == ()
    assert kinds_wanted(Assurance.TPM, policy) == ("tpm",)
    for level, given, code in (
        (Assurance.TPM, None, Code.CHAIN_MISSING),
        (Assurance.TPM, replace(policy, tpm=None), Code.CHAIN_MISSING),
        (Assurance.CPU_TEE, policy, Code.CHAIN_MISSING),
        (Assurance.SOFTWARE, policy, Code.JOB_INVALID),
    ):
        with pytest.raises(UsageError) as refused:
            kinds_wanted(level, given)
        assert refused.value.code is code


def test_no_machine_is_rented_that_cannot_prove_the_level() -> None:
    for provider in ACCOUNTS:
        check_rentable(Assurance.SOFTWARE, provider)
        with pytest.raises(UsageError, match="none was rented") as refused:
            check_rentable(Assurance.GPU_TEE, provider)
        assert refused.value.code is Code.POLICY_IMPOSSIBLE
    check_rentable(Assurance.TPM, "slurm")


def test_a_machine_that_does_not_offer_the_evidence_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [Finding("root-tpm", Standing.GOOD, "/dev/tpmrm0", "…"), Finding("root-tdx", Standing.NOTE, "…", "…")]
    monkeypatch.setattr(machine_check, "examine", lambda _home, _name: there)
    home = Home(path=tmp_path)
    check_hardware(home, ("tpm",), "lab")
    check_hardware(home, (), "lab")
    for kind, name, hint in (("tdx", "lab", "doctor --on lab"), ("sev-snp", "local", "this machine")):
        with pytest.raises(PlatformError) as refused:
            check_hardware(home, (kind,), name)
        assert refused.value.code is Code.HARDWARE_UNAVAILABLE
        assert hint in refused.value.message


@dataclass(frozen=True)
class _Needing(HardwarePolicy):
    """A policy whose kinds need AMD's list."""

    @property
    def needed(self) -> tuple[str, ...]:
        return ("amd/crl/Milan",)


def test_a_pack_is_there_and_of_this_time_before_anything_is_rented(tmp_path: Path) -> None:
    home = Home(path=tmp_path)
    assert pack_for(home, None) is None
    assert pack_for(home, HardwarePolicy()) is None
    codes = []
    for items in (None, (), (Item(name="amd/crl/Milan", data=b"no list"),)):
        if items is not None:
            keep_pack(home, Pack(items=items))
        with pytest.raises(UsageError) as refused:
            pack_for(home, _Needing())
        assert "glasshouse collateral fetch" in refused.value.hint
        codes.append(refused.value.code)
    assert codes == [Code.COLLATERAL_MISSING, Code.COLLATERAL_MISSING, Code.COLLATERAL_INVALID]
    assert pack_for(home, HardwarePolicy()) == Pack(items=items or ()), "the gate names the last that it was given"


def test_the_last_packs_that_gates_were_given_are_found_by_their_digests(tmp_path: Path) -> None:
    home = Home(path=tmp_path)
    packs = [Pack(items=(Item(name="amd/crl/Milan", data=b"%d" % number),)) for number in range(18)]
    for number, pack in enumerate([*packs[:17], packs[1], packs[17]]):
        note_given(home, pack)
        os.utime(home.packs / f"{pack.sha256.hex()}.json", (number, number))
    found = [pack for pack in packs if given_pack(home, pack.sha256.hex()) == pack]
    assert found == [packs[1], *packs[3:]], "sixteen, the last that were given, and each once"


@pytest.mark.parametrize("named", ["../collateral", "AB" * 32, "ab" * 31, None, 7, "cd" * 32])
def test_what_a_machine_names_is_a_digest_or_no_pack(tmp_path: Path, named: object) -> None:
    """The result that names it was not verified yet."""
    home = Home(path=tmp_path)
    keep_pack(home, Pack(items=()))
    note_given(home, Pack(items=()))
    (home.packs / f"{'cd' * 32}.json").write_bytes(Pack(items=()).encode())  # under another name than its own
    assert given_pack(home, named) is None
