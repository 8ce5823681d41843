"""The protected leg's inputs: keys in secret memory, sealed bytes in the package, plaintext where it is used."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping
from typing import BinaryIO

from glasshouse.package.content import granted_asset, open_stream
from glasshouse.package.grant import Grant
from glasshouse.package.streams import AssetReader, Positioned, SealedAsset
from glasshouse.task.inputs import Buffer, Inputs
from glasshouse.wire.canonical import Json


class GrantInputs(Inputs):
    """Assets of the sealed package, opened on demand into the caller's buffer.

    Args:
        secret, secret_bytes: descriptor of the secret memory that holds the grant, and the size; mapped read-only.
        package: descriptor of the sealed package; read at positions, for the agent shares its offset.
    """

    def __init__(self, *, secret: int, secret_bytes: int, package: int) -> None:
        self._memory = mmap.mmap(secret, secret_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        self._file = open(package, "rb", buffering=0)  # noqa: SIM115 - until `close`
        self._package = Positioned(self._file)
        self._grant = Grant.parse(memoryview(self._memory))
        self.job: Mapping[str, Json] = self._grant.job
        self.group_secret = self._grant.group_secret  # None for a run in one process
        self.resume = self._grant.resume  # None where the job begins from the beginning
        self.sizes = {asset.path: asset.bytes for asset in self._grant.assets}
        self._lock = threading.Lock()
        self._recent: tuple[str, AssetReader] | None = None

    def open(self, name: str) -> BinaryIO:
        return open_stream(self._reader(name))

    def read_into(self, name: str, destination: Buffer, offset: int) -> int:
        # The last reader is kept: neighbouring reads of one input open each chunk once.
        with self._lock:
            if self._recent is None or self._recent[0] != name:
                reader = self._reader(name)
                if self._recent is not None:
                    self._recent[1].close()
                self._recent = (name, reader)
            return self._recent[1].read_into(offset, destination)

    def sealed(self, name: str) -> SealedAsset:
        self.size(name)
        return granted_asset(self._grant, self._package, name)

    def close(self) -> None:
        """Wipe the plaintext held for neighbouring reads, and let go of keys and package."""
        if self._recent is not None:
            self._recent[1].close()
        self._memory.close()
        self._file.close()

    def _reader(self, name: str) -> AssetReader:
        return AssetReader(self.sealed(name))
