"""The agent's view of one custodian, whose releases a test makes."""

from __future__ import annotations

import sys
from functools import cached_property

from glasshouse.custodian.exchange import Opened, Request
from glasshouse.runtime.keys.custodian import PROGRAM, Custodian, Regions
from glasshouse.runtime.loop import Loop
from glasshouse.wire.crypto import hpke_seal, lengths_prefixed
from glasshouse.wire.group import Group
from glasshouse.wire.lines.line_start import LineStart
from tools.runtime_package import OwnersPackage

DEPLOYMENT = "5d" * 16
INFO = b"what the release is bound to"


class CustodianBench:
    """An agent's view of one custodian."""

    def __init__(self, package: OwnersPackage, program: str = PROGRAM, *, ranks: int = 1) -> None:
        self.package = package
        self.loop = Loop()
        self.stream = package.path.open("rb", buffering=0)
        self.regions = Regions.for_package(package.manifest, ranks=ranks)
        self.custodian = Custodian.start(
            self.loop, self.stream.fileno(), self.regions, pycache_prefix=sys.pycache_prefix or "", program=program
        )

    @cached_property
    def public(self) -> bytes:
        return self.custodian.public()

    def open(
        self,
        package_key: bytes | None = None,
        *,
        info: bytes = INFO,
        manifest: bytes | None = None,
        group: Group | None = None,
        line: LineStart | None = None,
        released: LineStart | None = None,
        checkpoint: bytes = b"",
    ) -> Opened:
        """Have a release opened; `released` is the leg that it was sealed for, where that is another than `line`."""
        named = line if released is None else released
        bound = INFO if named is None else INFO + lengths_prefixed(named.encode())
        sealed = hpke_seal(package_key or self.package.key, recipient=self.public, info=bound)
        self.regions.checkpoint.write(checkpoint)
        self.regions.checkpoint.seek(0)
        return self.custodian.open(
            Request(
                deployment=DEPLOYMENT,
                group=group,
                info=info,
                line=line,
                manifest_sha256=manifest or self.package.manifest.sha256,
                sealed_key=sealed,
            )
        )

    def close(self) -> None:
        self.custodian.dismiss()
        self.stream.close()
        self.regions.close()
