"""Two hosts on one machine: network namespaces, each with an address of its own, and a wire that anybody may tap.

A stage process builds the world in namespaces that end with it, imports torch once, and forks the ranks of each job
into their host. The hosts are joined twice: by a wire (10.77.0.0/24), and through somebody in the middle who has
either one's address on the other's side (10.78.0.0/24).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["GROUP_SECRET", "SIZE", "TwoHosts", "unavailable"]

GROUP_SECRET = bytes(range(64, 96))
SIZE = 4
PER_HOST = 2
STORE_PORT, FIRST_PORT = 29400, 29410  # below those that connections are given
WIRE, MIDDLE = "10.77.0", "10.78.0"
_HOSTS = (
    "".join(f"{net}.{host + 1} host{host}\n" for net in (WIRE, MIDDLE) for host in (0, 1)) + "127.0.0.1 localhost\n"
)
_CLONE_NEWNET = 0x40000000
_TESTS = Path(__file__).resolve().parents[1]
_SET_UP = [
    "ip netns add host0", "ip netns add host1", "ip netns add near0", "ip netns add near1",
    "ip link add wire0 netns host0 type veth peer name wire1 netns host1",
    "ip link add mid0 netns host0 type veth peer name eve0 netns near0",
    "ip link add mid1 netns host1 type veth peer name eve1 netns near1",
    f"ip -n host0 address add {WIRE}.1/24 dev wire0", f"ip -n host1 address add {WIRE}.2/24 dev wire1",
    f"ip -n host0 address add {MIDDLE}.1/24 dev mid0", f"ip -n host1 address add {MIDDLE}.2/24 dev mid1",
    # Whoever is in the middle is host 1 to host 0, and host 0 to host 1.
    f"ip -n near0 address add {MIDDLE}.2/24 dev eve0", f"ip -n near1 address add {MIDDLE}.1/24 dev eve1",
    "ip -n host0 link set wire0 up", "ip -n host1 link set wire1 up", "ip -n host0 link set lo up",
    "ip -n host1 link set lo up", "ip -n host0 link set mid0 up", "ip -n host1 link set mid1 up",
    "ip -n near0 link set eve0 up", "ip -n near1 link set eve1 up",
]  # fmt: skip


def _unshared() -> list[str]:
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--mount", "--net", "--"]


def unavailable() -> str | None:
    """Return why this machine cannot have two hosts, or None."""
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"two hosts need `{tool}` (iproute2, util-linux)"
    trial = "mount -t tmpfs tmpfs /run && ip netns add trial && ip link add veth0 type veth peer name veth1 netns trial"
    done = subprocess.run([*_unshared(), "sh", "-c", trial], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"this machine gives no namespaces: {done.stderr.strip() or 'refused'}"


class TwoHosts:
    """The stage, seen from the test."""

    def __enter__(self) -> TwoHosts:
        environment = dict(os.environ) | {"PYTHONPATH": f"{_TESTS}:{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(
            [*_unshared(), sys.executable, "-c", "from tools.two_hosts import stage; stage()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(self, job: str, folder: Path, **options: Any) -> dict[str, Any]:
        """Run a job on all ranks; return what each says, and what the taps counted.

        Options:
            backend: of the default group.
            attack: through the middle with this attack, or None for the wire.
            timeout_s: of the group.
            kept: another folder in which an attack keeps what it heard, for later jobs.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "job": job, **options}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError("the stage is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer


def stage() -> None:
    """Build the world; then run one job for each line of standard input."""
    # Imported once for every rank that is forked from here.
    from tools import two_host_jobs

    two_host_jobs.warm_up()

    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    # Names are looked up nowhere but here.
    Path("/run/hosts").write_text(_HOSTS)
    for file, at in (("/run/hosts", "/etc/hosts"), ("/dev/null", "/etc/resolv.conf")):
        subprocess.run(["mount", "--bind", file, os.path.realpath(at)], check=True)
    for command in _SET_UP:
        subprocess.run(command.split(), check=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _Play(Path(order.pop("folder")), **order).run()
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


def _enter(namespace: str) -> None:
    with open(f"/run/netns/{namespace}", "rb") as handle:  # noqa: PTH123
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


class _Play:
    """One job with its taps and whoever is in the middle."""

    def __init__(
        self,
        folder: Path,
        *,
        job: str,
        backend: str = "sealed",
        attack: str | None = None,
        timeout_s: float = 60.0,
        kept: str | None = None,
        limit_s: float = 60.0,
    ) -> None:
        self._folder, self._job, self._backend, self._attack = folder, job, backend, attack
        self._timeout_s, self._kept, self._limit_s = timeout_s, kept, limit_s
        self._context = multiprocessing.get_context("fork")

    def run(self) -> dict[str, Any]:
        taps = []
        if self._attack is None:
            taps = [self._fork(_tap, f"host{host}", self._folder / f"host{host}.packets") for host in (0, 1)]
        middle = None
        if self._attack is not None:
            middle = self._fork(_be_middle, "near1", self._attack, self._kept)
        for connection, _ in (*taps, *([middle] if middle else [])):
            connection.recv()
        ranks = [self._fork(_be_rank, f"host{rank // PER_HOST}", self._setting(rank)) for rank in range(SIZE)]
        try:
            answers = self._answers([connection for connection, _ in ranks])
            struck = self._ask(middle[0]) if middle else None
            return {"ranks": answers, "struck": struck, "taps": [self._ask(connection) for connection, _ in taps]}
        finally:
            for connection, process in (*ranks, *taps, *([middle] if middle else [])):
                with contextlib.suppress(OSError):
                    connection.send(None)  # the end of a pipe says nothing: every later child has a copy of ours
                connection.close()
                process.join(10 if process.is_alive() else 0)
                if process.is_alive():
                    process.kill()
                    process.join()

    def _setting(self, rank: int) -> dict[str, Any]:
        net = WIRE if self._attack is None else MIDDLE
        host = rank // PER_HOST
        sealed = {} if self._attack is None else {"GLASSHOUSE_SEALED_ADDRESS": f"{net}.{host + 1}:{FIRST_PORT + rank}"}
        environment = {
            "GLOO_SOCKET_IFNAME": f"{'wire' if self._attack is None else 'mid'}{host}",
            "LOCAL_RANK": str(rank % PER_HOST),
            "MASTER_ADDR": f"{net}.1",
            "MASTER_PORT": str(STORE_PORT),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "WORLD_SIZE": str(SIZE),
            **sealed,
        }
        return {
            "backend": self._backend,
            "environment": environment,
            "folder": self._folder,
            "job": self._job,
            "limit_s": self._limit_s,
            "timeout_s": self._timeout_s,
        }

    def _fork(self, work: Any, namespace: str, *arguments: Any) -> tuple[Connection, Any]:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_forked, args=(theirs, work, namespace, *arguments), daemon=True)
        process.start()
        theirs.close()
        return mine, process

    def _answers(self, connections: list[Connection]) -> list[Any]:
        deadline = time.monotonic() + self._limit_s
        answers = []
        for connection in connections:
            left = max(0.0, deadline - time.monotonic())
            try:
                answers.append(connection.recv() if connection.poll(left) else {"hung": True})
            except EOFError:
                answers.append({"broken": "the process ended without a word"})
        return answers

    @staticmethod
    def _ask(connection: Connection) -> Any:
        connection.send(None)
        return connection.recv() if connection.poll(30) else None


def _forked(connection: Connection, work: Any, namespace: str, *arguments: Any) -> None:
    try:
        _enter(namespace)
        work(connection, *arguments)
    except EOFError:  # the play is over
        pass
    except BaseException:
        connection.send({"broken": traceback.format_exc()})


def _tap(connection: Connection, path: Path) -> None:
    from tools.wire_capture import record

    packets, dropped = record(path, lambda: connection.send(None), connection.fileno())
    connection.send({"bytes": path.stat().st_size, "dropped": dropped, "packets": packets})


def _be_middle(connection: Connection, attack: str, kept: str | None) -> None:
    from tools.wire_middle import ATTACKS, Middle, MuteStore, Replay, Reroute

    listeners = {}
    for port in (STORE_PORT, *range(FIRST_PORT, FIRST_PORT + PER_HOST)):
        listeners[port] = socket.create_server((f"{MIDDLE}.1", port), backlog=64)
    _enter("near0")
    heard = Path(kept, "hellos.json") if kept else None
    memory: dict[tuple[int, int, int], bytes] = {}
    if heard is not None and heard.exists():
        memory = {tuple(place): bytes.fromhex(hello) for place, hello in json.loads(heard.read_text())}  # type: ignore[misc]
    if attack == "replay":
        play: Any = Replay(memory)
    elif attack == "reroute":
        play = Reroute((b" %d" % FIRST_PORT, b" %d" % (FIRST_PORT + 1)))
    elif attack == "mute-store":
        play = MuteStore(f"{MIDDLE}.1 {FIRST_PORT}".encode())
    else:
        play = ATTACKS[attack]()
    Middle(listeners, f"{MIDDLE}.1", STORE_PORT, play)
    connection.send(None)
    connection.recv()
    if heard is not None and memory:
        heard.write_text(json.dumps([[list(place), hello.hex()] for place, hello in memory.items()]))
    connection.send(play.struck.is_set())


def _be_rank(connection: Connection, setting: Mapping[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from glasshouse.collectives.secret import provide
    from glasshouse.errors import CollectiveError
    from tools.two_host_jobs import JOBS

    os.environ.update(setting["environment"])
    torch.set_num_threads(1)
    provide(GROUP_SECRET)
    rank, began = int(os.environ["RANK"]), time.monotonic()
    faulthandler.dump_traceback_later(setting["limit_s"] - 5)
    try:
        dist.init_process_group(setting["backend"], timeout=timedelta(seconds=setting["timeout_s"]))
        answer = JOBS[setting["job"]](rank, SIZE, setting["folder"])
        if "code" not in answer:
            dist.destroy_process_group()
    except CollectiveError as error:
        answer = {"code": error.code.value, "message": str(error), "type": "CollectiveError"}
    faulthandler.cancel_dump_traceback_later()
    connection.send({**answer, "rank": rank, "seconds": time.monotonic() - began})
    connection.recv()  # the store lives in rank 0 until every rank has answered
