"""The accelerators in sight, as their driver describes them: for the claims, and not believed at `software`."""

from __future__ import annotations

import ctypes
import os

from glasshouse.attestation.claims import MAX_GPUS, Gpu

__all__ = ["in_sight"]

_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def in_sight(*, library: str = _LIBRARY, folder: str = "/dev") -> tuple[Gpu, ...]:
    """Return the GPUs that a worker here could use; none where there is no driver or it does not answer.

    Args:
        library: NVIDIA's management library.
        folder: where device nodes are; without one the library is not even loaded.
    """
    if not any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir(folder)):  # noqa: PTH208
        return ()
    try:
        nvml = ctypes.CDLL(library)
        _ask(nvml.nvmlInit_v2())
    except OSError:
        return ()
    try:
        return _describe(nvml)
    except (OSError, AttributeError):
        return ()
    finally:
        nvml.nvmlShutdown()


def _describe(nvml: ctypes.CDLL) -> tuple[Gpu, ...]:
    driver, count = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.c_uint()
    _ask(nvml.nvmlSystemGetDriverVersion(driver, _TEXT_BYTES))
    _ask(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    found = []
    for index in range(min(count.value, MAX_GPUS)):
        device, memory = ctypes.c_void_p(), _Memory()
        name, uuid = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_TEXT_BYTES)
        _ask(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)))
        _ask(nvml.nvmlDeviceGetName(device, name, _TEXT_BYTES))
        _ask(nvml.nvmlDeviceGetUUID(device, uuid, _TEXT_BYTES))
        _ask(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
        found.append(Gpu(name=_text(name), memory_bytes=memory.total, driver=_text(driver)[:64], uuid=_text(uuid)[:64]))
    return tuple(found)


def _ask(code: int) -> None:
    if code != 0:
        raise OSError(f"NVML answered {code}")


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode("ascii", "replace")
