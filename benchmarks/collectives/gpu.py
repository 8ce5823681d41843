"""Measures the ciphers of one GPU: kernels against the arithmetic and against plain copies, and a package opened there.

    python -m benchmarks.collectives.gpu OUT.json [--small]

Laws: what is timed was first seen to be right, on fresh random bytes, against another implementation; times are those
of the device, medians, every one kept; outputs are poisoned before each run; inputs are random and take turns, so that
no run finds its data in the caches. `--small` runs everything under Triton's interpreter on a CPU (TRITON_INTERPRET=1):
it tries the script out and measures nothing. Source: benchmarks/collectives_cuda.sh.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from benchmarks.collectives.gpu_package import measure_package
from glasshouse.collectives.kernels.aead import PROGRAMS_PER_PROCESSOR, Cipher, Message
from glasshouse.collectives.kernels.jit import interpreted
from glasshouse.collectives.kernels.shape import Shape
from glasshouse.wire.aead import TAG_BYTES

__all__ = ["main", "measure"]

BARS_GB_PER_S = {"seal_256MiB": 600.0, "seal_64x4MiB": 500.0}
GOAL_GB_PER_S = 900.0

_POISON = 0xA5
_KIB, _MIB = 1 << 10, 1 << 20
_SIZES = tuple(1 << shift for shift in range(16, 31))
_CHECKED = (0, 1, 15, 16, 63, 64, 65, 1000, 8191, 8192, 65536, _MIB - 1, _MIB + 16, 37 * _MIB + 5, 300 * _MIB + 48)
_RUNS, _WARM_UPS = 15, 2
_SETS_BYTES = 1 << 30  # of inputs that take turns: many times any cache
_AHEAD_CYCLES = 6_000_000  # the device is kept busy for milliseconds while a run is being enqueued


class Bench:
    """One device under test.

    Args:
        device: a CUDA device, or the CPU under the interpreter.
        shape: of the launches; the device's own by default.
    """

    def __init__(self, device: torch.device, shape: Shape | None = None) -> None:
        self.device = device
        self.small = device.type != "cuda"
        if self.small:
            shape = Shape(lanes=16, warps=1, programs=1, least_steps=1)
        self.cipher = Cipher(device, shape=shape)
        self.sizes = (200,) if self.small else _SIZES
        self.checked = (100,) if self.small else _CHECKED
        self.runs = 1 if self.small else _RUNS

    def random(self, size: int) -> Any:
        return torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)

    def wait(self) -> None:
        """Return when the device has done all that it was told."""
        if not self.small:
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[int], None], *, poison: Callable[[int], None]) -> list[float]:
        """Return the device's time for each call of `run(turn)`, after some that are not counted."""
        found = []
        for turn in range(-_WARM_UPS if not self.small else 0, self.runs):
            poison(turn)
            if self.small:
                started = time.perf_counter()
                run(turn)
                found.append(time.perf_counter() - started)
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD_CYCLES)
            begin.record()
            run(turn)
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        return found[-self.runs :]


class Batch:
    """Messages of one size; their plaintexts are in several sets that take turns."""

    def __init__(self, bench: Bench, count: int, size: int) -> None:
        sets = max(1, min(8, _SETS_BYTES // max(1, count * size)))
        self._cipher = bench.cipher
        self._sources = [bench.random(count * size) for _ in range(1 if bench.small else sets)]
        self._sealed, self._opened = (torch.empty_like(self._sources[0]) for _ in range(2))
        self._tags = torch.empty(TAG_BYTES * count, dtype=torch.uint8, device=bench.device)
        self._count, self._size = count, size
        self._messages: list[Message] = []
        self.bytes = count * size

    def to_seal(self, turn: int) -> None:
        """Prepare the messages of a turn under a fresh key, and poison where they go."""
        self._messages = self._made(self._sources[turn % len(self._sources)], self._sealed)
        self._sealed.fill_(_POISON)
        self._tags.fill_(_POISON)

    def to_open(self, turn: int) -> None:
        """Prepare messages that are authentic, and poison where they go."""
        self.to_seal(turn)
        self._cipher.seal(self._messages)
        keys = [one.key for one in self._messages]
        self._messages = self._made(self._sealed, self._opened, keys[0])
        self._opened.fill_(_POISON)

    def seal(self, _: int) -> None:
        self._cipher.seal(self._messages)

    def open(self, _: int) -> None:
        self._cipher.open(self._messages)

    def _made(self, source: Any, target: Any, key: bytes | None = None) -> list[Message]:
        size, key = self._size, key or secrets.token_bytes(32)
        return [
            Message(
                key=key,
                nonce=index.to_bytes(12, "big"),
                associated_data=bytes(96),  # as long as a frame's
                source=source[index * size : (index + 1) * size],
                destination=target[index * size : (index + 1) * size],
                tag=self._tags[index * TAG_BYTES : (index + 1) * TAG_BYTES],
            )
            for index in range(self._count)
        ]


def measure(device: torch.device) -> dict[str, Any]:
    """Measure everything; about two minutes on an H200."""
    started = time.monotonic()
    bench = Bench(device)
    result: dict[str, Any] = {"correct": _check(bench), "copy": _copy(bench), "kernel": _compiled(bench)}
    result["sizes"] = [_size(bench, 1, size) for size in bench.sizes]
    result["many"] = _size(bench, *((2, 64) if bench.small else (64, 4 * _MIB)))
    result["shapes"] = list(_shapes(bench))
    result["package"] = measure_package(bench.cipher, (2 << 10) if bench.small else 1 << 30)
    result["bars"] = _bars(result, bench)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def _check(bench: Bench) -> dict[str, Any]:
    """Seal and open fresh random messages of every kind of length; raise on the first that is wrong."""
    for size in bench.checked:
        for skew in (0, 5) if bench.small else (0, 4, 5):
            _check_one(bench, size, skew)
    return {"lengths": list(bench.checked), "alignments": [16, 4, 1], "against": "cryptography (OpenSSL)"}


def _check_one(bench: Bench, size: int, skew: int) -> None:
    key, nonce, extra = secrets.token_bytes(32), secrets.token_bytes(12), secrets.token_bytes(size % 100)
    given = bench.random(size + skew)[skew:]
    out = torch.full((size + skew + TAG_BYTES,), _POISON, dtype=torch.uint8, device=bench.device)[skew:]
    sealing = Message(key=key, nonce=nonce, associated_data=extra, source=given, destination=out[:size], tag=out[size:])
    bench.cipher.seal([sealing])
    sealed = ChaCha20Poly1305(key).encrypt(nonce, given.cpu().numpy().tobytes(), extra)
    if out.cpu().numpy().tobytes() != sealed:
        raise SystemExit(f"sealing {size} bytes is wrong")
    for flip in (False, True):
        again = torch.full((size + skew,), _POISON, dtype=torch.uint8, device=bench.device)[skew:]
        if flip:
            out[secrets.randbelow(size + TAG_BYTES)] ^= 1
        opening = Message(
            key=key, nonce=nonce, associated_data=extra, source=out[:size], destination=again, tag=out[size:]
        )
        right = torch.zeros_like(given) if flip else given
        if bench.cipher.open([opening]).wait() != (not flip,) or not torch.equal(again, right):
            raise SystemExit(f"opening {size} bytes, {'changed' if flip else 'as they were'}, is wrong")


def _copy(bench: Bench) -> dict[str, Any]:
    """Return what a plain copy on the device moves, bytes read and bytes written."""
    size = 1000 if bench.small else 1 << 30
    source, target = bench.random(size), torch.empty(size, dtype=torch.uint8, device=bench.device)
    found = bench.seconds(lambda _: target.copy_(source), poison=lambda _: target.fill_(_POISON))
    return {"bytes": size, "gb_per_s_read_and_written": 2 * size / statistics.median(found) / 1e9, "seconds": found}


def _compiled(bench: Bench) -> dict[str, Any]:
    """Return what the compiler made of the kernels for this device, and the rate that its arithmetic allows."""
    if bench.small:
        return {}  # the interpreter compiles nothing
    from glasshouse.collectives.kernels.inspection import compile_bulk, compile_finish

    properties = torch.cuda.get_device_properties(bench.device)
    capability = properties.major * 10 + properties.minor
    clock_hz = _clock_hz()
    found: dict[str, Any] = {"multiprocessors": properties.multi_processor_count, "clock_hz": clock_hz}
    for seal in (True, False):
        made, end = compile_bulk(seal=seal, capability=capability), compile_finish(seal=seal, capability=capability)
        found["seal" if seal else "open"] = {
            "registers": made.registers,
            "stack_bytes": made.stack_bytes,
            "instructions_per_byte": made.instructions_per_byte,
            "integer_per_byte": made.integer_per_byte,
            "finish_registers": end.registers,
            "ceiling_gb_per_s": clock_hz and made.ceiling(properties.multi_processor_count, clock_hz) / 1e9,
        }
    return found


def _size(bench: Bench, count: int, size: int) -> dict[str, Any]:
    """Measure `count` messages of one size in one launch."""
    batch = Batch(bench, count, size)
    found: dict[str, Any] = {"messages": count, "bytes": size}
    for name, run, prepare in (("seal", batch.seal, batch.to_seal), ("open", batch.open, batch.to_open)):
        times = bench.seconds(run, poison=prepare)
        alone = [_alone(bench, run, prepare, turn) for turn in range(bench.runs)]
        found[name] = {
            "gb_per_s": batch.bytes / statistics.median(times) / 1e9,
            "seconds": times,
            # From the call to the end on the device, nothing enqueued before: what a caller that waits sees.
            "seconds_alone": alone,
        }
    return found


def _alone(bench: Bench, run: Callable[[int], None], prepare: Callable[[int], None], turn: int) -> float:
    prepare(turn)
    bench.wait()
    started = time.perf_counter()
    run(turn)
    bench.wait()
    return time.perf_counter() - started


def _shapes(bench: Bench) -> Iterator[dict[str, Any]]:
    """Try other shapes of a launch, for who tunes: on the two loads of the bars."""
    if bench.small:
        return
    processors = torch.cuda.get_device_properties(bench.device).multi_processor_count
    for lanes, warps, per in (
        (128, 4, 4),
        (128, 4, 5),
        (128, 4, 6),
        (128, 4, 10),
        (256, 8, 2),
        (64, 2, 10),
        (64, 2, 12),
    ):
        other = Bench(bench.device, Shape(lanes=lanes, warps=warps, programs=per * processors))
        rates = {}
        for name, count, size in (("seal_256MiB", 1, 256 * _MIB), ("seal_64x4MiB", 64, 4 * _MIB)):
            batch = Batch(other, count, size)
            times = other.seconds(batch.seal, poison=batch.to_seal)
            rates[name] = batch.bytes / statistics.median(times) / 1e9
        chosen = (lanes, per) == (128, PROGRAMS_PER_PROCESSOR)
        yield {"lanes": lanes, "warps": warps, "programs_per_processor": per, "chosen": chosen, "gb_per_s": rates}


def _bars(result: dict[str, Any], bench: Bench) -> dict[str, Any]:
    if bench.small:
        return {}
    one = next(item for item in result["sizes"] if item["bytes"] == 256 * _MIB)
    found = {"seal_256MiB": one["seal"]["gb_per_s"], "seal_64x4MiB": result["many"]["seal"]["gb_per_s"]}
    return {
        name: {"at_least": least, "goal": GOAL_GB_PER_S, "found": found[name], "met": found[name] >= least}
        for name, least in BARS_GB_PER_S.items()
    }


def _clock_hz() -> float | None:
    """Return the multiprocessors' clock while they work, as the driver says."""
    torch.cuda._sleep(2_000_000_000)  # a second of work, while the driver is asked
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        return float(said.stdout.splitlines()[0]) * 1e6
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    finally:
        torch.cuda.synchronize()


def _machine(device: torch.device) -> str:
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU (Triton's interpreter)"
    import triton

    kernel = platform.release().split("-")[0]
    return (
        f"{card}, {platform.machine()}, {os.cpu_count()} cores, {platform.system()} {kernel}, "
        f"CPython {platform.python_version()}, torch {torch.__version__}, triton {triton.__version__}"
    )


def main(argv: Sequence[str]) -> int:
    """Measure, write the result, print a table; return 0, or 1 when a bar is missed."""
    small = "--small" in argv
    paths = [word for word in argv if not word.startswith("--")]
    if len(paths) != 1 or small != interpreted():
        print("usage: gpu OUT.json [--small, with TRITON_INTERPRET=1]", file=sys.stderr)
        return 2
    device = torch.device("cpu") if small else torch.device("cuda", torch.cuda.current_device())
    result = measure(device)
    document = {"command": "bash benchmarks/collectives_cuda.sh", "machine": _machine(device), "result": result}
    Path(paths[0]).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    _print(result)
    return int(any(not bar["met"] for bar in result["bars"].values()))


def _print(result: dict[str, Any]) -> None:
    lines = [f"{'bytes':>12} {'seal GB/s':>10} {'open GB/s':>10}"]
    for item in (*result["sizes"], result["many"]):
        size = f"{item['messages']} x {item['bytes']}" if item["messages"] > 1 else str(item["bytes"])
        lines.append(f"{size:>12} {item['seal']['gb_per_s']:>10.1f} {item['open']['gb_per_s']:>10.1f}")
    for item in result["shapes"]:
        rates = " ".join(f"{name} {rate:.0f}" for name, rate in item["gb_per_s"].items())
        mark = " (chosen)" if item["chosen"] else ""
        lines.append(f"{item['lanes']} lanes x {item['programs_per_processor']} a multiprocessor: {rates}{mark}")
    lines.append(f"copy on the device {result['copy']['gb_per_s_read_and_written']:.0f} GB/s, read and written")
    for name in ("seal", "open"):
        if name in result["kernel"]:
            made = result["kernel"][name]
            ceiling = f"{made['ceiling_gb_per_s']:.0f}" if made["ceiling_gb_per_s"] else "unknown"
            lines.append(
                f"{name}: {made['registers']} registers, {made['stack_bytes']} bytes spilled, "
                f"{made['instructions_per_byte']:.1f} instructions a byte, ceiling {ceiling} GB/s"
            )
    package = result["package"]
    lines.append(f"package: {package['gpu_gb_per_s']:.2f} GB/s opened on the device, {package['host_gb_per_s']:.2f} "
                 f"through host memory; upload alone {package['upload_gb_per_s']:.2f}")  # fmt: skip
    lines += [f"{name}: {bar['found']:.0f} GB/s, bar {bar['at_least']:.0f}" for name, bar in result["bars"].items()]
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
