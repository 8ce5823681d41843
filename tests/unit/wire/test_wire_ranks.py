"""Messages between ranks and the worker that started them: one token, one request, one answer."""

from __future__ import annotations

from typing import Any

import pytest

from glasshouse.errors import Code, CollectiveError, FormatError
from glasshouse.wire import frames, ranks
from glasshouse.wire.canonical import b64encode

TOKEN = bytes(range(32))
SECRET = bytes(range(100, 132))


def value_of(frame: bytes) -> Any:
    (only,) = list(frames.Decoder().feed(frame))
    assert only[0] == frames.CONTROL
    assert len(frame) <= ranks.MAX_FRAME_BYTES
    return only[1]


def test_a_request_arrives_as_it_was_made_and_shows_no_token() -> None:
    for kind in ("join", "group-secret"):
        request = ranks.Request(kind=kind, token=TOKEN)
        assert ranks.Request.from_json(value_of(request.frame())) == request
        assert TOKEN.hex() not in repr(request)
    assert ranks.Request.from_json(value_of(ranks.ask_secret(TOKEN.hex()))).kind == "group-secret"


@pytest.mark.parametrize(
    "request_",
    [
        {"type": "join"},
        {"token": TOKEN.hex(), "type": "key"},
        {"token": TOKEN.hex()[:-2], "type": "join"},
        {"token": TOKEN.hex().upper(), "type": "join"},
        {"token": TOKEN.hex(), "type": "join", "rank": 0},
        [],
        None,
    ],
)
def test_what_is_no_request_is_refused(request_: Any) -> None:
    with pytest.raises(FormatError):
        ranks.Request.from_json(request_)


@pytest.mark.parametrize("text", ["", "00", "g" * 64, TOKEN.hex() + "0", TOKEN.hex().upper(), "\x00" * 64])
def test_what_is_no_token_is_not_sent_and_not_quoted(text: str) -> None:
    with pytest.raises(CollectiveError) as refusal:
        ranks.ask_secret(text)
    assert refusal.value.code is Code.GROUP_SECRET
    assert not text or text not in str(refusal.value)


def test_the_secret_arrives() -> None:
    assert ranks.read_secret(value_of(ranks.give_secret(SECRET))) == SECRET
    with pytest.raises(ValueError, match="31 bytes"):
        ranks.give_secret(SECRET[:31])


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(CollectiveError) as refusal:
        ranks.read_secret(value_of(ranks.refuse(Code.RANK_REFUSED)))
    assert refusal.value.code is Code.GROUP_SECRET
    assert "--ranks" in refusal.value.hint


@pytest.mark.parametrize(
    "answer",
    [
        {"type": "group-secret"},
        {"secret": b64encode(SECRET[:31]), "type": "group-secret"},
        {"secret": SECRET.hex(), "type": "group-secret"},
        {"secret": b64encode(SECRET), "type": "joined"},
        {"secret": b64encode(SECRET), "type": "group-secret", "rank": 1},
        {"type": "refused"},
        "secret",
    ],
)
def test_what_is_no_answer_gives_no_secret_and_quotes_none(answer: Any) -> None:
    with pytest.raises(FormatError) as refusal:
        ranks.read_secret(answer)
    assert b64encode(SECRET) not in str(refusal.value)
