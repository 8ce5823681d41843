"""The sandbox of several ranks: a network that leads nowhere, what is tried to show it, and where there is none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from glasshouse.attestation.claims import CheckResult
from glasshouse.runtime.kernel import CLONE_NEWNET, CLONE_NEWPID, REAL, Kernel
from glasshouse.runtime.syscalls import KernelError
from tools.forked import in_child
from tools.machine import HALF_ISOLATED, needs_filters, needs_landlock, needs_namespaces, needs_root
from tools.sandboxed import run

pytestmark = needs_filters

TRIED = {"debug-env-clean", "egress-closed", "landlock", "metadata-closed", "preload-clean", "seccomp-filter"}

TALK = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
caller = socket.create_connection(listener.getsockname(), timeout=5)
caller.send(b"to another rank")
print(listener.accept()[0].recv(32).decode())
six = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
socket.create_connection(("localhost", six.getsockname()[1]), timeout=5)
print(six.accept()[1][0])
"""
ESCAPE = """
import ctypes, errno, fcntl, json, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
tcp, udp, abstract, here = TARGETS
def tried(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)
    return "done"
def call(name, *arguments):
    def made():
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)
    return made
def send(address, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as one:
        one.connect(address)
        one.send(b"out")
        one.settimeout(1)
        one.recv(1)
def up():
    with socket.socket() as one:
        fcntl.ioctl(one.fileno(), 0x8914, struct.pack("16sH22x", b"lo", 0x49))
def address():
    with socket.socket() as one:
        request = b"lo".ljust(16, bytes(1)) + struct.pack("<HH4s8x", 2, 0, bytes([10, 0, 0, 9]))
        fcntl.ioctl(one.fileno(), 0x8916, request)
print(json.dumps({
    "agent's tcp": tried(lambda: socket.create_connection(("127.0.0.1", tcp), timeout=1)),
    "agent's udp": tried(lambda: send(("127.0.0.1", udp))),
    "agent's abstract": tried(lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + abstract)),
    "machine's own address": tried(lambda: send((here, 9))),
    "metadata": tried(lambda: socket.create_connection(("169.254.169.254", 80), timeout=1)),
    "resolver": tried(lambda: send(("8.8.8.8", 53))),
    "six": tried(lambda: send(("2001:4860:4860::8888", 53), socket.AF_INET6)),
    "neighbours": tried(lambda: send(("fe80::1", 53, 0, 1), socket.AF_INET6)),
    "multicast": tried(lambda: send(("224.0.0.251", 5353))),
    "netlink": tried(lambda: socket.socket(16, socket.SOCK_RAW, 0)),
    "packet": tried(lambda: socket.socket(17, socket.SOCK_RAW, 0)),
    "vsock": tried(lambda: socket.socket(40, socket.SOCK_STREAM)),
    "raw": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
    "ping": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)),
    "mptcp": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)),
    "interface": tried(up), "address": tried(address),
    "another network": tried(call("unshare", 0x40000000)), "the agent's network": tried(call("setns", 0, 0)),
    "user namespace": tried(call("unshare", 0x10000000)), "mount": tried(call("mount", b"x", b"/", b"sysfs", 0, 0)),
}))
"""
CLOSED = {
    "agent's tcp": {"ECONNREFUSED"}, "agent's udp": {"ECONNREFUSED"}, "agent's abstract": {"ECONNREFUSED", "EPERM"},
    "netlink": {"EAFNOSUPPORT"}, "packet": {"EAFNOSUPPORT"}, "vsock": {"EAFNOSUPPORT"}, "raw": {"EAFNOSUPPORT"},
    "ping": {"EAFNOSUPPORT"}, "mptcp": {"EAFNOSUPPORT"}, "interface": {"EPERM"}, "address": {"EPERM"},
    "another network": {"EPERM"}, "the agent's network": {"EPERM"}, "user namespace": {"EPERM"}, "mount": {"EPERM"},
}  # fmt: skip
NO_ROUTE = {"ENETUNREACH", "EADDRNOTAVAIL", "EHOSTUNREACH", "EINVAL"}


@needs_namespaces
@needs_landlock
def test_ranks_talk_to_each_other_and_every_trial_passes() -> None:
    ran = run(TALK, loopback=True)
    assert (ran.errors, ran.exit_code) == ("", 0)
    assert ran.output.splitlines() == ["to another rank", "::ffff:127.0.0.1"]
    assert ran.passed() == TRIED
    assert "loopback" in ran.report.notes
    assert not [note for note in ran.report.notes if note.startswith(("no-", "open-", "reached-", "unproven-"))]


@needs_namespaces
def test_a_run_in_one_process_still_has_no_internet_socket_at_all() -> None:
    ran = run("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)")
    assert "Address family not supported" in ran.errors
    assert "loopback" not in ran.report.notes


@needs_namespaces
@needs_landlock
def test_a_rank_that_tries_to_get_out_gets_nowhere() -> None:
    """Listeners outside that would answer, on the loopback and on the machine's own address; and every other way."""

    def story() -> tuple[dict[str, str], list[bool]]:
        with (
            socket.create_server(("127.0.0.1", 0)) as tcp,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as abstract,
        ):
            udp.bind(("127.0.0.1", 0))
            abstract.bind(f"\0rank-{os.getpid()}")
            abstract.listen()
            here = own_address()
            targets = (tcp.getsockname()[1], udp.getsockname()[1], f"rank-{os.getpid()}", here)
            code = ESCAPE.replace("TARGETS", repr(targets))
            ran = run(code, loopback=True)
            assert ran.errors == ""
            return json.loads(ran.output), [arrived(one) for one in (tcp, udp, abstract)]

    tried, reached = story()
    assert reached == [False, False, False]
    for name, answer in tried.items():
        assert answer in CLOSED.get(name, NO_ROUTE), (name, answer)


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 9))
        except OSError:
            return "192.0.2.7"  # a machine without a network: any address that is not its own does
        return str(one.getsockname()[0])


def arrived(listener: socket.socket) -> bool:
    listener.settimeout(0)
    try:
        listener.recv(16) if listener.type == socket.SOCK_DGRAM else listener.accept()
    except BlockingIOError:
        return False
    return True


class SharesTheNetwork(Kernel):
    """Says that it made a network namespace, and did not."""

    def unshare(self, flags: int) -> None:
        if flags != CLONE_NEWNET:
            super().unshare(flags)


QUIET = """
import fcntl, socket
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
with socket.socket() as tcp:
    key = refused(tcp.setsockopt, socket.IPPROTO_TCP, 14, bytes(216))
    print(open('/proc/sys/net/ipv4/tcp_syncookies').read().strip(), key, refused(fcntl.ioctl, tcp.fileno(), 0x8940))
"""


@needs_namespaces
@needs_filters
def test_ranks_put_nothing_of_their_choice_into_the_machines_log() -> None:
    """Each flood of connections was logged with a port and an address that the script had chosen."""
    ran = run(QUIET, loopback=True)
    assert ran.output == f"2 {errno.EPERM} {errno.EPERM}\n", ran.errors
    assert "floods-logged" not in ran.report.notes
    own = Path("/proc/sys/net/ipv4/tcp_syncookies")
    before = own.read_text()
    assert "floods-logged" in run("pass", kernel=SharesTheNetwork(), loopback=True).report.notes
    assert own.read_text() == before, "the machine's own setting is not touched"


@needs_root
@needs_namespaces
def test_ranks_on_the_machines_own_network_are_found_out_from_both_sides() -> None:
    ran = run("pass", kernel=SharesTheNetwork(), loopback=True)
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert {"open-tcp", "open-udp", "reached-tcp", "reached-udp"} <= set(ran.report.notes)


class Connected(Kernel):
    """Makes a network namespace that has a second interface, which is up, and a route to anywhere through it."""

    def unshare(self, flags: int) -> None:
        if flags == CLONE_NEWPID:  # the last moment at which a program can be run that is not the namespace's first
            super().unshare(CLONE_NEWNET)
            for command in INTERFACE:
                subprocess.run(command.split(), check=True)
        if flags != CLONE_NEWNET:
            super().unshare(flags)


INTERFACE = (
    "ip link add glass0 type veth peer name glass1",
    "ip addr add 10.77.0.2/24 dev glass0",
    "ip link set glass1 up",
    "ip link set glass0 up",
    "ip route add default dev glass0",
)


def second_interfaces() -> bool:
    def make() -> bool:
        REAL.unshare(CLONE_NEWNET)
        return subprocess.run(INTERFACE[0].split(), capture_output=True, check=False).returncode == 0

    return os.geteuid() == 0 and (shutil.which("ip") is None or in_child(make))


@needs_root
@needs_namespaces
@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no `ip` (iproute2)")
@pytest.mark.skipif(not second_interfaces(), reason="this machine gives no second network interface")
def test_an_interface_besides_the_loopback_is_found_and_so_is_its_route() -> None:
    ran = run("pass", kernel=Connected(), loopback=True)
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert {"open-interface", "open-udp-route", "open-tcp-route"} <= set(ran.report.notes)


class KeepsNetworkControl(Kernel):
    """Gives no capability back: a rank could then add what it likes to its network."""

    def drop_capabilities(self, keep: tuple[int, ...] = ()) -> None:
        pass


@needs_root
@needs_namespaces
def test_a_rank_that_could_change_its_network_is_not_called_closed() -> None:
    ran = run("pass", kernel=KeepsNetworkControl(), loopback=True)
    assert ran.report.observed["egress-closed"] is CheckResult.FAILED
    assert "open-network-control" in ran.report.notes


@needs_namespaces
@pytest.mark.parametrize("lacking", HALF_ISOLATED)
def test_where_ranks_cannot_be_kept_in_there_is_no_network_for_them(lacking: str) -> None:
    ran = run("import socket; socket.socket()", kernel=HALF_ISOLATED[lacking], loopback=True)
    assert lacking in ran.report.notes
    assert "loopback" not in ran.report.notes
    assert "Address family not supported" in ran.errors
    assert "egress-closed" in ran.passed()


# how the worker knows its ranks there


CHILDREN = """
import os, subprocess, sys
from glasshouse.workloads.process.undumpable import close_to_others
from glasshouse.workloads.distributed.rank_server import is_closed_child
close_to_others()
closing = "from glasshouse.workloads.process.undumpable import close_to_others; close_to_others();"
for before in (closing, ""):
    command = [sys.executable, "-I", "-B", "-c", before + "print(flush=True); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(is_closed_child(child.pid, or_open=False), is_closed_child(child.pid, or_open=True))
    child.kill()
print(is_closed_child(os.getpid(), or_open=True), is_closed_child(4_000_000, or_open=True))
"""


class ShowsTheMachinesProcesses(Kernel):
    """A container that forbids a fresh /proc: the machine's own is shown, with other numbers."""

    def mount(self, source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        if kind == "proc":
            raise KernelError(f"mount {target}", 1)
        super().mount(source, target, kind, flags, data)


@needs_namespaces
@pytest.mark.parametrize("kernel", [None, ShowsTheMachinesProcesses()], ids=["own /proc", "the machine's /proc"])
def test_a_child_is_known_by_its_parent_and_read_unless_it_is_closed(kernel: Kernel | None) -> None:
    argv = (sys.executable, "-I", "-B", "-c", CHILDREN, "{workspace}")
    ran = run(CHILDREN, kernel=kernel, loopback=True, argv=argv)
    assert (ran.errors, ran.output.splitlines()) == ("", ["True True", "False True", "False False"])
