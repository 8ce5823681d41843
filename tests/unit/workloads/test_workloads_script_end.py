"""The end of an owner's script: threads, pools, exit handlers and open files, as under ``python script.py``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.fake_agent import Ended, FakeAgent


def run(tmp_path: Path, source: str, **params: Any) -> Ended:
    workspace = tmp_path / "workspace"
    workspace.mkdir(parents=True)
    with FakeAgent("script", {"script": "train.py"} | params, {"train.py": source.encode()}, workspace) as agent:
        agent.link.settimeout(600)  # a compiler may have to share the machine
        return agent.run()


def under_python(tmp_path: Path, source: str) -> tuple[int, dict[str, bytes]]:
    """Return the exit status of ``python train.py``, and what it wrote to its outputs."""
    folder = tmp_path / "python"
    (folder / "outputs").mkdir(parents=True)
    (folder / "train.py").write_text(source)
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, timeout=60, check=False)
    return done.returncode, {path.name: path.read_bytes() for path in (folder / "outputs").iterdir()}


THREAD_POOL = """
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
def write(number):
    time.sleep(0.1)
    Path(f"outputs/{number}").write_text(str(number))
pool = ThreadPoolExecutor(2)
for number in range(4):
    pool.submit(write, number)
"""


def test_a_script_that_leaves_a_thread_pool_open_ends_with_its_work_done(tmp_path: Path) -> None:
    ended = run(tmp_path, THREAD_POOL)
    assert ended.types()[-1] == "finished", ended.log
    assert ended.outputs == {str(number): str(number).encode() for number in range(4)}


def test_a_script_that_uses_joblib_ends(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    source = """
import math
from pathlib import Path
from joblib import Parallel, delayed
Path("outputs/sum").write_text(str(sum(Parallel(n_jobs=2)(delayed(math.isqrt)(n * n) for n in range(10)))))
"""
    ended = run(tmp_path, source)
    assert ended.types()[-1] == "finished", ended.log
    assert ended.outputs == {"sum": b"45"}


@pytest.mark.slow
def test_a_script_that_compiles_its_model_ends(tmp_path: Path) -> None:
    """Inductor leaves a pool of threads open."""
    pytest.importorskip("torch")
    if shutil.which("g++") is None:
        pytest.skip("inductor needs a compiler on this machine")
    # Not asked is what this processor does with vectors: inductor would compile several programs to find out. Nor are
    # headers compiled beforehand for kernels to come: there are none.
    source = """
import os
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
import torch
from pathlib import Path
step = torch.compile(lambda x: (x * 2 + 1).relu().sum())
Path("outputs/loss").write_text(str(step(torch.ones(8)).item()))
"""
    ended = run(tmp_path, source)
    assert ended.types()[-1] == "finished", ended.log
    assert ended.outputs == {"loss": b"24.0"}


ORDER = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
def say(word):
    with open("outputs/order", "a") as out:
        out.write(word + "\\n")
def late(word):
    time.sleep(0.3)
    say(word)
atexit.register(say, "registered first")
atexit.register(say, "registered second")
atexit.register(lambda: 1 / 0)
threading.Thread(target=late, args=("thread",)).start()
pool = ThreadPoolExecutor(1)
pool.submit(time.sleep, 0.1)
pool.submit(say, "pool")
held = open("outputs/held", "w")
held.write("to the end")
say("script")
{end}
"""
INTO_THE_END = b"script\npool\nthread\nregistered second\nregistered first\n"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('words')", 1),
        ("raise ValueError('no')", 1),
        ("class Mine(BaseException): pass\nraise Mine", 1),
    ],
    ids=["falls off its end", "exits well", "exits with 3", "exits with words", "raises", "raises what few catch"],
)
def test_a_script_ends_in_the_order_and_with_the_meaning_that_python_gives_it(
    tmp_path: Path, end: str, status: int
) -> None:
    source = ORDER.replace("{end}", end)
    expected, outputs = under_python(tmp_path, source)
    assert (expected, outputs) == (status, {"order": INTO_THE_END, "held": b"to the end"})  # python itself, first
    ended = run(tmp_path, source)
    assert ended.outputs == outputs, ended.log
    if status:
        assert ended.messages[-1] == {"type": "failed", "code": "script-failed"}
        assert ended.exit_code == 1
    else:
        assert ended.types()[-1] == "finished", ended.log
    assert "ZeroDivisionError" in ended.log  # of the handler that fails, which changes nothing else


@pytest.mark.parametrize("thread", [False, True], ids=["the main thread", "another thread"])
@pytest.mark.parametrize("status", [0, 7])
def test_a_script_that_leaves_by_os_exit_is_judged_by_its_status(tmp_path: Path, status: int, thread: bool) -> None:
    leave = f"os._exit({status})"
    call = f"threading.Thread(target=lambda: {leave}, daemon=True).start(); time.sleep(60)" if thread else leave
    source = ORDER.replace("import atexit", "import os, atexit").replace("{end}", call)
    expected, outputs = under_python(tmp_path, source)
    assert (expected, outputs["order"]) == (status, b"script\n")  # neither threads nor handlers are waited for
    ended = run(tmp_path, source)
    assert ended.outputs["order"] == b"script\n"
    if status:
        assert ended.messages[-1] == {"type": "failed", "code": "script-failed"}
        assert "glasshouse: the script ended its process with exit status 7 [script-failed]" in ended.log
    else:
        assert ended.types()[-1] == "finished", ended.log
    assert ended.exit_code == (1 if status else 0)


def test_a_process_that_the_script_forks_ends_by_itself_alone(tmp_path: Path) -> None:
    source = """
import os
child = os.fork()
if child == 0:
    os._exit(5)
open("outputs/child", "w").write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    ended = run(tmp_path, source)
    assert ended.types()[-1] == "finished", ended.log
    assert ended.outputs == {"child": b"5"}


def test_a_stream_of_the_scripts_own_is_not_written_after_its_end(tmp_path: Path) -> None:
    source = """
import sys
class Tee:
    def __init__(self, *streams): self.streams = streams
    def write(self, text): return [stream.write(text) for stream in self.streams][0]
    def flush(self): [stream.flush() for stream in self.streams]
sys.stdout = Tee(sys.__stdout__, open("outputs/log.txt", "w"))
print("both")
"""
    ended = run(tmp_path, source)
    assert ended.types()[-1] == "finished", ended.log
    assert ended.outputs == {"log.txt": b"both\n"}
    assert ended.log == "both\n"


def test_a_script_stopped_amid_a_pool_is_interrupted_again_and_keeps_what_it_wrote(tmp_path: Path) -> None:
    """As after a second Ctrl-C: the pool would work on for an hour."""
    source = b"""
import time
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
for _ in range(36_000):
    pool.submit(time.sleep, 0.1)
open("outputs/so-far", "w").write("kept")
print("waiting", flush=True)
time.sleep(3600)
"""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    with FakeAgent("script", {"script": "train.py"}, {"train.py": source}, workspace) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.give_grant()
        agent.until("running")
        agent.wait_for_log("waiting")
        agent.send({"type": "stop"})
        ended = agent.finish()
    assert ended.exit_code == 0, ended.log
    assert ended.one("finished")["work"]["stop_reason"] == "stopped"
    assert ended.outputs == {"so-far": b"kept"}
