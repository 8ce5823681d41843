"""What a store has of each line on its disk: a note of the newest, headers, and sealed parts.

Laws: nothing here is in the database, so that one which is put back from a backup takes nothing back with it; the note
never goes back; a header is there only while all of its parts are.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from glasshouse.broker.store.key_file import private_directory, read_private_file, sync_directory
from glasshouse.broker.store.line_rows import Newest
from glasshouse.broker.store.uploads import writing
from glasshouse.errors import Code, FormatError, RefusedError, UsageError
from glasshouse.handshake.lines import Head
from glasshouse.wire.dsse import Envelope
from glasshouse.wire.lines.checkpoint import CheckpointHeader
from glasshouse.wire.lines.statements import MAX_STATEMENT_BYTES, PartClaim, Ticket
from glasshouse.wire.record import LEFT_OUT, Id, Record, Sha256, octets

_NOTE = "newest.json"
_LINE = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"([0-9]+)-([0-9]+)-([0-9]+)-([0-9]+)-[0-9a-f]{64}")
_HEADER = re.compile(r"([0-9]+)-([0-9]+)\.header")
_MAX_NOTE_BYTES = 4 * MAX_STATEMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class NotedHead(Record, name="head"):
    """A checkpoint that a leg began from, or the beginning."""

    seq: int
    step: int
    digest: Annotated[Sha256 | None, LEFT_OUT] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LineNote(Record, name="note of a line", max_bytes=_MAX_NOTE_BYTES):
    """What is kept of a line beside its checkpoints."""

    leg: int = 0  # the highest that was released
    holder: Annotated[Id | None, LEFT_OUT] = None
    head: Annotated[NotedHead | None, LEFT_OUT] = None  # what that leg began from
    owner: Annotated[bytes | None, octets(32), LEFT_OUT] = None  # whose share its parts count to
    ticket: Annotated[Envelope | None, LEFT_OUT] = None  # the newest

    @property
    def counted(self) -> Ticket | None:
        """What the newest ticket says."""
        return None if self.ticket is None else Ticket.parse(self.ticket.payload)

    @property
    def seq(self) -> int:
        """The greatest number that was counted."""
        return 0 if self.counted is None else self.counted.seq


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePart:
    """A part that is here whole."""

    path: Path
    leg: int
    seq: int
    rank: int
    attempt: int
    bytes: int


class LineFolders:
    """The folders of all lines; a `LineMemory`. May be used from several threads.

    Args:
        changed: is called with a line once something newer is kept of it.

    Raises:
        UsageError: a folder that cannot be used, or a note that is damaged, or gone: a gate may not go on without it.
    """

    def __init__(self, folder: Path, changed: Callable[[bytes], object]) -> None:
        private_directory(folder, what="store of checkpoints")
        self._folder, self._changed, self._lock = folder, changed, threading.Lock()
        self._notes: dict[bytes, LineNote] = {}
        for one in folder.iterdir():
            if not _LINE.fullmatch(one.name) or not stat.S_ISDIR(one.lstat().st_mode):
                continue
            # Without a note there may be a draft of the first one alone.
            if not all(path.name.startswith(f"{_NOTE}.") for path in one.iterdir()):
                self._notes[bytes.fromhex(one.name)] = _read_note(one / _NOTE)

    def all(self) -> dict[bytes, Newest]:
        """Return what is kept of each line."""
        return {line: _newest(note) for line, note in dict(self._notes).items()}

    def newest(self, line: bytes) -> Newest | None:
        """Return what is kept of one line."""
        note = self._notes.get(line)
        return None if note is None else _newest(note)

    def note(self, line: bytes) -> LineNote:
        """Return the note of a line, or that of one which is not known yet."""
        return self._notes.get(line, LineNote())

    def keep(self, line: bytes, newest: Newest) -> None:
        """Keep the newest of a line on the disk; never go back.

        Raises:
            RefusedError: `checkpoint-incomplete`: a ticket for what is not here whole, as its parts were begun again.
            UsageError: `disk-full`.
        """
        with self._lock:
            note = self.note(line)
            if newest.leg > note.leg or (newest.leg == note.leg and note.holder is None):
                head = None if newest.head is None else NotedHead(**asdict(newest.head))
                note = replace(note, leg=newest.leg, holder=newest.holder, head=head)
            ticket = None if newest.ticket is None else Ticket.parse(newest.ticket.payload)
            if ticket is not None and ticket.seq > note.seq:
                if self.header(line, ticket.digest) is None:
                    raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "a checkpoint that is not stored here any more")
                note = replace(note, ticket=newest.ticket)
            self._write(line, note)
        self._changed(line)

    def own(self, line: bytes, owner: bytes) -> None:
        """Keep whose line it is, before there is anything of it; raises `UsageError`, `disk-full`."""
        with self._lock:
            self._write(line, replace(self.note(line), owner=owner))

    def _write(self, line: bytes, note: LineNote) -> None:
        if note != self._notes.get(line):
            _replace(self.path(line) / _NOTE, note.encode())
            self._notes[line] = note

    def path(self, line: bytes) -> Path:
        """Return the folder of a line."""
        return self._folder / line.hex()

    def part_path(self, claim: PartClaim) -> Path:
        """Return where a part lies once it is whole."""
        name = f"{claim.leg}-{claim.seq}-{claim.rank}-{claim.attempt}-{claim.sha256.hex()}"
        return self.path(claim.line) / name

    def part_of(self, header: CheckpointHeader, rank: int) -> Path:
        """Return where a rank's part of a checkpoint lies; raises `RefusedError`, `checkpoint-incomplete`."""
        name = f"{header.leg}-{header.seq}-{rank}-*-{header.parts[rank].sha256.hex()}"
        for path in self.path(header.line).glob(name):
            return path
        raise RefusedError(Code.CHECKPOINT_INCOMPLETE, "a part of this checkpoint is not here whole")

    def parts(self, line: bytes) -> Iterator[WholePart]:
        """Yield the parts that are here whole."""
        for path, match in self._files(line, _PART):
            leg, seq, rank, attempt = map(int, match.groups())
            yield WholePart(path=path, leg=leg, seq=seq, rank=rank, attempt=attempt, bytes=path.lstat().st_size)

    def header_path(self, line: bytes, *, leg: int, seq: int) -> Path:
        """Return where the header of a checkpoint lies."""
        return self.path(line) / f"{leg}-{seq}.header"

    def headers(self, line: bytes) -> Iterator[CheckpointHeader]:
        """Yield the headers of the checkpoints that are here whole."""
        for path, _ in self._files(line, _HEADER):
            try:
                yield _header(path, path.stat().st_mtime_ns)
            except (FileNotFoundError, FormatError):
                continue  # dropped meanwhile, or damaged

    def header(self, line: bytes, digest: bytes) -> CheckpointHeader | None:
        """Return the header of a checkpoint that is here whole."""
        return next((header for header in self.headers(line) if header.digest == digest), None)

    def put_header(self, header: CheckpointHeader) -> None:
        """Keep the header of a checkpoint whose parts are all here; raises `UsageError`, `disk-full`."""
        _replace(self.header_path(header.line, leg=header.leg, seq=header.seq), header.encode())

    def drop_header(self, line: bytes, *, leg: int, seq: int) -> None:
        """Remove the header of a checkpoint, on the disk too, before anything of its parts goes."""
        self.header_path(line, leg=leg, seq=seq).unlink(missing_ok=True)
        sync_directory(self.path(line))

    def give_up(self, line: bytes, *, leg: int, seq: int) -> None:
        """Remove the header of a checkpoint whose parts are begun again; raises `RefusedError` for a counted one."""
        with self._lock:
            if seq <= self.note(line).seq:
                raise RefusedError(Code.CHECKPOINT_STALE, "a number that was counted")
            self.drop_header(line, leg=leg, seq=seq)

    def lines(self) -> list[bytes]:
        """Return all lines that there are notes of."""
        return list(self._notes)

    def changed_us(self, line: bytes) -> int:
        """Return when something of a line came or went last."""
        return self.path(line).stat().st_mtime_ns // 1000

    def remove_drafts(self, line: bytes) -> None:
        """Remove what was not whole when the gate ended."""
        for path in self.path(line).iterdir():
            if path.name.endswith(".part") and stat.S_ISREG(path.lstat().st_mode):
                path.unlink()

    def _files(self, line: bytes, form: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
        folder = self.path(line)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = form.fullmatch(path.name)
            if match is not None and stat.S_ISREG(path.lstat().st_mode):
                yield path, match


def _replace(path: Path, content: bytes) -> None:
    """Write a whole file in the place of another, on the disk before this returns; raises `UsageError`, `disk-full`."""
    with writing():
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700)
            sync_directory(path.parent.parent)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@lru_cache(maxsize=64)
def _header(path: Path, _changed_ns: int) -> CheckpointHeader:
    return CheckpointHeader.parse(path.read_bytes())


def _newest(note: LineNote) -> Newest:
    head = None if note.head is None else Head(**asdict(note.head))
    return Newest(leg=note.leg, holder=note.holder, head=head, ticket=note.ticket)


def _read_note(path: Path) -> LineNote:
    hint = "put it back from a backup: without it a line could go on twice"
    if not path.exists():
        why = f"the note of a line {path} is gone, beside what is kept of its checkpoints"
        raise UsageError(Code.USAGE, why, hint=hint)
    try:
        return LineNote.parse(read_private_file(path, max_bytes=_MAX_NOTE_BYTES, what="note of a line"))
    except FormatError:
        raise UsageError(Code.USAGE, f"the note of a line {path} is damaged", hint=hint) from None
