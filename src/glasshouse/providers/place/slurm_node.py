"""The way to a node of a Slurm job: `srun` on the login node, which is this machine or is reached by `ssh`.

What is started there belongs to the job and to no line: the batch script runs one process a node that starts keepers
when a place asks it (node.py). A step of `srun`'s is a line like any other, and may be lost.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glasshouse.errors import Code, UsageError
from glasshouse.providers.place.base import Way
from glasshouse.providers.place.ssh_host import SshHost
from glasshouse.providers.serve import node

# Where places are made on a node: on its own disk, for what lies in a home is seen by every node.
NODE_FOLDER = "/tmp"  # noqa: S108 - below it the folder is made new, and for this user alone
_URL = re.compile(r"slurm://(?P<login>[^/]*)/(?P<job>[1-9][0-9]{0,18})/(?P<node>[A-Za-z0-9][A-Za-z0-9_.-]{0,252})/?")
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


@dataclass(frozen=True, slots=True)
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

        Args:
            options: as of `SshHost`, for the way to the login node.

        Raises:
            UsageError: `usage`.
        """
        match = _URL.fullmatch(url)
        if match is None:
            hint = "it looks like slurm://user@login/JOB/NODE, or slurm:///JOB/NODE on the login node itself"
            raise UsageError(Code.USAGE, f"not a node of a Slurm job: {url}", hint=hint)
        return cls(login=login_of(match["login"], options=options), job=int(match["job"]), node=match["node"])

    @property
    def place(self) -> str:
        """The folder of the place there."""
        return f"{self.folder}/glasshouse-{self.job}-{self.node}"

    def command(self, remote: Sequence[str], *, connect_s: int, alone: bool = False) -> list[str]:
        """Return the command here that runs `remote` there, as of `SshHost.command`."""
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
