"""Places: one behaviour, whether the machine is this one or another."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.errors import Code, ExitCode, PeerError, UsageError
from glasshouse.jobs.verify.verdict import verify_bundle
from glasshouse.providers.place.place_channel import PlaceChannel
from glasshouse.providers.place.placed import RemotePlaced, digest_of
from glasshouse.providers.place.ways import SlurmNode, Way, batch_script, login_of
from glasshouse.providers.protocol.order import Order
from glasshouse.providers.serve.keepers import KEEPER, boot
from glasshouse.providers.serve.node import NODE
from glasshouse.providers.serve.runs import Runs
from glasshouse.providers.serve.uploads import Uploads
from glasshouse.runtime.gate.broker_client import parse_url
from simulators.slurm_cluster import Cluster, needs_slurm, running_slurm
from simulators.world import with_log
from tools.machine import needs_root
from tools.runtime_world import AgentProcess, World, script_world
from tools.sshd import needs_sshd, serving_ssh
from tools.waiting import wait_for

TRAIN = """
import time
from glasshouse import task
handle = task.current()
for step in range(1, STEPS + 1):
    time.sleep(0.05)
    handle.progress(step, STEPS)
handle.save_bytes("result.dat", bytes(range(256)) * KIB * 4)
"""


class Here:
    """A place on this machine, its world, and what its owner keeps."""

    def __init__(self, folder: Path, world: World, host: Way | None) -> None:
        self.place = Path(host.place) if isinstance(host, SlurmNode) else folder / "place"
        self.kept, self.world, self.host = folder / "kept", world, host
        self.channels: list[PlaceChannel] = []
        self.run_ids: dict[str, str] = {}

    def connect(self) -> socket.socket:
        address = parse_url(self.world.broker.runtime_url)
        if not address.unix_path:
            return socket.create_connection((address.host, address.port))
        gate = socket.socket(socket.AF_UNIX)
        gate.connect(address.unix_path)
        return gate

    def channel(self) -> PlaceChannel:
        command = [sys.executable, "-I", "-B", "-m", "glasshouse.providers.serve", str(self.place)]
        if self.host is not None:
            command = self.host.command(command, connect_s=5)
        return self.to(command)

    def to(self, command: list[str]) -> PlaceChannel:
        self.channels.append(PlaceChannel(command, connect=self.connect))
        return self.channels[-1]

    def placed(self, run: str) -> RemotePlaced:
        return RemotePlaced(self.channel, run, lambda name: self.kept / run / name)

    def break_line(self) -> None:
        """As when a link or a login is gone: the place's process ends, and its owner's does not."""
        self.channels[-1]._process.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(
    params=[
        "local",
        pytest.param("ssh", marks=needs_sshd),
        pytest.param("slurm", marks=[needs_root, needs_slurm, pytest.mark.long]),
    ]
)
def host(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way | None]:
    """The ways to a place: what it does is the same by all."""
    if request.param == "local":
        yield None
        return
    if request.param == "slurm":
        cluster: Cluster = request.getfixturevalue("cluster")
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        script = batch_script(python=sys.executable, folder=str(tmp_path))
        # A line is broken there by kill -9, of which its step does not hear: what it carried is missed after a timeout.
        job = int(cluster.ask("sbatch", "--parsable", f"--nodelist={cluster.nodes[0]}", text=script))
        node = SlurmNode(login=login_of(""), job=job, node=cluster.nodes[0], folder=str(tmp_path))
        wait_for((Path(node.place) / NODE).exists)
        yield node
        cluster.ask("scancel", str(job))
        return
    with serving_ssh(tmp_path / "ssh") as found:
        yield found


@pytest.fixture
def here(tmp_path: Path, broker: BrokerProcess, host: Way | None) -> Iterator[Callable[..., Here]]:
    scenes: list[Here] = []

    def make(script: str) -> Here:
        scenes.append(Here(tmp_path, script_world(tmp_path, script, broker=broker), host))
        return scenes[-1]

    yield make
    for scene in scenes:
        for channel in scene.channels:
            channel.close()
        for _, run in Runs(scene.place / "runs"):
            run.stop(signal.SIGKILL)
        scene.world.close()


def begun(here: Here) -> tuple[RemotePlaced, str, int]:
    run = os.urandom(16).hex()
    placed = here.placed(run)
    launch = here.world.launch(broker_url=placed.connect())
    here.run_ids[run] = launch.run_id
    package = here.world.package.path
    digest = placed.upload(package, lambda _sent, _size: None)
    pid = placed.start(Order(package=digest, max_seconds=600, ranks=None, peers=()), launch.encode())
    return placed, run, pid


def waited(placed: RemotePlaced, limit_s: float = 60.0) -> int | None:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        ended = placed.wait(0.5)
        if ended is not None:
            return ended
    return None


def agent(here: Here, run: str) -> AgentProcess:
    """What the owner has of a run, to be read as tests read a runtime's."""
    kept = here.kept / run
    return AgentProcess(world=here.world, process=None, out=kept, stderr=kept, run_id=here.run_ids[run])  # type: ignore[arg-type]


def came_whole(here: Here, run: str, kib: int) -> None:
    """What is here is what the runtime made: the owner verifies and opens it."""
    folder = here.kept / run
    verdict = verify_bundle((folder / "receipt.json").read_bytes(), owner=here.world.package.owner.public)
    with_log(
        verdict,
        (folder / "events.log").read_bytes().splitlines(keepends=True),
        (folder / "heads.log").read_bytes().splitlines(keepends=True),
    )
    assert verdict.exit_code == ExitCode.DONE
    assert agent(here, run).outputs() == {"result.dat": bytes(range(256)) * kib * 4}


def test_a_run_at_a_place_comes_back_whole_and_leaves_nothing_there(here: Callable[..., Here]) -> None:
    scene = here(TRAIN.replace("STEPS", "20").replace("KIB", "3000"))
    placed, run, _ = begun(scene)
    assert waited(placed) == 0, agent(scene, run).log()
    came_whole(scene, run, 3000)
    placed.remove()
    assert list((scene.place / "runs").iterdir()) == []
    assert list((scene.place / "files").iterdir()) == []


def connected(placed: RemotePlaced) -> bool:
    return placed._channel is not None and placed._preparing is None


def test_a_line_that_breaks_again_and_again_loses_nothing_and_doubles_nothing(here: Callable[..., Here]) -> None:
    """While it trains, and while what it left is on its way: a run that is here whole needs no line any more."""
    scene = here(TRAIN.replace("STEPS", "120").replace("KIB", "20000"))
    placed, run, _ = begun(scene)
    for number in range(4):
        placed.wait(0.1 + 0.05 * number)
        scene.break_line()
        while len(scene.channels) < number + 2 or not connected(placed):
            assert placed.wait(0.1) is None, agent(scene, run).log()
    here_before, ended = 0, None
    while ended is None:
        ended = placed.wait(0.01)
        came = sum(path.stat().st_size for path in (scene.kept / run).glob("outputs/*"))
        if connected(placed) and came > here_before and len(scene.channels) < 9:
            here_before = came
            scene.break_line()
    assert ended == 0, agent(scene, run).log()
    assert len(scene.channels) >= 6
    came_whole(scene, run, 20000)


def test_an_owner_that_is_killed_finds_its_run_again(here: Callable[..., Here]) -> None:
    scene = here(TRAIN.replace("STEPS", "40").replace("KIB", "100"))
    placed, run, _ = begun(scene)
    placed.wait(0.5)
    placed.close()
    again = scene.placed(run)
    assert waited(again) == 0
    came_whole(scene, run, 100)
    assert again.wait(0) == 0
    again.close()


def test_a_run_is_stopped_from_where_its_owner_is(here: Callable[..., Here]) -> None:
    scene = here(TRAIN.replace("STEPS", "10000").replace("KIB", "1"))
    placed, run, _ = begun(scene)
    while "running" not in agent(scene, run).states():
        placed.wait(0.1)
    with pytest.raises(UsageError, match="has not ended"):
        placed.remove()
    placed.interrupt()
    scene.break_line()
    assert waited(placed) == ExitCode.INTERRUPTED
    assert agent(scene, run).states()[-1] == "zeroized"


def test_a_run_that_is_killed_with_its_keeper_has_ended_for_whoever_asks(here: Callable[..., Here]) -> None:
    scene = here(TRAIN.replace("STEPS", "10000").replace("KIB", "1"))
    placed, run, pid = begun(scene)
    keeper = json.loads((scene.place / "runs" / run / KEEPER).read_text())
    os.kill(keeper["pid"], signal.SIGKILL)
    assert placed.wait(0.5) is None
    os.kill(pid, signal.SIGKILL)
    assert waited(placed) == -signal.SIGKILL


def test_a_start_whose_answer_is_lost_starts_nothing_twice(here: Callable[..., Here]) -> None:
    scene = here(TRAIN.replace("STEPS", "10").replace("KIB", "1"))
    placed, _run, pid = begun(scene)
    order = Order(package=digest_of(scene.world.package.path), max_seconds=600, ranks=None, peers=())
    scene.break_line()
    assert placed.start(order, b"a launch file of any kind") == pid
    with pytest.raises(UsageError) as raised:
        placed.start(replace(order, max_seconds=5), b"x")
    assert raised.value.code is Code.RUN_EXISTS


def test_an_upload_goes_on_where_it_broke_and_a_damaged_one_is_sent_again(
    here: Callable[..., Here], tmp_path: Path
) -> None:
    scene, big, run = here(""), tmp_path / "big", os.urandom(16).hex()
    big.write_bytes(os.urandom(48 << 20))
    placed, seen = scene.placed(run), []

    def broken(sent: int, _size: int) -> None:
        seen.append((len(scene.channels), sent))
        if sent > 16 << 20 and len(scene.channels) == 1:
            scene.break_line()

    digest = placed.upload(big, broken)
    whole = Uploads(scene.place / "files", boot=boot()).path(digest)
    part = whole.with_name(f"{digest}.part")
    assert digest_of(whole) == digest
    goes_on = next(sent for channels, sent in seen if channels > 1)
    assert 8 << 20 < goes_on < big.stat().st_size

    def damage() -> None:
        whole.rename(part)
        with part.open("r+b") as file:
            file.write(b"changed on that disk")
            file.truncate(goes_on)

    damage()
    with pytest.raises(UsageError) as damaged:
        scene.channel().put(big, digest, lambda *_: None)
    assert damaged.value.code is Code.UPLOAD_DAMAGED
    assert not part.exists()
    scene.channel().put(big, digest, lambda *_: None)
    damage()
    assert placed.upload(big, broken) == digest
    assert digest_of(whole) == digest
    whole.rename(whole.with_name(f"{digest}.an earlier start of the machine"))
    seen.clear()
    assert placed.upload(big, broken) == digest
    assert whole.exists()
    assert [sent for _, sent in seen] == [big.stat().st_size], "it was hashed there, and not sent again"
    placed.remove(digest)
    assert list((scene.place / "files").iterdir()) == []
    placed.close()


BANNER = (
    "import os, sys; print('Welcome to this machine!'); print(); sys.stdout.flush(); os.execv(sys.executable, ARGV)"
)


def test_what_a_login_prints_before_is_skipped_and_what_is_no_place_is_told(here: Callable[..., Here]) -> None:
    scene = here("")
    argv = [sys.executable, "-I", "-B", "-m", "glasshouse.providers.serve", str(scene.place)]
    greeting = [sys.executable, "-c", BANNER.replace("ARGV", f"{argv!r} + sys.argv[1:]")]
    channel = PlaceChannel(greeting, connect=scene.connect)
    assert channel.ask("hello").system == "Linux"
    channel.close()
    for command, told in (
        (
            [sys.executable, "-c", "print('This account is currently not available.')"],
            "first line from there was: This acc",
        ),
        (
            [sys.executable, "-c", "import sys; sys.exit('Permission denied (publickey).')"],
            "it printed: Permission denied",
        ),
        (["/nowhere/ssh"], "cannot be started: No such file"),
    ):
        with pytest.raises(PeerError, match=re.escape(told)) as raised:
            scene.to(command).ask("hello")
        assert raised.value.code is Code.PLACE_UNREACHABLE
    with pytest.raises(PeerError) as outdated:
        scene.to([sys.executable, "-c", "import sys; print('glasshouse-place 7', sys.argv[1])"]).ask("hello")
    assert outdated.value.code is Code.PLACE_OUTDATED
