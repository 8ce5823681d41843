"""Opens sealed weights on the GPU that they are for, straight into the tensors: host memory sees only ciphertext.

Laws: a tensor is handed out only when every chunk in it was authentic; when one was not, all tensors of the call are
zero. Where weights have to be opened in host memory after all, the log has the reason.
Source: docs/adr/0012-collectives-lie-beneath-workloads.md, spec/sealed-package.md, sections 4 and 6.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from glasshouse.errors import Code, PackageError
from glasshouse.package.streams import SealedAsset, as_bytes
from glasshouse.task.tensors import Opener, Places
from glasshouse.wire.crypto import TAG_BYTES, Suite
from glasshouse.workloads.builtin.training import log

_WINDOW_BYTES = 64 << 20
"""Ciphertext of one launch; twice as much is page-locked, so that one window is read while another is opened."""

_BYTE = torch.uint8
_PROBE = bytes(range(100))  # a block and a tail


def opener(device: torch.device) -> DeviceOpener:
    """Return what opens weights for tensors on `device`: there, or not at all, with a reason."""
    if device.type != "cuda":
        return DeviceOpener(None, why=f"the device is {device.type}")
    try:
        from glasshouse.collectives.kernels.cipher import Cipher

        cipher = Cipher(device)
        if _works(cipher):
            return DeviceOpener(cipher)
    except Exception as error:  # whatever keeps a compiler from compiling: the detour has a reason in the log
        return DeviceOpener(None, why=f"the GPU's kernels cannot be built here ({type(error).__name__})")
    return DeviceOpener(None, why="the GPU's kernels failed their test")


class DeviceOpener(Opener):
    """Opens assets of the ChaCha20-Poly1305 suite on one device, with a `collectives.kernels` cipher.

    Args:
        cipher: None opens nothing, for the reason `why`.
        window_bytes: ciphertext of one launch; at least a chunk is.
    """

    def __init__(self, cipher: Any, *, why: str = "", window_bytes: int = _WINDOW_BYTES) -> None:
        self.device: Any = "cpu" if cipher is None else cipher.device
        self._cipher = cipher
        self._why = why
        self._window_bytes = window_bytes
        self._logged = False

    def opens(self, sealed: SealedAsset) -> bool:
        why = self._why
        if not why and sealed.suite is not Suite.CHACHA20_POLY1305:
            why = f"the package's suite is {sealed.suite.value}"
        if not self._logged:
            self._logged = True
            log(f"glasshouse: weights are opened {f'in host memory: {why}' if why else 'on the GPU'}")
        return not why

    def reader(self, sealed: SealedAsset) -> _Reader:
        return _Reader(self, sealed)

    def fill(self, sealed: SealedAsset, places: Places) -> None:
        copies: list[tuple[Any, Any]] = []
        targets: list[tuple[int, Any]] = []
        for offset, size, tensor, dtype in places:
            if not size:
                continue
            flat = tensor.detach()
            if tensor.device != self.device or tensor.dtype != dtype or not tensor.is_contiguous():
                flat = torch.empty(tensor.shape, dtype=dtype, device=self.device)
                copies.append((tensor, flat))
            targets.append((offset, flat.view(-1).view(_BYTE)))
        targets.sort(key=lambda target: target[0])
        try:
            _Run(self._cipher, sealed, targets, self._window_bytes).open()
        except BaseException:
            for _, flat in targets:
                flat.zero_()
            for tensor, _ in copies:
                tensor.detach().zero_()
            self._wait()
            raise
        for tensor, flat in copies:
            tensor.detach().copy_(flat)
        self._wait()  # whatever stream or thread uses them next

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Run:
    """One asset's chunks on their way into tensors, a window at a time, two windows in flight.

    Each target is an offset in the asset and flat bytes on the device; in ascending order, not overlapping.
    """

    def __init__(self, cipher: Any, sealed: SealedAsset, targets: Sequence[tuple[int, Any]], window_bytes: int) -> None:
        self._cipher = cipher
        self._sealed = sealed
        self._targets = targets
        self._starts = [offset for offset, _ in targets]
        self._stride = sealed.chunk_bytes + TAG_BYTES
        self._most = max(1, window_bytes // self._stride)
        self._windows_in_flight = [_Window(), _Window()]

    def open(self) -> None:
        """Open all of them; raises as `Opener.fill`, when some of the targets are filled."""
        for index, (first, count) in enumerate(self._windows()):
            slot = self._windows_in_flight[index % 2]
            self._settle(slot)  # the device is through with its buffers
            self._launch(slot, first, count)
        for slot in self._windows_in_flight:
            self._settle(slot)

    def _windows(self) -> Iterator[tuple[int, int]]:
        """Yield runs of neighbouring chunks that hold bytes of a target."""
        first = count = 0
        for offset, flat in self._targets:
            low, high = offset // self._sealed.chunk_bytes, (offset + flat.numel() - 1) // self._sealed.chunk_bytes
            for chunk in range(max(low, first + count), high + 1):
                if count and (chunk != first + count or count == self._most):
                    yield first, count
                    count = 0
                first, count = (first, count + 1) if count else (chunk, 1)
        if count:
            yield first, count

    def _launch(self, slot: _Window, first: int, count: int) -> None:
        from glasshouse.collectives.kernels.cipher import Message

        sealed = self._sealed
        sizes = [sealed.plain_bytes(first + index) for index in range(count)]
        host, device = slot.buffers(sum(sizes) + count * TAG_BYTES, self._cipher.device)
        sealed.read_sealed(first, as_bytes(_view(host)))
        device.copy_(host, non_blocking=True)
        messages, copies = [], []
        for index, size in enumerate(sizes):
            low = (first + index) * sealed.chunk_bytes
            parts = list(self._within(low, low + size))
            if len(parts) == 1 and parts[0][0].numel() == size:
                destination = parts[0][0]
            else:  # where tensors meet: on the device, and from there to each
                destination = torch.empty(size, dtype=_BYTE, device=self._cipher.device)
                copies += [(part, destination[at : at + part.numel()]) for part, at in parts]
            at = index * self._stride
            messages.append(
                Message(
                    key=sealed.key,
                    nonce=sealed.nonce(first + index),
                    associated_data=sealed.associated_data,
                    source=device[at : at + size],
                    destination=destination,
                    tag=device[at + size : at + size + TAG_BYTES],
                )
            )
        slot.verdicts = (first, self._cipher.open(messages))
        for part, opened in copies:
            part.copy_(opened)

    def _within(self, low: int, high: int) -> Iterator[tuple[Any, int]]:
        """Yield the parts of targets that lie in [low, high), each with its place behind `low`."""
        index = max(0, bisect_right(self._starts, low) - 1)
        while index < len(self._targets) and self._starts[index] < high:
            offset, flat = self._targets[index]
            begin, end = max(low, offset), min(high, offset + flat.numel())
            if begin < end:
                yield flat[begin - offset : end - offset], begin - low
            index += 1

    def _settle(self, slot: _Window) -> None:
        if slot.verdicts is None:
            return
        first, verdicts = slot.verdicts
        slot.verdicts = None
        for index, authentic in enumerate(verdicts.wait()):
            if not authentic:
                raise PackageError(
                    Code.PACKAGE_TAMPERED,
                    f"chunk {first + index} is not what was sealed: changed, moved, cut or of another key",
                )


class _Window:
    """Buffers of one window, and the verdicts that are awaited on it."""

    def __init__(self) -> None:
        self.verdicts: tuple[int, Any] | None = None
        self._host = torch.empty(0, dtype=_BYTE, device="cpu")
        self._device = torch.empty(0, dtype=_BYTE, device="cpu")

    def buffers(self, size: int, device: Any) -> tuple[Any, Any]:
        if self._host.numel() < size:
            self._host = torch.empty(size, dtype=_BYTE, device="cpu", pin_memory=device.type == "cuda")
            self._device = torch.empty(size, dtype=_BYTE, device=device)
        return self._host[:size], self._device[:size]


class _Reader:
    """Small parts of an asset, such as a header: their chunks are opened on the device, and only they leave it."""

    def __init__(self, opener: DeviceOpener, sealed: SealedAsset) -> None:
        self._opener, self._sealed = opener, sealed
        self._held: tuple[int, Any] = (-1, None)

    @property
    def size(self) -> int:
        return self._sealed.size

    def read_into(self, offset: int, destination: object, /) -> int:
        view = as_bytes(destination)
        count = max(0, min(len(view), self.size - offset))
        done = 0
        while done < count:
            chunk, skip = divmod(offset + done, self._sealed.chunk_bytes)
            part = self._chunk(chunk)[skip : skip + count - done].cpu()
            view[done : done + part.numel()] = as_bytes(_view(part))
            done += part.numel()
        return count

    def _chunk(self, chunk: int) -> Any:
        if self._held[0] != chunk:
            plain = torch.empty(self._sealed.plain_bytes(chunk), dtype=_BYTE, device=self._opener.device)
            self._opener.fill(self._sealed, [(chunk * self._sealed.chunk_bytes, plain.numel(), plain, _BYTE)])
            self._held = (chunk, plain)
        return self._held[1]


def _works(cipher: Any) -> bool:
    """Return whether the kernels give on this device what another implementation gives."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    from glasshouse.collectives.kernels.cipher import Message

    key, nonce = bytes(range(32)), bytes(range(12))
    sealed = ChaCha20Poly1305(key).encrypt(nonce, _PROBE, None)
    expected = torch.frombuffer(bytearray(_PROBE), dtype=_BYTE).to(cipher.device)
    for flip in (0, 1):
        given = torch.frombuffer(bytearray(sealed), dtype=_BYTE).to(cipher.device)
        given[3] ^= flip
        out = torch.full_like(expected, 0xA5)
        message = Message(
            key=key,
            nonce=nonce,
            associated_data=b"",
            source=given[: len(_PROBE)],
            destination=out,
            tag=given[len(_PROBE) :],
        )
        verdicts = cipher.open([message]).wait()
        if verdicts != (not flip,) or not torch.equal(out, torch.zeros_like(expected) if flip else expected):
            return False
    return True


def _view(tensor: Any) -> memoryview:
    from glasshouse.collectives.protocol.frame_memory import bytes_of

    return bytes_of(tensor)
