"""A script in several ranks: what it finds, what comes back, and which reason ends the job."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, UsageError
from glasshouse.workloads.builtin.script import ScriptParams
from glasshouse.workloads.distributed.rank_server import Failure
from glasshouse.workloads.distributed.ranked_workload import first_reason
from glasshouse.workloads.registry import canonical, parse
from tools.fake_agent import Ended, FakeAgent, run_raw

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")

# As for torchrun: the store of the launcher is the only thing that the ranks share.
TRAIN = """
import json, os, pathlib, sys
import torch.distributed as dist
from glasshouse.task import current

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"rank-{rank}", os.environ["LOCAL_RANK"])
seen = [store.get(f"rank-{other}").decode() for other in range(world)]
task = current()
for step in range(4):
    task.progress(step, 3, loss=4.0 - step)
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/shard-{rank}.json").write_text(json.dumps({
    "seen": seen, "arguments": sys.argv[1:], "data": pathlib.Path("data.txt").read_text(),
    "environment": {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                                                        "GROUP_RANK", "MASTER_ADDR")},
    "secrets": [name for name in os.environ if name.startswith("GLASSHOUSE") and "TOKEN" in name],
}))
if rank == 0:
    task.save_bytes("model.safetensors", bytes(8))
"""


def raw(tmp_path: Path, script: str, count: int = 2, **params: Any) -> Ended:
    files = {"train.py": script.encode(), "data.txt": b"patients"}
    return run_raw("script", {"script": "train.py", **params}, files, tmp_path, ranks=count)


def test_an_unmodified_script_of_torchrun_finds_what_it_expects(tmp_path: Path) -> None:
    ended = raw(tmp_path, TRAIN, 3, arguments=["--epochs", "2"])
    assert ended.exit_code == 0, ended.log
    shards = [json.loads(ended.outputs[f"shard-{rank}.json"]) for rank in range(3)]
    for rank, shard in enumerate(shards):
        assert shard["seen"] == ["0", "1", "2"]
        assert (shard["arguments"], shard["data"]) == (["--epochs", "2"], "patients")
        expected = (str(rank), str(rank), "3", "3", "0", "127.0.0.1")
        assert shard["environment"] == dict(zip(VARIABLES, expected, strict=True))
        assert shard["secrets"] == ["GLASSHOUSE_GROUP_TOKEN"]  # until the group is made; the other is spent
    assert ended.outputs["model.safetensors"] == bytes(8)
    work = ended.one("finished")["work"]
    assert (work["done"], work["stop_reason"]) == (3, "finished")
    assert ended.one("finished")["loss"] == {"first": "4", "final": "1"}
    progress = [message["done"] for message in ended.messages if message["type"] == "progress"]
    assert (progress[0], progress[-1], progress.count(3)) == (0, 3, 1)  # one rank's, not three


def test_a_rank_that_fails_ends_the_others_and_its_reason_is_the_jobs(tmp_path: Path) -> None:
    script = """
import os, pathlib, time
pathlib.Path("outputs").mkdir(exist_ok=True)
if os.environ["RANK"] == "1":
    pathlib.Path("outputs/kept.txt").write_text("written before")
    raise MemoryError("too much")
time.sleep(60)
"""
    ended = raw(tmp_path, script)
    assert ended.exit_code == 1
    assert ended.one("failed") == {"code": "out-of-memory", "type": "failed"}
    assert "glasshouse: rank 1:" in ended.log
    said = ended.log.splitlines()
    assert said[-2:] == [
        "glasshouse: rank 1 failed, which ends all 2 ranks [out-of-memory]",
        "glasshouse: its words: MemoryError: too much",
    ]
    assert ended.outputs == {"kept.txt": b"written before"}


def test_a_rank_that_is_killed_is_lost(tmp_path: Path) -> None:
    script = (
        "import os, signal, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)"
    )
    ended = raw(tmp_path, script)
    assert ended.one("failed")["code"] == "rank-lost"
    assert "rank 1 was ended by SIGKILL" in ended.log


def test_a_rank_that_ends_without_a_word_has_failed(tmp_path: Path) -> None:
    script = "import ctypes, os, time\nif os.environ['RANK'] == '0': ctypes.CDLL(None)._exit(3)\ntime.sleep(60)"
    ended = raw(tmp_path, script)
    assert ended.one("failed")["code"] == "script-failed"
    assert "rank 0 ended without a word, with exit status 3" in ended.log


def test_all_ranks_begin_again_as_often_as_the_job_allows(tmp_path: Path) -> None:
    script = """
import os, pathlib
from glasshouse.collectives.secret import group_secret
count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
secret = bytes(group_secret())
if os.environ["RANK"] == "1" and count < 2:
    raise ValueError("again")
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/{os.environ['RANK']}-{count}").write_text(str(len(secret)))
"""
    ended = raw(tmp_path, script, max_restarts=2)
    assert ended.exit_code == 0, ended.log
    assert {"0-2", "1-2"} <= set(ended.outputs)
    assert "failed" not in ended.types()


def test_an_owner_who_stops_the_job_stops_every_rank(tmp_path: Path) -> None:
    script = """
import os, pathlib, sys, time
pathlib.Path("outputs").mkdir(exist_ok=True)
try:
    pathlib.Path(f"outputs/ready-{os.environ['RANK']}").touch()
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(f"outputs/stopped-{os.environ['RANK']}").touch()
"""
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/train.py").write_text(script)
    (tmp_path / "params.json").write_text('{"script": "train.py"}')
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-I", "-m", "glasshouse.workloads.worker", "--raw", "--workload", "script"]
    command += ["--params", str(tmp_path / "params.json"), "--inputs", str(tmp_path / "inputs"), "--ranks", "2"]
    command += ["--outputs", str(tmp_path / "out"), "--workspace", str(tmp_path / "work")]
    process = subprocess.Popen(
        [*command, "--events", str(tmp_path / "events")], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        outputs = tmp_path / "work/job/outputs"
        deadline = 60
        while len(list(outputs.glob("ready-*"))) < 2:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
            deadline -= 1
            assert deadline or process.poll() is None
        process.send_signal(signal.SIGTERM)
        log = "".join(process.communicate(timeout=60))
    finally:
        process.kill()
    assert process.returncode == 0, log
    last = json.loads((tmp_path / "events").read_text().splitlines()[-1])
    assert (last["type"], last["work"]["stop_reason"]) == ("finished", "stopped")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ready-0", "ready-1", "stopped-0", "stopped-1"}


def test_a_workload_of_one_process_runs_in_no_ranks(tmp_path: Path) -> None:
    ended = run_raw("mlp", {"steps": 1}, {}, tmp_path, ranks=2)
    assert (ended.exit_code, ended.one("failed")["code"]) == (1, "job-invalid")
    assert "mlp runs in one process; in several ranks: lora, script" in ended.log


def test_a_job_of_several_ranks_cannot_be_measured(tmp_path: Path) -> None:
    slots = {"arm": "A", "end_ns": "1", "seed": "00" * 32, "slot_ns": 10**6, "steps": 1, "uncounted": 1}
    ended = raw(tmp_path, "pass", slots=slots | {"warmup_steps": 0})
    assert ended.one("failed")["code"] == "job-invalid"
    assert "cannot be measured" in ended.log


def test_a_grant_without_a_group_secret_starts_no_rank(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    with FakeAgent("script", {"script": "train.py"}, {"train.py": b"print('ran')"}, workspace, ranks=2) as agent:
        ended = agent.run()
    assert (ended.exit_code, ended.one("failed")["code"]) == (1, "schema-invalid")
    assert "without a secret for the ranks" in ended.log
    assert "ran" not in ended.log.split()


# which reason


LOST, TAMPERED, ABORTED = Code.RANK_LOST, Code.COLLECTIVE_TAMPERED, Code.COLLECTIVE_ABORTED


@pytest.mark.parametrize(
    ("told", "exits", "code", "words"),
    [
        # The others notice the end of a rank before anybody else does.
        ([(0, LOST), (1, Code.SCRIPT_FAILED)], {0: 1, 1: 1}, Code.SCRIPT_FAILED, "rank 1 failed"),
        ([(0, LOST)], {0: 1, 1: -signal.SIGKILL}, LOST, "rank 1 was ended by SIGKILL"),
        ([(0, LOST)], {0: 1, 1: -signal.SIGSEGV}, LOST, "rank 1 was ended by SIGSEGV"),
        ([(0, LOST)], {0: 1, 2: 7}, Code.SCRIPT_FAILED, "rank 2 ended without a word, with exit status 7"),
        # Of collectives, the one that says what is wrong, and not the ones that were told.
        ([(2, ABORTED), (0, TAMPERED), (1, LOST)], {0: 1, 1: 1, 2: 1}, TAMPERED, "rank 0 could not go on"),
        ([(2, ABORTED), (1, LOST)], {1: 1, 2: 1}, ABORTED, "rank 2 could not go on"),
        ([(1, Code.COLLECTIVE_TIMEOUT)], {1: 1}, Code.COLLECTIVE_TIMEOUT, "rank 1 could not go on"),
        # Those that torchelastic ends because of another are no reason.
        ([(1, TAMPERED)], {0: -signal.SIGTERM, 1: 1}, TAMPERED, "rank 1"),
        ([], {0: -signal.SIGTERM}, LOST, "ended from outside"),
        ([], {3: -64}, LOST, "rank 3 was ended by"),
    ],
)
def test_the_reason_is_the_one_that_is_no_consequence_of_another(
    told: list[tuple[int, Code]], exits: dict[int, int], code: Code, words: str
) -> None:
    error = first_reason([Failure(rank, said, f"rank {rank}'s own words") for rank, said in told], exits, 4)
    assert error.code is code
    assert words in error.message
    assert "which ends all 4 ranks" in error.message or not exits
    assert (
        first_reason([], {1: 3}, 8, first=4).message
        == "rank 5 ended without a word, with exit status 3, which ends all 8 ranks"
    )
    spoke = re.search(r"rank (\d) (failed|could)", error.message)
    assert error.hint == (f"its words: rank {spoke[1]}'s own words" if spoke else "")


def test_restarts_are_few_and_checked() -> None:
    params = parse("script", {"script": "a.py", "max_restarts": 3})
    assert isinstance(params, ScriptParams)
    assert params.max_restarts == 3
    default = parse("script", {"script": "a.py"})
    assert isinstance(default, ScriptParams)
    assert default.max_restarts == 0
    assert canonical("script", {"script": "a.py"}) == {"script": "a.py"}
    for wrong in (-1, 101, True, "2"):
        with pytest.raises(UsageError, match="max_restarts"):
            parse("script", {"script": "a.py", "max_restarts": wrong})
