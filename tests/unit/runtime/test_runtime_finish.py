"""The end of a run: always in its order, whatever broke before or breaks on the way."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from glasshouse.attestation.claims import ContainerSource, WorkspaceKind
from glasshouse.custodian.residue_patterns import PatternKind, ResiduePatterns
from glasshouse.errors import Code, RunError
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.log import EventLog
from glasshouse.evidence.receipt import Probe
from glasshouse.handshake.delegation import RUN_USES, Delegation
from glasshouse.handshake.launch import LaunchFile, TokenClaims, issue_token
from glasshouse.jobs.verify.verdict import verify_bundle
from glasshouse.package.read import Package
from glasshouse.runtime.keys.custodian import Regions
from glasshouse.runtime.keys.outdir import OutDir
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.run import zeroize as finishing
from glasshouse.runtime.run.run_state import Ending, Run, RunIdentity, StepTimes
from glasshouse.runtime.run.start_processes import AgentOptions, Processes
from glasshouse.runtime.run.zeroize import end_run
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.policy import Profile
from glasshouse.wire.states import Outcome
from tools.runtime_package import OwnersPackage, seal

REFUSED = Ending(outcome=Outcome.REFUSED, code=Code.PACKAGE_REVOKED)
COMPLETED = Ending(outcome=Outcome.COMPLETED)


def launch_for(package: OwnersPackage) -> LaunchFile:
    broker, launch, now_s = SigningKey.generate(), SigningKey.generate(), int(time.time())
    run_id, container = secrets.token_hex(16), secrets.token_hex(8)
    token = TokenClaims(
        jti=secrets.token_hex(16),
        deployment=secrets.token_hex(16),
        run_id=run_id,
        package_id=package.manifest.package_id,
        manifest_sha256=package.manifest.sha256,
        floor_sha256=package.manifest.floor.sha256,
        policy_sha256=bytes(32),
        container_id=container,
        container_source=ContainerSource.MINTED,
        launch_public=launch.public,
        issued_s=now_s,
        expires_s=now_s + 600,
    )
    delegation = Delegation(
        broker_public=broker.public, uses=RUN_USES, not_before_us=0, not_after_us=(now_s + 600) * 1_000_000
    )
    return LaunchFile(
        token=issue_token(broker, token),
        launch_seed=launch.seed(),
        broker_public=broker.public,
        broker_url="http://127.0.0.1:9",
        delegation=delegation.sign(package.owner),
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED,
        profile=Profile.STANDARD,
    )


class Scene:
    """A run that got as far as its secret memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "out"
        self.sealed = seal(folder / "job.sealed", {"data": secrets.token_bytes(4000)})
        self.stream = self.sealed.path.open("rb", buffering=0)
        self.regions = Regions.for_package(self.sealed.manifest)
        processes = Processes(package_file=self.stream, package=Package.open(self.stream), regions=self.regions)
        self.run = Run(
            options=AgentOptions(package="", out=str(self.folder)),
            loop=Loop(),
            out=OutDir(str(self.folder)),
            times=StepTimes(StepTimes.now_us()),
            started_us=time.time_ns() // 1000,
            processes=processes,
        )
        launch, key = launch_for(self.sealed), SigningKey.generate()
        log = EventLog(
            run_id=launch.run_id,
            evidence_key=key,
            clock_us=lambda: time.time_ns() // 1000,
            sink=partial(self.run.write, self.run.out.event),
        )
        self.run.identity = RunIdentity(launch=launch, token=launch.claims(), evidence_key=key, log=log)

    def close(self) -> None:
        self.regions.close()
        self.stream.close()

    def plant(self, needle: bytes) -> None:
        needles = ResiduePatterns(self.regions.patterns.view)
        needles.add(PatternKind.PACKAGE_KEY, needle)
        self.regions.grant.view[:32] = needle

    def outcome(self) -> tuple[Outcome, Code | None]:
        """Return what the owner reads in the receipt."""
        receipt = verify_bundle((self.folder / "receipt.json").read_bytes(), owner=self.sealed.owner.public)
        return receipt.chain.receipt.outcome, receipt.chain.receipt.code


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def test_a_refused_run_is_wiped_and_has_a_receipt(scene: Scene) -> None:
    assert end_run(scene.run, REFUSED) == REFUSED
    assert scene.outcome() == (Outcome.REFUSED, Code.PACKAGE_REVOKED)
    assert scene.run.identity is None


def test_keys_are_zero_before_anything_is_said_about_them(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.plant(secrets.token_bytes(32))
    seen: list[bool] = []

    def probe(run: Run) -> list[Probe]:
        assert run.processes.regions is not None
        seen.append(run.processes.regions.grant.is_zero())
        seen.append(len(ResiduePatterns(run.processes.regions.patterns.view)) == 1)
        return [Probe(probe="agent-memory", result=ProbeResult.CLEAN)]

    def books(run: Run, _ending: Ending, _answers: list[Probe]) -> None:
        assert run.processes.regions is not None
        seen.append(run.processes.regions.patterns.is_zero())

    monkeypatch.setattr(finishing, "_probe", probe)
    monkeypatch.setattr(finishing, "write_receipt", books)
    end_run(scene.run, REFUSED)
    assert seen == [True, True, True]


def test_a_key_that_stayed_in_memory_makes_the_run_a_residue(scene: Scene) -> None:
    leak = bytearray(secrets.token_bytes(32))
    scene.plant(leak)
    assert end_run(scene.run, COMPLETED) == Ending(outcome=Outcome.RESIDUE, code=Code.RESIDUE_FOUND)
    assert scene.outcome() == (Outcome.RESIDUE, Code.RESIDUE_FOUND)
    assert any(leak)


@pytest.mark.parametrize("broken", ["_announce", "_end_worker", "_wipe_keys", "_probe", "_wipe_patterns"])
def test_a_step_that_breaks_stops_no_other_and_is_not_a_success(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    scene.plant(secrets.token_bytes(32))
    done: list[str] = []
    for name in ("_announce", "_end_worker", "_wipe_keys", "_probe", "_wipe_patterns", "write_receipt", "_forget"):
        monkeypatch.setattr(finishing, name, _noted(name, done, getattr(finishing, name), broken=name == broken))
    ending = end_run(scene.run, COMPLETED)
    assert done == ["_announce", "_end_worker", "_wipe_keys", "_probe", "_wipe_patterns", "write_receipt", "_forget"]
    assert ending.outcome is not Outcome.COMPLETED


def _noted(name: str, done: list[str], step: object, *, broken: bool) -> object:
    def act(*arguments: object) -> object:
        done.append(name)
        if broken:
            raise ValueError("a defect")
        return step(*arguments)  # type: ignore[operator]

    return act


def test_a_full_disk_keeps_nothing_from_being_wiped(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_line: bytes) -> None:
        raise RunError(Code.DISK_FULL, "full")

    scene.regions.grant.view[:32] = bytes(range(32))
    monkeypatch.setattr(scene.run.out, "event", full)
    monkeypatch.setattr(scene.run.out, "receipt", full)
    monkeypatch.setattr(finishing, "_forget", lambda _run: None)
    assert end_run(scene.run, REFUSED) == REFUSED
    assert scene.regions.grant.is_zero()
    assert not (scene.folder / "receipt.json").exists()


def test_a_run_that_never_began_ends_without_a_word(scene: Scene) -> None:
    scene.run.identity = None
    scene.run.processes.regions = None
    ending = Ending(outcome=Outcome.FAILED, code=Code.USAGE)
    assert end_run(scene.run, ending) == ending
    assert not (scene.folder / "receipt.json").exists()


@pytest.mark.parametrize(
    ("workspace", "left_out"),
    [(WorkspaceKind.TMPFS_NOSWAP, True), (WorkspaceKind.TMPFS, True), (WorkspaceKind.DIRECTORY, False), (None, False)],
)
def test_unchanged_files_in_shared_memory_are_left_out_only_where_the_worker_could_not_map_them(
    scene: Scene, workspace: WorkspaceKind | None, left_out: bool
) -> None:
    before = {(1, 2): (3, 4)}
    scene.run.shared_before = before
    report = None if workspace is None else SimpleNamespace(workspace=workspace)
    scene.run.processes.worker = SimpleNamespace(report=report)  # type: ignore[assignment]
    assert finishing._shared_before(scene.run) == (before if left_out else {})
    scene.run.processes.worker = None
