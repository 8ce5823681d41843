"""What the ranks of one machine tell each other before they are connected: torch's store, kept by their worker.

```
rank → worker   {"id", "keys", "type": "store", "what": "get" | "wait" | "check" | "delete"}
rank → worker   {"id", "keys": [key], "type": "store", "value", "what": "set" | "append"}
rank → worker   {"id", "expected", "keys": [key], "type": "store", "value", "what": "compare"}
rank → worker   {"amount", "id", "keys": [key], "type": "store", "what": "add"}
rank → worker   {"id", "keys": [], "type": "store", "what": "count" | "forget"}
worker → rank   {"count" | "value" | "refused", "id", "type": "stored"}
```
Values are base64url. `get` and `wait` are answered when every key is there; `forget` takes back the question of that
number. Law: nothing is believed that stands here, as in any store of a sealed group.
Source: torch.distributed.Store; what each word does is what TCPStore does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from glasshouse.errors import Code, FormatError
from glasshouse.task.channel import Message
from glasshouse.wire.fields import Fields, b64encode

__all__ = ["MAX_KEYS", "MAX_KEY_CHARS", "MAX_VALUE_BYTES", "KeyValues"]

MAX_VALUE_BYTES = 16 << 10
"""Two of them with a name, in base64url, fit one control frame."""
MAX_KEY_CHARS = 1024
MAX_KEYS = 16
_WORDS = ("add", "append", "check", "compare", "count", "delete", "forget", "get", "set", "wait")
_MOST_VALUES = 1 << 16
_MOST_WAITING = 1 << 10
_MOST_DIGITS = 15
_MAX_AMOUNT = 10**_MOST_DIGITS

Answer: TypeAlias = Callable[[Message], None]


class _Waiting(NamedTuple):
    keys: frozenset[str]
    value_of: str | None
    answer: Answer


class KeyValues:
    """The values of one start of all ranks."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._lock = threading.Lock()

    def take(self, rank: int, message: Message, answer: Answer) -> None:
        """Carry out what a rank asks, and answer it, and those who waited for it.

        Args:
            rank: who asks; each counts its questions for itself.
            message: as above.
            answer: sends a message to that rank; called now or later, from any rank's thread.

        Raises:
            FormatError: it is none of these messages.
        """
        fields = Fields(message, "store")
        fields.choice("type", ["store"])
        number = fields.integer("id")
        what = fields.choice("what", _WORDS)
        keys = fields.texts("keys", max_items=MAX_KEYS, max_chars=MAX_KEY_CHARS)
        answers: list[tuple[Answer, Message]]
        try:
            with self._lock:
                answers = self._carry_out(fields, (rank, number), what, keys, answer)
        except ValueError as refused:
            answers = [(answer, {"id": number, "refused": str(refused), "type": "stored"})]
        else:
            fields.end()
        for send, said in answers:
            send(said)

    def _carry_out(
        self, fields: Fields, question: tuple[int, int], what: str, keys: list[str], answer: Answer
    ) -> list[tuple[Answer, Message]]:
        stored: Message = {"id": question[1], "type": "stored"}
        if what == "forget":
            self._waiting.pop(question, None)
            return []
        if what == "count":
            return [(answer, {**stored, "count": len(self._values)})]
        if what == "check":
            return [(answer, {**stored, "count": sum(key in self._values for key in keys)})]
        if what == "delete":
            return [(answer, {**stored, "count": sum(self._values.pop(key, None) is not None for key in keys)})]
        if what in ("get", "wait"):
            if len(self._waiting) >= _MOST_WAITING:
                raise ValueError("more questions to the store at once than it keeps")
            value_of = _one(keys) if what == "get" else None
            self._waiting[question] = _Waiting(frozenset(keys), value_of, answer)
            return self._due()
        key = _one(keys)
        result = self._change(fields, what, key)
        due = self._due()
        return [(answer, {**stored, **result}), *due]

    def _change(self, fields: Fields, what: str, key: str) -> Message:
        held = self._values.get(key)
        if what == "add":
            total = _number(held) + fields.integer("amount", low=-_MAX_AMOUNT, high=_MAX_AMOUNT)
            self._put(key, str(total).encode())
            return {"count": total}
        value = fields.octets("value", max_length=MAX_VALUE_BYTES)
        if what == "compare":
            expected = fields.octets("expected", max_length=MAX_VALUE_BYTES)
            # As TCPStore: a key that is not there is set if nothing was expected, else what was expected comes back.
            if held is not None and held != expected:
                return {"value": b64encode(held)}
            if held is None and expected:
                return {"value": b64encode(expected)}
        self._put(key, (held or b"") + value if what == "append" else value)
        return {"value": b64encode(value)}

    def _put(self, key: str, value: bytes) -> None:
        if len(value) > MAX_VALUE_BYTES or (key not in self._values and len(self._values) >= _MOST_VALUES):
            raise ValueError(f"the store takes {_MOST_VALUES} values, each of {MAX_VALUE_BYTES} bytes at most")
        self._values[key] = value

    def _due(self) -> list[tuple[Answer, Message]]:
        """Take out the questions whose keys are all there, with their answers."""
        due = {question: one for question, one in self._waiting.items() if one.keys <= self._values.keys()}
        answers: list[tuple[Answer, Message]] = []
        for question, (_, value_of, answer) in due.items():
            del self._waiting[question]
            said: Message = {"id": question[1], "type": "stored"}
            answers.append((answer, said if value_of is None else {**said, "value": b64encode(self._values[value_of])}))
        return answers


def _one(keys: list[str]) -> str:
    if len(keys) != 1:
        raise FormatError(Code.SCHEMA, f"{len(keys)} keys where one belongs")
    return keys[0]


def _number(held: bytes | None) -> int:
    text = b"0" if held is None else held
    if not text.removeprefix(b"-").isdigit() or len(text) > _MOST_DIGITS:
        raise ValueError("what stands in the store is no number to add to")
    return int(text)
