"""The closing summary of a run: how it ended, at which level, what came out, and where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from glasshouse.cli.options import again
from glasshouse.cli.show.costs import cost_facts
from glasshouse.cli.show.log_tail import last_words, runtime_hint
from glasshouse.cli.show.output import Output, printable
from glasshouse.cli.show.words import ASSURANCE, OUTCOME, bytes_text, verdict_words
from glasshouse.errors import Code
from glasshouse.jobs.owner.durations import format_s
from glasshouse.jobs.results.summary import Account, missing_checks
from glasshouse.wire.states import Outcome

if TYPE_CHECKING:
    from glasshouse.evidence.receipt import Receipt
    from glasshouse.jobs.owner.rundir import RunFolder
    from glasshouse.jobs.results.collect import Opened
    from glasshouse.jobs.supervise.supervision import Ended
    from glasshouse.jobs.verify.conclusion import Conclusion
    from glasshouse.task.uncollected import Uncollected
    from glasshouse.wire.group import Group
    from glasshouse.wire.hpke import RecipientKey

__all__ = ["say_ended"]

_STYLE = {Outcome.COMPLETED: "bold green", Outcome.INTERRUPTED: "bold yellow"}
_SHOWN_OUTPUTS = 8
# Outcomes whose reason the job itself may have printed.
_WORDS_OF = frozenset({Outcome.FAILED, Outcome.LOST})


def say_ended(
    output: Output,
    ended: Ended,
    *,
    sealing: RecipientKey | None,
    owner_signing: bytes | None = None,
    home: Path | None = None,
    left_out: Sequence[str] | None = None,
) -> int:
    """Print a run's end and return the exit code.

    Args:
        output: where.
        ended: the run.
        sealing: opens the outputs' names; without it they stay sealed.
        owner_signing: the owner's public signing key; with it and `sealing` a failed run's last words are shown.
        home: the state home that the command was given, for the commands that are proposed.
        left_out: what of the inputs' folders was not packed, where this command packed them; None where it did not.
    """
    from glasshouse.jobs.owner.home import Home
    from glasshouse.jobs.results.summary import account_of

    conclusion = ended.conclusion
    account = account_of(ended, home=Home.locate(home), sealing=sealing, owner_signing=owner_signing)
    # What the job printed is its owner's: a program that wants it asks for it.
    log_hint = None if conclusion.outcome is Outcome.COMPLETED else _log_command(ended, home)
    output.result({**account.facts, "log_hint": log_hint, "left_out": None if left_out is None else list(left_out)})
    if not output.as_json:
        _say(output, ended, account, home, cost_facts(account.rental, account.cost))
        if sealing is not None and owner_signing is not None and conclusion.outcome in _WORDS_OF:
            machine = _speaker(ended)
            said = last_words(machine, machine.load(), sealing=sealing, owner_signing=owner_signing)
            _say_last_words(output, *said, everything=_log_command(ended, home))
    return conclusion.exit_code


def _say_last_words(output: Output, lines: Sequence[str], vouched: bool, *, everything: str) -> None:
    if not lines:
        return
    output.say("")
    output.say("The worker's last words" + ("" if vouched else ", for which no receipt vouches") + ":", style="bold")
    for line in lines:
        output.say(f"  {line}")
    output.say(f"  all of it: {everything}", style="dim")


def _log_command(ended: Ended, home: Path | None) -> str:
    machine = f" --machine {ended.conclusion.blamed}" if ended.conclusion.blamed else ""
    return f"glasshouse logs {ended.folder.run_id[:8]}{machine}{again(home)}"


def _speaker(ended: Ended) -> RunFolder:
    """Return whose words explain a run's end: of several machines, the one because of which it did not complete."""
    return ended.folder.machines()[ended.conclusion.blamed or 0]


def _say(output: Output, ended: Ended, account: Account, home: Path | None, costs: Mapping[str, str]) -> None:
    conclusion, receipt = ended.conclusion, ended.conclusion.receipt
    level = receipt.assurance.value if receipt is not None and receipt.assurance is not None else None
    outcome = OUTCOME[conclusion.outcome.value]
    why = f" ({conclusion.code.value})" if conclusion.code and conclusion.code.value != conclusion.outcome.value else ""
    output.say("")
    output.say(
        f"Run {ended.record.run_id[:8]} {outcome}{why}" + (f", at assurance {level}" if level else ""),
        style=_STYLE.get(conclusion.outcome, "bold red"),
    )
    facts: dict[str, object] = {}
    if level is not None:
        facts["assurance"] = f"{level}: {ASSURANCE[level]}"
    if receipt is not None:
        facts |= _facts(receipt, account.outputs, account.lost, _planned(ended))
    if ended.record.group is not None:
        facts["ranks"] = _ranks(ended.record.group, conclusion)
    if conclusion.code is Code.HARDENING_MISSING:
        facts["missing"] = ", ".join(missing_checks(ended.record, ended.seen)) or None
    if conclusion.code is Code.PLATFORM:
        facts["reason"] = runtime_hint(_speaker(ended), conclusion.code)
    if costs:
        facts |= {"rental": costs["rental"], "of that": "\n".join(_table(costs))}
    facts["receipt"] = verdict_words(conclusion.verdict, level)
    problem = conclusion.problem or account.problem
    facts["problem"] = Text(printable(problem), style="red") if problem else None
    facts["files"] = ended.folder.path
    facts["next"] = _next(ended, home)
    output.facts(facts)


def _table(costs: Mapping[str, str]) -> list[str]:
    width = max(map(len, costs)) + 2
    return [name.ljust(width) + text for name, text in costs.items() if name != "rental"]


def _ranks(group: Group, conclusion: Conclusion) -> str:
    """Say how many ranks there were on how many machines, and of machines that did not complete, which and why."""
    each = f"{group.ranks} rank" + ("" if group.ranks == 1 else "s")
    if group.machines == 1:
        return f"{each} on one machine"
    lines = [f"{each} on each of {group.machines} machines"]
    for machine, end in enumerate(conclusion.machines):
        if end.outcome is not Outcome.COMPLETED:
            why = f" ({end.code.value})" if end.code and end.code.value != end.outcome.value else ""
            cause = "; because of it the others ended" if machine == conclusion.blamed else ""
            lines.append(f"machine {machine}: {end.outcome.value}{why}{cause}")
        if machine and end.receipt is not None and end.receipt.outputs:
            lines.append(
                f"machine {machine}: {len(end.receipt.outputs)} outputs of its own: fetch … --machine {machine}"
            )
    return "\n".join(lines)


def _planned(ended: Ended) -> int | None:
    """Return how much work was planned, where a run ended before it was done."""
    work = ended.seen.work
    return None if work is None or work.total is None or work.done >= work.total else work.total


def _facts(
    receipt: Receipt, opened: Sequence[Opened], lost: Uncollected | None, planned: int | None
) -> dict[str, object]:
    facts: dict[str, object] = {}
    if receipt.work is not None:
        work = receipt.work
        seconds = work.elapsed_us / 1e6
        rate = f" ({work.done / seconds:.3g}/s)" if seconds else ""
        of = f" of {planned}" if planned is not None and planned > work.done else ""
        done = f"{work.done}{of} {work.unit}s in " if work.done else ""  # a script need not report any
        facts["work"] = f"{done}{format_s(seconds)}{rate if done else ''}; ended by: {work.stop_reason}"
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
    results = [probe.result.value for probe in receipt.zeroization]
    facts["left behind"] = _residue(receipt, results)
    total, imports = receipt.lifecycle_us["total"], receipt.training_imports_us or 0
    if total is not None:
        apart = f"; the worker's own imports took {format_s(imports / 1e6)}" if imports > 1e5 else ""
        facts["protection"] = f"{format_s(max(0, total - imports) / 1e6)} beside the training{apart}"
    return facts


def _outputs(receipt: Receipt, opened: Sequence[Opened]) -> str | None:
    if not receipt.outputs:
        return "none"
    if not opened:
        total = sum(output.plain_bytes for output in receipt.outputs)
        return f"{len(receipt.outputs)} sealed, {bytes_text(total)}"
    lines = [
        f"{printable(one.name, keep='')}  {bytes_text(one.plain_bytes)}  sha256 {one.sha256.hex()[:16]}…"
        for one in opened
    ]
    hidden = len(lines) - _SHOWN_OUTPUTS
    return "\n".join(lines[:_SHOWN_OUTPUTS] + ([f"and {hidden} more"] if hidden > 0 else []))


def _lost(lost: Uncollected) -> Text:
    """Return what was written where no output folder is, and what to do about it."""
    files = "1 file" if lost.files == 1 else f"{lost.files} files"
    lines = [f"{files}, {bytes_text(lost.bytes)}, written outside of the job's output folders"]
    lines += [f"  {printable(name, keep='')}" for name in lost.named[:_SHOWN_OUTPUTS]]
    if lost.files > _SHOWN_OUTPUTS:
        lines.append(f"  and {lost.files - _SHOWN_OUTPUTS} more")
    lines.append('name their folders in [params], as in outputs = ["outputs/", "checkpoints/"], and run again')
    return Text("\n".join(lines), style="bold red")


def _residue(receipt: Receipt, results: Sequence[str]) -> Text:
    found = [probe.probe for probe in receipt.zeroization if probe.result.value == "found"]
    if found:
        return Text("FOUND in " + ", ".join(found), style="bold red")
    words = f"{results.count('clean')} of {len(results)} probes clean"
    unknown = [probe.probe for probe in receipt.zeroization if probe.result.value == "unverifiable"]
    return Text(words + (f"; cannot be checked here: {', '.join(unknown)}" if unknown else ""))


def _next(ended: Ended, home: Path | None) -> str:
    name, at = ended.folder.run_id[:8], again(home)
    if ended.conclusion.receipt is None or ended.conclusion.code is Code.PLATFORM:
        return f"see the runtime's own log: {_speaker(ended).runtime_log}"
    outputs = f"glasshouse fetch {name} -o DIR{at}, " if ended.conclusion.receipt.outputs else ""
    return f"{outputs}glasshouse logs {name}{at}, glasshouse verify {name}{at}"
