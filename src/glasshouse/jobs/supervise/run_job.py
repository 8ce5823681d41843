"""Takes a job from its file to the end of its run: seals it, rents or looks at machines, prepares, supervises.

Law: a run that fails before it is placed leaves no folder without a record.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, UsageError
from glasshouse.jobs.define.seal_job import script_warnings, seal
from glasshouse.jobs.gates.embedded import Embedded
from glasshouse.jobs.gates.known_gates import GateBroker
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.processes import Interrupts, handled, interrupt, stoppable
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places import rented_machine
from glasshouse.jobs.places.known_machines import place_of
from glasshouse.jobs.places.rent import cap_reached
from glasshouse.jobs.places.rental_watch import watched
from glasshouse.jobs.supervise.control import detach
from glasshouse.jobs.supervise.line_watch import Broker
from glasshouse.jobs.supervise.machine_check import check_rentable, pack_for
from glasshouse.jobs.supervise.prepare import check_line, prepare
from glasshouse.jobs.supervise.run_request import Listener, Renting, RunRequest
from glasshouse.jobs.supervise.supervision import Ended, run_here, settled
from glasshouse.providers.place.base import Place


def run_job(request: RunRequest, *, home: Home, identity: Identity, listener: Listener) -> Ended | RunFolder:
    """Run what is asked for, until it has ended; return a detached run's folder once its supervisor has it.

    SIGINT, SIGTERM and SIGHUP stop it, where this is the main thread. Raises `GlasshouseError` as `seal`, `prepare`,
    `Renting` and `run_here` do; `interrupted` before a runtime was placed.
    """
    if request.job is not None and "checkpoints" in request.job.params:
        check_line(home, request.gate, request.ranks)
    if request.job is not None:  # before anything is rented or sealed
        check_rentable(request.job.floor.assurance, request.on[0])
        pack_for(home, request.job.deployment.hardware)
    rents = Renting.of(request, home)
    where = _places(request, home) if rents is None else []
    for line in () if request.job is None else script_warnings(request.job):
        listener.warn(line)
    folder = RunFolder.create(home)
    gate = request.gate
    broker = broker_for(home, gate, identity)
    interrupts = Interrupts()
    with contextlib.ExitStack() as until_ended:
        until_ended.enter_context(_removed_if_unused(folder))
        until_ended.enter_context(settled(folder, broker))
        if rents is not None:  # a signal between two of the blocks below ends no command that has a machine
            until_ended.enter_context(handled(interrupts))
        try:
            with stoppable():
                package = _sealed(request, home, identity, folder, listener)
                if rents is not None:
                    where = until_ended.enter_context(rents.rented(listener, home, folder, package))
                # Its caps hold while the package is sent, too.
                with watched(home, folder.run_id, interrupt):
                    started = time.monotonic()
                    with listener.showing():
                        prepared = prepare(
                            package,
                            home=home,
                            identity=identity,
                            folder=folder,
                            broker=broker,
                            places=where,
                            gate=gate,
                            ranks=request.ranks,
                            machine=request.machine,
                            accept=request.accept,
                            later=request.later,
                            sending=listener.sending,
                        )
                    cost = rented_machine.cost_so_far(home, folder)
                    listener.prepared(prepared, time.monotonic() - started, cost)
        except (KeyboardInterrupt, OSError) as error:
            if isinstance(error, OSError) and not listener.has_lost(error):
                raise
            rental = rented_machine.rental_of(home, folder)
            if rental is not None and rental.stopped_by:
                raise cap_reached(rental.stopped_by) from None
            raise UsageError(
                Code.INTERRUPTED, "interrupted before a runtime was placed: the key was not released"
            ) from None
        if request.detach:
            supervisor = detach(
                folder,
                prepared.launch,
                home=home,
                others=prepared.others,
                hand_over=partial(rented_machine.hand_over, home, folder),
            )
            if interrupts.count:
                supervisor.send(signal.SIGTERM)
            return folder
        with listener.showing():
            return run_here(
                folder,
                prepared.launch,
                home=home,
                broker=broker,
                watcher=listener,
                others=prepared.others,
                place=partial(place_of, home),
                places=where,
                interrupts=interrupts,
            )


def broker_for(home: Home, gate: str | None, identity: Identity) -> Broker:
    """Return the broker of a run, as its owner asks it."""
    return Embedded(home) if gate is None else GateBroker(home, gate, identity.signing)


def _places(request: RunRequest, home: Home) -> list[Place]:
    """Return where a run shall be, each looked at before anything is sealed."""
    where = [place_of(home, name) for name in request.on]
    for one in dict(zip(request.on, where, strict=True)).values():
        one.check()
    return where


def _sealed(request: RunRequest, home: Home, identity: Identity, folder: RunFolder, listener: Listener) -> Path:
    """Seal a job file; return the package."""
    if request.job is None:
        return request.what
    sealed = seal(request.job, out=folder.package, home=home, identity=identity)
    for note in sealed.notes:
        listener.warn(note)
    listener.sealed(sealed)
    return folder.package


@contextlib.contextmanager
def _removed_if_unused(folder: RunFolder) -> Iterator[None]:
    """Take away the folder of a run that never had a record: nothing of it happened."""
    try:
        yield
    except BaseException:
        if not folder.recorded:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
