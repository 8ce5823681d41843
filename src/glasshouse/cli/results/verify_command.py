"""`glasshouse verify FILE|RUN|DIR`: offline, from the file and the owner's public key; its exit code is its answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from glasshouse.cli.options import OwnerOptions, argument, option
from glasshouse.cli.show.output import CommandOutput, error_object, printable
from glasshouse.errors import ExitCode
from glasshouse.jobs.owner.home import is_there

if TYPE_CHECKING:  # what verifies is not loaded for the help
    from glasshouse.jobs.owner.known_owners import OwnerTrust
    from glasshouse.jobs.verify.line_verdict import LegRun
    from glasshouse.jobs.verify.publish import ArtifactVerdict
    from glasshouse.jobs.verify.verdict import Verdict
    from glasshouse.jobs.verify.verify_named import NamedVerdict

_REPORT = "report.html"


def command(
    what: Annotated[
        str,
        argument("FILE|RUN|DIR", "Receipt, artifact, event log, package, line; a run; a measurement's folder."),
    ],
    owner: Annotated[
        str | None, option("--owner NAME|FILE", "A known owner or an owner.pub; by default whose it is.")
    ] = None,
    fingerprint: Annotated[str | None, option("--fingerprint HEX", "That the owner's key must have.")] = None,
    bundle: Annotated[Path | None, option("--bundle FILE", "The receipt to compare an artifact with.")] = None,
    content: Annotated[bool, option("--content", "Open a package's content too.")] = False,
    *,
    options: OwnerOptions,
) -> int:
    """Print what holds of a document, and return the verdict's exit code."""
    from glasshouse.jobs import api
    from glasshouse.jobs.verify.documents import PackageVerdict
    from glasshouse.jobs.verify.line_runs import LineRefusedError
    from glasshouse.jobs.verify.line_verdict import LineVerdict, is_wiped, leg_words
    from glasshouse.jobs.verify.publish import ArtifactVerdict
    from glasshouse.jobs.verify.verdict import Verdict
    from glasshouse.jobs.verify.verify_named import GroupVerdict

    output = options.output
    try:
        found = api.verify(
            what,
            owner=owner,
            fingerprint=fingerprint,
            bundle=bundle,
            content=content,
            passphrase=options.passphrase,
            home=options.home,
        )
    except LineRefusedError as error:
        if not output.as_json:
            _marks(output, _runs(error.runs))
            raise
        runs = [run.to_json() for run in error.runs]
        output.result({**error_object(error), "kind": "line", "runs": runs})
        return int(error.exit_code)
    verdict, key = found.verdict, found.trust.owner.fingerprint
    output.result(found.to_json())
    if isinstance(verdict, LineVerdict):
        output.say(f"From owner {key}, from the first machine to the last:", style="dim")
        _marks(output, ((f"leg {leg.number}", leg_words(leg), is_wiped(leg)) for leg in verdict.legs))
        _marks(output, _runs(verdict.beyond))
        _say(output, found.trust, verdict)
        output.facts({"from": found.path})
    elif isinstance(verdict, GroupVerdict):
        for machine, one in enumerate(verdict.machines):
            _receipt(output, key, one, f" on machine {machine}")
        _say(output, found.trust, verdict)
        output.facts({"folder": found.path})
    elif isinstance(verdict, Verdict):
        _receipt(output, key, verdict, "", found.trust)
        output.facts({"file": found.path})
    elif isinstance(verdict, (ArtifactVerdict, PackageVerdict)):
        _say(output, found.trust, verdict)
        if isinstance(verdict, ArtifactVerdict):
            _facts(output, verdict)
        output.facts({"file": found.path, "owner": key})
    else:
        output.say("From the owner's signature to every number:", style="dim")
        _marks(output, verdict.links)  # type: ignore[attr-defined]
        _say(output, found.trust, verdict)
        if is_there(found.path / _REPORT):
            output.say(f"{_REPORT} and its figures are not signed, and were not looked at: what counts is above.")
        output.facts({"folder": found.path, "owner": key})
    return int(verdict.exit_code)


def _receipt(output: CommandOutput, key: str, verdict: Verdict, where: str, trust: OwnerTrust | None = None) -> None:
    """Print a receipt's links, verdict, files and facts; `trust` is None for one of several machines."""
    output.say(f"From owner {key} to the end of the run{where}:", style="dim")
    _marks(output, ((name, link or "missing", link is not None) for name, link in verdict.links))
    if trust is None:
        output.say(verdict.sentence, style="bold green" if verdict.exit_code is ExitCode.DONE else "bold yellow")
    else:
        _say(output, trust, verdict)
    receipt = verdict.chain.receipt
    output.say(_sealed("outputs", len(receipt.outputs), verdict.outputs_match))
    output.say(_sealed("log segments", receipt.segments, verdict.segments_match))
    if verdict.not_looked_at:
        output.say(f"Not looked at: {', '.join(verdict.not_looked_at)}.", style="yellow")
    _facts(output, verdict)


def _say(output: CommandOutput, trust: OwnerTrust, verdict: NamedVerdict) -> None:
    """Print the verdict; one under a key that nothing stands behind never looks like one under a known owner's."""
    good = verdict.exit_code is ExitCode.DONE and trust.known
    output.say(verdict.sentence, style="bold green" if good else "bold yellow")
    if trust.warning:
        output.say(trust.warning, style="bold yellow")


def _marks(output: CommandOutput, links: Iterable[tuple[str, str, bool]]) -> None:
    for name, text, holds in links:
        output.say(f"  {'✓' if holds else '✗'} {name:<28}{text}", style=None if holds else "yellow")


def _runs(runs: Iterable[LegRun]) -> Iterable[tuple[str, str, bool]]:
    """Return what runs of a line left; a message may name files, whose names come from outside."""
    return ((f"leg {run.leg}", printable(run.words, keep=""), run.receipt == "verified") for run in runs)


def _facts(output: CommandOutput, verdict: Verdict | ArtifactVerdict) -> None:
    """Print what the record holds of the run; names of devices are the runtime's own text."""
    output.facts({name: printable(text) for name, text in verdict.facts.items()})


def _sealed(what: str, named: int, match: int | None) -> str:
    if not named:
        return f"{what}: the receipt names none"
    return f"{what}: not looked at" if match is None else f"{what}: {match} of {named} match"
