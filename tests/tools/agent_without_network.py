"""The real agent on a machine that lets it make every namespace but that of the network."""

from __future__ import annotations

import sys
from functools import partial

from glasshouse.runtime.__main__ import main
from glasshouse.runtime.kernel import CLONE_NEWNET, Kernel
from glasshouse.runtime.syscalls import KernelError
from glasshouse.runtime.worker import sandbox
from tools.sandboxed import forking


class WithoutNetworks(Kernel):
    def unshare(self, flags: int) -> None:
        if flags == CLONE_NEWNET:
            raise KernelError("unshare", 1)
        super().unshare(flags)


if __name__ == "__main__":
    sandbox.start = partial(sandbox.start, spawn=forking(WithoutNetworks()))
    sys.exit(main(sys.argv[1:], sys.stdin.buffer))
