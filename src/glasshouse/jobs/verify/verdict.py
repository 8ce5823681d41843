"""What `verify` found, in words for people and for machines; never without the assurance level."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from glasshouse.attestation.roots.levels import proves_of, words_among
from glasshouse.errors import Code, ExitCode, VerificationError
from glasshouse.evidence.events import ProbeResult
from glasshouse.evidence.log import VerifiedLog
from glasshouse.evidence.receipt import CLOCK_LEEWAY_US, Output, Work
from glasshouse.jobs.owner.durations import format_s, utc
from glasshouse.jobs.verify.hardware.repeated import appraised_words, check_appraisal
from glasshouse.jobs.verify.receipt_chain import Chain, walk
from glasshouse.wire.canonical import Json
from glasshouse.wire.crypto import key_id
from glasshouse.wire.policy import Assurance
from glasshouse.wire.states import Outcome

_ON_DISK = "workspace-on-disk"  # spec/key-release.md, section 5.1


class Status(StrEnum):
    """What a verified bundle is worth."""

    GOOD = "good"
    NOT_COMPLETED = "not-completed"
    INCOMPLETE = "incomplete"


# What a run that did not complete is to a command: `run` and `verify` say the same.
EXITS = {
    Outcome.COMPLETED: ExitCode.DONE,
    Outcome.REFUSED: ExitCode.REFUSED,
    Outcome.FAILED: ExitCode.RUN_FAILED,
    Outcome.INTERRUPTED: ExitCode.INTERRUPTED,
    Outcome.RESIDUE: ExitCode.RESIDUE,
    Outcome.SUPERSEDED: ExitCode.REFUSED,
    Outcome.LOST: ExitCode.RUN_FAILED,
}

_ENDED = {
    Outcome.COMPLETED: "it completed",
    Outcome.REFUSED: "it was refused the key",
    Outcome.FAILED: "it failed",
    Outcome.INTERRUPTED: "it was interrupted",
    Outcome.RESIDUE: "something of its owner's was found after zeroization",
    Outcome.SUPERSEDED: "another machine went on with its training, and it was told to end",
    Outcome.LOST: "it was lost",
}

# Genuine is not true: the holder of the owner's key has the broker's too, and needs no machine to write a record.
_UNATTESTED = "To its owner it shows what came from who had the launch key; to others it is the owner's word."
# Evidence can be taken out of a receipt that is handed on: what is left is a signature of the owner's side.
_NOT_APPRAISED = "Its hardware evidence was not appraised here: without it the level is the gate's word, the owner's."

TOO_LONG = "the work is recorded as longer than the run lasted"

SECOND_US = 1_000_000
# How many times its reported pace a run may go after its last report: the first step of many takes longest.
_FASTER = 100

_PARTS = {
    "manifest": "the package's manifest",
    "evidence": "evidence",
    "ear": "an attestation result",
    "head_countersignature": "the broker's countersignature on the final head",
    "countersignature": "the broker's countersignature on the receipt",
    "hardware": "what its hardware evidence is appraised by",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A bundle all of whose links hold."""

    chain: Chain  # the links
    log: VerifiedLog | None = None  # the log beside the bundle, if it was there and agrees
    # How many countersigned heads lie beside the log, all of them of this run; None when not looked at.
    heads: int | None = None
    # How many sealed outputs were compared with the receipt, all of which match; None when none were looked at.
    outputs_match: int | None = None
    segments_match: int | None = None  # the same for sealed log segments and the log
    unnamed: tuple[str, ...] = ()  # what lies beside these and is named by nothing, in words

    @property
    def not_looked_at(self) -> tuple[str, ...]:
        """What this verdict leaves open: named by the receipt and not beside it, or beside it and not named."""
        receipt = self.chain.receipt
        parts = {
            f"the log ({receipt.log_size} events)": self.log is None,
            "the countersigned heads": self.heads is None,
            f"the sealed log segments ({receipt.segments})": self.segments_match is None and receipt.segments > 0,
            f"the sealed outputs ({len(receipt.outputs)})": self.outputs_match is None and bool(receipt.outputs),
        }
        return (*(part for part, missing in parts.items() if missing), *self.unnamed)

    @property
    def status(self) -> Status:
        """Whether the bundle is whole, and its run completed."""
        if self.chain.missing:
            return Status.INCOMPLETE
        return Status.GOOD if self.outcome is Outcome.COMPLETED else Status.NOT_COMPLETED

    @property
    def lacks(self) -> str:
        """What the bundle lacks of what would vouch for it, in words; empty where it is whole."""
        return ", ".join(_PARTS[part] for part in self.chain.missing)

    @property
    def outcome(self) -> Outcome:
        """How the run ended."""
        return self.chain.receipt.outcome

    @property
    def machines(self) -> int:
        """On how many machines the run's group is; 1 without a group."""
        group = self.chain.token.group
        return 1 if group is None else group.machines

    @property
    def assurance(self) -> str:
        """The level, or `unattested` for a run that no attestation result stands behind."""
        return self.chain.ear.assurance.value if self.chain.ear else "unattested"

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a command with this verdict."""
        if self.status is Status.INCOMPLETE:
            return ExitCode.INCOMPLETE
        return EXITS[self.outcome]

    @property
    def sentence(self) -> str:
        """The verdict in one sentence, with the level; more say what is in doubt, and to whom it proves what."""
        text = [self._sentence, *(f"Note: {doubt}." for doubt in self.doubts)]
        if self.machines > 1:
            text.append(f"It is one of {self.machines} machines; the others have receipts of their own.")
        return " ".join([*text, self.proves])

    @property
    def proves(self) -> str:
        """To whom it proves what, at its level."""
        if "hardware" in self.chain.missing and self.chain.ear:
            return _NOT_APPRAISED
        return proves_of(self.chain.ear.assurance, self.chain.ear.submodules) if self.chain.ear else _UNATTESTED

    @property
    def strength(self) -> int:
        """How much stands behind it: of several, what is said of them together is said of the weakest."""
        if (ear := self.chain.ear) is None:
            return -1
        strength = 2 * list(Assurance).index(ear.assurance) - bool(words_among(ear.submodules))
        return 0 if "hardware" in self.chain.missing else strength

    @property
    def doubts(self) -> tuple[str, ...]:
        """What is genuine here and yet bears out less than it seems to."""
        receipt, found = self.chain.receipt, []
        unsure = [probe.probe for probe in receipt.zeroization if probe.result is ProbeResult.UNVERIFIABLE]
        if unsure:
            found.append(f"what the probes {', '.join(unsure)} search could not be searched")
        if self.log is not None:
            off_us = abs(self.log.from_us - receipt.started_us), abs(self.log.to_us - receipt.finished_us)
            if max(off_us) > CLOCK_LEEWAY_US:
                found.append("the log is not of the time that the receipt names")
        if work := receipt.work:
            if self.log is not None and not _reported(work, self.log):
                seen = 0 if self.log.done is None else self.log.done[1]
                found.append(f"of {work.done} {work.unit}s the log's progress shows {seen}")
            lasted_us = receipt.finished_us - receipt.started_us if self.log is None else self.log.ran_us
            if work.elapsed_us > lasted_us + SECOND_US:
                found.append(TOO_LONG)
        return tuple(found)

    @property
    def facts(self) -> dict[str, str]:
        """What the receipt records of the run, for people: dates, GPUs, work, loss and probes."""
        chain, receipt = self.chain, self.chain.receipt
        closed = f"countersigned {utc(chain.closed_us)}" if chain.countersignature else "not countersigned"
        gpus = [f"{gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB)" for gpu in chain.claims.gpus] if chain.claims else []
        work, loss = receipt.work, receipt.loss
        probes = [f"{probe.probe} {probe.result.value}" for probe in receipt.zeroization]
        facts = {
            "dates": f"{utc(receipt.started_us)} to {utc(receipt.finished_us)} by the runtime's clock; {closed}",
            "GPUs": ", ".join(gpus) + " by the runtime's word" if gpus else "none",
            "work": f"{work.done} {work.unit}s in {format_s(work.elapsed_us / 1e6)}; ended by: {work.stop_reason}"
            if work
            else "none",
            "loss": f"{loss.first} → {loss.final}" if loss else "none",
            "probes": ", ".join(probes),
        }
        if chain.claims is not None and _ON_DISK in chain.claims.hardening.details:
            allowed = chain.manifest is not None and chain.manifest.floor.disk
            word = "as the owner allowed" if allowed else "which the owner's policy does not allow"
            facts["files"] = f"the worker's lay on the machine's disk, {word}"
        return facts

    @property
    def _sentence(self) -> str:
        level = f"assurance {self.assurance}"
        if self.status is Status.GOOD:
            return f"Authentic and complete ({level}): the run completed."
        if self.status is Status.NOT_COMPLETED:
            code = self.chain.receipt.code
            why = "" if code is None or code.value == self.outcome.value else f" ({code.value})"
            return f"Authentic ({level}): the run did not complete; {_ENDED[self.outcome]}{why}."
        return f"Incomplete ({level}): nothing contradicts it, but it lacks {self.lacks}; its own word: {self.how}."

    @property
    def how(self) -> str:
        """How the run ended, and why, by its receipt."""
        code = self.chain.receipt.code
        return self.outcome.value if code is None else f"{self.outcome.value} ({code.value})"

    @property
    def _place(self) -> str:
        group = self.chain.token.group
        if group is None:
            return ""
        first, last = group.first_rank, group.first_rank + group.ranks - 1
        ranks = f"{first}" if first == last else f"{first} to {last}"
        return f", machine {group.machine} of {group.machines}, ranks {ranks} of group {group.id.hex()[:8]}"

    @property
    def _hardware(self) -> tuple[tuple[str, str | None], ...]:
        if (ear := self.chain.ear) is None or ear.assurance is Assurance.SOFTWARE:
            return ()
        return (("hardware", None if "hardware" in self.chain.missing else appraised_words(ear)),)

    @property
    def links(self) -> tuple[tuple[str, str | None], ...]:
        """The chain from the owner to the run's end: each link and its content; None for one that is missing."""
        chain, receipt, by_broker = self.chain, self.chain.receipt, "by the broker"
        manifest = evidence = ear = None
        if chain.manifest:
            manifest = f"package {receipt.package_id[:8]}, demands at least {chain.manifest.floor.assurance}"
        if chain.claims:
            evidence = (
                f"runtime {chain.claims.measurement_sha256.hex()[:8]}, hardening {chain.claims.hardening.profile}"
            )
        if chain.ear:
            ear = f"{chain.ear.status}, assurance {chain.ear.assurance}"
        broker = key_id(chain.delegation.broker_public)[:8]
        return (
            ("delegation", f"the owner lets broker {broker} release and countersign"),
            ("manifest", manifest),
            (
                "launch token",
                f"run {receipt.run_id[:8]} of deployment {receipt.deployment[:8]}{self._place}, "
                f"issued {utc(chain.token.issued_s * 1_000_000)}",
            ),
            ("evidence", evidence),
            ("attestation result", ear),
            *self._hardware,
            ("final head", f"{chain.head.size} events" + (", all of them seen here" if self.log else "")),
            ("head's countersignature", by_broker if chain.countersigned_head else None),
            ("receipt", self.how),
            (
                "receipt's countersignature",
                f"{by_broker}, {utc(chain.countersignature.time_us)}" if chain.countersignature else None,
            ),
        )

    def to_json(self) -> dict[str, Json]:
        """Return the verdict for `verify --json`."""
        chain, receipt = self.chain, self.chain.receipt
        return {
            "assurance": self.assurance,
            "attestation": chain.ear.status.value if chain.ear else None,
            "code": None if receipt.code is None else receipt.code.value,
            "doubts": list(self.doubts),
            "finished_us": receipt.finished_us,
            "gpus": [gpu.name for gpu in chain.claims.gpus] if chain.claims else [],
            "loss": None if receipt.loss is None else receipt.loss.to_json(),
            "proves": self.proves,
            "started_us": receipt.started_us,
            "countersigned_us": chain.countersignature.time_us if chain.countersignature else None,
            "group": None if chain.token.group is None else chain.token.group.to_json(),
            "hardening": receipt.profile.value,
            "kind": "bundle",
            "heads": self.heads,
            "links": [{"link": name, "says": text} for name, text in self.links],
            "log_events": receipt.log_size if self.log else None,
            "missing": list(chain.missing),
            "not_looked_at": list(self.not_looked_at),
            "outcome": self.outcome.value,
            "outputs": [_output(output) for output in receipt.outputs],
            "outputs_match": self.outputs_match,
            "package": {"id": receipt.package_id, "manifest_sha256": receipt.manifest_sha256.hex()},
            "run_id": receipt.run_id,
            "segments_match": self.segments_match,
            "status": self.status.value,
            "verdict": self.sentence,
            "work": None if receipt.work is None else receipt.work.to_json(),
            "workload": receipt.workload,
            "zeroization": [{"probe": probe.probe, "result": probe.result.value} for probe in receipt.zeroization],
        }


def verify_bundle(data: bytes, *, owner: bytes, now_us: int | None = None, run_id: str | None = None) -> Verdict:
    """Walk a receipt bundle from the owner's key to what happened.

    Args:
        owner: the owner's signing key, known from elsewhere than the bundle.
        now_us: the present, where it is known: a run of the future is refused.
        run_id: the run whose own receipt it is to be: another run's, however good, is refused.

    Raises:
        FormatError: it is not a bundle.
        VerificationError: with the code of the link that does not hold.
        UsageError: `hardware-verifier-missing`: this installation lacks what appraises its hardware evidence.
    """
    chain = walk(data, owner=owner)
    if chain.evidence and chain.ear and chain.hardware and "hardware" not in chain.missing:
        check_appraisal(chain.hardware, chain.evidence, chain.ear)
    check_past(chain.closed_us, now_us, Code.CHAIN_RECEIPT)
    if run_id not in (None, chain.receipt.run_id):
        raise VerificationError(Code.CHAIN_RECEIPT, "the receipt is of another run")
    return Verdict(chain=chain)


def check_past(time_us: int, now_us: int | None, code: Code) -> None:
    """Refuse what was closed in the future; where the present is not known, nothing is refused."""
    if now_us is not None and time_us > now_us + CLOCK_LEEWAY_US:
        raise VerificationError(
            code, f"it ended on {utc(time_us)}, which is in the future", hint="look at this machine's clock too"
        )


def _reported(work: Work, log: VerifiedLog) -> bool:
    """Return whether a log's progress leaves room for the receipt's work: what comes within a second is not in it."""
    unit, seen = log.done or (work.unit, 0)
    missing = work.done - seen
    if missing <= 0 or unit != work.unit:
        return missing <= 0
    most = _FASTER * seen * (log.silent_us + SECOND_US) // max(1, log.ran_us - log.silent_us)
    return log.silent_us <= 2 * SECOND_US and missing <= most


def _output(output: Output) -> dict[str, Json]:
    return {
        "bytes": output.plain_bytes,
        "class": output.of,
        "file": output.file_name,
        "kind": output.kind,
        "plaintext_hmac_sha256": None if output.plain_hmac is None else output.plain_hmac.hex(),
        "sealed_sha256": output.sealed_sha256.hex(),
    }
