"""Whole runs: the real agent, custodian, sentinel, sandbox and worker against a real broker."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.evidence.bundle import Bundle
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import State
from simulators.measured import measured
from tools.runtime_world import CANARY, Broken, World, ended, script_world, verified

TRAIN = f"""
import pathlib
rows = pathlib.Path("patients.csv").read_bytes()
print("the log may name {CANARY.decode()}, for it is sealed")
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path("outputs/report.txt").write_bytes(rows[::-1])
pathlib.Path("outputs/empty.txt").touch()
"""
LONG = """
import pathlib, time
pathlib.Path("outputs").mkdir(exist_ok=True)
print("at work", flush=True)
for _ in range(600):
    time.sleep(0.05)
"""
PATIENTS = CANARY + os.urandom(3 << 20) + CANARY


@pytest.fixture
def world(script_worlds: Callable[..., World]) -> Callable[..., World]:
    def make(script: str = TRAIN, **options: Any) -> World:
        return script_worlds(script, {"patients.csv": PATIENTS}, **options)

    return make


@pytest.mark.smoke
def test_a_run_ends_with_sealed_results_and_a_receipt_that_holds(world: Callable[..., World]) -> None:
    here = world()
    agent = here.start()
    verdict = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert verdict.exit_code == ExitCode.DONE
    assert agent.states() == [state.value for state in State]
    assert agent.outputs() == {"report.txt": PATIENTS[::-1], "empty.txt": b""}
    assert CANARY.decode() in agent.log()
    receipt = verdict.chain.receipt
    assert receipt.work is not None
    assert receipt.segments == len(list((agent.out / "log").iterdir())) == 1
    assert all(value is not None for value in receipt.lifecycle_us.values())
    assert {probe.result.value for probe in receipt.zeroization} == {"clean"}
    assert here.broker.client().deployment(here.deployment)["releases"] == 1


POOLS = """
import math, pathlib
from concurrent.futures import ThreadPoolExecutor
from joblib import Parallel, delayed
pool = ThreadPoolExecutor(2)
pool.submit(lambda: pathlib.Path("outputs/thread.txt").write_text("done"))
total = sum(Parallel(n_jobs=2)(delayed(math.isqrt)(n * n) for n in range(10)))
pathlib.Path("outputs/total.txt").write_text(str(total))
"""


def test_a_script_that_leaves_pools_of_threads_and_processes_open_ends_in_the_sandbox(
    world: Callable[..., World],
) -> None:
    pytest.importorskip("joblib")
    agent = world(POOLS).start()
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert agent.outputs() == {"thread.txt": b"done", "total.txt": b"45"}


WEIGHTS = struct.pack("<Q", 2) + b"{}"  # a safetensors file without a tensor
SETTINGS = b'{"r": 16, "lora_alpha": 32}'
SAVE = f"""
import pathlib
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path("outputs/adapter.safetensors").write_bytes({WEIGHTS!r})
pathlib.Path("outputs/settings.json").write_bytes({SETTINGS!r})
"""


def test_nothing_on_the_hosts_disk_confirms_a_guess_of_what_came_out(world: Callable[..., World]) -> None:
    """A host that can guess a settings file, or train the weights again, has no digest to compare with."""
    agent = world(SAVE).start()
    receipt = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None).chain.receipt
    assert agent.outputs() == {"adapter.safetensors": WEIGHTS, "settings.json": SETTINGS}
    assert {output.of: output.plain_hmac is not None for output in receipt.outputs} == {"weights": True, "file": False}
    kept = b"".join(path.read_bytes() for path in agent.out.rglob("*") if path.is_file())
    bundle = Bundle.parse(agent.receipt())
    kept += bundle.receipt.payload + bundle.head.payload
    for plain in (WEIGHTS, SETTINGS):
        digest = hashlib.sha256(plain).digest()
        for form in (digest, digest.hex().encode(), base64.b64encode(digest), base64.urlsafe_b64encode(digest)[:-1]):
            assert form not in kept


def test_a_second_run_over_a_spent_budget_is_refused(world: Callable[..., World]) -> None:
    here = world()
    here.start().wait()
    agent = here.start()
    verdict = ended(agent, exit_code=ExitCode.REFUSED, outcome="refused", code=Code.RELEASE_BUDGET)
    assert verdict.status == "incomplete"  # nobody but this runtime can say that it was refused
    assert "released" not in agent.states()
    assert not list((agent.out / "outputs").iterdir())


def test_a_revoked_package_is_refused(world: Callable[..., World]) -> None:
    here = world()
    launch = here.launch()
    here.broker.client().revoke(here.package.manifest.package_id)
    ended(here.start(launch), exit_code=ExitCode.REFUSED, outcome="refused", code=Code.PACKAGE_REVOKED)


def test_a_runtime_that_the_owner_does_not_know_is_refused(world: Callable[..., World]) -> None:
    here = world(broken=Broken(references=(measured("another"),)))
    ended(here.start(), exit_code=ExitCode.REFUSED, outcome="refused", code=Code.MEASUREMENT_UNKNOWN)
    assert here.broker.client().deployment(here.deployment)["releases"] == 0


def test_a_script_that_fails_says_why_in_the_sealed_log_alone(world: Callable[..., World]) -> None:
    agent = world(f"raise ValueError({CANARY.decode()!r})").start()
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.SCRIPT_FAILED)
    assert f"ValueError: {CANARY.decode()}" in agent.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_stops_in_order(world: Callable[..., World], number: int) -> None:
    agent = world(LONG).start()
    agent.wait_for_state("running")
    agent.process.send_signal(number)
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)


def test_a_worker_that_will_not_stop_is_killed(world: Callable[..., World]) -> None:
    agent = world("import time\nwhile True:\n  try: time.sleep(60)\n  except BaseException: pass").start()
    agent.wait_for_state("running")
    agent.process.send_signal(signal.SIGTERM)
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)


def test_a_worker_killed_from_outside(world: Callable[..., World]) -> None:
    agent = world(LONG).start()
    agent.wait_for_state("running")
    os.kill(agent.worker_pid(), signal.SIGKILL)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.WORKER_KILLED)


def test_a_run_that_takes_too_long(world: Callable[..., World]) -> None:
    agent = world(LONG).start(options=["--max-seconds", "1"])
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DURATION_EXCEEDED)


def test_a_disk_that_fills_up_leaves_no_half_file(world: Callable[..., World]) -> None:
    agent = world("import time\nimport pathlib\ntime.sleep(1)\n" + TRAIN).start()
    agent.wait_for_state("running")
    resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.DISK_FULL)
    assert "report.txt" not in agent.outputs()


def test_a_package_that_was_cut_short_is_told_in_the_receipt(world: Callable[..., World], tmp_path: Path) -> None:
    here = world()
    cut = tmp_path / "cut.sealed"
    cut.write_bytes(here.package.path.read_bytes()[:-1])
    agent = here.start(package=cut)
    assert agent.wait() == ExitCode.RUN_FAILED
    assert agent.states() == ["created", "zeroizing", "zeroized"]
    assert json.loads(agent.receipt())["manifest"] is None


def test_another_package_than_the_launchs_gets_nothing(world: Callable[..., World], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    here = world()
    with script_world(tmp_path / "one", TRAIN, broker=here.broker) as other:
        agent = here.start(package=other.package.path)
    assert agent.wait() == ExitCode.RUN_FAILED
    assert agent.stderr.read_text() == "glasshouse runtime: manifest-mismatch\n"


def test_strict_holds_here_or_is_refused_with_the_reason(world: Callable[..., World]) -> None:
    agent = world(broken=Broken(profile=Profile.STRICT)).start()
    code = agent.wait()
    failed = [
        event["body"] for event in agent.events() if event["type"] == "check" if event["body"]["result"] != "passed"
    ]
    assert code == (ExitCode.REFUSED if failed else ExitCode.DONE), (failed, agent.stderr.read_text())
    verified(agent)


def test_a_run_whose_look_beneath_what_is_shown_was_killed_is_refused(world: Callable[..., World]) -> None:
    killed = """
import os, signal, sys
from glasshouse.runtime.confine.shown_search import Look
from glasshouse.runtime.worker.shown_paths import default_read_paths
look = Look.start(default_read_paths())
os.kill(look._pid, signal.SIGKILL)
from glasshouse.runtime.__main__ import main
sys.exit(main(sys.argv[1:], sys.stdin.buffer, look=look))
"""
    agent = world().start(program=("-c", killed))
    ended(agent, exit_code=ExitCode.REFUSED, outcome="refused", code=Code.HARDENING_MISSING)
    assert "egress-closed" in agent.stderr.read_text()
    assert not {"attested", "released"} & {event["state"] for event in agent.events()}


@pytest.mark.parametrize("arguments", [[], ["--package", "x"], ["--package", "x", "--out", "y", "--max-seconds", "0"]])
def test_a_command_line_that_is_none(tmp_path: Path, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    import io

    from glasshouse.runtime.__main__ import main

    assert main(arguments, io.BytesIO()) == ExitCode.USAGE
    assert "usage: python -I -B" in capfd.readouterr().err


def test_a_folder_that_holds_a_run_is_left_alone(world: Callable[..., World], tmp_path: Path) -> None:
    here, out = world(), tmp_path / "held"
    (out / "outputs").mkdir(parents=True)
    agent = here.start(out=out)
    assert agent.wait() == ExitCode.USAGE
    assert list(out.iterdir()) == [out / "outputs"]


def test_a_launch_file_that_is_none(world: Callable[..., World]) -> None:
    class Rubbish:
        run_id = ""

        def encode(self) -> bytes:
            return b'{"launch_seed":"secret"}'

    agent = world().start(Rubbish())
    assert agent.wait() == ExitCode.USAGE
    assert agent.stderr.read_text() == "glasshouse runtime: schema-invalid\n"
    assert not (agent.out / "receipt.json").exists()
