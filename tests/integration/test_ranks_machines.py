"""Protected runs of one group on several machines: real agents, a real network between them, and what is done to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from glasshouse.errors import Code, ExitCode, UsageError
from glasshouse.handshake.delegation import RUN_USES, Delegation
from glasshouse.handshake.launch import issue_token
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.group import Group
from tools.machine import needs_landlock, needs_namespaces
from tools.ports import free_port
from tools.runtime_world import CANARY, AgentProcess, Broken, World, ended, verified

pytestmark = [needs_namespaces, needs_landlock]

# What a rank says in the clear: to the store, and over a socket of its own to its sibling's listener. It averages by
# hand: DistributedDataParallel and torch.optim, which others use, import as much again as PyTorch itself in each rank.
TRAIN = """
import hashlib, os, pathlib, torch, torch.distributed as dist
canary = pathlib.Path("patients.csv").read_bytes()
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("note", canary)
assert store.get("note") == canary
torch.manual_seed(3)
model = torch.nn.Linear(64, 64)
row = torch.frombuffer(bytearray(canary * 2), dtype=torch.uint8)[:64].float()
for step in range(3):
    (model(row) * (rank + 1)).square().mean().backward()
    for part in model.parameters():
        own = part.grad.clone()
        dist.all_reduce(part.grad)
        assert not torch.equal(own, part.grad)
        part.data -= 0.1 * part.grad / world
        part.grad = None
digest = hashlib.sha256(b"".join(part.detach().numpy().tobytes() for part in model.parameters())).hexdigest()
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/digest-{rank}.txt").write_text(digest)
print("machine", os.environ["GROUP_RANK"], "rank", rank, "of", world, flush=True)
dist.destroy_process_group()
"""
LONG = """
import time, torch, torch.distributed as dist
from glasshouse import task
dist.init_process_group("sealed")
for step in range(1000):
    dist.all_reduce(torch.ones(10))
    task.current().progress(step, 1000)
    time.sleep(0.05)
"""

BAD_START = """
import os, pathlib, torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("sealed")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1000))
if attempt == 0:
    if rank == 1:
        raise ValueError("the first start is a bad one")
    dist.all_reduce(torch.ones(1000))
    raise AssertionError("rank 1 did not take part")
summed = torch.full((1000,), rank + 1.0)
dist.all_reduce(summed)
pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path(f"outputs/sum-{rank}.txt").write_text(f"{attempt} {summed[0].item()}")
dist.destroy_process_group()
"""


class Network:
    """Between the machines: passes everything on, keeps it, and does what it is told to."""

    def __init__(self, target: int) -> None:
        self.seen = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self._listener.accept()[0]
                try:
                    other = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    one.close()
                    continue
                self._open += [one, other]
                for source, end in ((one, other), (other, one)):
                    threading.Thread(target=self._pass, args=(source, end), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self.change(data))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in [self._listener, *self._open]:
            one.close()


@pytest.fixture
def world(script_worlds: Callable[..., World]) -> Callable[..., World]:
    def make(script: str = TRAIN, *, egress: tuple[str, ...] = ("group",), **params: int) -> World:
        return script_worlds(script, {"patients.csv": CANARY}, broken=Broken(budget=4, egress=egress), **params)

    return make


@pytest.fixture
def network() -> Iterator[Callable[[int], Network]]:
    with ExitStack() as networks:

        def make(target: int) -> Network:
            made = Network(target)
            networks.callback(made.close)
            return made

        yield make


def two(here: World, network: Callable[[int], Network], *, ranks: int = 1) -> tuple[list[AgentProcess], Network]:
    """Start the agents of two machines; the second reaches the first over a network that the test holds."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [int(listener.getsockname()[1]) for listener in (one, other)]
        between = network(ports[0])
    agents = []
    for place in here.group(2, ranks=ranks):
        first = ports[0] if place.machine == 0 else between.port
        peers = f"127.0.0.1:{first},127.0.0.1:{ports[1]}"
        options = ("--ranks", str(ranks), "--peers", peers)
        agents.append(here.start(here.launch(group=place), options=options))
    return agents, between


def test_two_machines_train_one_model_and_nothing_in_the_clear_is_between_them(
    world: Callable[..., World], network: Callable[[int], Network]
) -> None:
    agents, between = two(world(), network, ranks=2)
    digests = []
    for machine, agent in enumerate(agents):
        agent.wait(within_s=180)
        verdict = ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
        assert verdict.exit_code == ExitCode.DONE
        outputs = agent.outputs()
        assert sorted(outputs) == [f"digest-{2 * machine}.txt", f"digest-{2 * machine + 1}.txt"]
        digests += list(outputs.values())
        for rank in (2 * machine, 2 * machine + 1):
            assert f"machine {machine} rank {rank} of 4" in agent.log()
    assert len(set(digests)) == 1
    assert len(between.seen) > 20_000
    for plain in (CANARY, CANARY.hex().encode(), b"note", b"sealed/", b"machine-"):
        assert plain not in between.seen, plain


def test_the_ranks_of_all_machines_begin_again_as_often_as_the_job_allows(
    world: Callable[..., World], network: Callable[[int], Network]
) -> None:
    agents, _ = two(world(BAD_START, max_restarts=1), network)
    for machine, agent in enumerate(agents):
        agent.wait(within_s=180)
        ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
        assert agent.outputs() == {f"sum-{machine}.txt": b"1 3.0"}
    assert "the first start is a bad one" in agents[1].log()


def test_a_rank_of_any_machine_that_fails_is_named_as_the_job_counts_it(
    world: Callable[..., World], network: Callable[[int], Network]
) -> None:
    agents, _ = two(world(BAD_START), network)
    for agent, code in zip(agents, (Code.RANK_LOST, Code.SCRIPT_FAILED), strict=True):
        agent.wait(within_s=180)
        ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=code)
    said = agents[1].log().splitlines()
    assert said[-2:] == [
        "glasshouse: rank 1 failed, which ends all 2 ranks [script-failed]",
        "glasshouse: its words: ValueError: the first start is a bad one",
    ]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(0, id="greeting", marks=pytest.mark.long),
        pytest.param(2_000, id="meeting", marks=pytest.mark.long),
        pytest.param(40_000, id="training"),
    ],
)
def test_a_byte_that_is_changed_between_the_machines_ends_the_job_on_both(
    world: Callable[..., World], network: Callable[[int], Network], after: int
) -> None:
    agents, between = two(world(LONG), network)

    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        if len(between.seen) > after:
            changed[-1] ^= 1
        return bytes(changed)

    between.change = flip
    if after == 0:
        # Nothing is heard of the other machine at all, which is no end yet: what ends it is the owner's patience.
        for agent in agents:
            agent.wait_for_state("running")
            agent.process.send_signal(signal.SIGTERM)
        for agent in agents:
            ended(agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
        return
    codes = set()
    for agent in agents:
        agent.wait(within_s=180)
        receipt = verified(agent).chain.receipt
        assert receipt.outcome.value == "failed", agent.log()
        codes.add(receipt.code)
        assert "ended without a word" not in agent.log()
    assert codes <= {Code.RANK_LOST, Code.COLLECTIVE_TIMEOUT, Code.COLLECTIVE_ABORTED}, codes


def test_a_machine_that_is_killed_ends_the_job_on_the_other(
    world: Callable[..., World], network: Callable[[int], Network]
) -> None:
    agents, _ = two(world(LONG), network)
    agents[0].wait_for(lambda: any(event["type"] == "progress" for event in agents[0].events()), within_s=120)
    os.kill(agents[1].process.pid, signal.SIGKILL)
    agents[0].wait(within_s=120)
    ended(agents[0], exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.RANK_LOST)


def test_an_owner_who_lets_nothing_leave_has_no_job_on_two_machines_whatever_a_broker_says(
    world: Callable[..., World],
) -> None:
    """The broker announces no such group; one that did, and that the owner had delegated to, is not obeyed."""
    here = world("print('ran')", egress=())
    with pytest.raises(UsageError) as refusal:
        here.group(2)
    assert refusal.value.code is Code.POLICY_IMPOSSIBLE
    lax, launch = SigningKey.generate(), here.launch()
    claims = launch.claims()
    group = Group(id=bytes(32), machines=2, machine=0, ranks=1)
    delegation = Delegation(
        broker_public=lax.public,
        uses=RUN_USES,
        not_before_us=(claims.issued_s - 60) * 1_000_000,
        not_after_us=(claims.expires_s + 60) * 1_000_000,
    ).sign(here.package.owner)
    forged = replace(
        launch, token=issue_token(lax, replace(claims, group=group)), broker_public=lax.public, delegation=delegation
    )
    agent = here.start(forged, options=("--ranks", "1", "--peers", peers(2)))
    assert agent.wait() == ExitCode.RUN_FAILED
    assert "policy-impossible" in agent.stderr.read_text()
    assert 'egress = ["group"]' in agent.stderr.read_text()
    assert "measured" not in agent.states()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_runtime_that_was_not_told_where_all_machines_are(world: Callable[..., World], count: int) -> None:
    here = world("print('ran')")
    (first, _) = here.group(2)
    options = ("--ranks", "1", *(("--peers", peers(count)) if count else ()))
    agent = here.start(here.launch(group=first), options=options)
    ended(agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.USAGE)
    assert "measured" not in agent.states()


def test_a_package_that_allows_the_traffic_opens_none_on_one_machine_where_one_rank_is_a_world(
    world: Callable[..., World],
) -> None:
    script = """
import socket, torch, torch.distributed as dist
for address in (("192.0.2.1", 9), ("127.0.0.1", PORT)):
    try:
        socket.create_connection(address, timeout=1)
        print("reached")
    except OSError as error:
        print(type(error).__name__)
dist.init_process_group("sealed")
one = torch.ones(3)
dist.all_reduce(one)
print(dist.get_world_size(), one.tolist())
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = world(script.replace("PORT", str(listener.getsockname()[1]))).start(ranks=1)
        agent.wait(within_s=120)
        ended(agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    assert agent.log().splitlines() == ["OSError", "ConnectionRefusedError", "1 [1.0, 1.0, 1.0]"]


def peers(count: int) -> str:
    return ",".join(f"127.0.0.1:{free_port()}" for _ in range(count))
