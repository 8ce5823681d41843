"""The way to another machine: the system's `ssh`, as its user has set it up.

Jump hosts, agents, hardware keys and known hosts are those of the user's own configuration; nothing of SSH is used but
one command and its standard streams. Secrecy and authenticity of a run never rest on it (spec/place.md).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glasshouse.errors import Code, UsageError

_URL = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?/?"
)
# A line that is dead is noticed within the product of both.
_ALIVE_S, _ALIVE_TIMES = 5, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SshHost:
    """A machine that is reached by `ssh`."""

    host: str  # its name or address, or a name of the user's configuration
    user: str | None = None  # None: as in the configuration; so the port
    port: int | None = None
    options: tuple[str, ...] = ()  # further arguments of `ssh`, before the host

    @classmethod
    def parse(cls, url: str) -> SshHost:
        """Read ``ssh://[user@]host[:port]``.

        Raises:
            UsageError: `usage`.
        """
        match = _URL.fullmatch(url)
        port = None if match is None or match["port"] is None else int(match["port"])
        if match is None or (port is not None and not 0 < port < 65536):
            raise UsageError(Code.USAGE, f"not a machine's address: {url}", hint="it looks like ssh://user@host:22")
        return cls(host=match["host"].strip("[]"), user=match["user"], port=port)

    def command(self, remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
        """Return the command that runs `remote` there; what is added to its end goes to `remote`.

        Args:
            remote: a command and its arguments.
            connect_s: how long to wait for the machine to answer at all.
            alone: over a connection of its own, also where the user's configuration shares one.
        """
        return [
            *("ssh", "-T", "-x", "-a"),
            # A question for a password or a passphrase would be seen on no terminal.
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_s}"),
            # Of the user's configuration, what is for people who log in.
            *("-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", "-o", "PermitLocalCommand=no"),
            *("-o", f"ServerAliveInterval={_ALIVE_S}", "-o", f"ServerAliveCountMax={_ALIVE_TIMES}"),
            *(("-o", "ControlPath=none") if alone else ()),
            *self.options,
            *(() if self.port is None else ("-p", str(self.port))),
            *(() if self.user is None else ("-l", self.user)),
            self.host,
            " ".join(map(_quoted, remote)),
        ]


def file_option(name: str, path: Path) -> str:
    """Return an option of ssh that names a file, for ``-o``: a line of its configuration, in which ``%`` is special.

    Raises:
        UsageError: `usage`: a path that not every version of ssh can be given.
    """
    text = str(path)
    if any(mark in text for mark in ('"', "\\", "${")) or any(ord(char) < 32 for char in text):
        raise UsageError(
            Code.USAGE,
            f"ssh cannot be given a file in {text!a}: a double quote, a backslash, ${{ or a line's end is in its path",
            hint="name a home without these: --home or GLASSHOUSE_HOME",
        )
    return f'{name}="{text.replace("%", "%%")}"'


def _quoted(word: str) -> str:
    """Quote a word for the shell there, and let it find its user's home."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)
