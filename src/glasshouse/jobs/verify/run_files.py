"""Holds the files of a run's folder to its receipt: event log and countersigned heads; and receipts of one group."""

from __future__ import annotations

import errno
import stat
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from glasshouse.errors import Code, FormatError, VerificationError
from glasshouse.evidence.events import Event, EventType
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead
from glasshouse.evidence.log import VerifiedLog, read_lines, verify_heads, verify_log
from glasshouse.evidence.receipt import Receipt
from glasshouse.jobs.owner.home import is_there, open_regular
from glasshouse.jobs.verify.hardware.repeated import check_apart
from glasshouse.jobs.verify.receipt_chain import Chain
from glasshouse.wire.group import Group
from glasshouse.wire.states import Outcome

LOG_NAME = "events.log"
HEADS_NAME = "heads.log"
# In this order: heads are held to the log, so the log is read first.
LOGS = (LOG_NAME, HEADS_NAME)


def verify_log_beside(
    chain: Chain, lines: Iterable[bytes], heads: Iterable[bytes] | None = None
) -> tuple[VerifiedLog, int | None]:
    """Check that the event log beside a bundle records the same; return it, and how many heads were checked.

    Args:
        lines: of `events.log`, as `read_lines` yields them.
        heads: lines of `heads.log`, each with its line end; None when it is not looked at.

    Raises:
        VerificationError: `log-invalid` or `state-illegal`.
    """
    receipt, log = chain.receipt, verify_log(lines, chain.head)
    probes = [(e.body["probe"], e.body["result"], e.body["detail"]) for e in log.of(EventType.PROBE)]
    outputs = [
        (e.body["kind"], e.body["class"], e.body["bytes"], e.body["sealed_bytes"], e.body["sealed_sha256"])
        for e in log.of(EventType.OUTPUT)
    ]
    outputs_named = [(o.kind, o.of, o.plain_bytes, o.sealed_bytes, o.sealed_sha256.hex()) for o in receipt.outputs]
    digests = {
        "ear": receipt.ear_sha256,
        "environment": receipt.environment_sha256,
        "evidence": receipt.evidence_sha256,
        "manifest": receipt.manifest_sha256,
        "measurement": receipt.measurement,
        "token": chain.token_sha256,
    }
    known = {subject: digest.hex() for subject, digest in digests.items() if digest is not None}
    work, done = receipt.work, log.done
    for what, holds in (
        ("outcome", (log.outcome, log.code) == (receipt.outcome, receipt.code)),
        ("probes", probes == [(p.probe, p.result.value, p.detail) for p in receipt.zeroization]),
        ("outputs", outputs == outputs_named),
        ("log segments", len(log.of(EventType.SEGMENT)) == receipt.segments),
        # Of the unit of its own progress, and not less.
        ("work", work is None or done is None or (work.unit == done[0] and work.done >= done[1])),
        ("digests", all(known.get(str(e.body["subject"]), "") == e.body["sha256"] for e in log.of(EventType.DIGEST))),
    ):
        if not holds:
            raise VerificationError(Code.LOG_INVALID, f"log and receipt have different {what}")
    return log, None if heads is None else _verify_heads(chain, heads, log)


def verify_log_in(
    chain: Chain, folder: Path, *, required: Collection[str] = LOGS
) -> tuple[VerifiedLog | None, int | None]:
    """Check the `events.log` and `heads.log` of a folder as `verify_log_beside` does; what is not there is None.

    One that is not `required` is checked if something stands under its name.

    Raises:
        VerificationError: `log-invalid` or `state-illegal`; `log-invalid` also for a file that is not there or is a
            link, a folder or a pipe.
    """
    wanted = [name for name in LOGS if name in required or is_there(folder / name)]
    if LOG_NAME not in wanted:
        return None, None
    with ExitStack() as opened:
        try:
            streams = [opened.enter_context(open_regular(folder / name)) for name in wanted]
            heads = iter(partial(streams[-1].readline, MAX_COUNTERSIGNED_HEAD_BYTES + 2), b"")
            return verify_log_beside(chain, read_lines(streams[0]), heads if len(streams) > 1 else None)
        except OSError as error:
            path = Path(error.filename or folder)
            raise VerificationError(
                Code.LOG_INVALID, f"{path} belongs to the run and cannot be read: {why_unreadable(path, error)}"
            ) from None


def sealed_files(
    receipt: Receipt, log: VerifiedLog | None
) -> tuple[list[tuple[str, int, bytes]], list[tuple[str, int, bytes]]]:
    """Return name, size and digest of the outputs that a receipt names, and of the segments that its log does."""
    outputs = [(o.file_name, o.sealed_bytes, o.sealed_sha256) for o in receipt.outputs]
    segments = [
        (segment_name(event), int(str(event.body["sealed_bytes"])), bytes.fromhex(str(event.body["sealed_sha256"])))
        for event in (log.of(EventType.SEGMENT) if log else ())
    ]
    return outputs, segments


def segment_name(event: Event) -> str:
    """Return where a log segment lies in the run's folder, from the event that names it."""
    return f"log/{int(str(event.body['sequence'])):04d}.sealed"


def why_unreadable(path: Path, error: OSError) -> str:
    """Return why a file was not opened: a link, a folder or a pipe in its place is named as such."""
    if error.errno == errno.ENOENT:
        return "there is no such file"
    if is_there(path) and not stat.S_ISREG(path.lstat().st_mode):
        return "not a regular file"
    return (error.strerror or type(error).__name__).lower()


def _verify_heads(chain: Chain, lines: Iterable[bytes], log: VerifiedLog) -> int:
    """Check the countersigned heads of a run and return how many there are."""
    heads: list[CountersignedHead] = []
    for line in lines:
        if not chain.claims:
            raise VerificationError(Code.LOG_INVALID, "countersigned heads of a run whose key was never attested")
        if not line.endswith(b"\n"):
            raise VerificationError(Code.LOG_INVALID, f"line {len(heads)} of heads is cut short or too long")
        if len(heads) == log.head.size:  # before it is kept: copies of one genuine line would fill the memory
            raise VerificationError(Code.LOG_INVALID, "more heads than the log has events")
        try:
            found = CountersignedHead.parse(
                line[:-1],
                broker_public=chain.delegation.broker_public,
                evidence_public=chain.claims.evidence_public,
            )
        except FormatError as error:
            raise VerificationError(Code.LOG_INVALID, f"a line of heads that is none: {error.message}") from None
        heads.append(found)
    verify_heads([found.head for found in heads], log)
    _check_unbroken(chain, heads)
    return len(heads)


def _check_unbroken(chain: Chain, heads: Sequence[CountersignedHead]) -> None:
    """No head that the broker countersigned was taken out, and the last one is the bundle's."""
    size = time_us = 0
    for found in heads:
        # A full disk can lose a line of a run that fails of it; of one that completed every line is there.
        lost = found.previous_size > size and chain.receipt.outcome is not Outcome.COMPLETED
        if (found.previous_size != size and not lost) or found.time_us < time_us:
            raise VerificationError(Code.LOG_INVALID, f"head {found.head.sequence} does not follow the one before it")
        size, time_us = found.head.size, found.time_us
    if chain.countersigned_head and (not heads or heads[-1] != chain.countersigned_head):
        raise VerificationError(Code.LOG_INVALID, "the last of the heads is not the one that the receipt came with")


def check_group(chains: Sequence[Chain], *, whole: bool = True) -> Group:
    """Check that verified receipts are one group's: all of its machines, each once; return it as machine 0 has it.

    The group stands in each launch token, which the broker signed, and the evidence and the receipt of a machine
    are bound to its token.

    Args:
        whole: whether each of its machines must be there; without, any of them is returned.

    Raises:
        VerificationError: `group-mismatch`; `evidence-invalid` where two show one device; `incomplete` when nothing
            contradicts it and a machine is missing.
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
    check_apart(
        (one.hardware, one.evidence, one.ear)
        for one in chains
        if one.hardware and one.evidence and one.ear and "hardware" not in one.missing
    )
    missing = sorted(set(range(found[0].machines)) - set(here))
    if missing and whole:
        named = ", ".join(map(str, missing))
        raise VerificationError(Code.CHAIN_INCOMPLETE, f"no receipt of machine {named} of the group's {len(groups)}")
    return min(found, key=lambda group: group.machine)
