"""The parts of checkpoints that a worker sends: when one may come, and sealed as it comes.

Checkpoints are a way out of the sandbox, to a host that sees when they come and how large they are (spec/checkpoints.md
section 8). Laws: one begins under a permission that was not used, not before its time, and no more of them than the
job allows; parts come one after the other, of each rank of this machine one, from the last to the first, of a padded
size; nothing here can reopen what it sealed. A disk that is full costs the checkpoint and not the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.package.checkpoints.part_sealer import PartSealer
from glasshouse.runtime.keys.outdir import OutDir, PartialFile, disk_errors
from glasshouse.runtime.lines.leg_terms import LegTerms
from glasshouse.runtime.lines.part_messages import PartBegins, PartEnds, PartsThere
from glasshouse.wire.canonical import Json
from glasshouse.wire.lines.checkpoint import PartRow, Place

# What the worker is told of a part for which there was no room; a header that names it is none.
_NOT_KEPT = PartRow(bytes=1, head_sha256=bytes(32), sha256=bytes(32))


class PartIntake:
    """Takes the parts of one leg.

    Args:
        now_s: the agent's clock.
        sealed: called with number, rank, row and path of each part, once it is whole.
        there: called with what checkpoint it is and the rows of its parts, by rank, once this machine's have all come:
            of the whole world on machine 0, and of its own ranks elsewhere; without any after `full`.
        full: called once there is no room for a checkpoint, whose parts are read and dropped from then on.
    """

    def __init__(
        self,
        terms: LegTerms,
        out: OutDir,
        now_s: Callable[[], float],
        *,
        sealed: Callable[[int, int, PartRow, str], None],
        there: Callable[[Place, dict[int, PartRow]], None],
        full: Callable[[], None],
    ) -> None:
        self._terms, self._out, self._now_s = terms, out, now_s
        self._on_sealed, self._on_there, self._on_full = sealed, there, full
        self._seq, self._previous = terms.start.next_seq, terms.start.checkpoint
        self._left, self._due_s = terms.limits.most, now_s()
        self._permitted = False
        self._place: Place | None = None  # of the checkpoint whose parts are coming
        self._rows: dict[int, PartRow] = {}
        self._rank: int | None = None  # of the part that is coming
        self._sink: tuple[PartialFile, PartSealer] | None = None  # where it goes; None where there is no room
        self._full = False
        self._size = 0  # of the part so far

    @property
    def in_progress(self) -> bool:
        """Whether a part has begun and not ended."""
        return self._rank is not None

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint has begun whose parts are not all there."""
        return self._place is not None

    def permit(self, refused: Code | None = None) -> dict[str, Json]:
        """Return the message that permits the next checkpoint; `refused` is why the last was not counted."""
        self._permitted = True
        message: dict[str, Json] = {
            "type": "line",
            "left": self._left,
            "previous": None if self._previous is None else self._previous.hex(),
            "seq": self._seq,
            "wait_us": max(0, int((self._due_s - self._now_s()) * 1e6)),
        }
        return message if refused is None else message | {"refused": refused.value}

    def counted(self, seq: int, digest: bytes) -> None:
        """Go on behind a checkpoint that was counted."""
        self._seq, self._previous = seq + 1, digest

    def hurry(self) -> dict[str, Json] | None:
        """Let the next begin at once, for the job is to stop; return the new permission, if one was not used."""
        self._due_s = self._now_s()
        return self.permit() if self._permitted else None

    def begin(self, message: PartBegins) -> None:
        """Open the next part; raises `RunError`: `worker-failed` or `checkpoint-refused`."""
        if self.in_progress:
            raise _out_of_turn()
        place = self._terms.place(seq=message.seq, step=message.step, previous=message.previous)
        if self._place is None:
            self._begin_checkpoint(message)
            self._place, self._full = place, False
        # The order would be the worker's to choose, and the host sees it.
        left = [rank for rank in self._terms.own_ranks if rank not in self._rows]
        if place != self._place or message.rank not in left[-1:]:
            raise _out_of_turn()
        self._rank, self._size = message.rank, 0
        with self._room():
            file = self._out.part(message.rank)
            try:
                with disk_errors():
                    sealer = PartSealer(file.stream, place=place, rank=message.rank, recipients=self._terms.recipients)
            except GlasshouseError:
                file.discard()
                raise
            self._sink = file, sealer

    def data(self, plaintext: memoryview) -> None:
        """Seal more of the current part; the caller zeroes `plaintext`. Raises as `begin`."""
        if not self.in_progress:
            raise _out_of_turn()
        self._size += len(plaintext)
        if self._size > self._terms.limits.bytes:
            raise RunError(Code.CHECKPOINT_REFUSED, f"a part of more than the {self._terms.limits.bytes} bytes allowed")
        with self._room():
            if self._sink is not None:
                with disk_errors():
                    self._sink[1].update(plaintext)

    def end(self, message: PartEnds) -> dict[str, Json]:
        """Close the current part; return the message that says what it is, sealed. Raises as `begin`."""
        rank, row = self._rank, _NOT_KEPT
        if rank is None:
            raise _out_of_turn()
        with self._room():
            if self._sink is not None:
                file, sealer = self._sink
                with disk_errors():
                    part = sealer.finish()
                if part.plain_bytes != message.size:
                    raise RunError(Code.WORKER_FAILED, "a part of a checkpoint arrived other than the worker sent it")
                file.keep()
                row, self._sink = part.row, None
                self._on_sealed(self._seq, rank, row, file.final)
        self._rank, self._rows[rank] = None, row
        return {"type": "part-kept", "rank": rank, **row.to_json()}

    def there(self, message: PartsThere) -> None:
        """Take the end of a checkpoint's parts; raises `RunError`: `worker-failed`."""
        place, rows = self._place, dict(self._rows)
        if place is None or self.in_progress or sorted(rows) != list(self._terms.own_ranks):
            raise _out_of_turn()
        if (message.seq, message.step) != (place.seq, place.step):
            raise _out_of_turn()
        for other in message.others:
            if other.rank in rows:
                raise _out_of_turn()
            rows[other.rank] = other.row()
        wanted = place.world_size if self._terms.leads else self._terms.group.ranks
        if len(rows) != wanted or max(rows) >= place.world_size:
            raise _out_of_turn()
        self._place, self._rows = None, {}
        self._on_there(place, {} if self._full else rows)

    def discard(self) -> None:
        """Wipe and drop a part that never ended."""
        sink, self._sink = self._sink, None
        if sink is not None:
            sink[1].wipe()
            sink[0].discard()

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except RunError as error:
            self.discard()
            if error.code is not Code.DISK_FULL:
                raise
            self._full = True
            self._on_full()

    def _begin_checkpoint(self, message: PartBegins) -> None:
        if not self._permitted:
            raise RunError(Code.WORKER_FAILED, "the worker began a checkpoint without a permission")
        if not self._left or self._now_s() < self._due_s:
            raise RunError(Code.CHECKPOINT_REFUSED, "a checkpoint before its time, or one more than the job allows")
        # A machine other than 0 is not told what was counted: its worker learns it from the others'.
        if self._terms.leads and (message.seq, message.previous) != (self._seq, self._previous):
            raise _out_of_turn()
        if message.seq - self._seq not in (0, 1):
            raise _out_of_turn()
        self._permitted = False
        self._left -= 1
        self._seq, self._due_s = message.seq, self._now_s() + self._terms.limits.every_s


def _out_of_turn() -> RunError:
    return RunError(Code.WORKER_FAILED, "the worker sent a part of a checkpoint out of turn, or another than permitted")
