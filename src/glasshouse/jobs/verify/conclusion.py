"""The end of a run on the owner's side: whether there is a receipt, whether it holds, and what it records."""

from __future__ import annotations

from dataclasses import dataclass, replace

from glasshouse.errors import Code, ExitCode, GlasshouseError
from glasshouse.evidence.receipt import Receipt
from glasshouse.jobs.owner.files import is_there
from glasshouse.jobs.owner.rundir import GIVEN_UP, RunFolder, RunRecord
from glasshouse.jobs.verify.documents import of_run, verify_file
from glasshouse.jobs.verify.leftover import survivors
from glasshouse.jobs.verify.verdict import EXITS, Status, Verdict
from glasshouse.providers.place.local import LocalPlace
from glasshouse.runtime.worker import named_directory
from glasshouse.wire.states import Outcome

NO_RECEIPT = "no-receipt"
_NEVER_PLACED = "no runtime was placed, and no key was released"
INVALID = "invalid"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """How a run ended, as far as its owner can see."""

    outcome: Outcome  # from the verified receipt; without one, `lost` or by the runtime's exit code
    code: Code | None  # why it did not complete
    verdict: str  # `good`, `incomplete`, `not-completed`, `invalid` or `no-receipt`
    receipt: Receipt | None = None  # the verified receipt
    verified: Verdict | None = None  # the verdict of verification
    problem: str = ""  # why there is no verified receipt, for people
    machines: tuple[Conclusion, ...] = ()  # of a group: how each of its machines ended, in order
    blamed: int | None = None  # of a group that did not complete: the machine because of which

    @property
    def exit_code(self) -> ExitCode:
        """What a command that waited for this run exits with; only a whole, verified, completed run is 0."""
        if self.verdict == INVALID:
            return ExitCode.VERIFICATION_FAILED
        if self.outcome is Outcome.COMPLETED and self.verdict != Status.GOOD:
            # The run's own claim, and a part of what would confirm it is missing.
            return ExitCode.INCOMPLETE
        return EXITS[self.outcome]


def conclude(folder: RunFolder, *, owner_signing: bytes, agent_exit: int | None) -> Conclusion:
    """Verify what a run left; `agent_exit` is negative for a signal, and None when the end was not seen."""
    if not is_there(folder.receipt):
        return _without_receipt(folder, agent_exit)
    try:
        verdict = of_run(verify_file(folder.receipt, owner=owner_signing, whole=True), folder.run_id)
    except GlasshouseError as error:
        return Conclusion(outcome=Outcome.LOST, code=error.code, verdict=INVALID, problem=error.message)
    receipt = verdict.chain.receipt
    return Conclusion(
        outcome=receipt.outcome,
        code=receipt.code,
        verdict=verdict.status.value,
        receipt=receipt,
        verified=verdict,
    )


def _without_receipt(folder: RunFolder, agent_exit: int | None) -> Conclusion:
    if agent_exit is None or agent_exit <= 0:
        how = "" if agent_exit is None else f" (signal {-agent_exit})" if agent_exit else " as if it were done"
        outcome, what = Outcome.LOST, f"the runtime ended{how} without wiping and without a receipt"
    else:
        known: dict[int, Outcome] = {ExitCode.REFUSED: Outcome.REFUSED, ExitCode.INTERRUPTED: Outcome.INTERRUPTED}
        outcome = known.get(agent_exit, Outcome.FAILED)
        what = f"the runtime ended with code {agent_exit} without a receipt: nothing shows that it wiped"
    return Conclusion(outcome=outcome, code=None, verdict=NO_RECEIPT, problem=_not_wiped(folder, what))


def conclude_again(folder: RunFolder, record: RunRecord, *, owner_signing: bytes) -> Conclusion:
    """Verify again what an ended run left.

    A run without a receipt ended as its record holds: only its supervisor saw the runtime's exit code.
    """
    found = conclude(folder, owner_signing=owner_signing, agent_exit=None)
    if found.verdict != NO_RECEIPT or record.outcome is None:
        return found
    known = replace(found, outcome=Outcome(record.outcome), code=None if record.code is None else Code(record.code))
    if record.agent is None and record.place == LocalPlace.name:
        # It is recorded once it was started; a supervisor that was killed in between has recorded nothing.
        never = not is_there(folder.events) and survivors(folder.scratch, folder.out, patience_s=0) == []
        return replace(known, problem=_NEVER_PLACED if never else found.problem)
    if record.place != LocalPlace.name and not record.placed:
        return replace(known, problem=_NEVER_PLACED)
    if known.outcome is Outcome.LOST and known.code is GIVEN_UP:
        unknown = (
            f"given up, because {record.place} could not be reached: whether a runtime is there still, has wiped "
            "itself or left something behind is not known (one that is there without your broker ends with its lease); "
            f"when it is back: glasshouse machine sweep {record.place}"
        )
        return replace(known, problem=unknown)
    if known.outcome is Outcome.LOST:
        return known
    return replace(known, problem=_not_wiped(folder, "the runtime left no receipt: nothing shows that it wiped"))


def _not_wiped(folder: RunFolder, what: str) -> str:
    """Return what is known of a runtime without a receipt: what went with its processes, and what may not have."""
    place = folder.load().place
    if place != LocalPlace.name:
        return f"{what}; whether its processes on {place} are gone cannot be seen here; what stayed behind is unknown"
    alive = survivors(folder.scratch, folder.out)
    if alive:
        pids = " ".join(map(str, alive))
        memory = f"processes of it still run, and may hold keys and cleartext; end them with: kill -9 {pids}"
    elif alive is None:
        memory = "whether its processes are gone cannot be seen here"
    else:
        memory = "none of its processes is left, and its memory went back to the kernel with them"
    text = f"{what}; {memory}; what else stayed behind is unknown"
    found = named_directory.left()  # this user's workspace folders whose runtime is gone, of whichever run
    # Of a worker that still runs, nothing is taken away beneath it.
    left = found if alive else [path for path in found if not named_directory.remove_left(path)]
    if found and not left:
        return f"{text}; its workspace, which had a name, was removed"
    if not left:
        return text
    return f"{text}; these folders may hold cleartext, look at them and remove them: {', '.join(left)}"
