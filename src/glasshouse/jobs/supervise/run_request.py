"""What a run is asked for, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from glasshouse.jobs.define.jobfile import Job, Ranks, load
from glasshouse.jobs.gates.known_gates import gate_name
from glasshouse.jobs.owner.home import Home


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """A run that is asked for."""

    what: Path
    job: Job | None  # the job of the job file `what`; None for a package
    on: tuple[str, ...] = ("local",)  # names of machines, `local`, or the provider to rent from
    gate: str | None = None  # the name of the gate that releases its key; None for a broker on this machine
    ranks: Ranks | None = None  # in how many processes; None for one without a group
    detach: bool = False  # whether it goes on by itself
    accept: bool = False  # whether a rented machine will do that does not print its host key

    @classmethod
    def of(
        cls,
        what: Path,
        *,
        home: Home,
        on: str | None = None,
        gate: str | None = None,
        ranks: int | None = None,
        machines: int | None = None,
        detach: bool = False,
        accept: bool = False,
    ) -> RunRequest:
        """Check what a run is asked for; what is not given here is as in the job file.

        Args:
            home: whose gates may be named.
            on: one name, or several with commas for a group.
            gate: a name or URL of a gate that was added.

        Raises:
            UsageError: as `jobfile.load` and `Ranks.check`; `usage`.
        """
        shape = shape_of(ranks, machines)
        job = load_job(what)
        machine = None if job is None else job.machine
        where = (on or (machine.on if machine is not None else None) or "local").split(",")
        if machines is None and len(where) > 1:
            shape = shape_of(ranks, len(where))
        gate = gate if gate is not None or job is None else job.gate
        named = None if gate is None else gate_name(home, gate)
        if job is not None and shape is not None:
            shape.check(job.workload, job.floor)
        return cls(what=what, job=job, on=tuple(where), gate=named, ranks=shape, detach=detach, accept=accept)


def load_job(what: Path) -> Job | None:
    """Return a job file's job, None for a sealed package; raises as `jobfile.load`."""
    return load(what) if what.suffix == ".toml" else None


def shape_of(ranks: int | None, machines: int | None) -> Ranks | None:
    """Return in how many ranks a job runs, None for one process without a group; raises `UsageError`."""
    if ranks is None and machines is None:
        return None
    return Ranks(each=1 if ranks is None else ranks, machines=1 if machines is None else machines)
