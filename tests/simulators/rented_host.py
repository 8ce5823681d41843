"""A machine as fakes of providers rent it: its start command runs for real, behind a real sshd, confined.

Laws: nothing of it is written outside its folder; it ends with this process, or when its own start command has its
provider end it; what it does about its end is the start command's own doing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from glasshouse.providers.place.ways import SshHost
from tools.ports import free_port
from tools.sshd import SSHD

__all__ = ["RentedHost", "pinned"]

_CONFINED = Path(__file__).parents[1] / "tools" / "confined.py"

# The mounts are this machine's alone. Its port is in its sshd's configuration, as ListenAddress outdoes `-p 22`: that
# is how a provider maps 22/tcp. The home of its root is named in its own /etc/passwd.
_MACHINE = """\
set -e
mount --bind "$0/ssh" /etc/ssh
mount --bind "$0/run" /run
mount --bind "$0/passwd" /etc/passwd
mount -t tmpfs -o "mode=1777,size=$2" shm /dev/shm
[ "$3" = sshd ] || mount --bind /dev/null "$3"
exec "$4" -B "$5" /bin/sh -c "$1"
"""
# Ends what it started as soon as the other end of its standard input is gone.
_GUARD = """\
exec 3<&0
"$@" </dev/null 3<&- &
machine=$!
( read -r _ <&3; kill -9 "$machine" ) >/dev/null 2>&1 3<&3 &
guard=$!
exec 3<&-
wait "$machine" && code=0 || code=$?
kill -9 "$guard"
exit "$code"
"""


def pinned(folder: Path, port: int, key: str) -> SshHost:
    """Return the way to a machine on this port that has this host key, for the user whose key is ``folder/user``."""
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}\n")
    ways = f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\nControlPath none\n"
    (folder / "client").write_text(ways)
    return SshHost(user="root", host="127.0.0.1", port=port, options=("-F", str(folder / "client")))


class RentedHost:
    """One machine.

    Args:
        folder: made for it; what the machine has instead of its own disk.
        script: its start command, for ``sh -c``.
        environment: what its first process has beside PATH, HOME and HOSTNAME.
        programs: what its image has in PATH beside this Python and the usual: names, and scripts (``#!``).
        has_sshd: whether the image has one.
        shm_bytes: how large its /dev/shm is.
        loops: its first process ends by itself after so many seconds, and is started anew a quarter of that later, over
            and over.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        environment: Mapping[str, str] | None = None,
        programs: Mapping[str, str] | None = None,
        has_sshd: bool = True,
        shm_bytes: int = 1 << 30,
        loops: float | None = None,
    ) -> None:
        self.port = free_port()
        self._namespace: int | None = None
        self._lock = threading.RLock()
        self.boots = 0
        self._folder, self._script, self._has_sshd, self._shm_bytes = folder, script, has_sshd, shm_bytes
        self.loops = loops
        self._given_up = threading.Event()
        for name in ("home", "ssh", "run/sshd", "bin"):
            (folder / name).mkdir(mode=0o755, parents=True)
        (folder / "home").chmod(0o700)
        python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        for name, text in {"python3": python, **(programs or {})}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        # As Debian's images have it, but for what belongs to a session of systemd.
        (folder / "ssh" / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{self.port}\nKbdInteractiveAuthentication no\nPrintMotd no\nUsePAM no\n"
            "AcceptEnv LANG LC_*\nSubsystem sftp /usr/lib/openssh/sftp-server\n"
        )
        entries = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        for entry in entries:
            if entry[0] == "root":
                entry[5:7] = [str(folder / "home"), "/bin/sh"]
        (folder / "passwd").write_text("".join(":".join(entry) + "\n" for entry in entries))
        self.environment = {
            "PATH": f"{folder / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder / "home"),
            "HOSTNAME": folder.name,
            **(environment or {}),
        }
        self._boot()
        self._boots = threading.Thread(target=self._boot_again, daemon=True)
        if loops is not None:
            self._boots.start()

    def _boot(self) -> None:
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        hidden = "sshd" if self._has_sshd else str(SSHD)
        command += ["/bin/sh", "-c", _MACHINE, str(self._folder), self._script, str(self._shm_bytes), hidden]
        command += [sys.executable, str(_CONFINED)]
        with (self._folder / "output").open("ab") as output:
            self._machine = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "guard", *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self.environment,
                cwd="/",
            )
        self._namespace = self._own_namespace()
        self.boots += 1

    def _boot_again(self) -> None:
        assert self.loops is not None
        while not self._given_up.wait(self.loops):
            self._end()
            if not self._given_up.wait(self.loops / 4):
                self._boot()

    def output(self) -> str:
        """Return what its start command and its sshd wrote until now, over all its starts."""
        return (self._folder / "output").read_text(errors="replace")

    def runs(self) -> bool:
        """Whether anything runs there."""
        return bool(self._processes())

    def restart(self) -> None:
        """End it and start it anew, on the same disk."""
        self._end()
        self._boot()

    def die(self) -> None:
        """End all that runs there, as when its power fails; its disk stays."""
        self._given_up.set()
        if self.loops is not None:
            self._boots.join()
        self._end()

    def destroy(self) -> None:
        """End it, and remove its disk."""
        self.die()
        shutil.rmtree(self._folder, ignore_errors=True)

    def unreachable(self, now: bool = True) -> None:
        """Have its network fail, or come back: connections are made and hang, and what runs there goes on."""
        for process, name in self._processes():
            if name.startswith("sshd"):
                with suppress(ProcessLookupError):  # a session that ended meanwhile
                    os.kill(process, signal.SIGSTOP if now else signal.SIGCONT)

    def left(self) -> list[str]:
        """Return the names of the processes that run there."""
        return [name for _, name in self._processes()]

    def _processes(self) -> list[tuple[int, str]]:
        """Return what runs in its own PID namespace: the number here, and the name."""
        found: list[tuple[int, str]] = []
        with self._lock:
            if self._namespace is None:
                return found
            own = os.fstat(self._namespace).st_ino
            for entry in Path("/proc").iterdir():
                try:
                    if not entry.name.isdigit() or (entry / "ns" / "pid").stat().st_ino != own:
                        continue
                    name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(") ")
                    if not rest.startswith("Z"):  # the machine's first process is collected when its turn comes
                        found.append((int(entry.name), name))
                except OSError:
                    continue  # it has ended meanwhile
        return found

    def _own_namespace(self) -> int | None:
        """Open the PID namespace of the machine, as `unshare` has it for its child: its number is not given again.

        None for one that has ended already.
        """
        here = Path("/proc/self/ns/pid").stat().st_ino
        while self._machine.poll() is None:
            for child in _children(self._machine.pid):
                with suppress(OSError):
                    made = os.open(f"/proc/{child}/ns/pid_for_children", os.O_RDONLY)
                    if os.fstat(made).st_ino != here:
                        return made
                    os.close(made)
            time.sleep(0.005)
        return None

    def _end(self) -> None:
        assert self._machine.stdin is not None
        self._machine.stdin.close()
        self._machine.wait()
        while self._processes():  # its port is free again only without them
            time.sleep(0.005)
        with self._lock:
            if self._namespace is not None:
                os.close(self._namespace)
                self._namespace = None


def _children(process: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return []
