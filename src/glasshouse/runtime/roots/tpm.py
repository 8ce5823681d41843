"""Collect a TPM's evidence: an attestation key of its own, a credential that it opens, a quote over what booted.

Source: spec/hardware-evidence.md, sections 3.1 and 7.1; TCG EK Credential Profile, 2.2 and annex B.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from glasshouse.attestation.roots.binding import Bound, activation_mac
from glasshouse.attestation.roots.tpm.tpm_blob import MAX_LOG_BYTES, TpmBlob
from glasshouse.attestation.roots.tpm.tpm_policy import QUOTED_PCRS
from glasshouse.handshake.messages import MAX_EK_BYTES, TpmKeys
from glasshouse.runtime.roots.collectors import unavailable
from glasshouse.runtime.roots.tpm_device import TpmDevice, sized
from glasshouse.wire.crypto import sha256

# fixedTPM, fixedParent, sensitiveDataOrigin, userWithAuth, noDA, restricted, sign: it signs what the TPM attests only.
# ECDSA with SHA-256 over P-256.
_AK = struct.pack(">HHI8H", 0x23, 0x0B, 0x50472, 0, 0x10, 0x18, 0x0B, 0x03, 0x10, 0, 0)
# Endorsement keys by the profile's templates L-1 and L-2, and the indices of their certificates.
_POLICY = sized(bytes.fromhex("837197674484b3f81a90cc8d46a5d724fd52d76e06520b64f2a1da1b331469aa"))
_EK = 0x0B, 0x300B2
_RSA = struct.pack(">HHI", 0x01, *_EK) + _POLICY + struct.pack(">5HI", 6, 128, 0x43, 0x10, 2048, 0)
_ECC = struct.pack(">HHI", 0x23, *_EK) + _POLICY + struct.pack(">6H", 6, 128, 0x43, 0x10, 0x03, 0x10)
_TEMPLATES = {0x01C00002: (_RSA, sized(bytes(256))), 0x01C0000A: (_ECC, sized(bytes(32)) * 2)}
_PERSISTENT = 0x81010001  # where the first of them usually lies
_ISSUERS = 0x01C00100  # certificates of authorities between it and a root, in this index and those behind
_TRIES = 5


class TpmCollector:
    """The collecting half of the kind `tpm`.

    Args:
        path: of the device, or of a software TPM's socket.
        log: the firmware's event log; evidence goes without where it is not there or too large.
    """

    kind = "tpm"

    def __init__(
        self, path: str = "/dev/tpmrm0", log: str = "/sys/kernel/security/tpm0/binary_bios_measurements"
    ) -> None:
        self._path, self._log_path = path, log
        self._tpm: TpmDevice | None = None
        self._keys = TpmKeys(ak=b"", ek=b"")
        self._ak = 0
        self._index = 0  # of the endorsement key's certificate
        self._log = b""

    def look(self) -> str:
        """See `Collector`."""
        if not Path(self._path).exists():
            return f"there is no TPM: no {self._path}"
        if not os.access(self._path, os.R_OK | os.W_OK):
            return f"this user may not use the TPM at {self._path}: root or the group tss may"
        return ""

    def prepare(self) -> TpmKeys:
        """See `Collector`."""
        self.close()
        self._tpm = tpm = TpmDevice(self._path)
        self._ak, public = tpm.create_primary(_AK)
        for index in _TEMPLATES:
            if ek := certificates(tpm.nv_read(index)):
                self._index = index
                break
        at = _ISSUERS
        while ek and (issuer := certificates(tpm.nv_read(at))) and len(ek) + len(issuer) <= MAX_EK_BYTES:
            ek, at = ek + issuer, at + 1
        self._keys = TpmKeys(ak=public, ek=ek[:MAX_EK_BYTES])
        self._log = read_log(self._log_path)
        return self._keys

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """See `Collector`."""
        tpm = self._tpm
        if tpm is None:
            raise unavailable("the TPM is not open")
        activation = None
        if credential is not None:
            secret = tpm.activate(self._ak, self._endorsement_key(tpm), credential)
            activation = activation_mac(secret, bound.composite)
        values, quote, signature = quote_registers(tpm, self._ak, bound.composite)
        return TpmBlob(
            activation=activation,
            ak=self._keys.ak,
            ek=self._keys.ek,
            log=self._log,
            pcrs=values,
            quote=quote,
            signature=signature,
        ).encode()

    def close(self) -> None:
        """See `Collector`."""
        if self._tpm is not None:
            self._tpm.close()
            self._tpm = None

    def _endorsement_key(self, tpm: TpmDevice) -> int:
        """Return the handle of the key whose certificate was read."""
        if not self._index:
            raise unavailable("the TPM has no certificate of an endorsement key")
        template, unique = _TEMPLATES[self._index]
        if tpm.read_public(_PERSISTENT).startswith(template):
            return _PERSISTENT
        return tpm.create_primary(template + unique)[0]


def quote_registers(tpm: TpmDevice, ak: int, extra_data: bytes) -> tuple[tuple[bytes, ...], bytes, bytes]:
    """Return the registers' values, the quote over them, and its signature."""
    for _ in range(_TRIES):  # what is extended between two commands is in one of them only
        values = tpm.read_registers(QUOTED_PCRS)
        quote, signature = tpm.quote(ak, extra_data, QUOTED_PCRS)
        if quote.endswith(sha256(b"".join(values))):
            return tuple(values), quote, signature
    raise unavailable("the TPM's registers change all the time")


def certificates(data: bytes) -> bytes:
    """Return the certificates, DER, that data begins with: what an index of a TPM has behind them is padding."""
    at = 0
    while data[at : at + 2] == b"\x30\x82":
        end = at + 4 + int.from_bytes(data[at + 2 : at + 4], "big")
        if end > len(data):
            break
        at = end
    return data[:at]


def read_log(path: str) -> bytes:
    """Return the firmware's event log, empty where there is none that fits."""
    try:
        with Path(path).open("rb") as file:
            log = file.read(MAX_LOG_BYTES + 1)
    except OSError:
        return b""
    return log if len(log) <= MAX_LOG_BYTES else b""
