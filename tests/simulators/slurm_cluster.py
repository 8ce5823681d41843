"""A real Slurm on this machine: munge, controller and two nodes in their own folder; this machine is the login too."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.ports import free_port
from tools.waiting import wait_for

__all__ = ["Cluster", "needs_slurm", "running_slurm"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_MISSING = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
needs_slurm = pytest.mark.skipif(bool(_MISSING), reason=f"Slurm is missing: {', '.join(_MISSING)}")
_FREEZER = Path("/sys/fs/cgroup/freezer")
_CONFIGURATION = """\
ClusterName=glasshouse
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType={tracking}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=400
KillWait={kill_wait_s}
MinJobAge=300
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
NodeName={first} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=2 RealMemory=1000 Gres=gpu:a100:2
NodeName={second} NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=2 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes={second} MaxTime=5 State=UP
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster that runs.

    Attributes:
        folder: everything of it is there.
        nodes: their names.
        environment: with which its commands find it.
        tracked: whether a step's processes are held together by a control group, as on most clusters.
    """

    folder: Path
    nodes: tuple[str, str]
    environment: Mapping[str, str]
    tracked: bool

    @property
    def for_sshd(self) -> str:
        """What a login node's sshd has to be told, so that its users' commands find the cluster."""
        return f"SetEnv SLURM_CONF={self.environment['SLURM_CONF']}\n"

    def ask(self, *command: str, text: str | None = None) -> str:
        """Run one of Slurm's commands and return what it prints."""
        done = subprocess.run(
            command, input=text, env=self.environment, cwd=self.folder,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the jobs that are not over."""
        return self.ask("squeue", "--noheader", "--format=%i").split()

    def is_idle(self) -> bool:
        """Return whether all nodes are free."""
        found = subprocess.run(
            ("sinfo", "--noheader", "--partition=main", "--Node", "--format=%t"),
            env=self.environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return found.stdout.split() == ["idle"] * len(self.nodes)

    def until_over(self, job: str, *, within_s: float = 60.0) -> None:
        wait_for(lambda: job not in self.jobs(), within_s=within_s)


@contextmanager
def running_slurm(*, kill_wait_s: int = 10) -> Iterator[Cluster]:
    """Run a cluster as long as the block lasts; its jobs end with it.

    Args:
        kill_wait_s: between SIGTERM and SIGKILL at a job's end.
    """
    tracked = os.access(_FREEZER, os.W_OK)
    mark = os.urandom(3).hex()  # control groups of nodes have their names, and another cluster may run beside this one
    nodes = f"n1-{mark}", f"n2-{mark}"
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # where a socket has a name that is short enough
    folder.chmod(0o711)  # munged serves no socket that others cannot come to
    try:
        for name in ("state", *nodes):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Two GPUs, by the names of devices that every machine has.
        gpus = "".join(f"NodeName={nodes[0]} Name=gpu Type=a100 File=/dev/{one}\n" for one in ("null", "zero"))
        (folder / "gres.conf").write_text(gpus)
        (folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                folder=folder,
                controller=free_port(),
                tracking="proctrack/cgroup" if tracked else "proctrack/linuxproc",
                kill_wait_s=kill_wait_s,
                first=nodes[0],
                second=nodes[1],
                first_port=free_port(),
                second_port=free_port(),
            )
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SRUN"))}
        environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        cluster = Cluster(folder=folder, nodes=nodes, environment=environment, tracked=tracked)
        with ExitStack() as running:
            files = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
            _daemon(running, cluster, "munged", "--foreground", f"--key-file={folder}/key", *files)
            wait_for((folder / "munge.socket").exists)
            _daemon(running, cluster, "slurmctld", "-D")
            for name in nodes:
                _daemon(running, cluster, "slurmd", "-D", "-N", name)
            running.callback(_end_jobs, cluster)
            wait_for(cluster.is_idle, told=lambda: (folder / "log").read_text()[-2000:])
            yield cluster
    finally:
        shutil.rmtree(folder)
        for name in nodes:
            for path in (_FREEZER / f"slurm_{name}" / "uid_0", _FREEZER / f"slurm_{name}"):
                with suppress(OSError):
                    path.rmdir()


def _daemon(running: ExitStack, cluster: Cluster, *command: str) -> None:
    log = running.enter_context((cluster.folder / "log").open("ab"))
    process = running.enter_context(subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log))
    running.callback(process.terminate)


def _end_jobs(cluster: Cluster) -> None:
    """Have nothing of any job left when the daemons end."""
    for job in cluster.jobs():
        cluster.ask("scancel", job)
    wait_for(lambda: not cluster.jobs())
