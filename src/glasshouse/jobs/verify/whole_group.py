"""How the machines of one group ended, taken together: which is to blame, and whether their receipts belong together.

Laws: a group has completed when all of its machines have; of one that has not, the machine to blame is one that was
not refused or ended for another's sake; receipts that are not one group's are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from glasshouse.errors import Code, VerificationError
from glasshouse.jobs.owner.rundir import RunFolder, RunRecord
from glasshouse.jobs.verify.conclusion import INVALID, NO_RECEIPT, Conclusion, conclude, conclude_again
from glasshouse.jobs.verify.receipt_chain import Chain
from glasshouse.jobs.verify.verdict import Status
from glasshouse.wire.group import Group
from glasshouse.wire.states import Outcome

_WORST_FIRST = (INVALID, NO_RECEIPT, Status.INCOMPLETE.value, Status.NOT_COMPLETED.value, Status.GOOD.value)


def check_group(chains: Sequence[Chain]) -> Group:
    """Check that verified receipts are one group's: all of its machines, each once; return it as machine 0 has it.

    The group stands in each launch token, which the broker signed, and the evidence and the receipt of a machine
    are bound to its token.

    Raises:
        VerificationError: `group-mismatch`; `incomplete` when nothing contradicts it and a machine is missing.
    """
    groups = [chain.token.group for chain in chains]
    found = [group for group in groups if group is not None]
    if not found or len(found) != len(groups):
        raise VerificationError(Code.GROUP_MISMATCH, "a receipt of a run that belongs to no group")
    for what, values in (
        ("group", {group.id for group in found}),
        ("number of machines or ranks", {(group.machines, group.ranks) for group in found}),
        ("deployment", {chain.token.deployment for chain in chains}),
        ("package", {chain.token.manifest_sha256 for chain in chains}),
        ("policy", {chain.token.policy_sha256 for chain in chains}),
        ("broker", {chain.delegation.broker_public for chain in chains}),
    ):
        if len(values) != 1:
            raise VerificationError(Code.GROUP_MISMATCH, f"receipts of more than one {what}")
    here = [group.machine for group in found]
    if len(set(here)) != len(here):
        raise VerificationError(Code.GROUP_MISMATCH, "two receipts of one machine")
    missing = sorted(set(range(found[0].machines)) - set(here))
    if missing:
        named = ", ".join(map(str, missing))
        raise VerificationError(Code.CHAIN_INCOMPLETE, f"no receipt of machine {named} of the group's {len(groups)}")
    return found[here.index(0)]


def conclude_run(folder: RunFolder, record: RunRecord | None, *, owner_signing: bytes) -> Conclusion:
    """Conclude a run on any number of machines from what they left; `record` is None where its end was not seen."""

    def of(one: RunFolder) -> Conclusion:
        if record is None:
            return conclude(one, owner_signing=owner_signing, agent_exit=None)
        return conclude_again(one, one.load(), owner_signing=owner_signing)

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
        # What one machine made, it made together with the others: of a group that does not hold, nothing is believed.
        ends[0] if verdict != INVALID else replace(ends[0], receipt=None, verified=None),
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
