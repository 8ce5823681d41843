"""The network of a job with several ranks: a network namespace of the worker's own, in which only `lo` is up.

For the launcher, between making the namespace and giving up the capability that this takes; `trials.egress` then tries
to leave. Law: this is not called where the namespace is missing, so that the machine's own `lo` is never touched.
"""

from __future__ import annotations

import _socket
import fcntl

from glasshouse.runtime.kernel import Kernel

_NAME = "lo"
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
_NAME_BYTES = 16
_REQUEST_BYTES = 40  # struct ifreq
_LISTED = "/proc/self/net/dev"
_COOKIES = "/proc/sys/net/ipv4/tcp_syncookies"  # of this process's network namespace


def raise_up() -> None:
    """Bring `lo` up, which gives it 127.0.0.1 and ::1; raises `OSError`."""
    _ask(_SIOCSIFFLAGS, _NAME, _flags(_NAME) | _IFF_UP)


def keep_quiet() -> None:
    """Let the kernel log no flood of connections, whose addresses a script would choose; raises `OSError`."""
    with open(_COOKIES, "w") as file:  # noqa: PTH123 - pathlib is slow to import
        file.write("2")


def controllable() -> bool:
    """Return whether this process could still change the network: to be tried when it may no longer."""
    try:
        _ask(_SIOCSIFFLAGS, _NAME, _flags(_NAME))
    except OSError:
        return False
    return True


def strays(kernel: Kernel) -> list[str]:
    """Return the interfaces besides `lo` that are up; some kernels make tunnels, which are down, in every namespace."""
    lines = kernel.read(_LISTED).decode("ascii", "replace").splitlines()[2:]
    names = [line.partition(":")[0].strip() for line in lines]
    return [name for name in names if name != _NAME and _flags(name) & _IFF_UP]


def _flags(name: str) -> int:
    return int.from_bytes(_ask(_SIOCGIFFLAGS, name, 0)[_NAME_BYTES : _NAME_BYTES + 2], "little")


def _ask(request: int, name: str, flags: int) -> bytes:
    encoded = name.encode("ascii", "replace").ljust(_NAME_BYTES, b"\0")
    if len(encoded) != _NAME_BYTES:
        raise OSError("an interface with a name that is too long")
    argument = (encoded + flags.to_bytes(2, "little")).ljust(_REQUEST_BYTES, b"\0")
    control = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        return fcntl.ioctl(control.fileno(), request, argument)
    finally:
        control.close()
