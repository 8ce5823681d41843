"""A draft has what each part of a machine shows, says of every value what to compare it with, and is no policy yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest

from glasshouse.attestation.roots.azure.azure_blob import AzureBlob
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import SevSnpBlob
from glasshouse.errors import Code, PlatformError, UsageError
from glasshouse.jobs.define.hardware_file import read_hardware
from glasshouse.jobs.references import hardware_draft, hardware_values
from glasshouse.jobs.references.hardware_draft import Seen, draft_of, look_at_hardware
from simulators.nvidia_machine import NvidiaMachine
from simulators.snp_machine import CLOUD, MEASUREMENT, SnpMachine

Drafted = Callable[[str], HardwarePolicy]
CHAIN = re.compile(r"^# (chain = .*)$", re.MULTILINE)


@dataclass
class Shown:
    """The collector of a kind that gives these bytes."""

    blob: bytes

    def look(self) -> str:
        return ""

    def prepare(self) -> None:
        """Nothing."""

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        assert (bound.composite, credential) == (bytes(32), None)
        return self.blob

    def close(self) -> None:
        """Nothing."""


def draft(monkeypatch: pytest.MonkeyPatch, blobs: Mapping[str, bytes]) -> str:
    """Return the draft of a machine that gives these blobs, by kind."""

    def collector_of(kind: str) -> Shown:
        if kind not in blobs:
            raise PlatformError(Code.HARDWARE_UNAVAILABLE, f"there is no {kind}", hint="")
        return Shown(blobs[kind])

    monkeypatch.setattr(hardware_draft, "collector_of", collector_of)
    return draft_of(look_at_hardware())


@pytest.fixture
def compared(tmp_path: Path) -> Drafted:
    """Return a draft as a policy, once its owner put the chains in."""

    def of(text: str) -> HardwarePolicy:
        path = tmp_path / "draft.toml"
        path.write_text(text)
        with pytest.raises(UsageError, match="names no chain") as refused:  # as it was printed
            read_hardware(path)
        assert refused.value.code is Code.CHAIN_MISSING
        path.write_text(CHAIN.sub(r"\1", text))
        return read_hardware(path)

    return of


def uncommented(text: str) -> list[str]:
    """Return the lines with a value that has no comment above it; of a table, its first."""
    lines = [
        line
        for line in text.splitlines()
        if not re.match(r"\[|# chain|[0-9]|mrtd|rtmr|chain|bootloader|microcode|snp|tee", line)
    ]
    return [line for above, line in pairwise(lines) if " = " in line and not above.startswith("#")]


def test_a_machine_of_snp_with_gpus_is_one_draft(monkeypatch: pytest.MonkeyPatch, compared: Drafted) -> None:
    machine = SnpMachine(now=datetime.now(UTC))
    gpus = NvidiaMachine(gpus=2)
    report = machine.report(bytes(64), guest_policy=1 << 16 | 1 << 17 | 1 << 20 | 1 << 8 | 55, id_key=b"\x1d" * 48)
    blobs = {
        "nvidia": gpus.blob(),
        "sev-snp": SevSnpBlob(certificate=machine.certificate, report=report).encode(),
    }
    text = draft(monkeypatch, blobs)
    assert "# tpm: there is no tpm" in text
    assert "Compare: sev-snp-measure" in text
    assert 'assurance = "gpu-tee"' in text
    assert uncommented(text) == []
    assert "\n[sev-snp.tcb]" not in text
    found = compared(text)
    assert found.nvidia == gpus.policy(device_ocsp=False).nvidia
    snp = found.sev_snp
    assert snp is not None
    assert (snp.measurements, snp.id_keys, snp.smt) == ((MEASUREMENT,), (b"\x1d" * 48,), True)
    assert (snp.requires, snp.least_firmware, snp.csps) == (("single-socket",), "1.55.40", ())
    assert snp.tcb == machine.policy().tcb


def test_switches_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = NvidiaMachine(gpus=8, switches=4)
    text = draft(monkeypatch, {"nvidia": machine.blob()})
    assert "switches = 4" in text
    assert "NV_SWITCH_BIOS" in text


def test_of_four_security_versions_the_lowest_is_drafted(monkeypatch: pytest.MonkeyPatch, compared: Drafted) -> None:
    """A floor at the present firmware would refuse the machine that it was read from."""
    machine = SnpMachine(now=datetime.now(UTC))
    monkeypatch.setattr(hardware_values, "PINNED", machine.roots)
    launch = machine.tcb(**{**machine.firmware, "microcode": 80})
    blob = SevSnpBlob(certificate=machine.certificate, report=machine.report(bytes(64), launch=launch))
    snp = compared(draft(monkeypatch, {"sev-snp": blob.encode()})).sev_snp
    assert snp is not None
    assert snp.tcb["Genoa"].microcode == 80


def test_the_cloud_of_a_vlek_is_named_where_amd_certified_it(
    monkeypatch: pytest.MonkeyPatch, compared: Drafted
) -> None:
    machine = SnpMachine(now=datetime.now(UTC), is_vlek=True)
    blob = SevSnpBlob(certificate=machine.certificate, report=machine.report(bytes(64))).encode()
    text = draft(monkeypatch, {"sev-snp": blob})
    assert "# sev-snp: it gave what this version does not read" in text
    assert "[sev-snp]" not in text
    monkeypatch.setattr(hardware_values, "PINNED", machine.roots)
    snp = compared(draft(monkeypatch, {"sev-snp": blob})).sev_snp
    assert snp is not None
    assert snp.csps == (CLOUD,)


def test_a_machine_of_azures_is_drafted_by_its_paravisor_and_what_it_booted(
    monkeypatch: pytest.MonkeyPatch, compared: Drafted
) -> None:
    """The vTPM alone would say less of the same machine."""
    machine = SnpMachine(now=datetime.now(UTC))
    pcrs = tuple(bytes([number]) * 32 for number in range(15))
    blob = AzureBlob(
        certificate=machine.certificate,
        pcrs=pcrs,
        quote=b"quote",
        report=machine.report(bytes(64), guest_svn=11, id_key=b"\x1d" * 48),
        runtime=b"{}",
        signature=b"signature",
    )
    text = draft(monkeypatch, {"azure": blob.encode(), "tpm": b"no blob"})
    azure = compared(text).azure
    assert azure is not None
    assert sorted(map(int, azure.pcrs)) == [0, 2, 4, 7, 11, 12, 13]
    assert (azure.sev_snp.id_keys, azure.sev_snp.measurements) == ((b"\x1d" * 48,), ())
    assert azure.sev_snp.least_guest_svn == 11


def test_a_processor_that_is_not_known_is_named_and_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SnpMachine(now=datetime.now(UTC))
    report = bytearray(machine.report(bytes(64)))
    report[0x188] = 0x2F
    text = draft(monkeypatch, {"sev-snp": SevSnpBlob(certificate=machine.certificate, report=bytes(report)).encode()})
    assert "family 0x2f" in text
    assert "\n[" not in text


def test_what_cannot_be_read_is_said_and_not_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = draft(monkeypatch, dict.fromkeys(("azure", "dstack", "nvidia", "sev-snp", "tdx", "tpm"), b"no blob"))
    assert "\n[" not in text
    assert 'assurance = "software"' in text
    assert text.count("it gave what this version does not read") == 6


def test_what_a_machine_says_of_what_is_missing_becomes_no_policy() -> None:
    text = draft_of([Seen(kind="tpm", missing='no answer\n[tpm]\nchain = "image"\r\n')])
    assert all(line.startswith("#") for line in text.splitlines() if line)
