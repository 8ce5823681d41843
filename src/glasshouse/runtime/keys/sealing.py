"""Outputs and log segments on their way to the owner: sealed as they arrive, one file each.

Laws: recipients come from the owner-signed manifest alone; a file has its final name only when it is
whole; nothing here can reopen what it sealed.
"""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.errors import Code, GlasshouseError, RunError
from glasshouse.package.layout import DEFAULT_CHUNK_BYTES
from glasshouse.package.limits import OutputLimits
from glasshouse.package.outputs import OutputSealer, SealedOutput
from glasshouse.runtime.keys.outdir import OutDir, disk_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealing:
    """To whom, and for which run, this machine seals."""

    recipients: tuple[bytes, ...]  # HPKE public keys from the owner-signed manifest, and from nowhere else
    run_id: str
    manifest_sha256: bytes


class SealedFile:
    """One sealed file of ``outputs`` or ``log`` as it is written; `kind` is for its header.

    Every method raises `RunError`: `disk-full`; the partial file is gone then.
    """

    def __init__(
        self,
        out: OutDir,
        sealing: Sealing,
        *,
        folder: str,
        sequence: int,
        name: str,
        kind: str,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self._file = out.sealed(folder, sequence)
        try:
            with disk_errors():
                self._sealer = OutputSealer(
                    self._file.stream,
                    recipients=sealing.recipients,
                    run_id=sealing.run_id,
                    manifest_sha256=sealing.manifest_sha256,
                    name=name,
                    sequence=sequence,
                    kind=kind,
                    chunk_bytes=chunk_bytes,
                )
        except GlasshouseError:
            self._file.discard()
            raise

    def update(self, plaintext: memoryview) -> None:
        """Seal more of it; the caller zeroes `plaintext`."""
        with disk_errors(self.discard):
            self._sealer.update(plaintext)

    def finish(self) -> SealedOutput:
        """Seal the end and give the file its name."""
        with disk_errors(self.discard):
            sealed = self._sealer.finish()
        self._sealer.wipe()
        self._file.keep()
        return sealed

    def discard(self) -> None:
        """Wipe what is buffered and remove the file."""
        self._sealer.wipe()
        self._file.discard()


class Outputs:
    """The outputs of one run, one after the other: no more than its job allows.

    Every method raises `RunError`: `worker-failed` out of turn, `output-refused` beyond the job's limits, `disk-full`.

    Args:
        limits: from the sealed index, as the custodian read it: the worker cannot change them.
    """

    def __init__(self, out: OutDir, sealing: Sealing, limits: OutputLimits) -> None:
        self._out, self._sealing, self._limits = out, sealing, limits
        self._current: SealedFile | None = None
        self._left = self._count = self._bytes = 0

    @property
    def in_progress(self) -> bool:
        """Whether an output has begun and not ended."""
        return self._current is not None

    def begin(self, *, name: str, kind: str, size: int) -> None:
        """Open the next output."""
        if self._current is not None:
            raise _out_of_turn()
        if self._count >= self._limits.count:
            raise RunError(Code.OUTPUT_REFUSED, f"more than the {self._limits.count} outputs of max_outputs")
        if self._bytes + size > self._limits.bytes:
            raise RunError(Code.OUTPUT_REFUSED, f"more than the {self._limits.bytes} bytes of max_output_bytes")
        self._current = SealedFile(
            self._out, self._sealing, folder="outputs", sequence=self._count, name=name, kind=kind
        )
        self._left = size
        self._count += 1
        self._bytes += size

    def data(self, plaintext: memoryview) -> None:
        """Seal more of the current output."""
        if self._current is None or len(plaintext) > self._left:
            raise _out_of_turn()
        self._current.update(plaintext)
        self._left -= len(plaintext)

    def end(self, sha256: bytes) -> SealedOutput:
        """Close the current output; its digest must be what the worker saw."""
        if self._current is None or self._left:
            raise _out_of_turn()
        sealed, self._current = self._current.finish(), None
        if sealed.sha256 != sha256:
            raise RunError(Code.WORKER_FAILED, "an output arrived other than the worker sent it")
        return sealed

    def discard(self) -> None:
        """Drop an output that never ended."""
        current, self._current = self._current, None
        if current is not None:
            current.discard()


def _out_of_turn() -> RunError:
    return RunError(Code.WORKER_FAILED, "the worker sent an output out of turn, or more of it than announced")
