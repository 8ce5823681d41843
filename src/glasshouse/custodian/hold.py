"""Makes the run's HPKE key, opens one release with it, and writes what follows from the package key.

The keys of the assets, and of the checkpoint that a leg goes on from, go into one region of secret memory, for the
worker; what the probes search for at the run's end into another. The agent is sent counts, limits, the public half of
the line's resume key, or a code. Source: spec/key-release.md, spec/checkpoints.md, docs/adr/0003, 0036, 0041.
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
from glasshouse.package.checkpoints.resume_parts import open_header, unwrap
from glasshouse.package.grant import Resume
from glasshouse.package.index import Index
from glasshouse.package.limits import CheckpointLimits, OutputLimits
from glasshouse.package.read import Package
from glasshouse.wire.crypto import RecipientKey, lengths_prefixed, zero
from glasshouse.wire.lines.checkpoint import FRONT_BYTES, front_length, resume_key
from glasshouse.wire.lines.line_start import LineStart

__all__ = ["RecipientKey", "serve"]


def serve(make_key: Callable[[], RecipientKey] = RecipientKey.generate) -> None:
    """Answer the agent's one request, with a key of `make_key`; the process ends when this returns.

    Raises `OSError` or `ValueError`: the agent has ended, or a descriptor is not what it has to be.
    """
    *regions, checkpoint = _receive_descriptors()
    granted, region = map(_mapped, regions)
    patterns = ResiduePatterns(region)
    key = make_key()
    # At once, so that the probes of a refused run have something to look for too.
    _add_private(patterns, PatternKind.HPKE_PRIVATE, key)
    os.write(CONNECTION, key.public)
    request = os.read(CONNECTION, MAX_PACKET_BYTES)
    if request:
        os.write(CONNECTION, _answer(request, key, granted, patterns, checkpoint).encode())


def _receive_descriptors() -> array[int]:
    """Take the descriptors of the two regions, and of a checkpoint, from the agent.

    It sends them once this process is closed: others of its user can open the descriptors of one that is not.
    """
    descriptors = array("i")
    connection = _socket.socket(fileno=CONNECTION)
    try:
        [(_, _, data)] = connection.recvmsg(1, _socket.CMSG_LEN(3 * descriptors.itemsize))[1]
    finally:
        connection.detach()
    descriptors.frombytes(data)
    return descriptors


def _mapped(descriptor: int) -> memoryview:
    return memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))


def _add_private(patterns: ResiduePatterns, kind: PatternKind, key: RecipientKey) -> None:
    private = key.private()
    for start in range(0, len(private), PATTERN_BYTES):
        patterns.add(kind, private[start : start + PATTERN_BYTES])


def _answer(
    request: bytes, key: RecipientKey, granted: memoryview, patterns: ResiduePatterns, checkpoint: int
) -> Opened | Failed:
    try:
        with open(PACKAGE, "rb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
            return _open(Request.parse(request), key, stream, granted, patterns, checkpoint)
    except (FormatError, PackageError) as error:
        zero(granted)
        return Failed(code=error.code)
    except BaseException:
        zero(granted)
        return Failed(code=Code.INTERNAL)


def _open(
    request: Request,
    key: RecipientKey,
    stream: BinaryIO,
    granted: memoryview,
    patterns: ResiduePatterns,
    checkpoint: int,
) -> Opened:
    line, group, resume_public, resume = request.line, request.group, None, None
    info = request.info if line is None else request.info + lengths_prefixed(line.encode())
    package_key = key.open(request.sealed_key, info=info)
    package = Package.open(stream)
    if package.manifest.sha256 != request.manifest_sha256:
        raise PackageError(Code.PACKAGE_TAMPERED, "the package was changed while the runtime attested itself")
    index = package.unlock(package_key)
    patterns.add(PatternKind.PACKAGE_KEY, package_key)
    secret = None if group is None else group.secret(package_key)
    if secret is not None:
        patterns.add(PatternKind.GROUP_SECRET, secret)
    if line is not None:
        opener = resume_key(package_key, deployment=request.deployment, line=line.id)
        resume_public = opener.public
        _add_private(patterns, PatternKind.RESUME_PRIVATE, opener)
        if line.seq:
            with open(checkpoint, "rb") as given:
                resume = _resume(given.read(), request, line, opener)
            for part in resume.parts:
                patterns.add(PatternKind.CONTENT_KEY, part.key)
    encoded = package.grant(package_key, index, group_secret=secret, resume=resume).encode()
    if len(encoded) > len(granted):
        raise PackageError(Code.PACKAGE_LIMIT, "an index that expands beyond its secret memory")
    granted[: len(encoded)] = encoded
    _add_assets(patterns, package, package_key, index)
    limits = OutputLimits.of(index.job)
    return Opened(
        assets=len(index.assets),
        patterns=len(patterns),
        max_outputs=limits.count,
        max_output_bytes=limits.bytes,
        checkpoints=CheckpointLimits.of(index.job),
        resume_public=resume_public,
    )


def _resume(given: bytes, request: Request, line: LineStart, key: RecipientKey) -> Resume:
    """Open the parts of this machine's ranks in the checkpoint that the release names (spec/checkpoints.md 7)."""
    group, fronts, at = request.group, [], 0
    machines, ranks, first = (1, 1, 0) if group is None else (group.machines, group.ranks, group.first_rank)
    for _ in range(ranks):
        end = at + front_length(given[at : at + FRONT_BYTES])
        fronts.append(given[at:end])
        at = end
    header = open_header(
        given[at:],
        line,
        deployment=request.deployment,
        manifest_sha256=request.manifest_sha256,
        machines=machines,
        ranks=ranks,
    )
    parts, offset = [], 0
    for rank, front in enumerate(fronts, first):
        parts.append(unwrap(front, header, key, rank=rank, offset=offset))
        offset += header.parts[rank].bytes - len(front)
    return Resume(parts=tuple(parts), seq=header.seq, step=header.step)


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
