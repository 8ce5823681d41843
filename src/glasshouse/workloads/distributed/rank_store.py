"""torch's store for the ranks of one machine, kept by their worker: how they find each other before they are connected.

```
rank → worker   {"id", "keys", "type": "store", "what": "get" | "wait" | "check" | "delete"}
rank → worker   {"id", "keys": [key], "type": "store", "value", "what": "set" | "append"}
rank → worker   {"id", "expected", "keys": [key], "type": "store", "value", "what": "compare"}
rank → worker   {"amount", "id", "keys": [key], "type": "store", "what": "add"}
rank → worker   {"id", "keys": [], "type": "store", "what": "count" | "forget"}
worker → rank   {"count" | "value" | "refused", "id", "type": "stored"}
```
Values are base64url. `get` and `wait` are answered when every key is there; `forget` takes back the question of that
number. Law: values are not trusted, as in any store of a sealed group.
Source: torch.distributed.Store; what each word does is what TCPStore does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.task.channel import Message
from glasshouse.wire.canonical import b64encode
from glasshouse.wire.record import LEFT_OUT, Member, Record, choice, integer, items, octets, text

MAX_VALUE_BYTES = 16 << 10
"""Two of them with a name, in base64url, fit one control frame."""
MAX_KEY_CHARS = 1024
MAX_KEYS = 16
_WORDS = ("add", "append", "check", "compare", "count", "delete", "forget", "get", "set", "wait")
_WITH_VALUE = ("append", "compare", "set")
_OF_ONE = ("add", "get", *_WITH_VALUE)
_MOST_VALUES = 1 << 16
# Of one rank: what another asks takes none of it.
_MOST_WAITING = 1 << 10
_MOST_BYTES = 64 << 20
_MOST_DIGITS = 15
_MAX_AMOUNT = 10**_MOST_DIGITS

Answer: TypeAlias = Callable[[Message], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question(Record, name="store", constants={"type": "store"}):
    """One message of a rank, as above."""

    number: Annotated[int, Member("id")]
    what: Annotated[str, choice(_WORDS)]
    keys: Annotated[tuple[str, ...], items(MAX_KEYS, text(MAX_KEY_CHARS))]
    value: Annotated[bytes | None, octets(max_length=MAX_VALUE_BYTES), LEFT_OUT] = None
    expected: Annotated[bytes | None, octets(max_length=MAX_VALUE_BYTES), LEFT_OUT] = None
    amount: Annotated[int | None, integer(-_MAX_AMOUNT, _MAX_AMOUNT), LEFT_OUT] = None

    def __post_init__(self) -> None:
        given = tuple(one is not None for one in (self.value, self.expected, self.amount))
        if given != (self.what in _WITH_VALUE, self.what == "compare", self.what == "add"):
            raise FormatError(Code.SCHEMA, f"{self.what} with other members than it has")
        if self.what in _OF_ONE and len(self.keys) != 1:
            raise FormatError(Code.SCHEMA, f"{len(self.keys)} keys where one belongs")


class _Unanswered(NamedTuple):
    question: _Question
    answer: Answer


class KeyValues:
    """The values of one start of all ranks."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: dict[tuple[int, int], _Unanswered] = {}
        self._lock = threading.Lock()

    def take(self, rank: int, message: Message, answer: Answer) -> None:
        """Carry out a rank's question, and answer it, and the questions that waited for it.

        Args:
            answer: sends a message to that rank; called now or later, from any rank's thread.

        Raises:
            FormatError: none of these messages.
        """
        question = _Question.from_json(message)
        try:
            with self._lock:
                answers = self._carry_out(rank, question, answer)
        except ValueError as refused:
            answers = [(answer, question, {"refused": str(refused)})]
        for send, asked, found in answers:
            send({"id": asked.number, "type": "stored", **found})

    def _carry_out(self, rank: int, question: _Question, answer: Answer) -> list[tuple[Answer, _Question, Message]]:
        what, keys = question.what, question.keys
        if what == "forget":
            self._waiting.pop((rank, question.number), None)
            return []
        if what in ("get", "wait"):
            if sum(asker == rank for asker, _ in self._waiting) >= _MOST_WAITING:
                raise ValueError("more questions to the store at once than it keeps")
            self._waiting[rank, question.number] = _Unanswered(question, answer)
            return self._due()
        if what in _WITH_VALUE or what == "add":
            return [(answer, question, self._change(question)), *self._due()]
        if what == "delete":
            gone = [self._values.pop(key) for key in keys if key in self._values]
            self._bytes -= sum(map(len, gone))
            count = len(gone)
        else:
            count = len(self._values) if what == "count" else sum(key in self._values for key in keys)
        return [(answer, question, {"count": count})]

    def _change(self, question: _Question) -> Message:
        (key,) = question.keys
        held = self._values.get(key)
        if question.amount is not None:
            total = _number(held) + question.amount
            self._put(key, str(total).encode())
            return {"count": total}
        value = question.value or b""
        if question.expected is not None:
            # As TCPStore: a key that is not there is set if nothing was expected, else what was expected comes back.
            if held is not None and held != question.expected:
                return {"value": b64encode(held)}
            if held is None and question.expected:
                return {"value": b64encode(question.expected)}
        self._put(key, (held or b"") + value if question.what == "append" else value)
        return {"value": b64encode(value)}

    def _put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES or (key not in self._values and len(self._values) >= _MOST_VALUES):
            raise ValueError(f"the store takes {_MOST_VALUES} values, each of {MAX_VALUE_BYTES} bytes at most")
        held = self._bytes - len(self._values.get(key, b"")) + len(value)
        if held > _MOST_BYTES:
            raise ValueError(f"the store takes {_MOST_BYTES >> 20} MiB")
        self._bytes = held
        self._values[key] = value

    def _due(self) -> list[tuple[Answer, _Question, Message]]:
        """Take out the questions whose keys are all there, with their answers."""
        due = [asked for asked, one in self._waiting.items() if self._values.keys() >= set(one.question.keys)]
        answers: list[tuple[Answer, _Question, Message]] = []
        for question, answer in map(self._waiting.pop, due):
            value: Message = {"value": b64encode(self._values[question.keys[0]])} if question.what == "get" else {}
            answers.append((answer, question, value))
        return answers


def _number(held: bytes | None) -> int:
    text = b"0" if held is None else held
    if not text.removeprefix(b"-").isdigit() or len(text) > _MOST_DIGITS:
        raise ValueError("what stands in the store is no number to add to")
    return int(text)
