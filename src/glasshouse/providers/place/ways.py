"""The ways to a machine: the system's `ssh`, as its user has set it up, and `srun` on a Slurm cluster's login node.

Jump hosts, agents, hardware keys and known hosts are those of the user's own configuration; nothing of SSH is used but
one command and its standard streams. Secrecy and authenticity of a run never rest on it (spec/place.md).

What is started on a node of a Slurm job belongs to the job and to no line: the batch script runs one process a node
that starts keepers when a place asks it (node.py). A step of `srun`'s is a line like any other, and may be lost.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from glasshouse.errors import Code, UsageError
from glasshouse.providers.serve import node

_SSH_URL = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?/?"
)
# A line that is dead is noticed within the product of both.
_ALIVE_S, _ALIVE_TIMES = 5, 3
# Where places are made on a node: on its own disk, for what lies in a home is seen by every node.
NODE_FOLDER = "/tmp"  # noqa: S108 - below it the folder is made new, and for this user alone
_SLURM_URL = re.compile(
    r"slurm://(?P<login>[^/]*)/(?P<job>[1-9][0-9]{0,18})/(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,252})/?"
)
# It takes no notice of the SIGTERM with which Slurm ends a job: what the run seals then is still fetched through it.
_ENTER = (
    "trap '' TERM; "
    '[ -S "$0/node" ] || { echo "nothing of the job\'s batch script is at $0 (yet)" >&2; exit 1; }; exec "$@"'
)
_PASSED = "HOME,PATH,LANG"
_SCRIPT = """\
#!/bin/sh
#SBATCH --no-requeue
#SBATCH --signal=B:TERM@{lead_s}
#SBATCH --ntasks-per-node=1
#SBATCH --export={passed}
# Runs one process a node, which holds what `glasshouse run --on` starts there. It ends with the job, and in order when
# this script gets SIGTERM: {lead_s} s before the time limit, or by `scancel --batch --signal=TERM JOB`.
program=$(cat <<'GLASSHOUSE'
{program}
GLASSHOUSE
)
step() {{
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --overlap --wait=0 \\
    --kill-on-bad-exit=0 {python} -I -B -c "$program" "$@"
}}
folder={folder}
trap 'step end "$folder" {end_s} &' TERM
step hold "$folder" &
holding=$!
while kill -0 "$holding" 2>/dev/null; do wait "$holding"; done
"""
# Slurm sends a signal up to a minute early, and kills on time; the last of it is for the wipe.
_LEAD_S, _END_S = 300, 240

# What ssh, srun or a machine prints before its connection ends, and what to do about it.
_PYTHON = "name an interpreter of that machine that has it: glasshouse machine add --python"
_OVER = (
    "the job is over, and nothing runs there any more: submit another; for a run that it had: glasshouse stop --give-up"
)
_HINTS = (
    ("pending execution", "wait until the job runs: squeue"),
    ("batch script is at", "its job has to run what `glasshouse machine slurm` prints, with the same --folder here"),
    ("Invalid job id", _OVER),
    ("has expired", _OVER),
    ("already completing", _OVER),
    ("node configuration is not available", "name a node that the job has: squeue --format='%i %N'"),
    ("srun: command not found", "name the cluster's login node: glasshouse machine list"),
    ("No module named", f"install this version of Glasshouse there, or {_PYTHON}"),
    ("SyntaxError", f"that Python is too old, Glasshouse needs 3.11: {_PYTHON}"),
    ("IDENTIFICATION HAS CHANGED", "the machine has another host key than before: find out why before you go on"),
    ("Host key verification failed", "compare the machine's host key once by hand, with ssh and the same name"),
    ("Permission denied", "log in once by hand with ssh and the same name: the user, or the key, is not accepted"),
    ("cannot be used", "make room there, or name another folder: glasshouse machine add --folder"),
    ("not found", _PYTHON),
    ("No such file or directory", _PYTHON),
    ("Could not resolve hostname", "look at the address: glasshouse machine list"),
    ("Connection refused", "see that sshd runs there, and at this port"),
    ("timed out", "see that the machine is up, and that ssh with the same name reaches it"),
    ("unreachable", "see that this machine has a network, and that ssh with the same name reaches the other"),
)
SILENT = (
    "log in by hand with ssh and the same name; if that hangs too, end a shared connection that is dead: ssh -O exit"
)
ELSE = (
    "see that the machine is up and stays up: log in by hand with ssh and the same name; one that is rented has its "
    "log on the provider's page"
)


class Way(Protocol):
    """How a command is run on a machine."""

    def command(self, remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
        """Return the command here that runs `remote` there; what is added to its end goes to `remote`.

        Args:
            remote: a command and its arguments.
            connect_s: how long to wait for the machine to answer at all.
            alone: over a connection of its own, also where the user's configuration shares one.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class SshHost:
    """A machine that is reached by `ssh`."""

    host: str  # its name or address, or a name of the user's configuration
    user: str | None = None  # None: as in the configuration; so the port
    port: int | None = None
    options: tuple[str, ...] = ()  # further arguments of `ssh`, before the host

    @classmethod
    def parse(cls, url: str) -> SshHost:
        """Read ``ssh://[user@]host[:port]``; raises `UsageError`."""
        match = _SSH_URL.fullmatch(url)
        port = None if match is None or match["port"] is None else int(match["port"])
        if match is None or (port is not None and not 0 < port < 65536):
            raise UsageError(Code.USAGE, f"not a machine's address: {url}", hint="it looks like ssh://user@host:22")
        return cls(host=match["host"].strip("[]"), user=match["user"], port=port)

    def command(self, remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
        """Return the command here that runs `remote` there; see `Way`."""
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
        why = f"ssh cannot be given a file in {text!a}: a double quote, a backslash, ${{ or a line's end is in its path"
        hint = "name a home without these: --home or GLASSHOUSE_HOME"
        raise UsageError(Code.USAGE, why, hint=hint)
    return f'{name}="{text.replace("%", "%%")}"'


def _quoted(word: str) -> str:
    """Quote a word for the shell there, and let it find its user's home."""
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


class _Here:
    """This machine is the login node."""

    def command(self, remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
        return [os.path.expanduser(word) if word.startswith("~/") else word for word in remote]  # noqa: PTH111


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmNode:
    """One node of a job that runs `batch_script`.

    No host key is needed for it: between login node and node the site vouches, with munge; and nothing rests on it.
    """

    login: Way  # where `srun` is run
    job: int  # the job's number
    node: str  # its name in Slurm
    folder: str = NODE_FOLDER  # as of `batch_script`

    @classmethod
    def parse(cls, url: str, *, options: tuple[str, ...] = ()) -> SlurmNode:
        """Read ``slurm://[[user@]login[:port]]/JOB/NODE``; without a login node this machine is one.

        Raises:
            UsageError: `usage`.
        """
        match = _SLURM_URL.fullmatch(url)
        if match is None:
            hint = "it looks like slurm://user@login/JOB/NODE, or slurm:///JOB/NODE on the login node itself"
            raise UsageError(Code.USAGE, f"not a node of a Slurm job: {url}", hint=hint)
        return cls(login=login_of(match["login"], options=options), job=int(match["job"]), node=match["node"])

    @property
    def place(self) -> str:
        """The folder of the place there."""
        return f"{self.folder}/glasshouse-{self.job}-{self.node}"

    def command(self, remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
        """Return the command here that runs `remote` there; see `Way`."""
        step = [
            *("srun", f"--jobid={self.job}", f"--nodelist={self.node}", "--nodes=1", "--ntasks=1", "--overlap"),
            # Without the first, what has no line end is held back. The last: as of the batch script's own step.
            *("--unbuffered", "--quiet", f"--immediate={connect_s}", f"--export={_PASSED}"),
            *("sh", "-c", _ENTER, self.place),
        ]
        return self.login.command([*step, *remote], connect_s=connect_s, alone=alone)


def login_of(words: str, *, options: tuple[str, ...] = ()) -> Way:
    """Return the login node that ``[user@]host[:port]`` names; empty for this machine. Raises `UsageError`."""
    return replace(SshHost.parse(f"ssh://{words}"), options=options) if words else _Here()


def batch_script(*, python: str = "python3", folder: str = NODE_FOLDER) -> str:
    """Return what `sbatch` is given, on any number of nodes.

    Args:
        python: an interpreter of the nodes, 3.9 or newer, which need have nothing of ours.
        folder: a folder on each node's own disk.

    Raises:
        UsageError: `usage`: a folder that is not absolute.
    """
    if not folder.startswith("/"):
        raise UsageError(Code.USAGE, f"a folder of a node is named from its root: {folder}")
    return _SCRIPT.format(
        program=inspect.getsource(node).rstrip(),
        python=shlex.quote(python),
        folder=shlex.quote(folder),
        # The controller keeps a job's environment, and a shell's may have keys in it.
        passed=_PASSED,
        lead_s=_LEAD_S,
        end_s=_END_S,
    )


def hint_of(printed: str, otherwise: str) -> str:
    """Return what to do about what a command printed before its connection ended."""
    return next((hint for word, hint in _HINTS if word in printed), otherwise)
