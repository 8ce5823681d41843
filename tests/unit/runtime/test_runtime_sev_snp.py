"""Reports of machines of SEV-SNP and of Azure, from where kernel and vTPM have them to the appraisal."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.azure.azure_blob import AzureBlob
from glasshouse.attestation.roots.azure.azure_evidence import appraise_machine
from glasshouse.attestation.roots.azure.azure_policy import AzurePolicy
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import SevSnpBlob
from glasshouse.attestation.roots.sev_snp.sev_snp_evidence import appraise_report
from glasshouse.errors import Code, FormatError, PlatformError
from glasshouse.runtime.roots.azure import AzureCollector, split_report
from glasshouse.runtime.roots.sev_snp import SevSnpCollector, certificate_of, named_vcek
from glasshouse.runtime.roots.tsm_reports import TsmReports
from glasshouse.wire.crypto import sha256
from simulators.snp_machine import CHIP, SnpMachine, report_folder
from tools.azure_vtpm import become_azure, kept_report, metadata_service, runtime_data
from tools.software_tpm import SoftwareTpm, needs_swtpm, software_tpm

NOW = datetime(2026, 3, 1, tzinfo=UTC)
NOW_US = int(NOW.timestamp() * 1_000_000)
BOUND = Bound(composite=sha256(b"this run"), gpus_sha256=sha256(b"its GPUs"))
ENTRY = "glasshouse-tests"


def judged(machine: SnpMachine, blob: bytes) -> Appraised:
    evidence = SevSnpBlob.parse(blob)
    return appraise_report(
        evidence.report,
        evidence.certificate,
        report_data=BOUND.report_data,
        now_us=NOW_US,
        collateral=machine.pack(),
        policy=machine.policy(),
        roots=machine.roots,
    )


def collector_in(folder: Path) -> SevSnpCollector:
    device = folder / "sev-guest"
    device.touch()
    return SevSnpCollector(str(device), TsmReports("sev_guest", folder / "report", ENTRY), str(folder / "vcek"))


def test_a_report_comes_by_the_kernels_folder(tmp_path: Path) -> None:
    machine = SnpMachine(now=NOW)
    with report_folder(machine, tmp_path / "report", ENTRY):
        collector = collector_in(tmp_path)
        assert collector.look() == ""
        collector.prepare()
        for _ in range(2):  # once more with another challenge
            assert judged(machine, collector.collect(bound=BOUND, credential=None)).claims["key"] == "VCEK"
        collector.close()
        collector.close()


def test_a_host_without_the_certificate_is_said_so(tmp_path: Path) -> None:
    machine = SnpMachine(now=NOW)
    for number, table in enumerate((b"", bytes(24), machine.table()[:-1], b"\x01" * 24)):
        folder = tmp_path / str(number)
        with report_folder(machine, folder / "report", ENTRY, table=table):
            collector = collector_in(folder)
            collector.prepare()
            with pytest.raises(PlatformError, match="no certificate of its chip's key") as refused:
                collector.collect(bound=BOUND, credential=None)
            assert refused.value.code is Code.HARDWARE_UNAVAILABLE
    assert certificate_of(machine.table(), is_vlek=False) == machine.certificate
    assert certificate_of(machine.table(), is_vlek=True) == b""


@pytest.mark.parametrize(
    ("product", "asked"),
    [
        ("Genoa", "vcek/v1/Genoa/" + CHIP.hex() + "?blSPL=10&teeSPL=00&snpSPL=23&ucodeSPL=84"),
        ("Turin", "vcek/v1/Turin/" + CHIP[:8].hex() + "?fmcSPL=00&blSPL=10&teeSPL=00&snpSPL=23&ucodeSPL=84"),
    ],
)
def test_a_certificate_that_the_host_does_not_give_is_fetched_from_amd_and_put_beside(
    tmp_path: Path, product: str, asked: str
) -> None:
    chip = CHIP if product == "Genoa" else CHIP[:8]
    firmware = {"bootloader": 10, "tee": 0, "snp": 23, "microcode": 84} | ({"fmc": 0} if product == "Turin" else {})
    machine = SnpMachine(now=NOW, product=product, chip=chip, firmware=firmware)
    with report_folder(machine, tmp_path / "report", ENTRY, table=b""):
        collector = collector_in(tmp_path)
        collector.prepare()
        with pytest.raises(PlatformError) as refused:
            collector.collect(bound=BOUND, credential=None)
        url, into = refused.value.message.split("fetch ")[1].split(" into ")
        assert url == f"https://kdsintf.amd.com/{asked}"
        Path(into).parent.mkdir()
        Path(into).write_bytes(machine.certificate)
        assert judged(machine, collector.collect(bound=BOUND, credential=None)).claims["product"] == product
        # Newer firmware has another key: the certificate of before is not taken for its own.
        machine.firmware["microcode"] += 1
        with pytest.raises(PlatformError, match="ucodeSPL=85"):
            collector.collect(bound=BOUND, credential=None)
        machine.firmware["microcode"] -= 1
        Path(into).write_bytes(bytes(4097))
        with pytest.raises(PlatformError, match="too large"):
            collector.collect(bound=BOUND, credential=None)


def test_where_no_certificate_can_be_fetched_it_is_said_why() -> None:
    machine = SnpMachine(now=NOW)
    for changed in ({"chip": bytes(64)}, {"version": 2, "family": 0, "model": 0}):
        with pytest.raises(PlatformError, match="does not name the chip"):
            named_vcek(machine.report(bytes(64), **changed))


def test_the_key_of_a_cloud_is_certified_by_its_host_alone(tmp_path: Path) -> None:
    with report_folder(SnpMachine(now=NOW, is_vlek=True), tmp_path / "report", ENTRY, table=b""):
        collector = collector_in(tmp_path)
        collector.prepare()
        with pytest.raises(PlatformError, match="a VLEK, which its cloud alone has"):
            collector.collect(bound=BOUND, credential=None)


def test_a_machine_of_another_kind_is_said_so(tmp_path: Path) -> None:
    assert "no machine on AMD SEV-SNP" in SevSnpCollector(str(tmp_path / "none")).look()
    with report_folder(SnpMachine(now=NOW), tmp_path / "report", ENTRY):
        (tmp_path / "report" / ENTRY / "provider").write_text("tdx_guest\n")
        with pytest.raises(PlatformError, match="not of sev_guest"):
            collector_in(tmp_path).prepare()


def test_an_entry_that_another_process_uses_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SnpMachine(now=NOW)
    with report_folder(machine, tmp_path / "report", ENTRY):
        collector = collector_in(tmp_path)
        collector.prepare()
        counted = iter((3, 5))
        monkeypatch.setattr(TsmReports, "_generation", lambda _self: next(counted))
        with pytest.raises(PlatformError, match="another process"):
            collector.collect(bound=BOUND, credential=None)


def test_an_older_kernel_is_asked_by_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, status = SnpMachine(now=NOW), 0

    def kernel(_file: int, command: int, message: bytearray) -> int:
        """Read and write where the message points to, as the kernel does."""
        assert command == 0xC0205302
        version, request, answer, _ = struct.unpack("=B7xQQQ", message)
        asked = ctypes.string_at(request, 112)
        table, length = struct.unpack_from("=QI", asked, 96)
        assert (version, asked[64:96], length) == (1, bytes(32), 64 * 1024)
        report = machine.report(asked[:64])
        ctypes.memmove(answer, struct.pack("<II24x", status, len(report)) + report, 32 + len(report))
        ctypes.memmove(table, machine.table(), len(machine.table()))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", kernel)
    collector = collector_in(tmp_path)  # no folder `report` is there
    collector.prepare()
    assert judged(machine, collector.collect(bound=BOUND, credential=None)).claims["product"] == "Genoa"
    status = 0x16
    with pytest.raises(PlatformError, match="refused a report with 0x16"):
        collector.collect(bound=BOUND, credential=None)
    monkeypatch.undo()
    with pytest.raises(PlatformError, match="gave no report"):
        collector.collect(bound=BOUND, credential=None)


@pytest.fixture(scope="module")
def paravisor() -> SnpMachine:
    return SnpMachine(now=NOW)


@pytest.fixture(scope="module")
def azure(paravisor: SnpMachine) -> Iterator[SoftwareTpm]:
    if shutil.which("swtpm") is None:
        pytest.skip("swtpm is missing")
    with software_tpm() as tpm:
        become_azure(tpm.path, paravisor)
        yield tpm


@pytest.fixture(scope="module")
def evidence(azure: SoftwareTpm, paravisor: SnpMachine) -> AzureBlob:
    with metadata_service(paravisor) as service:
        collector = AzureCollector(azure.path, service)
        assert collector.look() == ""
        assert collector.prepare() is None  # no activation: the report names the key
        blob = collector.collect(bound=BOUND, credential=None)
        collector.close()
    return AzureBlob.parse(blob)


def of_azure(
    machine: SnpMachine, tpm: SoftwareTpm, evidence: AzureBlob, extra_data: bytes = BOUND.composite, **changed: Any
) -> Appraised:
    members = {name: getattr(evidence, name) for name in AzureBlob.member_names()}
    policy = {"chain": "image", "pcrs": tpm.policy().to_json()["pcrs"], "sev-snp": machine.policy().to_json()}
    return appraise_machine(
        AzureBlob(**{**members, **changed}),
        extra_data=extra_data,
        now_us=NOW_US,
        collateral=machine.pack(),
        policy=AzurePolicy.from_json(policy),
        roots=machine.roots,
    )


@needs_swtpm
def test_a_confidential_vm_of_azure_shows_its_image(
    paravisor: SnpMachine, azure: SoftwareTpm, evidence: AzureBlob
) -> None:
    found = of_azure(paravisor, azure, evidence)
    assert found.claims["vm"] == {"console-enabled": True, "secure-boot": True, "tpm-enabled": True}
    assert "Microsoft" in str(found.claims["paravisor"])


@needs_swtpm
def test_a_quote_counts_by_the_key_that_the_report_names(
    paravisor: SnpMachine, azure: SoftwareTpm, evidence: AzureBlob
) -> None:
    def with_runtime(data: bytes) -> dict[str, bytes]:
        return {"runtime": data, "report": paravisor.report(sha256(data) + bytes(32))}

    modulus = b"\xaa" * 256
    twice = evidence.runtime[:-1] + b"," + evidence.runtime[1:]
    named = Code.AZURE_KEY
    cases = [
        (named, {"runtime": runtime_data(modulus)}),  # a key of the host's own, which the report does not name
        (named, {"report": paravisor.report(sha256(evidence.runtime) + b"\1" * 32)}),
        (Code.HARDWARE_SIGNATURE, with_runtime(runtime_data(modulus))),
        (named, with_runtime(runtime_data(modulus, kid="HCLEkPub"))),
        (named, with_runtime(runtime_data(modulus, kid="HCLAkPub", e="Aw"))),
        (named, with_runtime(runtime_data(modulus, kty="EC"))),
        (named, with_runtime(runtime_data(b"\xaa" * 128))),
        (named, with_runtime(runtime_data(b"\x7f" + b"\xaa" * 255))),  # of 2047 bits
        (named, with_runtime(runtime_data(modulus, n=7))),
        (named, with_runtime(twice)),
        (named, with_runtime(b"[" * 4000)),
        (named, with_runtime(b"\xff{}")),
        (named, with_runtime(b'{"keys":7}')),
        (Code.SNP_VMPL, {"report": paravisor.report(sha256(evidence.runtime) + bytes(32), vmpl=1)}),
        (Code.HARDWARE_SIGNATURE, {"quote": evidence.quote[:-1] + bytes([evidence.quote[-1] ^ 1])}),
        (Code.TPM_QUOTE, {"pcrs": (bytes(32), *evidence.pcrs[1:])}),
    ]
    for code, changed in cases:
        with pytest.raises(CheckFailedError) as refused:
            of_azure(paravisor, azure, evidence, **changed)
        assert refused.value.code is code, changed
    with pytest.raises(CheckFailedError) as refused:
        of_azure(paravisor, azure, evidence, extra_data=sha256(b"another run"))
    assert refused.value.code is Code.HARDWARE_BINDING


def test_what_a_vtpm_keeps_is_read_as_azures_report_alone(paravisor: SnpMachine) -> None:
    report, runtime = paravisor.report(bytes(64)), runtime_data(b"\xaa" * 256)
    kept = kept_report(report, runtime)
    assert split_report(kept) == (report, runtime)
    for data, said in (
        (b"", "no confidential VM of Azure"),
        (b"HCLB" + kept[4:], "no confidential VM of Azure"),
        (kept[:1300], "does not read"),
        (kept_report(report, runtime, kind=4), "Intel TDX"),
        (kept_report(report, runtime, kind=3), "does not read"),
        (kept_report(report, b""), "does not read"),
        (kept_report(report, b"{}" * 3000), "does not read"),
    ):
        with pytest.raises(PlatformError, match=said):
            split_report(data)


@needs_swtpm
def test_a_tpm_that_is_no_azures_is_said_so(tmp_path: Path, azure: SoftwareTpm) -> None:
    assert "no vTPM" in AzureCollector(str(tmp_path / "tpm")).look()
    collector = AzureCollector(azure.path, "127.0.0.1:1")
    with pytest.raises(PlatformError, match="metadata service"):
        collector.prepare()
    collector.close()


def test_a_policy_for_azure_names_the_image_too(paravisor: SnpMachine) -> None:
    pcrs = {str(register): ["11" * 32] for register in (0, 2, 4, 7, 8, 9)}
    good = {"chain": "image", "pcrs": pcrs, "sev-snp": paravisor.policy().to_json()}
    assert AzurePolicy.from_json(good).needed == ("amd/crl/Genoa",)
    for changed, code in (
        ({"chain": None}, Code.CHAIN_MISSING),
        ({"pcrs": {"0": ["11" * 32]}}, Code.CHAIN_MISSING),
        ({"sev-snp": paravisor.policy(vmpl=2).to_json()}, Code.POLICY_IMPOSSIBLE),
    ):
        value = {name: one for name, one in {**good, **changed}.items() if one is not None}
        with pytest.raises(FormatError) as refused:
            AzurePolicy.from_json(value)
        assert refused.value.code is code
