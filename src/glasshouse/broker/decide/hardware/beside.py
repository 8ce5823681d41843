"""What stands beside hardware evidence that is appraised: the challenge's keys, the owner's pack, an earlier appraisal.

Law: an earlier appraisal counts for the same evidence with the same pack, until the first certificate or date that it
rests on ends; another pack, and a gate that was restarted, begin anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from sqlalchemy import Connection, bindparam, select

from glasshouse.attestation.evidence import SignedEvidence
from glasshouse.attestation.roots.appraised import Appraised
from glasshouse.attestation.roots.collateral import EMPTY, Pack
from glasshouse.broker.decide.decisions import keep
from glasshouse.broker.store.database_schema import activations, collateral
from glasshouse.broker.store.key_file import KeyFile, Purpose
from glasshouse.handshake.broker_side import NOTHING_SHOWN, Appraisal, Shown
from glasshouse.wire.crypto import sha256

_MOST_PACKS = 16  # of 2 MiB at most
_MOST_APPRAISALS = 1024
_PACK_SHA256 = select(collateral.c.sha256).where(collateral.c.owner == bindparam("named"))
_PACK = select(collateral.c.pack).where(collateral.c.owner == bindparam("named"))
_KEYS = select(activations).where(activations.c.nonce == bindparam("challenge"))


class HardwareShelf:
    """Reads and remembers it; for the deciding thread alone."""

    def __init__(self) -> None:
        self._packs: OrderedDict[str, tuple[Pack, bytes]] = OrderedDict()
        self._appraised: OrderedDict[str, Mapping[str, Appraised]] = OrderedDict()

    def shown(
        self,
        connection: Connection,
        signed: SignedEvidence,
        blobs: Mapping[str, bytes],
        *,
        nonce: bytes,
        owner: bytes,
        key_file: KeyFile,
    ) -> Shown:
        """Return what check 12 needs beside this evidence.

        Args:
            nonce: of the challenge that it answers.
            owner: the package's.
        """
        if not signed.evidence.hardware:
            return NOTHING_SHOWN
        pack, pack_sha256 = self._pack(connection, owner)
        row = connection.execute(_KEYS, {"challenge": nonce}).one_or_none()
        secret = None
        if row is not None and row.secret is not None:
            secret = key_file.unwrap(Purpose.ACTIVATION, nonce.hex(), row.secret)
        return Shown(
            blobs=blobs,
            ak=None if row is None else row.ak,
            ek=None if row is None else row.ek,
            secret=secret,
            collateral=pack,
            collateral_sha256=pack_sha256,
            known=self._appraised.get(_name(signed.sha256, pack_sha256)),
        )

    def keep(self, appraisal: Appraisal) -> None:
        """Remember an appraisal for the release of its group."""
        if appraisal.roots:
            name = _name(appraisal.evidence_sha256, appraisal.collateral_sha256)
            keep(self._appraised, name, appraisal.roots, most=_MOST_APPRAISALS)

    def _pack(self, connection: Connection, owner: bytes) -> tuple[Pack, bytes | None]:
        named = {"named": owner}
        known_as = connection.execute(_PACK_SHA256, named).scalar_one_or_none()
        if known_as is None:
            return EMPTY, None
        found = self._packs.get(known_as.hex())
        if found is None:
            data = connection.execute(_PACK, named).scalar_one()
            found = Pack.parse(data), sha256(data)  # its own digest, whatever the database says
            keep(self._packs, known_as.hex(), found, most=_MOST_PACKS)
        return found


def _name(evidence_sha256: bytes, collateral_sha256: bytes | None) -> str:
    return f"{evidence_sha256.hex()} {(collateral_sha256 or b'').hex()}"
