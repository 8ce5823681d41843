"""Bodies of an owner's requests, and what answers them (spec/owner-api.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from glasshouse.attestation.claims import ContainerSource
from glasshouse.errors import Code
from glasshouse.wire.canonical import Codec, Json
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.group import MAX_MACHINES, MAX_RANKS, Group
from glasshouse.wire.record import (
    LEFT_OUT,
    Id,
    Identifier,
    Member,
    Record,
    Sha256,
    integer,
    items,
    octets,
    raw,
    text,
)

MAX_BODY_BYTES = 256 * 1024
_MAX_LAUNCH_LIFETIME_S = 7 * 24 * 3600
_MAX_FILES = 16384
_PUBLIC = octets(32)
_TEXT = text()
_PATH = Codec(lambda value, where: Path(_TEXT.read(value, where)), str)


@dataclass(frozen=True, kw_only=True, slots=True)
class DelegationRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Delegates to the broker."""

    delegation: Envelope
    owner: Annotated[bytes, _PUBLIC]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Gives the broker a package's manifest and key, and the policy of one deployment."""

    manifest: Envelope
    package_key: Annotated[bytes, octets(32)] = field(repr=False)
    policy: Annotated[Json, raw()]  # over the network in an envelope of its owner's


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Records a launch, which gets a token."""

    container_id: Annotated[Identifier, Member("container", "id")]
    container_source: Annotated[ContainerSource, Member("container", "source")]
    deployment: Id
    run_id: Id
    launch_public: Annotated[bytes, _PUBLIC]
    lifetime_s: Annotated[int, integer(1, _MAX_LAUNCH_LIFETIME_S)]
    group: Annotated[Group | None, LEFT_OUT] = None  # the machine's place in one


@dataclass(frozen=True, kw_only=True, slots=True)
class RevocationRequest(Record, name="request", max_bytes=MAX_BODY_BYTES):
    """Ends the releases of a package's key."""

    running: Annotated[bool, LEFT_OUT] = False  # whether its runs are to end too


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest(Record, name="request", max_bytes=4096):
    """Announces a group."""

    deployment: Id
    machines: Annotated[int, integer(1, MAX_MACHINES)]
    ranks: Annotated[int, integer(1, MAX_RANKS)]  # on each machine


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRefusal(Record, name="request", max_bytes=4096):
    """Reports that a machine of a group has ended."""

    code: Code
    machine: Annotated[int, integer(0, MAX_MACHINES - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForgetRequest(Record, name="request", max_bytes=64):
    """Removes what is stored of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile(Record, name="stored file"):
    """A file of a run that is stored whole."""

    name: Annotated[str, _TEXT]
    bytes: int
    sha256: Sha256


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFiles(Record, name="stored files"):
    """All files of a run that are stored whole."""

    files: Annotated[tuple[StoredFile, ...], items(_MAX_FILES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerReady(Record, name="ready line", max_bytes=8192):
    """Where a broker listens."""

    runtime_url: Annotated[str, text(512)]  # ``http://host:port`` or ``unix:/path``, as in a launch file
    owner_socket: Annotated[Path, _PATH]
    broker_public: Annotated[bytes, _PUBLIC]  # the key that the owner delegates to


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReady(BrokerReady):
    """Where a gate listens."""

    gate: Annotated[str, text(512)]  # for owners and places over the network
    certificate: Sha256 | None  # of its own certificate; None without TLS of its own
