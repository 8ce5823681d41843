"""Verifies what is named: a file, a run, or a measurement's folder, each with all that lies beside it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from glasshouse.errors import Code, ExitCode, FormatError, GlasshouseError, PackageError, UsageError, VerificationError
from glasshouse.evidence.receipt import MAX_BUNDLE_BYTES
from glasshouse.jobs.define.package_records import KeyStore, public_part
from glasshouse.jobs.owner.home import Home, is_there, read_bounded
from glasshouse.jobs.owner.installation import ARTIFACTS, load
from glasshouse.jobs.owner.known_owners import OwnerTrust, trusted_owner
from glasshouse.jobs.owner.owner_identity import Identity
from glasshouse.jobs.owner.rundir import Phase, RunFolder
from glasshouse.jobs.verify.conclusion import verify_sealed_in
from glasshouse.jobs.verify.documents import (
    BUNDLE_NAME,
    AnyVerdict,
    kind_of,
    verify_file,
)
from glasshouse.jobs.verify.line_runs import LineRefusedError, leg_runs, verified_run, verify_line_of, what_next
from glasshouse.jobs.verify.publish import ArtifactVerdict, compare
from glasshouse.jobs.verify.run_files import check_group
from glasshouse.jobs.verify.verdict import Status, Verdict
from glasshouse.wire.canonical import Json
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import Group
from glasshouse.wire.states import Outcome

_STATEMENT = "statement.json"
_MAX_STATEMENT_BYTES = 8 << 20
_TYPE = re.compile(r"application/vnd\.glasshouse\.([a-z]{1,32})\+json")


class NamedVerdict(Protocol):
    """What a verdict has, whatever it is on; on a measurement it comes from another distribution."""

    @property
    def exit_code(self) -> ExitCode:
        """What a command that gives this verdict exits with: 0 where it is whole and good."""

    @property
    def sentence(self) -> str:
        """The verdict for people."""

    def to_json(self) -> dict[str, Any]:
        """Return the verdict for programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was verified, and under whose key.

    Attributes:
        path: the file; the folder of a measurement, or of a run on several machines or of a line.
        trust: whose key the verdict rests on, and where that key came from.
        verdict: what holds, and what was not looked at.
    """

    path: Path
    trust: OwnerTrust
    verdict: NamedVerdict

    @property
    def good(self) -> bool:
        """Whether it is whole and good, under the key of an owner who is known here."""
        return self.verdict.exit_code is ExitCode.DONE and self.trust.known

    def to_json(self) -> dict[str, Json]:
        """Return what `glasshouse verify --json` prints."""
        about: dict[str, Json] = {"path": str(self.path), "owner": self.trust.owner.fingerprint}
        return about | {"owner_trust": self.trust.to_json()} | self.verdict.to_json()


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
        return f"{text} {min(self.machines, key=lambda one: one.strength).proves}"

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


def verify_group(run: RunFolder, first: Verdict, *, owner: bytes, now_us: int | None = None) -> GroupVerdict:
    """Verify the other machines of a run as machine 0 was, and that all of them are one group.

    Raises:
        VerificationError: as `verify_run`; `incomplete` for a machine without a receipt, `group-mismatch`, or
            `receipt-invalid` for a receipt of another run.
        PackageError: as `verify_sealed_in`.
    """
    machines = [first, *(_machine(one, owner, now_us) for one in run.machines()[1:])]
    for machine, (one, folder) in enumerate(zip(machines, run.machines(), strict=True)):
        group = one.chain.token.group
        if one.chain.receipt.run_id != folder.run_id or group is None or group.machine != machine:
            raise VerificationError(Code.CHAIN_RECEIPT, f"the receipt of machine {machine} is of another run")
    return GroupVerdict(group=check_group([one.chain for one in machines]), machines=tuple(machines))


def _machine(folder: RunFolder, owner: bytes, now_us: int | None) -> Verdict:
    if not is_there(folder.receipt):
        raise VerificationError(Code.CHAIN_INCOMPLETE, f"a machine of the group left no receipt in {folder.path}")
    return verified_run(folder, owner, now_us)


def verify_named(
    what: str,
    *,
    home: Home,
    owner: str | None = None,
    fingerprint: str | None = None,
    bundle: Path | None = None,
    content: bool = False,
    unlock: Callable[[], Identity],
) -> Verified:
    """Verify what is named, offline.

    Args:
        what: a receipt, artifact, event log, package or line file; a run, with it its line; a measurement's folder.
        home: whose owner, known owners and runs count.
        owner: a known owner's name or a public key's file; None for whose it is.
        bundle: the receipt to compare an artifact with.
        unlock: returns the owner's identity; called for `content` alone.

    Raises:
        VerificationError, FormatError, PackageError: it does not hold.
        UsageError: nothing is called so, no key is at hand, or `bundle` is for something else.
    """
    path, run, whole = _path(what, home)
    folder = measurement_in(path)
    if folder is not None:
        return verify_measured(folder, home, owner=owner, fingerprint=fingerprint)
    trust, now_us = trusted_owner(home, path, named=owner, fingerprint=fingerprint), time.time_ns() // 1000
    key = None
    if content:
        manifest, _envelope = public_part(path)
        store = KeyStore(home.require().keys)
        key = store.get(manifest.package_id, manifest_sha256=manifest.sha256, sealing=unlock().sealing)
    try:
        # Of a run everything must be there; a receipt may travel alone.
        verdict = verify_file(
            path,
            owner=trust.owner.signing,
            content=content,
            package_key=key,
            whole=whole,
            now_us=now_us,
            run_id=None if run is None else run.run_id,
        )
        if run is not None and not isinstance(verdict, Verdict):
            raise VerificationError(Code.CHAIN_RECEIPT, "the receipt is another document")
        if bundle is not None:
            verdict = _compared(verdict, bundle, owner=trust.owner.signing, now_us=now_us)
        if isinstance(verdict, Verdict):
            verdict = verify_sealed_in(verdict, path.parent, expected=whole)
    except (FormatError, PackageError, VerificationError) as error:
        refused = _refused(error, path, kind_of(path))
        if run is not None and (of_line := run.load().line) is not None:
            runs = leg_runs(home, bytes.fromhex(of_line), trust.owner.signing, now_us)
            raise LineRefusedError(refused, runs) from None
        raise refused from None
    if isinstance(verdict, Verdict) and run is not None and (line := verdict.chain.token.line) is not None:
        return Verified(path=run.path, trust=trust, verdict=verify_line_of(home, line.id, trust.owner.signing, now_us))
    # The token names how many there are: that their folders are not there does not make this the whole run.
    if not isinstance(verdict, Verdict) or run is None or verdict.machines == 1:
        return Verified(path=path, trust=trust, verdict=verdict)
    try:
        of_all = verify_group(run, verdict, owner=trust.owner.signing, now_us=now_us)
    except (FormatError, PackageError, VerificationError) as error:
        raise _refused(error, run.path, "run") from None
    return Verified(path=run.path, trust=trust, verdict=of_all)


def measurement_in(path: Path) -> Path | None:
    """Return the folder of the measurement that is named, by itself or by its statement; None for anything else."""
    if is_there(path / _STATEMENT):
        return path
    return path.parent if path.name == _STATEMENT and is_there(path) else None


def verify_measured(folder: Path, home: Home, *, owner: str | None = None, fingerprint: str | None = None) -> Verified:
    """Verify a measurement.

    Raises `VerificationError`, or `UsageError` where no key is at hand or what computes it again is not installed.
    """
    trust = trusted_owner(home, folder / _STATEMENT, named=owner, fingerprint=fingerprint)
    verify = _verifier(folder / _STATEMENT)
    try:
        verdict = verify(folder, owner=trust.owner, now_us=time.time_ns() // 1000)
    except VerificationError as error:
        raise _refused(error, folder, "measurement") from None
    return Verified(path=folder, trust=trust, verdict=verdict)


def _verifier(statement: Path) -> Callable[..., Any]:
    """Return what computes a measurement again, by the type that its statement names."""
    data = read_bounded(statement, max_bytes=_MAX_STATEMENT_BYTES, what="statement")
    try:
        kind = Envelope.parse(data, max_bytes=_MAX_STATEMENT_BYTES).payload_type
    except FormatError as error:
        raise _refused(error, statement.parent, "measurement") from None
    named = _TYPE.fullmatch(kind)
    if named is None:
        raise VerificationError(Code.WRONG_TYPE, f"{statement} is a statement of an unknown type")
    found: Callable[..., Any] = load(ARTIFACTS, named[1])
    return found


def _compared(verdict: AnyVerdict, bundle: Path, *, owner: bytes, now_us: int) -> AnyVerdict:
    """Hold an artifact to its bundle, every field of it."""
    if not isinstance(verdict, ArtifactVerdict):
        raise UsageError(Code.USAGE, "--bundle is for an artifact: it names the receipt that the artifact is of")
    data = read_bounded(bundle, max_bytes=MAX_BUNDLE_BYTES, what="receipt")
    return replace(verdict, bundle=compare(verdict.artifact, data, owner=owner, now_us=now_us))


def _refused(error: GlasshouseError, path: Path, kind: str | None) -> GlasshouseError:
    """Return the refusal with the file's name, and with what matters first."""
    if kind is None:
        message = f"{path} is not a Glasshouse receipt, artifact, log or package: {error.message}"
    elif error.code is Code.CHAIN_INCOMPLETE:
        return error  # it lacks what would vouch for it; nothing shows that it is false
    else:
        message = f"NOT authentic: the {kind} {path}: {error.message}"
    return type(error)(error.code, message, hint=error.hint)


def _path(what: str, home: Home) -> tuple[Path, RunFolder | None, bool]:
    """Return the file that is named, the run that is, and whether all that a run leaves must be there."""
    path = Path(what)
    if is_there(path) and "/" not in what:
        _refuse_ambiguous(what, home)
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
    run = RunFolder.find(home, what)
    if not is_there(run.receipt):
        record = run.load()
        ended = record.phase is Phase.ENDED
        why = "left no receipt: nothing shows that it wiped itself" if ended else "has no receipt yet"
        raise UsageError(Code.FILE_MISSING, f"run {what} {why}", hint=what_next(home, run, record))
    return run.receipt, run, True


def _refuse_ambiguous(what: str, home: Home) -> None:
    """Raise `UsageError` for the name of a run that something else in the working folder has too."""
    try:
        run = RunFolder.find(home, what)
    except UsageError:
        return
    if run.path != Path(what).absolute():
        raise UsageError(
            Code.USAGE,
            f"{what} is a run, and something in this folder too",
            hint=f"name ./{what}, or verify the run from another folder",
        )
