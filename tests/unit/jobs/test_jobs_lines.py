"""A run with checkpoints gets a line: what its gate is asked, what is kept for later legs, what is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glasshouse.broker.http_api import LineRequest
from glasshouse.errors import Code, PeerError, UsageError
from glasshouse.handshake.delegation import RUN_USES, Use
from glasshouse.jobs.define.jobfile import Job, Ranks, parse
from glasshouse.jobs.define.run_terms import RunTerms
from glasshouse.jobs.define.seal_job import seal
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.supervise.launching import LaterLeg, Prepared
from glasshouse.jobs.supervise.prepare import prepare
from glasshouse.jobs.supervise.run_job import run_job
from glasshouse.jobs.supervise.run_request import Listener, RunRequest
from glasshouse.package.limits import CheckpointLimits
from glasshouse.wire.crypto import SigningKey
from simulators.line_gate import LINE, LineGate

STORE = SigningKey.generate().public
JOB = """
workload = "script"
[inputs]
"train.py" = "train.py"
[params]
script = "train.py"
[policy]
assurance = "software"
profile = "standard"
egress = ["group"]
[checkpoints]
every = "30s"
bytes = 65536
retries = 2
[machine]
on = "runpod"
most_per_hour = 0.9
most_usd = 3
image = "an/image:1"
regions = ["EU", "US"]
bundle = "bundle.zip"
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(path=tmp_path / "home").make()


@pytest.fixture
def owner(home: Home) -> Identity:
    identity = Identity.generate()
    identity.save(private=home.owner_private, public=home.owner_public, passphrase=None)
    return identity


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "train.py").write_text("open('outputs/a', 'w')")
    (tmp_path / "job.toml").write_text(JOB)
    return parse(JOB.encode(), folder=tmp_path, default_name="clinic")


@pytest.fixture
def gate(owner: Identity) -> LineGate:
    return LineGate(owner.signing.public, store=STORE)


@pytest.fixture
def package(home: Home, owner: Identity, job: Job, tmp_path: Path) -> Path:
    return seal(job, out=tmp_path / "job.sealed", home=home, identity=owner).path


def begin(home: Home, owner: Identity, package: Path, gate: Any, **more: Any) -> Prepared:
    folder = RunFolder.create(home)
    return prepare(package, home=home, identity=owner, folder=folder, broker=gate, **more)


def test_limits_are_sealed_and_how_many_machines_are_replaced_is_not(job: Job) -> None:
    assert CheckpointLimits.of(job.params) == CheckpointLimits(every_s=30, most=1000, bytes=65536)
    assert "retries" not in json.dumps(dict(job.params))
    assert job.deployment.retries == 2
    without = parse(
        JOB.replace("[checkpoints]", "[package]").partition("every")[0].encode(), folder=job.folder, default_name="c"
    )
    assert (CheckpointLimits.of(without.params), without.deployment.retries) == (None, 0)


def test_a_first_leg_makes_the_line_and_its_run_keeps_what_later_ones_need(
    home: Home, owner: Identity, package: Path, gate: LineGate, job: Job
) -> None:
    prepared = begin(home, owner, package, gate, machine=job.machine, accept=True)
    assert gate.asked == [LineRequest()]
    assert gate.policies[0].max_legs == 3
    assert (gate.delegations[0].uses, gate.delegations[0].store_public) == (RUN_USES | {Use.STORE}, STORE)
    record = prepared.folder.load()
    assert (record.line, record.leg, record.before) == (LINE.hex(), 1, None)
    terms = RunTerms.load(prepared.folder)
    assert terms == RunTerms(policy=gate.policies[0], machine=job.machine, accept=True)
    assert prepared.folder.terms.stat().st_mode & 0o077 == 0


def test_a_later_leg_is_of_the_same_deployment_and_nothing_is_deployed_for_it(
    home: Home, owner: Identity, package: Path, gate: LineGate, job: Job
) -> None:
    first = begin(home, owner, package, gate, machine=job.machine)
    line = LineRequest(id=LINE, leg=2, seq=7, checkpoint=bytes(32))
    later = LaterLeg(before=first.record, terms=RunTerms.load(first.folder), line=line)
    second = begin(home, owner, first.record.package, gate, later=later, machine=job.machine)
    assert len(gate.policies) == 1
    assert gate.asked[1] == line
    assert gate.launches[1].deployment == gate.launches[0].deployment
    assert (second.record.line, second.record.leg, second.record.before) == (LINE.hex(), 2, first.record.run_id)
    assert RunTerms.load(second.folder) == RunTerms.load(first.folder), "each leg can be gone on from"


def test_the_machines_of_a_group_are_one_leg_of_one_line(
    home: Home, owner: Identity, package: Path, gate: LineGate
) -> None:
    prepared = begin(home, owner, package, gate, ranks=Ranks(each=2, machines=2))
    assert gate.asked == [LineRequest(), LineRequest(id=LINE)]
    assert [one.load().line for one in prepared.folder.machines()] == [LINE.hex()] * 2


def test_a_job_without_checkpoints_asks_for_no_line_of_any_gate(
    home: Home, owner: Identity, job: Job, tmp_path: Path
) -> None:
    plain = replace(job, params={name: value for name, value in job.params.items() if name != "checkpoints"})
    package = seal(plain, out=tmp_path / "plain.sealed", home=home, identity=owner).path
    gate = LineGate(owner.signing.public, store=None)
    prepared = begin(home, owner, package, gate)
    assert gate.asked == [None]
    assert (gate.delegations[0].uses, gate.policies[0].max_legs) == (RUN_USES, 1)
    assert (prepared.record.line, prepared.record.leg) == (None, None)
    with pytest.raises(UsageError, match="has no checkpoints"):
        RunTerms.load(prepared.folder)


def test_a_gate_that_keeps_no_checkpoints_launches_nothing(home: Home, owner: Identity, package: Path) -> None:
    gate = LineGate(owner.signing.public, store=None)
    with pytest.raises(UsageError, match=r"keeps no checkpoints.*\[checkpoints\]") as caught:
        begin(home, owner, package, gate)
    assert "broker serve --store" in caught.value.hint
    assert (gate.launches, gate.policies, gate.delegations) == ([], [], [])


@pytest.mark.parametrize(
    "told",
    [{"leg": 2}, {"seq": 1, "checkpoint": bytes(32), "leg": 2}, {"rewind": True, "counted": 1, "leg": 2}],
    ids=range(3),
)
def test_a_token_of_another_leg_than_was_asked_for_starts_nothing(
    home: Home, owner: Identity, package: Path, gate: LineGate, told: dict[str, Any]
) -> None:
    gate.told = told
    with pytest.raises(PeerError, match="leg of a line") as caught:
        begin(home, owner, package, gate)
    assert caught.value.code is Code.BROKER_PROTOCOL
    gate.told = {}
    line = LineRequest(id=bytes(32), leg=2)
    first = begin(home, owner, package, gate)
    later = LaterLeg(before=first.record, terms=RunTerms.load(first.folder), line=line)
    gate.told = {"id": LINE}
    with pytest.raises(PeerError, match="leg of a line"):
        begin(home, owner, package, gate, later=later)


def test_more_ranks_than_a_checkpoint_has_parts_are_refused(
    home: Home, owner: Identity, package: Path, gate: LineGate
) -> None:
    with pytest.raises(UsageError, match="at most 1024 ranks, not 1088"):
        begin(home, owner, package, gate, ranks=Ranks(each=64, machines=17))


def test_nothing_is_sealed_or_rented_for_a_gate_that_keeps_no_checkpoints(
    home: Home, owner: Identity, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuses(_home: Home, gate: str) -> None:
        raise UsageError(Code.USAGE, f"the gate {gate} keeps no checkpoints")

    monkeypatch.setattr("glasshouse.jobs.supervise.prepare.check_keeps", refuses)
    request = RunRequest(what=tmp_path / "job.toml", job=job, on=("runpod",), gate="lab")
    with pytest.raises(UsageError, match="the gate lab keeps no checkpoints"):
        run_job(request, home=home, identity=owner, listener=Listener())
    assert list(RunFolder.all(home)) == []


def test_records_of_earlier_versions_are_of_no_line(home: Home, owner: Identity, package: Path, gate: LineGate) -> None:
    folder = begin(home, owner, package, gate).folder
    path = folder.path / "run.json"
    value = json.loads(path.read_text())
    for name in ("line", "leg", "before"):
        del value[name]
    path.write_text(json.dumps(value))
    assert (folder.load().line, folder.load().leg, folder.load().before) == (None, None, None)
