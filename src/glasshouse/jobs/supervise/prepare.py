"""Prepares a run, before it trains: everything that needs the owner's private keys.

What comes after (`supervise`) needs none of them: a detached supervisor is a fresh process that never saw one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse.attestation.claims import ContainerSource
from glasshouse.attestation.measurements.measured import References
from glasshouse.attestation.policy import MAX_LEASE_S, MAX_RELEASES, DeploymentPolicy
from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.http_api import LaunchRequest
from glasshouse.errors import Code, FormatError, PeerError, UsageError
from glasshouse.handshake.delegation import RUN_USES, Delegation
from glasshouse.handshake.launch import LaunchFile, parse_token_at_issue
from glasshouse.jobs.define.jobfile import Ranks, check_reachable
from glasshouse.jobs.define.package_records import GivenTo, KeyStore, PackageRecord, public_part
from glasshouse.jobs.define.wanted import Deployment
from glasshouse.jobs.gates.embedded import Embedded, Serving
from glasshouse.jobs.gates.known_gates import GateBroker, audit_gate, relay_of
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import ProcessName
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.references.known_references import accepted as references_of
from glasshouse.jobs.references.known_references import check_places
from glasshouse.jobs.supervise.machine_check import check_machine
from glasshouse.package.limits import OutputLimits
from glasshouse.package.manifest import Manifest
from glasshouse.package.read import Package
from glasshouse.providers.place.base import Place
from glasshouse.providers.place.local import LocalPlace
from glasshouse.providers.protocol.order import RelayOrder
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group

# Clocks differ; a delegation that begins now would begin too late for a runtime whose clock is behind.
_SKEW_US = 120_000_000
_DELEGATION_TRIES = 5
_MARGIN_S = 2 * 3600
TOKEN_LIFETIME_S = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that can be placed."""

    folder: RunFolder
    record: RunRecord
    launch: bytes  # the launch file; secret
    # Folders and launch files of the other machines of its group, in order.
    others: tuple[tuple[RunFolder, bytes], ...] = ()

    def __repr__(self) -> str:
        return f"Prepared({self.folder.run_id})"


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
    sending: Callable[[int, int], None] = lambda _sent, _size: None,
) -> Prepared:
    """Delegate, deploy and mint a launch for a sealed package; of a group, one for each machine.

    Args:
        broker: started if need be; the caller gives it back. `gate` is the name of one that stays.
        places: one for each machine of a group, in their order, or one for all; none for this machine.
        ranks: in how many ranks, on how many machines, the job runs; None for one process without a group.
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
    manifest, envelope = public_part(kept, owner_signing=identity.signing.public)
    check_reachable(manifest.floor)
    if ranks is not None:
        ranks.check(manifest.workload, manifest.floor)
    known = PackageRecord.load(home, manifest.package_id, workload=manifest.workload)
    if known.revoked:
        raise UsageError(Code.PACKAGE_REVOKED, f"package {manifest.package_id} is revoked: seal the job again")
    store = KeyStore(home.keys)
    package_key = store.get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing)
    with kept.open("rb") as stream:
        index = Package.open(stream, owner_signing=identity.signing.public).unlock(package_key)
    each = {place.name: place for place in places}.values()
    for place in each:
        place.check(kept.stat().st_size)
        check_machine(manifest.workload, index.job, [asset.path for asset in index.assets], place)
    accepted = known.deployment.reference
    references = references_of(home, accepted)
    record = folder.save(replace(_record(folder, manifest, known, kept), place=places[0].name, gate=gate))
    sent: dict[str, str] = {}
    called: str | None = None
    with check_places(home, places, references, accepted) as check:
        if places[0].name != LocalPlace.name:
            record = replace(record, max_output_bytes=OutputLimits.of(index.job).bytes)
            check()
            # Before anything that expires is made: this may take hours.
            for place in each:
                with contextlib.closing(place.run(folder.path, relayed=gate is not None)) as there:
                    found = there.connect()
                    sent[place.name] = there.upload(kept, sending)
                called = found if called is None else called
        serving = broker.ensure()
        if gate is not None:  # one that has forgotten what was registered is given no key
            audit_gate(home, gate, identity.signing, newer=True)
        check()
    policy = _policy(manifest, known.deployment, references, machines=len(places))
    client, lasts_s = serving.client(), policy.max_duration_s + policy.lease_s + known.deployment.valid_s + _MARGIN_S
    until_us = max(_now_us() + lasts_s * 1_000_000, _needed_by_others_us(home))
    delegation = _delegate(client, identity, serving.public, not_after_us=until_us)
    given = None if gate is None else GivenTo(name=gate, public=serving.public, deployed=False)
    if given is not None:  # before it has the key: a revocation must find it
        known.given_to(given).save(home)
    deployment = client.add_deployment(envelope, package_key, policy)
    if given is not None:
        now_known = PackageRecord.load(home, manifest.package_id, workload=manifest.workload)
        now_known.given_to(replace(given, deployed=True)).save(home)
    record = replace(record, deployment=deployment, broker=serving.owner_socket)
    groups: tuple[Group | None, ...] = (None,)
    if ranks is not None:
        groups = client.add_group(deployment, machines=ranks.machines, ranks=ranks.each)
    placed: list[tuple[RunFolder, bytes]] = []
    for group, place in zip(groups, places, strict=True):
        its = folder if not placed else folder.add_machine()
        relay = relay_of(home, gate, its.run_id)
        # Machine 0 is at the first place, which was asked for this run's gate; others' names differ.
        first = its is folder and called is not None
        url = (called if first else _called_at(place, its, relay)) or serving.runtime_url
        launch = mint(
            serving, manifest, deployment, policy, its.run_id, delegation, group, broker_url=url, place=place.name
        )
        placed.append((its, launch))
        its.save(replace(record, run_id=its.run_id, group=group, place=place.name, sent=sent.get(place.name)))
    return Prepared(folder=folder, record=folder.load(), launch=placed[0][1], others=tuple(placed[1:]))


def _delegate(client: OwnerClient, identity: Identity, broker: bytes, *, not_after_us: int) -> Envelope:
    """Delegate to a broker and return what was signed; one that has a newer delegation is given a newer still.

    A delegation there of a time that has not come raises `UsageError`.
    """
    serial_us = _now_us()
    for _ in range(_DELEGATION_TRIES):
        signed = Delegation(
            broker_public=broker,
            uses=RUN_USES,
            not_before_us=_now_us() - _SKEW_US,
            not_after_us=not_after_us,
            serial_us=serial_us,
        ).sign(identity.signing)
        kept_us = client.put_delegation(signed, identity.signing.public)
        if kept_us == serial_us:
            return signed
        if kept_us > _now_us() + _SKEW_US:
            break
        serial_us = max(_now_us(), kept_us + 1)
    raise UsageError(
        Code.CHAIN_DELEGATION,
        "the broker has a delegation of yours that is newer than now, and keeps it",
        hint="set the clock that is wrong: timedatectl set-ntp true",
    )


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


def _record(folder: RunFolder, manifest: Manifest, known: PackageRecord, package: Path) -> RunRecord:
    return RunRecord(
        run_id=folder.run_id,
        name=known.name,
        workload=manifest.workload,
        package=package,
        package_id=manifest.package_id,
        manifest_sha256=manifest.sha256.hex(),
        assurance=manifest.floor.assurance.value,
        profile=manifest.floor.profile.value,
        created_us=_now_us(),
        max_duration_s=known.deployment.max_duration_s,
        supervisor=ProcessName.of(),
    )


def _policy(manifest: Manifest, deployment: Deployment, references: References, *, machines: int) -> DeploymentPolicy:
    """Return the deployment's policy; `releases` of a job file counts runs, each released to once for each machine."""
    releases = deployment.releases * machines
    if releases > MAX_RELEASES:
        raise UsageError(
            Code.POLICY_IMPOSSIBLE,
            f"{deployment.releases} releases to each of {machines} machines are more than {MAX_RELEASES}",
        )
    return DeploymentPolicy(
        assurance=manifest.floor.assurance,
        profile=manifest.floor.profile,
        egress=manifest.floor.egress,
        references=references,
        release_budget=releases,
        not_after_us=_now_us() + deployment.valid_s * 1_000_000,
        lease_s=deployment.lease_s,
        max_duration_s=deployment.max_duration_s,
    )


def _now_us() -> int:
    return time.time_ns() // 1000


def mint(
    serving: Serving | GateBroker,
    manifest: Manifest,
    deployment: str,
    policy: DeploymentPolicy,
    run_id: str,
    delegation: Envelope,
    group: Group | None,
    *,
    broker_url: str,
    place: str,
) -> bytes:
    """Mint container and launch key, and return the launch file; raises `PeerError` for a token of anything else."""
    kind = place if place == LocalPlace.name else "ssh"
    launch_key, container = SigningKey.generate(), f"{kind}-{secrets.token_hex(8)}"
    request = LaunchRequest(
        deployment=deployment,
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED,
        launch_public=launch_key.public,
        lifetime_s=TOKEN_LIFETIME_S,
        group=group,
    )
    token = serving.client().add_launch(request)
    # The gate judges a runtime by its token: a looser policy of the same owner and package, moved to this
    # deployment by who can edit the gate's database, shows here.
    try:
        issued = parse_token_at_issue(token, broker_public=serving.public)
    except FormatError as error:
        raise PeerError(Code.BROKER_PROTOCOL, f"the broker's launch token does not hold: {error.message}") from None
    requested = ("deployment", "run_id", "container_id", "container_source", "launch_public", "group")
    asked = {name: getattr(request, name) for name in requested} | {
        "package_id": manifest.package_id,
        "manifest_sha256": manifest.sha256,
        "floor_sha256": manifest.floor.sha256,
        "policy_sha256": policy.sha256,
    }
    if other := [name for name, value in asked.items() if getattr(issued, name) != value]:
        raise PeerError(
            Code.BROKER_PROTOCOL,
            f"the broker's launch token is for another {', '.join(other)} than was asked for; nothing was started",
            hint="ask who runs the broker whether its database was edited",
        )
    return LaunchFile(
        token=token,
        launch_seed=launch_key.seed(),
        broker_public=serving.public,
        broker_url=broker_url,
        delegation=delegation,
        run_id=run_id,
        container_id=container,
        container_source=ContainerSource.MINTED,
        profile=manifest.floor.profile,
    ).encode()
