"""The claims of the runtime's evidence, and the composite digest that binds them to hardware.

An EAT claims set (RFC 9711 names where one exists: `eat_nonce`, `eat_profile`, `cnf`); the rest is
defined in spec/key-release.md section 4. Law: parse then encode reproduces the input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from glasshouse.attestation.confirmation import CONFIRMATION, Confirmed
from glasshouse.attestation.hardening import HardeningReport
from glasshouse.attestation.measurements.measured import Measured
from glasshouse.errors import Code, FormatError
from glasshouse.wire import jwt
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.crypto import HPKE_PUBLIC_BYTES, lengths_prefixed, sha256
from glasshouse.wire.policy import Assurance
from glasshouse.wire.record import IDENTIFIER, Id, Identifier, Member, Record, Sha256, digest, items, octets, text
from glasshouse.wire.states import State

EAT_PROFILE = "urn:glasshouse:evidence:2"
EAT_PROFILE_1 = "urn:glasshouse:evidence:1"
"""Of evidence whose measurement has no parts: receipts of that time are still read, and no gate releases to it."""

NONCE_BYTES = 32
ID_BYTES = 16
MAX_GPUS = 64
_PRINTABLE = re.compile(r"[ -~]*")  # shown to people: no control characters
_COMPOSITE_LABEL = b"glasshouse composite v1"


class ContainerSource(StrEnum):
    """Where the container id came from: placement minted it, or the platform gave it."""

    MINTED = "minted"
    PLATFORM = "platform"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu(Record, name="claims.gpus"):
    """One accelerator as the runtime sees it."""

    name: Annotated[str, text(128, _PRINTABLE)]  # of the product, by the driver
    memory_bytes: int
    driver: Annotated[str, text(64, _PRINTABLE)]  # its version
    uuid: Annotated[str, text(64, _PRINTABLE)]


def _read_measurement(value: Json, where: str) -> Measured | bytes:
    return digest().read(value, where) if isinstance(value, str) else Measured.from_json(value)


def _write_measurement(measured: Measured | bytes) -> Json:
    return measured.to_json() if isinstance(measured, Measured) else measured.hex()


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims(Record, name="claims", constants=CONFIRMATION, derived={"eat_profile": "eat_profile"}):
    """The claims of a runtime about itself, unverified before the gate's checks."""

    nonce: Annotated[bytes, octets(NONCE_BYTES), Member("eat_nonce")]  # the challenge's
    issued_us: int  # when the claims were made, by the runtime's clock
    started_us: int  # when the runtime started
    # The package that it wants to open.
    manifest_sha256: Sha256
    package_id: Id
    # The launch that it belongs to.
    deployment: Id
    run_id: Id
    container_id: Annotated[Identifier, Member("container", "id")]
    container_source: Annotated[ContainerSource, Member("container", "source")]
    # By part (`measurement.measure_runtime`); of evidence of profile 1, which has no parts, one digest.
    measurement: Annotated[Measured | bytes, Codec(_read_measurement, _write_measurement)]
    environment_sha256: Sha256  # of what else is installed
    hardening: HardeningReport  # as observed of agent and worker
    state: State  # `measured` in acceptable evidence
    gpus: Annotated[tuple[Gpu, ...], items(MAX_GPUS)]  # in sight
    assurance: Assurance  # that the hardware evidence beside the claims is to prove
    hpke_public: Annotated[bytes, octets(HPKE_PUBLIC_BYTES)]  # its private half never left the custodian
    evidence_public: Confirmed  # the key that signs this evidence and later the run's log and receipt
    token: Annotated[str, text(jwt.MAX_TOKEN_BYTES)]  # the launch token, compact

    def __post_init__(self) -> None:
        sizes = (
            (self.nonce, NONCE_BYTES),
            (self.manifest_sha256, 32),
            (self.measurement_sha256, 32),
            (self.environment_sha256, 32),
            (self.evidence_public, 32),
            (self.hpke_public, HPKE_PUBLIC_BYTES),
        )
        if any(len(value) != size for value, size in sizes):
            raise FormatError(Code.SCHEMA, "a claim that is a digest, key or nonce has the wrong length")
        if not IDENTIFIER.fullmatch(self.container_id):
            raise FormatError(Code.SCHEMA, "claims.container.id is not an identifier")

    @property
    def measurement_sha256(self) -> bytes:
        """One digest over the whole runtime measurement: what receipt and artifact name."""
        return self.measurement.sha256 if isinstance(self.measurement, Measured) else self.measurement

    @property
    def eat_profile(self) -> str:
        """The profile of the evidence, by whether its measurement has parts."""
        return EAT_PROFILE if isinstance(self.measurement, Measured) else EAT_PROFILE_1


def composite(claims: Claims) -> bytes:
    """Return the 32 bytes that each hardware root carries as user data: they cover all claims, with the keys."""
    return sha256(lengths_prefixed(_COMPOSITE_LABEL, claims.encode()))
