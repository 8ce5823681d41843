"""Commands to a TPM 2.0, over its device or the socket of a software TPM.

Law: what is loaded is flushed at `close`, for without a resource manager a TPM has room for three objects.
Source: TCG TPM 2.0 Library, Part 3.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from glasshouse.errors import PlatformError
from glasshouse.runtime.roots.collectors import unavailable, why_of

ENDORSEMENT = 0x4000000B
PASSWORD = struct.pack(">IHBH", 0x40000009, 0, 1, 0)  # an empty one
_CREATE_PRIMARY, _FLUSH, _NV_READ, _NV_READ_PUBLIC, _READ_PUBLIC = 0x131, 0x165, 0x14E, 0x169, 0x173
_START_SESSION, _POLICY_SECRET, _ACTIVATE, _PCR_READ, _QUOTE = 0x176, 0x151, 0x147, 0x17E, 0x158
_NULL, _OWNER, _SHA256, _ALG_NULL = 0x40000007, 0x40000001, 0x000B, 0x0010
_AGAIN = (0x922, 0x908, 0x90A)  # retry, yielded, testing
_NO_INDEX, _NV_STEP = 0x18B, 512
_TIMEOUT_S = 120.0


def sized(data: bytes) -> bytes:
    """Return a TPM2B."""
    return len(data).to_bytes(2, "big") + data


def split(data: bytes, count: int) -> list[bytes]:
    """Return the contents of so many TPM2B that data begins with."""
    found = []
    for _ in range(count):
        length = int.from_bytes(data[:2], "big")
        found.append(data[2 : 2 + length])
        data = data[2 + length :]
    return found


class TpmDevice:
    """An open TPM; raises `PlatformError` where it does not answer or refuses a command.

    Args:
        path: of the character device, or of a socket that takes its bytes.
    """

    def __init__(self, path: str) -> None:
        self._loaded: list[int] = []
        self._socket: socket.socket | None = None
        self._file = -1
        try:
            if stat.S_ISSOCK(Path(path).stat().st_mode):
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.settimeout(_TIMEOUT_S)
                self._socket.connect(path)
            else:
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self._end()
            raise unavailable(f"the TPM cannot be opened: {why_of(error)}") from None

    def create_primary(self, template: bytes) -> tuple[int, bytes]:
        """Make the endorsement hierarchy's one key of a template; return its handle and TPMT_PUBLIC."""
        parameters = sized(bytes(4)) + sized(template) + bytes(2 + 4)
        answer = self._command(_CREATE_PRIMARY, (ENDORSEMENT,), parameters, (PASSWORD,))
        handle = self._keep(answer)
        return handle, split(answer[8:], 1)[0]

    def read_public(self, handle: int, command: int = _READ_PUBLIC) -> bytes:
        """Return a loaded key's TPMT_PUBLIC, empty where there is none."""
        try:
            return split(self._command(command, (handle,)), 1)[0]
        except _RefusedError as error:
            if error.reason == _NO_INDEX:
                return b""
            raise

    def nv_read(self, index: int) -> bytes:
        """Return what an index of the non-volatile memory has, empty where there is none."""
        public = self.read_public(index, _NV_READ_PUBLIC)
        length, data = int.from_bytes(public[-2:], "big"), b""
        # An index is read by its own authorization where it allows that, else by its owner's.
        by = index if int.from_bytes(public[6:10], "big") & 1 << 18 else _OWNER
        while len(data) < length:
            step = struct.pack(">HH", min(_NV_STEP, length - len(data)), len(data))
            if not (piece := split(self._command(_NV_READ, (by, index), step, (PASSWORD,))[4:], 1)[0]):
                raise unavailable("the TPM gives less of an index than it has")
            data += piece
        return data

    def activate(self, ak: int, ek: int, credential: bytes) -> bytes:
        """Open a credential for two loaded keys, the second of which has the usual policy of an endorsement key."""
        start = sized(bytes(16)) + sized(b"") + struct.pack(">BHH", 1, _ALG_NULL, _SHA256)
        session = self._keep(self._command(_START_SESSION, (_NULL, _NULL), start))
        self._command(_POLICY_SECRET, (ENDORSEMENT, session), bytes(2 + 2 + 2 + 4), (PASSWORD,))
        by_policy = struct.pack(">IHBH", session, 0, 1, 0)
        answer = self._command(_ACTIVATE, (ak, ek), credential, (PASSWORD, by_policy))
        self._flush(session)
        return split(answer[4:], 1)[0]

    def quote(self, ak: int, extra_data: bytes, registers: Sequence[int]) -> tuple[bytes, bytes]:
        """Return TPMS_ATTEST and TPMT_SIGNATURE over registers of the bank sha256, by the key's own scheme."""
        parameters = sized(extra_data) + _ALG_NULL.to_bytes(2, "big") + _selection(registers)
        answer = self._command(_QUOTE, (ak,), parameters, (PASSWORD,))
        length = int.from_bytes(answer[:4], "big")
        (quoted,) = split(answer[4:], 1)
        return quoted, answer[4 + 2 + len(quoted) : 4 + length]

    def read_registers(self, registers: Sequence[int]) -> list[bytes]:
        """Return the values of registers of the bank sha256, 32 bytes each."""
        values: list[bytes] = []
        while len(values) < len(registers):  # a TPM gives eight at a time, or fewer
            answer = self._command(_PCR_READ, (), _selection(registers[len(values) : len(values) + 8]))
            count = int.from_bytes(answer[14:18], "big")
            if not 1 <= count <= 8:
                raise unavailable("the TPM has no bank sha256")
            values += split(answer[18:], count)
        return values

    def close(self) -> None:
        """Flush what was loaded and close the device."""
        for handle in tuple(self._loaded):
            try:
                self._flush(handle)
            except PlatformError:
                continue
        self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _keep(self, answer: bytes) -> int:
        handle = int.from_bytes(answer[:4], "big")
        self._loaded.append(handle)
        return handle

    def _flush(self, handle: int) -> None:
        self._loaded.remove(handle)
        self._command(_FLUSH, (), handle.to_bytes(4, "big"))

    def _command(
        self, code: int, handles: Sequence[int], parameters: bytes = b"", sessions: Sequence[bytes] = ()
    ) -> bytes:
        """Send a command; return what follows the answer's header."""
        body = b"".join(handle.to_bytes(4, "big") for handle in handles)
        if sessions:
            body += len(b"".join(sessions)).to_bytes(4, "big") + b"".join(sessions)
        body += parameters
        message = struct.pack(">HII", 0x8002 if sessions else 0x8001, 10 + len(body), code) + body
        for _ in range(20):
            answer = self._exchange(message)
            reason = int.from_bytes(answer[6:10], "big")
            if reason not in _AGAIN:
                break
            time.sleep(0.1)
        if len(answer) < 10:
            raise unavailable("the TPM gave no whole answer")
        if reason:
            raise _RefusedError(code, reason)
        return answer[10:]

    def _exchange(self, message: bytes) -> bytes:
        try:
            if self._socket is None:
                os.write(self._file, message)
                return os.read(self._file, 4096)
            self._socket.sendall(message)
            answer = self._socket.recv(4096)
            while answer and len(answer) < max(10, int.from_bytes(answer[2:6], "big")):
                more = self._socket.recv(4096)
                answer = answer + more if more else b""
            return answer
        except OSError as error:
            why = "in time" if error.errno is None else f"({why_of(error)})"
            raise unavailable(f"the TPM does not answer {why}") from None


class _RefusedError(PlatformError):
    """A command that the TPM refused."""

    def __init__(self, command: int, reason: int) -> None:
        sentence = f"the TPM refused the command {command:#x} with {reason:#x}"
        super().__init__(unavailable(sentence).code, sentence, hint=sentence)
        self.reason = reason


def _selection(registers: Sequence[int]) -> bytes:
    bits = sum(1 << register for register in registers)
    return struct.pack(">IHB", 1, _SHA256, 3) + bits.to_bytes(3, "little")
