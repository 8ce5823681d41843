"""The start command of a rented machine ends it, whatever the machine's own clock says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from glasshouse.providers.rental.provider import Start
from glasshouse.providers.rental.start_script import READY, host_key, start_script, started_anew
from glasshouse.providers.serve.keepers import STORED
from simulators.rental_world import OPTIONS


@pytest.mark.parametrize(
    ("date", "waited"),
    [
        ("echo 1000", "300"),
        ("echo 1850", "150"),
        ("echo 0", "300"),
        ("echo 1950", "50"),
        ("echo 200100", "0"),
        ("exit 1", "300"),
        ("echo Mon Nov 23", "300"),
        ("echo", "300"),
        (None, "300"),
    ],
    ids=["soon", "anew", "set-back", "late", "ahead", "fails", "words", "nothing", "missing"],
)
def test_a_machine_ends_itself_in_time_also_without_a_clock(tmp_path: Path, date: str | None, waited: str) -> None:
    log = tmp_path / "log"
    for name, does in (("date", date), ("sleep", f'echo "$1" >>{log}')):
        if does is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o700)
    start = Start(tag="gh-a-b-1", nonce="ab" * 16, ssh_public="x", ends_s=300, ends_at_s=2000, options=OPTIONS)
    script = start_script(start, end=f"echo end >>{log}; exit")
    switch = script[: script.index("sshd=")]  # what follows needs a machine of its own
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run(["/bin/sh", "-c", f"{switch}wait"], env=environment, check=True, timeout=60)
    *waits, last = log.read_text().split()
    assert (sum(map(int, waits)), last) == (int(waited), "end")
    assert all(int(one) <= 60 for one in waits)


@pytest.mark.parametrize(("stored", "waited"), [("ab" * 16, 60), ("cd" * 16, 300), ("", 300)])
def test_a_machine_whose_run_is_stored_at_its_gate_ends_early_and_no_other_does(
    tmp_path: Path, stored: str, waited: int
) -> None:
    """What an image brings that was made of another machine has the nonce of that one."""
    log = tmp_path / "log"
    (tmp_path / "sleep").write_text(f'#!/bin/sh\necho "$1" >>{log}\n')
    (tmp_path / "sleep").chmod(0o700)
    (tmp_path / STORED).write_text(f"{stored}\n")
    start = Start(tag="gh-a-b-1", nonce="ab" * 16, ssh_public="x", ends_s=300, ends_at_s=2000, options=OPTIONS)
    script = start_script(start, end=f"echo end >>{log}; exit")
    switch = script[: script.index("sshd=")]
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run(["/bin/sh", "-c", f"{switch}wait"], env=environment, check=True, timeout=60)
    *waits, last = log.read_text().split()
    assert (sum(map(int, waits)), last) == (waited, "end")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh here")
def test_a_machine_that_starts_anew_has_its_host_key_and_another_machine_its_own(tmp_path: Path) -> None:
    """The disk may be the same one: an image that was made of a machine brings that machine's key along."""

    def started(nonce: str) -> str | None:
        start = Start(tag="gh-a-b-1", nonce=nonce, ssh_public="x", ends_s=300, ends_at_s=2000, options=OPTIONS)
        script = start_script(start, end="exit").replace("/etc/ssh", str(tmp_path))
        keys = script[script.index("key=") : script.index("exec ")]
        told = subprocess.run(["/bin/sh", "-c", keys], capture_output=True, text=True, check=True, timeout=60)
        assert told.stderr == ""
        return host_key(told.stdout, nonce)

    first = started("ab" * 16)
    assert first is not None
    assert started("ab" * 16) == first
    assert started("cd" * 16) not in (None, first)
    assert started("ab" * 16) == first
    (tmp_path / f"glasshouse_host_key_{'ab' * 16}").write_text("half of a ke")  # its first start was cut off
    assert started("ab" * 16) not in (None, first)


def test_a_machine_with_another_host_key_after_its_own_was_started_anew() -> None:
    nonce, first, second = "ab" * 16, "ssh-ed25519 " + "A" * 68, "ssh-ed25519 " + "B" * 68
    told = {key: f"12:00 {READY} {nonce} {key}\nlistening on 22\n" for key in (first, second)}
    assert not started_anew(told[first], nonce, first)
    assert started_anew(told[first] + told[second], nonce, first)
    assert not started_anew(told[second] + told[first], nonce, first)
    # Nothing of another start, or none at all, shows that anything ended.
    for other in ("", told[second], told[first] + told[second].replace(nonce, "cd" * 16)):
        assert not started_anew(other, nonce, first)
