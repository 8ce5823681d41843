"""A run that goes on: through the loss of its machines, as often as its job allows, or when its owner says so.

Laws: a run goes on of its own package, at its own gate; a machine is replaced only where it was lost, not where its
owner, a cap of theirs or the job itself ended the run; what all machines that replace each other cost together stays
within the caps of the job.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from glasshouse.errors import Code, GlasshouseError, UsageError, VerificationError
from glasshouse.jobs.define.jobfile import Ranks
from glasshouse.jobs.define.package_records import PackageRecord
from glasshouse.jobs.define.run_terms import RunTerms
from glasshouse.jobs.define.wanted import Wanted
from glasshouse.jobs.gates.embedded import Serving
from glasshouse.jobs.gates.known_gates import GateBroker
from glasshouse.jobs.gates.line_notes import KnownLeg
from glasshouse.jobs.lines.going_on import OVER_AFTER_S, GoingOn, go_on, last_leg
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import Phase, RunFolder, RunRecord
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.places.rental_journal import Journal, provider_at
from glasshouse.jobs.places.rented_machine import return_left
from glasshouse.jobs.supervise import attach, control
from glasshouse.jobs.supervise.run_job import broker_for, run_job
from glasshouse.jobs.supervise.run_request import Listener, RunRequest, split_places
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import NO_RECEIPT
from glasshouse.jobs.verify.verdict import Status
from glasshouse.providers.rental.known import PROVIDERS
from glasshouse.wire.states import Outcome

# What keeps a run from beginning at one place, and need not at the next.
_ELSEWHERE = frozenset(
    {
        *(Code.NO_OFFER, Code.BOOT_FAILED, Code.PLACE_UNREACHABLE, Code.PROVIDER_UNREACHABLE),
        *(Code.PROVIDER_KEY, Code.PROVIDER_MONEY, Code.PROVIDER_PROTOCOL, Code.RENTAL_UNCERTAIN),
    }
)
_ASK_EVERY_S = 5.0
_SETTLED_S = 30.0  # for the gate's clock to be past the end of a lease


def run_through(request: RunRequest, *, home: Home, identity: Identity, listener: Listener) -> Ended | RunFolder:
    """Run what is asked for as `run_job` does, and replace machines that are lost; return how the last leg ended.

    Raises as `run_job`; where a lost machine cannot be replaced, with how to go on.
    """
    if request.detach and request.job is not None and request.job.deployment.retries:
        listener.warn("a detached run has no key of yours: a machine that it loses is replaced by glasshouse resume")
    request, ended = _first_to_be_had(request, home=home, identity=identity, listener=listener)
    left = _retries(home, ended) if isinstance(ended, Ended) and ended.record.line is not None else 0
    while isinstance(ended, Ended) and left > 0 and (lost := _lost(ended)):
        left -= 1
        name, where = ended.record.run_id[:8], _where(ended, lost)
        try:
            going = _plan_when_over(ended.folder, where, home=home, identity=identity, listener=listener)
            request = _after(request, ended, lost, going, home)
            told = f"{where} is lost; {left} more may be replaced"
            request, ended = _first_to_be_had(request, home=home, identity=identity, listener=listener, told=told)
        except GlasshouseError as error:
            error.message = f"{where} is lost, and not replaced: {error.message}"
            error.hint = f"{error.hint}; to go on later: glasshouse resume {name}".removeprefix("; ")
            raise
    return ended


def plan(
    run: RunFolder, *, home: Home, identity: Identity, lost: bool = False, rewind_to: int | None = None
) -> GoingOn:
    """Decide how a run's line goes on, by its own broker, which is given back where it does not; raises as `go_on`."""
    broker = broker_for(home, run.load().gate, identity)
    try:
        # The command of the leg before may give the broker back meanwhile.
        kept: contextlib.AbstractContextManager[Serving | GateBroker] = broker.kept()
        with contextlib.ExitStack() as asked:
            return go_on(
                run,
                home=home,
                identity=identity,
                serving=lambda: asked.enter_context(kept),
                lost=lost,
                rewind_to=rewind_to,
            )
    except BaseException:
        broker.give_back()
        raise


def _plan_when_over(run: RunFolder, where: str, *, home: Home, identity: Identity, listener: Listener) -> GoingOn:
    """Plan as `plan` does, and wait for the lease of a machine of which nothing shows that it is gone."""
    lease_s = RunTerms.load(run).policy.lease_s
    until_s, told = time.monotonic() + lease_s + OVER_AFTER_S + _SETTLED_S, False
    while True:
        try:
            return plan(run, home=home, identity=identity)
        except UsageError as error:
            if error.code is not Code.LINE_BUSY or time.monotonic() > until_s:
                raise
        if not told:
            told = True
            most = format_s(lease_s + OVER_AFTER_S)
            listener.step(f"{where} is lost, and may still work: waiting for its lease and a minute, {most} at most")
        time.sleep(_ASK_EVERY_S)


def _first_to_be_had(
    request: RunRequest, *, home: Home, identity: Identity, listener: Listener, told: str = ""
) -> tuple[RunRequest, Ended | RunFolder]:
    """Run at the first place that is to be had: the one that is asked for, or the next; return also which it was."""
    for one, last in _each(request):
        if one.later is not None:
            listener.leg(leg_words(one, told))
        try:
            return one, run_job(one, home=home, identity=identity, listener=listener)
        except GlasshouseError as error:
            if error.code not in _ELSEWHERE or last:
                raise
            listener.warn(f"not at {', '.join(one.on)}: {error.message}")
    raise AssertionError  # a request names a place


def _each(request: RunRequest) -> Iterator[tuple[RunRequest, bool]]:
    """Yield the request at each place in turn, and whether it is the last; those passed over come last again."""
    places, machines = deque((*request.on, *request.spare)), len(request.on)
    turns = len(request.spare) + 1
    for turn in range(turns):
        names = tuple(places)
        yield replace(request, on=names[:machines], spare=names[machines:]), turn == turns - 1
        places.rotate(-1)


def leg_words(request: RunRequest, told: str = "") -> str:
    """Return where a later leg goes on from, and where, for people."""
    assert request.later is not None  # noqa: S101 - asked before
    line = request.later.line
    begins = f"checkpoint {line.seq}" if line.seq else "the beginning, because no checkpoint was counted"
    back = ", an older one by your order" if line.rewind else ""
    before = f"{told}; " if told else ""
    return f"{before}leg {line.leg} goes on from {begins}{back}, at {', '.join(request.on)}"


def _lost(ended: Ended) -> list[int]:
    """Return the machines of a run that were lost, none where it ended otherwise."""
    if ended.asked or ended.conclusion.outcome is Outcome.COMPLETED:
        return []
    ends = ended.conclusion.machines or (ended.conclusion,)
    lost = [
        number
        for number, end in enumerate(ends)
        # Without a receipt, not with one that does not hold: that is no loss but an attack or a defect.
        if (end.outcome is Outcome.LOST and end.verdict == NO_RECEIPT) or end.code is Code.LEASE_LOST
    ]
    # What takes a machine back in order asks its runtime to stop, as its owner would.
    taken = [number for number, end in enumerate(ends) if end.outcome is Outcome.INTERRUPTED and not lost]
    return lost or taken


def _where(ended: Ended, lost: list[int]) -> str:
    folders = ended.folder.machines()
    return " and ".join(dict.fromkeys(folders[number].load().place for number in lost))


def _after(request: RunRequest, ended: Ended, lost: list[int], going: GoingOn, home: Home) -> RunRequest:
    """Return the request for the next leg: at other places than those that were lost, where there are others."""
    queue = deque(request.spare)
    on, behind = list(request.on), []
    for number in sorted({min(number, len(on) - 1) for number in lost}):  # one name may be that of all machines
        if queue:
            behind.append(on[number])
            on[number] = queue.popleft()
    return replace(
        request,
        what=going.later.before.package,
        job=None,
        on=tuple(on),
        spare=(*queue, *behind),
        later=going.later,
        machine=within_caps(request.machine, going.legs, home),
        profile=going.manifest.floor.profile,
        agreed=True,  # to the caps, within which all of it stays
        lost=request.lost | _offers(ended, home),
    )


def _offers(ended: Ended, home: Home) -> frozenset[tuple[str, str]]:
    """Return provider and offer of the machine that a run was on, if it was rented."""
    journal = Journal.of(home, ended.folder.run_id)
    if not journal.exists:
        return frozenset()
    rental = journal.load()
    return frozenset((rental.provider, one.offer.id) for one in rental.attempts if one.up_us is not None)


def within_caps(machine: Wanted | None, legs: Sequence[KnownLeg], home: Home) -> Wanted | None:
    """Return what may be rented for the next leg: what the legs before took of money and time is gone."""
    if machine is None:
        return None
    now_us, usd, seconds = time.time_ns() // 1000, machine.caps.usd, machine.caps.seconds
    for leg in legs:
        journal = Journal.of(home, leg.folder.run_id)
        if journal.exists:
            rental = journal.load()
            usd = None if usd is None else usd - rental.cost_usd(now_us)
            ended_us = max((one.gone_us or now_us for one in rental.attempts), default=rental.created_us)
            seconds -= (ended_us - rental.created_us) // 1_000_000
    if (usd is not None and usd <= 0) or seconds <= 0:
        raise UsageError(
            Code.CAP_REACHED,
            "the machines before it took all that the job's caps allow",
            hint="raise most_usd or most_time in [machine]",
        )
    return replace(machine, caps=replace(machine.caps, usd=usd, seconds=seconds))


def _retries(home: Home, ended: Ended) -> int:
    return PackageRecord.load(home, ended.record.package_id, workload=ended.record.workload).deployment.retries


def resume(
    run: RunFolder,
    *,
    home: Home,
    identity: Identity,
    listener: Listener,
    on: str | None = None,
    lost: bool = False,
    rewind_to: int | None = None,
    detach: bool = False,
    accept: bool = False,
) -> Ended | RunFolder:
    """Have a run's line go on from its last checkpoint, as a new run; return as `run_job`.

    Args:
        on: where, as of `RunRequest.of`; None for where it was.
        lost: whether a person says that its machines do not exist any more; what is rented of them is given back.
        rewind_to: the number of an older checkpoint to go on from.
        accept: whether a rented machine will do that does not print its host key; it was said before counts too.

    Raises:
        GlasshouseError: as `go_on` and `run_through`.
    """
    last = last_leg(run, home)
    if lost and control.look(last.folder, home).doing != Phase.ENDED:
        control.give_up(last.folder, home)
        return_left(listener, home, last.folder)
    going = plan(run, home=home, identity=identity, lost=lost, rewind_to=rewind_to)
    before, terms = going.later.before, going.later.terms
    group = before.group
    machines = 1 if group is None else group.machines
    names = _was_at(last.folder) if on is None else tuple(on.split(","))
    where, spare = split_places(names, machines)
    if machines > 1 and len(names) not in (1, *range(machines, len(names) + 1)):
        raise UsageError(
            Code.USAGE,
            f"--on names {len(names)} machines, and the line is on {machines}",
            hint="a line goes on with as many machines and ranks as it began with",
        )
    request = RunRequest(
        what=before.package,
        job=None,
        on=where,
        gate=before.gate,
        ranks=None if group is None else Ranks(each=group.ranks, machines=group.machines),
        detach=detach,
        accept=accept or terms.accept,
        spare=spare,
        machine=terms.machine,
        profile=going.manifest.floor.profile,
        later=going.later,
    )
    return run_through(request, home=home, identity=identity, listener=listener)


def migrate(
    run: RunFolder,
    *,
    home: Home,
    identity: Identity,
    listener: Listener,
    on: str,
    detach: bool = False,
    accept: bool = False,
) -> Ended | RunFolder:
    """Stop a run in order, see its receipt, and have its line go on elsewhere; return as `resume`.

    Raises:
        UsageError: it completed meanwhile; or as `resume`.
        VerificationError: its receipt does not hold, or it left none: nothing shows that it wiped itself.
    """
    folder = last_leg(run, home).folder
    name = folder.run_id[:8]
    _check_target(on.split(","), RunTerms.load(folder), home)  # before anything is stopped for it
    if control.look(folder, home).doing != Phase.ENDED:
        listener.step(
            f"asking {name} to stop: it saves a last checkpoint if its script hears of the stop, and wipes itself"
        )
        attach.stop(folder, home)
        attach.wait(folder, home, listener)
    record = control.look(folder, home).record
    ended = control.concluded(folder, home, record)
    if ended.outcome is Outcome.COMPLETED:
        raise UsageError(Code.USAGE, f"run {name} has completed: there is nothing to go on with")
    if ended.verdict != Status.NOT_COMPLETED:
        raise VerificationError(
            Code.CHAIN_INCOMPLETE,
            f"run {name} was stopped, and nothing shows that it wiped itself: {ended.problem or ended.verdict}",
            hint=f"where that will do: glasshouse resume {name} --on {on}",
        )
    listener.step(f"{name} has wiped itself, by its receipt")
    try:
        return resume(folder, home=home, identity=identity, listener=listener, on=on, detach=detach, accept=accept)
    except GlasshouseError as error:
        error.hint = f"{error.hint}; it was stopped, and can go on: glasshouse resume {name} --on NAME".removeprefix(
            "; "
        )
        raise


def _check_target(names: Sequence[str], terms: RunTerms, home: Home) -> None:
    """Refuse a place that is not known, cannot be reached or rents nothing to this run; raises `GlasshouseError`."""
    for name in names:
        if name not in PROVIDERS:
            place_of(home, name).check()
        elif terms.machine is None:
            raise UsageError(
                Code.USAGE,
                f"the job of this run did not say what a machine of {name} may cost",
                hint="name a machine that was added, or begin anew with [machine] in the job file",
            )


def _was_at(folder: RunFolder) -> tuple[str, ...]:
    """Return where a run was, in the words of `--on`: of what was rented, from whom."""
    names = [_name(one.load()) for one in folder.machines()]
    return (names[0],) if len(set(names)) == 1 else tuple(names)


def _name(record: RunRecord) -> str:
    return provider_at(record.place) or record.place
