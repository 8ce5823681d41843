"""Runs one sandbox as an ordinary user and prints what came of it; exits 77 where such users get no namespace.

Started as root: a private view of the machine lets that user read an interpreter or a checkout in root's home.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from glasshouse.runtime import kernel as linux
from glasshouse.runtime.kernel import REAL

NOBODY = 65534


def main() -> None:
    os.umask(0o022)  # whatever the caller has: the folders made here must be open to the ordinary user
    home = Path("/root")
    checkout = Path(__file__).resolve().parents[2]
    hidden = {path for path in (Path(sys.base_prefix), Path(sys.prefix), checkout) if path.is_relative_to(home)}
    # A folder below another of them is shown with it.
    tops = sorted(path for path in hidden if not hidden & set(path.parents))
    if tops:
        REAL.unshare(linux.CLONE_NEWNS)
        REAL.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        shown = [(path, os.open(path, os.O_PATH)) for path in tops]
        REAL.mount("tmpfs", str(home), "tmpfs", 0, "mode=755")
        for path, descriptor in shown:
            path.mkdir(parents=True)
            REAL.mount(f"/proc/self/fd/{descriptor}", str(path), None, linux.MS_BIND | linux.MS_REC)
            os.close(descriptor)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    REAL.prctl(linux.PR_SET_DUMPABLE, 1)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.machine import needs_namespaces
    from tools.sandboxed import run

    if needs_namespaces.args[0]:
        sys.exit(77)
    ran = run("import os; print(os.getuid())", loopback="--loopback" in sys.argv)
    answer = {
        "notes": ran.report.notes,
        "output": ran.output,
        "passed": sorted(ran.passed()),
        "workspace": ran.report.workspace.value,
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
