"""Measures the ciphers of one GPU: kernels against the arithmetic and against plain copies, and a package opened there.

    python -m benchmarks.collectives.gpu -o OUT.json [--small]

Laws: what is timed was first seen to be right, on fresh random bytes, against another implementation; times are those
of the device, medians, every one kept; outputs are poisoned before each run; inputs are random and take turns, so that
no run finds its data in the caches. `--small` runs everything under Triton's interpreter on a CPU (TRITON_INTERPRET=1):
it tries the script out and measures nothing. Source: benchmarks/collectives_cuda.sh.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from benchmarks.collectives.gpu_package import measure_package
from benchmarks.kept import Bar, finish, kept, options
from glasshouse.collectives.kernels.cipher import Cipher, Message
from glasshouse.collectives.kernels.launch_shape import Shape
from glasshouse.collectives.kernels.rfc8439 import interpreted
from glasshouse.wire.crypto import TAG_BYTES

__all__ = ["main"]

BARS = {"seal_256MiB_gb_per_s": Bar(600.0, least=True), "seal_64x4MiB_gb_per_s": Bar(500.0, least=True)}
POISON = 0xA5
MIB = 1 << 20
SIZES = tuple(1 << shift for shift in range(16, 31))
CHECKED = (0, 1, 15, 16, 63, 64, 65, 1000, 8191, 8192, 65536, MIB - 1, MIB + 16, 37 * MIB + 5, 300 * MIB + 48)
RUNS, WARM_UPS = 15, 2
SETS_BYTES = 1 << 30  # of inputs that take turns: many times any cache
AHEAD_CYCLES = 6_000_000  # the device is kept busy for milliseconds while a run is being enqueued

Run = Callable[[int], object]


def main(arguments: Sequence[str]) -> int:
    """Measure, write the result, print a table; return 0, or 1 when a bar is missed."""
    parser = options(__doc__)
    parser.add_argument("--small", action="store_true", help="on the CPU, with TRITON_INTERPRET=1: measures nothing")
    asked = parser.parse_args(arguments)
    if asked.small != interpreted():
        parser.error("--small takes TRITON_INTERPRET=1, and nothing else does")
    device = torch.device("cpu") if asked.small else torch.device("cuda", torch.cuda.current_device())
    return finish(measure(device), asked.output)


def measure(device: torch.device) -> dict[str, Any]:
    """Measure everything, and return what is kept."""
    small = device.type != "cuda"
    cipher = Cipher(device, shape=Shape(lanes=16, warps=1, programs=1, least_steps=1) if small else None)
    for size in (100,) if small else CHECKED:
        for skew in (0, 5) if small else (0, 4, 5):
            check(cipher, size, skew)
    loads = [(1, 200), (2, 64)] if small else [*((1, size) for size in SIZES), (64, 4 * MIB)]
    batches = [Batch(cipher, count, size).measure() for count, size in loads]
    copy, compiled = _copy(device), {} if small else _compiled(device)
    package = measure_package(cipher, (2 << 10) if small else 1 << 30)
    numbers = {"copy_read_and_written_gb_per_s": copy["gb_per_s"]}
    for way in ("seal", "open"):
        numbers |= {f"{way}_{batch['load']}_gb_per_s": batch[way]["gb_per_s"] for batch in batches}
        if compiled and compiled["clock_hz"]:
            numbers[f"{way}_ceiling_gb_per_s"] = compiled[way]["ceiling_gb_per_s"]
    numbers |= {f"package_{name}": rate for name, rate in package.items() if name.endswith("gb_per_s")}
    return kept(
        numbers,
        {} if small else BARS,
        batches=batches,
        compiled=compiled,
        copy=copy,
        device="no GPU (Triton's interpreter)" if small else torch.cuda.get_device_name(device),
        package=package,
        torch=torch.__version__,
        triton=triton.__version__,
    )


def random(device: torch.device, size: int) -> Any:
    """Return fresh random bytes on the device."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)


def check(cipher: Cipher, size: int, skew: int) -> None:
    """Seal and open one random message that begins `skew` bytes after a boundary; raise where it is wrong."""
    key, nonce, extra = secrets.token_bytes(32), secrets.token_bytes(12), secrets.token_bytes(size % 100)
    given = random(cipher.device, size + skew)[skew:]
    out, again = (
        torch.full((count + skew,), POISON, dtype=torch.uint8, device=cipher.device)[skew:]
        for count in (size + TAG_BYTES, size)
    )

    def message(source: Any, destination: Any) -> Message:
        return Message(
            key=key, nonce=nonce, associated_data=extra, source=source, destination=destination, tag=out[size:]
        )

    cipher.seal([message(given, out[:size])])
    if out.cpu().numpy().tobytes() != ChaCha20Poly1305(key).encrypt(nonce, given.cpu().numpy().tobytes(), extra):
        raise SystemExit(f"sealing {size} bytes is wrong")
    for verdict, right in ((True, given), (False, torch.zeros_like(given))):
        if cipher.open([message(out[:size], again)]).wait() != (verdict,) or not torch.equal(again, right):
            raise SystemExit(f"opening {size} bytes, {'as they were' if verdict else 'changed'}, is wrong")
        out[secrets.randbelow(size + TAG_BYTES)] ^= 1
        again.fill_(POISON)


def seconds(device: torch.device, run: Run, prepare: Run) -> list[float]:
    """Return the device's time for each call of `run(turn)`, after some that are not counted."""
    if device.type != "cuda":
        prepare(0)
        begin_s = time.perf_counter()
        run(0)
        return [time.perf_counter() - begin_s]
    found = []
    for turn in range(RUNS + WARM_UPS):
        prepare(turn)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        run(turn)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found[WARM_UPS:]


class Batch:
    """Messages of one size in one launch; their plaintexts are in several sets that take turns."""

    def __init__(self, cipher: Cipher, count: int, size: int) -> None:
        self._cipher, self._count, self._size = cipher, count, size
        self._bytes = count * size
        sets = max(1, min(8, SETS_BYTES // self._bytes)) if cipher.device.type == "cuda" else 1
        self._sources = [random(cipher.device, self._bytes) for _ in range(sets)]
        self._sealed, self._opened = (torch.empty_like(self._sources[0]) for _ in range(2))
        self._tags = torch.empty(TAG_BYTES * count, dtype=torch.uint8, device=cipher.device)
        self._messages: list[Message] = []

    def measure(self) -> dict[str, Any]:
        """Return the times and rates of sealing and opening."""
        name = f"{self._size // MIB}MiB" if self._size >= MIB else f"{self._size}B"
        found: dict[str, Any] = {"load": name if self._count == 1 else f"{self._count}x{name}"}
        for way, run, prepare in (
            ("seal", lambda _: self._cipher.seal(self._messages), self._to_seal),
            ("open", lambda _: self._cipher.open(self._messages), self._to_open),
        ):
            times = seconds(self._cipher.device, run, prepare)
            found[way] = {"gb_per_s": _rate(self._bytes, times), "seconds": times}
        return found

    def _to_seal(self, turn: int) -> None:
        """Prepare the messages of a turn under a fresh key, and poison where they go."""
        self._prepare(self._sources[turn % len(self._sources)], self._sealed, secrets.token_bytes(32))
        self._tags.fill_(POISON)

    def _to_open(self, turn: int) -> None:
        """Prepare messages that are authentic, and poison where they go."""
        self._to_seal(turn)
        self._cipher.seal(self._messages)
        self._prepare(self._sealed, self._opened, self._messages[0].key)

    def _prepare(self, source: Any, target: Any, key: bytes) -> None:
        target.fill_(POISON)
        self._messages = [
            Message(
                key=key,
                nonce=index.to_bytes(12, "big"),
                associated_data=bytes(96),  # as long as a frame's
                source=source[index * self._size : (index + 1) * self._size],
                destination=target[index * self._size : (index + 1) * self._size],
                tag=self._tags[index * TAG_BYTES : (index + 1) * TAG_BYTES],
            )
            for index in range(self._count)
        ]


def _rate(size: int, times: Sequence[float]) -> float:
    return round(size / statistics.median(times) / 1e9, 3)


def _copy(device: torch.device) -> dict[str, Any]:
    """Return what a plain copy on the device moves, bytes read and bytes written."""
    source = random(device, 1000 if device.type != "cuda" else 1 << 30)
    target = torch.empty_like(source)
    times = seconds(device, lambda _: target.copy_(source), lambda _: target.fill_(POISON))
    return {"gb_per_s": _rate(2 * len(source), times), "seconds": times}


def _compiled(device: torch.device) -> dict[str, Any]:
    """Return what the compiler made of the kernels for this device, and the rate that its arithmetic allows."""
    # Its interpreter compiles nothing, and has not all of what this imports.
    from benchmarks.collectives.inspection import compile_bulk, compile_finish

    properties, clock_hz = torch.cuda.get_device_properties(device), _clock_hz()
    capability, processors = properties.major * 10 + properties.minor, properties.multi_processor_count
    found: dict[str, Any] = {"clock_hz": clock_hz, "multiprocessors": processors}
    for seal in (True, False):
        bulk, end = compile_bulk(seal=seal, capability=capability), compile_finish(seal=seal, capability=capability)
        found["seal" if seal else "open"] = {
            "ceiling_gb_per_s": clock_hz and round(bulk.ceiling(processors, clock_hz) / 1e9, 1),
            "finish_registers": end.registers,
            "instructions_per_byte": bulk.instructions_per_byte,
            "integer_per_byte": bulk.integer_per_byte,
            "registers": bulk.registers,
            "stack_bytes": bulk.stack_bytes,
        }
    return found


def _clock_hz() -> float | None:
    """Return the multiprocessors' clock while they work, by the driver; None where it cannot be asked."""
    torch.cuda._sleep(2_000_000_000)  # a second of work, while the driver is asked
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    clock_hz = None
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        clock_hz = float(shown.splitlines()[0]) * 1e6
    torch.cuda.synchronize()
    return clock_hz


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
