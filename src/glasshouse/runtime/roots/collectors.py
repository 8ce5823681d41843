"""What collects the hardware evidence of a run: a class for each kind, imported by name when a launch wants it.

Laws: a collector answers for one kind, holds what it opened until `close`, and fails in our own words, for a runtime
prints no others. Source: spec/hardware-evidence.md.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Mapping
from typing import Protocol

from glasshouse.attestation.claims import Claims, composite
from glasshouse.attestation.roots.binding import Bound
from glasshouse.attestation.roots.kinds import NVIDIA
from glasshouse.errors import Code, PlatformError
from glasshouse.handshake.messages import TpmKeys
from glasshouse.wire.crypto import sha256

CLASSES: Mapping[str, str] = {
    "azure": "AzureCollector",
    "dstack": "DstackCollector",
    "gcp": "GcpCollector",
    NVIDIA: "NvidiaCollector",
    "sev-snp": "SevSnpCollector",
    "tdx": "TdxCollector",
    "tpm": "TpmCollector",
}
"""The class of each kind; its module is the kind's name, with `_` for `-`."""

_OLD = "its driver does not have this call: the kernel has to be newer"
_WHY = {
    errno.EACCES: "this user may not use it",
    errno.EPERM: "this user may not use it",
    errno.EBUSY: "another process uses it, so end that, or try again later",
    errno.EAGAIN: "another process used it meanwhile, so try again",
    errno.ENOENT: "it is gone",
    errno.EIO: "firmware, or a service of the host, refused: whose host it is has to look",
    errno.ENODEV: "its driver is there, and no device behind it",
    errno.ENXIO: "its driver is there, and no device behind it",
    errno.ENOTTY: _OLD,
    errno.ENOSYS: _OLD,
    errno.EOPNOTSUPP: _OLD,
    errno.ECONNREFUSED: "no service listens there",
    errno.ETIMEDOUT: "its service did not answer in time: whose host it is has to start it",
}


class Collector(Protocol):
    """The collecting half of a root of trust; its constructor does nothing but note paths, which have defaults."""

    kind: str

    def look(self) -> str:
        """Return an empty string where this machine offers the kind, else one sentence: what is missing.

        Nothing on the machine is changed, and nothing stays open.
        """

    def prepare(self) -> TpmKeys | None:
        """Open what is needed, while this process may still do all that it was started with; before the challenge.

        Returns:
            the keys of a TPM whose activation is wanted; None for the other kinds.

        Raises:
            PlatformError: `unavailable`.
        """

    def collect(self, *, bound: Bound, credential: bytes | None) -> bytes:
        """Return the blob, bound to this run; may be called again with another challenge's.

        Args:
            credential: the challenge's, for the TPM to open; None where there was none.

        Raises:
            PlatformError: `unavailable`.
        """

    def close(self) -> None:
        """Give back what was opened and made; may be called twice, and without `prepare`."""


def unavailable(sentence: str) -> PlatformError:
    """Return the refusal of a collector: one sentence of fixed words and numbers, which the runtime prints."""
    return PlatformError(Code.HARDWARE_UNAVAILABLE, sentence, hint=sentence)


def why_of(error: OSError) -> str:
    """Return what an error of a device means for who runs the machine, in words of our own."""
    return _WHY.get(error.errno or 0) or f"error {error.errno}"


def collector_of(kind: str) -> Collector:
    """Return the collector of a kind."""
    module = importlib.import_module(f"{__package__}.{kind.replace('-', '_')}")
    made: Collector = getattr(module, CLASSES[kind])()
    return made


class Collecting:
    """The collectors of a run's kinds, in the order in which they bind: the GPUs' evidence is in the processor's.

    Attributes:
        keys: of a TPM that is to be activated, once prepared; they go with the challenge request.
    """

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._collectors = [collector_of(kind) for kind in sorted(kinds, key=lambda kind: (kind != NVIDIA, kind))]
        self.keys: TpmKeys | None = None

    def prepare(self) -> None:
        """Look and open; raises `PlatformError`."""
        for collector in self._collectors:
            if missing := collector.look():
                raise unavailable(missing)
            self.keys = collector.prepare() or self.keys

    def collect(self, claims: Claims, credential: bytes | None) -> dict[str, bytes]:
        """Return the blob of each kind, sorted by it, bound to these claims; raises `PlatformError`."""
        found: dict[str, bytes] = {}
        for collector in self._collectors:
            bound = Bound(
                composite=composite(claims),
                gpus_sha256=sha256(found[NVIDIA]) if NVIDIA in found else b"",
                gpus=claims.gpus,
                ak=None if self.keys is None else self.keys.ak,
            )
            found[collector.kind] = collector.collect(bound=bound, credential=credential)
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Close every collector, whatever becomes of each."""
        for collector in self._collectors:
            try:
                collector.close()
            except Exception:  # noqa: S112 - what could not be given back ends with this process
                continue
