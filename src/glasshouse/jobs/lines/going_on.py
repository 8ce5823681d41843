"""Decides whether a line may go on, and from where, and signs what its owner says about that; nothing is rented yet.

Laws: a leg goes on from the last checkpoint that its gate counted, or from one that its owner names, and from the
beginning only where none was ever counted; the owner calls a leg lost that is known not to exist any more, or that a
person says so of.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glasshouse.attestation.claims import ContainerSource
from glasshouse.broker.client.owner_client import OwnerClient
from glasshouse.broker.http_api import LaunchRequest, LineRequest, LineView
from glasshouse.errors import Code, GlasshouseError, UsageError
from glasshouse.evidence.events import EventType
from glasshouse.jobs.define.package_records import PackageRecord, public_part
from glasshouse.jobs.define.run_terms import RunTerms
from glasshouse.jobs.gates.embedded import Serving
from glasshouse.jobs.gates.known_gates import GateBroker
from glasshouse.jobs.gates.line_notes import KnownLeg, keep, known_legs, known_tickets
from glasshouse.jobs.owner.durations import format_s, utc
from glasshouse.jobs.owner.home import Home, is_there
from glasshouse.jobs.owner.owner_identity import Identity, read_public
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.places.rental_journal import provider_at
from glasshouse.jobs.places.rented_machine import statement_of
from glasshouse.jobs.supervise.control import look
from glasshouse.jobs.supervise.follow import Tail
from glasshouse.jobs.supervise.launching import LaterLeg
from glasshouse.jobs.verify.conclusion import survivors, verify_run
from glasshouse.jobs.verify.line_file import write_line_file
from glasshouse.package.manifest import Manifest
from glasshouse.providers.place.local import LocalPlace
from glasshouse.wire.crypto import SigningKey
from glasshouse.wire.lines.statements import LegLost, ResumeOrder
from glasshouse.wire.states import Outcome, State

# What is signed anew before the leg is launched.
_DELEGATED_LATER = frozenset({Code.CHAIN_DELEGATION})
# As of the gate, beyond the lease: how far a clock may be off.
OVER_AFTER_S = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginning:
    """The checkpoint that a leg goes on from."""

    seq: int  # 0 for the beginning
    step: int | None  # None where it is not known here
    digest: bytes | None

    @property
    def words(self) -> str:
        """What it is, for people."""
        if not self.seq:
            return "the beginning: no checkpoint was counted"
        return f"checkpoint {self.seq}" + ("" if self.step is None else f", at step {self.step}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GoingOn:
    """A leg that may begin."""

    later: LaterLeg
    manifest: Manifest  # of the package, which is the same as ever
    begins: Beginning
    legs: Sequence[KnownLeg]  # those of the line that are here


def last_leg(run: RunFolder, home: Home) -> KnownLeg:
    """Return the last leg of a run's line that was begun here; raises `UsageError` for a run without checkpoints."""
    record = run.load()
    if record.line is None:
        RunTerms.load(run)
        raise UsageError(
            Code.USAGE,
            f"run {run.run_id[:8]} was never launched: it has no line that could go on",
            hint="begin it again with glasshouse run",
        )
    return [leg for leg in known_legs(home, record.line) if is_there(leg.folder.terms)][-1]


def go_on(
    run: RunFolder,
    *,
    home: Home,
    identity: Identity,
    serving: Callable[[], Serving | GateBroker],
    lost: bool = False,
    rewind_to: int | None = None,
    now_us: int | None = None,
) -> GoingOn:
    """Return the leg after the last of a run's line.

    Args:
        serving: returns the line's broker, as its owner asks it.
        lost: whether a person says that the machines of the last leg do not exist any more.
        rewind_to: the number of an older checkpoint than the last.

    Raises:
        UsageError, PackageError: package, deployment or checkpoint is not there, or not the same; `line-busy`: the
            last leg may go on.
        VerificationError: `line-forked`.
        PeerError, RefusedError: the gate cannot be reached, or does not have the line.
    """
    last, now_us = last_leg(run, home), now_us or time.time_ns() // 1000
    record, terms = last.record, RunTerms.load(last.folder)
    manifest = _package(record, identity)
    _check_standing(home, record, terms, now_us)
    _check_ended(last, home, rewinds=rewind_to is not None)
    gate = serving()
    line = _Line(record, home, identity, gate.client(), gate.public, now_us)
    line.look()
    legs = known_legs(home, line.name)
    line.close(legs, lost=lost, lease_s=terms.policy.lease_s)
    with contextlib.suppress(UsageError, OSError):
        write_line_file(home, last.folder)
    begins = line.begins() if rewind_to is None else line.rewound(rewind_to, legs)
    before = next((leg for leg in legs if leg.record.run_id in line.view.run_ids), last)
    request = line.request(begins, rewind=rewind_to is not None)
    line.have_checked(request, before.record)
    return GoingOn(
        later=LaterLeg(before=before.record, terms=terms, line=request),
        manifest=manifest,
        begins=begins,
        legs=legs,
    )


def _package(record: RunRecord, identity: Identity) -> Manifest:
    """Return the manifest of a run's own package; raises `UsageError`, `PackageError` or `FormatError`."""
    path = Path(record.package)
    begin = "a line is of one package; to begin anew: glasshouse run JOB.toml"
    if not is_there(path):
        why = f"the package of run {record.run_id[:8]} is gone: {path}"
        raise UsageError(Code.FILE_MISSING, why, hint=f"put it back there; {begin}")
    manifest, _ = public_part(path, owner_signing=identity.signing.public)
    if manifest.sha256.hex() != record.manifest_sha256:
        raise UsageError(
            Code.MANIFEST_MISMATCH,
            f"the package of run {record.run_id[:8]} is another than it began with: {path}",
            hint=f"put the old one back there; {begin}",
        )
    return manifest


def _check_standing(home: Home, record: RunRecord, terms: RunTerms, now_us: int) -> None:
    """Refuse a deployment that is over; raises `UsageError`."""
    if PackageRecord.load(home, record.package_id, workload=record.workload).revoked:
        raise UsageError(Code.PACKAGE_REVOKED, f"package {record.package_id} is revoked: seal the job again")
    if now_us >= terms.policy.not_after_us:
        raise UsageError(
            Code.DEPLOYMENT_EXPIRED,
            f"the deployment of run {record.run_id[:8]} was valid until {utc(terms.policy.not_after_us)}: its key is "
            "released no more, and its line cannot go on",
            hint="begin anew with glasshouse run; `valid` under [policy] says for how long the key is released",
        )


def _check_ended(last: KnownLeg, home: Home, *, rewinds: bool) -> None:
    """Refuse a line whose last leg goes on, or has completed; raises `UsageError`."""
    found, name = look(last.folder, home), last.folder.run_id[:8]
    if found.record.outcome == Outcome.COMPLETED and not rewinds:
        raise UsageError(
            Code.USAGE,
            f"run {name}, leg {last.number} of the line, has completed: there is nothing to go on with",
            hint=f"what it made: glasshouse fetch {name} -o DIR",
        )
    if found.doing != Phase.ENDED:
        raise UsageError(
            Code.LINE_BUSY,
            f"run {name}, leg {last.number} of the line, has not ended: it is {found.doing} on {last.record.place}",
            hint=f"move it: glasshouse migrate {name} --on NAME; or, if its machine is certainly gone: "
            f"glasshouse resume {name} --lost",
        )


class _Line:
    """A line at its gate, as its owner asks."""

    def __init__(
        self, record: RunRecord, home: Home, identity: Identity, client: OwnerClient, gate: bytes, now_us: int
    ) -> None:
        assert record.line is not None and record.deployment is not None  # noqa: S101, PT018 - it was launched
        self.name, self._id, self._deployment = record.line, bytes.fromhex(record.line), record.deployment
        self._home, self._identity, self._client, self._gate, self._now_us = home, identity, client, gate, now_us
        self._run = record.run_id[:8]

    def look(self) -> LineView:
        """Ask the gate, and keep what it shows."""
        try:
            self.view = self._client.line(self._id)
        except UsageError as error:
            if error.code is not Code.RUN_UNKNOWN:
                raise
            raise UsageError(
                Code.RUN_UNKNOWN,
                f"the gate has no line of run {self._run}: its data were lost, or it is another gate",
                hint="a line goes on at its own gate alone; to begin anew: glasshouse run JOB.toml",
            ) from None
        keep(self._home, self.view, gate=self._gate)
        self._tickets = known_tickets(self._home, self.name, gate=self._gate)
        return self.view

    def close(self, legs: Sequence[KnownLeg], *, lost: bool, lease_s: int) -> None:
        """See that the leg before is over, or tell the gate that it is lost; raises `UsageError`: `line-busy`."""
        # A gate that was put back from a backup is told what it has forgotten.
        released = [leg for leg in legs if leg.record.run_id in self.view.run_ids or _was_released(leg)]
        current = max([self.view.leg, *(leg.number for leg in released), *(one.leg for one in self._tickets)])
        if current == 0 or (current == self.view.leg and self.view.over):
            self.leg = current + 1
            return
        known = [leg for leg in released if leg.number == current]
        if not lost and not (known and all(_is_gone(self._home, leg) for leg in known)):
            silent_s = max(0, self._now_us - self.view.contact_us) // 1_000_000
            raise UsageError(
                Code.LINE_BUSY,
                f"leg {current} of the line of run {self._run} may go on: its gate heard of it {format_s(silent_s)} "
                "ago, and nothing shows that its machine is gone",
                hint=f"it is over when {format_s(lease_s + OVER_AFTER_S)} have passed without a word of it; if its "
                "machine is certainly gone, say so: --lost",
            )
        said = LegLost(deployment=self._deployment, leg=current, line=self._id, serial_us=self._now_us)
        self._client.leg_lost(self._id, said.sign(self._identity.signing))
        self.leg = current + 1

    def begins(self) -> Beginning:
        """Return the last checkpoint that was counted, also where the gate has forgotten it."""
        newest = max(self._tickets, key=lambda one: one.seq, default=None)
        if newest is not None and newest.seq > self.view.seq:
            return Beginning(seq=newest.seq, step=newest.step, digest=newest.digest)
        if self.view.seq and not self.view.head_seq:
            return Beginning(seq=0, step=0, digest=None)  # rewound to the beginning by its owner's order
        return Beginning(seq=self.view.head_seq, step=self.view.head_step, digest=self.view.head)

    def rewound(self, seq: int, legs: Sequence[KnownLeg]) -> Beginning:
        """Return an older checkpoint; raises `UsageError` for one that is not known here, or is the last."""
        last = self.begins()
        if seq == last.seq:
            hint = f"glasshouse resume {self._run} goes on from it"
            raise UsageError(Code.USAGE, f"checkpoint {seq} is the one that the line goes on from anyway", hint=hint)
        known = _checkpoints(legs) | {
            one.seq: Beginning(seq=one.seq, step=one.step, digest=one.digest) for one in self._tickets
        }
        if seq not in known or seq > last.seq:
            older = [one for number, one in sorted(known.items()) if number < last.seq]
            named = "; ".join(one.words for one in older[-5:]) or "none"
            raise UsageError(
                Code.CHECKPOINT_STALE,
                f"no checkpoint {seq} of the line of run {self._run} is known here that is older than its last",
                hint=f"older ones are: {named}. A gate keeps the last two",
            )
        return known[seq]

    def request(self, begins: Beginning, *, rewind: bool) -> LineRequest:
        """Return what the gate is asked for, with the owner's order."""
        order = ResumeOrder(
            deployment=self._deployment,
            line=self._id,
            leg=self.leg,
            seq=begins.seq,
            digest=begins.digest,
            rewind=rewind,
            serial_us=self._now_us,
        )
        newest = max(self._tickets, key=lambda one: one.seq, default=None)
        return LineRequest(
            id=self._id,
            leg=self.leg,
            seq=begins.seq,
            checkpoint=begins.digest,
            rewind=rewind,
            order=order.sign(self._identity.signing),
            ticket=None if newest is None else self._tickets[newest],
        )

    def have_checked(self, request: LineRequest, record: RunRecord) -> None:
        """Have the gate check the leg now, by a launch that nothing is started with; raises as the gate refuses it."""
        group = None
        if record.group is not None:
            world = {"machines": record.group.machines, "ranks": record.group.ranks}
            group = self._client.add_group(self._deployment, **world)[0]
        launch = LaunchRequest(
            deployment=self._deployment,
            run_id=secrets.token_hex(16),
            container_id=f"trial-{secrets.token_hex(8)}",
            container_source=ContainerSource.MINTED,
            launch_public=SigningKey.generate().public,
            lifetime_s=1,
            group=group,
            line=request,
        )
        try:
            self._client.add_launch(launch)
        except GlasshouseError as error:
            if error.code is Code.CHECKPOINT_STALE and request.rewind:
                raise UsageError(
                    error.code,
                    f"checkpoint {request.seq} of the line of run {self._run} is not stored any more",
                    hint="a gate keeps the last two, and of a training that has completed none for long",
                ) from None
            if error.code not in _DELEGATED_LATER:
                raise


def _was_released(leg: KnownLeg) -> bool:
    """Return whether a run's files show that a key was released to it."""
    with contextlib.suppress(GlasshouseError), contextlib.closing(Tail(leg.folder.events)) as tail:
        return any(event.type is EventType.TRANSITION and event.state is State.RELEASED for event in tail.read())
    return False


def _checkpoints(legs: Sequence[KnownLeg]) -> dict[int, Beginning]:
    """Return the checkpoints that the logs of some legs name; the gate decides whether they were counted."""
    found: dict[int, Beginning] = {}
    for leg in legs:
        with contextlib.suppress(GlasshouseError), contextlib.closing(Tail(leg.folder.events)) as tail:
            for event in tail.read():
                if event.type is EventType.CHECKPOINT:
                    seq, step, digest = (event.body[name] for name in ("seq", "step", "digest"))
                    found[int(str(seq))] = Beginning(
                        seq=int(str(seq)), step=int(str(step)), digest=bytes.fromhex(str(digest))
                    )
    return found


def _is_gone(home: Home, leg: KnownLeg) -> bool:
    """Return whether it is known that nothing of a leg runs any more, on any of its machines."""
    return all(_has_ended(home, leg, folder) for folder in leg.folder.machines())


def _has_ended(home: Home, leg: KnownLeg, folder: RunFolder) -> bool:
    place = folder.load().place
    if provider_at(place) is not None:
        # Further nodes of one rental are in its machine 0's.
        told = statement_of(home, leg.folder if place.startswith(f"{leg.record.place}.") else folder, 0)
        return told is not None and bool(told["over"])
    if place == LocalPlace.name:
        return survivors(folder.scratch, folder.out, patience_s=0) == []
    try:
        verify_run(folder, owner=read_public(home.owner_public).signing)
    except GlasshouseError:
        return False
    return True
