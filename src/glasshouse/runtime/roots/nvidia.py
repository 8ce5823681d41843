"""Evidence of NVIDIA's GPUs, and of the switches between them, as the driver's libraries give it.

What NVML says of the driver's mode is no evidence by itself: the processor's report binds it, as all that measured code
says. Source: spec/hardware-evidence.md, section 7.5; nvml.h of CUDA 12.4; nscq.h 2.0.
"""

from __future__ import annotations

import binascii
import ctypes
import re
from typing import Any

from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.kinds import NVIDIA
from glasshouse.attestation.roots.nvidia.nvidia_blob import CHAIN_LENGTH, GpuMode, NvidiaBlob
from glasshouse.errors import FormatError
from glasshouse.handshake.messages import TpmKeys
from glasshouse.runtime import gpus
from glasshouse.runtime.roots.collectors import unavailable

SWITCH_LIBRARY = "libnvidia-nscq.so.2"
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s(.+?)-----END CERTIFICATE-----", re.DOTALL)
_UNKNOWN = (3, 13)  # NVML: not supported, function not found
_OFF = "confidential computing of the GPUs is off; whose machine it is turns it on, for a confidential machine"
_DEVTOOLS = "the GPUs are in the mode for developer tools, which protects nothing"
_OLD = "the NVIDIA driver is too old to give evidence of its GPUs"
_SETTINGS_VERSION = 1 << 24 | 20  # 1, of 20 bytes
# nvmlConfComputeGpuAttestationReport_t: three numbers, the nonce, the report, that of another controller.
_NONCE_AT, _REPORT_AT, _REPORT_BYTES = 12, 44, 44 + 0x2000 + 0x1000
# nvmlConfComputeGpuCertificate_t: two numbers, the device's own chain, that of the report's key.
_CHAIN_AT, _CHAIN_BYTES = 8 + 0x1000, 8 + 0x1000 + 0x1400
_MODES = {0: GpuMode.SPT, 1: GpuMode.PPCIE, 2: GpuMode.MPT}  # NVML_CC_SYSTEM_MULTIGPU_*


class _Session(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int8), ("session", ctypes.c_void_p))


class _SwitchReport(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint32), ("data", ctypes.c_ubyte * 0x2000))


class _SwitchCertificates(ctypes.Structure):
    _fields_ = (("data", ctypes.c_ubyte * 0x1400), ("size", ctypes.c_uint32))


class NvidiaCollector:
    """Collects the kind `nvidia`."""

    kind = NVIDIA

    def __init__(
        self, *, library: str = gpus.LIBRARY, switch_library: str = SWITCH_LIBRARY, folder: str = "/dev"
    ) -> None:
        self._library, self._switch_library, self._folder = library, switch_library, folder

    def look(self) -> str:
        """Return what is missing, if anything."""
        if not gpus.have_nodes(self._folder):
            return "no GPU of NVIDIA's is in sight"
        try:
            with gpus.nvml_of(self._library) as nvml:
                mode, devtools = _mode(nvml)
                # Looked up, so that an older library is found out here.
                _ = nvml.nvmlDeviceGetConfComputeGpuAttestationReport, nvml.nvmlDeviceGetConfComputeGpuCertificate
            if mode is GpuMode.PPCIE:
                ctypes.CDLL(self._switch_library)
        except AttributeError:
            return _OLD
        except OSError:
            return "the driver's library does not answer: NVML, or NSCQ where switches connect the GPUs"
        if mode is GpuMode.OFF:
            return _OFF
        return _DEVTOOLS if devtools else ""

    def prepare(self) -> TpmKeys | None:
        """There is nothing to prepare."""

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """Return the evidence of every GPU in sight, and of every switch where they are part of it."""
        del credential
        if missing := self.look():
            raise unavailable(missing)
        try:
            with gpus.nvml_of(self._library) as nvml:
                mode, devtools = _mode(nvml)
                devices = [_gpu(nvml, device, bound.gpu_nonce) for device in gpus.devices_of(nvml)]
            switches = _switches(self._switch_library, bound.gpu_nonce) if mode is GpuMode.PPCIE else []
            return NvidiaBlob.of(devtools=devtools, mode=mode, gpus=devices, switches=switches).encode()
        except (OSError, AttributeError, FormatError, binascii.Error):
            raise unavailable("the GPUs, or switches between them, gave no evidence to their driver") from None

    def close(self) -> None:
        """There is nothing to give back."""


def _mode(nvml: ctypes.CDLL) -> tuple[GpuMode, bool]:
    state, settings = (ctypes.c_uint * 3)(), (ctypes.c_uint * 5)(_SETTINGS_VERSION)
    answer = nvml.nvmlSystemGetConfComputeState(state)  # environment, feature, developer tools
    if answer in _UNKNOWN:
        return GpuMode.OFF, False
    gpus.ask(answer)
    try:
        answer = nvml.nvmlSystemGetConfComputeSettings(settings)  # version, these three, several GPUs
    except AttributeError:
        answer = _UNKNOWN[0]
    if answer not in _UNKNOWN:
        gpus.ask(answer)
    mode = _MODES.get(settings[4], GpuMode.OFF)
    return mode if state[1] or mode is GpuMode.PPCIE else GpuMode.OFF, bool(state[2] or settings[3])


def _gpu(nvml: ctypes.CDLL, device: ctypes.c_void_p, nonce: bytes) -> tuple[bytes, list[bytes]]:
    # Each begins with three or two numbers, of which the second is the size of what is asked for.
    report, chain = ctypes.create_string_buffer(_REPORT_BYTES), ctypes.create_string_buffer(_CHAIN_BYTES)
    ctypes.memmove(ctypes.byref(report, _NONCE_AT), nonce, len(nonce))
    gpus.ask(nvml.nvmlDeviceGetConfComputeGpuAttestationReport(device, report))
    gpus.ask(nvml.nvmlDeviceGetConfComputeGpuCertificate(device, chain))
    sizes = [int.from_bytes(each.raw[4:8], "little") for each in (report, chain)]
    return report.raw[_REPORT_AT:][: sizes[0]], _chain(chain.raw[_CHAIN_AT:][: sizes[1]])


def _switches(library: str, nonce: bytes) -> list[tuple[bytes, list[bytes]]]:
    nscq = ctypes.CDLL(library)
    nscq.nscq_session_create.restype = _Session
    nscq.nscq_session_set_input.restype = nscq.nscq_session_path_observe.restype = ctypes.c_int8
    made = nscq.nscq_session_create(1)  # with the devices
    _went(made.code)
    session = ctypes.c_void_p(made.session)
    try:
        _went(nscq.nscq_session_set_input(session, 0, ctypes.create_string_buffer(nonce, len(nonce)), len(nonce)))
        reports = _observed(nscq, session, b"/{nvswitch}/config/attestation_report", _SwitchReport)
        chains = _observed(nscq, session, b"/{nvswitch}/config/certificate", _SwitchCertificates)
    finally:
        nscq.nscq_session_destroy(session)
    if reports.keys() != chains.keys():
        raise OSError("a switch without certificates")
    return [(reports[switch], _chain(chains[switch])) for switch in sorted(reports)]


def _observed(nscq: ctypes.CDLL, session: ctypes.c_void_p, path: bytes, answer: type[Any]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    codes = []

    def note(switch: int | None, code: int, value: Any, _user_data: int | None) -> None:
        codes.append(code if switch else -1)
        if switch:
            found[ctypes.string_at(switch, 16)] = _of(value)

    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int8, answer, ctypes.c_void_p)(note)
    codes.append(nscq.nscq_session_path_observe(session, path, called, None, 0))
    for code in codes:
        _went(code)
    return found


def _went(code: int) -> None:
    if code < 0:
        raise OSError(f"NSCQ answered {code}")


def _of(answer: Any) -> bytes:
    return bytes(answer.data)[: answer.size]


def _chain(pem: bytes) -> list[bytes]:
    found = [binascii.a2b_base64(one) for one in _PEM.findall(pem)]
    if len(found) != CHAIN_LENGTH:
        raise OSError("a chain of another length")
    return found
