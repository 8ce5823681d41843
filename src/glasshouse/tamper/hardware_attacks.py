"""Attacks on a gate that demands hardware evidence: with a TPM at hand, another one, or evidence of another run.

The attacker has a stolen launch file, keys of their own, and TPMs: one that the policy would take, and others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

from glasshouse.attestation.claims import Claims, composite
from glasshouse.attestation.roots.appraised import Blob
from glasshouse.broker.client.owner_client import Reply
from glasshouse.errors import Code, InternalError
from glasshouse.handshake.messages import Challenge, TpmKeys
from glasshouse.handshake.runtime_side import challenge_request, with_blobs
from glasshouse.tamper.stage import Actor, Owner
from glasshouse.tamper.tpm_stage import StagedTpm, TpmMaker
from glasshouse.wire.policy import Assurance

_Row: TypeAlias = tuple[str, str, Code | None, Callable[[Owner], Reply]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine of the attacker's, with the answer to its challenge request."""

    actor: Actor
    tpm: StagedTpm
    keys: TpmKeys
    challenge: Challenge

    @classmethod
    def enter(cls, owner: Owner, tpm: StagedTpm | None = None) -> Self:
        """Ask for a challenge, with the TPM that the owner accepts unless another is given."""
        tpm = tpm or owner.tpm
        actor, keys = Actor.enter(owner), tpm.keys
        return cls(actor=actor, tpm=tpm, keys=keys, challenge=actor.challenge(keys))

    @property
    def claims(self) -> Claims:
        """Claims that every check accepts."""
        return replace(self.actor.claims(self.challenge), assurance=Assurance.TPM)

    @property
    def secret(self) -> bytes | None:
        """What the challenge's credential holds."""
        credential = self.challenge.credential
        return None if credential is None else self.tpm.activate(credential, self.keys)

    def blob(self, claims: Claims) -> bytes:
        """Return what its TPM says for these claims."""
        return self.tpm.blob(composite(claims), self.keys, self.secret)

    def send(
        self,
        claims: Claims,
        *blobs: tuple[str, bytes],
        behind: Callable[[bytes], bytes] = lambda sent: sent,
    ) -> tuple[Reply, bytes]:
        """Send evidence; return the answer, and the envelope that was sent.

        Args:
            blobs: by kind, as the evidence lists them.
            behind: makes what follows the envelope of what it names.
        """
        envelope = self.actor.sign(claims, [Blob.of(kind, data) for kind, data in blobs])
        rest = behind(b"".join(data for _, data in blobs))
        return self.actor.send(with_blobs(envelope, [rest] if rest else ())), envelope


def _with_blob(edit: Callable[[bytes], bytes]) -> Callable[[Owner], Reply]:
    """Return the attack that changes what follows the envelope, after it was signed."""

    def play(owner: Owner) -> Reply:
        machine = Machine.enter(owner)
        claims = machine.claims
        return machine.send(claims, ("tpm", machine.blob(claims)), behind=edit)[0]

    return play


def _with_tpm(make: Callable[[StagedTpm], StagedTpm]) -> Callable[[Owner], Reply]:
    """Return the attack that asks for a challenge with another TPM."""

    def play(owner: Owner) -> Reply:
        actor = Actor.enter(owner)
        return actor.post("/v1/challenge", challenge_request(actor.launch, make(owner.tpm).keys))

    return play


def _another_machine(owner: Owner) -> Reply:
    machine, other = Machine.enter(owner), replace(owner.tpm, attestation=TpmMaker().key, endorsement=TpmMaker().key)
    claims = machine.claims
    return machine.send(claims, ("tpm", other.blob(composite(claims), other.keys, machine.secret)))[0]


def _another_run(owner: Owner) -> Reply:
    earlier, machine = Machine.enter(owner), Machine.enter(owner)
    claims, quoted = machine.claims, composite(earlier.claims)
    blob = machine.tpm.blob(composite(claims), machine.keys, machine.secret, quoted=quoted)
    return machine.send(claims, ("tpm", blob))[0]


def _another_boot(owner: Owner) -> Reply:
    machine = Machine.enter(owner, replace(owner.tpm, boot=b"another kernel"))
    claims = machine.claims
    return machine.send(claims, ("tpm", machine.blob(claims)))[0]


def _another_credential(owner: Owner) -> Reply:
    earlier, machine = Machine.enter(owner), Machine.enter(owner)
    claims = machine.claims
    return machine.send(claims, ("tpm", machine.tpm.blob(composite(claims), machine.keys, earlier.secret)))[0]


def _no_blob(owner: Owner) -> Reply:
    machine = Machine.enter(owner)
    return machine.send(machine.claims)[0]


def _two_blobs(owner: Owner) -> Reply:
    machine = Machine.enter(owner)
    claims = machine.claims
    return machine.send(claims, ("nvidia", b"{}"), ("tpm", machine.blob(claims)))[0]


def _weaker_level(owner: Owner) -> Reply:
    machine = Machine.enter(owner)
    return machine.send(machine.actor.claims(machine.challenge))[0]


def one_tpm(owner: Owner) -> Reply:
    """The TPM that the policy takes, and evidence of this run."""
    machine = Machine.enter(owner)
    claims = machine.claims
    reply, envelope = machine.send(claims, ("tpm", machine.blob(claims)))
    if machine.actor.open(reply.content(), machine.challenge, envelope) != owner.package_key:
        raise InternalError(Code.INTERNAL, "the broker released another key than the package's")
    return reply


HARDWARE_ATTACKS: dict[str, _Row] = {
    "hardware: another machine's": (
        "the evidence: of another TPM of the same maker, which was not asked for",
        "12",
        Code.TPM_KEY,
        _another_machine,
    ),
    "hardware: another run's": (
        "the quote: bound to the claims of another run",
        "12",
        Code.HARDWARE_BINDING,
        _another_run,
    ),
    "hardware: another kernel": (
        "what the machine booted: a register that the policy does not list",
        "12",
        Code.REFERENCE_VALUE,
        _another_boot,
    ),
    "hardware: another maker": (
        "the TPM: of a maker that the policy does not name",
        "12",
        Code.TPM_ENDORSEMENT,
        _with_tpm(lambda tpm: replace(tpm, maker=TpmMaker())),
    ),
    "hardware: a key that signs all": (
        "the TPM's key: genuine and unrestricted, so that it signs a quote made at home",
        "12",
        Code.TPM_KEY,
        _with_tpm(lambda tpm: replace(tpm, signs_at_home=True)),
    ),
    "hardware: not activated": (
        "the activation: of another challenge's credential",
        "12",
        Code.TPM_ACTIVATION,
        _another_credential,
    ),
    "hardware: a byte behind": (
        "one byte behind the evidence",
        "12",
        Code.HARDWARE_LENGTH,
        _with_blob(lambda sent: sent + b"\0"),
    ),
    "hardware: a byte short": (
        "the evidence's last byte: cut off",
        "12",
        Code.HARDWARE_LENGTH,
        _with_blob(lambda sent: sent[:-1]),
    ),
    "hardware: another byte": (
        "a byte of the evidence, after it was signed",
        "12",
        Code.HARDWARE_DIGEST,
        _with_blob(lambda sent: bytes([sent[0] ^ 1]) + sent[1:]),
    ),
    "hardware: none": ("the evidence: claimed, and not there", "12", Code.HARDWARE_MISSING, _no_blob),
    "hardware: one too many": (
        "evidence of GPUs, which the level does not want",
        "12",
        Code.HARDWARE_UNEXPECTED,
        _two_blobs,
    ),
    "hardware: a weaker level": (
        "the level: software, with nothing to show",
        "12",
        Code.ASSURANCE_TOO_LOW,
        _weaker_level,
    ),
}
