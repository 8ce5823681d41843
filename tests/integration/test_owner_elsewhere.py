"""An owner whose machine is not Linux: seals, runs on a machine that is, verifies and fetches.

It is this machine with what Linux alone has taken away (`tools.not_linux`); no run of these tests was on macOS itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from simulators.command_line import Answer, Shell
from tools.sshd import needs_sshd, serving_ssh

NOT_LINUX = Path(__file__).resolve().parents[1] / "tools" / "not_linux.py"  # never imported: it changes its process

pytestmark = [pytest.mark.slow, needs_sshd]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("mac")
    (folder / "user").mkdir()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {NOT_LINUX} "$@"\n')
    python.chmod(0o755)
    made = Shell(folder / "user", python=str(python))
    made.environment["NOT_LINUX_PYTHON"] = str(python)
    with serving_ssh(folder / "ssh") as host:
        assert made.ask("init").code == 0
        url, ways = f"ssh://{host.host}:{host.port}", ("--config", str(folder / "ssh" / "client"))
        named = made.ask(
            "machine", "add", "lab", url, *ways, "--python", sys.executable, "--folder", str(folder / "there")
        )
        assert named.code == 0, named.err
        made.job("refused", "24")
        for name, steps in (("short", "24"), ("long", "1200")):
            job = made.job(name, steps)
            job.write_text(job.read_text() + 'reference = ["lab"]\n')
        yield made


@pytest.fixture(scope="module")
def refused(shell: Shell) -> Answer:
    """What the first run on `lab` is answered; its measurement is recorded then, for every other test's run."""
    answer = shell.ask("run", "refused.toml", "--on", "lab", "--json")
    assert shell.ask("reference", "add", "lab", "--on", "lab").code == ExitCode.DONE
    return answer


def programs_of(module: str, home: Path) -> list[str]:
    """Return the command lines of a module's processes that serve a home."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_text().replace("\0", " ")
            if module in line and str(home) in line:
                found.append(line)
    return found


def test_the_stand_in_lacks_what_it_should(shell: Shell) -> None:
    doctor = shell.ask("doctor", "--json")
    assert (doctor.code, doctor.error["code"]) == (ExitCode.RUN_FAILED, "platform-unsupported")
    here = shell.ask("run", "short.toml", "--json")
    assert here.error["code"] == "platform-unsupported"
    assert "Linux" in here.error["message"]
    bundle = shell.ask("runtime", "bundle", "-o", "bundle.zip", "--json")
    assert (bundle.code, bundle.error["code"]) == (ExitCode.USAGE, "requirement-missing")


def test_what_this_machine_measures_to_is_no_reference_for_that_one(refused: Answer) -> None:
    """Its interpreter is another, as a Mac's is: the owner records the machine's."""
    assert (refused.code, refused.error["code"]) == (ExitCode.REFUSED, "measurement-unknown"), refused.out
    assert "lab has another interpreter than the reference this" in refused.error["message"]


@pytest.mark.usefixtures("refused")
def test_a_run_elsewhere_from_sealing_to_the_outputs(shell: Shell) -> None:
    looked = shell.ask("doctor", "--on", "lab", "--json")
    assert looked.code == ExitCode.DONE, looked.err
    ended = shell.ask("run", "short.toml", "--on", "lab", "--json")
    assert ended.code == ExitCode.DONE, ended.out + ended.err
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.out + ended.err
    for command in (
        ("verify", "latest"),
        ("logs", "latest"),
        ("fetch", "latest", "-o", "outputs"),
        ("status",),
        ("card", "latest", "-o", "card.html"),
    ):
        told = shell.ask(*command)
        assert told.code == ExitCode.DONE, told.out + told.err
    assert (shell.folder / "outputs" / "result.txt").read_text().startswith("500 rows")


def test_a_package_is_sealed_looked_at_and_revoked(shell: Shell) -> None:
    for command in (
        ("seal", "short.toml", "-o", "short.sealed"),
        ("inspect", "short.sealed"),
        ("verify", "short.sealed"),
    ):
        told = shell.ask(*command)
        assert told.code == ExitCode.DONE, told.out + told.err
    assert shell.ask("tamper").code == ExitCode.DONE
    assert shell.ask("revoke", "short.sealed").code == ExitCode.DONE


@pytest.mark.usefixtures("refused")
def test_a_detached_run_is_attached_to_and_stopped(shell: Shell) -> None:
    placed = shell.ask("run", "long.toml", "--on", "lab", "--detach", "--json").object
    run = shell.wait_until_running()
    assert NOT_LINUX.name in Path(f"/proc/{run['supervisor']['pid']}/cmdline").read_text()
    (broker,) = programs_of("glasshouse.jobs.gates.embedded_broker", shell.home)
    assert NOT_LINUX.name in broker
    assert shell.ask("status", placed["run_id"]).code == ExitCode.DONE
    stopped = shell.ask("stop", placed["run_id"], "--json")
    assert (stopped.code, stopped.object["outcome"]) == (ExitCode.DONE, "interrupted"), stopped.err
    assert shell.ask("machine", "sweep", "lab").code == ExitCode.DONE


@pytest.mark.usefixtures("refused")
def test_an_upload_of_many_pieces(shell: Shell, tmp_path: Path) -> None:
    (shell.folder / "large.bin").write_bytes(os.urandom(24 << 20))
    job = (
        (shell.folder / "short.toml")
        .read_text()
        .replace('"rows.csv" = "rows.csv"', '"rows.csv" = "rows.csv"\n"large.bin" = "large.bin"')
    )
    (shell.folder / "large.toml").write_text(job)
    ended = shell.ask("run", "large.toml", "--on", "lab", "--json")
    assert (ended.code, ended.object["receipt"]["verdict"]) == (ExitCode.DONE, "good"), ended.out + ended.err
