"""The Python API: what the command line does, as functions that return results, print nothing and raise one error type.

`import glasshouse` has all of it: ``glasshouse.run("job.toml")``. Paths may be text. ``home`` is as `--home`: None for
`GLASSHOUSE_HOME`, else the user's data folder with runs in `./.glasshouse`. ``passphrase`` is for an identity that has
one: text, or a function that returns it and is called only where it is needed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from glasshouse.errors import Code, ExitCode, GlasshouseError
from glasshouse.evidence.events import Event
from glasshouse.evidence.receipt import Receipt
from glasshouse.jobs.define.jobfile import load
from glasshouse.jobs.define.package_records import Sealed
from glasshouse.jobs.define.seal_job import script_warnings
from glasshouse.jobs.define.seal_job import seal as seal_job
from glasshouse.jobs.lines.callbacks import Callbacks
from glasshouse.jobs.lines.resuming import resume as resume_run
from glasshouse.jobs.lines.resuming import run_through
from glasshouse.jobs.owner.home import Home
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.owner_identity import unlock as unlock_identity
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.results.collect import RunOutput
from glasshouse.jobs.results.fetching import Fetched, fetch_run
from glasshouse.jobs.results.inspected import Inspected, inspect
from glasshouse.jobs.results.summary import account_of
from glasshouse.jobs.supervise.run_request import RunRequest
from glasshouse.jobs.supervise.supervision import Ended
from glasshouse.jobs.verify.verify_named import Verified, verify_named
from glasshouse.wire.states import Outcome

__all__ = [
    "Fetched",
    "GlasshouseError",
    "Inspected",
    "RunResult",
    "Sealed",
    "Verified",
    "fetch",
    "inspect",
    "resume",
    "run",
    "seal",
    "verify",
]

Passphrase = str | Callable[[], str] | None
_MAX_NAME_CHARS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A run that has ended.

    Attributes:
        run_id: names it in every other call; `latest` does too, until there is another.
        path: the run's folder: receipt, log, sealed outputs.
        outcome: how it ended.
        code: why it did not complete; None where it did.
        verdict: on its receipt: `good`, `incomplete`, `not-completed`, `invalid` or `no-receipt`.
        receipt: verified; None where there is none that holds.
        outputs: what it made, by the names that the job gave; `fetch` decrypts them.
        facts: all of it, as ``glasshouse run --json`` prints it.
    """

    run_id: str
    path: Path
    outcome: Outcome
    code: Code | None
    verdict: str
    receipt: Receipt | None
    outputs: tuple[RunOutput, ...]
    facts: Mapping[str, Any]
    exit_code: ExitCode

    @property
    def good(self) -> bool:
        """Whether it completed, and its receipt is whole and holds."""
        return self.exit_code is ExitCode.DONE


def seal(
    job: Path | str,
    out: Path | str | None = None,
    *,
    replace: bool = False,
    progress: Callable[[int, int], None] | None = None,
    passphrase: Passphrase = None,
    home: Path | str | None = None,
) -> Sealed:
    """Seal a job file's job into one package, and keep its key in the home's key store.

    Args:
        job: the job file.
        out: the package's path; None for one here after the job's name.
        replace: whether an existing file may be replaced.
        progress: called with the plaintext bytes that are sealed, and their total.
        passphrase: see the module, also for ``home``.

    Returns:
        What was sealed; its `notes` name what a run would refuse or lose.

    Raises:
        UsageError: the job file, an input or the identity is wrong, or the package exists already.
        PackageError: what a package cannot hold.
    """
    place, loaded = _home(home), load(Path(job))
    identity = unlock_identity(place.owner_private, passphrase)
    path = Path(f"{_file_name(loaded.name)}.sealed") if out is None else Path(out)
    notes = tuple(script_warnings(loaded))
    sealed = seal_job(loaded, out=path, home=place, identity=identity, replace=replace, progress=progress)
    return dataclasses.replace(sealed, notes=notes + sealed.notes)


def run(
    what: Path | str,
    *,
    on: str | None = None,
    gate: str | None = None,
    ranks: int | None = None,
    machines: int | None = None,
    yes: bool = False,
    event: Callable[[Event], None] | None = None,
    say: Callable[[str], None] | None = None,
    passphrase: Passphrase = None,
    home: Path | str | None = None,
) -> RunResult:
    """Run a job under protection and wait until it has ended; Ctrl-C ends it in order, as at the command line.

    Args:
        what: a job file, or a sealed package.
        on: a machine's name, ``ssh://user@host``, several with commas, or ``runpod``, ``vast``, ``slurm``; None for
            the job's, else this machine.
        gate: a gate that was added, by name or URL; None for the job's, else a broker on this machine.
        ranks: how many a script, or `lora`, runs in on each machine.
        machines: how many.
        yes: whether renting within the caps of ``[machine]`` is agreed to; without it nothing is rented.
        event: called with each event of the run's log, its progress among them.
        say: called with each other step, and with warnings, as text for people.
        passphrase: see the module, also for ``home``.

    Returns:
        How it ended; look at `RunResult.good`: a run that failed is a result, and no exception.

    Raises:
        GlasshouseError: it could not be placed, was refused, or could not be followed; see its `code` and `hint`.
    """
    place = _home(home)
    request = RunRequest.of(Path(what), home=place, on=on, gate=gate, ranks=ranks, machines=machines)
    identity = unlock_identity(place.owner_private, passphrase)
    ended = run_through(request, home=place, identity=identity, listener=Callbacks(event, say, yes=yes))
    return _result(ended, place, identity)


def resume(
    run: str,
    *,
    on: str | None = None,
    lost: bool = False,
    rewind_to: int | None = None,
    yes: bool = False,
    event: Callable[[Event], None] | None = None,
    say: Callable[[str], None] | None = None,
    passphrase: Passphrase = None,
    home: Path | str | None = None,
) -> RunResult:
    """Go on with a run that has ended from its last checkpoint, as a new run, and wait until that has ended.

    Args:
        run: its id, a unique beginning of one, or `latest`.
        on: as of `run`; None for where it was.
        lost: whether its machines do not exist any more, by your word: the gate waits for no lease of theirs.
        rewind_to: the number of an older checkpoint to go on from.
        yes: as of `run`, also for what follows.
        event: as of `run`.
        say: as of `run`.
        passphrase: as of `run`.
        home: as of `run`.

    Raises:
        UsageError: its package or deployment is gone or another, its last machine may go on, or there is no such
            checkpoint.
        GlasshouseError: as `run`.
    """
    place = _home(home)
    identity = unlock_identity(place.owner_private, passphrase)
    ended = resume_run(
        RunFolder.find(place, run),
        home=place,
        identity=identity,
        listener=Callbacks(event, say, yes=yes),
        on=on,
        lost=lost,
        rewind_to=rewind_to,
    )
    return _result(ended, place, identity)


def _result(ended: Ended | RunFolder, home: Home, identity: Identity) -> RunResult:
    assert isinstance(ended, Ended)  # noqa: S101 - it was not detached
    account = account_of(ended, home=home, sealing=identity.sealing, owner_signing=identity.signing.public)
    conclusion = ended.conclusion
    return RunResult(
        run_id=ended.record.run_id,
        path=ended.folder.path,
        outcome=conclusion.outcome,
        code=conclusion.code,
        verdict=conclusion.verdict,
        receipt=conclusion.receipt,
        outputs=account.outputs,
        facts=account.facts,
        exit_code=conclusion.exit_code,
    )


def verify(
    what: Path | str,
    *,
    owner: str | None = None,
    fingerprint: str | None = None,
    bundle: Path | str | None = None,
    content: bool = False,
    passphrase: Passphrase = None,
    home: Path | str | None = None,
) -> Verified:
    """Verify a receipt, artifact, log, package, run or measurement offline, under its owner's public key.

    Args:
        what: a file, a run's id or `latest`, or a measurement's folder.
        owner: a known owner's name, or the file of a public key; None for whose it is.
        fingerprint: what the owner's key must have.
        bundle: the receipt to compare an artifact with.
        content: whether to open a package's content too, which needs its key.
        passphrase: see the module, also for ``home``.

    Returns:
        The verdict; look at `Verified.good`. What is incomplete, or under an unknown owner's key, is a result; what is
        false is an exception.

    Raises:
        VerificationError, FormatError, PackageError: it does not hold.
        UsageError: nothing is called so, or no key is at hand.
    """
    place = _located(home)
    return verify_named(
        str(what),
        home=place,
        owner=owner,
        fingerprint=fingerprint,
        bundle=None if bundle is None else Path(bundle),
        content=content,
        unlock=partial(unlock_identity, place.owner_private, passphrase),
    )


def fetch(
    run: str,
    out: Path | str,
    *,
    replace: bool = False,
    hidden: bool = False,
    machine: int = 0,
    from_gate: bool = False,
    say: Callable[[str], None] | None = None,
    passphrase: Passphrase = None,
    home: Path | str | None = None,
) -> Fetched:
    """Decrypt the outputs that a run's verified receipt names; sealed files that are missing come from its gate.

    Args:
        run: its id, a unique beginning of one, or `latest`.
        out: the folder; made if need be.
        replace: whether files there may be replaced.
        hidden: whether to write outputs with a name like ``.ssh/x`` or ``.envrc`` too.
        machine: of a run on several machines: whose, from 0.
        from_gate: wait no more for the run's machine, and take what its gate stored.
        say: called with steps and warnings.
        passphrase: see the module, also for ``home``.

    Raises:
        VerificationError: there is no receipt that holds.
        UsageError: there is no such run, it has not ended, or a file is there already.
        PackageError: a sealed output is not as the receipt names it.
        PeerError: the gate cannot be reached.
    """
    place = _home(home)
    return fetch_run(
        RunFolder.find(place, run),
        Path(out),
        home=place,
        unlock=partial(unlock_identity, place.owner_private, passphrase),
        listener=Callbacks(None, say),
        replace=replace,
        hidden=hidden,
        machine=machine,
        from_gate=from_gate,
    )


def _located(home: Path | str | None) -> Home:
    return Home.locate(None if home is None else Path(home))


def _home(home: Path | str | None) -> Home:
    """Return the state home; raises `UsageError` where it holds no identity."""
    return _located(home).require()


def _file_name(name: str) -> str:
    """Return a job's name as one that a file may have, and that hides it nowhere and leads nowhere."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.")[:_MAX_NAME_CHARS] or "job"
