"""NVIDIA's libraries as a machine with a driver has them: compiled here, they give what a simulated machine gives."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.runtime.roots.nvidia import NvidiaCollector
from simulators.nvidia_machine import NvidiaMachine, SimulatedDevice

_COMMON = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static uint32_t given(const char *kind, unsigned number, unsigned char *into, uint32_t size) {
    char path[4096];
    snprintf(path, sizeof path, FOLDER "/%s-%u", kind, number);
    FILE *file = fopen(path, "rb");
    uint32_t count = file ? (uint32_t)fread(into, 1, size, file) : 0;
    if (file) fclose(file);
    return count;
}
static int right_nonce(const unsigned char *nonce) {
    unsigned char right[32];
    return given("nonce", 0, right, 32) == 32 && memcmp(nonce, right, 32) == 0;
}
"""
_NVML = r"""
typedef struct { unsigned present, size, cec; unsigned char nonce[32], data[0x2000], cec_data[0x1000]; } report_t;
typedef struct { unsigned own_size, size; unsigned char own[0x1000], data[0x1400]; } certificate_t;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(uintptr_t)(index + 1); return 0; }
int nvmlSystemGetConfComputeState(unsigned *state) {
    state[0] = 2; state[1] = FEATURE; state[2] = DEVTOOLS;
    return STATE;
}
#ifdef MULTI
int nvmlSystemGetConfComputeSettings(unsigned *settings) {
    if (settings[0] != 0x1000014) return 25;
    settings[1] = 2; settings[2] = FEATURE; settings[3] = DEVTOOLS; settings[4] = MULTI;
    return 0;
}
#endif
#ifndef OLD
int nvmlDeviceGetConfComputeGpuAttestationReport(void *device, report_t *report) {
    if (!right_nonce(report->nonce)) return 2;
    report->size = given("gpu-report", (unsigned)(uintptr_t)device - 1, report->data, sizeof report->data);
    return report->size ? 0 : 999;
}
int nvmlDeviceGetConfComputeGpuCertificate(void *device, certificate_t *found) {
    found->size = given("gpu-chain", (unsigned)(uintptr_t)device - 1, found->data, sizeof found->data);
    return 0;
}
#endif
"""
_NSCQ = r"""
typedef struct { int8_t code; void *session; } result_t;
typedef struct { uint32_t size; uint8_t data[0x2000]; } report_t;
typedef struct { uint8_t data[0x1400]; uint32_t size; } certificate_t;
static unsigned char nonce[32];
static int there = 42;
result_t nscq_session_create(uint32_t flags) { result_t made = {flags == 1 ? 0 : -1, &there}; return made; }
void nscq_session_destroy(void *session) { *(int *)session = 0; }
int8_t nscq_session_set_input(void *session, uint32_t flags, void *data, uint32_t size) {
    if (*(int *)session != 42 || flags || size != 32) return -128;
    memcpy(nonce, data, 32);
    return 0;
}
int8_t nscq_session_path_observe(void *session, const char *path, void (*called)(void), void *user, uint32_t flags) {
    if (*(int *)session != 42 || flags || user) return -128;
    for (unsigned number = 0; number < SWITCHES; number++) {
        uint8_t uuid[16] = {(uint8_t)(number + 1)};
        if (!strcmp(path, "/{nvswitch}/config/attestation_report")) {
            report_t report;
            report.size = given("switch-report", number, report.data, sizeof report.data);
            ((void (*)(uint8_t *, int8_t, report_t, void *))called)(uuid, right_nonce(nonce) ? 0 : -7, report, user);
        } else if (!strcmp(path, "/{nvswitch}/config/certificate")) {
            certificate_t certificate;
            certificate.size = given("switch-chain", number, certificate.data, sizeof certificate.data);
            ((void (*)(uint8_t *, int8_t, certificate_t, void *))called)(uuid, 0, certificate, user);
        } else {
            return -3;
        }
    }
    return 0;
}
"""


@dataclass(kw_only=True)
class DriverLibraries:
    """NVML and NSCQ of a machine.

    Args:
        nonce: what they have a report for.
        words: of NVML: what it answers of the driver's mode.
    """

    machine: NvidiaMachine
    folder: Path
    nonce: bytes
    words: dict[str, int] = field(default_factory=dict)
    has_switch_library: bool = True

    def collector(self) -> NvidiaCollector:
        """Compile them, and return what collects by them."""
        compiler = shutil.which("gcc")
        if compiler is None:
            pytest.skip("this machine has no gcc")
        (self.folder / "nonce-0").write_bytes(self.nonce)
        for kind, devices in (("gpu", self.machine.gpus), ("switch", self.machine.switches)):
            for number, device in enumerate(devices):
                (self.folder / f"{kind}-report-{number}").write_bytes(self.machine.report(device, self.nonce)[0])
                (self.folder / f"{kind}-chain-{number}").write_bytes(self._pem(device))
        words = {"STATE": 0, "FEATURE": 1, "DEVTOOLS": 0, "MULTI": 1 if self.machine.switches else 0, **self.words}
        words |= {"GPUS": len(self.machine.gpus), "SWITCHES": len(self.machine.switches)}
        flags = [f'-DFOLDER="{self.folder}"', *(f"-D{name}={value}" for name, value in words.items() if value >= 0)]
        for name, source in (("nvml", _NVML), ("nscq", _NSCQ)):
            (self.folder / f"{name}.c").write_text(_COMMON + source)
            command = [compiler, "-shared", "-fPIC", "-w", *flags, "-o", f"{name}.so", f"{name}.c"]
            subprocess.run(command, cwd=self.folder, check=True)
        (self.folder / "nvidia0").touch()
        switches = self.folder / ("nscq.so" if self.has_switch_library else "none.so")
        return NvidiaCollector(
            library=str(self.folder / "nvml.so"), switch_library=str(switches), folder=str(self.folder)
        )

    def _pem(self, device: SimulatedDevice) -> bytes:
        return b"".join(x509.load_der_x509_certificate(each).public_bytes(Encoding.PEM) for each in device.ders)
