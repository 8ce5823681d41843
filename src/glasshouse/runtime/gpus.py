"""NVIDIA's management library: GPUs for the claims, not proven at `software`, and processes that hold them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from glasshouse.attestation.claims import MAX_GPUS, Gpu

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_MAX_HOLDERS = 64
_HOLDER_BYTES = 24  # struct nvmlProcessInfo_v2: pid, used memory, two instance ids


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def in_sight(*, library: str = LIBRARY, folder: str = "/dev") -> tuple[Gpu, ...]:
    """Return the GPUs that a worker here could use; none where there is no driver or it does not answer.

    Without a device node in `folder` the library is not even loaded.
    """
    if not have_nodes(folder):
        return ()
    try:
        with nvml_of(library) as nvml:
            driver = ctypes.create_string_buffer(_TEXT_BYTES)
            ask(nvml.nvmlSystemGetDriverVersion(driver, _TEXT_BYTES))
            return tuple(_describe(nvml, device, _text(driver)[:64]) for device in devices_of(nvml)[:MAX_GPUS])
    except (OSError, AttributeError):
        return ()


def have_nodes(folder: str) -> bool:
    """Return whether there is the device node of a GPU."""
    return any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir(folder))  # noqa: PTH208


def holders(library: str) -> set[int]:
    """Return the processes that hold memory of any GPU, by the driver's numbers; raises `OSError`, `AttributeError`."""
    found: set[int] = set()
    with nvml_of(library) as nvml:
        questions = nvml.nvmlDeviceGetComputeRunningProcesses_v3, nvml.nvmlDeviceGetGraphicsRunningProcesses_v3
        for device in devices_of(nvml):
            for question in questions:
                count = ctypes.c_uint(_MAX_HOLDERS)
                answer = ctypes.create_string_buffer(_MAX_HOLDERS * _HOLDER_BYTES)
                ask(question(device, ctypes.byref(count), answer))
                starts = range(0, count.value * _HOLDER_BYTES, _HOLDER_BYTES)
                found |= {int.from_bytes(answer.raw[start : start + 4], "little") for start in starts}
    return found


@contextmanager
def nvml_of(library: str) -> Iterator[ctypes.CDLL]:
    """Open the library; raises `OSError` where there is none or its driver does not answer."""
    nvml = ctypes.CDLL(library)
    ask(nvml.nvmlInit_v2())
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def devices_of(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Return a handle of each GPU in sight; raises `OSError`."""
    count = ctypes.c_uint()
    ask(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    devices = [ctypes.c_void_p() for _ in range(count.value)]
    for index, device in enumerate(devices):
        ask(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
    return devices


def _describe(nvml: ctypes.CDLL, device: ctypes.c_void_p, driver: str) -> Gpu:
    memory = _Memory()
    name, uuid = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_TEXT_BYTES)
    ask(nvml.nvmlDeviceGetName(device, name, _TEXT_BYTES))
    ask(nvml.nvmlDeviceGetUUID(device, uuid, _TEXT_BYTES))
    ask(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
    return Gpu(name=_text(name), memory_bytes=memory.total, driver=driver, uuid=_text(uuid)[:64])


def ask(code: int) -> None:
    """Raise `OSError` for an answer that is not success."""
    if code != 0:
        raise OSError(f"NVML answered {code}")


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode("ascii", "replace")
