"""An owner's script in a real worker process, under the agent's protocol: unmodified, and nothing lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from glasshouse.task.channel import EventLines
from glasshouse.task.handle import Task
from glasshouse.task.inputs import FolderInputs
from glasshouse.task.uncollected import Uncollected
from glasshouse.wire import frames
from glasshouse.workloads.builtin import script
from glasshouse.workloads.process import environment
from glasshouse.workloads.worker.__main__ import ready_frame
from tools.fake_agent import Ended, FakeAgent, run_raw


def run(tmp_path: Path, source: str, *, files: dict[str, bytes] | None = None, **params: Any) -> Ended:
    inputs = {"train.py": source.encode()} | (files or {})
    with FakeAgent("script", {"script": "train.py"} | params, inputs, _workspace(tmp_path)) as agent:
        return agent.run()


def _workspace(tmp_path: Path) -> Path:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return workspace


def test_ready_is_said_in_the_one_format() -> None:
    assert ready_frame(4711) == frames.control({"type": "ready", "pid": 4711})


ORDINARY = """
import json, os, sys
from pathlib import Path
import helper
print("working on", Path("data/numbers.txt").read_text().strip())
assert __name__ == "__main__" and __file__ == sys.argv[0] and sys.argv[1:] == ["--lr", "0.1"]
assert os.environ["GLASSHOUSE_INPUTS"] == os.getcwd()
out = Path("outputs")
(out / "plots").mkdir()
(out / "metrics.json").write_text(json.dumps({"sum": helper.total("data/numbers.txt")}))
Path(os.environ["GLASSHOUSE_OUTPUTS"], "plots", "a.svg").write_text("<svg/>")
"""
HELPER = b"from pathlib import Path\ndef total(p): return sum(map(int, Path(p).read_text().split()))\n"
FILES = {"helper.py": HELPER, "data/numbers.txt": b"1 2 3\n"}


def test_an_ordinary_script_runs_unmodified_and_its_files_come_back(tmp_path: Path) -> None:
    ended = run(tmp_path, ORDINARY, files=FILES, arguments=["--lr", "0.1"])
    assert ended.exit_code == 0, ended.log
    assert ended.outputs == {"metrics.json": b'{"sum": 6}', "plots/a.svg": b"<svg/>"}
    assert ended.types()[:4] == ["ready", "imported", "opened", "running"]
    assert ended.types()[-1] == "finished"
    assert "working on 1 2 3" in ended.log
    assert ended.one("finished")["work"]["stop_reason"] == "finished"


def test_the_raw_leg_does_the_same(tmp_path: Path) -> None:
    params = {"script": "train.py", "arguments": ["--lr", "0.1"]}
    ended = run_raw("script", params, FILES | {"train.py": ORDINARY.encode()}, tmp_path)
    assert ended.exit_code == 0, ended.log
    assert ended.outputs == {"metrics.json": b'{"sum": 6}', "plots/a.svg": b"<svg/>"}
    assert ended.types()[:4] == ["ready", "imported", "opened", "running"]
    assert sorted(path.name for path in (tmp_path / "raw-inputs").iterdir()) == ["data", "helper.py", "train.py"]


MODULE = {
    "pkg/__init__.py": b"print('the package comes first')",
    "pkg/helper.py": b"import os\ndef word(): return os.environ['WORD']",
    "pkg/train.py": b"""
import sys
from . import helper
from pathlib import Path
assert (__name__, __package__, __spec__.name) == ("__main__", "pkg", "pkg.train")
assert sys.argv == [__file__, "--lr", "1"] and __file__.endswith("pkg/train.py")
Path("outputs/word").write_text(helper.word())
""",
    "pkg/whole/__init__.py": b"",
    "pkg/whole/__main__.py": b"open('outputs/word', 'w').write('whole')",
}


def test_a_module_runs_as_python_m_does_with_the_environment_of_its_job(tmp_path: Path) -> None:
    params = {"module": "pkg.train", "arguments": ["--lr", "1"], "env": {"WORD": "spoken", "HF_HUB_OFFLINE": "0"}}
    with FakeAgent("script", params, MODULE, _workspace(tmp_path)) as agent:
        ended = agent.run()
    assert ended.exit_code == 0, ended.log
    assert (ended.outputs, ended.log) == ({"word": b"spoken"}, "the package comes first\n")
    again = tmp_path / "again"
    again.mkdir()
    with FakeAgent("script", {"module": "pkg.whole"}, MODULE, _workspace(again)) as agent:
        assert agent.run().outputs == {"word": b"whole"}


@pytest.mark.parametrize(
    ("env", "outputs", "found"),
    [
        ({}, ("outputs",), {"WANDB_DIR": "outputs", "WANDB_MODE": "offline", "WANDB_SYMLINK": "false"}),
        ({"WANDB_PROJECT": "p"}, ("outputs", "wandb"), {"WANDB_MODE": "offline", "WANDB_SYMLINK": "false"}),
        ({"WANDB_MODE": "disabled"}, ("a",), {"WANDB_DIR": "a", "WANDB_MODE": "disabled", "WANDB_SYMLINK": "false"}),
    ],
)
def test_what_records_elsewhere_records_into_the_outputs_where_there_is_no_network(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    outputs: tuple[str, ...],
    found: dict[str, str],
) -> None:
    monkeypatch.setattr(os, "environ", {})
    (tmp_path / "train.py").touch()
    inputs, channel = FolderInputs(tmp_path), EventLines(None, tmp_path)
    task = Task(params={}, inputs=inputs, channel=channel, workspace=tmp_path, output_folders=outputs)
    params = script.ScriptParams(script="train.py", outputs=outputs, env=env)
    monkeypatch.setattr(environment, "egress_open", lambda: True)
    script.prepare(task, params)
    assert {name: value for name, value in os.environ.items() if name.startswith("WANDB")} == env
    monkeypatch.setattr(environment, "egress_open", lambda: False)
    script.prepare(task, params)
    job = f"{tmp_path / 'job'}/"
    assert {n: v.removeprefix(job) for n, v in os.environ.items() if n.startswith("WANDB")} == env | found


def test_a_module_that_is_nowhere_is_told_with_the_remedy(tmp_path: Path) -> None:
    with FakeAgent("script", {"module": "pkg.trane"}, MODULE, _workspace(tmp_path)) as agent:
        ended = agent.run()
    assert ended.messages[-1] == {"type": "failed", "code": "script-failed"}
    assert "the script imports 'pkg.trane', which is neither in the package nor on this machine" in ended.log


def test_a_script_may_use_the_task(tmp_path: Path) -> None:
    source = """
import glasshouse.task
task = glasshouse.task.current()
task.progress(0, 4)
for step in range(1, 5):
    task.progress(step, 4, loss=1 / step)
task.save_bytes("size.txt", str(task.size("train.py")).encode())
"""
    ended = run(tmp_path, source)
    assert ended.outputs == {"size.txt": str(len(source)).encode()}
    assert ended.one("finished")["work"]["done"] == 4
    assert ended.one("finished")["loss"] == {"first": "1", "final": "0.25"}


@pytest.mark.parametrize("end", ["raise SystemExit", "import sys; sys.exit(0)", "import sys; sys.exit(None)"])
def test_leaving_with_success_is_success(tmp_path: Path, end: str) -> None:
    assert run(tmp_path, end).types()[-1] == "finished"


def failed(tmp_path: Path, source: str, code: str = "script-failed", **files: bytes) -> str:
    """Run a script that fails, and return its sealed log, with the working directory cut out."""
    ended = run(tmp_path, source, files={f"{name}.py": data for name, data in files.items()})
    assert ended.exit_code == 1
    assert ended.messages[-1] == {"type": "failed", "code": code}
    assert "glasshouse/" not in ended.log  # none of our own files
    return ended.log.replace(f"{tmp_path}/workspace/job/", "")


def test_a_failing_scripts_log_ends_with_its_own_traceback_and_a_sentence(tmp_path: Path) -> None:
    log = failed(tmp_path, "print('before')\ndef f():\n    1 / 0\nf()\n")
    assert log == (
        "before\n"
        "Traceback (most recent call last):\n"
        '  File "train.py", line 4, in <module>\n'
        "    f()\n"
        '  File "train.py", line 3, in f\n'
        "    1 / 0\n"
        "    ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
        "glasshouse: the script failed [script-failed]\n"
    )


def test_what_was_printed_comes_before_the_error_that_it_led_to(tmp_path: Path) -> None:
    source = """
import os, sys
print("one")
os.write(2, b"two\\n")
print("three")
print("four", end="")
raise ValueError("five")
"""
    words = failed(tmp_path, source)
    places = [words.index(word) for word in ("one", "two", "three", "four", "ValueError: five")]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("source", "log"),
    [
        ("import sys; sys.exit(3)", "glasshouse: the script ended itself with exit status 3 [script-failed]\n"),
        (
            "import sys; print('a'); sys.exit('no patients')",
            "a\nno patients\nglasshouse: the script ended itself with the words above [script-failed]\n",
        ),
    ],
)
def test_a_script_that_ends_itself_has_no_traceback(tmp_path: Path, source: str, log: str) -> None:
    assert failed(tmp_path, source) == log


def test_a_script_that_is_no_python_is_told_the_line(tmp_path: Path) -> None:
    log = failed(tmp_path, "x = 1\ndef\n")
    assert log.startswith('  File "train.py", line 2\n    def\n')
    last = f"glasshouse: train.py line 2 is not valid Python 3.{sys.version_info.minor} [script-failed]\n"
    assert log.endswith("SyntaxError: invalid syntax\n" + last)


def test_a_helper_that_is_no_python_is_named(tmp_path: Path) -> None:
    log = failed(tmp_path, "import helper", helper=b"def")
    assert 'File "train.py", line 1, in <module>' in log
    assert "glasshouse: helper.py line 1 is not valid Python" in log


def test_a_module_that_is_missing_is_told_with_the_remedy(tmp_path: Path) -> None:
    log = failed(tmp_path, "import no_such_module")
    assert log.startswith('Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n')
    assert (
        "glasshouse: the script imports 'no_such_module', which is neither in the package nor on this machine "
        "[script-failed]\nglasshouse: add it to [inputs] if it is a file of yours"
    ) in log


def test_a_mistake_with_the_task_is_a_sentence_below_the_way_to_it(tmp_path: Path) -> None:
    log = failed(tmp_path, "from glasshouse.task import current\ncurrent().open('x')", "file-missing")
    assert log == (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 2, in <module>\n'
        "    current().open('x')\n"
        "glasshouse: the job has no input named 'x' [file-missing]\n"
        "glasshouse: name it in the [inputs] table of the job file\n"
    )


def test_an_error_while_another_was_handled_shows_both_and_none_of_ours(tmp_path: Path) -> None:
    log = failed(tmp_path, "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('b')")
    assert "KeyError: 'a'" in log
    assert "During handling of the above exception" in log
    assert log.endswith("ValueError: b\nglasshouse: the script failed [script-failed]\n")


def test_a_module_of_the_owner_does_not_stand_in_for_one_that_glasshouse_needs(tmp_path: Path) -> None:
    """Files named as the standard library's are the script's affair; outputs leave all the same."""
    broken = b"raise ImportError('the owner meant something else')"
    source = "import zipfile as z\nopen('outputs/a.zip', 'wb').write(b'PK\\x03\\x04 no archive')"
    names = ("zipfile", "tempfile", "traceback", "shutil")
    ended = run(tmp_path, source.partition("\n")[2], files={f"{name}.py": broken for name in names})
    assert ended.exit_code == 0, ended.log
    assert ended.outputs == {"a.zip": b"PK\x03\x04 no archive"}


def test_what_a_script_wrote_before_it_failed_is_not_lost(tmp_path: Path) -> None:
    ended = run(tmp_path, "open('outputs/epoch1.txt', 'w').write('good')\n1 / 0")
    assert ended.messages[-1]["code"] == "script-failed"
    assert ended.outputs == {"epoch1.txt": b"good"}


def test_running_out_of_memory_has_its_own_code(tmp_path: Path) -> None:
    log = failed(tmp_path, "raise MemoryError", "out-of-memory")
    assert "glasshouse: the script ran out of memory [out-of-memory]\nglasshouse: rent a machine" in log


def test_a_missing_requirement_is_named_before_anything_runs(tmp_path: Path) -> None:
    source = "open('outputs/ran', 'w').close()"
    ended = run(tmp_path, source, requirements=["no-such-dist", "pytest>=999", "cryptography>=1"])
    assert ended.messages[-1]["code"] == "requirement-missing"
    assert "no-such-dist" in ended.log
    assert "pytest>=999" in ended.log
    assert "cryptography" not in ended.log
    assert ended.outputs == {}


def test_a_script_that_is_not_in_the_package_is_named(tmp_path: Path) -> None:
    ended = run(tmp_path, "pass", script="other.py")
    assert ended.messages[-1]["code"] == "file-missing"
    assert "other.py" in ended.log


def test_a_pickle_is_refused_and_everything_else_comes_back(tmp_path: Path) -> None:
    source = """
import pickle, sys
for name in ("a.pkl", "model.pt"):
    pickle.dump({}, open(f"outputs/{name}", "wb"))
open("outputs/b.txt", "w").write("b")
if len(sys.argv) > 1:
    1 / 0
"""
    ended = run(tmp_path, source)
    assert ended.messages[-1]["code"] == "output-refused"
    assert ended.outputs == {"b.txt": b"b"}
    assert "'a.pkl', 'model.pt' [output-refused]\nglasshouse: save tensors with safetensors" in ended.log
    assert "allow_pickle = true" in ended.log
    # A script that fails besides keeps its own code, and the log still says what did not come back.
    (tmp_path / "again").mkdir()
    ended = run(tmp_path / "again", source, arguments=["fail"])
    assert ended.messages[-1]["code"] == "script-failed"
    assert "'a.pkl', 'model.pt' [output-refused]" in ended.log


def test_the_job_file_may_allow_pickles_and_name_the_output_folder(tmp_path: Path) -> None:
    source = "import pickle\npickle.dump({}, open('results/a.pkl', 'wb'))"
    ended = run(tmp_path, source, allow_pickle=True, outputs=["results/"])
    assert ended.exit_code == 0, ended.log
    assert list(ended.outputs) == ["a.pkl"]


def test_of_several_output_folders_each_file_comes_back_under_its_folders_name(tmp_path: Path) -> None:
    source = "open('outputs/a.txt', 'w').write('a'); open('runs/best/b.txt', 'w').write('b')"
    ended = run(tmp_path, source, outputs=["outputs/", "runs/best"])
    assert ended.outputs == {"outputs/a.txt": b"a", "runs/best/b.txt": b"b"}, ended.log
    assert ended.log == ""


LOSING = """
import os, pathlib, tempfile
from pathlib import Path
Path("outputs/kept.txt").write_text("kept")
Path("model.safetensors").write_bytes(bytes(1000))
Path("checkpoints").mkdir()
for step in range(30):
    Path(f"checkpoints/{step:02}").write_text("x")
Path("data.csv").write_text("changed")
Path.home().joinpath("lightning_logs").mkdir()
Path.home().joinpath("lightning_logs/version_0").write_text("log")
tempfile.NamedTemporaryFile(delete=False).write(b"nobody's result")
os.symlink("/etc/hostname", "link")
"""


@pytest.mark.parametrize("end", ["", "1 / 0", "os._exit(0)"], ids=["finishes", "fails", "leaves"])
def test_work_outside_of_the_output_folders_is_counted_and_named_in_the_log(tmp_path: Path, end: str) -> None:
    ended = run(tmp_path, LOSING + end, files={"data.csv": b"patients", "read.csv": b"only read"})
    assert ended.outputs == {"kept.txt": b"kept"}
    found = [one for line in ended.log.splitlines() if (one := Uncollected.parse(line)) is not None]
    assert [(one.files, one.bytes) for one in found] == [(33, 1000 + 30 + len("changed") + len("log"))]
    assert len(found[0].named) == 20  # bounded
    assert found[0].named[0] == "checkpoints/00"
    # Nothing of it stands in what the agent, and so the host, is told.
    assert not any("checkpoints" in str(message) or "lost" in str(message) for message in ended.messages)


def test_a_script_that_only_writes_where_it_should_hears_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, "open('outputs/a', 'w').write('a')", files={"data.csv": b"patients"})
    assert ended.log == ""


def test_threads_and_exit_handlers_finish_before_the_outputs_leave(tmp_path: Path) -> None:
    source = """
import atexit, threading, time
def late(name):
    time.sleep(0.2)
    open(f"outputs/{name}", "w").write(name)
threading.Thread(target=late, args=("thread",)).start()
atexit.register(late, "handler")
"""
    assert run(tmp_path, source).outputs == {"thread": b"thread", "handler": b"handler"}


SLEEPY = """
import time
open("outputs/so-far.txt", "w").write("kept")
print("asleep", flush=True)
{body}
"""


@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(3600)",
        "try:\n    time.sleep(3600)\nexcept KeyboardInterrupt:\n    raise SystemExit(0)",
        "from glasshouse.task import current\nwhile not current().should_stop():\n    time.sleep(0.01)",
    ],
)
def test_a_stopped_script_keeps_what_it_wrote(tmp_path: Path, body: str) -> None:
    source = SLEEPY.format(body=body).encode()
    with FakeAgent("script", {"script": "train.py"}, {"train.py": source}, _workspace(tmp_path)) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.give_grant()
        agent.until("running")
        agent.wait_for_log("asleep")
        agent.send({"type": "stop"})
        ended = agent.finish()
    assert ended.exit_code == 0, ended.log
    assert ended.one("finished")["work"]["stop_reason"] == "stopped"
    assert ended.outputs == {"so-far.txt": b"kept"}


def test_a_stop_right_behind_the_grant_is_not_lost(tmp_path: Path) -> None:
    source = SLEEPY.format(body="time.sleep(60)").encode()
    with FakeAgent("script", {"script": "train.py"}, {"train.py": source}, _workspace(tmp_path)) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.give_grant()
        agent.send({"type": "stop"})
        ended = agent.finish()
    assert ended.exit_code == 0, ended.log
    assert ended.one("finished")["work"]["stop_reason"] == "stopped"


def test_a_stop_in_the_middle_of_an_output_does_not_break_it(tmp_path: Path) -> None:
    source = b"""
from glasshouse.task import current
task = current()
for number in range(10_000):
    task.save_bytes(f"{number}.dat", bytes(3_000_000))
"""
    with FakeAgent("script", {"script": "train.py"}, {"train.py": source}, _workspace(tmp_path)) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.give_grant()
        agent.until("output-end")
        agent.send({"type": "stop"})
        ended = agent.finish()  # checks every output's length and digest
    assert ended.exit_code == 0, ended.log
    assert ended.one("finished")["work"]["stop_reason"] == "stopped"


def test_a_stop_before_the_grant_ends_the_worker_quietly(tmp_path: Path) -> None:
    with FakeAgent("script", {"script": "train.py"}, {"train.py": b"pass"}, _workspace(tmp_path)) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.send({"type": "stop"})
        ended = agent.finish()
    assert (ended.exit_code, ended.types()) == (0, ["ready", "imported"])


@pytest.mark.parametrize("when", ["ready", "imported", "running"])
def test_the_worker_ends_when_its_agent_does(tmp_path: Path, when: str) -> None:
    source = b"import time; time.sleep(60)"
    with FakeAgent("script", {"script": "train.py"}, {"train.py": source}, _workspace(tmp_path)) as agent:
        agent.until("ready")
        if when != "ready":
            agent.send({"type": "prepare"})
            agent.until("imported")
        if when == "running":
            agent.give_grant()
            agent.until("running")
        agent.link.close()
        assert agent.process.wait(timeout=10) == 1


def test_a_hostile_grant_is_refused(tmp_path: Path) -> None:
    with FakeAgent("script", {"script": "train.py"}, {"train.py": b"pass"}, _workspace(tmp_path)) as agent:
        agent.until("ready")
        agent.send({"type": "prepare"})
        agent.until("imported")
        agent.send({"type": "grant", "bytes": 100})  # without its descriptors
        ended = agent.finish()
    assert ended.messages[-1] == {"type": "failed", "code": "schema-invalid"}


def test_the_process_is_closed_to_others_before_it_says_ready(tmp_path: Path) -> None:
    with FakeAgent("script", {"script": "train.py"}, {"train.py": b"pass"}, _workspace(tmp_path)) as agent:
        agent.until("ready")
        proc = Path("/proc") / str(agent.process.pid)
        limits = (proc / "limits").read_text()
        # A process that may not be dumped has its /proc entries given to root of the machine.
        core = next(line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core file size"))
        assert core == ["0", "0"]


def test_dumpable_is_off_in_the_script(tmp_path: Path) -> None:
    source = "import ctypes; open('outputs/d', 'w').write(str(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)))"
    assert run(tmp_path, source).outputs == {"d": b"0"}


def test_a_deterministic_script_has_its_seeds(tmp_path: Path) -> None:
    source = "import random, os; print(random.random(), os.environ['OMP_NUM_THREADS'])"
    files = {"train.py": source.encode()}
    first = run_raw("script", {"script": "train.py", "deterministic": True, "seed": 3}, files, tmp_path)
    second = run_raw("script", {"script": "train.py", "deterministic": True, "seed": 3}, files, tmp_path)
    assert first.exit_code == 0, first.log
    assert first.log == second.log
    assert first.log.split()[1] == "1"
