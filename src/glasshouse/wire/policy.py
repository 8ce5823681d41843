"""What an owner signs into a package: the name of its workload, levels of assurance and hardening, the policy floor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from glasshouse.errors import Code, FormatError
from glasshouse.wire.canonical import Codec
from glasshouse.wire.crypto import sha256
from glasshouse.wire.record import LEFT_OUT, Member, Record, choice, items, text

SCRIPT = "script"  # runs an owner's own program
WORKLOADS = ("lora", SCRIPT, "mlp")  # what each is, is in `workloads.registry`
RANKED = ("lora", SCRIPT)  # run in several ranks where they are asked to

GROUP_EGRESS = "group"
"""Among the egress peers: sealed traffic with the other machines of the run's own group, and with no other."""

_PEER = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}:[0-9]{1,5}")
_MAX_PEERS = 16
_DISK = "disk"  # memory has no word: that it is left out is its one encoding
_ON_DISK = Codec(lambda value, where: choice((_DISK,)).read(value, where) == _DISK, lambda _: _DISK)


class _Ordered(StrEnum):
    """Levels in the order of their definition, weakest first."""

    def at_least(self, other: _Ordered) -> bool:
        levels = list(type(self))
        return levels.index(self) >= levels.index(type(self)(other))


class Assurance(_Ordered):
    """What stands behind the evidence."""

    SOFTWARE = "software"
    TPM = "tpm"
    CPU_TEE = "cpu-tee"
    GPU_TEE = "gpu-tee"


class Profile(_Ordered):
    """How hardened the runtime's processes are."""

    OFF = "off"
    STANDARD = "standard"
    STRICT = "strict"


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor(Record, name="floor"):
    """What the owner demands of every runtime that may open a package; a deployment may only tighten it."""

    assurance: Assurance  # at least
    profile: Profile  # at least: `standard` or `strict`
    # ``host:port`` peers that the worker may reach, or `GROUP_EGRESS`; empty means none.
    egress: Annotated[tuple[str, ...], items(_MAX_PEERS, text())] = ()
    # Whether the worker's files may lie on the machine's disk where nothing can be mounted.
    disk: Annotated[bool, Member("workspace"), _ON_DISK, LEFT_OUT] = False

    def __post_init__(self) -> None:
        if self.profile is Profile.OFF:
            raise FormatError(Code.POLICY_IMPOSSIBLE, "a policy floor with hardening off protects nothing")
        if len(self.egress) > _MAX_PEERS or list(self.egress) != sorted(set(self.egress)):
            raise FormatError(Code.SCHEMA, "egress peers that are too many, repeated or unsorted")
        for peer in self.egress:
            if peer == GROUP_EGRESS:
                continue
            if not _PEER.fullmatch(peer) or not 0 < int(peer.rpartition(":")[2]) < 65536:
                raise FormatError(Code.SCHEMA, "an egress peer that is neither host:port nor group")

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the canonical form: the floor digest in token, EAR and receipt."""
        return sha256(self.encode())
