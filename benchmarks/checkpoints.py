"""What a checkpoint of a line costs beside a plain one: ``make bench-checkpoints``.

Laws: the arms take turns, so that drift meets both, and what is compared is one turn's; plaintext goes to another
process, which seals it as the agent does, onto the disk on which the plain arm writes, and both arms have it
synchronised; every raw time is kept. Times are the clock's: a run on a machine that does other work is not to be kept.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kept import Bar, finish, kept, options
from glasshouse.package.checkpoints.part_sealer import PartSealer
from glasshouse.package.grant import Resume, ResumePart
from glasshouse.package.layout import plain_size
from glasshouse.package.limits import CheckpointLimits
from glasshouse.task import Task, install
from glasshouse.task.channel import AgentLink
from glasshouse.task.inputs import FolderInputs
from glasshouse.task.lines import AgentLine
from glasshouse.task.restore import restore
from glasshouse.wire import frames
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import RecipientKey, key_id, sha256
from glasshouse.wire.lines.checkpoint import FRONT_BYTES, PartHeader, Place, front_length

BARS = {
    "save_ratio": Bar(1.4),
    "load_ratio": Bar(2.0),
    "async_steps_ratio": Bar(1.15),
    "lora_lost_ms": Bar(50.0),
}
MIB = 1 << 20
TENSORS = 16
LIMITS = CheckpointLimits(bytes=1 << 34, every_s=10, most=100_000)


def main() -> int:
    if "--agent" in sys.argv:
        return agent(int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4]))
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of both arms, after one that is thrown away")
    parser.add_argument("--mib", type=int, default=512, help="size of the model's state")
    parser.add_argument("--folder", type=Path, help="on the disk to write to; a temporary one by default")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        found = Comparison(Path(folder), Path(memory), asked.mib)
        turns = {
            "save": _turns({"plain": found.save_plain, "sealed": found.save_sealed}, asked.rounds),
            "load": _turns({"plain": found.load_plain, "sealed": found.load_sealed}, asked.rounds),
            "async_steps": _turns({"plain": found.steps_plain, "sealed": found.steps_sealed}, asked.rounds),
        }
        lost = [found.lora_lost_ms() for _ in range(asked.rounds)]
        found.close()
    numbers = {"lora_lost_ms": round(statistics.median(lost), 2)}
    for name, arms in turns.items():
        for arm, times in arms.items():
            numbers[f"{name}_{arm}_s"] = round(statistics.median(times), 4)
        pairs = zip(arms["sealed"], arms["plain"], strict=True)
        numbers[f"{name}_ratio"] = round(statistics.median(sealed / plain for sealed, plain in pairs), 3)
    return finish(kept(numbers, BARS, lost_ms=lost, mib=asked.mib, rounds=asked.rounds, turns=turns), asked.output)


def agent(descriptor: int, path: str, public: bytes) -> int:
    """Seal each part that comes, onto a disk, and permit the next."""
    link = socket.socket(fileno=descriptor)
    seq, sealer, out = 1, None, None
    payload = memoryview(bytearray(frames.MAX_PAYLOAD_BYTES))

    def permit() -> None:
        link.sendall(frames.control({"type": "line", "left": 9, "previous": None, "seq": seq, "wait_us": 0}))

    permit()
    while header := _exactly(link, memoryview(bytearray(5))):
        data = _exactly(link, payload[: int.from_bytes(header[:4], "big")])
        if header[4] == frames.DATA:
            if sealer is not None:
                sealer.update(data)
            continue
        message: Any = decode(data, max_bytes=frames.MAX_CONTROL_BYTES)
        if message["type"] == "part":
            place = Place(
                deployment="00" * 16,
                environment_sha256=bytes(32),
                leg=1,
                line=bytes(32),
                machines=1,
                manifest_sha256=bytes(32),
                ranks=1,
                seq=seq,
                step=message["step"],
            )
            out = open(path, "wb", buffering=0)  # noqa: PTH123, SIM115
            sealer = PartSealer(out, place=place, rank=0, recipients=[public])
        elif message["type"] == "part-end" and sealer is not None and out is not None:
            part = sealer.finish()
            os.fsync(out.fileno())
            out.close()
            link.sendall(frames.control({"type": "part-kept", "rank": 0, **part.row.to_json()}))
        elif message["type"] == "checkpoint":
            seq += 1
            permit()
    return 0


def _exactly(link: socket.socket, into: memoryview) -> memoryview:
    done = 0
    while done < len(into):
        count = link.recv_into(into[done:])
        if not count:
            return into[:0]
        done += count
    return into


class Comparison:
    """Both arms, over the same state."""

    def __init__(self, folder: Path, memory: Path, mib: int) -> None:
        import fsspec
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self._torch, self._dcp, self._async_save = torch, dcp, async_save
        fsspec.register_implementation("glasshouse", "glasshouse.task.part_files.PartFiles", clobber=True)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        torch.set_num_threads(1)
        self._state = {f"layer-{n}": torch.randn(mib * MIB // 4 // TENSORS) for n in range(TENSORS)}
        self._plain, self._sealed, self._memory = folder / "plain", folder / "sealed", memory
        self._key = RecipientKey.generate()
        ours, theirs = socket.socketpair()
        command = ["-m", "benchmarks.checkpoints", "--agent", str(theirs.fileno()), str(self._sealed)]
        self._agent = subprocess.Popen(
            [sys.executable, *command, self._key.public.hex()], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._link = AgentLink(ours)
        self._line = AgentLine(self._link, LIMITS)
        # Not by `listen`, which ends this process with the other.
        threading.Thread(target=self._listen, daemon=True).start()
        self._step = 0
        self._install()
        self.save_plain()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self._line.take(self._link.receive())

    def _install(self) -> None:
        (self._memory / "in").mkdir(exist_ok=True)
        inputs = FolderInputs(self._memory / "in")
        install(Task(params={}, inputs=inputs, channel=self._link, workspace=self._memory, line=self._line))

    def close(self) -> None:
        """End the other process."""
        self._agent.kill()
        self._agent.wait()

    def save_plain(self) -> float:
        """Return the seconds of a plain save."""
        begun = time.perf_counter()
        self._dcp.save(self._state, checkpoint_id=str(self._plain))
        return time.perf_counter() - begun

    def save_sealed(self) -> float:
        """Return the seconds until a checkpoint is sealed on the disk."""
        name = self._permitted()
        begun = time.perf_counter()
        self._dcp.save(self._state, checkpoint_id=name)
        self._line.rows(1)
        return time.perf_counter() - begun

    def _permitted(self) -> str:
        while not self._line.due():
            time.sleep(0.001)
        self._step += 1
        return f"glasshouse://step-{self._step}"

    def load_plain(self) -> float:
        """Return the seconds of a load from files that are in memory."""
        into = {name: self._torch.empty_like(tensor) for name, tensor in self._state.items()}
        begun = time.perf_counter()
        self._dcp.load(into, checkpoint_id=str(self._plain))
        return time.perf_counter() - begun

    def load_sealed(self) -> float:
        """Return the seconds of laying a checkpoint out, verified, and loading it."""
        into = {name: self._torch.empty_like(tensor) for name, tensor in self._state.items()}
        file = self._sealed.open("rb")
        start = file.read(FRONT_BYTES)
        front = start + file.read(front_length(start) - FRONT_BYTES)
        header, chunks = PartHeader.parse_front(front), self._sealed.stat().st_size - len(front)
        part = ResumePart(
            bytes=plain_size(chunks, header.chunk_bytes) or 0,
            chunk_bytes=header.chunk_bytes,
            front_sha256=sha256(front),
            key=self._key.open(dict(header.recipients)[key_id(self._key.public)], info=header.info),
            offset=len(front),
            rank=0,
            suite=header.suite,
        )
        with tempfile.TemporaryDirectory(dir=self._memory) as folder:
            begun = time.perf_counter()
            found = restore(Resume(parts=(part,), seq=1, step=1), os.dup(file.fileno()), Path(folder))[0]
            self._dcp.load(into, checkpoint_id=str(found.path))
            taken = time.perf_counter() - begun
        file.close()
        if not all(self._torch.equal(into[name], tensor) for name, tensor in self._state.items()):
            raise RuntimeError("what was loaded is not what was saved")
        return taken

    def steps_plain(self) -> float:
        """Return the mean seconds of a step while a plain checkpoint is saved beside it."""
        return self._steps(str(self._plain), lambda: None)

    def steps_sealed(self) -> float:
        """Return the mean seconds of a step while a sealed checkpoint is saved beside it."""
        return self._steps(self._permitted(), lambda: self._line.rows(1))

    def _steps(self, name: str, settle: Callable[[], object]) -> float:
        weights, count = self._torch.randn(512, 512), 0
        future = self._async_save(self._state, checkpoint_id=name)
        begun = time.perf_counter()
        while count < 200:  # the same for both arms, and longer than either takes
            weights = (weights @ weights).tanh()
            count += 1
        taken = time.perf_counter() - begun
        future.result()
        settle()
        return taken / count

    def lora_lost_ms(self) -> float:
        """Return the milliseconds that a checkpoint of a default adapter's size costs the steps around it."""
        from glasshouse.workloads.lora import lora
        from glasshouse.workloads.lora.lora_params import LoraParams
        from glasshouse.workloads.process.job_control import JobControl
        from glasshouse.workloads.registry import canonical

        # As many trained parameters as the default adapter of Qwen2.5-0.5B.
        table = {"model": "config:qwen2-tiny", "dtype": "float32", "max_steps": 60, "device": "cpu", "threads": 1}
        table |= {"r": 151, "lora_alpha": 302}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "in").mkdir()
            records = ({"instruction": f"What comes after {n}?", "output": str(n + 1)} for n in range(100, 164))
            (Path(folder) / "in" / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
            channel, line = _Nowhere(), _EveryTenth(self._line)
            inputs, workspace = FolderInputs(Path(folder) / "in"), Path(folder) / "workspace"
            task = Task(params=canonical("lora", table), inputs=inputs, channel=channel, workspace=workspace, line=line)
            stamps: list[float] = []
            report = task.progress

            def stamped(*given: Any, **named: Any) -> bool:
                stamps.append(time.perf_counter())
                return report(*given, **named)

            task.progress = stamped  # type: ignore[method-assign]
            lora.run(task, LoraParams.read(table), JobControl(lambda *_: 0))
        steps = [1000 * (end - begin) for begin, end in itertools.pairwise(stamps)]
        # A checkpoint is taken between two stamps, and sent beside the steps that follow.
        around = [steps[at : at + 5] for at in line.taken if at + 5 <= len(steps) - 1]
        beside = statistics.median(steps[5:])
        return statistics.median(sum(some) - len(some) * beside for some in around)


class _Nowhere:
    stopping = False

    def send(self, message: Any) -> None:
        pass

    def output(self, header: Any, source: Any) -> str:
        return ""


class _EveryTenth:
    """A line that is due at every tenth look."""

    def __init__(self, line: AgentLine) -> None:
        self._line, self._looks = line, 0
        self.taken: list[int] = []
        self.check_size = line.check_size

    def due(self) -> bool:
        self._looks += 1
        return self._looks % 10 == 0 and self._line.due()

    def begin(self, paths: Any, *, step: int, wait_s: float, shared: bool) -> Any:
        part = self._line.begin(paths, step=step, wait_s=wait_s, shared=shared)
        if part is not None:
            self.taken.append(step)
        return part


def _turns(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Have the arms take turns; return what each found, but for the first round."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for _ in range(rounds + 1):
        for name in order:
            found[name].append(arms[name]())
        order.reverse()
    return {name: values[1:] for name, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
