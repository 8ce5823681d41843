"""Reads evidence: first its envelope, then, of what is authentic and may yet be accepted, the hardware behind it.

Laws: nothing is written here and no lock taken; of evidence that fails check 1 or 4 nothing but the envelope is read.
Signed evidence with another tail, which an attacker on the way can put there, changes nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from sqlalchemy import Connection, RowMapping, bindparam, select

from glasshouse.attestation.detached import check_blobs, check_length, envelope_of
from glasshouse.attestation.evidence import SignedEvidence
from glasshouse.attestation.verify import check_1_envelope, check_1_payload, check_4_signatures
from glasshouse.broker.decide.challenges import check_2
from glasshouse.broker.decide.decisions import Decision, Rest
from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import challenges, launches
from glasshouse.handshake.broker_side import check_2_known
from glasshouse.handshake.messages import Challenge

# Built once: to build a statement costs as much as to run it.
_BY_NONCE = (
    select(challenges.c.nonce, challenges.c.body, challenges.c.used_us, challenges.c.replays, *recorded.LAUNCH_COLUMNS)
    .select_from(recorded.LAUNCH_SOURCE.join(challenges, challenges.c.jti == launches.c.jti))
    .where(challenges.c.nonce == bindparam("nonce"))
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadEvidence:
    """Evidence that passed checks 1 and 4."""

    asked: RowMapping  # its challenge and launch
    signed: SignedEvidence
    message: bytes  # the whole body
    is_fresh: bool  # whether its challenge is unused and not over, for all that was seen without a lock
    blobs: Mapping[str, bytes] = field(default_factory=dict)  # by kind; empty where they were not read


def read_evidence(broker: BrokerState, body: bytes, decided: Callable[[ReadEvidence], Decision]) -> Decision | Rest:
    """Read the first part of evidence; return what `decided` makes of it, or what has to be read before.

    Raises:
        CheckFailedError: checks 1 and 4, `nonce-unknown`, `hardware-length` and, from what is returned,
            `hardware-digest`.
    """
    envelope, in_parts = envelope_of(body)
    opened = check_1_envelope(envelope)

    # What is read here, challenge and launch, is never changed once it is written.
    def look(connection: Connection) -> RowMapping | None:
        return connection.execute(_BY_NONCE, {"nonce": opened.nonce}).mappings().one_or_none()

    asked = check_2_known(broker.database.read(look))
    # Before anything is consumed, counted, recorded or refused: a nonce is no secret.
    check_4_signatures(opened.envelope, evidence_public=opened.evidence_public, launch_public=asked["launch_public"])
    signed = check_1_payload(opened)  # not before: it is dear
    if asked["replays"]:  # used, and a replay was recorded before: a recording played again writes nothing
        check_2(asked["body"], used=True, now_us=broker.clock_us())
    named = signed.evidence.hardware
    fresh = asked["used_us"] is None and broker.clock_us() < Challenge.parse(asked["body"]).expires_us
    read = partial(ReadEvidence, asked=asked, signed=signed, is_fresh=fresh)
    if not in_parts and not named:
        return decided(read(message=body))
    if named and not (fresh and _is_wanted(broker, asked["deployment"])):
        return decided(read(message=body))  # refused whatever follows
    return Rest(
        of=asked["jti"],
        size=sum(blob.size for blob in named),
        check=lambda behind: check_length(signed.evidence, behind if in_parts else None),
        read=lambda rest: decided(read(message=body + rest, blobs=check_blobs(signed.evidence, rest))),
    )


def _is_wanted(broker: BrokerState, deployment: str) -> bool:
    """Return whether a deployment's policy takes hardware evidence at all."""
    found = broker.database.read(
        lambda connection: recorded.standing(connection, deployment, broker_public=broker.public)
    )
    return found is not None and found.record.policy.hardware is not None
