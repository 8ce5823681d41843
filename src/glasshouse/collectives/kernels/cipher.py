"""ChaCha20-Poly1305 (RFC 8439) on the device that the data is on, many messages in two launches, and in its order.

Laws: everything is enqueued on the device's current stream, and nothing waits but `Verdicts.wait`. What fails to open
is zero before anything behind on that stream sees it. The table of keys on the device is wiped by the kernels that read
it, its copy in host memory at the next call or by `close`. A key and nonce seal one message: the caller sees to that.
Plaintext is never copied to host memory: ciphertext goes through one page-locked buffer a queue.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from glasshouse.collectives.kernels import passes
from glasshouse.collectives.kernels.launch_shape import Shape, cut
from glasshouse.collectives.kernels.rfc8439 import interpreted
from glasshouse.collectives.protocol.frame_memory import bytes_of
from glasshouse.collectives.protocol.traffic import Reserved
from glasshouse.errors import Code, PlatformError
from glasshouse.wire.crypto import KEY_BYTES, TAG_BYTES, zero

NONCE_BYTES = 12
PROGRAMS_PER_PROCESSOR = 5  # of `bulk` on a multiprocessor: 128 threads of at most 96 registers each, out of 65536

_ROW = struct.Struct("<8q")
_KEY_ROW_BYTES = 64
_VERDICT_AT = 7
_FEW_TERMS = 96
# Lanes and warps of `finish`; a lane a thread, as some read what they overwrite.
_FEW, _MANY = (32, 1), (512, 16)
_LEAST_PINNED_BYTES = 1 << 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message, and where it goes: flat contiguous uint8 tensors on the device, of any alignment."""

    key: bytes = field(repr=False)
    nonce: bytes
    associated_data: bytes
    source: Any  # plaintext, or ciphertext without tag
    destination: Any  # as long; the same memory as `source`, or memory that overlaps neither it nor any other message's
    tag: Any  # 16 bytes: written by `seal`, read by `open`

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes and a nonce {NONCE_BYTES}")
        for tensor in (self.source, self.destination, self.tag):
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError("messages are flat contiguous tensors of uint8")
        size = self.source.numel()
        if self.destination.numel() != size or self.tag.numel() != TAG_BYTES:
            raise ValueError(f"a message keeps its length, and its tag has {TAG_BYTES} bytes")
        apart = self.destination.data_ptr() - self.source.data_ptr()
        if 0 < abs(apart) < size:
            raise ValueError("source and destination overlap without being the same")


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Whether each message of one call of `open` was authentic."""

    rows: Any  # the table of messages in host memory, where the kernels' answers arrive
    places: Sequence[int]  # the row of each message
    arrived: Any  # the event after which they are there, None if they already are

    def wait(self) -> tuple[bool, ...]:
        """Wait for the device and return the answers, in the order of the messages."""
        if self.arrived is not None:
            self.arrived.synchronize()
        # The column was zero when it was sent there: what no kernel has answered is no.
        return tuple(int(self.rows[place * 8 + _VERDICT_AT]) == 1 for place in self.places)


class Cipher:
    """Seals and opens messages on one CUDA device (in tests the CPU). Safe to share between threads.

    Raises:
        PlatformError: `device-missing`, a device that these kernels do not run on.
    """

    def __init__(self, device: Any, *, shape: Shape | None = None) -> None:
        self.device = torch.device(device)
        if not interpreted() and self.device.type != "cuda":
            raise PlatformError(Code.DEVICE_MISSING, f"the cipher's kernels do not run on {self.device.type}")
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if shape is None:
            shape = Shape(
                programs=PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
            )
        if self.device.type == "cuda" and shape.lanes % (32 * shape.warps):
            raise ValueError("every thread has blocks of its own: two with the same would race where all is in place")
        self.shape = shape
        self._pinned = _Pinned(self.device.type == "cuda")

    def seal(self, messages: Sequence[Message]) -> None:
        """Encrypt each message's source into its destination, and write its tag."""
        with self._current():
            self._launch(messages, seal=True)

    def open(self, messages: Sequence[Message]) -> Verdicts:
        """Decrypt each message's source into its destination, and compare its tag; a failed one's output is zeroed."""
        with self._current():
            table, places = self._launch(messages, seal=False)
            rows = table[: len(messages) * _ROW.size].view(torch.int64)
            if self.device.type != "cuda":
                return Verdicts(rows, places, None)
            # Not pooled: it is the caller's until the verdicts are thrown away. It holds addresses, and no key.
            answers = torch.empty(rows.numel(), dtype=torch.int64, device="cpu", pin_memory=True)
            answers.copy_(rows, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            return Verdicts(answers, places, arrived)

    def close(self) -> None:
        """Wipe the keys that are left in host memory; waits for the device."""
        self._pinned.wipe()

    def _current(self) -> Any:
        """Return what makes this cipher's device the one that kernels are launched on."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _launch(self, messages: Sequence[Message], *, seal: bool) -> tuple[Any, list[int]]:
        if any(tensor.device != self.device for one in messages for tensor in (one.source, one.destination, one.tag)):
            raise ValueError(f"a message that is not on {self.device}")
        if not messages:
            return torch.empty(0, dtype=torch.uint8, device=self.device), []
        units = [_unit(one) for one in messages]
        # Wide accesses need aligned messages: those of one alignment share their launches.
        order = sorted(range(len(messages)), key=lambda index: -units[index])
        places = sorted(range(len(messages)), key=order.__getitem__)
        ordered = [messages[index] for index in order]
        launches, end = [], 0
        for unit in sorted(set(units), reverse=True):
            first, end = end, end + units.count(unit)
            sizes = [one.source.numel() for one in ordered[first:end]]
            launches.append(
                (unit, first, end, cut(sizes, [len(one.associated_data) for one in ordered[first:end]], self.shape))
            )
        table = self._table(ordered, [count for *_, one in launches for count in one.segments])
        keys_at = len(messages) * _ROW.size
        for unit, first, end, one in launches:
            rows = table[first * _ROW.size : end * _ROW.size].view(torch.int64)
            keys = table[keys_at + first * _KEY_ROW_BYTES : keys_at + end * _KEY_ROW_BYTES].view(torch.uint32)
            most = max(one.segments)
            parts = torch.empty(max(1, (end - first) * most) * 5, dtype=torch.uint64, device=self.device)
            if most:
                passes.bulk[(end - first, most)](
                    rows, keys, parts, one.steps, most,
                    SEAL=seal, UNIT=unit, LANES=self.shape.lanes, LANES_LOG2=self.shape.lanes.bit_length() - 1,
                    num_warps=self.shape.warps,
                )  # fmt: skip
            lanes, warps = _FEW if one.terms <= _FEW_TERMS else _MANY
            passes.finish[(end - first,)](
                rows, keys, parts, one.steps, most, one.exponent_bits,
                SEAL=seal, BULK_LANES=self.shape.lanes, LANES=lanes, num_warps=warps,
            )  # fmt: skip
        return table, places

    def _table(self, messages: Sequence[Message], segments: Sequence[int]) -> Any:
        """Return the table of messages, keys and associated data on the device: one copy."""
        count = len(messages)
        associated_at = count * (_ROW.size + _KEY_ROW_BYTES)
        size = associated_at + sum(len(one.associated_data) for one in messages)
        table = torch.empty(size, dtype=torch.uint8, device=self.device)
        host = self._pinned.take(size)
        view = bytes_of(host)
        at = associated_at
        for index, one in enumerate(messages):
            extra = len(one.associated_data)
            addresses = (one.source.data_ptr(), one.destination.data_ptr(), one.tag.data_ptr())
            row = (*addresses, one.source.numel(), table.data_ptr() + at, extra, segments[index], 0)
            _ROW.pack_into(view, index * _ROW.size, *row)
            key = count * _ROW.size + index * _KEY_ROW_BYTES
            view[key : key + KEY_BYTES] = one.key
            view[key + KEY_BYTES : key + KEY_BYTES + NONCE_BYTES] = one.nonce
            view[at : at + extra] = one.associated_data
            at += extra
        table.copy_(host, non_blocking=True)
        self._pinned.sent(host)
        return table


class _Pinned:
    """Page-locked memory that tables are sent from: wiped and used again once the device has read it."""

    def __init__(self, locked: bool) -> None:
        self._locked = locked
        self._lock = threading.Lock()
        self._free: list[Any] = []
        self._busy: list[tuple[Any, Any]] = []

    def take(self, size: int) -> Any:
        """Return `size` bytes that the device is not reading from."""
        with self._lock:
            self._collect()
            for index, buffer in enumerate(self._free):
                if buffer.numel() >= size:
                    return self._free.pop(index)[:size]
        whole = max(size, _LEAST_PINNED_BYTES)
        return torch.zeros(whole, dtype=torch.uint8, device="cpu", pin_memory=self._locked)[:size]

    def sent(self, host: Any) -> None:
        """Take back a buffer whose copy to the device has been enqueued."""
        event = None
        if self._locked:
            event = torch.cuda.Event()
            event.record()
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host.untyped_storage())
        with self._lock:
            self._busy.append((whole, event))
            if event is None:
                self._collect()

    def wipe(self) -> None:
        with self._lock:
            for _, event in self._busy:
                if event is not None:
                    event.synchronize()
            self._collect()

    def _collect(self) -> None:
        still = []
        for buffer, event in self._busy:
            if event is not None and not event.query():
                still.append((buffer, event))
                continue
            zero(bytes_of(buffer))
            self._free.append(buffer)
        self._busy = still


def _unit(message: Message) -> int:
    """Return the bytes, 16, 4 or 1, to which both ends of a message are aligned."""
    both = message.source.data_ptr() | message.destination.data_ptr()
    return 16 if both % 16 == 0 else 4 if both % 4 == 0 else 1


class Queue:
    """Orders one group's work on one CUDA device (in tests the CPU). Used by one thread at a time.

    Raises:
        PlatformError: `device-missing`, a device that the kernels do not run on.
    """

    def __init__(self, device: Any, *, cipher: Cipher | None = None) -> None:
        self._cipher = Cipher(device) if cipher is None else cipher
        self.device = self._cipher.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._sealed = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._twins: dict[int, Any] = {}

    def begin(self) -> None:
        """Make this queue wait for the calling thread's work so far: it makes the inputs."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        """Make the calling thread's work from now on wait for this queue: it uses the outputs."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Enqueue on this queue whatever is enqueued inside."""
        # In inference mode: a script may reduce tensors that were made in it, from a thread that is not in it.
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self._stream))
            yield

    def keep(self, tensor: Any) -> None:
        """Keep a tensor's memory from being used for another before this queue is through with it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def twin(self, buffer: memoryview, size: int) -> Any:
        """Return `size` bytes on the device that belong to a buffer in host memory: the same for the same buffer."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0
        known = self._twins.get(address)
        if known is None or known.numel() < size:
            known = self._twins[address] = torch.empty(max(size, len(buffer)), dtype=torch.uint8, device=self.device)
        return known[:size]

    def seal(self, source: Any, reserved: Reserved, out: memoryview) -> None:
        """Seal flat bytes on the device, and copy ciphertext and tag to `out` in host memory."""
        size = source.numel()
        sealed, host = self._stages(size + TAG_BYTES)
        one = Message(**reserved._asdict(), source=source, destination=sealed[:size], tag=sealed[size:])
        self._cipher.seal([one])
        host.copy_(sealed, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        out[:] = bytes_of(host)

    def open(self, data: memoryview, reserved: Reserved, destination: Any) -> bool:
        """Copy ciphertext and tag to the device and open them; return whether they were authentic.

        If not, `destination` is zero.
        """
        size = destination.numel()
        sealed, host = self._stages(size + TAG_BYTES)
        bytes_of(host)[:] = data
        sealed.copy_(host, non_blocking=True)
        one = Message(**reserved._asdict(), source=sealed[:size], destination=destination, tag=sealed[size:])
        # Also waits until the host buffer has been read: it comes next on the same stream.
        verdicts: tuple[bool, ...] = self._cipher.open([one]).wait()
        return verdicts == (True,)

    def close(self) -> None:
        """Wipe the keys that are left in host memory, and release all buffers."""
        with self.within():
            self._cipher.close()
        self._twins.clear()
        self._host, self._sealed = self._host[:0], self._sealed[:0]

    def _stages(self, size: int) -> tuple[Any, Any]:
        if self._host.numel() < size:
            self._host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)
            self._sealed = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._sealed[:size], self._host[:size]
