"""The agent's side of its custodian: starts it, takes its public key, has one release opened, and sees it gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import BinaryIO

from glasshouse import custodian
from glasshouse.custodian.exchange import ANSWER, MAX_PACKET_BYTES, PID_BYTES, Failed, Opened, Request
from glasshouse.custodian.residue_patterns import region_bytes
from glasshouse.errors import Code, FormatError, GlasshouseError, InternalError, PackageError, PeerError, PlatformError
from glasshouse.package.grant import RESUME_PART_BYTES
from glasshouse.package.manifest import Manifest
from glasshouse.runtime.kernel import PR_SET_CHILD_SUBREAPER, REAL, end_child
from glasshouse.runtime.keys.secret_memory import SecretMemory, plain_memory
from glasshouse.runtime.loop import Loop
from glasshouse.runtime.spawn import library_path, spawn
from glasshouse.wire.canonical import decode
from glasshouse.wire.crypto import HPKE_PUBLIC_BYTES

PROGRAM = os.path.join(os.path.dirname(custodian.__file__), "__main__.py")  # noqa: PTH118, PTH120 - slow to import
PATIENCE_S = 120.0
REAP_PATIENCE_S = 2.0

# What it imports beside the standard library and Glasshouse; blake3 is for whole assets.
_PACKAGES = ("_cffi_backend", "cryptography")
# Sent to the whole group by a terminal; the agent decides when this process ends.
_BLOCKED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
# An entry of the index takes at least this many bytes, and grows by at most as many in the grant.
_ENTRY_BYTES = 92
# The package key, the group secret, two HPKE private keys.
_KEY_PATTERNS = 1 + 1 + 2 * 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """The secret memory of a run, which the custodian fills: patterns for the probes, and the grant for the worker.

    The grant is the asset keys, the group secret of a job with ranks, and the keys of the checkpoint that a leg goes on
    from. What the custodian reads of that one is in `checkpoint`, a file in memory; it is no secret.
    """

    grant: SecretMemory
    patterns: SecretMemory
    checkpoint: BinaryIO

    @classmethod
    def for_package(cls, manifest: Manifest, *, ranks: int = 1) -> Regions:
        """Return regions that are large enough whatever the sealed index holds; raises `PlatformError`."""
        entries = manifest.index_bytes // _ENTRY_BYTES + 1
        patterns = SecretMemory(region_bytes(4 * entries + _KEY_PATTERNS + ranks))
        try:
            size = 4096 + 2 * manifest.index_bytes + entries * 40 + ranks * RESUME_PART_BYTES
            return cls(
                grant=SecretMemory(size), patterns=patterns, checkpoint=os.fdopen(plain_memory(), "wb", buffering=0)
            )
        except GlasshouseError:
            patterns.close()
            raise

    def wipe(self) -> None:
        """Zero both; they stay mapped, so that this can be looked at."""
        self.grant.wipe()
        self.patterns.wipe()

    def close(self) -> None:
        """Wipe both and give all back."""
        self.grant.close()
        self.patterns.close()
        self.checkpoint.close()


class Custodian:
    """The agent's handle on its custodian; `pid` is the process that holds the keys, 0 before and after."""

    def __init__(self, executed: int, connection: socket.socket, regions: Regions, loop: Loop) -> None:
        self.pid = 0
        self._regions: Regions | None = regions  # until the custodian has them
        self._executed = executed  # ends when it has forked
        self._socket = connection
        self._loop = loop
        self._packets: list[bytes] = []
        self._ended = False
        loop.watch(connection.fileno(), self._receive)

    @classmethod
    def start(
        cls, loop: Loop, package: int, regions: Regions, *, pycache_prefix: str, program: str = PROGRAM
    ) -> Custodian:
        """Execute the custodian, before this process has any thread; raises `PlatformError`: `platform-unsupported`.

        Args:
            package: descriptor of the package, opened once, by the agent.
            pycache_prefix: an empty private directory for its interpreter.
            program: the file that it executes.
        """
        options = ("-I", "-S", "-B", "-X", f"pycache_prefix={pycache_prefix}")
        specs = ((name, find_spec(name)) for name in _PACKAGES)
        named = (f"{name}={spec.origin}" for name, spec in specs if spec is not None)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            REAL.prctl(PR_SET_CHILD_SUBREAPER, 1)  # the fork of what is executed becomes this process's child
            executed = spawn(
                [sys.executable, *options, program, str(os.getpid()), *named],
                {"LANG": "C.UTF-8", **library_path()},
                [nothing, nothing, nothing, theirs.fileno(), package],
                blocked=_BLOCKED,
            )
        except OSError as error:
            ours.close()
            raise PlatformError(Code.PLATFORM, f"the custodian cannot be started: {error.strerror}") from error
        finally:
            theirs.close()
            os.close(nothing)
        return cls(executed, ours, regions, loop)

    def public(self) -> bytes:
        """Return the public HPKE key; raises `InternalError`: the custodian did not make one."""
        public = self._answer()
        if len(public) != HPKE_PUBLIC_BYTES:
            raise InternalError(Code.INTERNAL, "the custodian sent no public key")
        return public

    def open(self, request: Request) -> Opened:
        """Have the release opened, and wait until the custodian is gone.

        Raises:
            PeerError: `release-invalid`: what was released does not open, or is not this package's key.
            PackageError: the package is not what its owner sealed, or the checkpoint not what was counted.
            InternalError: the custodian died.
        """
        try:
            self._socket.sendall(request.encode())
        except OSError:
            raise _gone() from None
        packet = self._answer()
        if not self._loop.run_until(lambda: self._ended, within_s=PATIENCE_S):
            raise _gone()
        self.dismiss()
        try:
            answer = ANSWER.read(decode(packet, max_bytes=MAX_PACKET_BYTES), "custodian")
        except FormatError:
            raise InternalError(Code.INTERNAL, "the custodian sent no answer") from None
        if isinstance(answer, Failed):
            raise _explained(answer.code)
        opened: Opened = answer
        return opened

    def dismiss(self) -> None:
        """End what lives of it, wait until its memory is gone, and reap it; doing this twice is allowed.

        A process that is traced can be ended and not be reaped: it has no memory then, and is left.
        """
        if self._socket.fileno() < 0:
            return
        self._loop.unwatch(self._socket.fileno())
        self._regions = None
        self._socket.settimeout(REAP_PATIENCE_S)
        end_child(self._executed, REAP_PATIENCE_S)
        if self.pid:
            end_child(self.pid, REAP_PATIENCE_S)
        while not self._ended:  # a child that had not sent its number sends it now
            self._receive()
            if self.pid:
                end_child(self.pid, REAP_PATIENCE_S)
        self._socket.close()
        self.pid = 0

    def _answer(self) -> bytes:
        self._loop.run_until(lambda: bool(self._packets) or self._ended, within_s=PATIENCE_S)
        if not self._packets:
            raise _gone()
        return self._packets.pop(0)

    def _receive(self) -> None:
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except OSError:
            packet = b""
        if not packet:
            self._loop.unwatch(self._socket.fileno())
            self._ended = True
        elif not self.pid and len(packet) == PID_BYTES:
            self.pid = int.from_bytes(packet, "big")
            self._send_regions()
        else:
            self._packets.append(packet)

    def _send_regions(self) -> None:
        """Give the closed process what no process may have that others can still open (ADR 0036)."""
        regions, self._regions = self._regions, None
        if regions is not None:
            with contextlib.suppress(OSError):  # its end is noticed by the end of file
                socket.send_fds(
                    self._socket, [b"\0"], [regions.grant.fd, regions.patterns.fd, regions.checkpoint.fileno()]
                )


def _gone() -> InternalError:
    return InternalError(Code.INTERNAL, "the custodian ended before its time")


def _explained(code: Code) -> GlasshouseError:
    if code in (Code.SIGNATURE, Code.KEY_COMMITMENT):
        # The seal or the key inside it is wrong: the broker's doing, not the package's.
        return PeerError(Code.RELEASE_INVALID, "what the broker released is not the key of this package")
    if code in (Code.CHECKPOINT_TAMPERED, Code.CHECKPOINT_FOREIGN):
        return PackageError(code, "the checkpoint does not open as the one that was released")
    if code is Code.INTERNAL:
        return InternalError(code, "the custodian failed")
    return PackageError(code, "the package does not open as its owner sealed it")
