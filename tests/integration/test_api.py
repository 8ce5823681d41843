"""An owner's program: `import glasshouse` seals, runs, verifies and fetches, and prints nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import glasshouse
from glasshouse.errors import Code
from glasshouse.evidence.events import Event, EventType
from glasshouse.jobs import api
from glasshouse.jobs.lines.callbacks import Callbacks
from glasshouse.wire.states import Outcome
from simulators.command_line import CANARY, Shell


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    made = Shell(tmp_path_factory.mktemp("program"))
    assert made.ask("init").code == 0
    made.job("job", "24")
    made.job("stopped", "1200")
    made.job("fails", "24", "it cannot go on")
    yield made
    assert made.left_running() == []


def test_a_job_is_sealed_run_verified_and_fetched(
    shell: Shell, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home, package = shell.home, tmp_path / "job.sealed"
    sealed = glasshouse.seal(shell.folder / "job.toml", package, home=home)
    assert (sealed.path, sealed.name, sealed.files, sealed.notes) == (package, "ward-seven", 2, ())
    facts = glasshouse.inspect(package, home=home)
    assert (facts.manifest.package_id, facts.yours, facts.key_here) == (sealed.manifest.package_id, True, True)

    events: list[Event] = []
    steps: list[str] = []
    result = glasshouse.run(package, event=events.append, say=steps.append, home=home)
    assert (result.good, result.outcome, result.verdict) == (True, Outcome.COMPLETED, "good")
    assert result.receipt is not None
    assert result.receipt.work is not None
    assert result.receipt.work.done == 24
    assert [one.name for one in result.outputs] == ["result.txt"]
    done = [event.body["done"] for event in events if event.type is EventType.PROGRESS]
    assert done, "some of its steps, but not each"
    assert set(done) <= set(range(1, 25))
    assert steps == [f"run {result.run_id} is prepared"]
    assert result.facts["run_id"] == result.run_id

    assert glasshouse.verify(result.run_id, home=home).good
    assert glasshouse.verify(package, home=home).good
    fetched = glasshouse.fetch(result.run_id, tmp_path / "outputs", home=home)
    assert (tmp_path / "outputs" / "result.txt").read_text() == f"500 rows, {CANARY},499"
    assert (fetched.verdict, fetched.assurance, fetched.from_gate) == ("good", "software", False)
    assert capfd.readouterr() == ("", "")


def test_what_is_false_is_an_exception_with_code_and_hint(shell: Shell, tmp_path: Path) -> None:
    package = tmp_path / "job.sealed"
    glasshouse.seal(shell.folder / "job.toml", package, home=shell.home)
    damaged = bytearray(package.read_bytes())
    damaged[-1] ^= 1
    package.write_bytes(damaged)
    with pytest.raises(glasshouse.GlasshouseError) as caught:
        glasshouse.verify(package, content=True, home=shell.home)
    assert "NOT authentic" in caught.value.message
    with pytest.raises(glasshouse.GlasshouseError) as caught:
        glasshouse.fetch("latest", tmp_path / "outputs", home=tmp_path / "another home")
    assert caught.value.code is Code.IDENTITY
    assert "glasshouse init" in caught.value.hint


def test_a_run_that_fails_is_a_result(shell: Shell) -> None:
    result = glasshouse.run(shell.folder / "fails.toml", home=shell.home)
    assert not result.good
    assert (result.outcome, result.verdict) == (Outcome.FAILED, "not-completed")
    assert result.code is not None


def test_another_thread_runs_a_job_too(shell: Shell) -> None:
    found: list[glasshouse.RunResult] = []
    thread = threading.Thread(target=lambda: found.append(glasshouse.run(shell.folder / "job.toml", home=shell.home)))
    thread.start()
    thread.join(120)
    assert [one.good for one in found] == [True]


def test_ctrl_c_in_a_program_ends_the_run_in_order(shell: Shell) -> None:
    program = shell.folder / "program.py"
    program.write_text(
        "import os, signal, glasshouse\n"
        "def stop(event):\n"
        "    if event.type == 'progress':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "result = glasshouse.run('stopped.toml', event=stop)\n"
        "print(result.outcome, result.verdict, result.good)\n"
    )
    done = shell.end(shell.start_with(program))
    assert (done.code, done.out) == (0, "interrupted not-completed False\n"), done.err


def test_nothing_is_rented_without_a_yes(shell: Shell, tmp_path: Path) -> None:
    renting = Callbacks(None, None)
    with pytest.raises(glasshouse.GlasshouseError) as caught:
        renting.agree(None, tmp_path)  # type: ignore[arg-type]
    assert "yes=True" in caught.value.hint


def test_the_names_are_one_list_and_what_trains_loads_none_of_them() -> None:
    stub = Path(glasshouse.__file__).with_suffix(".pyi").read_text()
    assert sorted(api.__all__) == sorted(glasshouse._API)
    assert {name for name in api.__all__ if f"import {name} as {name}\n" in stub} == set(api.__all__)
    assert set(api.__all__) <= set(dir(glasshouse))
    with pytest.raises(AttributeError):
        glasshouse.sael  # type: ignore[attr-defined]  # noqa: B018
    code = "import sys, glasshouse\nfrom glasshouse import task\nprint([n for n in sys.modules if 'jobs' in n])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
