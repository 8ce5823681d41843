"""Prepares a run, before it trains: everything that needs the owner's private keys.

What comes after (`supervise`) needs none of them: a detached supervisor is a fresh process that never saw one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.policy import MAX_LEASE_S, MAX_RELEASES, DeploymentPolicy
from glasshouse.broker.http_api import LineRequest
from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.hardware_file import kinds_wanted
from glasshouse.jobs.define.jobfile import Ranks, check_reachable
from glasshouse.jobs.define.package_records import GivenTo, KeyStore, PackageRecord, public_part
from glasshouse.jobs.define.run_hardware import RunHardware
from glasshouse.jobs.define.run_terms import RunTerms
from glasshouse.jobs.define.wanted import Wanted
from glasshouse.jobs.gates.embedded import Embedded, Serving
from glasshouse.jobs.gates.known_gates import GateBroker, audit_gate, check_keeps, keeps_none, relay_of
from glasshouse.jobs.gates.line_notes import LineNotes
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.kept_pack import note_given
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.references.known_references import accepted as references_of
from glasshouse.jobs.references.known_references import check_places
from glasshouse.jobs.supervise.launching import LaterLeg, Prepared, delegate, mint, now_us
from glasshouse.jobs.supervise.machine_check import check_hardware, check_machine, pack_for
from glasshouse.package.limits import CheckpointLimits, OutputLimits
from glasshouse.package.manifest import Manifest
from glasshouse.package.read import Package
from glasshouse.providers.place.base import Place
from glasshouse.providers.place.local import LocalPlace
from glasshouse.providers.protocol.order import RelayOrder
from glasshouse.wire.canonical import Json
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group

_MARGIN_S = 2 * 3600


def prepare(
    package: Path,
    *,
    home: Home,
    identity: Identity,
    folder: RunFolder,
    broker: Embedded | GateBroker,
    places: Sequence[Place] = (),
    gate: str | None = None,
    ranks: Ranks | None = None,
    machine: Wanted | None = None,
    accept: bool = False,
    later: LaterLeg | None = None,
    sending: Callable[[int, int], None] = lambda _sent, _size: None,
) -> Prepared:
    """Delegate, deploy and mint a launch for a sealed package; of a group, one for each machine.

    A package with checkpoints gets a line, whose first leg this is unless it is a `later` one of it.

    Args:
        broker: started if need be; the caller gives it back. `gate` is the name of one that stays.
        places: one for each machine of a group, in their order, or one for all; none for this machine.
        ranks: in how many ranks, on how many machines, the job runs; None for one process without a group.
        machine: what may be rented for later legs, and whether one is accepted that prints no host key.
        later: the leg, where it is not the first: nothing is deployed anew for it.
        sending: called with how many bytes of the package are at a machine, and how many it has; may raise.

    Raises:
        UsageError: `policy-impossible`, `file-missing`, `identity`, `requirement-missing`, `job-invalid` for ranks
            of another workload, or `usage` for places that are not as many as the machines.
        PackageError, FormatError: a package that is not this owner's, or not whole.
        PeerError: the broker or the place cannot be reached.
        RefusedError: `measurement-unknown`: a machine measures to what is accepted of none.
    """
    places = _one_each(places or (LocalPlace(),), machines=1 if ranks is None else ranks.machines)
    kept = folder.keep(package)
    opened = _Opened.of(kept, home, identity)
    if ranks is not None:
        ranks.check(opened.manifest.workload, opened.manifest.floor)
    if opened.has_line:
        check_line(home, gate, ranks)
    hardware = opened.known.deployment.hardware if later is None else later.terms.policy.hardware
    pack = pack_for(home, hardware)
    each = {place.name: place for place in places}
    _check_each(each.values(), opened, kinds_wanted(opened.manifest.floor.assurance, hardware), home, kept)
    accepted = opened.known.deployment.reference
    references = references_of(home, accepted) if later is None else later.terms.policy.references
    record = replace(_record(folder, opened, kept, later), place=places[0].name, gate=gate)
    if places[0].name != LocalPlace.name:
        record = replace(record, max_output_bytes=OutputLimits.of(opened.job).bytes)
    folder.save(record)
    sent: dict[str, str] = {}
    called: str | None = None
    with check_places(home, places, references, accepted) as check:
        if places[0].name != LocalPlace.name:
            check()
            # Before anything that expires is made: this may take hours.
            for place in each.values():
                with contextlib.closing(place.run(folder.path, relayed=gate is not None)) as there:
                    found = there.connect()
                    sent[place.name] = there.upload(kept, sending)
                called = found if called is None else called
        serving = broker.ensure()
        if gate is not None:  # one that has forgotten what was registered is given no key
            audit_gate(home, gate, identity.signing, newer=True)
        check()
    policy = _policy(opened, references, machines=len(places)) if later is None else later.terms.policy
    delegation = _delegated(opened, policy, home=home, identity=identity, serving=serving, gate=gate)
    if pack is not None:
        note_given(home, pack)
        serving.client().put_collateral(pack, identity.signing.public)
    deployment = _deployed(opened, policy, home=home, serving=serving, gate=gate) if later is None else later.deployment
    record = replace(record, deployment=deployment, broker=serving.owner_socket, max_duration_s=policy.max_duration_s)
    line = _line(opened, later, folder, RunTerms(policy=policy, machine=machine, accept=accept))
    if line is not None:
        record = replace(record, leg=line.leg)
    groups: tuple[Group | None, ...] = (None,)
    if ranks is not None:
        groups = serving.client().add_group(deployment, machines=ranks.machines, ranks=ranks.each)
    placed: list[tuple[RunFolder, bytes]] = []
    for group, place in zip(groups, places, strict=True):
        its = folder if not placed else folder.add_machine()
        RunHardware(policy=policy, collateral=pack).save(its)
        relay = relay_of(home, gate, its.run_id)
        # Machine 0 is at the first place, which was asked for this run's gate; others' names differ.
        first = its is folder and called is not None
        url = (called if first else _called_at(place, its, relay)) or serving.runtime_url
        minted = mint(
            serving,
            opened.manifest,
            deployment,
            policy,
            its.run_id,
            delegation,
            group,
            line=line,
            broker_url=url,
            place=place.name,
        )
        if line is not None and minted.token.line is not None:  # of a new line: the other machines name it
            line = replace(line, id=minted.token.line.id)
            record = replace(record, line=minted.token.line.id.hex())
        placed.append((its, minted.launch))
        its.save(replace(record, run_id=its.run_id, group=group, place=place.name, sent=sent.get(place.name)))
    return Prepared(folder=folder, record=folder.load(), launch=placed[0][1], others=tuple(placed[1:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """A sealed package, opened by its owner."""

    manifest: Manifest
    envelope: bytes  # the signed manifest
    package_key: bytes
    known: PackageRecord
    job: Mapping[str, Json]  # its `[params]`
    names: Sequence[str]  # of its inputs

    @classmethod
    def of(cls, package: Path, home: Home, identity: Identity) -> _Opened:
        manifest, envelope = public_part(package, owner_signing=identity.signing.public)
        check_reachable(manifest.floor)
        known = PackageRecord.load(home, manifest.package_id, workload=manifest.workload)
        if known.revoked:
            raise UsageError(Code.PACKAGE_REVOKED, f"package {manifest.package_id} is revoked: seal the job again")
        store = KeyStore(home.keys)
        package_key = store.get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing)
        with package.open("rb") as stream:
            index = Package.open(stream, owner_signing=identity.signing.public).unlock(package_key)
        names = [asset.path for asset in index.assets]
        return cls(
            manifest=manifest, envelope=envelope, package_key=package_key, known=known, job=index.job, names=names
        )

    @property
    def has_line(self) -> bool:
        return CheckpointLimits.of(self.job) is not None

    def __repr__(self) -> str:
        return f"_Opened({self.manifest.package_id})"


def _check_each(places: Iterable[Place], opened: _Opened, kinds: Sequence[str], home: Home, package: Path) -> None:
    for place in places:
        place.check(package.stat().st_size)
        check_hardware(home, kinds, place.name)
        check_machine(opened.manifest.workload, opened.job, opened.names, place)


def _line(opened: _Opened, later: LaterLeg | None, folder: RunFolder, terms: RunTerms) -> LineRequest | None:
    """Return which leg of which line a run is to be, None for a package without checkpoints; keep what it begins by."""
    if not opened.has_line:
        return None
    line = LineRequest() if later is None else later.line
    terms.save(folder)
    if line.order is not None:
        LineNotes(folder).keep_order(line.order)
    return line


def _delegated(
    opened: _Opened,
    policy: DeploymentPolicy,
    *,
    home: Home,
    identity: Identity,
    serving: Serving | GateBroker,
    gate: str | None,
) -> Envelope:
    client = serving.client()
    store = client.store_public()
    if opened.has_line and store is None:
        raise keeps_none(gate)
    lasts_s = policy.max_duration_s + policy.lease_s + opened.known.deployment.valid_s + _MARGIN_S
    until_us = max(now_us() + lasts_s * 1_000_000, _needed_by_others_us(home))
    return delegate(client, identity, serving.public, store=store, not_after_us=until_us)


def _deployed(
    opened: _Opened, policy: DeploymentPolicy, *, home: Home, serving: Serving | GateBroker, gate: str | None
) -> str:
    """Give the broker package key and policy, and return the deployment's id."""
    given = None if gate is None else GivenTo(name=gate, public=serving.public, deployed=False)
    if given is not None:  # before it has the key: a revocation must find it
        opened.known.given_to(given).save(home)
    deployment = serving.client().add_deployment(opened.envelope, opened.package_key, policy)
    if given is not None:
        now_known = PackageRecord.load(home, opened.manifest.package_id, workload=opened.manifest.workload)
        now_known.given_to(replace(given, deployed=True)).save(home)
    return deployment


def check_line(home: Home, gate: str | None, ranks: Ranks | None) -> None:
    """Refuse a run with checkpoints that no line can have; raises `UsageError`, `PeerError`."""
    if ranks is not None:
        ranks.check_line()
    if gate is not None:
        check_keeps(home, gate)


def _one_each(places: Sequence[Place], *, machines: int) -> tuple[Place, ...]:
    """Return a place for each machine of a run; raises `UsageError`."""
    if len(places) == 1:
        places = [places[0]] * machines
    if len(places) != machines:
        raise UsageError(Code.USAGE, f"--on names {len(places)} machines, and the run is on {machines}")
    names = {place.name for place in places}
    if len(names) > 1 and LocalPlace.name in names:
        raise UsageError(
            Code.USAGE,
            "this machine cannot be one of several: the address at which the others reach it is not known",
            hint="name it too: glasshouse machine add NAME ssh://user@localhost --address ADDRESS",
        )
    return tuple(places)


def _called_at(place: Place, folder: RunFolder, relay: RelayOrder | None) -> str:
    """Return where the runtime of a run finds its gate at a place, empty for the broker's own; raises `PeerError`."""
    with contextlib.closing(place.run(folder.path, relayed=relay is not None)) as placed:
        there = placed.connect()
    if there is None and relay is not None:
        return f"unix:{relay.socket}"
    return there or ""


def _needed_by_others_us(home: Home) -> int:
    """Return until when runs that go on need the broker: a new delegation takes the old one's place for all of them."""
    going = (one for one in RunFolder.records(home) if one.phase is not Phase.ENDED)
    ends_us = (one.created_us + (one.max_duration_s + MAX_LEASE_S + _MARGIN_S) * 1_000_000 for one in going)
    return max(ends_us, default=0)


def _record(folder: RunFolder, opened: _Opened, package: Path, later: LaterLeg | None) -> RunRecord:
    manifest, known = opened.manifest, opened.known
    record = RunRecord(
        run_id=folder.run_id,
        name=known.name,
        workload=manifest.workload,
        package=package,
        package_id=manifest.package_id,
        manifest_sha256=manifest.sha256.hex(),
        assurance=manifest.floor.assurance.value,
        profile=manifest.floor.profile.value,
        created_us=now_us(),
        max_duration_s=known.deployment.max_duration_s,
        supervisor=ProcessName.of(),
    )
    if later is None or later.line.id is None:
        return record
    # One that fails before its launch is of the line too.
    return replace(record, line=later.line.id.hex(), leg=later.line.leg, before=later.before.run_id)


def _policy(opened: _Opened, references: References, *, machines: int) -> DeploymentPolicy:
    """Return the deployment's policy; `releases` of a job file counts runs, each released to once for each machine."""
    deployment, floor = opened.known.deployment, opened.manifest.floor
    releases = deployment.releases * machines
    if releases > MAX_RELEASES:
        raise UsageError(
            Code.POLICY_IMPOSSIBLE,
            f"{deployment.releases} releases to each of {machines} machines are more than {MAX_RELEASES}",
        )
    return DeploymentPolicy(
        assurance=floor.assurance,
        profile=floor.profile,
        egress=floor.egress,
        references=references,
        release_budget=releases,
        not_after_us=now_us() + deployment.valid_s * 1_000_000,
        lease_s=deployment.lease_s,
        max_duration_s=deployment.max_duration_s,
        max_legs=deployment.retries + 1 if opened.has_line else 1,
        hardware=deployment.hardware,
    )
