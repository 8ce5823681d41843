"""The example that compiles its model: without a compiler, with one, and in a container that loads no libraries."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from glasshouse.errors import ExitCode
from simulators.command_line import Answer, Shell
from tools.machine import needs_filters, needs_landlock, needs_root

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "compile"
CONFINED = Path(__file__).resolve().parents[1] / "tools" / "confined.py"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    made = Shell(tmp_path)
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    assert made.ask("init").code == 0
    return made


def trained(shell: Shell, ran: Answer) -> tuple[str, str]:
    """Return the backend that a run took, and its log."""
    assert ran.code == ExitCode.DONE, ran.out + ran.err
    assert shell.ask("fetch", "latest", "-o", "out", "--force").code == 0
    found = json.loads((shell.folder / "out" / "metrics.json").read_text())
    assert found["loss"] < 1e-3
    assert found["apart"] < 1e-5
    return found["backend"], shell.ask("logs", "latest").out


@pytest.mark.slow
def test_without_a_compiler_the_example_trains_by_pytorch_s_own_kernels(shell: Shell) -> None:
    with (shell.folder / "job.toml").open("a") as job:
        job.write('[env]\nPATH = "/nowhere"\n')
    backend, log = trained(shell, shell.ask("run", "job.toml"))
    assert backend == "aot_eager"
    assert "inductor does not work here: InvalidCxxCompiler" in log


@pytest.mark.long
@needs_compiler
def test_with_a_compiler_the_example_is_compiled(shell: Shell) -> None:
    backend, log = trained(shell, shell.ask("run", "job.toml"))
    assert backend == "inductor", log


@pytest.mark.long
@needs_compiler
@needs_root
@needs_filters
@needs_landlock
@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("", "CppCompileError"),
        ('TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS = "0"', "failed to map segment from shared object"),
    ],
    ids=["small", "noexec"],
)
def test_in_a_container_the_example_trains_by_pytorch_s_own_kernels(shell: Shell, setting: str, reason: str) -> None:
    """As the README says: no room for the precompiled header, and no library may be loaded from there anyway."""
    with (shell.folder / "job.toml").open("a") as job:
        job.write(f"[env]\n{setting}\n")
    within = shell.start_with(CONFINED, "SHM=64m", sys.executable, "-m", "glasshouse.cli", "run", "job.toml")
    backend, log = trained(shell, shell.end(within))
    assert backend == "aot_eager"
    assert "inductor does not work here: " in log
    assert reason in log
