"""A line is verified from its first machine to its last; ways to forge it or to leave something out have codes."""

from __future__ import annotations

import pytest

from glasshouse.errors import ExitCode, FormatError, VerificationError
from glasshouse.jobs.verify.line_file import LineFile
from glasshouse.jobs.verify.line_verdict import leg_words, verify_line
from glasshouse.jobs.verify.verdict import Status
from simulators.line_world import LINE_STORIES, STOPPED, Line, LineStory, good_line, rewound_line
from simulators.world import World


@pytest.mark.parametrize("story", LINE_STORIES, ids=[story.name for story in LINE_STORIES])
def test_each_forged_line_is_refused_by_its_code(story: LineStory) -> None:
    line = story.forge()
    if story.code is None:
        assert verify_line(line.data, owner=line.owner.public).exit_code is ExitCode.DONE
        return
    with pytest.raises(VerificationError) as caught:
        verify_line(line.data, owner=line.owner.public)
    assert caught.value.code is story.code, caught.value


def test_a_verdict_says_of_each_leg_where_it_was_and_what_is_not_shown() -> None:
    line = good_line()
    verdict = verify_line(line.data, owner=line.owner.public)
    assert (verdict.status, verdict.not_wiped) == (Status.GOOD, (2,))
    assert "3 legs (assurance software): the training completed in the last." in verdict.sentence
    assert "wiped themselves is NOT SHOWN" in verdict.sentence
    first, second, third = map(leg_words, verdict.legs)
    assert "from the beginning, left checkpoint 2 (step 100); interrupted; wiped, by its receipt" in first
    assert "from checkpoint 2 (step 100), left checkpoint 3 (step 150); abandoned" in second
    assert "its wiping is NOT SHOWN" in second
    assert "from checkpoint 3 (step 150), left checkpoint 4 (step 200); completed" in third
    told = verdict.to_json()
    assert told["kind"] == "line"
    assert [(leg["leg"], leg["wiped"]) for leg in told["legs"]] == [(1, True), (2, False), (3, True)]  # type: ignore[index,union-attr,call-overload]


def test_a_rewind_is_said() -> None:
    line = rewound_line()
    verdict = verify_line(line.data, owner=line.owner.public)
    assert "from checkpoint 2 (step 100), an older one by its owner's order" in leg_words(verdict.legs[1])
    assert verdict.not_wiped == ()


def test_a_leg_that_says_completed_although_the_line_went_on_is_said() -> None:
    line = Line()
    line.leg((1,))
    line.leg((2,))
    verdict = verify_line(line.data, owner=line.owner.public)
    first, last = map(leg_words, verdict.legs)
    assert "its receipt says completed, and the line WENT ON after it" in first
    assert "WENT ON" not in last
    assert "A receipt of leg 1 says completed, and the line WENT ON after it." in verdict.sentence


def test_a_line_whose_last_leg_was_stopped_ends_as_that_did() -> None:
    line = Line()
    line.leg((1,))
    line.leg((2,), **STOPPED)
    verdict = verify_line(line.data, owner=line.owner.public)
    assert (verdict.status, verdict.exit_code) == (Status.NOT_COMPLETED, ExitCode.INTERRUPTED)


def test_a_line_under_another_owners_key_is_refused() -> None:
    with pytest.raises(VerificationError):
        verify_line(good_line().data, owner=World("thief").owner.public)


def test_a_line_file_is_read_to_the_byte() -> None:
    data = good_line().data
    assert LineFile.parse(data).encode() == data
    for wrong in (data[:-1], data + b"\n", data.replace(b"glasshouse-line/1", b"glasshouse-line/2"), b"{}"):
        with pytest.raises(FormatError):
            LineFile.parse(wrong)
