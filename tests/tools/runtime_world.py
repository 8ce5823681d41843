"""A whole world for one agent: owner, package, broker process, launch, and the real agent as a process."""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.measurements.measured import Measured, References
from glasshouse.attestation.measurements.measurement import measure_runtime
from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.attestation.roots.collateral import Pack
from glasshouse.attestation.roots.hardware_policy import HardwarePolicy
from glasshouse.attestation.roots.levels import level_of
from glasshouse.broker.client.broker_process import BrokerProcess
from glasshouse.broker.http_api import LaunchRequest, LineRequest
from glasshouse.errors import Code, ExitCode
from glasshouse.handshake.delegation import RUN_USES, Delegation, Use
from glasshouse.handshake.launch import LaunchFile
from glasshouse.jobs.verify.verdict import Verdict, verify_bundle
from glasshouse.package.outputs import open_output
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.group import Group
from glasshouse.wire.policy import Assurance, Profile
from glasshouse.workloads.registry import canonical
from simulators.local_broker import LocalBroker
from simulators.world import with_log
from tools.runtime_package import OwnersPackage, seal
from tools.waiting import wait_for

HOUR_US = 3600 * 1_000_000
CANARY = b"Canary Jane Doe, born 1948, malignant, 17.99 mm"


@dataclass(kw_only=True)
class Broken:
    """What a world shall be, other than good."""

    budget: int = 1
    references: tuple[Measured, ...] = ()
    lease_s: int = 600
    max_duration_s: int = 3600
    profile: Profile = Profile.STANDARD
    egress: tuple[str, ...] = ()
    disk: bool = False
    max_legs: int = 1
    hardware: HardwarePolicy | None = None  # and the level that it completes
    collateral: Pack | None = None

    @property
    def assurance(self) -> Assurance:
        kinds = () if self.hardware is None else sorted(self.hardware.kinds)
        level = level_of(kinds)
        assert level is not None
        return level


@dataclass
class AgentProcess:
    """A running agent."""

    world: World
    process: subprocess.Popen[bytes]
    out: Path
    stderr: Path
    run_id: str

    def events(self) -> list[dict[str, Any]]:
        path = self.out / "events.log"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    def states(self) -> list[str]:
        return [event["state"] for event in self.events() if event["type"] in ("start", "transition")]

    def wait_for(self, what: Callable[[], object], *, within_s: float = 60.0) -> None:
        def told() -> str:
            return f"{self.states()} {self.stderr.read_text()}"

        def happened() -> bool:
            assert self.process.poll() is None or what(), f"the agent ended: {told()}"
            return bool(what())

        wait_for(happened, within_s=within_s, told=told)

    def wait_for_state(self, state: str) -> None:
        self.wait_for(lambda: state in self.states())

    def wait(self, *, within_s: float = 60.0) -> int:
        return self.process.wait(within_s)

    def children(self) -> dict[int, bytes]:
        """Return the agent's children and their command lines."""
        return self._children_of({self.process.pid})

    def _children_of(self, parents: Collection[int]) -> dict[int, bytes]:
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if parent in parents:
                found[int(path.name)] = command
        return found

    def worker_pid(self) -> int:
        beneath = self._children_of(self.children().keys())
        return next(pid for pid, command in beneath.items() if b"glasshouse.workloads.worker" in command)

    def receipt(self) -> bytes:
        return (self.out / "receipt.json").read_bytes()

    def log(self) -> str:
        """Return what the worker printed, opened with the owner's key."""
        return "".join(self.open(path)[1].decode() for path in sorted((self.out / "log").glob("*.sealed")))

    def outputs(self) -> dict[str, bytes]:
        return dict(self.open(path) for path in sorted((self.out / "outputs").glob("*.sealed")))

    def open(self, path: Path) -> tuple[str, bytes]:
        package, plain = self.world.package, io.BytesIO()
        with path.open("rb", buffering=0) as stream:
            found = open_output(stream, package.recipient, run_id=self.run_id, manifest_sha256=package.manifest.sha256)
            found.copy_to(plain)
        return found.name, plain.getvalue()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


@dataclass
class World:
    """An owner with one package, deployed at a broker of their own."""

    folder: Path
    broker: BrokerProcess | LocalBroker
    package: OwnersPackage
    broken: Broken
    own_broker: BrokerProcess | None = None
    deployment: str = ""
    reference: Measured | None = None
    agents: list[AgentProcess] = field(default_factory=list)

    def deploy(self) -> None:
        now_us = time.time_ns() // 1000
        self.reference = measure_runtime()
        self.delegation = Delegation(
            broker_public=self.broker.broker_public,
            uses=RUN_USES if self.broker.store_public is None else RUN_USES | {Use.STORE},
            not_before_us=now_us - HOUR_US,
            not_after_us=now_us + 24 * HOUR_US,
            store_public=self.broker.store_public,
        ).sign(self.package.owner)
        client = self.broker.client()
        client.put_delegation(self.delegation, self.package.owner.public)
        if self.broken.collateral is not None:
            client.put_collateral(self.broken.collateral, self.package.owner.public)
        self.policy = policy = DeploymentPolicy(
            assurance=self.broken.assurance,
            hardware=self.broken.hardware,
            profile=self.package.manifest.floor.profile,
            egress=self.broken.egress,
            references=References.of(*(self.broken.references or (self.reference or measure_runtime(),))),
            release_budget=self.broken.budget,
            not_after_us=now_us + HOUR_US,
            lease_s=self.broken.lease_s,
            max_duration_s=self.broken.max_duration_s,
            max_legs=self.broken.max_legs,
        )
        self.deployment = client.add_deployment(self.package.envelope, self.package.key, policy)

    def group(self, machines: int, *, ranks: int = 1) -> tuple[Group, ...]:
        """Announce a group of several machines; `launch` each of its places."""
        if self.reference != measure_runtime():
            self.deploy()
        return self.broker.client().add_group(self.deployment, machines=machines, ranks=ranks)

    def launch(
        self,
        *,
        broker_url: str | None = None,
        ranks: int | None = None,
        group: Group | None = None,
        line: LineRequest | None = None,
    ) -> LaunchFile:
        if self.reference != measure_runtime():
            self.deploy()  # somebody saved a source since: what starts now measures to something else
        key, run_id, container = SigningKey.generate(), secrets.token_hex(16), secrets.token_hex(8)
        client = self.broker.client()
        request = LaunchRequest(
            group=group if ranks is None else client.add_group(self.deployment, machines=1, ranks=ranks)[0],
            deployment=self.deployment,
            run_id=run_id,
            container_id=container,
            container_source=ContainerSource.MINTED,
            launch_public=key.public,
            lifetime_s=600,
            line=line,
        )
        token = client.add_launch(request)
        return LaunchFile(
            token=token,
            launch_seed=key.seed(),
            broker_public=self.broker.broker_public,
            broker_url=broker_url or self.broker.runtime_url,
            delegation=self.delegation,
            run_id=run_id,
            container_id=container,
            container_source=ContainerSource.MINTED,
            profile=self.broken.profile,
            hardware=() if self.policy.hardware is None else self.policy.hardware.wanted(self.policy.assurance),
        )

    def start(
        self,
        launch: LaunchFile | None = None,
        *,
        package: Path | None = None,
        options: Sequence[str] = (),
        program: Sequence[str] = ("-m", "glasshouse.runtime"),
        out: Path | None = None,
        inherited: Sequence[int] = (),
        ranks: int | None = None,
    ) -> AgentProcess:
        launch = launch or self.launch(ranks=ranks)
        options = [*options, *([] if ranks is None else ["--ranks", str(ranks)])]
        number = len(self.agents)
        out, empty = out or self.folder / f"out-{number}", self.folder / f"empty-{number}"
        empty.mkdir()
        stderr = self.folder / f"stderr-{number}"
        with stderr.open("wb") as errors:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-B", "-X", f"pycache_prefix={empty}", *program),
                    *("--package", str(package or self.package.path), "--out", str(out), *options),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=inherited,
            )
        agent = AgentProcess(world=self, process=process, out=out, stderr=stderr, run_id=launch.run_id)
        self.agents.append(agent)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # an agent that ended at once says why itself
            pipe.write(launch.encode())
        return agent

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
        if self.own_broker is not None:
            self.own_broker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def script_world(
    folder: Path,
    script: str,
    files: Mapping[str, bytes] | None = None,
    *,
    broken: Broken | None = None,
    broker: BrokerProcess | LocalBroker | None = None,
    **params: Any,
) -> World:
    """Return a world whose job is one script without a framework.

    Args:
        folder: everything lies below it.
        script: the job.
        files: its inputs.
        broken: what is other than good.
        broker: one that others use too; else one of its own is started.
        params: of the workload.
    """
    inside = {"train.py": script.encode(), **(files or {})}
    return workload_world(folder, "script", {"script": "train.py", **params}, inside, broken=broken, broker=broker)


def workload_world(
    folder: Path,
    workload: str,
    params: Mapping[str, Any],
    files: Mapping[str, bytes],
    *,
    broken: Broken | None = None,
    broker: BrokerProcess | LocalBroker | None = None,
) -> World:
    """Return a world whose job is one of the workloads, with its `[params]` and inputs; the rest as `script_world`."""
    broken = broken or Broken()
    job = canonical(workload, params)
    package = seal(
        folder / "job.sealed",
        files,
        job=job,
        workload=workload,
        profile=broken.profile,
        egress=broken.egress,
        disk=broken.disk,
    )
    home = folder / "broker"
    home.mkdir(mode=0o700)
    own = None if broker else BrokerProcess(home)
    world = World(folder=folder, broker=broker or own, own_broker=own, package=package, broken=broken)
    try:
        world.deploy()
    except BaseException:
        world.close()
        raise
    return world


def verified(agent: AgentProcess) -> Verdict:
    """Verify bundle and log as the owner does, with nothing but their public key."""
    verdict = verify_bundle(agent.receipt(), owner=agent.world.package.owner.public)
    lines = (agent.out / "events.log").read_bytes().splitlines(keepends=True)
    heads = (agent.out / "heads.log").read_bytes().splitlines(keepends=True)
    return with_log(verdict, lines, heads)


def ended(agent: AgentProcess, *, exit_code: ExitCode, outcome: str, code: Code | None) -> Verdict:
    """Check how a run ended, and that it left nothing; the receipt must say the same."""
    assert agent.wait() == exit_code, (agent.stderr.read_text(), agent.states())
    verdict = verified(agent)
    receipt = verdict.chain.receipt
    assert (receipt.outcome.value, receipt.code) == (outcome, code)
    assert agent.states()[-2:] == ["zeroizing", "zeroized"]
    assert {probe.probe: probe.result.value for probe in receipt.zeroization}["agent-memory"] == "clean"
    nothing_in_the_clear(agent)
    return verdict


def nothing_in_the_clear(agent: AgentProcess) -> None:
    files = [path for path in agent.out.rglob("*") if path.is_file()]
    assert files
    for path in [*files, agent.stderr]:
        assert CANARY not in path.read_bytes(), path
        assert path == agent.stderr or path.stat().st_mode & 0o777 == 0o600, path
    assert not [path for path in files if path.suffix == ".partial" or path.name == ".reserve"]
