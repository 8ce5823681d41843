"""Checkpoints of all ranks of this machine: the worker decides for them, and passes their parts on to the agent.

Laws: all ranks save at one step or none does, on every machine; a rank's part leaves after those of the ranks behind
it, so that the first one may write last what follows from all; a file has one part, that of the first rank that names
it. Source: spec/checkpoints.md section 3.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any

from glasshouse.errors import Code, RunError
from glasshouse.task.channel import AgentLink, Message
from glasshouse.task.lines import AgentLine, AgentSink, Permission
from glasshouse.wire.lines.checkpoint import padded
from glasshouse.workloads.distributed.machine_group import STORE_PORT, MachineGroup
from glasshouse.workloads.distributed.rank_line import PIPE_BYTES
from glasshouse.workloads.distributed.rank_messages import PASSING_ON_S, Ask, PartEnds, SaveTogether
from glasshouse.workloads.process import failures

OF_CHECKPOINTS = ("checkpoint", "part", "part-end", "saved")
"""The messages of a rank that `RankCheckpoints.take` takes."""
Answer = Callable[[Message], None]
_FOREVER = timedelta(days=365)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """One rank that wants to save."""

    asked: SaveTogether
    answer: Answer
    part: SimpleQueue[int | None] = field(default_factory=SimpleQueue)  # the end of its pipe; None: it has ended
    ended: SimpleQueue[tuple[PartEnds, Answer] | None] = field(default_factory=SimpleQueue)


class RankCheckpoints:
    """The checkpoints of `count` ranks."""

    def __init__(self, line: AgentLine, count: int, machines: MachineGroup | None) -> None:
        self._line, self._count, self._machines = line, count, machines
        self._arrived: dict[int, _Rank] = {}
        self._saving: Mapping[int, _Rank] = {}  # since the last of them came
        self._lock = Lock()
        self._waiting: list[Answer] = []  # of ranks whose files others still read
        self._taken = 0  # how often all have come
        self._open: set[int] = set()  # which of these have a permission, and have not ended
        self._ended = Condition()

    def take(self, rank: int, message: Message, link: AgentLink, send: Answer) -> None:
        """Take what a rank sends about checkpoints over its link, and answer by `send`; raises `FormatError`."""

        def answer(number: int, found: Message) -> None:
            send({"id": number, "type": "checkpoint", **found})

        if message["type"] == "checkpoint":
            asked = SaveTogether.from_json(message)
            self.arrive(rank, asked, partial(answer, asked.number))
        elif message["type"] == "part":
            self.part(rank, link.take_descriptors(1)[0])
        elif message["type"] == "part-end":
            ended = PartEnds.from_json(message)
            self.part_ended(rank, ended, partial(answer, ended.number))
        else:
            args = (partial(answer, Ask.from_json(message).number),)
            # Not here: that the rank is gone has to be seen at once, for its successor may have come.
            Thread(target=self._answer_idle, args=args, name="glasshouse-saved", daemon=True).start()

    def _answer_idle(self, answer: Answer) -> None:
        self.wait_until_idle()
        answer({})

    def arrive(self, rank: int, asked: SaveTogether, answer: Answer) -> None:
        """Take a rank's wish to save; all are answered when the last has come."""
        with self._lock:
            self._arrived[rank] = _Rank(asked=asked, answer=answer)
            if len(self._arrived) < self._count:
                return
            self._saving, self._arrived = self._arrived, {}
            together = self._saving
            self._taken += 1
        Thread(target=self._take, args=(together, self._taken), name="glasshouse-checkpoint", daemon=True).start()

    def part(self, rank: int, descriptor: int) -> None:
        """Take the end of the pipe from which a rank's part comes."""
        found = self._saving.get(rank)
        if found is None:
            os.close(descriptor)
        else:
            found.part.put(descriptor)

    def part_ended(self, rank: int, message: PartEnds, answer: Answer) -> None:
        """Take the end of a rank's part."""
        found = self._saving.get(rank)
        if found is not None:
            found.ended.put((message, answer))

    def gone(self, rank: int) -> None:
        """A rank has ended: those that wait for it need not."""
        with self._lock:
            self._arrived.pop(rank, None)
            found = self._saving.get(rank)
        if found is not None:
            found.part.put(None)
            found.ended.put(None)

    def wait_until_idle(self) -> None:
        """Wait until no checkpoint is under way: what ranks were told is saved goes to the agent a moment later."""
        with self._ended:
            self._ended.wait_for(lambda: not self._open, PASSING_ON_S)

    def _take(self, ranks: Mapping[int, _Rank], number: int) -> None:
        try:
            self._save(ranks, number)
        except (ConnectionError, EOFError):
            return  # the agent is gone, and this process a moment later
        except Exception as error:  # of the store of another machine
            failures.report(RunError(Code.CHECKPOINT_REFUSED, f"a checkpoint was not taken: {error}"))
            self._line.finish(None, step=0)
        finally:
            with self._ended:
                self._open.discard(number)
                self._ended.notify_all()

    def _save(self, ranks: Mapping[int, _Rank], number: int) -> None:
        steps = {rank.asked.step for rank in ranks.values()}
        waits = [rank.asked.wait_us for rank in ranks.values()]
        wait_s = float("inf") if None in waits else max(wait for wait in waits if wait is not None) / 1e6
        fit = len(steps) == 1 and all(rank.asked.paths is not None for rank in ranks.values())
        store = None if self._machines is None else _Store(self._machines, number)
        permission = self._line.claim(wait_s) if fit else None
        if store is not None:
            own, permission = permission, store.agree(permission)
            if own is not None and permission is None:
                self._line.give_back(own)
        if permission is None:
            why: Message = {} if len(steps) == 1 else {"why": f"ranks save at different steps: {sorted(steps)}"}
            for rank in ranks.values():
                rank.answer({"taken": False, **why})
            return
        with self._ended:
            self._open.add(number)
        named: list[str] = []
        for rank in (ranks[place] for place in sorted(ranks)):
            rank.answer({"taken": True, "excepted": list(named)})
            named += rank.asked.paths or () if rank.asked.shared else ()
        first = 0 if self._machines is None else self._machines.machine * self._count
        (step,) = steps
        whole = True
        for place in sorted(ranks, reverse=True):
            whole = self._pass_on(ranks[place], permission, rank=first + place, step=step, before=whole) and whole
        for answer in self._waiting:
            answer({"taken": whole})
        self._waiting = []
        self._conclude(permission, store, step=step, whole=whole)

    def _conclude(self, permission: Permission, store: _Store | None, *, step: int, whole: bool) -> None:
        others: list[Message] = []
        if store is not None:
            own = self._line.rows(self._count) if whole else []
            rows = store.gather([{name: row[name] for name in row if name != "type"} for row in own])
            whole = whole and (rows is None or all(rows))
            others = [row for of_machine in rows or () for row in of_machine]
        self._line.finish(permission if whole else None, step=step, others=others)
        if store is not None:
            store.leave()

    def _pass_on(self, one: _Rank, permission: Permission, *, rank: int, step: int, before: bool) -> bool:
        """Pass on one rank's part; return whether it is whole."""
        descriptor = one.part.get()
        if descriptor is None:
            return False
        # Behind one that is not whole, it is read all the same: its rank would wait for it.
        sink = self._line.sink(permission, rank=rank, step=step) if before else None
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            size = _copied(pipe, sink)
        ended = one.ended.get()
        same = ended is not None and ended[0].size == size
        whole = before and same and ended is not None and ended[0].whole
        if sink is not None:
            zeros = memoryview(bytes(0 if same else padded(size) - size))
            sink.data(zeros)
            sink.end(size + len(zeros), whole=whole)
        if ended is not None:
            answer = ended[1]
            if whole and one.asked.shared:
                self._waiting.append(answer)
            else:
                answer({"taken": whole})
        return whole


class _Store:
    """Where the workers of several machines agree on one checkpoint: the store at which their ranks met."""

    def __init__(self, machines: MachineGroup, number: int) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self._machine, self._machines = machines.machine, machines.machines
        store = TCPStore("127.0.0.1", STORE_PORT, is_master=False, timeout=_FOREVER)
        self._store: Any = PrefixStore(f"glasshouse-checkpoint-{number}", store)

    def agree(self, permission: Permission | None) -> Permission | None:
        """Return what the first machine's agent permits, once every machine's does; another's agent is not told."""
        self._store.set(f"ready-{self._machine}", "" if permission is None else permission.encode())
        permitted = [self._store.get(f"ready-{one}") for one in range(self._machines)]
        return Permission.parse(permitted[0]) if all(permitted) else None

    def gather(self, rows: list[Message]) -> list[list[Message]] | None:
        """Return, on the first machine, the rows of each other; an empty list of one whose part is not whole."""
        if self._machine:
            self._store.set(f"rows-{self._machine}", json.dumps(rows))
            return None
        return [json.loads(self._store.get(f"rows-{one}")) for one in range(1, self._machines)]

    def leave(self) -> None:
        """Return once the first machine has them: a worker whose ranks have ended passes nothing on."""
        if not self._machine:
            self._store.set("gathered", "")
            return
        with contextlib.suppress(RuntimeError):  # or its store is gone, as it is when all have ended there
            self._store.get("gathered")


def _copied(pipe: Any, sink: AgentSink | None) -> int:
    size, buffer = 0, memoryview(bytearray(PIPE_BYTES))
    while count := pipe.readinto(buffer):
        if sink is not None:
            sink.data(buffer[:count])
            size += count
    return size
