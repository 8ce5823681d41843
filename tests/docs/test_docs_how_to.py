"""The how-to's commands run as they are printed; the machine is this one, over a real sshd."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from simulators.command_line import Shell
from tools.sshd import needs_sshd, serving_ssh

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "own-machine.md"
ADDRESS = "ssh://trainer@lab.example.org --python '~/glasshouse/bin/python'"

pytestmark = [pytest.mark.slow, needs_sshd]


def commands() -> list[tuple[str, list[str]]]:
    """Return what is typed, each with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "\n".join(re.findall(r"```console\n(.*?)```", GUIDE.read_text(), re.DOTALL)).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line:
            found[-1][1].append(line)
    return found


def words(line: str) -> str:
    return " ".join(re.sub(r"[0-9][0-9.,]*|[()]|[km]?B\b", " ", line).split())


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
        for command, shown in commands():
            ran = shell.ask(*shlex.split(command.replace(ADDRESS, really))[1:])
            assert ran.code == 0, f"{command}\n{ran.out}\n{ran.err}"
            printed = {words(line) for line in ran.out.replace(here, "ssh://trainer@lab.example.org").splitlines()}
            assert not [line for line in shown if words(line) not in printed], f"{command}\n{ran.out}"
    assert shell.left_running() == []
