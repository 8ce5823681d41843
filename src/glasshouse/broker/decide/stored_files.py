"""Stores what runs leave at a gate with a store, until their owners fetch it (spec/owner-api.md section 7).

Laws: nothing is written that the run's own log, countersigned here, does not name; the whole length is reserved with
the first part, within what one owner may have; a file has its name only once it is whole and has its digest; what is
another owner's is answered as what does not exist. What is kept here is opened by its owner alone and proves nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from glasshouse.broker.decide.decisions import ApiAnswer, Decision, Effect
from glasshouse.broker.decide.left_files import (
    are_heads,
    is_log,
    is_stored,
    named_outputs,
    receipt_in,
)
from glasshouse.broker.decide.owner_views import after, launch_of
from glasshouse.broker.http_api import ForgetRequest, StoredFile, StoredFiles
from glasshouse.broker.store import recorded
from glasshouse.broker.store.database import BrokerState
from glasshouse.broker.store.database_schema import packages, stored
from glasshouse.broker.store.scope import Scope
from glasshouse.broker.store.uploads import KEPT_US, StoreSpace, Upload, Uploads, counted_bytes, part_of
from glasshouse.errors import Code, FormatError, RefusedError, UsageError
from glasshouse.evidence.heads import MAX_COUNTERSIGNED_HEAD_BYTES, Head
from glasshouse.evidence.receipt import Receipt
from glasshouse.evidence.stored import HEADS_NAME, LOG_NAME, RECEIPT_NAME, StoredPart
from glasshouse.wire.canonical import b64encode

PIECE_BYTES = 1 << 20
MOST_PARTIAL = 8  # files of one owner that are not whole
_FORGOTTEN = ""  # the name of no file: the row of a run that its owner had removed
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class RunStore:
    """What runs left here."""

    def __init__(self, broker: BrokerState, space: StoreSpace) -> None:
        self._broker, self._space = broker, space
        self._database = broker.database
        self._folder = space.folder
        self._partial: Uploads[tuple[str, str]] = Uploads(MOST_PARTIAL)
        space.coming.append(self._partial)
        self.executor = space.executor
        self._begin()

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
                    if path not in known and is_stored(path):
                        path.unlink()

    def take(self, body: bytes) -> Decision:
        """Read a part of a file; what is returned writes it.

        Raises:
            RefusedError: checks 1 to 4 of spec/owner-api.md, section 7. The decision: checks 5 and 6, as
                `head-inconsistent` and `owner-quota`; `UsageError`, `disk-full`; `FormatError`, `upload-damaged`.
        """
        part, public = StoredPart.parse(body), self._broker.public
        run_id, signer = part.claimed(public)

        def judge(connection: Connection) -> tuple[recorded.AttestedRuntime, Head]:
            found = recorded.attested(connection, run_id, signer, broker_public=public)
            evidence_public = found.row["evidence_public"]
            head = part.check(run_id=found.row["run_id"], broker_public=public, evidence_public=evidence_public)
            if part.name == HEADS_NAME and part.size > (head.sequence + 1) * (MAX_COUNTERSIGNED_HEAD_BYTES + 1):
                raise RefusedError(Code.HEAD_INCONSISTENT, "more bytes than the run's heads can have")
            return found, head

        found, head = self._database.read(judge)
        known = self._partial.get((run_id, part.name))
        # What changes nothing is no sign of life: a recording can be sent again, of a first part too.
        goes_on = bool(part.data) and known is not None and part.start == known.here > 0
        effect = Effect.CREDIT if goes_on else Effect.CHARGE
        return Decision(decide=partial(self._keep, part, run_id, found, head), effect=effect)

    def _keep(self, part: StoredPart, run_id: str, found: recorded.AttestedRuntime, head: Head) -> ApiAnswer:
        key = run_id, part.name
        known = self._partial.matching(key, sha256=part.sha256, size=part.size)
        if known is None:
            rows = self._database.read(lambda connection: _rows(connection, run_id))
            if part.name in rows and rows[part.name].whole:
                return ApiAnswer.of({"bytes": rows[part.name].bytes, "whole": True})
            self._check_receipt(part, run_id, rows)
            if part.start or not part.data:
                return ApiAnswer.of({"bytes": 0, "whole": False})
            known = self._reserved(part, run_id, found.package_id)
            self._partial[key] = known  # before anything is written: what is reserved can be dropped
        oldest = self._partial.came_on(key)
        if oldest is not None:
            self._drop(*oldest)
        if not known.add(part.start, part.data):
            return ApiAnswer.of({"bytes": known.here, "whole": False})
        is_receipt = part.name == RECEIPT_NAME
        try:
            known.check()
            receipt = receipt_in(known.part, found.row["receipt_sha256"] or b"") if is_receipt else None
            if receipt is None and (is_receipt or not self._is_genuine(part, known.part, found, head)):
                raise FormatError(Code.UPLOAD_DAMAGED, f"{part.name} is not what was countersigned for this run")
        except FormatError:
            self._drop(*key)
            raise
        self._finish(known, *key)
        if receipt is not None:
            self._hold_to(receipt, run_id)
        return ApiAnswer.of({"bytes": part.size, "whole": True})

    def _is_genuine(self, part: StoredPart, path: Path, found: recorded.AttestedRuntime, head: Head) -> bool:
        """Return whether a whole file is what the run left; a sealed file was compared by its digest."""
        if part.name == LOG_NAME:
            return is_log(path, head)
        if part.name != HEADS_NAME:
            return True
        run_id, evidence_public = found.row["run_id"], found.row["evidence_public"]
        return are_heads(
            path, part.head, run_id=run_id, broker_public=self._broker.public, evidence_public=evidence_public
        )

    def _check_receipt(self, part: StoredPart, run_id: str, rows: Mapping[str, Any]) -> None:
        """Make the first half of check 5."""
        if part.name.startswith("outputs/") and RECEIPT_NAME in rows and rows[RECEIPT_NAME].whole:
            receipt = receipt_in(self._path(run_id, RECEIPT_NAME))
            if receipt is None or named_outputs(receipt).get(part.name) != (part.size, part.sha256):
                raise RefusedError(Code.HEAD_INCONSISTENT, "an output that the run's receipt does not name")

    def _reserved(self, part: StoredPart, run_id: str, package_row: str) -> Upload:
        """Make the other half of check 5, and check 6, and reserve the length of a whole file."""

        def reserve(connection: Connection) -> tuple[bytes, list[str]]:
            expired = self._expire(connection)
            if connection.execute(select(stored.c.name).where(*_is(run_id, _FORGOTTEN))).first() is not None:
                raise RefusedError(Code.HEAD_INCONSISTENT, "the run's owner had it removed")
            theirs_is = select(packages.c.owner).where(packages.c.package_id == package_row)
            owner = bytes(connection.execute(theirs_is).scalar_one())
            connection.execute(delete(stored).where(*_is(run_id, part.name)))
            counted = counted_bytes(part.size)
            self._space.check(connection, owner, counted)
            values = {"bytes": part.size, "counted": counted, "sha256": part.sha256, "whole": False}
            _insert(connection, run_id, part.name, owner, stored_us=self._broker.clock_us(), **values)
            return owner, expired

        owner, expired = self._database.write(reserve)
        for old in expired:
            self._remove(old)
        return Upload(path=self._path(run_id, part.name), owner=owner, sha256=part.sha256, size=part.size)

    def _finish(self, upload: Upload, run_id: str, name: str) -> None:
        """Keep a whole file, and then record it."""
        upload.finish()
        change = update(stored).where(*_is(run_id, name)).values(whole=True, stored_us=self._broker.clock_us())
        self._database.write(lambda connection: connection.execute(change))
        del self._partial[run_id, name]

    def _hold_to(self, receipt: Receipt, run_id: str) -> None:
        """Drop outputs that the run's receipt does not name."""
        named = named_outputs(receipt)
        rows = self._database.read(lambda connection: _rows(connection, run_id))
        for name, row in rows.items():
            if name.startswith("outputs/") and named.get(name) != (row.bytes, row.sha256):
                self._drop(run_id, name)

    def _drop(self, run_id: str, name: str) -> None:
        self._partial.pop((run_id, name), None)
        self._database.write(lambda connection: connection.execute(delete(stored).where(*_is(run_id, name))))
        path = self._path(run_id, name)
        for one in (path, part_of(path)):
            one.unlink(missing_ok=True)

    def _expire(self, connection: Connection) -> list[str]:
        """Delete records of runs of which nothing came for `KEPT_US`; return them: files go after the commit."""
        last = select(stored.c.run_id).group_by(stored.c.run_id)
        old = last.having(func.max(stored.c.stored_us) <= self._broker.clock_us() - KEPT_US)
        expired = list(connection.execute(old).scalars().all())
        for run_id in expired:
            connection.execute(delete(stored).where(stored.c.run_id == run_id))
        return expired

    def files(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Return what of a run is stored whole; raises `UsageError`, `run-unknown`."""
        rows = sorted(self._whole(parameters, scope).items())
        files = tuple(StoredFile(name=name, bytes=row.bytes, sha256=row.sha256) for name, row in rows)
        return ApiAnswer(body=StoredFiles(files=files).encode())

    def piece(self, _body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Return bytes of a file; raises `UsageError`, `run-unknown`, also for a file that is not stored."""
        start = after(parameters, "of bytes")
        for name, row in self._whole(parameters, scope).items():
            if row.sha256.hex() == parameters["sha256"]:
                with contextlib.suppress(OSError), self._path(parameters["run_id"], name).open("rb") as file:
                    return ApiAnswer.of({"data": b64encode(os.pread(file.fileno(), PIECE_BYTES, start))})
        raise UsageError(Code.RUN_UNKNOWN, "no such file of this run is stored")

    def forget(self, body: bytes, parameters: Mapping[str, str], scope: Scope) -> ApiAnswer:
        """Store nothing of a run any more.

        Raises:
            FormatError: `schema-invalid`.
            UsageError: `run-unknown`.
        """
        ForgetRequest.parse(body)
        whole, run_id = self._whole(parameters, scope), parameters["run_id"]
        public, now_us = self._broker.public, self._broker.clock_us()
        owner = self._database.read(lambda connection: launch_of(connection, run_id, scope, public)[1].owner)

        def decide(connection: Connection) -> None:
            connection.execute(delete(stored).where(stored.c.run_id == run_id))
            values = {"bytes": 0, "counted": 0, "sha256": bytes(32), "whole": True, "stored_us": now_us}
            _insert(connection, run_id, _FORGOTTEN, owner, **values)

        self._database.write(decide)
        self.executor.submit(self._remove, run_id)
        return ApiAnswer.of({"forgotten": len(whole)})

    def _remove(self, run_id: str) -> None:
        for key in [key for key in self._partial if key[0] == run_id]:
            del self._partial[key]
        shutil.rmtree(self._folder / run_id, ignore_errors=True)

    def _whole(self, parameters: Mapping[str, str], scope: Scope) -> dict[str, Any]:
        """Return the rows of a caller's run that stand for files that are whole."""

        def look(connection: Connection) -> dict[str, Any]:
            launch_of(connection, parameters["run_id"], scope, self._broker.public)
            return _rows(connection, parameters["run_id"])

        return {name: row for name, row in self._database.read(look).items() if row.whole and name != _FORGOTTEN}

    def _path(self, run_id: str, name: str) -> Path:
        return self._folder / run_id / name.replace("/", "-")


def _insert(connection: Connection, run_id: str, name: str, owner: bytes, **values: object) -> None:
    connection.execute(insert(stored).values(run_id=run_id, name=name, owner=owner, **values))


def _is(run_id: str, name: str) -> tuple[ColumnElement[bool], ...]:
    return stored.c.run_id == run_id, stored.c.name == name


def _rows(connection: Connection, run_id: str) -> dict[str, Any]:
    return {row.name: row for row in connection.execute(select(stored).where(stored.c.run_id == run_id))}
