"""The claims of the runtime's evidence, and the composite digest that binds them to hardware.

An EAT claims set (RFC 9711 names where one exists: `eat_nonce`, `eat_profile`, `cnf`); the rest is
defined in spec/key-release.md section 4. Law: parse then encode reproduces the input.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from glasshouse.attestation.confirmation import confirmation, confirmed_key
from glasshouse.attestation.hardening import HardeningReport
from glasshouse.attestation.measured import Measured
from glasshouse.errors import Code, FormatError
from glasshouse.wire import hpke, jwt
from glasshouse.wire.canonical import Json, encode
from glasshouse.wire.fields import IDENTIFIER, Fields, b64encode
from glasshouse.wire.kdf import lengths_prefixed, sha256
from glasshouse.wire.policy import Assurance
from glasshouse.wire.states import State

__all__ = ["EAT_PROFILE", "EAT_PROFILE_1", "ID_BYTES", "NONCE_BYTES", "Claims", "ContainerSource", "Gpu", "composite"]

EAT_PROFILE = "urn:glasshouse:evidence:2"
EAT_PROFILE_1 = "urn:glasshouse:evidence:1"
"""Of evidence whose measurement has no parts: receipts of that time are still read, and no gate releases to it."""

NONCE_BYTES = 32
ID_BYTES = 16
MAX_GPUS = 64
_PRINTABLE = re.compile(r"[ -~]*")  # shown to people: no control characters
_COMPOSITE_LABEL = b"glasshouse composite v1"


class ContainerSource(StrEnum):
    """Where the container id came from: placement made it up, or the platform told it."""

    MINTED = "minted"
    PLATFORM = "platform"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator as the runtime sees it.

    Attributes:
        name: the driver's product name.
        memory_bytes: its memory.
        driver: the driver's version.
        uuid: the device's identifier.
    """

    name: str
    memory_bytes: int
    driver: str
    uuid: str

    def to_json(self) -> dict[str, Json]:
        return {"driver": self.driver, "memory_bytes": self.memory_bytes, "name": self.name, "uuid": self.uuid}

    @classmethod
    def from_json(cls, value: Json) -> Gpu:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "claims.gpus")
        gpu = cls(
            name=fields.text("name", max_chars=128, pattern=_PRINTABLE),
            memory_bytes=fields.integer("memory_bytes"),
            driver=fields.text("driver", max_chars=64, pattern=_PRINTABLE),
            uuid=fields.text("uuid", max_chars=64, pattern=_PRINTABLE),
        )
        fields.end()
        return gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """What a runtime says about itself; nothing in it is believed before the gate's checks.

    Law: ``Claims.from_json(c.to_json()) == c``.

    Attributes:
        nonce: the challenge's 32 bytes.
        issued_us: when the claims were made, by the runtime's clock.
        started_us: when the runtime started.
        manifest_sha256, package_id: the package it wants to open.
        deployment, run_id, container_id, container_source: the launch it belongs to.
        measurement: the runtime measurement (`measurement.measure_runtime`); of evidence of profile 1, which has no
            parts, its digest.
        environment_sha256: the digest of what else is installed.
        hardening: what was observed of agent and worker.
        state: the runtime's state, `measured` in acceptable evidence.
        gpus: accelerators in sight.
        assurance: the level that the hardware evidence beside the claims is to prove.
        hpke_public: where a release goes; its private half never left the custodian.
        evidence_public: the key that signs this evidence and later the run's log and receipt.
        token: the launch token, compact.
    """

    nonce: bytes
    issued_us: int
    started_us: int
    manifest_sha256: bytes
    package_id: str
    deployment: str
    run_id: str
    container_id: str
    container_source: ContainerSource
    measurement: Measured | bytes
    environment_sha256: bytes
    hardening: HardeningReport
    state: State
    gpus: tuple[Gpu, ...]
    assurance: Assurance
    hpke_public: bytes
    evidence_public: bytes
    token: str

    def __post_init__(self) -> None:
        sizes = (
            (self.nonce, NONCE_BYTES),
            (self.manifest_sha256, 32),
            (self.measurement_sha256, 32),
            (self.environment_sha256, 32),
            (self.evidence_public, 32),
            (self.hpke_public, hpke.PUBLIC_BYTES),
        )
        if any(len(value) != size for value, size in sizes):
            raise FormatError(Code.SCHEMA, "a claim that is a digest, key or nonce has the wrong length")
        if not IDENTIFIER.fullmatch(self.container_id):
            raise FormatError(Code.SCHEMA, "claims.container.id is not an identifier")

    @property
    def measurement_sha256(self) -> bytes:
        """One digest over the whole runtime measurement: what receipt and artifact name."""
        return self.measurement.sha256 if isinstance(self.measurement, Measured) else self.measurement

    def to_json(self) -> dict[str, Json]:
        measured = self.measurement
        return {
            "assurance": self.assurance.value,
            "cnf": confirmation(self.evidence_public),
            "container": {"id": self.container_id, "source": self.container_source.value},
            "deployment": self.deployment,
            "eat_nonce": b64encode(self.nonce),
            "eat_profile": EAT_PROFILE if isinstance(measured, Measured) else EAT_PROFILE_1,
            "environment_sha256": self.environment_sha256.hex(),
            "gpus": [gpu.to_json() for gpu in self.gpus],
            "hardening": self.hardening.to_json(),
            "hpke_public": b64encode(self.hpke_public),
            "issued_us": self.issued_us,
            "manifest_sha256": self.manifest_sha256.hex(),
            "measurement": measured.to_json() if isinstance(measured, Measured) else measured.hex(),
            "package_id": self.package_id,
            "run_id": self.run_id,
            "started_us": self.started_us,
            "state": self.state.value,
            "token": self.token,
        }

    def encode(self) -> bytes:
        """Return the canonical bytes: what the composite is over."""
        return encode(self.to_json())

    @classmethod
    def from_json(cls, value: Json) -> Claims:
        """Inverse of `to_json`; raises `FormatError`."""
        fields = Fields(value, "claims")
        profile = fields.choice("eat_profile", [EAT_PROFILE, EAT_PROFILE_1])
        container = fields.child("container")
        claims = cls(
            nonce=fields.octets("eat_nonce", length=NONCE_BYTES),
            issued_us=fields.integer("issued_us"),
            started_us=fields.integer("started_us"),
            manifest_sha256=fields.digest("manifest_sha256"),
            package_id=fields.digest("package_id", length=ID_BYTES).hex(),
            deployment=fields.digest("deployment", length=ID_BYTES).hex(),
            run_id=fields.digest("run_id", length=ID_BYTES).hex(),
            container_id=container.identifier("id"),
            container_source=ContainerSource(container.choice("source", list(ContainerSource))),
            measurement=Measured.from_json(fields.any("measurement"))
            if profile == EAT_PROFILE
            else fields.digest("measurement"),
            environment_sha256=fields.digest("environment_sha256"),
            hardening=HardeningReport.from_json(fields.any("hardening")),
            state=State(fields.choice("state", list(State))),
            gpus=tuple(Gpu.from_json(item) for item in fields.items("gpus", max_items=MAX_GPUS)),
            assurance=Assurance(fields.choice("assurance", list(Assurance))),
            hpke_public=fields.octets("hpke_public", length=hpke.PUBLIC_BYTES),
            evidence_public=confirmed_key(fields),
            token=fields.text("token", max_chars=jwt.MAX_TOKEN_BYTES),
        )
        container.end()
        fields.end()
        return claims


def composite(claims: Claims) -> bytes:
    """Return the 32 bytes that every hardware root must carry as its user data.

    They cover every claim, and so the HPKE key, the evidence key and the challenge.
    """
    return sha256(lengths_prefixed(_COMPOSITE_LABEL, claims.encode()))
