"""Collect the evidence of a confidential VM of Azure: the report that its paravisor keeps in the vTPM, and a quote.

Source: spec/hardware-evidence.md, section 7.4; Azure, Confidential VM guest attestation design (report format).
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import struct

from glasshouse.attestation.roots.azure.azure_blob import MAX_RUNTIME_BYTES, AzureBlob
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.sev_snp.sev_snp_blob import MAX_CERTIFICATE_BYTES, REPORT_BYTES
from glasshouse.runtime.roots.collectors import unavailable
from glasshouse.runtime.roots.tpm import quote_registers
from glasshouse.runtime.roots.tpm_device import TpmDevice

_REPORT_INDEX, _KEY = 0x01400001, 0x81000003
_HEADER_BYTES, _SEV_SNP, _TDX, _SHA256 = 32, 2, 4, 1
_CERTIFICATES = "/metadata/THIM/amd/certification"
_ANSWER_BYTES = 64 * 1024


class AzureCollector:
    """The collecting half of the kind `azure`.

    Args:
        path: of the vTPM's device.
        metadata: host of Azure's instance metadata, which has the certificate of the chip's key.
    """

    kind = "azure"

    def __init__(self, path: str = "/dev/tpmrm0", metadata: str = "169.254.169.254") -> None:
        self._path, self._metadata = path, metadata
        self._tpm: TpmDevice | None = None
        self._parts = b"", b"", b""  # report, runtime data, certificate

    def look(self) -> str:
        """See `Collector`."""
        if not os.access(self._path, os.R_OK | os.W_OK):
            return f"there is no vTPM that this user may use: {self._path}"
        tpm = TpmDevice(self._path)
        try:
            return "" if tpm.nv_read(_REPORT_INDEX) else "this is no confidential VM of Azure: its vTPM has no report"
        finally:
            tpm.close()

    def prepare(self) -> None:
        """See `Collector`."""
        self.close()
        self._tpm = TpmDevice(self._path)
        self._parts = *split_report(self._tpm.nv_read(_REPORT_INDEX)), self._certificate()

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """See `Collector`."""
        del credential  # no activation is wanted: the report names the key
        if self._tpm is None:
            raise unavailable("the vTPM is not open")
        report, runtime, certificate = self._parts
        pcrs, quote, signature = quote_registers(self._tpm, _KEY, bound.composite)
        return AzureBlob(
            certificate=certificate, pcrs=pcrs, quote=quote, report=report, runtime=runtime, signature=signature
        ).encode()

    def close(self) -> None:
        """See `Collector`."""
        if self._tpm is not None:
            self._tpm.close()
            self._tpm = None

    def _certificate(self) -> bytes:
        """Return the certificate of the chip's key, DER, from the host's metadata service."""
        service = http.client.HTTPConnection(self._metadata, timeout=10)
        try:
            service.request("GET", _CERTIFICATES, headers={"Metadata": "true"})
            answer = service.getresponse().read(_ANSWER_BYTES)
            found = ssl.PEM_cert_to_DER_cert(json.loads(answer)["vcekCert"].strip())
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise unavailable("Azure's metadata service gave no certificate of the chip's key") from None
        finally:
            service.close()
        if len(found) > MAX_CERTIFICATE_BYTES:
            raise unavailable("Azure's metadata service gave a certificate that is too large")
        return found


def split_report(data: bytes) -> tuple[bytes, bytes]:
    """Return the processor's report and the runtime data that it is about, of what the vTPM keeps.

    Raises:
        PlatformError: `hardware-unavailable`.
    """
    at = _HEADER_BYTES + REPORT_BYTES
    head, report, rest = data[:_HEADER_BYTES], data[_HEADER_BYTES:at], data[at : at + 20]
    if head[:4] != b"HCLA" or len(rest) < 20:
        raise unavailable("this is no confidential VM of Azure: its vTPM has no report")
    _, _, kind, digest, length = struct.unpack("<5I", rest)
    if kind == _TDX:
        raise unavailable("this version does not collect evidence of Azure's confidential VMs on Intel TDX")
    runtime = data[at + 20 : at + 20 + length]
    if (kind, digest) != (_SEV_SNP, _SHA256) or not 0 < len(runtime) == length <= MAX_RUNTIME_BYTES:
        raise unavailable("the report in the vTPM is of a form that this version does not read")
    return report, runtime
