"""The one process that ever holds the private HPKE key and the package key, and then is gone.

Forked by the agent before it has a thread, it makes the HPKE key and tells its public half. When the
release has been checked, it opens it, checks the key commitment, opens the index, leaves the asset keys
for the worker in one region of secret memory and the needles for the probes in another, and exits.

Laws: nothing secret crosses the socket; the agent learns counts, limits or a code; whatever happens, the process
ends with the question that it was asked, or with the agent.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, BinaryIO, NoReturn, TypeAlias

from glasshouse.errors import Code, FormatError, GlasshouseError, InternalError, PackageError, PeerError
from glasshouse.package.grant import Grant, grant
from glasshouse.package.limits import MAX_BYTES, MAX_COUNT, OutputLimits
from glasshouse.package.manifest import Manifest
from glasshouse.package.read import Index, Package, asset_key
from glasshouse.runtime.confine.memory_limits import lock_memory
from glasshouse.runtime.kernel import PR_SET_PDEATHSIG, REAL, close_all_but
from glasshouse.runtime.keys.needles import NEEDLE_BYTES, NeedleKind, Needles, is_distinctive, region_bytes
from glasshouse.runtime.keys.secretmem import SecretMemory
from glasshouse.runtime.loop import Loop
from glasshouse.wire import frames
from glasshouse.wire.canonical import Json
from glasshouse.wire.group import Group
from glasshouse.wire.hpke import PUBLIC_BYTES, RecipientKey
from glasshouse.wire.record import Codec, Record, Sha256, integer, octets, text

__all__ = ["Custodian", "Opened", "Regions"]

PATIENCE_S = 120.0
REAP_PATIENCE_S = 2.0

# An entry of the index takes at least this many bytes, and grows by at most as many in the grant.
_ENTRY_BYTES = 92
_KEY_NEEDLES = 1 + 3 + 1


# Neither is longer than the frame; what is no hexadecimal raises `ValueError`.
_HEX_TEXT = text(frames.MAX_CONTROL_BYTES)
Hex: TypeAlias = Annotated[bytes, Codec(lambda value, where: bytes.fromhex(_HEX_TEXT.read(value, where)), bytes.hex)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made(Record, name="custodian"):
    """The custodian's first message."""

    public: Annotated[bytes, octets(PUBLIC_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request(Record, name="request"):
    """The agent's one message."""

    group: Group | None  # of a job with ranks, whose secret is derived beside the asset keys
    info: Hex  # from the checked release, as `sealed_key`
    manifest_sha256: Sha256  # of the package that the release is for
    sealed_key: Hex


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failed(Record, name="custodian"):
    """The answer where the release did not open."""

    code: Code


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened(Record, name="custodian"):
    """What the agent learns of an opened release."""

    assets: int  # how many
    needles: int
    max_outputs: Annotated[int, integer(0, MAX_COUNT)]  # what the job may return
    max_output_bytes: Annotated[int, integer(0, MAX_BYTES)]

    @property
    def limits(self) -> OutputLimits:
        return OutputLimits(count=self.max_outputs, bytes=self.max_output_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """The secret memory of a run, mapped before the fork so that custodian and agent share it.

    Attributes:
        grant: the asset keys, and the group secret of a job with ranks, for the worker.
        needles: for the probes.
    """

    grant: SecretMemory
    needles: SecretMemory

    @classmethod
    def for_package(cls, manifest: Manifest) -> Regions:
        """Return regions that are large enough whatever the sealed index holds; raises `PlatformError`."""
        entries = manifest.index_bytes // _ENTRY_BYTES + 1
        needles = SecretMemory(region_bytes(4 * entries + _KEY_NEEDLES))
        try:
            return cls(grant=SecretMemory(4096 + 2 * manifest.index_bytes + entries * 40), needles=needles)
        except GlasshouseError:
            needles.close()
            raise

    def wipe(self) -> None:
        """Zero both; they stay mapped, so that this can be looked at."""
        self.grant.wipe()
        self.needles.wipe()

    def close(self) -> None:
        self.grant.close()
        self.needles.close()


class Custodian:
    """The agent's handle on its custodian.

    Attributes:
        pid: the process; 0 when it is gone.
    """

    def __init__(self, pid: int, connection: socket.socket, loop: Loop) -> None:
        self.pid = pid
        self._socket = connection
        self._loop = loop
        self._decoder = frames.Decoder()
        self._answers: list[Json] = []
        self._ended = False
        loop.watch(connection.fileno(), self._receive)

    @classmethod
    def start(
        cls,
        loop: Loop,
        stream: BinaryIO,
        regions: Regions,
        make_key: Callable[[], RecipientKey] | None = None,
    ) -> Custodian:
        """Fork; call this before the process has any thread.

        Args:
            loop: where its answers are waited for.
            stream: the package, opened once, by the agent.
            regions: what the custodian fills.
            make_key: makes the run's HPKE key, in the custodian; None for a fresh one.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        pid = os.fork()
        if pid == 0:
            _live(theirs, stream, regions, make_key or RecipientKey.generate)
        theirs.close()
        return cls(pid, ours, loop)

    def public(self) -> bytes:
        """Return the public HPKE key.

        Raises:
            InternalError: the custodian did not make one.
        """
        return _Made.from_json(self._answer()).public

    def open(self, *, sealed_key: bytes, info: bytes, manifest_sha256: bytes, group: Group | None = None) -> Opened:
        """Have the release opened, and wait until the custodian is gone.

        Args:
            sealed_key, info: from the checked release.
            manifest_sha256: of the package that the release is for.
            group: of a job with ranks, whose secret is derived beside the asset keys.

        Raises:
            PeerError: `release-invalid`: what was released does not open, or is not this package's key.
            PackageError: the package is not what its owner sealed.
            InternalError: the custodian died.
        """
        request = _Request(group=group, info=info, manifest_sha256=manifest_sha256, sealed_key=sealed_key)
        try:
            self._socket.sendall(frames.control(request.to_json()))
        except OSError:
            raise _gone() from None
        answer = self._answer()
        if not self._loop.run_until(lambda: self._ended, within_s=PATIENCE_S):
            raise _gone()
        self.dismiss()
        if isinstance(answer, dict) and "code" in answer:
            raise _explained(_Failed.from_json(answer).code)
        return Opened.from_json(answer)

    def dismiss(self) -> None:
        """End the process if it lives, and reap it; doing this twice is allowed.

        One that somebody traces can be ended and not be reaped: it has no memory then, and is left.
        """
        if self.pid:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            os.kill(self.pid, signal.SIGKILL)
            deadline_s = self._loop.now_s() + REAP_PATIENCE_S
            while not os.waitpid(self.pid, os.WNOHANG)[0] and self._loop.now_s() < deadline_s:
                time.sleep(0.001)
            self.pid = 0

    def _answer(self) -> Json:
        self._loop.run_until(lambda: bool(self._answers) or self._ended, within_s=PATIENCE_S)
        if not self._answers:
            raise _gone()
        return self._answers.pop(0)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(self._socket.fileno())
            self._ended = True
        for _, value in self._decoder.feed(data):
            if not isinstance(value, bytearray):
                self._answers.append(value)


def _gone() -> InternalError:
    return InternalError(Code.INTERNAL, "the custodian ended before its time")


def _explained(code: Code) -> GlasshouseError:
    if code in (Code.SIGNATURE, Code.KEY_COMMITMENT):
        # The seal or the key inside it is wrong: the broker's doing, not the package's.
        return PeerError(Code.RELEASE_INVALID, "what the broker released is not the key of this package")
    if code is Code.INTERNAL:
        return InternalError(code, "the custodian failed")
    return PackageError(code, "the package does not open as its owner sealed it")


def _live(
    connection: socket.socket, stream: BinaryIO, regions: Regions, make_key: Callable[[], RecipientKey]
) -> NoReturn:
    """The custodian's whole life."""
    status = 1
    try:
        _withdraw(keep={connection.fileno(), stream.fileno(), regions.grant.fd, regions.needles.fd})
        key = make_key()
        _add_private(Needles(regions.needles.view), key)
        connection.sendall(frames.control(_Made(public=key.public).to_json()))
        request = _receive(connection)
        if request is not None:
            connection.sendall(frames.control(_answer(request, key, stream, regions).to_json()))
        status = 0
    finally:
        # Without unwinding: no handler, buffer or exit hook of the agent's runs here.
        os._exit(status)


def _withdraw(keep: set[int]) -> None:
    """Die with the agent, keep no descriptor of its and write nowhere."""
    REAL.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Sent to the whole group by a terminal; the agent decides when this process ends.
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    close_all_but({0, 1, 2, *keep})
    try:
        lock_memory()
    except OSError:
        return  # `memory-locked` and `no-swap` say so of the agent, whose limits these are too


def _receive(connection: socket.socket) -> Json:
    """Return the request; None where the agent has ended, or sends something else."""
    decoder = frames.Decoder()
    while data := connection.recv(65536):
        for kind, value in decoder.feed(data):
            return None if kind != frames.CONTROL or isinstance(value, bytearray) else value
    return None


def _answer(request: Json, key: RecipientKey, stream: BinaryIO, regions: Regions) -> Opened | _Failed:
    try:
        return _open(_Request.from_json(request), key, stream, regions)
    except (FormatError, PackageError) as error:
        regions.grant.wipe()
        return _Failed(code=error.code)
    except BaseException:
        regions.grant.wipe()
        return _Failed(code=Code.INTERNAL)


def _open(request: _Request, key: RecipientKey, stream: BinaryIO, regions: Regions) -> Opened:
    package_key = key.open(request.sealed_key, info=request.info)
    package = Package.open(stream)
    if package.manifest.sha256 != request.manifest_sha256:
        raise PackageError(Code.PACKAGE_TAMPERED, "the package was changed while the runtime attested itself")
    index = package.unlock(package_key)
    secret = None if request.group is None else request.group.secret(package_key)
    assets = _write_grant(grant(package, package_key, index, group_secret=secret), regions.grant)
    needles = Needles(regions.needles.view)
    needles.add(NeedleKind.PACKAGE_KEY, package_key)
    if secret is not None:
        needles.add(NeedleKind.GROUP_SECRET, secret)
    _add_assets(needles, package, package_key, index)
    limits = OutputLimits.of(index.job)
    return Opened(assets=assets, needles=len(needles), max_outputs=limits.count, max_output_bytes=limits.bytes)


def _add_private(needles: Needles, key: RecipientKey) -> None:
    """At once, so that the probes of a refused run have something to look for too."""
    private = key.private()
    for start in range(0, len(private), NEEDLE_BYTES):
        needles.add(NeedleKind.HPKE_PRIVATE, private[start : start + NEEDLE_BYTES])


def _write_grant(granted: Grant, region: SecretMemory) -> int:
    encoded = granted.encode()
    if len(encoded) > region.size:
        raise PackageError(Code.PACKAGE_LIMIT, "an index that expands beyond its secret memory")
    region.view[: len(encoded)] = encoded
    return len(granted.assets)


def _add_assets(needles: Needles, package: Package, package_key: bytes, index: Index) -> None:
    window = bytearray(NEEDLE_BYTES)
    for entry in index.assets:
        key = asset_key(package_key, entry.id, package.manifest.suite, package.header_sha256)
        needles.add(NeedleKind.ASSET_KEY, key)
        last = entry.bytes - NEEDLE_BYTES
        if last < 0:
            continue
        with package.asset(entry, package_key) as reader:
            for offset in sorted({0, last // 2, last}):
                reader.read_into(offset, window)
                if is_distinctive(window):
                    needles.add(NeedleKind.ASSET_WINDOW, window)
