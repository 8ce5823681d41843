"""Stores what runs leave at a gate with a store, until their owners fetch it (spec/owner-api.md section 7).

Laws: nothing is written that the run's own log, countersigned here, does not name; the whole length is reserved with
the first part, within what one owner may have; a file has its name only once it is whole and has its digest; what is
another owner's is answered as what does not exist. What is kept here is opened by its owner alone and proves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from glasshouse.broker.decide.owner_views import launch_of
from glasshouse.broker.http.endpoints import Answer, Decision
from glasshouse.broker.http.intake import Effect
from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import Database
from glasshouse.broker.store.database_schema import packages, stored
from glasshouse.broker.store.key_file import private_directory, read_private_file, write_private_file
from glasshouse.broker.store.scope import Scope
from glasshouse.errors import Code, FormatError, RefusedError, UsageError
from glasshouse.evidence.bundle import Bundle
from glasshouse.evidence.events import MAX_EVENT_BYTES
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, CountersignedHead, Head
from glasshouse.evidence.receipt import Receipt
from glasshouse.evidence.stored import ANY_NAME, HEADS_NAME, LOG_NAME, RECEIPT_NAME, StoredPart
from glasshouse.wire.canonical import decode
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.fields import Fields, b64encode
from glasshouse.wire.kdf import sha256
from glasshouse.wire.merkle import leaf_hash, root_of

__all__ = ["KEPT_US", "Store"]

KEPT_US = 30 * 24 * 3600 * 1_000_000
PIECE_BYTES = 1 << 20
LEAST_BYTES = 64 * 1024  # a file counts as no less, so that the bound in bytes is one on their number too
MOST_PARTIAL = 8  # files of one owner that are not whole
_FORGOTTEN = ""  # the name of no file: the row of a run that its owner had removed
_MARK = "gate.public"  # in the folder: the key of the gate whose store it is
_RUN_ID = re.compile(r"[0-9a-f]{32}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class _Partial:
    """A file that is not whole yet: whose it is, what it shall be, how much is here, and the digest of that."""

    owner: bytes
    sha256: bytes
    size: int
    bytes: int = 0
    so_far: Any = field(default_factory=hashlib.sha256)


class Store:
    """What runs left here.

    Args:
        database: of what is stored.
        broker_public: this gate's signing key.
        folder: of the files; made with mode 0700. One gate's alone: it is empty, or has that gate's mark.
        limit_bytes: the most that may be kept in all.
        owners: how many are enrolled: each may have an equal part of it.
        clock_us: microseconds since the epoch.

    Raises:
        UsageError: a folder that others can enter, that cannot be made, or that is not empty and not this gate's store.
    """

    def __init__(
        self,
        database: Database,
        broker_public: bytes,
        *,
        folder: Path,
        limit_bytes: int,
        owners: int,
        clock_us: Callable[[], int],
    ) -> None:
        private_directory(folder, what="store")
        _check_own(folder, broker_public)
        self._database = database
        self._public = broker_public
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._share_bytes = limit_bytes // max(1, owners)
        self._clock_us = clock_us
        self._partial: OrderedDict[tuple[str, str], _Partial] = OrderedDict()
        # Not the thread that decides: a disk that is slow to sync would hold up releases.
        self.executor = ThreadPoolExecutor(1, "store")
        self._begin()

    def close(self) -> None:
        """Finish what is being written."""
        self.executor.shutdown()

    def _begin(self) -> None:
        """Remove what was not whole when the gate ended, and files without a record."""
        self._database.write(lambda connection: connection.execute(delete(stored).where(~stored.c.whole)))
        for run_id in self._database.write(self._expire):
            self._remove(run_id)
        rows = self._database.read(lambda connection: connection.execute(select(stored.c.run_id, stored.c.name)).all())
        known = {self._path(row.run_id, row.name) for row in rows}
        for run in self._folder.iterdir():
            if _RUN_ID.fullmatch(run.name) and stat.S_ISDIR(run.lstat().st_mode):
                for path in run.iterdir():
                    if path not in known and _is_stored(path):
                        path.unlink()

    def take(self, body: bytes) -> Decision:
        """Read a part of a file; what is returned writes it.

        Raises:
            RefusedError: checks 1 to 4 of spec/owner-api.md, section 7. The decision: checks 5 and 6, as
                `head-inconsistent` and `owner-quota`; `UsageError`, `disk-full`; `FormatError`, `upload-damaged`.
        """
        part = StoredPart.parse(body)
        run_id, signer = part.claimed(self._public)

        def judge(connection: Connection) -> tuple[recorded.Attested, Head]:
            found = recorded.attested(connection, run_id, signer, broker_public=self._public)
            evidence_public = found.row["evidence_public"]
            head = part.check(run_id=found.row["run_id"], broker_public=self._public, evidence_public=evidence_public)
            if part.name == HEADS_NAME and part.size > (head.sequence + 1) * (MAX_COUNTERSIGNED_HEAD_BYTES + 1):
                raise RefusedError(Code.HEAD_INCONSISTENT, "more bytes than the run's heads can have")
            return found, head

        found, head = self._database.read(judge)
        known = self._partial.get((run_id, part.name))
        # What changes nothing is no sign of life: a recording can be sent again, of a first part too.
        goes_on = bool(part.data) and known is not None and part.start == known.bytes > 0
        effect = Effect.CREDIT if goes_on else Effect.CHARGE
        return Decision(decide=partial(self._keep, part, run_id, found, head), effect=effect)

    def _keep(self, part: StoredPart, run_id: str, found: recorded.Attested, head: Head) -> Answer:
        key = run_id, part.name
        path, known = self._path(*key), self._partial.get(key)
        if known is None or (known.sha256, known.size) != (part.sha256, part.size):
            rows = self._database.read(lambda connection: _rows(connection, run_id))
            if part.name in rows and rows[part.name].whole:
                return Answer.of({"bytes": rows[part.name].bytes, "whole": True})
            self._check_receipt(part, run_id, rows)
            if part.start or not part.data:
                return Answer.of({"bytes": 0, "whole": False})
            owner, expired = self._database.write(
                lambda connection: self._reserve(connection, part, run_id, found.package_id)
            )
            for old in expired:
                self._remove(old)
            known = _Partial(owner=owner, sha256=part.sha256, size=part.size)
            self._partial[key] = known  # before anything is written: what is reserved can be dropped
        self._partial.move_to_end(key)
        theirs = [one for one, it in self._partial.items() if it.owner == known.owner]
        if len(theirs) > MOST_PARTIAL:
            self._drop(*theirs[0])
        if part.start == known.bytes:
            self._write(path, part)
            known.bytes += len(part.data)
            known.so_far.update(part.data)
        if known.bytes < part.size:
            return Answer.of({"bytes": known.bytes, "whole": False})
        if known.so_far.digest() != part.sha256:
            self._drop(*key)
            raise FormatError(Code.UPLOAD_DAMAGED, "a file that arrived with another digest; nothing of it is kept")
        receipt = (
            _receipt(self._partly(path), found.row["receipt_sha256"] or b"") if part.name == RECEIPT_NAME else None
        )
        if not (receipt or self._is_genuine(part, self._partly(path), found, head)):
            self._drop(*key)
            raise FormatError(Code.UPLOAD_DAMAGED, f"{part.name} is not what was countersigned for this run")
        self._finish(path, *key)
        if receipt is not None:
            self._hold_to(receipt, run_id)
        return Answer.of({"bytes": part.size, "whole": True})

    def _check_receipt(self, part: StoredPart, run_id: str, rows: Mapping[str, Any]) -> None:
        """Make the first half of check 5."""
        if part.name.startswith("outputs/") and RECEIPT_NAME in rows and rows[RECEIPT_NAME].whole:
            receipt = _receipt(self._path(run_id, RECEIPT_NAME))
            if receipt is None or _named(receipt).get(part.name) != (part.size, part.sha256):
                raise RefusedError(Code.HEAD_INCONSISTENT, "an output that the run's receipt does not name")

    def _reserve(
        self, connection: Connection, part: StoredPart, run_id: str, package_row: str
    ) -> tuple[bytes, list[str]]:
        """Make the other half of check 5, and check 6, and reserve the length of a whole file.

        Returns:
            Its owner, and the runs that were removed for their age.
        """
        expired = self._expire(connection)
        if connection.execute(select(stored.c.name).where(*_is(run_id, _FORGOTTEN))).first() is not None:
            raise RefusedError(Code.HEAD_INCONSISTENT, "the run's owner had it removed")
        theirs_is = select(packages.c.owner).where(packages.c.package_id == package_row)
        owner = bytes(connection.execute(theirs_is).scalar_one())
        connection.execute(delete(stored).where(*_is(run_id, part.name)))
        counted = max(part.size, LEAST_BYTES)
        total = select(func.coalesce(func.sum(stored.c.counted), 0))
        theirs = connection.execute(total.where(stored.c.owner == owner)).scalar_one()
        if theirs + counted > self._share_bytes or connection.execute(total).scalar_one() + counted > self._limit_bytes:
            raise RefusedError(
                Code.OWNER_QUOTA,
                f"this gate stores {self._share_bytes} bytes of one owner, and has no room for this file beside theirs",
            )
        connection.execute(
            insert(stored).values(
                run_id=run_id,
                name=part.name,
                owner=owner,
                bytes=part.size,
                counted=counted,
                sha256=part.sha256,
                whole=False,
                stored_us=self._clock_us(),
            )
        )
        return owner, expired

    def _write(self, path: Path, part: StoredPart) -> None:
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if part.start else os.O_TRUNC)
            descriptor = os.open(self._partly(path), flags, 0o600)
            with os.fdopen(descriptor, "wb", closefd=True) as file:
                file.seek(part.start)
                file.write(part.data)
        except OSError as error:
            raise _unwritable(error) from None

    def _finish(self, path: Path, run_id: str, name: str) -> None:
        """Give a whole file its name, once it is on the disk, and then record it."""
        try:
            with self._partly(path).open("rb") as file:
                os.fsync(file.fileno())
            self._partly(path).rename(path)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _unwritable(error) from None
        change = update(stored).where(*_is(run_id, name)).values(whole=True, stored_us=self._clock_us())
        self._database.write(lambda connection: connection.execute(change))
        del self._partial[run_id, name]

    def _is_genuine(self, part: StoredPart, path: Path, found: recorded.Attested, head: Head) -> bool:
        """Return whether a whole file is what the run left; a sealed file was compared by its digest."""
        if part.name == LOG_NAME:
            return _is_log(path, head)
        return self._are_heads(path, part.head, found) if part.name == HEADS_NAME else part.name != RECEIPT_NAME

    def _are_heads(self, path: Path, last: Envelope, found: recorded.Attested) -> bool:
        """Return whether each line is a head that was countersigned for the run, in their order, to the last one."""
        size, end = 0, None
        try:
            with path.open("rb") as heads:
                while line := heads.readline(MAX_COUNTERSIGNED_HEAD_BYTES + 2):
                    one = CountersignedHead.parse(
                        line.removesuffix(b"\n"),
                        broker_public=self._public,
                        evidence_public=found.row["evidence_public"],
                    )
                    # A disk that was full can lack lines; none comes twice, or of another run with this key.
                    if not line.endswith(b"\n") or one.previous_size < size or one.head.run_id != found.row["run_id"]:
                        return False
                    size, end = one.head.size, one.envelope
        except (OSError, FormatError):
            return False
        return end == last

    def _hold_to(self, receipt: Receipt, run_id: str) -> None:
        """Drop outputs that the run's receipt does not name."""
        named = _named(receipt)
        rows = self._database.read(lambda connection: _rows(connection, run_id))
        for name, row in rows.items():
            if name.startswith("outputs/") and named.get(name) != (row.bytes, row.sha256):
                self._drop(run_id, name)

    def _drop(self, run_id: str, name: str) -> None:
        self._partial.pop((run_id, name), None)
        self._database.write(lambda connection: connection.execute(delete(stored).where(*_is(run_id, name))))
        path = self._path(run_id, name)
        for one in (path, self._partly(path)):
            one.unlink(missing_ok=True)

    def _expire(self, connection: Connection) -> list[str]:
        """Delete records of runs of which nothing came for `KEPT_US`; return them: files go after the commit."""
        last = select(stored.c.run_id).group_by(stored.c.run_id)
        old = last.having(func.max(stored.c.stored_us) <= self._clock_us() - KEPT_US)
        expired = list(connection.execute(old).scalars().all())
        for run_id in expired:
            connection.execute(delete(stored).where(stored.c.run_id == run_id))
        return expired

    def files(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> Answer:
        """What of a run is stored whole; raises `UsageError`, `run-unknown`."""
        rows = self._of(parameters, scope)
        return Answer.of(
            {
                "files": [
                    {"bytes": row.bytes, "name": name, "sha256": row.sha256.hex()}
                    for name, row in sorted(rows.items())
                    if row.whole and name != _FORGOTTEN
                ]
            }
        )

    def piece(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> Answer:
        """Bytes of a file; raises `UsageError`, `run-unknown`, also for a file that is not stored."""
        after = parameters.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= 15):
            raise UsageError(Code.USAGE, "after is not a number of bytes")
        for name, row in self._of(parameters, scope).items():
            if row.whole and name != _FORGOTTEN and row.sha256.hex() == parameters["sha256"]:
                with contextlib.suppress(OSError), self._path(parameters["run_id"], name).open("rb") as file:
                    return Answer.of({"data": b64encode(os.pread(file.fileno(), PIECE_BYTES, int(after)))})
        raise UsageError(Code.RUN_UNKNOWN, "no such file of this run is stored")

    def forget(self, body: bytes, parameters: Mapping[str, str], scope: Scope) -> Answer:
        """Store nothing of a run any more.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `run-unknown`.
        """
        Fields(decode(body, max_bytes=64), "request").end()
        rows, run_id = self._of(parameters, scope), parameters["run_id"]
        owner = self._database.read(lambda connection: launch_of(connection, run_id, scope, self._public)[1].owner)

        def decide(connection: Connection) -> None:
            connection.execute(delete(stored).where(stored.c.run_id == run_id))
            values = {"bytes": 0, "counted": 0, "sha256": bytes(32), "whole": True, "stored_us": self._clock_us()}
            connection.execute(insert(stored).values(run_id=run_id, name=_FORGOTTEN, owner=owner, **values))

        self._database.write(decide)
        self.executor.submit(self._remove, run_id)
        return Answer.of({"forgotten": sum(row.whole and name != _FORGOTTEN for name, row in rows.items())})

    def _remove(self, run_id: str) -> None:
        for key in [key for key in self._partial if key[0] == run_id]:
            del self._partial[key]
        shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def _of(self, parameters: Mapping[str, str], scope: Scope) -> dict[str, Any]:
        def look(connection: Connection) -> dict[str, Any]:
            launch_of(connection, parameters["run_id"], scope, self._public)
            return _rows(connection, parameters["run_id"])

        return self._database.read(look)

    def _path(self, run_id: str, name: str) -> Path:
        return self._folder / run_id / name.replace("/", "-")

    @staticmethod
    def _partly(path: Path) -> Path:
        return path.with_name(f"{path.name}.part")


def _check_own(folder: Path, public: bytes) -> None:
    """Mark an empty folder with this gate's key; raise `UsageError` for one that has anything, and not this mark."""
    mark = folder / _MARK
    if not any(folder.iterdir()):
        write_private_file(mark, public.hex().encode())
    hint = "files in a store are removed: name a folder that is empty or does not exist yet"
    try:
        found = read_private_file(mark, max_bytes=128, what="mark of the store")
    except UsageError as error:
        if error.code is not Code.FILE_MISSING:
            raise
        raise UsageError(Code.USAGE, f"{folder} has files, and is no gate's store", hint=hint) from None
    if found != public.hex().encode():
        raise UsageError(Code.USAGE, f"{folder} is the store of another gate, by its {_MARK}", hint=hint)


def _is_stored(path: Path) -> bool:
    """Return whether a store can have made this file: see `Store._path` and `Store._partly`."""
    name = path.name.removesuffix(".part").replace("-", "/")
    return ANY_NAME.fullmatch(name) is not None and stat.S_ISREG(path.lstat().st_mode)


def _is(run_id: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return stored.c.run_id == run_id, stored.c.name == name


def _rows(connection: Connection, run_id: str) -> dict[str, Any]:
    return {row.name: row for row in connection.execute(select(stored).where(stored.c.run_id == run_id))}


def _receipt(path: Path, expected_sha256: bytes | None = None) -> Receipt | None:
    """Return the receipt in a stored bundle; None for one that is none, or has another digest."""
    try:
        envelope = Bundle.parse(path.read_bytes()).receipt
        found = Receipt.from_payload(envelope.payload)
    except (OSError, FormatError):
        return None
    return found if expected_sha256 in (None, sha256(envelope.encode())) else None


def _is_log(path: Path, head: Head) -> bool:
    """Return whether a file is the log that a head covers: all of it, line by line."""

    def leaves(log: BinaryIO) -> Iterator[bytes]:
        while line := log.readline(MAX_EVENT_BYTES + 2):
            if not line.endswith(b"\n"):
                raise FormatError(Code.LOG_INVALID, "no line of a log")
            yield leaf_hash(line[:-1])

    try:
        with path.open("rb") as log:
            return root_of(leaves(log)) == (head.size, head.root)
    except (OSError, FormatError):
        return False


def _named(receipt: Receipt) -> dict[str, tuple[int, bytes]]:
    return {output.file_name: (output.sealed_bytes, output.sealed_sha256) for output in receipt.outputs}


def _unwritable(error: OSError) -> UsageError:
    if error.errno in _FULL:
        return UsageError(Code.DISK_FULL, "the gate's store has no room left on its disk")
    return UsageError(Code.USAGE, f"the gate's store cannot be written: {error.strerror}")
