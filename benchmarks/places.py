"""A machine that ssh reaches, beside this one, and under cuts and kills: ``make bench-places``.

Two hosts are made of this one: network namespaces with a link between them, and a real sshd in the second. What is
measured goes through the command line or, for the upload alone, through the place that the command line uses.

- F: the same job here and there in turn; the difference of what the commands take.
- Upload: of one file, in turn with ``ssh HOST 'cat > FILE'`` by the same client, server and cipher.
- Processor: what agent, sentinel and place take on the machine while it trains.
- Cuts: the link goes down again and again in one run; how long after it is up again the owner has something new.
- Kills: all of the owner's processes are killed (-9) at a random moment of a run; then one command finds it.

Only Linux, and as root.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gate_counts import Kept
from benchmarks.kept import Bar, finish, kept, options
from benchmarks.lifecycle import PROGRAM, SAMPLE_S, SETTLE_S, TIMEOUT_S, WORKER, Stage, cpu_s
from glasshouse.broker.store.broker_state import DATABASE_NAME
from glasshouse.jobs.owner.rundir import RunFolder
from glasshouse.jobs.places.known_machines import Machine, place_of
from glasshouse.providers.serve.keepers import KEEPER, boot
from glasshouse.providers.serve.runs import Runs
from glasshouse.providers.serve.uploads import Uploads

BARS = {
    "f_over_ssh_more_s": Bar(1.0),
    "upload_to_cat": Bar(1.1),
    "machine_cpu_percent": Bar(0.6),
    "back_after_cut_s": Bar(3.0),
    "cuts_lost_or_doubled": Bar(0.0),
    "kills_told_wrong": Bar(0.0),
    "kills_left_there": Bar(0.0),
    "kills_released_twice": Bar(0.0),
}
NEAR, FAR = "10.77.0.1", "10.77.0.2"
RESULT_BYTES = 8 << 20
SCRIPT = f"""\
import sys, time
from glasshouse import task
job, seconds = task.current(), float(sys.argv[1])
began, step = time.monotonic(), 0
while time.monotonic() - began < seconds:
    step += 1
    job.progress(step, loss=1 / step)
    time.sleep(0.05)
job.save_bytes("result.dat", bytes(range(256)) * {RESULT_BYTES // 256})
"""


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="of runs here and there, after one that is thrown away")
    parser.add_argument("--uploads", type=int, default=5, help="pairs, after one that is thrown away")
    parser.add_argument("--mib", type=int, default=1024, help="of the file that is sent")
    parser.add_argument("--train-seconds", type=float, default=60.0, help="while processor time is taken")
    parser.add_argument("--cuts", type=int, default=10, help="how often the link goes down")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how long each time")
    parser.add_argument("--kills", type=int, default=30, help="runs whose owner is killed; 0 leaves a part out")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    asked = parser.parse_args()
    if not sys.platform.startswith("linux") or os.geteuid():
        parser.error("this takes Linux, and root")
    if "GLASSHOUSE_BENCH_APART" not in os.environ:
        os.environ["GLASSHOUSE_BENCH_APART"] = "1"
        command = ["unshare", "--net", "--", sys.executable, "-m", "benchmarks.places", *sys.argv[1:]]
        return subprocess.run(command, check=False).returncode
    numbers: dict[str, float] = {}
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="glasshouse-bench-") as name, far_host(Path(name) / "ssh") as config:
        hosts = Hosts(Path(name), config)
        if asked.pairs:
            raw["pairs"] = [hosts.pair(turn) for turn in range(asked.pairs + 1)][1:]
            for where in ("local", "ssh"):
                numbers[f"command_{where}_s"] = statistics.median(pair[where] for pair in raw["pairs"])
            numbers["f_over_ssh_more_s"] = statistics.median(pair["ssh"] - pair["local"] for pair in raw["pairs"])
        if asked.uploads:
            raw["uploads"] = hosts.uploads(asked.uploads, asked.mib << 20)
            numbers["upload_to_cat"] = statistics.median(pair["place"] / pair["cat"] for pair in raw["uploads"])
            numbers["upload_mb_s"] = statistics.median(
                (asked.mib << 20) / 1e6 / pair["place"] for pair in raw["uploads"]
            )
        if asked.train_seconds:
            raw["training"] = hosts.train(asked.train_seconds)
            numbers["machine_cpu_percent"] = sum(raw["training"]["of_the_bar"].values())
            numbers |= {f"cpu_percent of {name}": each for name, each in raw["training"]["each"].items()}
        if asked.cuts:
            raw["cuts"] = hosts.cut(asked.cuts, asked.seconds)
            numbers["back_after_cut_s"] = max(raw["cuts"]["back_s"])
            numbers["cuts_lost_or_doubled"] = raw["cuts"]["lost_or_doubled"]
        if asked.kills:
            raw["kills"] = hosts.kill(asked.kills, random.Random(asked.seed))
            for what in ("told_wrong", "left_there"):
                numbers[f"kills_{what}"] = sum(len(one[what]) for one in raw["kills"])
            numbers["kills_released_twice"] = hosts.released_twice()
    bars = {name: bar for name, bar in BARS.items() if name in numbers}
    return finish(kept({name: round(found, 4) for name, found in numbers.items()}, bars, **raw), asked.output)


@contextmanager
def far_host(folder: Path) -> Iterator[Path]:
    """Run an sshd in a network namespace of its own, at the other end of a link; yields a configuration for ssh."""
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "known").write_text(f"{FAR} {(folder / 'host.pub').read_text()}")
    (folder / "server").write_text(
        f"Port 22\nListenAddress 0.0.0.0\nHostKey {folder}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/authorized\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
        "DisableForwarding yes\nPrintMotd no\n"
    )
    (folder / "client").write_text(f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin") or "sshd"
    command = ["unshare", "--net", "--", sshd, "-D", "-e", "-f", str(folder / "server")]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            while b"listening" not in server.stderr.readline():
                if server.poll() is not None:
                    raise RuntimeError("sshd does not start")
            far = f"nsenter --net=/proc/{server.pid}/ns/net ip "
            for line in (
                "ip link set lo up",
                f"ip link add near type veth peer name far netns {server.pid}",
                f"ip address add {NEAR}/24 dev near",
                "ip link set near up",
                far + f"address add {FAR}/24 dev far",
                far + "link set far up",
                far + "link set lo up",
            ):
                subprocess.run(line.split(), check=True)
            yield folder / "client"
        finally:
            server.terminate()


class Hosts(Stage):
    """A state home here, and a machine that it calls `lab`."""

    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(folder)
        self._there, self._config = folder / "there", config
        ways = {"python": sys.executable, "folder": str(self._there), "config": str(config)}
        self._ask(
            *("machine", "add", "lab", f"ssh://root@{FAR}"),
            *(word for name in ways for word in (f"--{name}", ways[name])),
        )

    def pair(self, turn: int) -> dict[str, float]:
        """Run the same job here and there, once in this order and once in the other."""
        took = {}
        for where in ("local", "ssh") if turn % 2 else ("ssh", "local"):
            summary, took[where] = self._run(self._quick, *(() if where == "local" else ("--on", "lab")))
            if summary["receipt"]["verdict"] != "good":
                raise RuntimeError(f"a measured run's receipt is {summary['receipt']['verdict']}")
        return took

    def uploads(self, count: int, size: int) -> list[dict[str, float]]:
        """Send one file in two ways, in turn."""
        file, block = self._folder / "large", os.urandom(min(size, 64 << 20))
        with file.open("wb") as out:
            for _ in range(0, size, len(block)):
                out.write(block)
        ways = {"place": self._upload, "cat": self._cat}
        found = []
        for turn in range(count + 1):
            took = {}
            for name in sorted(ways, reverse=turn % 2 == 1):
                os.sync()  # neither pays for what the other one wrote
                took[name] = ways[name](file)
            found.append(took)
        file.unlink()
        return found[1:]

    def _upload(self, file: Path) -> float:
        run, lab = self._folder / os.urandom(16).hex(), place_of(self._home, "lab")
        with closing(lab), closing(lab.run(run)) as placed:
            began = time.perf_counter()
            digest = placed.upload(file, lambda _sent, _size: None)
            took = time.perf_counter() - began
            if not Uploads(self._there / "files", boot=boot()).whole(digest, file.stat().st_size):
                raise RuntimeError("what was sent is not there")
            placed.remove(digest)
        return took

    def _cat(self, file: Path) -> float:
        goal = self._folder / "cat"
        host = Machine(url=f"ssh://root@{FAR}", config=str(self._config)).way()[0]
        with file.open("rb") as source:
            began = time.perf_counter()
            subprocess.run(host.command(["sh", "-c", f"cat > {goal}"], connect_s=10), stdin=source, check=True)
            took = time.perf_counter() - began
        goal.unlink()
        return took

    def train(self, seconds: float) -> dict[str, Any]:
        """Train for a while, and take the processor time of what is on the machine but the worker."""
        command = self._start(self._job("long", seconds + SETTLE_S + 4.0))
        try:
            run = self._running().run_id
            time.sleep(SETTLE_S)
            watched = self._watched(run)
            began, before = time.monotonic(), {name: cpu_s(process) for name, process in watched.items()}
            time.sleep(max(seconds, SAMPLE_S))
            elapsed_s = time.monotonic() - began
            each = {name: 100 * (cpu_s(process) - before[name]) / elapsed_s for name, process in watched.items()}
        finally:
            ended = command.wait(TIMEOUT_S)
        if ended:
            raise RuntimeError("the run that was sampled failed")
        of_the_bar = {name: share for name, share in each.items() if name != "sshd"}
        return {"each": each, "of_the_bar": of_the_bar, "seconds": elapsed_s}

    def _watched(self, run: str) -> dict[str, psutil.Process]:
        keeper = json.loads((self._there / "runs" / run / KEEPER).read_text())
        agent = psutil.Process(keeper["runtime"])
        serving = [one for one in psutil.process_iter() if self._serves(one)]
        if len(serving) != 1:
            raise RuntimeError(f"{len(serving)} processes serve the place")
        children = agent.children(recursive=True)
        others = [child for child in children if WORKER not in " ".join(child.cmdline())]
        if len(others) == len(children):
            raise RuntimeError("a run that trains without a worker")
        login = serving[0].parent()
        while login is not None and "sshd" not in login.name():
            login = login.parent()
        return {
            "place": serving[0],
            "keeper": psutil.Process(keeper["pid"]),
            "agent": agent,
            **{f"agent's child {number}": child for number, child in enumerate(others, 1)},
            **({} if login is None else {"sshd": login}),
        }

    def _serves(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            words = process.cmdline()
            return "glasshouse.providers.serve" in words and str(self._there) in words
        return False

    def cut(self, count: int, seconds: float) -> dict[str, Any]:
        """Cut the link again and again in one run; see when news come after it, and whether all came once."""
        command = self._start(self._job("cuts", count * (seconds + 6.0) + 5.0))
        back = []
        folder = self._running()
        for _ in range(count):
            time.sleep(3.0)
            self._link("down")
            time.sleep(seconds)
            known, began = folder.events.stat().st_size, time.monotonic()
            self._link("up")
            while folder.events.stat().st_size == known and time.monotonic() - began < TIMEOUT_S:
                time.sleep(0.01)
            back.append(time.monotonic() - began)
        ended = command.wait(TIMEOUT_S)
        # The log is verified against the receipt: of a log with an event too few or too many no root is the receipt's.
        wrong = [] if ended == 0 else [f"the run ended with {ended}"]
        wrong += self._wrong_with(folder.run_id)
        return {"back_s": back, "seconds": seconds, "lost_or_doubled": len(wrong), "wrong": wrong}

    def _wrong_with(self, run: str) -> list[str]:
        wrong, goal = [], self._folder / f"fetched-{run}"
        for command in (("verify", run), ("fetch", run, "-o", str(goal)), ("logs", run)):
            done = self._done(*command)
            if done.returncode:
                wrong.append(f"{command[0]}: {done.returncode}")
        digest = hashlib.sha256(bytes(range(256)) * (RESULT_BYTES // 256)).digest()
        result = goal / "result.dat"
        if not result.exists() or hashlib.sha256(result.read_bytes()).digest() != digest:
            wrong.append("the output is another")
        return wrong

    def kill(self, count: int, moments: random.Random) -> list[dict[str, Any]]:
        """Kill all of the owner's processes at a moment of each run, and see what one command makes of it."""
        job = self._job("kills", 3.0)
        began = time.monotonic()
        if self._start(job).wait(TIMEOUT_S):
            raise RuntimeError("a run that nothing happens to failed")
        whole_s = time.monotonic() - began
        return [
            self._killed(job, moments.uniform(0.0, whole_s), moments.choice(("attach", "stop"))) for _ in range(count)
        ]

    def _killed(self, job: Path, after_s: float, then: str) -> dict[str, Any]:
        before = {folder.run_id for folder in RunFolder.all(self._home)}
        command = self._start(job)
        time.sleep(after_s)
        self._kill_owner(psutil.Process(command.pid))
        command.wait()
        new = [folder for folder in RunFolder.all(self._home) if folder.run_id not in before]
        wrong: list[str] = []
        said: dict[str, Any] = {}
        if new:
            said, wrong = self._found(new[0].run_id, then)
        swept = self._ask("machine", "sweep", "lab")
        left = [name for name, _ in Runs(self._there / "runs")] + [path.name for path in self._there.glob("files/*")]
        left += [name for name in self._processes() if "glasshouse.runtime" in name]
        found = {"after_s": after_s, "then": then, "said": said, "swept": swept}
        found |= {"told_wrong": wrong, "left_there": left}
        print(json.dumps(found), file=sys.stderr, flush=True)
        return found

    def _kill_owner(self, command: psutil.Process) -> None:
        """Kill -9, all at once: the command, its ssh, and the broker."""
        victims = []
        with suppress(psutil.Error):
            victims = [*command.children(recursive=True), command]
        with suppress(OSError, ValueError, psutil.Error):
            serving = json.loads((self._home.broker / "serving.json").read_text())
            broker = psutil.Process(serving["process"]["pid"])
            victims += [*broker.children(recursive=True), broker]
        for process in victims:
            with suppress(psutil.Error):
                process.suspend()
        for process in victims:
            with suppress(psutil.Error):
                process.kill()

    def _found(self, run: str, then: str) -> tuple[dict[str, Any], list[str]]:
        """Look, and then attach or stop; return what was said, and what of it was not so."""
        wrong = []
        started = dict(Runs(self._there / "runs"))
        there = run in started and started[run].ended() is None
        status = self._ask("status", run)
        if there and status.get("phase") not in ("unattended", "running"):
            wrong.append(f"status says {status.get('phase')} of a run that goes on")
        done = self._done(then, run)
        ended = json.loads(done.stdout or "{}")
        outcome, receipt = ended.get("outcome"), ended.get("receipt") or {}
        allowed = {"completed"} if then == "attach" else {"completed", "interrupted"}
        # One that is stopped before it was attested has no word of the broker's.
        if there and (outcome not in allowed or receipt.get("verdict") not in ("good", "not-completed", "incomplete")):
            wrong.append(f"{then}: {done.returncode} {outcome} {receipt.get('verdict')} {ended.get('problem')}")
        if outcome is None:
            wrong.append(f"{then} tells no outcome: {done.returncode} {(done.stdout + done.stderr)[-300:]}")
        again = self._ask("status", run)
        if again.get("outcome") != outcome:
            wrong.append(f"status says {again.get('outcome')} after {then} said {outcome}")
        return {"status": status.get("phase"), "outcome": outcome, "verdict": receipt.get("verdict")}, wrong

    def released_twice(self) -> int:
        """Return how many runs have more than one release in the broker's database, or in its audit log."""
        found = Kept.read(self._home.broker / "data" / DATABASE_NAME)
        if not found.chain_holds:
            raise RuntimeError("the broker's audit log is broken")
        runs = [run for _, run, _ in found.releases]
        audited = [run for _, run in found.audited]
        return sum(len(each) - len(set(each)) for each in (runs, audited))

    def _processes(self) -> list[str]:
        """Return the command lines that name the machine's folder."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if str(self._there) in line:
                    found.append(line)
        return found

    def _job(self, name: str, seconds: float) -> Path:
        (self._folder / "train.py").write_text(SCRIPT)
        return self._seal(name, seconds)

    def _start(self, package: Path) -> subprocess.Popen[bytes]:
        command = [*PROGRAM, "run", str(package), "--on", "lab", "--home", str(self._home.path), "--json"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def _done(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*PROGRAM, *arguments, "--home", str(self._home.path), "--json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5 * TIMEOUT_S, check=False)

    def _link(self, state: str) -> None:
        subprocess.run(["ip", "link", "set", "near", state], check=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
