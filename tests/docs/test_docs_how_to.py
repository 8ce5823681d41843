"""The how-tos' commands run as they are printed; the machine is this one, over a real sshd, at last as a container."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from glasshouse.runtime.worker import named_directory
from simulators.command_line import SUM, Shell
from simulators.line_user import kill_runtime, wait_for_checkpoint
from simulators.slurm_cluster import needs_slurm, running_slurm
from tools.machine import needs_filters, needs_landlock, needs_root
from tools.pages import blocks, commands, typed, words
from tools.sshd import needs_sshd, serving_ssh
from tools.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "docs" / "how-to"
GUIDE, SLURM, CONTAINER, PYTHON, RESUME = (
    (HOW_TO / f"{name}.md").read_text() for name in ("own-machine", "slurm", "container", "python", "resume")
)
ADDRESS = "ssh://trainer@lab.example.org --python '~/glasshouse/bin/python'"
NODE = "slurm://you@login.example.org/4711/gpu-7 --python '~/glasshouse/bin/python'"
CONTAINED = "ssh://root@gpu.example.org:2222"
CONFINED = (sys.executable, "-I", str(ROOT / "tests" / "tools" / "confined.py"), "SHM=64m")

needs_disk = pytest.mark.skipif(named_directory.room("/tmp")[0], reason="this machine's /tmp is a memory file system")


@pytest.mark.slow
@needs_sshd
def test_a_run_on_a_machine_is_what_the_how_to_says(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    shell = Shell(tmp_path / "user")
    assert shell.ask("init").code == 0
    shell.job("job", "24")
    with serving_ssh(tmp_path / "ssh") as host:
        here = f"ssh://{host.host}:{host.port}"
        really = (
            f"{here} --python {sys.executable} --config {tmp_path / 'ssh' / 'client'} --folder {tmp_path / 'there'}"
        )
        typed(shell, GUIDE, ADDRESS, here, really)
    assert shell.left_running() == []


@pytest.mark.slow
@needs_sshd
@needs_root
@needs_slurm
def test_a_run_on_a_node_of_a_cluster_is_what_the_how_to_says(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    shell = Shell(tmp_path / "user")
    with running_slurm() as cluster, serving_ssh(tmp_path / "ssh", cluster.for_sshd) as login:
        shell.environment |= cluster.environment
        assert shell.ask("init").code == 0
        shell.job("job", "24")
        [submit] = [text for text in blocks("sh", SLURM) if "sbatch" in text]
        there = f"ssh -F {tmp_path / 'ssh' / 'client'} -p {login.port} {login.host}"
        for shown, really in (
            ("ssh you@login.example.org", there),
            ("glasshouse", f"{sys.executable} -m glasshouse.cli"),
        ):
            submit = submit.replace(shown, really)
        printed = subprocess.run(
            ["sh", "-e"],
            input=submit,
            cwd=shell.folder,
            env=shell.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        job = re.findall(r"^Submitted batch job ([0-9]+)$", printed, re.MULTILINE)[0]
        wait_for(lambda: (Path("/tmp") / f"glasshouse-{job}-{cluster.nodes[0]}" / "node").exists())
        here = f"slurm://{login.host}:{login.port}/{job}/{cluster.nodes[0]}"
        really = f"{here} --python {sys.executable} --config {tmp_path / 'ssh' / 'client'}"
        typed(shell, SLURM, NODE, here, really)
        cluster.ask("scancel", job)
        cluster.until_over(job)
        assert not list(Path("/tmp").glob(f"glasshouse-{job}-{cluster.nodes[0]}"))
    assert shell.left_running() == []


@pytest.mark.slow
def test_a_run_that_goes_on_does_so_as_the_how_to_says(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert shell.ask("init").code == 0
    [job] = blocks("toml", RESUME)
    [script] = blocks("python", RESUME)
    (tmp_path / "job.toml").write_text(re.sub("retries = 2 .*", "", job))  # the owner goes on by hand
    (tmp_path / "train.py").write_text(script)
    running = shell.start("run", "job.toml", "--json")
    run = str(shell.wait_until_running()["run_id"])
    wait_for_checkpoint(shell, run)
    kill_runtime(shell, run)
    assert shell.end(running).object["outcome"] == "lost"
    typed(shell, RESUME)
    assert (tmp_path / "outputs" / "result.txt").read_text() == "60"
    assert shell.left_running() == []


def test_the_programs_of_the_page_for_python_run_and_type_check(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert shell.ask("init").code == 0
    shell.job("job", "24")
    outputs = []
    for number, program in enumerate(blocks("python", PYTHON)):
        file = tmp_path / f"program{number}.py"
        file.write_text(program)
        done = shell.end(shell.start_with(file))
        assert done.code == 0, done.err
        outputs.append(done.out.splitlines())
    first, second = outputs
    assert "completed good True" in first
    assert [line for line in first if line.startswith("software Loss(first=")]
    assert [line for line in first if re.fullmatch(r"[0-9]+ of 24 steps, loss [0-9.]+", line)]
    assert first[-1] == f"result.txt {(tmp_path / 'outputs' / 'result.txt').stat().st_size} outputs/result.txt"
    assert second[-1] == "True True"
    assert shell.left_running() == []
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "",
        "--cache-dir",
        str(tmp_path / "mypy"),
        "--no-incremental",
    ]
    checked = subprocess.run(
        [*mypy, *map(str, sorted(tmp_path.glob("program*.py")))], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_every_command_and_option_of_the_how_tos_is_one() -> None:
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    known = {
        name: set(re.findall(r"^\| `(?:-[a-z]`, `)?(--[a-z-]+)`", text, re.MULTILINE))
        for name, text in re.findall(r"^## `glasshouse ([a-z ]+)`\n(.*?)(?=^## |\Z)", reference, re.DOTALL | re.M)
    }
    pages = {page.name: page.read_text() for page in HOW_TO.glob("*.md")}
    assert len(pages) > 6
    for text in pages.values():
        named = [command for command, _ in commands(text) if command.startswith("glasshouse ")]
        for command in named + re.findall(r"`(glasshouse [^`\n]+)`", text):
            said = shlex.split(command)[1:]
            name = next((name for name in (" ".join(said[:2]), said[0]) if name in known), None)
            assert name is not None, command
            options = {word for word in said if word.startswith("--")}
            assert options <= known[name], command


@pytest.mark.slow
@needs_sshd
@needs_root
@needs_filters
@needs_landlock
@needs_disk
def test_a_run_in_a_container_is_what_the_how_to_says(tmp_path: Path) -> None:
    """As in most containers: no namespaces, no mounts, no capability for them, and 64 MiB of shared memory."""
    (tmp_path / "user").mkdir()
    shell = Shell(tmp_path / "user")
    assert shell.ask("init").code == 0
    [job] = blocks("toml", CONTAINER)
    (shell.folder / "job.toml").write_text(job)
    (shell.folder / "ranks.toml").write_text(job.replace("train.py", "sum.py"))
    (shell.folder / "sum.py").write_text(SUM)
    with serving_ssh(tmp_path / "ssh", within=CONFINED) as host:
        here = f"ssh://{host.host}:{host.port}"
        config = tmp_path / "ssh" / "client"
        really = f"{here} --python {sys.executable} --config {config} --folder {tmp_path / 'there'}"
        typed(shell, CONTAINER, CONTAINED, here, really)
        assert "rank 0 of 2 has 3" in shell.ask("logs", "latest").out

        looked = shell.ask("doctor", "--on", "box", "--json").object
        findings = {one["feature"]: one["value"] for one in looked["findings"]}
        shown = dict(re.findall(r"^\| `([a-z-]+)` \| `([a-z]+)` \|", CONTAINER, re.MULTILINE))
        assert len(shown) == 8
        assert {name: findings[name] for name in shown} == shown
        assert findings["assurance"] == "software"

        (shell.folder / "large.bin").write_bytes(os.urandom(40 << 20))
        large = job.replace("[params]", '"large.bin" = "large.bin"\n[params]')
        (shell.folder / "large.toml").write_text(large)
        refused = shell.ask("run", "large.toml", "--on", "box")
        assert refused.code == ExitCode.RUN_FAILED
        [sentence] = [text for text in blocks("text", CONTAINER) if text.startswith("reason  ")]
        assert "failed (platform-unsupported)" in refused.out
        assert words(sentence) in {words(text) for text in refused.out.splitlines()}
        (shell.folder / "large.toml").write_text(large + 'workspace = "disk"\n')
        ended = shell.ask("run", "large.toml", "--on", "box")
        assert ended.code == ExitCode.DONE, ended.out + ended.err
        assert "lay on the machine's disk, as the owner allowed" in " ".join(shell.ask("verify", "latest").out.split())
    assert shell.left_running() == []


@pytest.mark.slow
@needs_sshd
@needs_root
@needs_filters
@needs_landlock
def test_a_server_s_own_sshd_leads_into_a_container_by_the_line_of_the_how_to(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    shell = Shell(tmp_path / "user")
    assert shell.ask("init").code == 0
    [line] = [text for text in blocks("text", CONTAINER) if text.startswith("command=")]
    with serving_ssh(tmp_path / "ssh") as host:
        public = (tmp_path / "ssh" / "user.pub").read_text()
        confined = line.replace("docker exec -i trainer", shlex.join(CONFINED))
        (tmp_path / "ssh" / "authorized").write_text(confined.replace("ssh-ed25519 AAAA… you@home", public.strip()))
        ways = ("--config", str(tmp_path / "ssh" / "client"), "--folder", str(tmp_path / "there"))
        url = f"ssh://{host.host}:{host.port}"
        assert shell.ask("runtime", "bundle", "-o", "bundle.zip").code == 0
        there = ("--python", sys.executable, "--bundle", "bundle.zip", *ways)
        assert shell.ask("machine", "add", "box", url, *there).code == 0
        found = shell.ask("doctor", "--on", "box", "--json")
        assert found.code == 0, found.err
        assert found.object["profile"] == "standard"
        assert {one["value"] for one in found.object["findings"] if one["feature"].endswith("-namespace")} == {"none"}
        (shell.folder / "job.toml").write_text(blocks("toml", CONTAINER)[0])
        assert shell.ask("reference", "add", "box", "--on", "box").code == 0
        ended = shell.ask("run", "job.toml", "--on", "box")
        assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert shell.left_running() == []
