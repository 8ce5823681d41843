"""The end of a run on the owner's side: whether there is a receipt, whether it holds, and what it records.

Laws: a group has completed when all of its machines have; of one that has not, the machine to blame is one that was
not refused or ended for another's sake; receipts that are not one group's are refused.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, ExitCode, GlasshouseError, PackageError, UsageError, VerificationError
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES, Receipt
from glasshouse.jobs.owner.home import Home, is_there, open_regular
from glasshouse.jobs.owner.rundir import GIVEN_UP, RunFolder, RunRecord
from glasshouse.jobs.verify.hardware.completed import complete_bundle
from glasshouse.jobs.verify.run_files import check_group, sealed_files, verify_log_in, why_unreadable
from glasshouse.jobs.verify.verdict import EXITS, Status, Verdict, verify_bundle
from glasshouse.providers.place.local import LocalPlace
from glasshouse.runtime.confine.mounts import processes_are_visible
from glasshouse.runtime.kernel import REAL
from glasshouse.runtime.watchdog.session_record import NAME as SESSION_NAME
from glasshouse.runtime.watchdog.session_record import SessionRecord
from glasshouse.runtime.worker import named_directory
from glasshouse.wire.states import Outcome

NO_RECEIPT = "no-receipt"
_NEVER_PLACED = "no runtime was placed, and no key was released"
INVALID = "invalid"
_WORST_FIRST = (INVALID, NO_RECEIPT, Status.INCOMPLETE.value, Status.NOT_COMPLETED.value, Status.GOOD.value)
# The kernel takes a moment to end a process that was killed, with gigabytes of memory.
_PATIENCE_S = 3.0
_LOOK_S = 0.05
_PROC = Path("/proc")
_MAX_RECORD_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """How a run ended, as far as its owner can see."""

    outcome: Outcome  # from the verified receipt; without one, `lost` or by the runtime's exit code
    code: Code | None  # why it did not complete
    verdict: str  # `good`, `incomplete`, `not-completed`, `invalid` or `no-receipt`
    verified: Verdict | None = None  # the verdict of verification
    problem: str = ""  # why there is no verified receipt, for people
    machines: tuple[Conclusion, ...] = ()  # of a group: how each of its machines ended, in order
    blamed: int | None = None  # of a group that did not complete: the machine because of which

    @property
    def receipt(self) -> Receipt | None:
        """The verified receipt."""
        return None if self.verified is None else self.verified.chain.receipt

    @property
    def exit_code(self) -> ExitCode:
        """What a command that waited for this run exits with; only a whole, verified, completed run is 0."""
        if self.verdict == INVALID:
            return ExitCode.VERIFICATION_FAILED
        if self.outcome is Outcome.COMPLETED and self.verdict != Status.GOOD:
            # The run's own claim, and a part of what would confirm it is missing.
            return ExitCode.INCOMPLETE
        return EXITS[self.outcome]


def read_receipt(folder: RunFolder) -> bytes:
    """Return the receipt in a run's folder; raises `UsageError` (`file-missing`), also for a link in its place."""
    try:
        with open_regular(folder.receipt) as stream:
            return stream.read(MAX_BUNDLE_BYTES + 1)
    except OSError as error:
        why = why_unreadable(folder.receipt, error)
        raise UsageError(Code.FILE_MISSING, f"cannot read {folder.receipt}: {why}") from None


def verify_run(folder: RunFolder, *, owner: bytes, now_us: int | None = None) -> Verdict:
    """Verify receipt, log and heads in a run's folder; raises as `read_receipt`, `verify_bundle`, `verify_log_in`."""
    verdict = verify_bundle(read_receipt(folder), owner=owner, now_us=now_us, run_id=folder.run_id)
    log, heads = verify_log_in(verdict.chain, folder.out)
    return replace(verdict, log=log, heads=heads)


def verify_sealed_in(verdict: Verdict, folder: Path, *, expected: bool) -> Verdict:
    """Compare the sealed outputs and log segments in a receipt's folder with receipt and log, without opening them.

    Unless `expected`, a receipt that lies alone is left at that; without a log, which names the segments, so are they.

    Raises:
        PackageError: `output-tampered` for a file that is missing, is a link, a folder or a pipe, or is not the one
            that the receipt or the log names.
    """
    outputs, segments = sealed_files(verdict.chain.receipt, verdict.log)
    for named, by in ((outputs, "receipt"), (segments, "log")):
        if not expected and not any(is_there(folder / name) for name, _, _ in named):
            continue
        for name, size, digest in named:
            _check_sealed(folder / name, size, digest, by)
        if by == "receipt":
            verdict = replace(verdict, outputs_match=len(named), unnamed=_unnamed(folder / "outputs", len(named)))
        elif verdict.log:
            unnamed = (*verdict.unnamed, *_unnamed(folder / "log", len(named)))
            verdict = replace(verdict, segments_match=len(named), unnamed=unnamed)
    return verdict


def _unnamed(folder: Path, named: int) -> tuple[str, ...]:
    """Return how many entries a folder has beside those that are named, all of which are there, in words."""
    more = sum(1 for _ in folder.iterdir()) - named if folder.is_dir() else 0
    return (f"what else lies in {folder.name}/ ({more})",) if more else ()


def _check_sealed(path: Path, size: int, digest: bytes, by: str) -> None:
    try:
        with open_regular(path) as stream:
            same = os.fstat(stream.fileno()).st_size == size
            same = same and hashlib.file_digest(stream, "sha256").digest() == digest
    except OSError as error:
        raise PackageError(
            Code.OUTPUT_TAMPERED, f"{path} is named by the {by} but cannot be read: {why_unreadable(path, error)}"
        ) from None
    if not same:
        raise PackageError(Code.OUTPUT_TAMPERED, f"{path} is not the file that the {by} names")


def conclude(
    folder: RunFolder, *, owner_signing: bytes, agent_exit: int | None, home: Home | None = None
) -> Conclusion:
    """Verify what a run left; `agent_exit` is negative for a signal, and None when the end was not seen."""
    if not is_there(folder.receipt):
        return _without_receipt(folder, agent_exit)
    try:
        complete_bundle(folder, home)
        verdict = verify_run(folder, owner=owner_signing)
    except GlasshouseError as error:
        return Conclusion(outcome=Outcome.LOST, code=error.code, verdict=INVALID, problem=error.message)
    code = verdict.chain.receipt.code
    return Conclusion(outcome=verdict.outcome, code=code, verdict=verdict.status.value, verified=verdict)


def _without_receipt(folder: RunFolder, agent_exit: int | None) -> Conclusion:
    if agent_exit is None or agent_exit <= 0:
        how = "" if agent_exit is None else f" (signal {-agent_exit})" if agent_exit else " as if it were done"
        outcome, what = Outcome.LOST, f"the runtime ended{how} without wiping and without a receipt"
    else:
        known: dict[int, Outcome] = {ExitCode.REFUSED: Outcome.REFUSED, ExitCode.INTERRUPTED: Outcome.INTERRUPTED}
        outcome = known.get(agent_exit, Outcome.FAILED)
        what = f"the runtime ended with code {agent_exit} without a receipt: nothing shows that it wiped"
    return Conclusion(outcome=outcome, code=None, verdict=NO_RECEIPT, problem=_not_wiped(folder, what))


def conclude_again(
    folder: RunFolder, record: RunRecord, *, owner_signing: bytes, home: Home | None = None
) -> Conclusion:
    """Verify again what an ended run left; how one without a receipt ended is in its record: its supervisor saw it."""
    found = conclude(folder, owner_signing=owner_signing, agent_exit=None, home=home)
    if found.verdict != NO_RECEIPT or record.outcome is None:
        return found
    known = replace(found, outcome=Outcome(record.outcome), code=None if record.code is None else Code(record.code))
    if never_placed(folder, record):
        return replace(known, problem=_NEVER_PLACED)
    if record.agent is None and record.place == LocalPlace.name:
        return replace(known, problem=found.problem)
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


def never_placed(folder: RunFolder, record: RunRecord) -> bool:
    """Return whether it is known of a run without a receipt that no runtime was ever started for it."""
    if record.place != LocalPlace.name:
        return not record.placed
    # It is recorded once it was started; a supervisor that was killed in between has recorded nothing.
    unseen = record.agent is None and not is_there(folder.events)
    return unseen and survivors(folder.scratch, folder.out, patience_s=0) == []


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


def conclude_run(
    folder: RunFolder, record: RunRecord | None, *, owner_signing: bytes, home: Home | None = None
) -> Conclusion:
    """Conclude a run on any number of machines from what they left; `record` is None where its end was not seen."""

    def of(one: RunFolder) -> Conclusion:
        if record is None:
            return conclude(one, owner_signing=owner_signing, agent_exit=None, home=home)
        return conclude_again(one, one.load(), owner_signing=owner_signing, home=home)

    ends = [of(one) for one in folder.machines()]
    if len(ends) == 1 and (ends[0].verified is None or ends[0].verified.machines == 1):
        return ends[0]
    blamed = None if record is None else record.blamed
    return together(ends, first=() if blamed is None else (blamed,))


def together(ends: Sequence[Conclusion], *, first: Sequence[int] = ()) -> Conclusion:
    """Return how a group ended, with machine 0's receipt; `first` has machines in the order in which they ended."""
    blamed = _blamed(ends, first)
    problems = {number: end.problem for number, end in enumerate(ends) if end.problem}
    # What still runs on one of them, or stayed there, is to be read, whichever of them is to blame.
    problem = next(iter(problems.values()), "")
    if len(problems) > 1:
        problem = "; ".join(f"machine {number}: {text}" for number, text in problems.items())
    verdict = min((end.verdict for end in ends), key=_WORST_FIRST.index)
    outcome, code = Outcome.COMPLETED, None
    if blamed is not None:
        outcome, code = ends[blamed].outcome, ends[blamed].code
    chains = [end.verified.chain for end in ends if end.verified is not None]
    try:
        if chains and len(chains) == len(ends):
            check_group(chains)
    except VerificationError as error:
        code, problem = error.code, error.message
        if error.code is Code.CHAIN_INCOMPLETE:
            verdict = Status.INCOMPLETE.value
        else:
            verdict, outcome = INVALID, Outcome.LOST
    return replace(
        # What one machine made, it made together with the others: of a group that does not hold, nothing counts.
        ends[0] if verdict != INVALID else replace(ends[0], verified=None),
        outcome=outcome,
        code=code,
        verdict=verdict,
        problem=problem,
        machines=tuple(ends),
        blamed=blamed,
    )


def _blamed(ends: Sequence[Conclusion], first: Sequence[int]) -> int | None:
    order = [*first, *(machine for machine in range(len(ends)) if machine not in first)]
    broken = [machine for machine in order if ends[machine].outcome is not Outcome.COMPLETED]
    causes = [machine for machine in broken if ends[machine].code is not Code.RANK_REFUSED]
    return next(iter(causes or broken), None)


def survivors(
    scratch: Path, out: Path, *, patience_s: float | None = None, processes: Path = _PROC
) -> list[int] | None:
    """Return the ids of a run's processes that live on after a few seconds, or `patience_s`; None if that is not seen.

    Those of the runtime are found by the folder on their command lines; what a script started, or made of its worker,
    by its session. What it started outside of that is not among them: it can begin a session in a process namespace,
    with which all in it ends, and where no system calls are filtered.
    """
    deadline = time.monotonic() + (_PATIENCE_S if patience_s is None else patience_s)
    while found := _alive(scratch, out, processes):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    return found


def _alive(scratch: Path, out: Path, processes: Path) -> list[int] | None:
    found, kept = _running(os.fsencode(f"pycache_prefix={scratch}"), processes), _of_session(out / SESSION_NAME)
    return None if found is None or kept is None else sorted({*found, *kept})


def _of_session(record: Path) -> list[int] | None:
    try:
        with open_regular(record) as file:
            return SessionRecord.from_line(file.read(_MAX_RECORD_BYTES)).survivors()
    except FileNotFoundError:
        return []  # it was given nothing, or is gone
    except (OSError, ValueError):
        return None


def _running(argument: bytes, processes: Path) -> list[int] | None:
    try:
        listed = [int(path.name) for path in processes.iterdir() if path.name.isdecimal()]
    except OSError:
        return None
    # `hidepid` hides what is not dumpable also from others of its user: the runtime too.
    hidden = processes == _PROC and os.geteuid() != 0 and not processes_are_visible(REAL.read)
    found = []
    for pid in listed:
        try:
            # A zombie has no command line any more.
            if argument in (processes / str(pid) / "cmdline").read_bytes().split(b"\0"):
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            hidden = True
    return None if hidden and not found else sorted(found)


def record_end(
    folder: RunFolder, conclusion: Conclusion, progress: dict[str, Any] | None, *, lost: Code | None = None
) -> RunRecord:
    """Record how a run, or a machine of one, ended; `lost` is the code where it left no receipt."""
    code = lost if conclusion.code is None and conclusion.verdict == NO_RECEIPT else conclusion.code
    receipt = conclusion.receipt
    if progress is not None and receipt is not None and receipt.work is not None:
        # What was done within a second of the last report is in the receipt alone.
        progress = progress | {"unit": receipt.work.unit, "done": receipt.work.done}
        progress |= {} if receipt.loss is None else {"loss": receipt.loss.final}
        # A log keeps the first total, of a script that trains again too.
        progress |= {} if (progress["total"] or progress["done"]) >= progress["done"] else {"total": None}
    return folder.end(
        outcome=conclusion.outcome.value,
        code=None if code is None else code.value,
        verdict=conclusion.verdict,
        exit_code=int(conclusion.exit_code),
        progress=progress,
        blamed=conclusion.blamed,
    )
