"""The parts that a store has, whole or on their way: whose share they count to, and when they go.

Laws: used on the store's thread alone, once it is made; a header goes before any of its parts; what is counted follows
from what is on the disk, so that nothing of it is in the database.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from sqlalchemy import Connection, func, select

from glasshouse.broker.decide.checkpoints.line_folders import LineFolders
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import legs, lines, releases
from glasshouse.broker.store.uploads import KEPT_US, StoreSpace, Upload, Uploads, counted_bytes
from glasshouse.errors import Code, FormatError, RefusedError
from glasshouse.wire.lines.checkpoint import MAX_WORLD
from glasshouse.wire.lines.statements import PartClaim
from glasshouse.wire.states import Outcome

ENDED_KEPT_US = 24 * 3600 * 1_000_000
_MOST_PARTIAL = MAX_WORLD  # parts of one owner that are not whole: those of the largest world
# Lines of whose last leg every machine left a receipt of work that was completed.
_COMPLETED = (
    select(legs.c.line)
    .join(lines, (lines.c.id == legs.c.line) & (lines.c.leg == legs.c.leg))
    .join(releases, releases.c.run_id == legs.c.run_id)
    .where(releases.c.outcome == Outcome.COMPLETED.value)
    .group_by(legs.c.line)
    .having(func.count() == func.max(lines.c.machines))
)

_Key: TypeAlias = tuple[bytes, int, int, int]  # line, leg, number and rank of a part


class KeptParts:
    """The parts of all lines.

    Attributes:
        folders: where they lie, with headers and notes.
    """

    def __init__(self, broker: BrokerState, space: StoreSpace) -> None:
        self._broker, self._space = broker, space
        self.folders = LineFolders(space.folder / "lines", lambda line: space.executor.submit(self._sweep, line))
        self._uploads: Uploads[_Key] = Uploads(_MOST_PARTIAL)
        space.coming.append(self._uploads)
        self._counted: dict[bytes, dict[Path, int]] = {}  # of each line, what counts to its owner's share
        self._attempts: dict[_Key, int] = {}  # the greatest that was begun
        for line in self.folders.lines():
            self.folders.remove_drafts(line)
            for part in self.folders.parts(line):
                self._count(line, part.path, part.bytes)
                self._attempts[line, part.leg, part.seq, part.rank] = part.attempt
            self._sweep(line)
        self._sweep_old()

    def coming(self, claim: PartClaim) -> Upload | None:
        """Return the part of this rank that is on its way, whichever it is."""
        return self._uploads.get(_key_of(claim))

    def known(self, claim: PartClaim) -> Upload | None:
        """Return the part that was claimed, if it is on its way."""
        return self._uploads.matching(_key_of(claim), sha256=claim.sha256, size=claim.bytes)

    def check_attempt(self, claim: PartClaim) -> None:
        """Refuse what its machine gave up, as a recording of it; raises `RefusedError`, `checkpoint-stale`."""
        if claim.attempt < self._attempts.get(_key_of(claim), 0):
            raise RefusedError(Code.CHECKPOINT_STALE, "a part that its machine gave up for another")

    def begin(self, claim: PartClaim, owner: bytes, path: Path) -> Upload:
        """Reserve what a part takes, in the place of what was here of the same rank's.

        Raises:
            RefusedError: `owner-quota`, `disk-full`, or `checkpoint-stale` where that was counted.
            UsageError: `disk-full`.
        """
        self._sweep_old()
        key = _key_of(claim)
        if key in self._uploads:
            self._give_up(key)
        for part in list(self.folders.parts(claim.line)):
            if (part.leg, part.seq, part.rank) == (claim.leg, claim.seq, claim.rank):
                self.folders.give_up(claim.line, leg=claim.leg, seq=claim.seq)
                self._drop(claim.line, part.path)
        self.folders.own(claim.line, owner)
        self._broker.database.read(lambda connection: self._space.check(connection, owner, counted_bytes(claim.bytes)))
        self._count(claim.line, path, claim.bytes)
        # Before anything is written: what is reserved can be dropped.
        self._attempts[key] = claim.attempt
        self._uploads[key] = Upload(path=path, owner=owner, sha256=claim.sha256, size=claim.bytes)
        return self._uploads[key]

    def add(self, claim: PartClaim, upload: Upload, start: int, data: bytes) -> bool:
        """Take the next piece of a part; return whether it is whole.

        Raises:
            FormatError: `upload-damaged`; nothing of it is here any more.
            UsageError: `disk-full`.
        """
        key = _key_of(claim)
        oldest = self._uploads.came_on(key)
        if oldest is not None:
            self._give_up(oldest)
        if not upload.add(start, data):
            return False
        try:
            upload.check()
        except FormatError:
            self._give_up(key)
            raise
        upload.finish()
        del self._uploads[key]
        return True

    def _sweep(self, line: bytes) -> None:
        """Drop what is neither counted of late nor to come."""
        note = self.folders.note(line)
        last = note.counted
        counted = set() if last is None else {last.digest, last.previous}
        here = set()

        def goes(leg: int, seq: int) -> bool:
            # What comes may follow a ticket that the gate was shown and this store was not.
            return (leg, seq) not in here and not (leg == note.leg and seq > note.seq)

        for header in list(self.folders.headers(line)):
            if header.digest in counted:
                here.add((header.leg, header.seq))
            elif goes(header.leg, header.seq):
                self.folders.drop_header(line, leg=header.leg, seq=header.seq)
        for key in [key for key in self._uploads if key[0] == line and goes(key[1], key[2])]:
            self._give_up(key)
        for key in [key for key in self._attempts if key[0] == line and goes(key[1], key[2])]:
            del self._attempts[key]
        for part in list(self.folders.parts(line)):
            if goes(part.leg, part.seq):
                self._drop(line, part.path)

    def _sweep_old(self) -> None:
        """Drop checkpoints that are not needed any more; what is newest of their lines stays known."""
        now_us = self._broker.clock_us()
        since_us = {line: self.folders.changed_us(line) for line, counted in self._counted.items() if counted}
        old = {line for line, changed_us in since_us.items() if changed_us <= now_us - KEPT_US}
        ended = {line for line, changed_us in since_us.items() if changed_us <= now_us - ENDED_KEPT_US} - old
        if ended:
            old |= ended & self._broker.database.read(_completed)
        for line in old:
            for header in list(self.folders.headers(line)):
                self.folders.drop_header(line, leg=header.leg, seq=header.seq)
            for path in list(self._counted[line]):
                self._drop(line, path)

    def _count(self, line: bytes, path: Path, size: int) -> None:
        owner = self.folders.note(line).owner
        if owner is not None:
            self._counted.setdefault(line, {})[path] = counted_bytes(size)
            self._space.checkpoints[owner] += counted_bytes(size)

    def _drop(self, line: bytes, path: Path) -> None:
        owner = self.folders.note(line).owner
        if owner is not None:
            self._space.checkpoints[owner] -= self._counted.get(line, {}).pop(path, 0)
        path.unlink(missing_ok=True)

    def _give_up(self, key: _Key) -> None:
        upload = self._uploads.pop(key)
        upload.part.unlink(missing_ok=True)
        self._drop(key[0], upload.path)


def _completed(connection: Connection) -> set[bytes]:
    return set(connection.execute(_COMPLETED).scalars())


def _key_of(claim: PartClaim) -> _Key:
    return claim.line, claim.leg, claim.seq, claim.rank
