"""Reads the pages of the documentation, and types their commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from simulators.command_line import Answer, Shell

__all__ = ["blocks", "commands", "typed", "words"]


def blocks(kind: str, text: str) -> list[str]:
    """Return the blocks of a page that are marked as of this kind."""
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return what a page's consoles type, each with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "\n".join(blocks("console", text)).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line:
            found[-1][1].append(line)
    return found


def words(line: str) -> str:
    """Return what stays of a line from run to run: its words, without numbers, units and digests."""
    return " ".join(re.sub(r"\b[0-9a-f]{8,}\b|[0-9][0-9.,]*|[()]|[km]?B\b", " ", line).split())


def typed(shell: Shell, text: str, shown_as: str = "", here: str = "", really: str = "") -> None:
    """Type a page's commands, and look whether they print what it shows; `really` stands for what is `shown_as`."""
    for command, shown in commands(text):
        ran = _ask(shell, shlex.split(command.replace(shown_as, really) if shown_as else command))
        assert ran.code == 0, f"{command}\n{ran.out}\n{ran.err}"
        printed = {
            words(line) for line in (ran.out.replace(here, shown_as.split()[0]) if here else ran.out).splitlines()
        }
        # A line may stand behind a progress bar, which ends its own only later: the two come by different streams.
        missing = [
            line for line in shown if not any(one == words(line) or one.endswith("]" + words(line)) for one in printed)
        ]
        assert not missing, f"{command} does not print {missing}\nbut {ran.out}"


def _ask(shell: Shell, command: list[str]) -> Answer:
    if command[0] == "glasshouse":
        return shell.ask(*command[1:])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        command, cwd=shell.folder, env=shell.environment | {"PATH": path}, capture_output=True, text=True, check=False
    )
    return Answer(code=ran.returncode, out=ran.stdout, err=ran.stderr)
