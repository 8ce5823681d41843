"""The closing summary of a run: how it ended, at which level, what it made, and where that is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.text import Text

from glasshouse.attestation.roots.levels import LEVELS
from glasshouse.cli.show.costs import cost_facts
from glasshouse.cli.show.output import OUTCOME, CommandOutput, again, bytes_text, counted, printable, verdict_words
from glasshouse.errors import Code
from glasshouse.evidence.receipt import Receipt, Work
from glasshouse.jobs.gates.line_notes import went_on_as
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.owner.home import Home, open_regular
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.collect import RunOutput
from glasshouse.jobs.results.run_logs import last_lines
from glasshouse.jobs.results.summary import Account, account_of, missing_checks
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.conclusion import Conclusion
from glasshouse.task.uncollected import Uncollected
from glasshouse.wire.crypto import RecipientKey
from glasshouse.wire.group import Group
from glasshouse.wire.policy import Assurance
from glasshouse.wire.states import Outcome

_STYLE = {Outcome.COMPLETED: "bold green", Outcome.INTERRUPTED: "bold yellow"}
_SHOWN_OUTPUTS = 8
# Outcomes whose reason the job itself may have printed.
_EXPLAINED_BY_LOG = frozenset({Outcome.FAILED, Outcome.LOST})
_EXPLAINED_BY_RUNTIME = frozenset({Code.PLATFORM, Code.HARDWARE_UNAVAILABLE})
_LINES = 8
_LINE_CHARS = 200
# Of a runtime's log, which comes from a machine that could write anything of any length.
_HINT_CHARS = 1000
_TAIL_BYTES = 1 << 16


def say_ended(
    output: CommandOutput,
    ended: Ended,
    *,
    sealing: RecipientKey | None,
    owner_signing: bytes | None = None,
    home: Path | None = None,
    left_out: Sequence[str] | None = None,
) -> int:
    """Print a run's end and return the exit code.

    Args:
        sealing: opens the outputs' names; without it they stay sealed.
        owner_signing: the owner's public signing key; with it and `sealing` a failed run's log tail is shown.
        home: the state home that the command was given, for the commands that are proposed.
        left_out: what of the inputs' folders was not packed, where this command packed them; None where it did not.
    """
    conclusion = ended.conclusion
    account = account_of(ended, home=Home.locate(home), sealing=sealing, owner_signing=owner_signing)
    machine = f" --machine {conclusion.blamed}" if conclusion.blamed else ""
    logs = f"glasshouse logs {ended.folder.run_id[:8]}{machine}{again(home)}"
    # What the job printed is its owner's: a program that wants it asks for it.
    log_hint = None if conclusion.outcome is Outcome.COMPLETED else logs
    output.result({**account.facts, "log_hint": log_hint, "left_out": None if left_out is None else list(left_out)})
    if output.as_json:
        return conclusion.exit_code
    _say(output, ended, account, home)
    if sealing is not None and owner_signing is not None and conclusion.outcome in _EXPLAINED_BY_LOG:
        lines, vouched = _log_tail(_blamed(ended), sealing=sealing, owner_signing=owner_signing)
        if lines:
            vouches = "" if vouched else ", for which no receipt vouches"
            output.say("")
            output.say(f"The worker's last lines{vouches}:", style="bold")
            for line in lines:
                output.say(f"  {line}")
            output.say(f"  all of it: {logs}", style="dim")
    return conclusion.exit_code


def _blamed(ended: Ended) -> RunFolder:
    """Return the machine that explains a run's end: of several, the one because of which it did not complete."""
    return ended.folder.machines()[ended.conclusion.blamed or 0]


def _say(output: CommandOutput, ended: Ended, account: Account, home: Path | None) -> None:
    conclusion, receipt = ended.conclusion, ended.conclusion.receipt
    level = receipt.assurance.value if receipt is not None and receipt.assurance is not None else None
    output.say("")
    output.say(
        f"Run {ended.record.run_id[:8]} {OUTCOME[conclusion.outcome.value]}{_why(conclusion)}"
        + (f", at assurance {level}" if level else ""),
        style=_STYLE.get(conclusion.outcome, "bold red"),
    )
    facts: dict[str, object] = {}
    if level is not None:
        facts["assurance"] = f"{level}: {LEVELS[Assurance(level)].stands}"
    if receipt is not None:
        work = ended.seen.work
        facts |= _facts(receipt, account.outputs, account.lost, None if work is None else work.total)
    if ended.record.group is not None:
        facts["ranks"] = _ranks(ended.record.group, conclusion)
    if len(account.line) > 1:
        facts["line"] = "\n".join(printable(leg.words) for leg in account.line)
    if conclusion.code is Code.HARDENING_MISSING:
        facts["missing"] = ", ".join(missing_checks(ended.record, ended.seen)) or None
    elif conclusion.code is not None and (
        conclusion.code in _EXPLAINED_BY_RUNTIME or conclusion.outcome is Outcome.REFUSED
    ):
        facts["reason"] = _runtime_hint(_blamed(ended), conclusion.code)
    if costs := cost_facts(account.rental, account.cost):
        facts["rental"] = costs.pop("rental")
        width = max(map(len, costs), default=0) + 2
        facts["of that"] = "\n".join(name.ljust(width) + text for name, text in costs.items())
    facts["receipt"] = verdict_words(conclusion.verdict, level)
    problem = conclusion.problem or account.problem
    facts["problem"] = Text(printable(problem), style="red") if problem else None
    facts["files"] = ended.folder.path
    facts["next"] = _next(ended, home)
    output.facts(facts)


def _why(end: Conclusion) -> str:
    return f" ({end.code.value})" if end.code and end.code.value != end.outcome.value else ""


def _ranks(group: Group, conclusion: Conclusion) -> str:
    """Return how many ranks there were on how many machines, and of machines that did not complete, which and why."""
    each = counted(group.ranks, "rank")
    if group.machines == 1:
        return f"{each} on one machine"
    lines = [f"{each} on each of {group.machines} machines"]
    for machine, end in enumerate(conclusion.machines):
        if end.outcome is not Outcome.COMPLETED:
            cause = "; because of it the others ended" if machine == conclusion.blamed else ""
            lines.append(f"machine {machine}: {end.outcome.value}{_why(end)}{cause}")
        if machine and end.receipt is not None and end.receipt.outputs:
            lines.append(
                f"machine {machine}: {len(end.receipt.outputs)} outputs of its own: fetch … --machine {machine}"
            )
    return "\n".join(lines)


def work_text(work: Work, planned: int | None = None, *, goes_on: bool = False) -> str:
    """Return what was trained, in how long; `planned` is shown where it was more.

    Args:
        goes_on: whether it counts what legs of a line did before: then its steps and its time are not of each other.
    """
    seconds = work.elapsed_us / 1e6
    took = f"{format_s(seconds)}; ended by: {work.stop_reason}"
    if not work.done:  # a script need not report any
        return took
    of = f" of {planned}" if planned is not None and planned > work.done else ""
    rate = f" ({work.done / seconds:.3g}/s)" if seconds else ""
    if goes_on:
        return f"{work.done}{of} {work.unit}s with those of the legs before; this one took {took}"
    return f"{work.done}{of} {work.unit}s in {format_s(seconds)}{rate}; ended by: {work.stop_reason}"


def output_line(name: str, plain_bytes: int, sha256: str) -> str:
    """Return an output as one line."""
    return f"{printable(name, keep='')}  {bytes_text(plain_bytes)}  sha256 {sha256}"


def _facts(
    receipt: Receipt, opened: Sequence[RunOutput], lost: Uncollected | None, planned: int | None
) -> dict[str, object]:
    facts: dict[str, object] = {}
    if receipt.work is not None:
        facts["work"] = work_text(receipt.work, planned, goes_on=receipt.line is not None and receipt.line.seq > 0)
    if receipt.loss is not None:
        facts["loss"] = f"{float(receipt.loss.first):.4g} → {float(receipt.loss.final):.4g}"
    if receipt.trainable is not None:
        facts["trained"] = f"{receipt.trainable:,} parameters"
    facts["outputs"] = _outputs(receipt, opened)
    if lost is not None and lost.files:
        facts["LOST"] = _lost(lost)
    if lost is not None and lost.links:
        links = ", ".join(printable(name, keep="") for name in lost.links[:_SHOWN_OUTPUTS])
        facts["links"] = f"not sent back, only files are: {links}"
    facts["left behind"] = _residue(receipt)
    total, imports = receipt.lifecycle_us["total"], receipt.training_imports_us or 0
    if total is not None:
        apart = f"; the worker's own imports took {format_s(imports / 1e6)}" if imports > 1e5 else ""
        facts["protection"] = f"{format_s(max(0, total - imports) / 1e6)} beside the training{apart}"
    return facts


def _outputs(receipt: Receipt, opened: Sequence[RunOutput]) -> str | None:
    if not receipt.outputs:
        return "none"
    if not opened:
        return f"{len(receipt.outputs)} sealed, {bytes_text(sum(one.plain_bytes for one in receipt.outputs))}"
    lines = (output_line(one.name, one.plain_bytes, f"{one.sha256.hex()[:16]}…") for one in opened)
    return "\n".join(_first(lines, len(opened)))


def _first(lines: Iterable[str], count: int) -> list[str]:
    hidden = count - _SHOWN_OUTPUTS
    return [*lines][:_SHOWN_OUTPUTS] + ([f"and {hidden} more"] if hidden > 0 else [])


def _lost(lost: Uncollected) -> Text:
    """Return what was written where no output folder is, and what to do about it."""
    named = _first((printable(name, keep="") for name in lost.named), lost.files)
    lines = [
        f"{counted(lost.files, 'file')}, {bytes_text(lost.bytes)}, written outside of the job's output folders",
        *(f"  {line}" for line in named),
        'name their folders in [params], as in outputs = ["outputs/", "checkpoints/"], and run again',
    ]
    return Text("\n".join(lines), style="bold red")


def _residue(receipt: Receipt) -> Text:
    found: dict[str, list[str]] = {"clean": [], "found": [], "unverifiable": []}
    for probe in receipt.zeroization:
        found[probe.result.value].append(probe.probe)
    if found["found"]:
        return Text("FOUND in " + ", ".join(found["found"]), style="bold red")
    unknown = f"; cannot be checked here: {', '.join(found['unverifiable'])}" if found["unverifiable"] else ""
    return Text(f"{len(found['clean'])} of {len(receipt.zeroization)} probes clean{unknown}")


def _next(ended: Ended, home: Path | None) -> str:
    at, name, receipt = again(home), ended.folder.run_id[:8], ended.conclusion.receipt
    later = went_on_as(Home.locate(home), ended.record)
    if later is not None:
        return f"it went on as {later}: glasshouse status {later}{at}, glasshouse verify {later}{at}"
    if receipt is None or ended.conclusion.code in _EXPLAINED_BY_RUNTIME:
        again_there = f"glasshouse resume {name}{at}; or " if ended.record.line is not None else ""
        return f"{again_there}see the runtime's own log: {_blamed(ended).runtime_log}"
    outputs = f"glasshouse fetch {name} -o DIR{at}, " if receipt.outputs else ""
    if ended.record.line is not None and ended.conclusion.outcome is Outcome.INTERRUPTED:
        outputs = f"glasshouse resume {name}{at}, {outputs}"
    logs = f"glasshouse logs {name}{at}, " if receipt.segments else ""  # none of a run that was refused, for one
    return f"{outputs}{logs}glasshouse verify {name}{at}"


def _log_tail(folder: RunFolder, *, sealing: RecipientKey, owner_signing: bytes) -> tuple[list[str], bool]:
    """Return the last lines that an ended run's worker printed, and whether its receipt vouches for them.

    A log that cannot be read, or that its receipt contradicts, has none.
    """
    found, vouched = last_lines(folder, sealing=sealing, owner_signing=owner_signing)
    # What a progress bar drew over is not what stood there at the end.
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in found]
    return [_cut(line, _LINE_CHARS) for line in lines if line][-_LINES:], vouched


def _runtime_hint(folder: RunFolder, code: Code) -> str | None:
    """Return what a runtime wrote into its log beneath the code that it ended with; None where it wrote nothing.

    Nothing vouches for it: the log is neither sealed nor signed.
    """
    try:
        with open_regular(folder.runtime_log) as log:
            log.seek(-min(_TAIL_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return None
    named = f"glasshouse runtime: {code.value}"
    after = max((number for number, line in enumerate(lines, 1) if line == named), default=len(lines))
    return _cut(lines[after], _HINT_CHARS) if after < len(lines) else None


def _cut(line: str, most: int) -> str:
    text = printable(line.expandtabs(4), keep="")
    return text if len(text) <= most else text[: most - 1] + "…"
