"""What a run on a line keeps in its folder for the legs after it: no job file is read again.

None of it is sent anywhere: what a machine may cost stays with its owner.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.attestation.policy import DeploymentPolicy
from glasshouse.errors import Code, FormatError, UsageError
from glasshouse.jobs.define.wanted import Wanted
from glasshouse.jobs.owner.home import is_there, read_state, write_state
from glasshouse.jobs.owner.rundir import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTerms:
    """The policy of a line's deployment, and the machine that its job asks for."""

    policy: DeploymentPolicy
    machine: Wanted | None = None  # the job's `[machine]`; None for a package without its job file
    accept: bool = False  # whether a rented machine will do that does not print its host key

    def save(self, folder: RunFolder) -> None:
        """Write them into a run's folder; raises `UsageError`."""
        machine = None if self.machine is None else self.machine.to_json()
        write_state(folder.terms, {"accept": self.accept, "machine": machine, "policy": self.policy.to_json()})

    @classmethod
    def load(cls, folder: RunFolder) -> RunTerms:
        """Return those of a run; raises `UsageError` where it has none, or damaged ones."""
        if not is_there(folder.terms):
            raise UsageError(
                Code.USAGE,
                f"run {folder.run_id[:8]} has no checkpoints: it cannot go on at another machine",
                hint="begin it again with glasshouse run; a table [checkpoints] in the job file makes checkpoints",
            )
        value = read_state(folder.terms, what="terms of a line")
        try:
            machine = value["machine"] and Wanted.from_json(value["machine"])
            return cls(
                policy=DeploymentPolicy.from_json(value["policy"]), machine=machine, accept=bool(value["accept"])
            )
        except (FormatError, KeyError, TypeError, ValueError, ArithmeticError):
            raise UsageError(Code.USAGE, f"the terms of a line {folder.terms} are damaged") from None
