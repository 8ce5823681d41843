"""`glasshouse verify FILE|RUN|DIR`: offline, from the file and the owner's public key; its exit code is its answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from glasshouse.cli.options import HomeOption, Json, PassphraseFd, PassphraseFile, unlock
from glasshouse.cli.output import Output, printable
from glasshouse.errors import (
    Code,
    ExitCode,
    FormatError,
    GlasshouseError,
    PackageError,
    UsageError,
    VerificationError,
)

if TYPE_CHECKING:
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.owners import Trust
    from glasshouse.jobs.rundir import RunFolder
    from glasshouse.jobs.verdict import AnyVerdict, ArtifactVerdict, Verdict

__all__ = ["command", "measurement_in", "verify_measured"]


class _Verdict(Protocol):
    """What a verdict has, whatever it is on; on a measurement it comes from another distribution."""

    @property
    def exit_code(self) -> ExitCode: ...

    @property
    def sentence(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


_STATEMENT, _REPORT = "statement.json", "report.html"
_MAX_STATEMENT_BYTES = 8 << 20
_TYPE = re.compile(r"application/vnd\.glasshouse\.([a-z]{1,32})\+json")


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
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.owners import trusted_owner
    from glasshouse.jobs.verify import PackageVerdict, Verdict, kind_of, of_run, verify_file, verify_sealed_in

    output, place = Output(as_json), Home.locate(home)
    path, run, whole = _path(what, place)
    folder = measurement_in(path)
    if folder is not None:
        return _measured(folder, *verify_measured(folder, place, owner=owner, fingerprint=fingerprint), output)
    trust = trusted_owner(place, path, named=owner, fingerprint=fingerprint)
    public = trust.owner
    key = _package_key(path, place, passphrase_file, passphrase_fd) if content else None
    try:
        # Of a run everything must be there; a receipt may travel alone.
        now_us = time.time_ns() // 1000
        verdict = verify_file(path, owner=public, content=content, package_key=key, whole=whole, now_us=now_us)
        if run is not None:
            of_run(verdict, run.run_id)
        if bundle is not None:
            verdict = _compared(verdict, bundle, owner=public.signing, now_us=now_us)
        if isinstance(verdict, Verdict):
            verdict = verify_sealed_in(verdict, path.parent, expected=whole)
    except (FormatError, PackageError, VerificationError) as error:
        raise _said(error, path, kind_of(path)) from None
    # The token says whether there are others: that their folders are not there does not make this the whole run.
    if isinstance(verdict, Verdict) and run is not None and verdict.machines > 1:
        return _machines(run, verdict, trust, output, now_us)
    output.result(_object(path, trust, verdict))
    if isinstance(verdict, Verdict):
        output.say(f"From owner {public.fingerprint} to the end of the run:", style="dim")
        _links(output, [(name, says or "missing", says is not None) for name, says in verdict.links])
    _say(output, trust, verdict)
    if isinstance(verdict, Verdict):
        _looked_at(output, verdict)
    if not isinstance(verdict, PackageVerdict):
        _facts(output, verdict)
    output.facts({"file": path, "owner": None if isinstance(verdict, Verdict) else public.fingerprint})
    return verdict.exit_code


def _compared(verdict: AnyVerdict, bundle: Path, *, owner: bytes, now_us: int) -> AnyVerdict:
    """Hold an artifact to its bundle, every field of it."""
    from glasshouse.evidence.bundle import MAX_BUNDLE_BYTES
    from glasshouse.jobs.artifact import compare
    from glasshouse.jobs.files import read_bounded
    from glasshouse.jobs.verdict import ArtifactVerdict

    if not isinstance(verdict, ArtifactVerdict):
        raise UsageError(Code.USAGE, "--bundle is for an artifact: it names the receipt that the artifact tells of")
    data = read_bounded(bundle, max_bytes=MAX_BUNDLE_BYTES, what="receipt")
    return replace(verdict, bundle=compare(verdict.artifact, data, owner=owner, now_us=now_us))


def _machines(run: RunFolder, first: Verdict, trust: Trust, output: Output, now_us: int) -> int:
    """Verify the other machines of a group too, and that all their receipts are of one group."""
    from glasshouse.jobs.verify_group import verify_group

    public = trust.owner
    try:
        verdict = verify_group(run, first, owner=public, now_us=now_us)
    except (FormatError, PackageError, VerificationError) as error:
        raise _said(error, run.path, "run") from None
    output.result(_object(run.path, trust, verdict))
    for machine, one in enumerate(verdict.machines):
        output.say(f"From owner {public.fingerprint} to the end of the run on machine {machine}:", style="dim")
        _links(output, [(name, says or "missing", says is not None) for name, says in one.links])
        output.say(one.sentence, style="bold green" if one.exit_code is ExitCode.DONE else "bold yellow")
        _looked_at(output, one)
        _facts(output, one)
    _say(output, trust, verdict)
    output.facts({"folder": run.path})
    return verdict.exit_code


def measurement_in(path: Path) -> Path | None:
    """Return the folder of the measurement that is named, by itself or by its statement; None for anything else."""
    from glasshouse.jobs.files import is_there

    if is_there(path / _STATEMENT):
        return path
    return path.parent if path.name == _STATEMENT and is_there(path) else None


def _object(path: Path, trust: Trust, verdict: _Verdict) -> dict[str, Any]:
    """Return what a program gets: the verdict, and whose key it rests on."""
    return {"path": str(path), "owner": trust.owner.fingerprint, "owner_trust": trust.to_json()} | verdict.to_json()


def _say(output: Output, trust: Trust, verdict: _Verdict) -> None:
    """Say the verdict; one under a key that nothing stands behind never looks like one under a known owner's."""
    good = verdict.exit_code is ExitCode.DONE and trust.known
    output.say(verdict.sentence, style="bold green" if good else "bold yellow")
    if trust.warning:
        output.say(trust.warning, style="bold yellow")


def verify_measured(
    folder: Path, place: Home, *, owner: str | None = None, fingerprint: str | None = None
) -> tuple[Any, Trust]:
    """Verify a measurement.

    Args:
        folder: as of `measurement_in`.
        place: whose owner and known owners count.
        owner, fingerprint: as of `trusted_owner`.

    Returns:
        The verdict, and whose key it rests on.

    Raises:
        VerificationError: it does not hold.
        UsageError: no key is at hand, or what computes it again is not installed.
    """
    from glasshouse.jobs.owners import trusted_owner

    trust = trusted_owner(place, folder / _STATEMENT, named=owner, fingerprint=fingerprint)
    verify = _verifier(folder / _STATEMENT)
    try:
        return verify(folder, owner=trust.owner, now_us=time.time_ns() // 1000), trust
    except VerificationError as error:
        raise _said(error, folder, "measurement") from None


def _measured(folder: Path, verdict: Any, trust: Trust, output: Output) -> int:
    from glasshouse.jobs.files import is_there

    output.result(_object(folder, trust, verdict))
    output.say("From the owner's signature to every number:", style="dim")
    _links(output, verdict.links)
    _say(output, trust, verdict)
    if is_there(folder / _REPORT):
        output.say(f"{_REPORT} and its figures are not signed, and were not looked at: what counts is said above.")
    output.facts({"folder": folder, "owner": trust.owner.fingerprint})
    return int(verdict.exit_code)


def _verifier(statement: Path) -> Callable[..., Any]:
    """Return what computes a measurement again, by the type that its statement names."""
    from glasshouse.jobs.extensions import ARTIFACTS, load
    from glasshouse.jobs.files import read_bounded
    from glasshouse.wire.dsse import Envelope

    data = read_bounded(statement, max_bytes=_MAX_STATEMENT_BYTES, what="statement")
    try:
        kind = Envelope.parse(data, max_bytes=_MAX_STATEMENT_BYTES).payload_type
    except FormatError as error:
        raise _said(error, statement.parent, "measurement") from None
    named = _TYPE.fullmatch(kind)
    if named is None:
        raise VerificationError(Code.WRONG_TYPE, f"{statement} is a statement of an unknown type")
    found: Callable[..., Any] = load(ARTIFACTS, named[1])
    return found


def _links(output: Output, links: Iterable[tuple[str, str, bool]]) -> None:
    for name, says, holds in links:
        output.say(f"  {'✓' if holds else '✗'} {name:<28}{says}", style=None if holds else "yellow")


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


def _said(error: GlasshouseError, path: Path, kind: str | None) -> GlasshouseError:
    """Return the refusal with the file's name, and with what matters said first."""
    if kind is None:
        message = f"{path} is not a Glasshouse receipt, artifact, log or package: {error.message}"
    elif error.code is Code.CHAIN_INCOMPLETE:
        return error  # it lacks what would vouch for it; nothing says that it is false
    else:
        message = f"NOT authentic: the {kind} {path}: {error.message}"
    return type(error)(error.code, message, hint=error.hint)


def _path(what: str, place: Home) -> tuple[Path, RunFolder | None, bool]:
    """Return the file that is named, the run that is, and whether all that a run leaves must be there."""
    from glasshouse.jobs.files import is_there
    from glasshouse.jobs.rundir import RunFolder
    from glasshouse.jobs.verify import BUNDLE_NAME

    path = Path(what)
    if is_there(path) and "/" not in what:
        _refuse_ambiguous(what, place)
    for receipt in (path / BUNDLE_NAME, path / "out" / BUNDLE_NAME):
        if is_there(receipt):
            if is_there(path / _STATEMENT):  # a good run does not answer for a measurement that lies beside it
                raise UsageError(
                    Code.USAGE,
                    f"{path} holds a receipt and a measurement",
                    hint=f"name {receipt} or {path / _STATEMENT}",
                )
            return receipt, RunFolder.at(path), True
    if is_there(path) or path.suffix or len(path.parts) > 1:
        return path, None, False
    run = RunFolder.find(place, what)
    if not is_there(run.receipt):
        raise UsageError(Code.FILE_MISSING, f"run {what} has no receipt (yet)", hint="see: glasshouse status")
    return run.receipt, run, True


def _refuse_ambiguous(what: str, place: Home) -> None:
    """Raise `UsageError` for the name of a run that something else in the working folder has too."""
    from glasshouse.jobs.rundir import RunFolder

    try:
        run = RunFolder.find(place, what)
    except UsageError:
        return
    if run.path != Path(what).absolute():
        raise UsageError(
            Code.USAGE,
            f"{what} is a run, and something in this folder too",
            hint=f"name ./{what}, or verify the run from another folder",
        )


def _package_key(path: Path, place: Home, passphrase_file: Path | None, passphrase_fd: int | None) -> bytes:
    from glasshouse.jobs.keystore import KeyStore
    from glasshouse.jobs.run import public_part

    manifest, _envelope = public_part(path)
    identity = unlock(place.require(), passphrase_file, passphrase_fd)
    return KeyStore(place.keys).get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing)
