"""The README's tour runs as it is printed, and what it says the commands print, they print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def tour() -> list[tuple[str, list[str]]]:
    """Return the commands of the console block, each with the lines shown below it."""
    (block,) = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    told: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            told.append((line[2:], []))
        elif line:
            told[-1][1].append(line)
    assert told, "the README has no tour"
    return told


def shape(line: str) -> str:
    """What stays of a line from run to run: its words, without digests, times and sizes."""
    line = re.sub(r"last reported at \d+ of ", "", line)  # reports come once a second: the last may be before the end
    return " ".join(re.sub(r"[0-9a-f]{4,}|[0-9][0-9.,]*|[-→/()·;]", " ", line).split())


@pytest.mark.slow
def test_the_tour_runs_and_prints_what_the_readme_shows(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
        "COLUMNS": "140",
    }
    for command, shown in tour():
        ran = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        printed = {shape(line) for line in ran.stdout.splitlines()}
        missing = [line for line in shown if shape(line) not in printed]
        assert not missing, f"{command} does not print {missing}\nbut {ran.stdout}"


def test_every_make_target_and_file_that_the_readme_names_exists() -> None:
    targets = {
        name
        for names in re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for name in names.split()
    }
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).exists(), path


def test_every_command_that_the_readme_names_is_one() -> None:
    reference = (ROOT / "docs/reference/cli.md").read_text()
    named = set(re.findall(r"`glasshouse ([a-z]+)", README))
    assert named
    for name in named:
        assert f"`glasshouse {name}" in reference


def test_the_size_of_the_code_that_is_trusted_with_keys_is_what_make_counts() -> None:
    counted = subprocess.run(["make", "-s", "count"], cwd=ROOT, capture_output=True, text=True, check=True)
    tiers = re.findall(r"^ *([\d,]+)  (.+)$", counted.stdout, re.MULTILINE)
    assert len(tiers) == 3
    for lines, _held in tiers[:2]:
        assert f"({int(lines.replace(',', '')) / 1000:.1f} thousand)" in README
