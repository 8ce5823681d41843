"""Messages between the ranks of a job and the worker that started them, over a Unix socket inside their sandbox.

```
rank → worker   {"token", "type": "join"}            once, by the process that the worker started, before any script
worker → rank   {"bytes", "type": "joined"}          with descriptors: see `workloads.ranks`
rank → worker   {"token", "type": "group-secret"}    on a connection of its own, once
worker → rank   {"secret", "type": "group-secret"}
worker → rank   {"code", "type": "refused"}          in the place of either answer
```
Where a socket may have no name, a rank inherits its connection with the worker: its first message there is
``{"type": "join"}``, without a token, and it asks for the secret on the same connection (`workloads.rank_pairs`).

Each is a control frame of `wire.frames`. A token is one rank's, comes in that rank's environment, is good for
one request of its type, and is taken out of the environment when it is used. Laws: closed schemas; nothing here
does I/O; no error quotes a token or a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from glasshouse.errors import Code, CollectiveError
from glasshouse.wire import frames
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import GROUP_SECRET_BYTES
from glasshouse.wire.record import Identifier, Member, Record, choice, digest, octets

# Names of variables of the environment.
SOCKET = "GLASSHOUSE_GROUP_SOCKET"  # the path of the socket
CHANNEL = "GLASSHOUSE_RANK_CHANNEL"  # the number of an inherited descriptor, in the place of the socket's path
SECRET_TOKEN = "GLASSHOUSE_GROUP_TOKEN"  # noqa: S105 - a rank's token for `group-secret`, in hexadecimal
JOIN_TOKEN = "GLASSHOUSE_RANK_TOKEN"  # noqa: S105 - a rank's token for `join`, in hexadecimal

TOKEN_BYTES = 32
MAX_FRAME_BYTES = 4096  # of an exchange up to its answer

_TOKEN = re.compile(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(Record, name="rank request"):
    """What a rank asks for first on a connection."""

    kind: Annotated[str, Member("type"), choice(("group-secret", "join"))]
    token: Annotated[bytes, digest(TOKEN_BYTES)] = field(repr=False)  # its right to ask; never shown

    def frame(self) -> bytes:
        """Return the control frame."""
        return frames.control(self.to_json())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Given(Record, name="group secret", constants={"type": "group-secret"}):
    secret: Annotated[bytes, octets(GROUP_SECRET_BYTES)] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refused(Record, name="group secret", constants={"type": "refused"}):
    code: Identifier


def ask_secret(token: str) -> bytes:
    """Return the frame that asks for the group secret, with the token of the environment.

    Raises:
        CollectiveError: `group-secret-missing`: that is no token.
    """
    if not _TOKEN.fullmatch(token):
        raise CollectiveError(Code.GROUP_SECRET, f"{SECRET_TOKEN} does not hold a token")
    return Request(kind="group-secret", token=bytes.fromhex(token)).frame()


def give_secret(secret: bytes | bytearray | memoryview) -> bytes:
    """Return the frame that answers with the group secret."""
    if len(secret) != GROUP_SECRET_BYTES:
        raise ValueError(f"a group secret of {len(secret)} bytes")
    return frames.control(_Given(secret=bytes(secret)).to_json())


def refuse(code: Code) -> bytes:
    """Return the frame that answers that the request is refused."""
    return frames.control(_Refused(code=code.value).to_json())


def read_secret(value: Json) -> bytes:
    """Return the group secret, 32 bytes, from the answer to `ask_secret`.

    Raises:
        FormatError: `schema-invalid`: it is no answer.
        CollectiveError: `group-secret-missing`: refused.
    """
    if isinstance(value, Mapping) and value.get("type") == "refused":
        _Refused.from_json(value)
        raise CollectiveError(
            Code.GROUP_SECRET,
            "what started this rank does not give it the secret of its group",
            hint="the secret is given once to each rank that `glasshouse run --ranks` started, and not to its children",
        )
    return _Given.from_json(value).secret
