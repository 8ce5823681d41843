"""The vTPM of a confidential VM of Azure, played by a software TPM: its key, and the report that is kept in it."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from ssl import DER_cert_to_PEM_cert

from glasshouse.runtime.roots.tpm_device import PASSWORD, sized, split
from glasshouse.wire.canonical import b64encode
from glasshouse.wire.crypto import sha256
from simulators.snp_machine import SnpMachine
from tools.software_tpm import TestersTpm

OWNER = 0x40000001
REPORT, KEY = 0x01400001, 0x81000003
_CREATE_PRIMARY, _EVICT, _NV_DEFINE, _NV_WRITE = 0x131, 0x120, 0x12A, 0x137
_NV_BYTES, _NV_STEP = 2048, 512  # all that a software TPM takes; a machine of Azure's has 2600
# fixedTPM, fixedParent, sensitiveDataOrigin, userWithAuth, noDA, restricted, sign; RSASSA with SHA-256.
_AK = struct.pack(">HHI5HI", 1, 0x0B, 0x50472, 0, 0x10, 0x14, 0x0B, 2048, 0) + sized(b"")
_BY_OWNER_OR_ALL = 1 << 1 | 1 << 17 | 1 << 18 | 1 << 2  # owner and key may write and read


def runtime_data(modulus: bytes, **changed: object) -> bytes:
    """Return what a paravisor says about the vTPM, as JSON of its own."""
    key = {"kid": "HCLAkPub", "key_ops": ["sign"], "kty": "RSA", "e": "AQAB", "n": b64encode(modulus), **changed}
    other = {"kid": "HCLEkPub", "key_ops": ["encrypt"], "kty": "RSA", "e": "AQAB", "n": b64encode(b"\xee" * 32)}
    configuration = {"console-enabled": True, "secure-boot": True, "tpm-enabled": True, "vmUniqueId": "TESTS"}
    value = {"keys": [key, other], "vm-configuration": configuration}
    return json.dumps(value, separators=(",", ":")).encode()


def kept_report(report: bytes, runtime: bytes, *, kind: int = 2) -> bytes:
    """Return what the vTPM keeps: the report in its envelope, padded."""
    header = struct.pack("<4sIIII12x", b"HCLA", 2, 32 + len(report) + 20 + len(runtime), 2, 0)
    rest = struct.pack("<5I", 20 + len(runtime), 1, kind, 1, len(runtime))
    return (header + report + rest + runtime).ljust(_NV_BYTES, b"\0")


def become_azure(path: str, machine: SnpMachine, *, kind: int = 2) -> None:
    """Give a TPM what that of such a machine has.

    Args:
        path: of its socket.
    """
    tpm = TestersTpm(path)
    try:
        parameters = sized(bytes(4)) + sized(_AK) + bytes(2 + 4)
        answer = tpm.command(_CREATE_PRIMARY, (OWNER,), parameters, PASSWORD)
        handle, public = int.from_bytes(answer[:4], "big"), split(answer[8:], 1)[0]
        tpm.command(_EVICT, (OWNER, handle), struct.pack(">I", KEY), PASSWORD)
        tpm.command(0x165, (), struct.pack(">I", handle))
        runtime = runtime_data(public[-256:])
        data = kept_report(machine.report(sha256(runtime) + bytes(32)), runtime, kind=kind)
        index = struct.pack(">IHIHH", REPORT, 0x0B, _BY_OWNER_OR_ALL, 0, len(data))
        tpm.command(_NV_DEFINE, (OWNER,), sized(b"") + sized(index), PASSWORD)
        for at in range(0, len(data), _NV_STEP):
            part = sized(data[at : at + _NV_STEP]) + struct.pack(">H", at)
            tpm.command(_NV_WRITE, (OWNER, REPORT), part, PASSWORD)
    finally:
        tpm.close()


@contextmanager
def metadata_service(machine: SnpMachine) -> Iterator[str]:
    """Answer as Azure's instance metadata as long as the block lasts; gives its host and port."""
    answer = json.dumps({"vcekCert": DER_cert_to_PEM_cert(machine.certificate), "certificateChain": ""}).encode()

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_asked = self.path == "/metadata/THIM/amd/certification" and self.headers["Metadata"] == "true"
            self.send_response(200 if is_asked else 400)
            self.end_headers()
            self.wfile.write(answer if is_asked else b"")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Service) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()
