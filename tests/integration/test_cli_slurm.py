"""A user of a Slurm cluster: a batch job whose nodes are machines, runs on them, and every way in which those end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from glasshouse.attestation.measurements.measurement import measured_files
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.references.known_references import add_reference
from glasshouse.providers.serve.keepers import started_ticks
from simulators.command_line import SCRIPT, SUM, Shell
from simulators.line_user import add_checkpoints, wait_for_checkpoint
from simulators.slurm_cluster import Cluster, needs_slurm, running_slurm
from tools.machine import needs_root
from tools.sshd import needs_sshd, serving_ssh
from tools.waiting import wait_for

pytestmark = [pytest.mark.slow, needs_root, needs_slurm]

QUICK = Path(__file__).parents[1] / "tools" / "quick_renting.py"


@dataclass(frozen=True, slots=True)
class User:
    """One with a shell on the login node, and a folder on the nodes' disks."""

    shell: Shell
    cluster: Cluster
    nodes: Path

    def submit(self, *more: str, python: str = sys.executable) -> str:
        """Submit the batch script, and return the job's number when its nodes hold what is started there."""
        made = self.shell.ask("machine", "slurm", "--python", python, "--folder", str(self.nodes))
        assert made.code == 0, made.err
        output = self.nodes.parent / "batch-output"
        job = self.cluster.ask("sbatch", "--parsable", "--time=10", f"--output={output}-%j", *more, text=made.out)
        count = 2 if "--nodes=2" in more else 1
        wait_for(lambda: len(list(self.nodes.glob(f"glasshouse-{job}-*/node"))) == count)
        return job

    def name(self, name: str, job: str, node: int, *more: str, login: str = "") -> None:
        ways = ("--python", sys.executable, "--folder", str(self.nodes), "--force", *more)
        named = self.shell.ask("machine", "add", name, f"slurm://{login}/{job}/{self.cluster.nodes[node]}", *ways)
        assert named.code == 0, named.err

    def runtime(self) -> int:
        """Return the process of the one runtime that a node has."""
        [keeper] = self.nodes.glob("*/runs/*/keeper.json")
        return int(json.loads(keeper.read_text())["runtime"])

    def left_there(self) -> list[Path]:
        """What the nodes still have of runs."""
        return [path for kind in ("runs", "files") for path in self.nodes.glob(f"*/{kind}/*")]


def processes(program: str, *words: str, least: int = 1) -> list[int]:
    """Return the processes of a program whose arguments are, or have in them, these words; at least `least`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            first, *others = (process / "cmdline").read_text().split("\0")
            if first.endswith(program) and all(any(word in other for other in others) for word in words):
                found.append(int(process.name))
    assert len(found) >= least
    return found


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("user", "nodes"):
        (folder / name).mkdir()
    shell = Shell(folder / "user")
    with running_slurm() as cluster:
        shell.environment |= cluster.environment
        cluster = replace(cluster, environment={**cluster.environment, "A_TOKEN": "not-for-slurm"})
        assert shell.ask("init").code == 0
        shell.job("short", "24")
        shell.job("middle", "100")
        shell.job("long", "1200")
        longer = shell.job("longer", "12000")
        longer.write_text(longer.read_text().replace('"5m"', '"20m"'))
        yield User(shell, cluster, folder / "nodes")
    assert shell.left_running() == []


@pytest.fixture
def job(user: User) -> Iterator[str]:
    """A job of one node, which is called ``one``; nothing of it is left on the node afterwards."""
    job = user.submit(f"--nodelist={user.cluster.nodes[1]}")
    user.name("one", job, 1)
    yield job
    user.cluster.ask("scancel", job)
    user.cluster.until_over(job)
    assert list(user.nodes.iterdir()) == []


def test_a_run_goes_on_where_the_srun_that_started_it_is_killed(user: User, job: str) -> None:
    running = user.shell.start("run", "middle.toml", "--on", "one", "--json")
    user.shell.wait_until_running()
    runtime = user.runtime()
    # Of the environment of the one who submits, which Slurm keeps with the job, nothing goes along that may be secret.
    [holder, *_] = processes(sys.executable, "hold", str(user.nodes))
    assert "not-for-slurm" not in Path(f"/proc/{holder}/environ").read_text()
    for line in processes("srun", "glasshouse.providers.serve"):
        os.kill(line, signal.SIGKILL)
    ended = user.shell.end(running)
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert (ended.object["outcome"], ended.object["receipt"]["verdict"]) == ("completed", "good")
    assert user.left_there() == []
    assert started_ticks(runtime) is None
    # The steps whose `srun` was killed may live on: for five minutes, or until the job ends.
    for orphan in processes(sys.executable, "glasshouse.providers.serve", str(user.nodes), least=0):
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("how", [(), ("--batch", "--signal=TERM")], ids=["cancelled", "asked-to-end"])
def test_a_job_that_ends_before_its_run_has_it_sealed_wiped_and_fetched(user: User, job: str, how: tuple[str]) -> None:
    running = user.shell.start("run", "long.toml", "--on", "one", "--json")
    user.shell.wait_until_running()
    runtime = user.runtime()
    user.cluster.ask("scancel", *how, job)
    ended = user.shell.end(running)
    assert (ended.code, ended.object["outcome"]) == (ExitCode.INTERRUPTED, "interrupted"), ended.out + ended.err
    assert ended.object["receipt"]["verdict"] == "not-completed"
    assert {probe["result"] for probe in ended.object["zeroization"]} == {"clean"}
    assert started_ticks(runtime) is None
    user.cluster.until_over(job)


def test_a_node_that_is_taken_away_at_once_leaves_no_runtime_and_the_run_is_lost(user: User, job: str) -> None:
    if not user.cluster.tracked:
        pytest.skip("this kernel's control groups of version 1 are not there, by which Slurm holds a step together")
    running = user.shell.start("run", "long.toml", "--on", "one", "--detach", "--json")
    run = user.shell.end(running).object["run_id"]
    user.shell.wait_until_running()
    runtime = user.runtime()
    for holder in processes(sys.executable, "hold", str(user.nodes)):
        os.kill(holder, signal.SIGKILL)
    user.cluster.until_over(job)
    assert started_ticks(runtime) is None
    wait_for(lambda: user.shell.ask("status", run, "--json").object["outcome"] == "lost")
    assert user.shell.ask("status", run, "--json").object["receipt"]["verdict"] == "no-receipt"
    # What Slurm killed on a node cannot clear up there: packages and logs, which are sealed, and no plaintext.
    [left] = user.nodes.iterdir()
    shutil.rmtree(left)


@pytest.mark.long
def test_what_is_no_node_of_a_job_that_runs_is_told_with_what_to_do(user: User, job: str) -> None:
    waiting = user.cluster.ask("sbatch", "--parsable", "--hold", text="#!/bin/sh\n")
    other = user.cluster.ask(
        "sbatch", "--parsable", f"--nodelist={user.cluster.nodes[0]}", text="#!/bin/sh\nsleep 99\n"
    )
    over = user.cluster.ask("sbatch", "--parsable", "--wait", text="#!/bin/sh\n")
    wait_for(lambda: "R" in user.cluster.ask("squeue", "--noheader", "--format=%t", f"--jobs={other}"))
    for number, node, said, hint in (
        (waiting, 0, "is pending", "wait until"),
        (other, 0, "batch script", "machine slurm"),
        (over, 0, "has expired", "submit another"),
        ("777", 0, "Invalid job", "submit another"),
        (job, 0, "not available", "a node that the job has"),
    ):
        user.name("two", number, node)
        looked = user.shell.ask("doctor", "--on", "two")
        assert looked.code == ExitCode.UNREACHABLE
        assert said in looked.err
        assert hint in looked.err
    user.cluster.ask("scancel", waiting, other)


@needs_sshd
@pytest.mark.long
def test_a_run_by_way_of_a_login_node_to_a_node_without_glasshouse_ends_as_one_here_does(user: User, job: str) -> None:
    folder = user.nodes.parent / "ssh"
    with serving_ssh(folder, user.cluster.for_sshd) as host:
        assert user.shell.ask("runtime", "bundle", "-o", "bundle.zip").code == 0
        more = ("--config", str(folder / "client"), "--bundle", "bundle.zip")
        user.name("far", job, 1, *more, login=f"{host.host}:{host.port}")
        assert user.shell.ask("reference", "add", "far", "--on", "far").code == 0
        job_file = user.shell.job("brought", "24")
        job_file.write_text(job_file.read_text() + 'reference = ["far"]\n')
        ended = user.shell.ask("run", "brought.toml", "--on", "far", "--json")
        assert ended.code == ExitCode.DONE, ended.out + ended.err
        assert (ended.object["outcome"], ended.object["receipt"]["verdict"]) == ("completed", "good")
    assert user.left_there() == []


@pytest.mark.long
def test_a_group_runs_on_two_nodes_of_one_job(user: User) -> None:
    job = user.submit("--nodes=2")
    text = user.shell.job("wide", "1").read_text().replace("train.py", "sum.py") + 'egress = ["group"]\n'
    (user.shell.folder / "wide.toml").write_text(text)
    (user.shell.folder / "sum.py").write_text(SUM)
    for number, name in enumerate(("one", "two")):
        user.name(name, job, number, "--address", "127.0.0.1")
    ended = user.shell.ask("run", "wide.toml", "--on", "one,two", "--json", timeout_s=120)
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert [one["verdict"] for one in ended.object["group"]["ended"]] == ["good", "good"]
    said = "".join(user.shell.ask("logs", "latest", "--machine", number).out for number in ("0", "1"))
    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2 has 3",
        "rank 1 of 2 has 3",
    ]
    assert user.left_there() == []
    user.cluster.ask("scancel", job)
    user.cluster.until_over(job)
    assert list(user.nodes.iterdir()) == []


@pytest.mark.long
def test_a_job_whose_time_is_over_has_its_run_sealed_wiped_and_fetched_before_slurm_kills_it(user: User) -> None:
    job = user.submit(f"--nodelist={user.cluster.nodes[1]}", "--time=1", "--signal=B:CONT@1")
    user.name("one", job, 1)
    ended = user.shell.ask("run", "longer.toml", "--on", "one", "--json", timeout_s=300)
    assert (ended.code, ended.object["outcome"]) == (ExitCode.INTERRUPTED, "interrupted"), ended.out + ended.err
    assert ended.object["receipt"]["verdict"] == "not-completed"
    assert {probe["result"] for probe in ended.object["zeroization"]} == {"clean"}
    user.cluster.until_over(job)
    assert "TIMEOUT" in user.cluster.ask("scontrol", "show", "job", job)
    assert list(user.nodes.iterdir()) == []


@pytest.mark.long
def test_a_job_whose_time_will_be_over_ends_its_run_before(user: User) -> None:
    """Slurm sends the batch script's signal five minutes before, or up to a minute more."""
    job = user.submit(f"--nodelist={user.cluster.nodes[1]}", "--time=7")
    user.name("one", job, 1)
    ended = user.shell.ask("run", "longer.toml", "--on", "one", "--json", timeout_s=500)
    assert (ended.code, ended.object["outcome"]) == (ExitCode.INTERRUPTED, "interrupted"), ended.out + ended.err
    assert {probe["result"] for probe in ended.object["zeroization"]} == {"clean"}
    # With nothing left to wait for, the job ends by itself.
    user.cluster.until_over(job)
    assert list(user.nodes.iterdir()) == []


RENTED = """
[machine]
on = "slurm"
gpus = 0
regions = ["main"]
most_time = "20m"
python = "{python}"
"""


def rented(user: User, folder: Path, steps: str) -> Path:
    """Write a job that is to run on a node of a job of its own."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "image"], check=True)
    add_reference(Home(path=user.shell.home), "image", {**measured_files(), "start_up": {}}, replace=True)
    job = user.shell.job("rented", steps)
    job.write_text(
        job.read_text() + 'reference = ["image"]\n' + RENTED.format(python=folder / "image" / "bin" / "python")
    )
    return job


def test_a_run_whose_job_slurm_takes_back_goes_on_in_another_job(user: User, tmp_path: Path) -> None:
    shell = user.shell
    add_checkpoints(shell, rented(user, tmp_path, "60"), retries=1)
    before, known = set(user.cluster.jobs()), shell.known()
    running = shell.start_with(QUICK, "run", "rented.toml", "--yes", "--json")
    run = str(shell.wait_until_running(known)["run_id"])
    wait_for_checkpoint(shell, run)
    (shell.folder / "train.py").write_text(SCRIPT)  # of the other stories; this one has sealed its own
    [job] = set(user.cluster.jobs()) - before
    user.cluster.ask("scancel", job)
    ended = shell.end(running)
    assert ended.code == ExitCode.DONE, ended.err + ended.out
    legs = ended.object["line"]["legs"]
    assert [leg["outcome"] for leg in legs] == ["interrupted", "completed"], legs
    assert all(leg["wiping_shown"] for leg in legs), "it had its time to wipe itself"
    assert set(user.cluster.jobs()) <= before
    assert shell.ask("verify", "latest").code == ExitCode.DONE


def test_a_node_is_rented_for_a_run_and_given_back(user: User, tmp_path: Path) -> None:
    rented(user, tmp_path, "24")
    offered = user.shell.ask("offers", "rented.toml", "--on", "slurm", "--json")
    assert [one["region"] for one in offered.object["offers"]] == ["main"], offered.err
    before = set(user.cluster.jobs())  # of other stories, which end meanwhile
    assert "without a yes" in user.shell.ask("run", "rented.toml", "--json").error["message"]
    assert set(user.cluster.jobs()) <= before
    ended = user.shell.end(user.shell.start_with(QUICK, "run", "rented.toml", "--yes", "--json"))
    assert ended.code == ExitCode.DONE, ended.err + ended.out
    assert (ended.object["outcome"], ended.object["receipt"]["verdict"]) == ("completed", "good")
    assert set(user.cluster.jobs()) <= before
    assert user.shell.ask("machine", "rented", "--json").object["rentals"] == []
    assert list(Path("/tmp").glob(f"glasshouse-*-{user.cluster.nodes[0]}")) == []
