"""Ranks in a container, which gives no namespaces: the same training, over nothing but what they inherit."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import Code, ExitCode
from glasshouse.wire.states import State
from tools.machine import needs_filters, needs_landlock
from tools.ports import free_port
from tools.runtime_world import CANARY, AgentProcess, Broken, World, ended
from tools.sandboxed import is_gone
from tools.scanner import family
from tools.waiting import wait_for

pytestmark = [needs_filters, needs_landlock]

CONFINED = Path(__file__).parents[1] / "tools" / "confined.py"
# A shared memory of its own, where that can be had: what lies in the machine's would be found by runs beside it.
PROGRAM = (str(CONFINED), *(("SHM=1g",) if os.geteuid() == 0 else ()), "-m", "glasshouse.runtime")
PATIENTS = CANARY + os.urandom(1 << 20) + CANARY

# What ranks of a machine with namespaces do too: `test_collectives_training` and its siblings look closer at each.
TRAIN = """
import copy, hashlib, os, pathlib
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("sealed")
rank, world = dist.get_rank(), dist.get_world_size()
rows = torch.frombuffer(bytearray(pathlib.Path("patients.csv").read_bytes()[:65536]), dtype=torch.uint8)
rows = rows.view(-1, 16).float() / 255
torch.manual_seed(7)
plain = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))

def trained(model, mine):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(mine[step * 32 : step * 32 + 32]).square().mean().backward()
        optimizer.step()
    return model

own = rows[rank::world]
alone = trained(copy.deepcopy(plain), own)
by_ddp = trained(DistributedDataParallel(copy.deepcopy(plain)), own).module
by_fsdp = copy.deepcopy(plain)
fully_shard(by_fsdp[0]); fully_shard(by_fsdp)
by_fsdp = trained(by_fsdp, own)
whole = [part.full_tensor() for part in by_fsdp.parameters()]
for one, other, unshared in zip(by_ddp.parameters(), whole, alone.parameters(), strict=True):
    assert torch.allclose(one, other, atol=1e-5), "FSDP2 and DDP do the same"
assert any(not torch.equal(one, other) for one, other in zip(by_ddp.parameters(), alone.parameters(), strict=True))

halves = [list(range(low, world, 2)) for low in (0, 1)]
groups = [dist.new_group(half) for half in halves]
total = torch.tensor([float(rank)])
dist.all_reduce(total, group=groups[rank % 2])
assert total.item() == sum(halves[rank % 2])

digest = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in by_ddp.parameters())).hexdigest()
every = [None] * world
dist.all_gather_object(every, {"rank": rank, "digest": digest})
assert every == [{"rank": number, "digest": digest} for number in range(world)]
assert "memfd:glasshouse-frames" in pathlib.Path("/proc/self/maps").read_text()
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/digest-{rank}.txt").write_text(digest)
print(f"rank {rank} of {world} ends", flush=True)
dist.destroy_process_group()
"""

LONG = """
import os, pathlib, time
from glasshouse import task
data = pathlib.Path("patients.csv").read_bytes()
task.current().progress(0, 2, loss=1.0)
print("rank", os.environ["RANK"], "is at work", flush=True)
for _ in range(1200):
    time.sleep(0.05)
"""


@pytest.fixture
def world(script_worlds: Callable[..., World]) -> Callable[..., World]:
    def make(script: str, **options: Any) -> World:
        return script_worlds(script, {"patients.csv": PATIENTS}, **options)

    return make


def ranks_of(agent: AgentProcess, count: int) -> list[int]:
    """Wait for the ranks to be at work, and return their numbers."""

    def found() -> list[int]:
        ranks = []
        for pid in family([agent.process.pid]):
            try:
                if b"glasshouse.workloads.distributed.rank " in Path(f"/proc/{pid}/cmdline").read_bytes():
                    ranks.append(pid)
            except OSError:
                continue
        return sorted(ranks)

    agent.wait_for(lambda: len(found()) == count, within_s=60)
    agent.wait_for(lambda: any(event["type"] == "progress" for event in agent.events()), within_s=60)
    return found()


# a run that works


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=[pytest.mark.smoke, pytest.mark.slow]), pytest.param(8, marks=pytest.mark.long)]
)
def test_ranks_train_in_a_container_as_they_do_elsewhere(world: Callable[..., World], count: int) -> None:
    agent = world(TRAIN).start(ranks=count, program=PROGRAM)
    agent.wait(within_s=120 * count)
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert agent.states() == [state.value for state in State]
    outputs = agent.outputs()
    assert sorted(outputs) == [f"digest-{rank}.txt" for rank in range(count)]
    assert len(set(outputs.values())) == 1
    assert {f"rank {rank} of {count} ends" for rank in range(count)} <= set(agent.log().splitlines())
    checks = {event["body"]["name"]: event["body"]["result"] for event in agent.events() if event["type"] == "check"
              and event["body"]["process"] == "worker"}  # fmt: skip
    assert (checks["egress-closed"], checks["seccomp-filter"]) == ("passed", "passed")


@pytest.mark.long
def test_all_ranks_begin_again_with_a_store_and_connections_of_their_own(world: Callable[..., World]) -> None:
    script = """
import os, pathlib, torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("sealed")
store = dist.distributed_c10d._get_default_store()
assert store.add("starts", 1) <= 2, "a store of this start alone"
if attempt == 0 and dist.get_rank() == 1:
    raise ValueError("the first start is a bad one")
one = torch.ones(1000)
dist.all_reduce(one)
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/sum-{dist.get_rank()}.txt").write_text(f"{attempt} {one[0].item()}")
"""
    agent = world(script, max_restarts=1).start(ranks=2, program=PROGRAM)
    agent.wait(within_s=120)
    ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert agent.outputs() == {"sum-0.txt": b"1 2.0", "sum-1.txt": b"1 2.0"}


# what stays inside


TRIES = """
import ctypes, os, socket, subprocess
AGENT = {agent}
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, call):
    try:
        call()
        answer = "done"
    except OSError as error:
        answer = os.strerror(error.errno or 0)
    print("tried", name + ":", answer, flush=True)
def unix(kind=socket.SOCK_STREAM):
    return socket.socket(socket.AF_UNIX, kind)
def called(number, *words):
    if libc.syscall(number, *words) < 0:
        raise OSError(ctypes.get_errno(), "refused")
tried("path", lambda: unix().connect({path!r}))
tried("abstract", lambda: unix().connect(chr(0) + {name!r}))
tried("own name", lambda: unix().bind(chr(0) + "glasshouse-rank"))
tried("own path", lambda: unix().bind("listener"))
tried("free name", lambda: unix().bind(""))
tried("datagram", lambda: unix(socket.SOCK_DGRAM).sendto(b"plaintext", {path!r}))
tried("datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
for family in (2, 10, 16, 17, 40):
    tried(f"family {{family}}", lambda: socket.socket(family, socket.SOCK_STREAM))
tried("a connected pair", lambda: socket.socketpair()[0].connect({path!r}))
parent = os.getppid()
sibling = [int(pid) for pid in open(f"/proc/{{parent}}/task/{{parent}}/children").read().split()]
others = [pid for pid in (AGENT, parent, *sibling) if pid != os.getpid()]
for pid in others:
    tried("memory", lambda: open(f"/proc/{{pid}}/mem", "rb").close())
    tried("environment", lambda: open(f"/proc/{{pid}}/environ", "rb").close())
    tried("descriptor", lambda: called(438, os.pidfd_open(pid), 3, 0))
    tried("attach", lambda: called(101, 0x4206, pid, 0, 0))
    tried("read", lambda: called(310, pid, ctypes.byref(ctypes.create_string_buffer(16)), 1, None, 0, 0))
    for number in os.listdir("/proc/self/fd"):
        tried("files", lambda: os.close(os.open(f"/proc/{{pid}}/fd/{{number}}", os.O_RDWR)))
tried("session", os.setsid)
tried("a child", lambda: subprocess.run(["true"], check=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="this machine has other numbers for the calls")
def test_a_rank_reaches_no_name_no_other_family_and_no_other_process(
    world: Callable[..., World], tmp_path: Path
) -> None:
    """Listeners of this very test, of the same user, which would take what a rank says."""
    name, path = f"glasshouse-outside-{os.getpid()}", f"/tmp/glasshouse-outside-{os.getpid()}"
    reached: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        for listener, address in ((abstract, "\0" + name), (named, path)):
            listener.bind(address)
            listener.listen(8)
            listener.settimeout(0)
        try:
            script = TRIES.format(path=path, name=name, agent=os.getpid())
            agent = world(script).start(ranks=2, program=PROGRAM)
            agent.wait(within_s=120)
            ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
            for listener in (abstract, named):
                with pytest.raises(BlockingIOError):
                    reached.append(listener.accept()[0].recv(100))
        finally:
            Path(path).unlink()
    assert reached == []
    answers = [line.removeprefix("tried ").partition(": ") for line in agent.log().splitlines() if "tried " in line]
    assert len(answers) > 2 * 20
    done = {what for what, _, answer in answers if answer == "done"}
    assert done == {"a child"}
    refused = "Operation not permitted"
    for what in ("path", "abstract", "own name", "own path", "free name", "a connected pair", "session", "attach"):
        assert {answer for one, _, answer in answers if one == what} == {refused}, what
    for what in ("family 2", "family 10", "family 16", "family 17", "family 40"):
        assert {answer for one, _, answer in answers if one == what} == {"Address family not supported by protocol"}
    for what in ("datagram", "datagram pair"):
        assert {answer for one, _, answer in answers if one == what} == {"Socket type not supported"}


# As written for machines of its owner's, where each part has the backend that is fastest there.
UNMODIFIED = """
import datetime, pathlib, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=100))
side = dist.new_group(backend="gloo")
mesh = dist.init_device_mesh("cpu", (2,), backend_override={0: "gloo"})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 30))
pending = []
for step in range(3):
    pending.append(dcp.async_save({"model": model.module.state_dict()}, checkpoint_id=f"outputs/step-{step}"))
    for _ in range(20):
        model(torch.randn(4, 30)).sum().backward()
    dist.monitored_barrier(side)
for saved in pending:
    saved.result()
one = torch.ones(1)
dist.all_reduce(one, group=mesh.get_group())
print(dist.get_backend(), dist.get_backend(side), dist.get_backend(mesh.get_group()), one.item())
dist.destroy_process_group()
for backend in ("nccl", "gloo", None):
    dist.init_process_group(backend)
    print(dist.get_backend())
    dist.destroy_process_group()
dist.init_process_group("ucc")
"""


@pytest.mark.long
def test_a_script_that_names_other_backends_runs_as_it_is_sealed(world: Callable[..., World]) -> None:
    agent = world(UNMODIFIED, allow_pickle=True).start(ranks=2, program=PROGRAM)
    agent.wait(within_s=120)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.COLLECTIVE_UNSEALED)
    lines = agent.log().splitlines()
    said = "glasshouse: the group of gloo and nccl is sealed, as all are: what ranks send each other is encrypted"
    assert lines.count(said) == 2, "once in each process"
    assert lines.count("sealed sealed sealed 2.0") == 2
    assert lines.count("sealed") == 6
    assert "the backend ucc is not there for the ranks of a job" in agent.log()
    assert "name gloo, nccl or no backend" in agent.log()
    assert {f"step-{step}/__{rank}_0.distcp" for step in range(3) for rank in range(2)} <= set(agent.outputs())


# how it ends otherwise


def test_a_rank_that_is_killed_from_outside_ends_all(world: Callable[..., World]) -> None:
    agent = world(LONG).start(ranks=3, program=PROGRAM)
    ranks = ranks_of(agent, 3)
    os.kill(ranks[1], signal.SIGKILL)
    agent.wait(within_s=60)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.RANK_LOST)
    assert re.search(r"rank \d was ended by SIGKILL, which ends all 3 ranks", agent.log())
    wait_for(lambda: all(map(is_gone, ranks)), told=lambda: str(ranks))


def test_an_owner_who_stops_the_job_leaves_no_rank(world: Callable[..., World]) -> None:
    stubborn = LONG.replace("    time.sleep(0.05)", "    try: time.sleep(0.05)\n    except BaseException: pass")
    agent = world(stubborn).start(ranks=2, program=PROGRAM)
    ranks = ranks_of(agent, 2)
    agent.process.send_signal(signal.SIGTERM)
    agent.wait(within_s=60)
    ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
    wait_for(lambda: all(map(is_gone, ranks)), told=lambda: str(ranks))


# what is refused before it begins


def test_ranks_on_several_machines_want_a_network_of_their_own(world: Callable[..., World]) -> None:
    here = world("print('ran')", broken=Broken(budget=2, egress=("group",)))
    peers = ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))
    launch = here.launch(group=here.group(2, ranks=2)[0])
    agent = here.start(launch, options=("--ranks", "2", "--peers", peers), program=PROGRAM)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.PLATFORM)
    assert "over which they reach those of other machines" in agent.stderr.read_text()
    assert "run the job on one machine" in agent.stderr.read_text()
    assert "hardened" not in agent.states()
