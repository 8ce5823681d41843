"""What stands beside hardware evidence that is appraised: the challenge's keys, the owner's pack, an earlier appraisal.

Law: an earlier appraisal counts for the same evidence with the same pack, until the first certificate or date that it
rests on ends; another pack, and a gate that was restarted, begin anew. Nothing but a decision refuses anything.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, select

from glasshouse.attestation.evidence import SignedEvidence
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.collateral import EMPTY, Pack
from glasshouse.broker.decide.decisions import keep
from glasshouse.broker.decide.hardware.evidence_reading import ReadEvidence
from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import activations, challenges, collateral
from glasshouse.broker.store.key_file import Purpose
from glasshouse.broker.store.recorded import DeploymentStanding
from glasshouse.handshake import broker_side
from glasshouse.handshake.broker_side import NOTHING_SHOWN, Appraisal, Shown
from glasshouse.handshake.messages import Challenge
from glasshouse.handshake.records import LaunchRecord
from glasshouse.wire.crypto import sha256

_MOST_PACKS = 16  # of 2 MiB at most
_MOST_APPRAISALS = 1024
_PACK_SHA256 = select(collateral.c.sha256).where(collateral.c.owner == bindparam("named"))
_PACK = select(collateral.c.pack).where(collateral.c.owner == bindparam("named"))
_USED = select(challenges.c.used_us).where(challenges.c.nonce == bindparam("challenge"))
_KEYS = select(activations).where(activations.c.nonce == bindparam("challenge"))


class HardwareShelf:
    """Reads and remembers it; for the deciding thread, and one ahead of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, tuple[Pack, bytes]] = OrderedDict()
        self._appraised: OrderedDict[str, Mapping[str, Appraised]] = OrderedDict()

    def appraise_ahead(self, broker: BrokerState, read: ReadEvidence) -> None:
        """Run checks 3 to 12 without a lock, so that the decision, which runs them again, finds check 12 done."""

        def look(connection: Connection) -> None:
            standing = recorded.standing(connection, read.asked["deployment"], broker_public=broker.public)
            used_us = connection.execute(_USED, {"challenge": read.asked["nonce"]}).scalar_one_or_none()
            if standing is not None and used_us is None:  # of several recordings that come at once, the first alone
                launch, challenge = recorded.as_launch(read.asked), Challenge.parse(read.asked["body"])
                now_us = max(broker.clock_us(), challenge.issued_us)
                self.appraise(
                    connection, broker, standing, launch, challenge, read.signed, blobs=read.blobs, now_us=now_us
                )

        # Whatever it is, the decision finds it again and answers it, and consumes the challenge.
        with contextlib.suppress(Exception):
            broker.database.read(look)

    def appraise(
        self,
        connection: Connection,
        broker: BrokerState,
        standing: DeploymentStanding,
        launch: LaunchRecord,
        challenge: Challenge,
        signed: SignedEvidence,
        *,
        blobs: Mapping[str, bytes],
        now_us: int,
    ) -> Appraisal:
        """Run checks 3 to 12, and remember what the hardware evidence came to; raises `CheckFailedError`."""
        appraisal = broker_side.appraise(
            signed,
            challenge=challenge,
            record=standing.record,
            launch=launch,
            broker_public=broker.public,
            now_us=now_us,
            shown=self._shown(connection, broker, signed, blobs, nonce=challenge.nonce, owner=standing.owner),
        )
        if appraisal.roots:
            name = _name(appraisal.evidence_sha256, appraisal.collateral_sha256)
            with self._lock:
                keep(self._appraised, name, appraisal.roots, most=_MOST_APPRAISALS)
        return appraisal

    def _shown(
        self,
        connection: Connection,
        broker: BrokerState,
        signed: SignedEvidence,
        blobs: Mapping[str, bytes],
        *,
        nonce: bytes,
        owner: bytes,
    ) -> Shown:
        if not signed.evidence.hardware:
            return NOTHING_SHOWN
        pack, pack_sha256 = self._pack(connection, owner)
        row = connection.execute(_KEYS, {"challenge": nonce}).one_or_none()
        secret = None
        if row is not None and row.secret is not None:
            secret = broker.key_file.unwrap(Purpose.ACTIVATION, nonce.hex(), row.secret)
        return Shown(
            blobs=blobs,
            ak=None if row is None else row.ak,
            ek=None if row is None else row.ek,
            secret=secret,
            collateral=pack,
            collateral_sha256=pack_sha256,
            known=self._appraised.get(_name(signed.sha256, pack_sha256)),
        )

    def _pack(self, connection: Connection, owner: bytes) -> tuple[Pack, bytes | None]:
        named = {"named": owner}
        known_as = connection.execute(_PACK_SHA256, named).scalar_one_or_none()
        if known_as is None:
            return EMPTY, None
        found = self._packs.get(known_as.hex())
        if found is None:
            data = connection.execute(_PACK, named).scalar_one()
            # By its own digest: between two reads another may have come in its place, and owners may share a pack.
            found = Pack.parse(data), sha256(data)
            with self._lock:
                keep(self._packs, found[1].hex(), found, most=_MOST_PACKS)
        return found


def _name(evidence_sha256: bytes, collateral_sha256: bytes | None) -> str:
    return f"{evidence_sha256.hex()} {(collateral_sha256 or b'').hex()}"
