"""A place that answers each question with the next of what it was told to."""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["Step", "liar"]

Step = dict[str, Any]
"""A message, in which `ID` is the question's number; or ``{"data": bytes}`` of its stream, or of another's."""

_LIAR = """
import json, os, sys
from glasshouse.providers.protocol.link import Link
link = Link(0, 1)
os.set_blocking(1, True)
os.write(1, ("\\nglasshouse-place 1 " + sys.argv[2] + "\\n").encode())
story = json.loads(sys.argv[1])
while story:
    for message in link.receive():
        if not isinstance(message, dict) or "ask" not in message or not story:
            continue
        for step in story.pop(0):
            if "data" in step:
                link.send_data(step.get("stream", message["id"]), b"x" * step["data"])
            else:
                link.send({name: message["id"] if value == "ID" else value for name, value in step.items()})
    import time; time.sleep(0.01)
os.set_blocking(0, True)
while os.read(0, 1 << 16):
    pass
"""


def liar(*story: list[Step]) -> list[str]:
    """Return the command that leads to it.

    Args:
        story: what it does at each question.
    """
    return [sys.executable, "-I", "-B", "-c", _LIAR, json.dumps(story)]
