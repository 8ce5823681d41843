"""Alerts: one form each, nothing for a terminal to obey, and the same words as an error."""

from __future__ import annotations

import struct

import pytest

from glasshouse.collectives.engine.failure import ALERT_BYTES, REASONS, Alert
from glasshouse.errors import Code, CollectiveError

ALERT = Alert(
    reason=Code.COLLECTIVE_TAMPERED, detected_by=2, culprit=0, operation=17, text="a frame was changed on the way"
)


def test_every_reason_reads_back_and_is_as_long_as_every_other() -> None:
    for reason in REASONS:
        for culprit, operation in ((0, 0), (None, None), (65534, 2**64 - 2)):
            alert = Alert(reason=reason, detected_by=1, culprit=culprit, operation=operation, text="größer als")
            assert len(alert.encode()) == ALERT_BYTES
            assert Alert.parse(alert.encode()) == alert


def test_every_code_of_a_collective_can_be_told() -> None:
    named = {code for code in Code if code.name.startswith(("COLLECTIVE_", "RANK_", "GROUP_"))}
    assert set(REASONS) == named
    assert len(set(REASONS.values())) == len(REASONS)


def test_a_long_text_is_cut_between_characters() -> None:
    told = Alert.parse(
        Alert(reason=Code.RANK_LOST, detected_by=1, culprit=None, operation=None, text="é" * 400).encode()
    )
    assert set(told.text) == {"é"}
    assert len(told.text) == (ALERT_BYTES - 16) // 2


def test_a_text_cannot_command_a_terminal() -> None:
    alert = Alert(reason=Code.RANK_LOST, detected_by=1, culprit=2, operation=3, text="gone\x1b[2J\nall is well\u202e")
    assert Alert.parse(alert.encode()).text == "gone?[2J?all is well?"


def test_the_error_names_who_found_what() -> None:
    error = ALERT.error()
    assert isinstance(error, CollectiveError)
    assert error.code is Code.COLLECTIVE_TAMPERED
    assert str(error) == "rank 2 ended the group: a frame was changed on the way [collective-tampered]"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\x00" + data[1:],
        lambda data: b"\x0a" + data[1:],
        lambda data: data[:1] + b"\x01" + data[2:],
        lambda data: data[:6] + struct.pack(">H", 500) + data[8:],
        lambda data: data[:-1] + b"x",
        lambda data: data[:16] + b"\xff" + data[17:],
        lambda data: data[:16] + b"\x1b" + data[17:],
    ],
    ids=[
        "short",
        "long",
        "reason-0",
        "reason-10",
        "padding",
        "length",
        "after-the-text",
        "no-text",
        "control-character",
    ],
)
def test_an_alert_in_another_form_is_a_mismatch(change: object) -> None:
    with pytest.raises(CollectiveError) as caught:
        Alert.parse(change(ALERT.encode()))  # type: ignore[operator]
    assert caught.value.code is Code.COLLECTIVE_MISMATCH
