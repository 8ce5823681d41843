"""A real software TPM (swtpm): an authority of its own certified its endorsement key, and it booted a public log."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from glasshouse.attestation.roots.tpm.boot_log import BootLog
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS, TpmPolicy
from glasshouse.runtime.roots.tpm import TpmCollector
from glasshouse.runtime.roots.tpm_device import PASSWORD, TpmDevice, sized
from tools.waiting import wait_for

__all__ = ["BOOT_LOG", "IMAGE", "SoftwareTpm", "TestersTpm", "needs_swtpm", "software_tpm"]

needs_swtpm = pytest.mark.skipif(
    shutil.which("swtpm") is None or shutil.which("swtpm_setup") is None, reason="swtpm and swtpm-tools are missing"
)
BOOT_LOG = Path(__file__).resolve().parents[1] / "vectors" / "hardware" / "tpm" / "cos-85-amd-sev.bin"
IMAGE = (0, 2, 4, 7, 8, 9)  # what a machine with GRUB boots by
_EXTEND, _NV_DEFINE, _NV_WRITE, _PLATFORM = 0x182, 0x12A, 0x137, 0x4000000C


class TestersTpm(TpmDevice):
    """A TPM with the commands of its firmware, and any other."""

    __test__ = False

    def command(self, code: int, handles: tuple[int, ...], parameters: bytes = b"", *sessions: bytes) -> bytes:
        """Send a command; return what follows the answer's header."""
        return self._command(code, handles, parameters, sessions)

    def extend(self, register: int, digest: bytes) -> None:
        """Extend a register of the bank sha256."""
        self._command(_EXTEND, (register,), b"\0\0\0\1\0\x0b" + digest, (PASSWORD,))

    def write_nv(self, index: int, data: bytes) -> None:
        """Define an index of the non-volatile memory as a maker of TPMs does, and write it."""
        # Written by the platform; read by the platform, the owner or all; not locked out; made by the platform.
        attributes = 1 << 0 | 1 << 16 | 1 << 17 | 1 << 18 | 1 << 25 | 1 << 30
        public = struct.pack(">IHIHH", index, 0x0B, attributes, 0, len(data))
        self._command(_NV_DEFINE, (_PLATFORM,), sized(b"") + sized(public), (PASSWORD,))
        for at in range(0, len(data), 512):
            piece = sized(data[at : at + 512]) + at.to_bytes(2, "big")
            self._command(_NV_WRITE, (_PLATFORM, index), piece, (PASSWORD,))


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftwareTpm:
    """A TPM of a machine that booted."""

    path: str  # of its socket, for one client at a time
    log: str  # path of the firmware's log
    root: bytes  # certificate, DER, of the authority that certified its endorsement key; empty where none did

    def collector(self) -> TpmCollector:
        """Return what collects its evidence."""
        return TpmCollector(self.path, self.log)

    def policy(self, registers: tuple[int, ...] = IMAGE) -> TpmPolicy:
        """Return a policy that takes this TPM's authority, and the values that these registers have now."""
        tpm = TpmDevice(self.path)
        try:
            values = dict(zip(QUOTED_PCRS, tpm.read_registers(QUOTED_PCRS), strict=True))
        finally:
            tpm.close()
        return TpmPolicy(
            chain="image", ek_roots=(self.root,), pcrs={str(register): (values[register],) for register in registers}
        )


@contextmanager
def software_tpm(
    *, log: Path = BOOT_LOG, authority: Path | None = None, is_certified: bool = True
) -> Iterator[SoftwareTpm]:
    """Run a TPM of its own as long as the block lasts.

    Args:
        log: the firmware's, whose events its registers have.
        authority: folder of a certificate authority for endorsement keys, which is made there if it is empty.
    """
    with tempfile.TemporaryDirectory(prefix="tpm-") as name:  # the path of a socket is short
        folder = Path(name)
        authority = authority or folder / "authority"
        (folder / "state").mkdir()
        root = _certified(folder, authority) if is_certified else b""
        path = str(folder / "tpm")
        command = ["swtpm", "socket", "--tpm2", "--tpmstate", f"dir={folder}/state", "--flags"]
        command += ["not-need-init,startup-clear", "--server", f"type=unixio,path={path}"]
        command += ["--ctrl", f"type=unixio,path={path}.ctrl"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                wait_for(Path(path).exists, told=lambda: f"swtpm: {process.poll()}")
                tpm = TestersTpm(path)
                for register, digest in BootLog.read(log.read_bytes()).events:
                    tpm.extend(register, digest)
                tpm.close()
                yield SoftwareTpm(path=path, log=str(log), root=root)
            finally:
                process.terminate()


def _certified(folder: Path, authority: Path) -> bytes:
    """Manufacture a TPM whose endorsement key has a certificate; return the authority's."""
    authority.mkdir(exist_ok=True)
    signer, issuer, serial = (authority / name for name in ("signer.pem", "issuer.pem", "serial"))
    (folder / "authority.conf").write_text(
        f"statedir = {authority}\nsigningkey = {signer}\nissuercert = {issuer}\ncertserial = {serial}\n"
    )
    (folder / "options").write_text("--platform-manufacturer Tests\n--platform-version 1\n--platform-model Tests\n")
    (folder / "setup.conf").write_text(
        "create_certs_tool = swtpm_localca\n"
        f"create_certs_tool_config = {folder}/authority.conf\ncreate_certs_tool_options = {folder}/options\n"
    )
    command = ["swtpm_setup", "--tpm2", "--tpmstate", folder / "state", "--config", folder / "setup.conf"]
    done = subprocess.run(
        [*command, "--create-ek-cert", "--pcr-banks", "sha256"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return x509.load_pem_x509_certificate(issuer.read_bytes()).public_bytes(Encoding.DER)
