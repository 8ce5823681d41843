"""Ranks of several machines save together: one checkpoint of the first machine's agent, or none."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from glasshouse.errors import RunError
from glasshouse.package.limits import CheckpointLimits
from glasshouse.task.channel import AgentLink
from glasshouse.task.lines import AgentLine
from glasshouse.wire import frames
from glasshouse.wire.lines.checkpoint import padded
from glasshouse.workloads.distributed import rank_checkpoints
from glasshouse.workloads.distributed.rank import _report
from glasshouse.workloads.distributed.rank_channel import RankChannel
from glasshouse.workloads.distributed.rank_checkpoints import RankCheckpoints
from glasshouse.workloads.distributed.rank_line import RankLine
from glasshouse.workloads.distributed.rank_messages import PartEnds, SaveTogether
from glasshouse.workloads.distributed.ranked_workload import RankedWorkload
from glasshouse.workloads.process.job_control import JobControl, Result

PATIENCE_S = 60


class Machine:
    """One machine's worker with two ranks, and what its agent hears."""

    def __init__(self, machine: int | None) -> None:
        self.agent, theirs = socket.socketpair()
        self.agent.settimeout(PATIENCE_S)
        self.link = AgentLink(theirs)
        self.line = AgentLine(self.link, CheckpointLimits(bytes=1 << 20, every_s=10, most=9))
        place: Any = None if machine is None else SimpleNamespace(machine=machine, machines=2)
        self.ranks = RankCheckpoints(self.line, 2, place)
        self.answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {0: queue.SimpleQueue(), 1: queue.SimpleQueue()}
        self._decoder = frames.Decoder()
        self._heard: list[Any] = []

    def permit(self, seq: int, previous: str | None) -> None:
        self.line.take({"type": "line", "left": 1, "previous": previous, "seq": seq, "wait_us": 0})

    def save(self, step: int, *, content: bytes | None = b"x" * 100) -> None:
        for rank in (0, 1):
            paths = None if content is None else ("state",)
            asked = SaveTogether(number=1, paths=paths, shared=False, step=step, wait_us=0)
            self.ranks.arrive(rank, asked, self.answers[rank].put)

    def send(self, rank: int, *, ends: bool = True, whole: bool = True) -> None:
        read, write = os.pipe()
        self.ranks.part(rank, read)
        data = bytes([rank]) * padded(1)
        os.write(write, data)
        os.close(write)
        if ends:
            message = PartEnds(number=2, size=len(data), whole=whole)
            self.ranks.part_ended(rank, message, self.answers[rank].put)
        else:
            self.ranks.gone(rank)

    def answer(self, rank: int) -> dict[str, Any]:
        return self.answers[rank].get(timeout=PATIENCE_S)

    def hear(self) -> dict[str, Any]:
        """Return the next message to the agent, which names each part that is whole."""
        while True:
            while not self._heard:
                received = self.agent.recv(1 << 16)
                if not received:
                    return {"type": "end"}
                self._heard += [value for kind, value in self._decoder.feed(received) if kind == frames.CONTROL]
            message = self._heard.pop(0)
            if message["type"] == "part-end":
                row = {"bytes": message["bytes"], "head_sha256": "00" * 32, "sha256": "00" * 32}
                self.line.take({"type": "part-kept", "rank": self.rank, **row})
                continue
            self.rank = message.get("rank")
            return message


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Machine]]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(rank_checkpoints, "STORE_PORT", store.port)
    found = [Machine(0), Machine(1)]
    yield found
    for machine in found:
        machine.agent.close()
        machine.link.close()


def test_the_first_machine_s_permission_is_that_of_all_and_it_has_the_others_rows(machines: list[Machine]) -> None:
    first, second = machines
    first.permit(7, "ab" * 32)
    second.permit(1, None)  # its agent is not told what was counted
    for machine in machines:
        machine.save(5)
    for machine, numbers in zip(machines, ([1, 0], [3, 2]), strict=True):
        assert [machine.answer(rank) for rank in (0, 1)] == [
            {"taken": True, "excepted": []},
            {"taken": True, "excepted": []},
        ]
        for rank in (0, 1):
            machine.send(rank)
        for number in numbers:  # the first rank's is the last
            begun = {"type": "part", "previous": "ab" * 32, "rank": number, "seq": 7, "step": 5}
            assert machine.hear() == begun
        if machine is first:
            continue
        assert machine.hear() == {"type": "checkpoint", "others": [], "seq": 7, "step": 5}
    there = first.hear()
    assert sorted(row["rank"] for row in there.pop("others")) == [2, 3]
    assert there == {"type": "checkpoint", "seq": 7, "step": 5}


def test_none_saves_where_one_machine_may_not_and_the_permission_is_kept(machines: list[Machine]) -> None:
    first, second = machines
    first.permit(1, None)
    for machine in machines:
        machine.save(5)
    assert [machine.answer(rank) for machine in machines for rank in (0, 1)] == [{"taken": False}] * 4
    second.permit(1, None)
    first.save(6, content=None)
    second.save(6)
    assert [machine.answer(rank) for machine in machines for rank in (0, 1)] == [{"taken": False}] * 4
    assert first.line.due()
    assert second.line.due()


def test_a_rank_that_ends_within_its_part_leaves_none_that_counts(machines: list[Machine]) -> None:
    for machine in machines:
        machine.permit(1, None)
        machine.save(5)
    assert all(machine.answer(rank)["taken"] for machine in machines for rank in (0, 1))
    for rank in (0, 1):
        machines[0].send(rank)
        machines[1].send(rank, ends=rank == 0)
    assert [machines[0].hear()["type"] for _ in range(2)] == ["part", "part"]
    assert machines[1].hear()["type"] == "part"
    # The end of the second one on each, of which the agent is told too.
    hearing = [threading.Thread(target=machine.hear, daemon=True) for machine in machines]
    for thread in hearing:
        thread.start()
    for machine in machines:  # without a permission it waits, until its line is over
        assert machine.line.claim(PATIENCE_S) is None
        machine.permit(2, None)
        assert not machine.line.due()
        machine.agent.shutdown(socket.SHUT_RDWR)
    for thread in hearing:
        thread.join(PATIENCE_S)


def test_a_rank_that_leaves_its_part_keeps_the_others_waiting_for_nothing() -> None:
    machine = Machine(None)
    machine.permit(1, None)
    machine.save(5)
    assert [machine.answer(rank)["taken"] for rank in (0, 1)] == [True, True]
    machine.send(1, whole=False)
    machine.send(0)
    assert [machine.answer(rank) for rank in (1, 0)] == [{"taken": False}, {"taken": False}]
    assert machine.line.claim(PATIENCE_S) is None
    machine.agent.close()
    machine.link.close()


def test_a_rank_ends_once_what_was_saved_is_with_the_agents_of_all_machines(machines: list[Machine]) -> None:
    """A job that ends right after it saved: with its ranks would go the store at which the workers meet."""
    first, second = machines
    for machine in machines:
        machine.permit(1, None)
        machine.save(5)
    for machine in machines:
        assert all(machine.answer(rank)["taken"] for rank in (0, 1))
        for rank in (0, 1):
            machine.send(rank)
    assert [second.hear()["type"] for _ in range(3)] == ["part", "part", "checkpoint"]
    assert [first.hear()["type"] for _ in range(2)] == ["part", "part"]
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number, machine in enumerate(machines):
        asked = {"id": 3, "type": "saved"}
        args = (0, asked, machine.link, lambda _answer, number=number: ended.put(number))
        threading.Thread(target=machine.ranks.take, args=args, daemon=True).start()
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.3)
    assert first.hear()["type"] == "checkpoint"
    assert {ended.get(timeout=PATIENCE_S) for _ in machines} == {0, 1}


class Asking:
    """A rank's channel: it is answered that a checkpoint may begin."""

    def __init__(self) -> None:
        self.saved, self.pipes = False, list[int]()

    def ask(self, _request: Any) -> dict[str, Any]:
        return {"taken": True, "excepted": []}

    def tell(self, _message: Any, descriptors: list[int]) -> None:
        self.pipes += map(os.dup, descriptors)


def test_a_rank_waits_at_its_end_for_what_it_saved_and_never_for_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker reads a part until its pipe is closed, which the rank that waited for it would hold open."""
    rank = Asking()
    line = RankLine(rank, CheckpointLimits(bytes=1 << 20, every_s=10, most=9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a card"), line.begin([], step=1, wait_s=0, shared=False):  # type: ignore[union-attr]
        raise ValueError("a card fell off the bus")
    assert not rank.saved
    with line.begin([], step=1, wait_s=0, shared=False):  # type: ignore[union-attr]
        pass
    assert rank.saved
    part = line.begin([], step=2, wait_s=0, shared=False)
    assert not rank.saved, "one that is open"
    assert part is not None
    part.__exit__(RuntimeError, None, None)
    for pipe in rank.pipes:
        os.close(pipe)

    asked = list[Any]()

    def answered(request: Any, *, timeout_s: float) -> Any:
        asked.append((request(number=1).kind, timeout_s < 100))
        raise queue.Empty

    channel = RankChannel.__new__(RankChannel)
    monkeypatch.setattr(channel, "_ask", answered)
    for channel.saved in (False, True):
        channel.wait_until_saved()
    assert asked == [("saved", True)]


def test_neither_a_rank_nor_its_worker_reports_an_end_before_what_was_saved_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as a worker of several ranks sets it
    did = list[str]()
    channel: Any = SimpleNamespace(
        rank=0, wait_until_saved=lambda: did.append("waited"), send=lambda message: did.append(message["type"])
    )
    result = Result(unit="step", done=1, elapsed_us=1, stop_reason="finished")
    assert (_report(channel, result), _report(channel, KeyboardInterrupt())) == (0, 1)
    assert did == ["waited", "ended", "waited", "failed"]

    did.clear()
    server: Any = SimpleNamespace(
        checkpoints=SimpleNamespace(wait_until_idle=lambda: did.append("waited")),
        failures=[],
        settle=lambda: None,
        stop=lambda: None,
        stopped=False,
    )
    workload = RankedWorkload("script", 2, channel)
    workload._line = None

    def killed() -> dict[int, int]:
        did.append("killed")
        return {1: -9}

    with pytest.raises(RunError):
        workload._finish(server, killed, JobControl(lambda _outcome: 0), None)
    assert did == ["killed", "waited"]
