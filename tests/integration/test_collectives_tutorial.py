"""The script of a tutorial runs over `sealed` by changing nothing in it but the name of the backend."""

from __future__ import annotations

import io
import os
import secrets
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tools import ddp_tutorial
from tools.group_agent import serving
from tools.ports import free_port
from tools.sealed_ranks import in_ranks

pytestmark = pytest.mark.slow

STOCK = Path(__file__).parents[1] / "tools" / "ddp_tutorial.py"

PROVIDER = """
import os, pathlib
from glasshouse.collectives.secret import provide
provide(lambda: pathlib.Path({path!r}).read_bytes())
"""


def run(
    folder: Path, backend: str, demo: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a demonstration of the tutorial in a process of its own, with another backend's name in it."""
    text = STOCK.read_text()
    assert text.count('"gloo"') == 1
    script = folder / f"{backend}.py"
    script.write_text(text.replace('"gloo"', f'"{backend}"'))
    port = free_port()
    temporary = folder / f"{backend}-files"
    temporary.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GLASSHOUSE_")}
    return subprocess.run(
        [sys.executable, str(script), str(port), demo],
        capture_output=True,
        text=True,
        timeout=240,
        env={**inherited, "TMPDIR": str(temporary), **(environment or {})},
    )


def over_gloo(rank: int, port: int, **_: object) -> str:
    """Run the tutorial as it is, as a rank that was forked from a process with all imports; return what it says."""
    sys.argv[1:] = [str(port)]
    # gloo's threads drop their last work under the interpreter's lock; a model that is the last to hold the group waits
    # for them with the lock (pytorch#56297). The group lives until the process ends.
    ddp_tutorial.cleanup = lambda: None
    with redirect_stdout(io.StringIO()) as said:
        ddp_tutorial.demo_basic(rank, 2)
    return said.getvalue().strip()


def told(run_: subprocess.CompletedProcess[str]) -> list[str]:
    assert run_.returncode == 0, run_.stderr
    lines = sorted(run_.stdout.splitlines())
    assert len(lines) == 2, "a demonstration on two ranks"
    return lines


def test_the_secret_comes_from_the_agent_that_started_it(tmp_path: Path) -> None:
    token = secrets.token_bytes(32)
    at = tmp_path / "agent"
    # Spawned ranks have one environment, and so one token; those that torchrun starts under an agent have one each.
    with serving(at, secrets.token_bytes(32), token, times=2) as given:
        here = {"GLASSHOUSE_GROUP_SOCKET": str(at), "GLASSHOUSE_GROUP_TOKEN": token.hex()}
        sealed = run(tmp_path, "sealed", "basic", here)
    assert given == [True] * 2
    # Two numbers have one sum, whoever adds them.
    assert told(sealed) == sorted(in_ranks(over_gloo, 2, free_port(), backend=None))
    assert token.hex() not in sealed.stdout + sealed.stderr


@pytest.mark.long
def test_the_secret_comes_from_a_provider_of_the_installation(tmp_path: Path) -> None:
    """Without any agent: what Python runs at its start registers a provider, in spawned processes too."""
    kept = tmp_path / "kept"
    kept.write_bytes(secrets.token_bytes(32))
    kept.chmod(0o600)
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "sitecustomize.py").write_text(PROVIDER.format(path=str(kept)))
    path = os.pathsep.join(filter(None, [str(tmp_path / "usual"), os.environ.get("PYTHONPATH")]))
    lines = told(run(tmp_path, "sealed", "checkpoint", {"PYTHONPATH": path}))
    assert lines[0].split(": ")[1] == lines[1].split(": ")[1], "both ranks end with the same parameters"


def test_without_a_secret_it_says_what_to_do(tmp_path: Path) -> None:
    failed = run(tmp_path, "sealed", "basic")
    assert failed.returncode != 0
    assert "group-secret-missing" in failed.stderr
