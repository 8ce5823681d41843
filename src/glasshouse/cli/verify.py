"""`glasshouse verify FILE|RUN`: offline, from the file and the owner's public key; its exit code is its answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glasshouse.cli.options import HomeOption, Json, PassphraseFd, PassphraseFile, unlock
from glasshouse.cli.output import Output
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
    from glasshouse.jobs.verdict import Verdict

__all__ = ["command"]


def command(
    what: Annotated[str, typer.Argument(metavar="FILE|RUN", help="Receipt, artifact, event log, package; or a run.")],
    owner: Annotated[
        Path | None, typer.Option("--owner", metavar="FILE", help="The owner's owner.pub; yours by default.")
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="Open a package's content too.")] = False,
    passphrase_file: PassphraseFile = None,
    passphrase_fd: PassphraseFd = None,
    home: HomeOption = None,
    as_json: Json = False,
) -> int:
    from glasshouse.jobs.files import is_file
    from glasshouse.jobs.home import Home
    from glasshouse.jobs.identity import read_public
    from glasshouse.jobs.verify import Verdict, kind_of, verify_file, verify_outputs_in

    output, place = Output(as_json), Home.locate(home)
    path, is_run = _path(what, place)
    if owner is None and not is_file(place.owner_public):
        raise UsageError(Code.IDENTITY, "whose receipt is it?", hint="name the owner's public file: --owner owner.pub")
    public = read_public(owner or place.owner_public)
    key = _package_key(path, place, passphrase_file, passphrase_fd) if content else None
    try:
        verdict = verify_file(path, owner=public, content=content, package_key=key)
        if isinstance(verdict, Verdict):
            # Of a run everything must be there; a receipt may travel alone.
            verdict = verify_outputs_in(verdict, path.parent, expected=is_run)
    except (FormatError, PackageError, VerificationError) as error:
        raise _said(error, path, kind_of(path)) from None
    output.result({"path": str(path), "owner": public.fingerprint} | verdict.to_json())
    if isinstance(verdict, Verdict):
        output.say(f"From owner {public.fingerprint} to the end of the run:", style="dim")
        for name, says in verdict.links:
            mark, style = ("✗", "yellow") if says is None else ("✓", None)
            output.say(f"  {mark} {name:<28}{says or 'missing'}", style=style)
    output.say(verdict.sentence, style="bold green" if verdict.exit_code is ExitCode.DONE else "bold yellow")
    if isinstance(verdict, Verdict):
        output.say(_outputs(verdict))
    output.facts({"file": path, "owner": None if isinstance(verdict, Verdict) else public.fingerprint})
    return verdict.exit_code


def _outputs(verdict: Verdict) -> str:
    named = len(verdict.chain.receipt.outputs)
    if not named:
        return "outputs: the receipt names none"
    if verdict.outputs_match is None:
        return f"outputs: not looked at; the {named} that the receipt names do not lie beside it"
    return f"outputs: {verdict.outputs_match} of {named} match"


def _said(error: GlasshouseError, path: Path, kind: str | None) -> GlasshouseError:
    """Return the refusal with the file's name, and with what matters said first."""
    if kind is None:
        message = f"{path} is not a Glasshouse receipt, artifact, log or package: {error.message}"
    elif error.code is Code.CHAIN_INCOMPLETE:
        return error  # it lacks what would vouch for it; nothing says that it is false
    else:
        message = f"NOT authentic: the {kind} {path}: {error.message}"
    return type(error)(error.code, message, hint=error.hint)


def _path(what: str, place: Home) -> tuple[Path, bool]:
    """Return the file that is named, or the receipt of the run that is; and whether it was a run."""
    from glasshouse.jobs.files import is_there

    path = Path(what)
    if is_there(path) or path.suffix or len(path.parts) > 1:
        return path, False
    from glasshouse.jobs.rundir import RunFolder

    receipt = RunFolder.find(place, what).receipt
    if not is_there(receipt):
        raise UsageError(Code.FILE_MISSING, f"run {what} has no receipt (yet)", hint="see: glasshouse status")
    return receipt, True


def _package_key(path: Path, place: Home, passphrase_file: Path | None, passphrase_fd: int | None) -> bytes:
    from glasshouse.jobs.keystore import KeyStore
    from glasshouse.jobs.run import public_part

    manifest, _envelope = public_part(path)
    identity = unlock(place.require(), passphrase_file, passphrase_fd)
    return KeyStore(place.keys).get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=identity.sealing)
