"""`glasshouse verify FILE|RUN|DIR`: offline, from the file and the owner's public key; its exit code is its answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, PassphraseFd, PassphraseFile, passphrase_from
from glasshouse.cli.show.output import Output, printable
from glasshouse.errors import ExitCode

if TYPE_CHECKING:
    from glasshouse.jobs.owner.known_owners import Trust
    from glasshouse.jobs.verify.verdict import ArtifactVerdict, Verdict
    from glasshouse.jobs.verify.verify_group import GroupVerdict
    from glasshouse.jobs.verify.verify_named import NamedVerdict, Verified

__all__ = ["command"]

_REPORT = "report.html"


def command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RUN|DIR", help="Receipt, artifact, event log, package; a run; a measurement's folder."
        ),
    ],
    owner: Annotated[
        str | None,
        typer.Option("--owner", metavar="NAME|FILE", help="A known owner or an owner.pub; by default whose it is."),
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option("--fingerprint", metavar="HEX", help="That the owner's key must have.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="The receipt to compare an artifact with."),
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="Open a package's content too.")] = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.jobs import api
    from glasshouse.jobs.verify.documents import PackageVerdict
    from glasshouse.jobs.verify.verdict import ArtifactVerdict, Verdict
    from glasshouse.jobs.verify.verify_group import GroupVerdict

    output = Output(as_json)
    found = api.verify(
        what,
        owner=owner,
        fingerprint=fingerprint,
        bundle=bundle,
        content=content,
        passphrase=passphrase_from(passphrase_file, passphrase_fd),
        home=home,
    )
    verdict, key = found.verdict, found.trust.owner.fingerprint
    output.result(found.to_json())
    if isinstance(verdict, GroupVerdict):
        _machines(output, verdict, found.trust)
        output.facts({"folder": found.path})
    elif isinstance(verdict, Verdict):
        output.say(f"From owner {key} to the end of the run:", style="dim")
        _links(output, verdict)
        _say(output, found.trust, verdict)
        _looked_at(output, verdict)
        _facts(output, verdict)
        output.facts({"file": found.path})
    elif isinstance(verdict, (ArtifactVerdict, PackageVerdict)):
        _say(output, found.trust, verdict)
        if isinstance(verdict, ArtifactVerdict):
            _facts(output, verdict)
        output.facts({"file": found.path, "owner": key})
    else:
        _measured(output, found)
    return int(verdict.exit_code)


def _machines(output: Output, verdict: GroupVerdict, trust: Trust) -> None:
    """Say what holds of each machine of a group, and of all of them."""
    for machine, one in enumerate(verdict.machines):
        output.say(f"From owner {trust.owner.fingerprint} to the end of the run on machine {machine}:", style="dim")
        _links(output, one)
        output.say(one.sentence, style="bold green" if one.exit_code is ExitCode.DONE else "bold yellow")
        _looked_at(output, one)
        _facts(output, one)
    _say(output, trust, verdict)


def _measured(output: Output, found: Verified) -> None:
    from glasshouse.jobs.owner.files import is_there

    output.say("From the owner's signature to every number:", style="dim")
    _marks(output, found.verdict.links)  # type: ignore[attr-defined]
    _say(output, found.trust, found.verdict)
    if is_there(found.path / _REPORT):
        output.say(f"{_REPORT} and its figures are not signed, and were not looked at: what counts is said above.")
    output.facts({"folder": found.path, "owner": found.trust.owner.fingerprint})


def _say(output: Output, trust: Trust, verdict: NamedVerdict) -> None:
    """Say the verdict; one under a key that nothing stands behind never looks like one under a known owner's."""
    good = verdict.exit_code is ExitCode.DONE and trust.known
    output.say(verdict.sentence, style="bold green" if good else "bold yellow")
    if trust.warning:
        output.say(trust.warning, style="bold yellow")


def _links(output: Output, verdict: Verdict) -> None:
    _marks(output, [(name, link or "missing", link is not None) for name, link in verdict.links])


def _marks(output: Output, links: Iterable[tuple[str, str, bool]]) -> None:
    for name, text, holds in links:
        output.say(f"  {'✓' if holds else '✗'} {name:<28}{text}", style=None if holds else "yellow")


def _facts(output: Output, verdict: Verdict | ArtifactVerdict) -> None:
    """Say what the record tells of the run; names of devices are the runtime's own text."""
    output.facts({name: printable(text) for name, text in verdict.facts.items()})


def _looked_at(output: Output, verdict: Verdict) -> None:
    """Say which files beside the receipt were held to it, and what was not looked at."""
    output.say(_sealed("outputs", len(verdict.chain.receipt.outputs), verdict.outputs_match))
    output.say(_sealed("log segments", verdict.chain.receipt.segments, verdict.segments_match))
    if verdict.not_looked_at:
        output.say(f"Not looked at: {', '.join(verdict.not_looked_at)}.", style="yellow")


def _sealed(what: str, named: int, match: int | None) -> str:
    if not named:
        return f"{what}: the receipt names none"
    return f"{what}: not looked at" if match is None else f"{what}: {match} of {named} match"
