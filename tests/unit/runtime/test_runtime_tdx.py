"""Quotes of TDX are collected from the kernel's folder, and from dstack's agent; of another form they are none."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.dstack.dstack_events import DstackBlob
from glasshouse.attestation.roots.tdx.tdx_quote import TdxBlob
from glasshouse.errors import Code, PlatformError
from glasshouse.runtime.roots.dstack import DstackCollector, blob_of
from glasshouse.runtime.roots.sev_snp import SevSnpCollector
from glasshouse.runtime.roots.tdx import TdxCollector, without_padding
from glasshouse.runtime.roots.tpm import TpmCollector
from glasshouse.runtime.roots.tsm_reports import TsmReports
from simulators.dstack_agent import dstack_agent, launched
from simulators.tdx_machine import PADDING, TdxMachine

BOUND = Bound(composite=bytes(range(32)))


@pytest.fixture
def machine() -> TdxMachine:
    return TdxMachine(now=datetime(2026, 11, 1, tzinfo=UTC))


@pytest.mark.parametrize("version", [4, 5])
def test_a_quote_ends_where_it_says(machine: TdxMachine, version: int) -> None:
    quote = machine.quote(BOUND.report_data, version=version)
    for padded in (quote, quote + PADDING):
        assert without_padding(padded) == quote
    for odd in (quote + b"\x01", quote[:700], b"", b"\x04\x00"):  # what is no padding is for the gate to refuse
        assert without_padding(odd) == odd


def test_dstacks_agent_is_asked_for_this_run(machine: TdxMachine, tmp_path: Path) -> None:
    path = tmp_path / "dstack.sock"
    collector = DstackCollector((str(tmp_path / "older.sock"), str(path)))
    assert "mount" in collector.look()
    events = launched()
    with dstack_agent(path, machine, events):
        assert collector.look() == ""
        assert collector.prepare() is None
        blob = DstackBlob.parse(collector.collect(bound=BOUND, credential=None))
        collector.close()
    assert blob.events == tuple(events)
    assert blob.quote[568:632] == BOUND.report_data
    assert not blob.quote.endswith(PADDING)


def test_a_public_answer_is_the_blob_that_is_kept_of_it() -> None:
    folder = Path(__file__).parents[2] / "vectors" / "hardware" / "dstack"
    assert blob_of((folder / "quote-report.json").read_bytes()) == (folder / "quote-report.blob").read_bytes()


def test_events_of_version_2_keep_it(machine: TdxMachine, tmp_path: Path) -> None:
    path = tmp_path / "dstack.sock"
    with dstack_agent(path, machine, launched(2)):
        blob = DstackBlob.parse(DstackCollector((str(path),)).collect(bound=BOUND, credential=None))
    assert {event.version for event in blob.events} == {2}


_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    "instead",
    [
        b"",
        b"HTTP/1.1 500 Internal Server Error\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n",
        _HEAD,
        _HEAD + b"[" * 100_000,
        _HEAD + b"[]",
        _HEAD + b'{"quote":"xx","event_log":"[]"}',
        _HEAD + b'{"quote":"00","event_log":"{"}',
        _HEAD + b'{"quote":"00","event_log":"[1]"}',
        _HEAD + b'{"quote":"00","event_log":"[{\\"imr\\":3,\\"event\\":1.5,\\"event_payload\\":\\"\\"}]"}',
        _HEAD + b" " * (3 * 1024 * 1024),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_an_answer_of_another_form_is_none(machine: TdxMachine, tmp_path: Path, instead: bytes) -> None:
    path = tmp_path / "dstack.sock"
    with (
        dstack_agent(path, machine, launched(), instead=instead),
        pytest.raises(PlatformError, match="dstack's agent") as raised,
    ):
        DstackCollector((str(path),)).collect(bound=BOUND, credential=None)
    assert raised.value.code is Code.HARDWARE_UNAVAILABLE


def test_an_agent_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="does not answer"):
        DstackCollector((str(tmp_path / "dstack.sock"),)).collect(bound=BOUND, credential=None)


@contextmanager
def report_folder(
    folder: Path, machine: TdxMachine, *, provider: str = "tdx_guest", generations: int = 1
) -> Iterator[Path]:
    """A folder of configfs-tsm with this process's entry: what is written to `inblob` counts and makes a quote."""
    entry = folder / f"glasshouse-{os.getpid()}"
    entry.mkdir()
    (entry / "provider").write_text(provider + "\n")
    (entry / "generation").write_text("7\n")
    for name in ("inblob", "outblob"):
        os.mkfifo(entry / name)

    def serve() -> None:
        report_data = (entry / "inblob").read_bytes()
        (entry / "generation").write_text(f"{7 + generations}\n")
        (entry / "outblob").write_bytes(machine.quote(report_data) + PADDING)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield folder
    finally:
        thread.join()


def test_the_kernel_is_asked_for_this_run(machine: TdxMachine, tmp_path: Path) -> None:
    device = tmp_path / "tdx_guest"
    folder = tmp_path / "report"
    collector = TdxCollector(folder, device)
    assert "no guest" in collector.look()
    device.touch()
    assert "configfs" in collector.look()
    folder.mkdir()
    assert collector.look() == ""
    with report_folder(folder, machine):
        assert collector.prepare() is None
        quote = TdxBlob.parse(collector.collect(bound=BOUND, credential=None)).quote
        collector.close()
    assert quote[568:632] == BOUND.report_data
    assert not quote.endswith(PADDING)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EBUSY, "another process uses it"),
        (errno.EACCES, "this user may not use it"),
        (errno.ENOTTY, "its driver does not have this call"),
        (errno.EIO, "whose host it is has to look"),
        (errno.ETIMEDOUT, "its service did not answer in time"),
        (errno.EXDEV, f"error {errno.EXDEV}"),
    ],
)
def test_what_a_device_answers_is_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def fails(*_ignored: object, **_also: object) -> int:
        raise OSError(number, "words of the system's")

    (tmp_path / "device").touch()
    device = str(tmp_path / "device")
    on_an_older_kernel = SevSnpCollector(device, TsmReports("sev_guest", tmp_path / "none"))
    asked = (
        TpmCollector(device).prepare,
        TdxCollector(tmp_path).prepare,
        partial(on_an_older_kernel.collect, bound=BOUND, credential=None),
    )
    monkeypatch.setattr(os, "open", fails)
    monkeypatch.setattr(os, "mkdir", fails)
    for each in asked:
        with pytest.raises(PlatformError, match=said) as refused:
            each()
        assert refused.value.code is Code.HARDWARE_UNAVAILABLE


def test_another_process_in_this_runs_entry(machine: TdxMachine, tmp_path: Path) -> None:
    with report_folder(tmp_path, machine, generations=2) as folder:
        collector = TdxCollector(folder)
        collector.prepare()
        with pytest.raises(PlatformError, match="another process") as raised:
            collector.collect(bound=BOUND, credential=None)
    assert raised.value.code is Code.HARDWARE_UNAVAILABLE


def test_another_makers_reports(machine: TdxMachine, tmp_path: Path) -> None:
    entry = tmp_path / f"glasshouse-{os.getpid()}"
    entry.mkdir()
    (entry / "provider").write_text("sev_guest\n")
    with pytest.raises(PlatformError, match="tdx_guest"):
        TdxCollector(tmp_path).prepare()
