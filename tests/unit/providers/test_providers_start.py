"""The start command of a rented machine ends it, whatever the machine's own clock says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from glasshouse.providers.rental import Start
from glasshouse.providers.start import start_script
from simulators.rental_world import OPTIONS


@pytest.mark.parametrize(
    ("date", "waited"),
    [
        ("echo 1000", "300"),
        ("echo 1900", "100"),
        ("echo 0", "300"),
        ("echo 2001", None),
        ("exit 1", "300"),
        ("echo Mon Nov 23", "300"),
        ("echo", "300"),
        (None, "300"),
    ],
    ids=["soon", "anew", "set-back", "late", "fails", "words", "nothing", "missing"],
)
def test_a_machine_ends_itself_in_time_also_without_a_clock(
    tmp_path: Path, date: str | None, waited: str | None
) -> None:
    log = tmp_path / "log"
    for name, does in (("date", date), ("sleep", f'echo "$1" >>{log}')):
        if does is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o700)
    start = Start(tag="gh-a-b-1", nonce="ab" * 16, ssh_public="x", ends_s=300, ends_at_s=2000, options=OPTIONS)
    script = start_script(start, end=f"echo end >>{log}; exit")
    switch = script[: script.index("sshd=")]  # what follows needs a machine of its own
    subprocess.run(["/bin/sh", "-c", f"{switch}wait"], env={"PATH": str(tmp_path)}, check=True, timeout=60)
    assert log.read_text().split() == [*([] if waited is None else [waited]), "end"]
