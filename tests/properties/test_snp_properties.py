"""Hostile bytes of a machine of SEV-SNP, its host or Azure's end in a refusal, or in what was signed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.collateral import Item, Pack
from glasshouse.attestation.roots.sev_snp.sev_snp_evidence import appraise_report
from glasshouse.errors import PlatformError
from glasshouse.runtime.roots.azure import split_report
from glasshouse.runtime.roots.sev_snp import certificate_of
from simulators.snp_machine import SnpMachine

NOW = datetime(2026, 3, 1, tzinfo=UTC)
MACHINE = SnpMachine(now=NOW)
REPORT, LIST = MACHINE.report(bytes(64)), MACHINE.pack().items[0].data
HEAD, REST = b"HCLA" + bytes(28), b"".join(one.to_bytes(4, "little") for one in (22, 1, 2, 1, 2))
AZURE = HEAD + REPORT + REST + b"{}" + bytes(9)


def appraised(report: bytes = REPORT, certificate: bytes = MACHINE.certificate, crl: bytes = LIST) -> None:
    appraise_report(
        report,
        certificate,
        report_data=bytes(64),
        now_us=int(NOW.timestamp() * 1_000_000),
        collateral=Pack(items=(Item(name="amd/crl/Genoa", data=crl),)),
        policy=MACHINE.policy(),
        roots=MACHINE.roots,
    )


PARTS: dict[str, tuple[bytes, Callable[[bytes], None]]] = {
    "report": (REPORT, lambda data: appraised(report=data)),
    "certificate": (MACHINE.certificate, lambda data: appraised(certificate=data)),
    "list": (LIST, lambda data: appraised(crl=data)),
}


def mangled(data: bytes) -> st.SearchStrategy[bytes]:
    """This data with a stretch of it replaced, cut out or put in, or any bytes."""
    at = st.integers(0, len(data))
    spliced = st.builds(
        lambda start, length, new: data[:start] + new + data[start + length :],
        at,
        st.integers(0, 8),
        st.binary(max_size=8),
    )
    return spliced | at.map(lambda end: data[:end]) | st.binary(max_size=64)


@pytest.mark.parametrize("name", PARTS)
@given(draw=st.data())
def test_only_what_was_signed_is_accepted(name: str, draw: st.DataObject) -> None:
    signed, appraise = PARTS[name]
    data = draw.draw(mangled(signed))
    with contextlib.suppress(CheckFailedError):
        appraise(data)
        assert data == signed


@given(mangled(MACHINE.table()), st.booleans())
def test_a_hosts_table_gives_a_part_of_it_or_nothing(table: bytes, is_vlek: bool) -> None:
    with contextlib.suppress(PlatformError):
        assert certificate_of(table, is_vlek=is_vlek) in table


@given(mangled(AZURE))
def test_what_a_vtpm_keeps_gives_parts_of_it_or_nothing(data: bytes) -> None:
    with contextlib.suppress(PlatformError):
        report, runtime = split_report(data)
        assert len(report) == len(REPORT)
        assert runtime
        assert report + data[32 + len(report) :][:20] + runtime in data


def test_what_was_signed_is_accepted() -> None:
    appraised()
    assert split_report(AZURE) == (REPORT, b"{}")
