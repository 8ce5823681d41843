"""Verifies a run on several machines: the receipt of each, and that together they are one whole group."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.errors import Code, ExitCode, VerificationError
from glasshouse.jobs.owner.files import is_there
from glasshouse.jobs.owner.owner_identity import OwnerPublic
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.verify.documents import of_run, verify_file
from glasshouse.jobs.verify.run_files import verify_sealed_in
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.jobs.verify.whole_group import check_group
from glasshouse.wire.canonical import Json
from glasshouse.wire.group import Group
from glasshouse.wire.states import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupVerdict:
    """Receipts of all machines of one group, each verified."""

    group: Group  # as machine 0 has it
    machines: tuple[Verdict, ...]  # in order

    @property
    def status(self) -> Status:
        """What the weakest of the receipts is worth."""
        found = {one.status for one in self.machines}
        return next(status for status in (Status.INCOMPLETE, Status.NOT_COMPLETED, Status.GOOD) if status in found)

    @property
    def assurance(self) -> str:
        """The level, where all machines have the same."""
        return " and ".join(sorted({one.assurance for one in self.machines}))

    @property
    def exit_code(self) -> ExitCode:
        """Of a machine that did not complete, before those that ended because of it; the same as `run` exits with."""
        ends = [one for one in self.machines if one.outcome is not Outcome.COMPLETED]
        causes = [one for one in ends if one.chain.receipt.code is not Code.RANK_REFUSED]
        worst = [*causes, *ends, *(one for one in self.machines if one.status is not Status.GOOD)]
        return worst[0].exit_code if worst else ExitCode.DONE

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level."""
        group = self.group
        ranks = f"{group.ranks} rank" + ("" if group.ranks == 1 else "s")
        whole = (
            f"all {group.machines} machines of group {group.id.hex()[:8]}, {ranks} each (assurance {self.assurance})"
        )
        text = f"Incomplete on {whole}: nothing contradicts it, but a receipt lacks what would vouch for it."
        if self.status is Status.GOOD:
            text = f"Authentic and complete on {whole}: the run completed."
        elif self.status is Status.NOT_COMPLETED:
            text = f"Authentic on {whole}: the run did not complete on every one of them."
        return f"{text} {self.machines[0].proves}"

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        group = self.group
        return {
            "assurance": self.assurance,
            "group": {"id": group.id.hex(), "machines": group.machines, "ranks": group.ranks},
            "kind": "group",
            "machines": [one.to_json() for one in self.machines],
            "status": self.status.value,
            "verdict": self.sentence,
        }


def verify_group(run: RunFolder, first: Verdict, *, owner: OwnerPublic, now_us: int | None = None) -> GroupVerdict:
    """Verify the other machines of a run as machine 0 was, and that all of them are one group.

    Raises:
        VerificationError: as `verify_file`; `incomplete` for a machine without a receipt, `group-mismatch`, or
            `receipt-invalid` for a receipt of another run.
        PackageError: as `verify_sealed_in`.
    """
    machines = [first, *(_verified(one, owner, now_us) for one in run.machines()[1:])]
    for machine, (one, folder) in enumerate(zip(machines, run.machines(), strict=True)):
        group = one.chain.token.group
        if one.chain.receipt.run_id != folder.run_id or group is None or group.machine != machine:
            raise VerificationError(Code.CHAIN_RECEIPT, f"the receipt of machine {machine} is of another run")
    return GroupVerdict(group=check_group([one.chain for one in machines]), machines=tuple(machines))


def _verified(folder: RunFolder, owner: OwnerPublic, now_us: int | None) -> Verdict:
    if not is_there(folder.receipt):
        raise VerificationError(Code.CHAIN_INCOMPLETE, f"a machine of the group left no receipt in {folder.path}")
    verdict = verify_file(folder.receipt, owner=owner, whole=True, now_us=now_us)
    return verify_sealed_in(of_run(verdict, folder.run_id), folder.out, expected=True)
