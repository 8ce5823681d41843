"""A name that no output could be sealed under is refused where a script makes it, in words that it can use."""

from __future__ import annotations

import pytest

from glasshouse.errors import Code, RunError
from glasshouse.task.deliveries import checked_name


@pytest.mark.parametrize("name", ["a", "checkpoints/step-5.safetensors", "Zürich.json", "患者/1.json", "🧬" * 63])
def test_an_ordinary_name_stays_as_it_is(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "/etc/passwd",
            "../up",
            "a//b",
            "a/",
            "./a",
            "a\\b",
            "a\x00b",
            "a\x1b[2J",
            "a\x9bm",
            "x" * 129,
            "🧬" * 64,
        ),
        *("photo\u202egpj.exe", "zero\u200bwidth", "\ufeffmark", "tag\U000e0041", "no text\udcff", "cafe\u0301"),
    ],
    ids=ascii,
)
def test_a_name_that_nothing_could_be_sealed_under_is_refused_and_shown_in_plain_letters(name: str) -> None:
    with pytest.raises(RunError) as refused:
        checked_name(name)
    assert refused.value.code is Code.OUTPUT_REFUSED
    assert refused.value.message.isascii()
    assert refused.value.message.isprintable()
