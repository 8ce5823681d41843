"""Runs one sandbox as an ordinary user and prints what came of it; exits 77 where such users get no namespace.

Started as root: a private view of the machine lets that user read an interpreter in root's home.
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
    home = Path("/root")
    base = Path(sys.base_prefix)
    if base.is_relative_to(home):
        REAL.unshare(linux.CLONE_NEWNS)
        REAL.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        shown = os.open(base, os.O_PATH)
        REAL.mount("tmpfs", str(home), "tmpfs", 0, "mode=755")
        base.mkdir(parents=True)
        REAL.mount(f"/proc/self/fd/{shown}", str(base), None, linux.MS_BIND | linux.MS_REC)
        os.close(shown)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    REAL.prctl(linux.PR_SET_DUMPABLE, 1)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.machine import needs_namespaces
    from tools.sandboxed import run

    if needs_namespaces.args[0]:
        sys.exit(77)
    ran = run("import os; print(os.getuid())")
    answer = {
        "notes": ran.report.notes,
        "output": ran.output,
        "passed": sorted(ran.passed()),
        "workspace": ran.report.workspace.value,
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
