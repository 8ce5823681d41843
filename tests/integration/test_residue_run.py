"""What a scanner finds that is run as root, from outside, while a real run trains and after it.

Keys may be where protocol.md allows them and nowhere else; plaintext is the worker's and leaves nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from benchmarks.trusted import TIERS, closure
from glasshouse.errors import Code, ExitCode
from glasshouse.package.layout import asset_key
from glasshouse.package.read import Package
from glasshouse.wire.canonical import b64decode
from tools.custodian_with_known_key import known_key
from tools.runtime_proxy import Proxy, Reply
from tools.runtime_world import AgentProcess, World, ended, script_world
from tools.scanner import Report, scan

CANARY = b"canary-" + secrets.token_hex(16).encode()
# Of the agent's modules: those of some runs alone, and the two before its first line, for which this test has others.
RARE = {"__main__", "loopback", "relay", "tree_removal"}
LINES = {"checkpoint_keeper", "checkpoint_reader", "leg_run", "leg_terms", "part_intake", "part_sealer", "statements"}
PROGRAM = str(Path(__file__).parents[1] / "tools" / "agent_with_known_key.py")

# Reads every input, holds the plaintext, saves "weights" in the middle of its work, prints the canary.
TRAIN = """
import pathlib, time
from glasshouse import task
data = pathlib.Path("patients.csv").read_bytes()
print(data[:39].decode(), flush=True)
weights = data[::-1]
task.current().save_bytes("model.txt", weights)
task.current().progress(1, 2)
for _ in range(SECONDS * 20):
    time.sleep(0.05)
task.current().progress(2, 2)
"""
PATIENTS = CANARY + os.urandom(2 << 20) + CANARY


@dataclass
class Secrets:
    """Every secret of one run, as a test that knows the HPKE key and saw the exchange can compute them."""

    keys: dict[str, bytes]
    assets: dict[str, bytes]
    plaintext: dict[str, bytes]


def secrets_of(world: World, sealed_key: bytes) -> Secrets:
    package, private = world.package, known_key().private()
    kem, curve = MLKEM768PrivateKey.from_seed_bytes(private[:64]), X25519PrivateKey.from_private_bytes(private[64:])
    first = kem.decapsulate(sealed_key[:1088])
    second = curve.exchange(X25519PublicKey.from_public_bytes(sealed_key[1088:1120]))
    ours = curve.public_key().public_bytes_raw()
    shared = hashlib.sha3_256(first + second + sealed_key[1088:1120] + ours + rb"\.//^\\").digest()
    with package.path.open("rb", buffering=0) as stream:
        opened = Package.open(stream)
        suite, header = opened.manifest.suite, opened.header_sha256
        assets = {
            f"key of {entry.path}": asset_key(package.key, entry.id, suite, header)
            for entry in opened.unlock(package.key).assets
        }
    return Secrets(
        keys={
            "package key": package.key,
            "ML-KEM seed": private[:64],
            "X25519 private key": private[64:],
            "ML-KEM shared secret": first,
            "X25519 shared secret": second,
            "HPKE shared secret": shared,
        },
        assets=assets,
        plaintext={
            "canary": CANARY,
            "middle of the data": PATIENTS[1_000_000:1_000_064],
            "weights": PATIENTS[::-1][500_000:500_064],
        },
    )


class Tap:
    """Lets everything pass and keeps the release."""

    def __init__(self) -> None:
        self.sealed_key = b""

    def __call__(self, path: str, _body: bytes, ask: Callable[[], Reply]) -> Reply:
        status, content = ask()
        if path == "/v1/evidence" and status == 200:
            self.sealed_key = b64decode(json.loads(content)["sealed_key"])
        return status, content


@dataclass
class Scene:
    """A run that is at work, and what is secret in it."""

    agent: AgentProcess
    secrets: Secrets

    def everything(self) -> dict[str, bytes]:
        return {**self.secrets.keys, **self.secrets.assets, **self.secrets.plaintext}

    def files(self) -> list[Path]:
        return [self.agent.world.folder / "out-0", self.agent.world.folder / "stderr-0"]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[[int], Scene]]:
    with ExitStack() as open_, ExitStack() as agents:

        def play(seconds: int) -> Scene:
            tap = Tap()
            script = TRAIN.replace("SECONDS", str(seconds))
            world = open_.enter_context(script_world(tmp_path, script, {"patients.csv": PATIENTS}, allow_pickle=True))
            proxy = Proxy(tmp_path / "proxy", world.broker.runtime_url, tap)
            open_.callback(proxy.close)
            agents.enter_context(world)  # so that nobody asks the proxy any more when that is closed
            agent = world.start(world.launch(broker_url=proxy.url), program=(PROGRAM,))
            agent.wait_for(lambda: any(event["type"] == "progress" for event in agent.events()))
            return Scene(agent=agent, secrets=secrets_of(world, tap.sealed_key))

        yield play


def places(report: Report, names: dict[str, bytes]) -> set[tuple[str, int]]:
    """Return which needle was found in which process; a file has the number 0."""
    found = set()
    for hit in report.hits:
        if hit.needle in names:
            words = hit.where.split()
            found.add((hit.needle, int(words[1]) if words[0] == "process" else 0))
    return found


def test_while_it_trains_keys_and_plaintext_are_where_they_may_be_and_nowhere_else(
    scene: Callable[[int], Scene],
) -> None:
    here = scene(30)
    agent, worker = here.agent.process.pid, here.agent.worker_pid()
    report = scan(here.everything(), pids=[agent], folders=here.files())
    assert report.searched_bytes > 20 << 20
    assert len(here.agent.children()) == 2  # worker and sentinel; the custodian is gone
    # Proof that the scanner looks where there is something to find.
    assert ("canary", worker) in places(report, here.secrets.plaintext)
    assert places(report, here.secrets.keys) == set()
    assert {pid for _, pid in places(report, here.secrets.assets)} <= {worker}
    assert {pid for _, pid in places(report, here.secrets.plaintext)} <= {worker}
    here.agent.process.terminate()
    ended(here.agent, exit_code=ExitCode.INTERRUPTED, outcome="interrupted", code=Code.INTERRUPTED)
    after = scan(here.everything(), folders=here.files())
    assert after.hits == set()


def test_after_a_completed_run_nothing_is_left_on_disk_or_in_shared_memory(scene: Callable[[int], Scene]) -> None:
    here = scene(1)
    ended(here.agent, exit_code=ExitCode.DONE, outcome="completed", code=None)
    report = scan(here.everything(), folders=[*here.files(), here.agent.world.package.path])
    assert report.searched_bytes > 4 << 20
    assert report.hits == set()
    assert here.agent.outputs() == {"model.txt": PATIENTS[::-1]}
    listed = here.agent.out.with_name(f"{here.agent.out.name}-modules")
    loaded = {name for name in listed.read_text().split() if name.partition(".")[0] == "glasshouse"}
    counted = closure(TIERS[1].roots)
    assert loaded <= counted
    # Of hardware evidence a run has what its launch names, and this one nothing.
    others = {name for name in counted - loaded if ".roots." not in name}
    assert {name.rpartition(".")[2] for name in others} <= RARE | LINES | {"checkpoints"}


def test_while_it_wipes_no_key_appears_anywhere(scene: Callable[[int], Scene]) -> None:
    here = scene(30)
    agent = here.agent.process.pid
    os.kill(here.agent.worker_pid(), 9)
    found: set[tuple[str, int]] = set()
    deadline = time.monotonic() + 10
    while here.agent.process.poll() is None and time.monotonic() < deadline:
        found |= places(scan(here.everything(), pids=[agent], shared_memory=False), here.everything())
    assert found <= {(name, pid) for name, pid in found if pid != agent}
    ended(here.agent, exit_code=ExitCode.RUN_FAILED, outcome="failed", code=Code.WORKER_KILLED)
