"""Hostile bytes of a TPM end in a refusal, and nothing else comes of them than of the bytes that were signed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.attestation.refusal import CheckFailedError
from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.errors import FormatError
from tools.software_tpm import BOOT_LOG
from tools.tpm_kept import AK, BLOB, EK, KEPT, appraise_kept, as_other_keys

_FIELDS = {"ak": AK, "ek": EK, "quote": BLOB.quote, "signature": BLOB.signature}


def mangled(data: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and this data with a stretch of it replaced, cut out or repeated."""
    at = st.integers(0, len(data))
    spliced = st.builds(
        lambda start, length, new: data[:start] + new + data[start + length :],
        at,
        st.integers(0, 8),
        st.binary(max_size=8),
    )
    return st.one_of(st.binary(max_size=256), spliced, at.map(lambda end: data[:end]))


@given(data=mangled(KEPT))
def test_a_blob_is_the_one_that_was_made_or_is_refused(data: bytes) -> None:
    with contextlib.suppress(CheckFailedError):
        appraise_kept(data)
        assert data == KEPT


@pytest.mark.parametrize("name", sorted(_FIELDS))
@given(draw=st.data())
def test_a_part_of_a_blob_is_the_one_that_was_made_or_is_refused(name: str, draw: st.DataObject) -> None:
    """Also where the gate was asked with these very keys."""
    part = draw.draw(mangled(_FIELDS[name]))
    blob = dataclasses.replace(BLOB, **{name: part})
    for appraise in (appraise_kept, as_other_keys):
        with contextlib.suppress(CheckFailedError, FormatError):  # the second is of a blob that is too large
            appraise(blob.encode())
            assert part == _FIELDS[name]


@given(log=mangled(BOOT_LOG.read_bytes()))
def test_a_log_is_read_to_its_end_or_is_none(log: bytes) -> None:
    with contextlib.suppress(FormatError):
        for value in BootLog.read(log).replay().values():
            assert len(value) == 32


def test_the_kept_blob_is_accepted() -> None:
    checks: list[Callable[[bytes], object]] = [appraise_kept, as_other_keys]
    for check in checks:
        check(KEPT)
