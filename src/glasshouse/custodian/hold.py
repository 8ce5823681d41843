"""Makes the run's HPKE key, opens one release with it, and writes what follows from the package key.

The keys of the assets go into one region of secret memory, for the worker; what the probes search for at the run's end
into another. The agent is sent counts, limits or a code. Source: spec/key-release.md, docs/adr/0003, 0036.
"""

from __future__ import annotations

import _socket  # without what the module around it imports
import mmap
import os
from array import array
from collections.abc import Callable
from typing import BinaryIO

from glasshouse.custodian import CONNECTION, PACKAGE
from glasshouse.custodian.exchange import MAX_PACKET_BYTES, Failed, Opened, Request
from glasshouse.custodian.residue_patterns import PATTERN_BYTES, PatternKind, ResiduePatterns, is_distinctive
from glasshouse.errors import Code, FormatError, PackageError
from glasshouse.package.index import Index
from glasshouse.package.limits import OutputLimits
from glasshouse.package.read import Package
from glasshouse.wire.crypto import RecipientKey, zero

__all__ = ["RecipientKey", "serve"]


def serve(make_key: Callable[[], RecipientKey] = RecipientKey.generate) -> None:
    """Answer the agent's one request, with a key of `make_key`; the process ends when this returns.

    Raises `OSError` or `ValueError`: the agent has ended, or a descriptor is not what it has to be.
    """
    granted, region = map(_mapped, _receive_regions())
    patterns = ResiduePatterns(region)
    key = make_key()
    # At once, so that the probes of a refused run have something to look for too.
    private = key.private()
    for start in range(0, len(private), PATTERN_BYTES):
        patterns.add(PatternKind.HPKE_PRIVATE, private[start : start + PATTERN_BYTES])
    os.write(CONNECTION, key.public)
    request = os.read(CONNECTION, MAX_PACKET_BYTES)
    if request:
        os.write(CONNECTION, _answer(request, key, granted, patterns).encode())


def _receive_regions() -> array[int]:
    """Take the descriptors of the two regions from the agent.

    It sends them once this process is closed: others of its user can open the descriptors of one that is not.
    """
    regions = array("i")
    connection = _socket.socket(fileno=CONNECTION)
    try:
        [(_, _, data)] = connection.recvmsg(1, _socket.CMSG_LEN(2 * regions.itemsize))[1]
    finally:
        connection.detach()
    regions.frombytes(data)
    return regions


def _mapped(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))


def _answer(request: bytes, key: RecipientKey, granted: memoryview, patterns: ResiduePatterns) -> Opened | Failed:
    try:
        with open(PACKAGE, "rb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
            return _open(Request.parse(request), key, stream, granted, patterns)
    except (FormatError, PackageError) as error:
        zero(granted)
        return Failed(code=error.code)
    except BaseException:
        zero(granted)
        return Failed(code=Code.INTERNAL)


def _open(
    request: Request, key: RecipientKey, stream: BinaryIO, granted: memoryview, patterns: ResiduePatterns
) -> Opened:
    package_key = key.open(request.sealed_key, info=request.info)
    package = Package.open(stream)
    if package.manifest.sha256 != request.manifest_sha256:
        raise PackageError(Code.PACKAGE_TAMPERED, "the package was changed while the runtime attested itself")
    index = package.unlock(package_key)
    secret = None if request.group is None else request.group.secret(package_key)
    encoded = package.grant(package_key, index, group_secret=secret).encode()
    if len(encoded) > len(granted):
        raise PackageError(Code.PACKAGE_LIMIT, "an index that expands beyond its secret memory")
    granted[: len(encoded)] = encoded
    patterns.add(PatternKind.PACKAGE_KEY, package_key)
    if secret is not None:
        patterns.add(PatternKind.GROUP_SECRET, secret)
    _add_assets(patterns, package, package_key, index)
    limits = OutputLimits.of(index.job)
    return Opened(
        assets=len(index.assets),
        patterns=len(patterns),
        max_outputs=limits.count,
        max_output_bytes=limits.bytes,
    )


def _add_assets(patterns: ResiduePatterns, package: Package, package_key: bytes, index: Index) -> None:
    window = bytearray(PATTERN_BYTES)
    for entry in index.assets:
        with package.asset(entry, package_key) as reader:
            patterns.add(PatternKind.ASSET_KEY, reader.asset.key)
            last = entry.bytes - PATTERN_BYTES
            for offset in sorted({0, last // 2, last}) if last >= 0 else ():
                reader.read_into(offset, window)
                if is_distinctive(window):
                    patterns.add(PatternKind.ASSET_WINDOW, window)
