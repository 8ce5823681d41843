"""A real sshd on the loopback, with keys of its own, that lets this user in."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from glasshouse.providers.place.ways import SshHost
from tools.ports import free_port

__all__ = ["SSHD", "needs_sshd", "serving_ssh"]

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
needs_sshd = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="OpenSSH is missing")


@contextmanager
def serving_ssh(folder: Path, more: str = "", *, within: Sequence[str] = ()) -> Iterator[SshHost]:
    """Run a server as long as the block lasts; its host key is in a known_hosts file of its own.

    Args:
        folder: made for it.
        more: further lines of its configuration.
        within: a command that runs the one behind it.
    """
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    (folder / "authorized").chmod(0o600)
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        f"AllowTcpForwarding no\nAllowStreamLocalForwarding no\nPrintMotd no\n{more}"
    )
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    command = [*within, str(SSHD), "-D", "-e", "-f", str(folder / "config")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            while b"listening" not in server.stderr.readline():
                assert server.poll() is None
            (folder / "client").write_text(f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n")
            yield SshHost(host="127.0.0.1", port=port, options=("-F", str(folder / "client")))
        finally:
            server.terminate()
